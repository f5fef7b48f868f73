"""What crosses from trainer to rollout workers: one piece a trainer rank, for each update.

A piece is a safetensors file behind a checksum: nothing in it is unpickled or executed.

    8 bytes   b"LOGRA\\0\\0\\1"
    32 bytes  SHA-256 of what follows
    …         safetensors; its metadata holds `header` and `blocks` as JSON

Each tensor is a block of a whole tensor: some ranges along one of its dimensions. So the pieces of
any trainer layout make up the whole, and a receiver of any other layout takes what it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import safetensors.torch
import torch
from safetensors import SafetensorError

from megatron_logra.model.safetensors_io import file_head

MAGIC = b"LOGRA\0\0\1"
_PREFIX = len(MAGIC) + 32
Kind = Literal["update", "refresh"]
Use = Literal["factor", "weight", "audit"]
Ranges = tuple[tuple[int, int], ...]
Piece = bytes | bytearray | memoryview


class PayloadError(ValueError):
    """A piece, or a set of pieces, that is not what a sender wrote."""


@dataclass(frozen=True)
class Header:
    """What a piece belongs to."""

    kind: Kind
    """`update`: factors to apply to `previous`; `refresh`: whole weights."""
    run: str
    """Which start of the trainer sent it: versions count within one."""
    version: int
    """The weights' version once it is applied: the number of updates."""
    previous: int
    """Version it applies to; for a refresh, its own."""
    seed: int
    """Seed of the projections."""
    draw: int
    """Which draw of the projections the factors go with."""
    rank: int
    """Sketch rank r."""
    distribution: str
    """Of the projections' entries."""
    decay: float
    """W ← decay · W - factor · A."""
    piece: int
    """Number of this piece."""
    pieces: int
    """How many there are."""


@dataclass(frozen=True)
class Block:
    """A part of a whole tensor."""

    use: Use
    """`factor`: rows of α·D [d, r]; `weight`: of a parameter; `audit`: rows of a weight as the
    trainer computes with it."""
    name: str
    """Name of the whole tensor's module or parameter in the whole model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    axis: int
    """Dimension that `ranges` divides."""
    ranges: Ranges
    """[start, stop) along `axis`, in the order in which `tensor` has them."""
    tensor: torch.Tensor
    """The block's values."""


def encode(header: Header, blocks: Iterable[Block]) -> bytearray:
    """A piece as bytes, in memory once: weights are too many to be copied about."""
    blocks = list(blocks)
    described = ("use", "name", "shape", "axis", "ranges")
    table = [{key: getattr(block, key) for key in described} for block in blocks]
    metadata = {"header": json.dumps(asdict(header)), "blocks": json.dumps(table)}
    tensors = [block.tensor for block in blocks]
    head = file_head([(str(n), tuple(t.shape), t.dtype) for n, t in enumerate(tensors)], metadata)
    place = _PREFIX + len(head)
    piece = bytearray(place + sum(tensor.nbytes for tensor in tensors))
    piece[_PREFIX:place] = head
    whole = torch.frombuffer(piece, dtype=torch.uint8)
    for tensor in tensors:
        end = place + tensor.nbytes
        whole[place:end].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        place = end
    piece[:_PREFIX] = MAGIC + hashlib.sha256(memoryview(piece)[_PREFIX:]).digest()
    return piece


def decode(data: Piece) -> tuple[Header, list[Block]]:
    """The header and blocks of a piece.

    Raises:
        PayloadError: it is truncated, altered, or something else.
    """
    view = memoryview(data)
    if view[: len(MAGIC)] != MAGIC:
        raise PayloadError("not a synchronisation payload")
    body = view[_PREFIX:]
    if hashlib.sha256(body).digest() != view[len(MAGIC) : _PREFIX]:
        raise PayloadError(f"checksum of a payload of {len(data)} bytes does not match")
    try:
        length = int.from_bytes(body[:8], "little")
        metadata = json.loads(bytes(body[8 : 8 + length]))["__metadata__"]
        tensors = safetensors.torch.load(bytes(body))
        header = Header(**json.loads(metadata["header"]))
        blocks = [
            Block(
                use=entry["use"],
                name=entry["name"],
                shape=tuple(entry["shape"]),
                axis=entry["axis"],
                ranges=tuple((start, stop) for start, stop in entry["ranges"]),
                tensor=tensors[str(number)],
            )
            for number, entry in enumerate(json.loads(metadata["blocks"]))
        ]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PayloadError(f"payload cannot be read: {error}") from None
    return header, blocks


@dataclass(frozen=True)
class Payload:
    """All pieces of one update or refresh, checked against each other."""

    header: Header
    blocks: dict[tuple[Use, str], list[Block]]
    """Blocks by use and name."""
    nbytes: int
    """Bytes of all pieces."""


def assemble(pieces: Sequence[Piece]) -> Payload:
    """Put the pieces of one version together, in any order.

    Raises:
        PayloadError: a piece is damaged, missing, there twice, or of another version.
    """
    if not pieces:
        raise PayloadError("no pieces")
    decoded = [decode(piece) for piece in pieces]
    first = decoded[0][0]
    numbers = sorted(header.piece for header, _ in decoded)
    if numbers != list(range(first.pieces)):
        raise PayloadError(f"version {first.version}: has pieces {numbers} of {first.pieces}")
    expected = {**asdict(first), "piece": 0}
    for header, _ in decoded:
        if {**asdict(header), "piece": 0} != expected:
            raise PayloadError(
                f"version {first.version}: piece {header.piece} is of version {header.version}, "
                "or of another run"
            )
    blocks: dict[tuple[Use, str], list[Block]] = {}
    for _, some in decoded:
        for block in some:
            blocks.setdefault((block.use, block.name), []).append(block)
    return Payload(first, blocks, sum(map(len, pieces)))


def join(blocks: list[Block]) -> torch.Tensor:
    """The whole tensor that `blocks` make up.

    Raises:
        PayloadError: a part of it is missing, or there twice.
    """
    first = blocks[0]
    whole = torch.empty(first.shape, dtype=first.tensor.dtype)
    covered = torch.zeros(first.shape[first.axis], dtype=torch.int8)
    for block in blocks:
        if (block.shape, block.axis) != (first.shape, first.axis):
            raise PayloadError(f"{first.name}: blocks of different tensors")
        done = 0
        for start, stop in block.ranges:
            size = stop - start
            whole.narrow(block.axis, start, size).copy_(block.tensor.narrow(block.axis, done, size))
            covered[start:stop] += 1
            done += size
    if not bool((covered == 1).all()):
        raise PayloadError(f"{first.name}: parts are missing, or there twice")
    return whole
