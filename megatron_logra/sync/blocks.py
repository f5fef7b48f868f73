"""Which parts of a whole tensor a tensor-parallel rank holds, and blocks made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_logra.model.parameters import EMBEDDING, named_parameters, whole_shape
from megatron_logra.sketch.capture import Target
from megatron_logra.sync.payload import Block, Ranges


def own_ranges(size: int, stride: int, rank: int, ranks: int) -> Ranges:
    """Where the indices that a rank holds of a divided dimension lie in the whole.

    Args:
        size: of the whole dimension.
        stride: Megatron's partition_stride: each rank holds a part of so many equal pieces.
        rank: which of `ranks`.
    """
    part = size // (stride * ranks)
    starts = [(number * ranks + rank) * part for number in range(stride)]
    return tuple((start, start + part) for start in starts)


def indices(ranges: Ranges) -> torch.Tensor:
    """All indices in `ranges`, int64."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def factor_rows(target: Target, pg: ProcessGroupCollection) -> Ranges:
    """Rows of a target's whole D that are in its proxy on this rank."""
    size = target.rows * pg.tp.size()
    return own_ranges(
        size, 1 if target.row_parallel else target.strided, pg.tp.rank(), pg.tp.size()
    )


def weight_ranges(target: Target, pg: ProcessGroupCollection) -> Ranges:
    """Rows (or columns, if row-parallel) of a target's whole W that are on this rank."""
    tp = pg.tp
    if target.row_parallel:
        return own_ranges(target.columns * tp.size(), 1, tp.rank(), tp.size())
    return own_ranges(target.weight.shape[0] * tp.size(), target.strided, tp.rank(), tp.size())


def whole_target(target: Target, pg: ProcessGroupCollection) -> tuple[int, int]:
    """Shape (d, k) of a target's whole W."""
    rows, columns = target.weight.shape
    size = pg.tp.size()
    return (rows, columns * size) if target.row_parallel else (rows * size, columns)


def parameters_of(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of model chunks by their names in the whole model; a tied weight's copy as such.

    The last pipeline stage's copy of a tied embedding has the embedding's name.
    """
    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            yield (EMBEDDING if tied else name), parameter


def parameter_block(
    name: str, parameter: torch.nn.Parameter, value: torch.Tensor, pg: ProcessGroupCollection
) -> Block | None:
    """This rank's part of a parameter; None where another tensor-parallel rank sends the same."""
    shape = whole_shape(parameter, pg.tp.size())
    if not getattr(parameter, "tensor_model_parallel", False):
        whole: Ranges = ((0, shape[0]),)
        return Block("weight", name, shape, 0, whole, value) if pg.tp.rank() == 0 else None
    axis = parameter.partition_dim  # type: ignore[attr-defined]
    stride = parameter.partition_stride  # type: ignore[attr-defined]
    size = parameter.shape[axis] * pg.tp.size()
    ranges = own_ranges(size, stride, pg.tp.rank(), pg.tp.size())
    if size > shape[axis]:  # a vocabulary's padding does not travel
        ranges = tuple((start, min(stop, shape[axis])) for start, stop in ranges)
        value = value[: max(0, ranges[0][1] - ranges[0][0])]
        if not len(value):
            return None
    return Block("weight", name, shape, axis, ranges, value)
