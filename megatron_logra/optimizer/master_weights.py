"""fp32 precision for weights that are computed with in bf16.

Sketch updates are tiny against the weights, so they must accumulate in fp32. There are three
holders with one interface: the weight itself where it is fp32; an fp32 master beside it
(`sharded`); or the low 16 bits that bf16 lacks (`replicated`), from which the exact fp32 is put
together while it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import distributed as dist

_CPU_BLOCK = 2**18
"""Elements of a weight that a CPU updates at once, since its caches hold them; GPUs take all."""


class MasterWeight(Protocol):
    """The fp32 value of one weight [d, k]."""

    def update(self, factor: torch.Tensor, projection_t: torch.Tensor, decay: float) -> None:
        """W ← decay · W - factor · projection_tᵀ; factor [d, r] and projection_t [k, r] fp32."""

    def value(self) -> torch.Tensor:
        """The fp32 weight [d, k]; may share memory with the master."""

    def load(self, value: torch.Tensor) -> None:
        """Set the fp32 weight, and the weight the model computes with."""

    @property
    def nbytes(self) -> int:
        """Bytes held besides the weight."""


class Fp32Weight:
    """An fp32 weight is its own master."""

    nbytes = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def update(self, factor: torch.Tensor, projection_t: torch.Tensor, decay: float) -> None:
        """See `MasterWeight.update`."""
        for rows in _blocks(self.weight):
            self.weight[rows].addmm_(factor[rows], projection_t.t(), beta=decay, alpha=-1)

    def value(self) -> torch.Tensor:
        """See `MasterWeight.value`."""
        return self.weight

    def load(self, value: torch.Tensor) -> None:
        """See `MasterWeight.load`."""
        self.weight.copy_(value)


class Fp32Master:
    """A bf16 weight with an fp32 copy beside it (4 more bytes per parameter).

    Data-parallel ranks each keep the copy of an equal part of the rows (ZeRO-1), and gather the
    bf16 rows of the others.
    """

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.weight = weight
        self.group = group
        share = -(-len(weight) // group.size())
        bounds = [min(share * i, len(weight)) for i in range(group.size() + 1)]
        self.parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self.master = weight[self._own].float()

    @property
    def _own(self) -> slice:
        return self.parts[self.group.rank()]

    @property
    def nbytes(self) -> int:
        """See `MasterWeight.nbytes`."""
        return self.master.numel() * 4

    def update(self, factor: torch.Tensor, projection_t: torch.Tensor, decay: float) -> None:
        """See `MasterWeight.update`."""
        own, factor = self.weight[self._own], factor[self._own]
        for rows in _blocks(self.master):
            master = self.master[rows]
            master.addmm_(factor[rows], projection_t.t(), beta=decay, alpha=-1)
            # Rounded like `Remainder` does it: every holder of a weight has the same bf16 value.
            own[rows] = nearest_bf16(master)
        _gather_rows(self.weight, self.parts, self.group)

    def value(self) -> torch.Tensor:
        """See `MasterWeight.value`."""
        if self.group.size() == 1:
            return self.master
        whole = torch.empty_like(self.weight, dtype=torch.float32)
        whole[self._own] = self.master
        _gather_rows(whole, self.parts, self.group)
        return whole

    def load(self, value: torch.Tensor) -> None:
        """See `MasterWeight.load`."""
        self.master.copy_(value[self._own])
        self.weight[self._own] = nearest_bf16(self.master)
        _gather_rows(self.weight, self.parts, self.group)


def _gather_rows(tensor: torch.Tensor, parts: list[slice], group: dist.ProcessGroup) -> None:
    """Fill in the rows that the other ranks hold; rank i holds `parts[i]`."""
    if group.size() == 1:
        return
    if len({part.stop - part.start for part in parts}) == 1:
        dist.all_gather_into_tensor(tensor, tensor[parts[group.rank()]].clone(), group=group)
        return
    for owner, part in enumerate(parts):  # not an equal number of rows each
        if part.stop > part.start:
            dist.broadcast(tensor[part], group=group, group_src=owner)


class Remainder:
    """A bf16 weight with the 16 bits it lacks (2 more bytes per parameter), exact in fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.remainder = torch.zeros_like(weight, dtype=torch.int16)

    @property
    def nbytes(self) -> int:
        """See `MasterWeight.nbytes`."""
        return self.remainder.numel() * 2

    def update(self, factor: torch.Tensor, projection_t: torch.Tensor, decay: float) -> None:
        """See `MasterWeight.update`."""
        for rows in _blocks(self.weight):
            value = join_fp32(self.weight[rows], self.remainder[rows])
            value.addmm_(factor[rows], projection_t.t(), beta=decay, alpha=-1)
            self._keep(value, rows)

    def value(self) -> torch.Tensor:
        """See `MasterWeight.value`."""
        return join_fp32(self.weight, self.remainder)

    def load(self, value: torch.Tensor) -> None:
        """See `MasterWeight.load`."""
        for rows in _blocks(self.weight):
            self._keep(value[rows].clone(), rows)

    def _keep(self, value: torch.Tensor, rows: slice) -> None:
        """`split_fp32` without copies, of some rows; uses `value` up."""
        bits = value.view(torch.int32)
        self.remainder[rows].copy_(bits)
        bits.bitwise_or_(1)  # as in `nearest_bf16`
        self.weight[rows].copy_(value)


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Rows of a weight [d, k], as many at a time as are updated at once.

    Holders of the same part update the same blocks: they call for the same matrix products, and
    agree bit for bit.
    """
    size = _CPU_BLOCK if weight.device.type == "cpu" else weight.numel()
    count = max(1, size // weight.shape[1])
    for start in range(0, len(weight), count):
        yield slice(start, start + count)


def nearest_bf16(value: torch.Tensor) -> torch.Tensor:
    """fp32 → nearest bf16, ties away from zero.

    With ties to even, the distance to the fp32 could be -2¹⁵ and +2¹⁵ of its last places, which
    16 bits cannot tell apart. torch's ties go to even; the lowest bit of an fp32 makes a tie more
    than one, and nothing else rounds differently for it.
    """
    return (value.view(torch.int32) | 1).view(torch.float32).to(torch.bfloat16)


def split_fp32(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 → (nearest bf16, int16 remainder), without loss.

    The remainder is bits(value) - bits(bf16)·2¹⁶, in [-2¹⁵, 2¹⁵): the low 16 bits, signed.
    """
    return nearest_bf16(value), value.view(torch.int32).to(torch.int16)


def join_fp32(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 that `split_fp32` took apart, bit for bit."""
    value = high.detach().float()
    value.view(torch.int32).add_(remainder)
    return value


def master_weight(
    weight: torch.Tensor, kind: Literal["sharded", "replicated"], group: dist.ProcessGroup
) -> MasterWeight:
    """The holder of `weight`'s fp32 value for its type and the configured kind.

    Args:
        weight: this rank's part [d, k] of the weight.
        kind: `sharded` divides fp32 masters over `group`; `replicated` keeps remainders.
        group: data-parallel ranks that hold the same part.
    """
    weight = weight.detach()
    if weight.dtype == torch.float32:
        return Fp32Weight(weight)
    return Fp32Master(weight, group) if kind == "sharded" else Remainder(weight)


def master_bytes(parameters: int, precision: str, kind: str) -> int:
    """Bytes that masters take for this many target parameters."""
    if precision == "fp32":
        return 0
    return parameters * (4 if kind == "sharded" else 2)
