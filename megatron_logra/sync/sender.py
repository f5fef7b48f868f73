"""The trainer's side: pieces of updates and refreshes out of what the optimizer has applied."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron_logra.config import SketchConfig
from megatron_logra.counter_rng import domain, philox4x32
from megatron_logra.optimizer.learner import Learner
from megatron_logra.sync.blocks import (
    factor_rows,
    parameter_block,
    parameters_of,
    weight_ranges,
    whole_target,
)
from megatron_logra.sync.payload import Block, Header, Kind, Ranges, encode

AUDITED = 8
"""Rows (or columns) of a target's weight that an audit looks at, on each rank."""


class Sender:
    """Makes this trainer rank's pieces.

    Data-parallel ranks hold the same; the first of them sends.

    Args:
        learner: what is trained; whatever by, its whole weights can be sent.
        sketch: the sketch section of the configuration.
        run: name of this start of the trainer; versions of another one are not continued.
        audit_interval: updates between audits; 0 for none.
    """

    def __init__(
        self, learner: Learner, sketch: SketchConfig, run: str, *, audit_interval: int = 10
    ) -> None:
        self.learner = learner
        self.optimizer = learner.sketch
        self.sketch = sketch
        self.run = run
        self.audit_interval = audit_interval
        self.pg: ProcessGroupCollection = learner.pg
        self.chunks = unwrap_model(list(learner.chunks))

    @property
    def sends(self) -> bool:
        """Whether this rank has a piece."""
        return bool(self.pg.dp_cp.rank() == 0)

    @property
    def piece(self) -> int:
        """The number of this rank's piece."""
        return int(self.pg.pp.rank() * self.pg.tp.size() + self.pg.tp.rank())

    def update(self) -> bytearray | None:
        """This rank's piece of the update that has just been applied; None if it has none."""
        if not self.sends:
            return None
        assert self.optimizer is not None, "only sketches make updates"
        blocks = [*self._factors(), *self._non_targets()]
        version = self.learner.update
        if self.audit_interval and version % self.audit_interval == 0:
            blocks += self._audited(version)
        return encode(self._header("update"), blocks)

    def refresh(self, *, exact: bool = True) -> bytearray | None:
        """This rank's piece of the weights as they are; None if it has none.

        Called by all ranks: fp32 weights may be divided over data-parallel ones.

        Args:
            exact: targets in fp32, for updates to be applied to; else as the model computes.
        """
        masters = {}
        if exact and self.optimizer is not None:
            pairs = zip(self.optimizer.capture.targets, self.optimizer.masters, strict=True)
            masters = {id(target.weight): master for target, master in pairs}
        blocks = []
        for name, parameter in self._parameters():
            master = masters.get(id(parameter))
            value = parameter if master is None else master.value()
            if self.sends:
                blocks.append(parameter_block(name, parameter, value, self.pg))
        if not self.sends:
            return None
        return encode(self._header("refresh"), [block for block in blocks if block is not None])

    def _header(self, kind: Kind) -> Header:
        version, tp, pp = self.learner.update, self.pg.tp, self.pg.pp
        return Header(
            kind=kind,
            run=self.run,
            version=version,
            previous=version - 1 if kind == "update" else version,
            seed=self.sketch.seed,
            draw=max(0, version - 1) // self.sketch.refresh,
            rank=self.sketch.rank,
            distribution=self.sketch.distribution,
            decay=self.optimizer.report.decay if self.optimizer is not None else 1.0,
            piece=self.piece,
            pieces=pp.size() * tp.size(),
        )

    def _factors(self) -> Iterator[Block]:
        assert self.optimizer is not None
        for target in self.optimizer.capture.targets:
            shape = (whole_target(target, self.pg)[0], self.sketch.rank)
            rows = factor_rows(target, self.pg)
            yield Block("factor", target.name, shape, 0, rows, target.proxy)

    def _non_targets(self) -> Iterator[Block]:
        """Parameters that Adam has trained."""
        for name, parameter in self._parameters():
            if parameter.requires_grad:
                block = parameter_block(name, parameter, parameter, self.pg)
                if block is not None:
                    yield block

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Each parameter once: the last stage's copy of a tied one is left out."""
        for name, parameter in parameters_of(self.chunks):
            if not getattr(parameter, "shared", False):
                yield name, parameter

    def _audited(self, version: int) -> list[Block]:
        """Some rows (or columns) of one of this rank's targets; all targets have their turn."""
        assert self.optimizer is not None
        targets = self.optimizer.capture.targets
        target = targets[version // self.audit_interval % len(targets)]
        axis = 1 if target.row_parallel else 0
        size = target.weight.shape[axis]
        words = philox4x32((torch.arange(AUDITED), 0, *domain("audit")), (version, 0))[0]
        chosen = torch.unique(words % size)
        held = weight_ranges(target, self.pg)
        places = torch.cat([torch.arange(start, stop) for start, stop in held])[chosen]
        ranges: Ranges = tuple((place, place + 1) for place in places.tolist())
        rows = target.weight.detach().index_select(axis, chosen.to(target.weight.device))
        return [Block("audit", target.name, whole_target(target, self.pg), axis, ranges, rows)]
