"""Random projections A [r, k], drawn from coordinates and never stored in a checkpoint.

The sign of A[i, j] is one bit of Philox (see `counter_rng`) at (layer name, column j, row i) under
the key (seed, draw), so any rank or device draws any range of columns by itself, bit for bit.
Rademacher signs stay packed, 32 to a word; a matrix is unpacked when a layer needs it. All layers
of a rank are drawn in one pass.

Matrices are handed out transposed and unscaled: Aᵀ [k, r] = scale · `transposed()`, with
scale = 1/√r, so that bf16 holds the entries ±1 exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_logra.counter_rng import domain, philox4x32, to_unit_interval

WORD_BITS = 32
_WORDS_PER_BLOCK = 4  # of Philox4x32


@dataclass(frozen=True)
class Columns:
    """The columns of one layer's A that a rank draws: [start, stop) of the full input features."""

    name: str
    """Layer name; stands for the layer in the counter."""
    start: int
    """First column."""
    stop: int
    """One past the last column."""

    @property
    def count(self) -> int:
        """Number of columns."""
        return self.stop - self.start


def numbers_per_column(rank: int, distribution: str) -> int:
    """32-bit words that a column of A takes from the generator."""
    return -(-rank // WORD_BITS) if distribution == "rademacher" else rank


def projection_bytes(columns: int, rank: int, distribution: str) -> int:
    """Bytes of resident projections for this many columns (all layers of a rank together)."""
    return 4 * columns * numbers_per_column(rank, distribution)


class Projections:
    """The projections of all targets of a rank.

    Args:
        layers: columns of each target; the order is the index used by the other methods.
        rank: sketch rank r.
        distribution: `rademacher` (±1/√r) or `gaussian` (N(0, 1/r)).
        seed: 32-bit seed.
        device: where the projections live.
    """

    def __init__(
        self,
        layers: list[Columns],
        rank: int,
        distribution: Literal["rademacher", "gaussian"],
        seed: int,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.rank = rank
        self.distribution = distribution
        self.seed = seed
        self.scale = 1.0 / math.sqrt(rank)
        self._per_column = numbers_per_column(rank, distribution)
        self._offsets = [0]
        for layer in layers:
            self._offsets.append(self._offsets[-1] + layer.count * self._per_column)
        dtype = torch.int32 if distribution == "rademacher" else torch.float32
        self._data = torch.empty(self._offsets[-1], dtype=dtype, device=device)
        # Row b holds the 8 signs of byte b, lowest bit first.
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._signs_of_byte = (2 * bits - 1).to(device)

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self._data.numel() * self._data.element_size()

    @torch.no_grad()
    def redraw(self, draw: int) -> None:
        """Replace all projections by those of draw number `draw` (the update that uses them)."""
        words = self._words((self.seed, draw % 2**32))
        if self.distribution == "rademacher":
            self._data.copy_(torch.where(words >= 2**31, words - 2**32, words))
        else:
            self._data.copy_(words)

    def _words(self, key: tuple[int, int]) -> torch.Tensor:
        """The numbers of all layers in order: int64 words, or float32 standard normals."""
        device = self._data.device
        first_blocks, block_counts, names = [], [], []
        for layer in self.layers:
            start = layer.start * self._per_column
            stop = layer.stop * self._per_column
            first_blocks.append(start // _WORDS_PER_BLOCK)
            block_counts.append(-(-stop // _WORDS_PER_BLOCK) - start // _WORDS_PER_BLOCK)
            names.append(domain(f"projection/{layer.name}"))
        counts = torch.tensor(block_counts, device=device)
        ends = counts.cumsum(0)
        total = int(ends[-1]) if block_counts else 0
        # Block number within its layer: the running number less that of the layer's first block.
        shift = torch.tensor(first_blocks, device=device) - (ends - counts)
        block = torch.arange(total, device=device) + shift.repeat_interleave(counts)
        low = torch.tensor([name[0] for name in names], device=device).repeat_interleave(counts)
        high = torch.tensor([name[1] for name in names], device=device).repeat_interleave(counts)
        lanes = philox4x32((block & 0xFFFFFFFF, block >> 32, low, high), key)
        if self.distribution == "gaussian":
            lanes = (*_box_muller(lanes[0], lanes[1]), *_box_muller(lanes[2], lanes[3]))
        flat = torch.stack(lanes, dim=1).flatten()
        # Cut the words of a first or last block that belong to columns of other ranks.
        pieces = []
        for layer, first, end, count in zip(
            self.layers, first_blocks, ends.tolist(), block_counts, strict=True
        ):
            begin = (end - count - first) * _WORDS_PER_BLOCK + layer.start * self._per_column
            pieces.append(flat[begin : begin + layer.count * self._per_column])
        return torch.cat(pieces) if pieces else flat

    def transposed(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Aᵀ / scale of target `index`: [k, r] in `dtype`, entries ±1 or standard normal."""
        begin, end = self._offsets[index], self._offsets[index + 1]
        data = self._data[begin:end]
        if self.distribution == "gaussian":
            return data.view(-1, self.rank).to(dtype)
        table = self._signs_of_byte
        if table.dtype != dtype:
            table = self._signs_of_byte = table.to(dtype)
        signs = torch.nn.functional.embedding(data.view(torch.uint8).int(), table)
        return signs.view(self.layers[index].count, -1)[:, : self.rank]

    def project(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """P = X Aᵀ: [n, k] → [n, r], in the type of `x`."""
        return (x @ self.transposed(index, x.dtype)).mul_(self.scale)

    def gram(self, index: int) -> torch.Tensor:
        """A Aᵀ [r, r], float32."""
        at = self.transposed(index, torch.float32)
        return (at.t() @ at).mul_(self.scale**2)


def _box_muller(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two standard normals (float32) out of two 32-bit words."""
    radius = (-2.0 * to_unit_interval(first).log()).sqrt()
    angle = 2.0 * math.pi * to_unit_interval(second)
    return (radius * angle.cos()).float(), (radius * angle.sin()).float()
