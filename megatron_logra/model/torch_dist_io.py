"""Megatron's distributed checkpoints piece by piece, in one process and without process groups.

Megatron saves and loads a whole state dictionary. Here tensors are made when they are written, and
read a slice at a time, by torch's own writer and reader of that format.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_logra.errors import UserError

Place = tuple[str, int | None]
"""Key of a tensor in a checkpoint, and the layer's number where all layers share the key."""


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that are made when their turn to be written comes."""

    place: Place
    shape: tuple[int, ...]
    """Of the whole parameter."""
    first: int
    """Its first row here."""
    rows: int
    """Number of rows."""
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write(directory: Path, pieces: Sequence[Piece], layers: int) -> None:
    """Write a checkpoint of `pieces`, which are made in their order and freed at once.

    Args:
        directory: where to; it exists and is empty.
        pieces: all parameters of the model.
        layers: number of the model's layers.
    """
    common = io.BytesIO()
    torch.save([{}], common)  # what is not sharded: nothing
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    sources: _Sources = {(key, None): lambda: common}
    items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    for piece in pieces:
        name, layer = piece.place
        first = () if layer is None else (layer,)
        offset = (*first, piece.first, *(0 for _ in piece.shape[1:]))
        chunk = (*(1 for _ in first), piece.rows, *piece.shape[1:])
        whole = (*(layers for _ in first), *piece.shape)
        sources[name, offset] = partial(_make, piece, chunk)
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk)),
            TensorProperties(dtype=piece.dtype),
            torch.Size(whole),
        )
        index = MetadataIndex(name, torch.Size(offset))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    # Nothing is copied ahead, so one piece exists at a time.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(SavePlan(items))])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, _Making(sources)).wait()])
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


_Sources = dict[tuple[str, tuple[int, ...] | None], Callable[[], Any]]


class _Making(DefaultSavePlanner):
    """Makes each piece when the writer asks for it."""

    def __init__(self, sources: _Sources) -> None:
        super().__init__()
        self.sources = sources

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The piece that `write_item` stands for."""
        offset = write_item.index.offset
        return self.sources[write_item.index.fqn, None if offset is None else tuple(offset)]()


def _make(piece: Piece, shape: tuple[int, ...]) -> Tensor:
    return piece.make().reshape(shape)


class _Filling(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that is to be filled."""
        part = self.target
        pairs = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(pairs):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in place already."""


class Reader:
    """The tensors of a checkpoint.

    Args:
        directory: the checkpoint, whose files have been compared with their hashes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)

    def require(self, place: Place, shape: tuple[int, ...], layers: int) -> torch.dtype:
        """Check that a parameter is there; the padding of a vocabulary may follow its rows.

        Returns:
            Its type.

        Raises:
            UserError: it is not, or has another shape.
        """
        key, layer = place
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(f"{self.directory}: {key} is missing")
        size = tuple(found.size)
        own = size if layer is None else size[1:]
        padded = "embedding" in key or "output_layer" in key
        fits = own == shape or (padded and own[1:] == shape[1:] and own[0] >= shape[0])
        if not fits or (layer is not None and size[0] != layers):
            raise UserError(
                f"{self.directory}: {key} is {list(size)}, expected "
                f"{list(shape if layer is None else (layers, *shape))}"
            )
        return found.properties.dtype

    def read(self, place: Place, shape: tuple[int, ...], first: int = 0) -> Tensor:
        """Rows `first` … `first + shape[0] - 1` of a parameter, a tensor of `shape`."""
        key, layer = place
        metadata = self._metadata.state_dict_metadata[key]
        assert isinstance(metadata, TensorStorageMetadata)
        prefix = () if layer is None else (layer,)
        chunk = ChunkStorageMetadata(
            torch.Size((*prefix, first, *(0 for _ in shape[1:]))),
            torch.Size((*(1 for _ in prefix), *shape)),
        )
        target = torch.empty(chunk.sizes, dtype=metadata.properties.dtype)
        items = create_read_items_for_chunk_list(key, metadata, [chunk])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise UserError(f"{self.directory}: {key} has gaps")
        self._reader.read_data(LoadPlan(items), _Filling(target)).wait()
        return target.reshape(shape)
