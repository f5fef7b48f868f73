"""The rollout worker's side: weights that follow the trainer's, update by update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_logra.config import SketchConfig
from megatron_logra.memory import storage_bytes
from megatron_logra.model.parameters import local_part, whole_name
from megatron_logra.optimizer.master_weights import MasterWeight, master_weight, nearest_bf16
from megatron_logra.sketch.capture import SketchCapture, Target
from megatron_logra.sync.blocks import indices, parameters_of, weight_ranges, whole_target
from megatron_logra.sync.payload import Block, Payload, PayloadError, join

Exactness = Literal["fp32", "bf16"]
"""`fp32`: bf16 weights keep the 16 bits they lack; `bf16`: they do not, and drift."""


class OutOfOrder(PayloadError):
    """An update that does not follow the receiver's version."""


@dataclass(frozen=True)
class Drift:
    """How far a receiver's weights are from the trainer's, where an audit looked."""

    largest: float
    """Largest absolute difference of a weight."""
    ulps: float
    """The same in units of the last place of the larger of both weights' bf16 values."""
    compared: int
    """Weights that were compared."""


class Receiver:
    """A model under a layout of its own that applies what a trainer sends.

    Nothing is written until a payload has been checked whole; so a bad one leaves version and
    weights as they were.

    Args:
        chunks: this rank's model chunks.
        sketch: the trainer's sketch section.
        pg: the receiver's process groups.
        exactness: what is kept of the weights between updates.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        sketch: SketchConfig,
        pg: ProcessGroupCollection,
        *,
        exactness: Exactness = "fp32",
    ) -> None:
        self.chunks = list(chunks)
        self.pg = pg
        self.run: str | None = None
        """The trainer's start that `version` belongs to; None before the first refresh."""
        self.version = -1
        self.drift: Drift | None = None
        """What the last audit found."""
        self.capture = SketchCapture(
            self.chunks,
            sketch,
            torch.bfloat16,
            tp_group=pg.tp,
            whole_name=whole_name,
            with_proxies=False,
        )
        make = partial(master_weight, kind="replicated", group=pg.dp_cp)
        targets = self.capture.targets
        self.masters: list[MasterWeight] = [
            make(t.weight) if exactness == "fp32" else RoundedWeight(t.weight) for t in targets
        ]
        self._draw: tuple[int, int] | None = None

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held on this rank by kind (see `memory.KINDS`), counted from the tensors."""
        return {
            "weights": storage_bytes(p for chunk in self.chunks for p in chunk.parameters()),
            "master": sum(master.nbytes for master in self.masters),
            "projections": self.capture.projections.nbytes,
        }

    @torch.no_grad()
    def refresh(self, payload: Payload) -> None:
        """Take over whole weights.

        Raises:
            PayloadError: something is missing, or of another shape.
        """
        if payload.header.kind != "refresh":
            raise PayloadError(f"version {payload.header.version}: an update is not a refresh")
        masters = {
            id(target.weight): master
            for target, master in zip(self.capture.targets, self.masters, strict=True)
        }
        ready = [(p, self._own(name, p, payload)) for name, p in parameters_of(self.chunks)]
        for parameter, value in ready:
            master = masters.get(id(parameter))
            if master is None:
                parameter.copy_(value)
            else:
                master.load(value.to(parameter.device).float())
        self.run, self.version = payload.header.run, payload.header.version

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        """Apply one update.

        Raises:
            OutOfOrder: it does not follow this receiver's version: something is missing, or came
                twice.
            PayloadError: it does not cover this receiver's weights.
        """
        header = payload.header
        if header.kind != "update":
            raise PayloadError(f"version {header.version}: a refresh is not an update")
        if header.run != self.run or header.previous != self.version:
            raise OutOfOrder(
                f"update {header.version} applies to version {header.previous} of run "
                f"{header.run}, but this receiver has version {self.version} of {self.run}"
            )
        projections = self.capture.projections
        agreed = (header.seed, header.rank, header.distribution)
        if agreed != (projections.seed, projections.rank, projections.distribution):
            raise PayloadError(
                f"update {header.version}: sketches of seed, rank and distribution {agreed}, "
                "other than this receiver's"
            )
        factors = [self._factor(target, payload) for target in self.capture.targets]
        names = {name for use, name in payload.blocks if use == "weight"}
        others = [
            (parameter, self._own(name, parameter, payload))
            for name, parameter in parameters_of(self.chunks)
            if name in names
        ]
        if self._draw != (header.seed, header.draw):
            projections.redraw(header.draw)
            self._draw = (header.seed, header.draw)
        for index, (factor, master) in enumerate(zip(factors, self.masters, strict=True)):
            scaled = factor.to(self.capture.targets[index].weight.device).float()
            scaled = scaled.mul_(projections.scale)
            master.update(scaled, projections.transposed(index, torch.float32), header.decay)
        for parameter, value in others:
            parameter.copy_(value)
        self.version = header.version
        self._audit(payload)

    def _factor(self, target: Target, payload: Payload) -> torch.Tensor:
        """The rows of α·D that this rank's part of W needs, [rows, r]."""
        blocks = payload.blocks.get(("factor", target.name))
        if blocks is None:
            raise PayloadError(f"update {payload.header.version}: nothing for {target.name}")
        whole = join(blocks)
        if whole.shape[0] != whole_target(target, self.pg)[0]:
            raise PayloadError(f"{target.name}: {whole.shape[0]} rows, other than this receiver's")
        if target.row_parallel:
            return whole
        return whole[indices(weight_ranges(target, self.pg))]

    def _own(self, name: str, parameter: torch.nn.Parameter, payload: Payload) -> torch.Tensor:
        """This rank's part of a parameter that was sent whole."""
        blocks = payload.blocks.get(("weight", name))
        if blocks is None:
            raise PayloadError(f"version {payload.header.version}: nothing for {name}")
        own = local_part(join(blocks), parameter, self.pg.tp.rank(), self.pg.tp.size())
        if own.shape != parameter.shape:
            raise PayloadError(f"{name}: {list(own.shape)}, but here {list(parameter.shape)}")
        return own

    def _audit(self, payload: Payload) -> None:
        """Compare the rows and columns that the trainer sent along, if it did."""
        targets = {target.name: target for target in self.capture.targets}
        largest = ulps = 0.0
        compared = 0
        for (use, name), blocks in payload.blocks.items():
            if use != "audit" or name not in targets:
                continue
            for block in blocks:
                mine, theirs = self._overlap(targets[name], block)
                if not mine.numel():
                    continue
                difference = (mine - theirs).abs()
                unit = _bf16_ulp(torch.maximum(mine.abs(), theirs.abs()))
                largest = max(largest, float(difference.max()))
                ulps = max(ulps, float((difference / unit).max()))
                compared += mine.numel()
        if any(use == "audit" for use, _ in payload.blocks):
            self.drift = Drift(largest, ulps, compared)

    def _overlap(self, target: Target, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights that this rank holds of an audited block, and the block's own: fp32."""
        axis = 1 if target.row_parallel else 0
        held = indices(weight_ranges(target, self.pg))
        asked = indices(block.ranges)
        place = torch.searchsorted(held, asked).clamp(max=len(held) - 1)
        found = held[place] == asked
        mine = target.weight.detach().cpu().index_select(axis, place[found]).float()
        return mine, block.tensor.index_select(axis, found.nonzero()[:, 0]).float()


class RoundedWeight:
    """A bf16 weight that keeps nothing between updates: what rounding takes is lost."""

    nbytes = 0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach()

    def update(self, factor: torch.Tensor, projection_t: torch.Tensor, decay: float) -> None:
        """See `MasterWeight.update`."""
        self.load(self.value().addmm_(factor, projection_t.t(), beta=decay, alpha=-1))

    def value(self) -> torch.Tensor:
        """See `MasterWeight.value`."""
        return self.weight.float()

    def load(self, value: torch.Tensor) -> None:
        """See `MasterWeight.load`."""
        if self.weight.dtype == torch.bfloat16:  # rounded as the trainer does it, ties too
            value = nearest_bf16(value)
        self.weight.copy_(value)


def _bf16_ulp(magnitude: torch.Tensor) -> torch.Tensor:
    """The distance from a number's bf16 value to the next larger one."""
    rounded = magnitude.to(torch.bfloat16)
    following = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    return following.float() - rounded.float()
