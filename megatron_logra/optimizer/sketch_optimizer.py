"""The sketch optimizer: a Megatron DistributedOptimizer whose parameters are sketch proxies.

Megatron's DDP reduces the sketches over data-parallel ranks and this class's base shards them; the
base's parameter all-gather then carries the directions, rounded to the wire type, to all ranks.
What is left is here, in the order of a step (method, section 3):

    prepare_grads          S finite? → direction D → update ratio → gather → predicted KL → α
    step_with_ready_grads  commit moments → α·D rounded → W -= (α·D) A → next projections

Unless the mode is `lr`, everything that may fail happens in `prepare_grads`, which reports a
failure as Megatron's optimizers report an overflow, before any state has changed. In mode `lr` the
direction waits for the clipping that Megatron does between the two.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed as dist

from megatron_logra.config import OptimizerSection, SketchConfig
from megatron_logra.distributed import all_reduce
from megatron_logra.optimizer.master_weights import master_weight
from megatron_logra.optimizer.predicted_kl import PredictedKL, ProbeBatch
from megatron_logra.optimizer.step_control import StepControl
from megatron_logra.sketch.capture import SketchCapture, Target
from megatron_logra.sketch.row_adam import row_factors, updated_moment


@dataclass
class StepReport:
    """What the last step did; numbers are None where they do not apply."""

    failure: str | None = None
    """Why the step was not taken."""
    kl_predicted: float | None = None
    """Predicted KL at α = 1, nats per token."""
    kl_budget: float | None = None
    """The budget it was held to."""
    alpha: float | None = None
    """Factor on the direction."""
    update_ratio: float | None = None
    """‖ΔW‖/‖W‖ over all targets, α included."""
    sketch_norm: float | None = None
    """‖S‖ over all targets."""
    direction_gathered: bool = False
    """Whether the ranks have exchanged their rows of D."""
    probe_seconds: float = 0.0
    """Time of the prediction."""
    decay: float = 1.0
    """By which the weights were multiplied before the step."""


class SketchDistributedOptimizer(DistributedOptimizer):
    """Row-wise optimizer over sketches; see the module's docstring.

    Args:
        config: Megatron's optimizer configuration; `clip_grad` counts in mode `lr` only.
        sketch_ddps: Megatron's DDP over the `SketchProxies` of each of this rank's model chunks.
        capture: the hooks, targets and projections of the chunks.
        predictor: measures the predicted KL in mode `kl_budget`.
        optimizer: the optimizer section of the configuration.
        sketch: its sketch section.
        control: budget and α.
        pg: process groups.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        *,
        sketch_ddps: list[DistributedDataParallel],
        capture: SketchCapture,
        predictor: PredictedKL,
        optimizer: OptimizerSection,
        sketch: SketchConfig,
        control: StepControl,
        pg: ProcessGroupCollection,
    ) -> None:
        group = {
            "params": [target.proxy for target in capture.targets],
            "lr": config.lr,
            "weight_decay": 0.0,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        super().__init__(
            torch.optim.SGD([group]),  # only its parameter groups are used
            config,
            None,
            lambda *_: None,  # no state in the inner optimizer
            model_chunks=sketch_ddps,
            per_model_buffers={i: ddp.buffers for i, ddp in enumerate(sketch_ddps)},
            data_parallel_group=pg.intra_dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=pg.dp_cp.rank() // pg.intra_dp_cp.size(),
        )
        self.grad_stats_parallel_group = pg.intra_dist_opt
        self.tp_group = pg.tp
        self.capture = capture
        self.predictor = predictor
        self.settings = optimizer
        self.sketch = sketch
        self.control = control
        self.probe: ProbeBatch | None = None
        """The responses for the next prediction; set before each step in mode `kl_budget`."""
        self.update = 0
        """Updates applied so far; keys the projections."""
        self.report = StepReport()
        self.pg = pg
        self._spans = [self._own_span(target.proxy) for target in capture.targets]
        self.moments = [
            torch.zeros(span.stop - span.start, device=target.weight.device)
            for target, span in zip(capture.targets, self._spans, strict=True)
        ]
        self.masters = [
            master_weight(target.weight, optimizer.master, pg.intra_dp_cp)
            for target in capture.targets
        ]
        self._new_moments: list[torch.Tensor] = []
        self._copy_model_grads_to_main_grads()
        self._redraw()

    @property
    def _lr_mode(self) -> bool:
        return self.control.config.mode == "lr"

    def _copy_model_grads_to_main_grads(self) -> None:
        """Let each main parameter's `grad` be this rank's rows of S, in the DDP buffer itself.

        The base's fp32 copies of bf16 proxies are given up for the same memory: a direction is
        made in place of its sketch.
        """
        for target, span in zip(self.capture.targets, self._spans, strict=True):
            if span.start == span.stop:
                continue  # all rows belong to other data-parallel ranks
            main_param = self._main_param(target.proxy)
            main_grad = target.sketch[span].view(-1)
            if main_param.dtype != target.proxy.dtype:
                main_param.data = main_grad  # a bf16 proxy; an fp32 one's is its own shard
            main_param.grad = main_grad

    def _main_param(self, proxy: torch.nn.Parameter) -> torch.Tensor:
        group_index, order = self.model_param_group_index_map[proxy]
        return self.optimizer.param_groups[group_index]["params"][order]

    def _own_span(self, proxy: torch.nn.Parameter) -> slice:
        """The rows of a proxy that this data-parallel rank owns (see `sketch.layout`)."""
        if proxy not in self.model_param_gbuf_map:
            return slice(0, 0)
        elements = self._get_model_param_range_map(proxy)["param"]
        rank = proxy.shape[1]
        assert elements.start % rank == elements.end % rank == 0, "a row is split"
        return slice(elements.start // rank, elements.end // rank)

    def _own_sketches(self) -> list[torch.Tensor]:
        """This rank's rows of every S (or of D, once made), [rows, r] float32 views."""
        return [
            target.sketch[span]
            for target, span in zip(self.capture.targets, self._spans, strict=True)
        ]

    # --- the step ---------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Everything before the weights change; True (as for an overflow) if the step must not be.

        The reason is in `report.failure`. No moment, counter, weight or projection has changed.
        """
        self.report = StepReport()
        super().prepare_grads()
        norm = math.sqrt(self._sum(_squares(self._own_sketches()), self.pg.intra_dist_opt))
        self.report.sketch_norm = norm
        if not math.isfinite(norm):
            self.report.failure = "a sketch is not finite"
            return True
        if self._lr_mode:
            return False
        self._make_direction()
        self._scale_to_update_ratio()
        self._gather_direction()
        return not self._choose_alpha()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Commit: moments, weights, counter and the next projections."""
        if self._lr_mode:
            group = self.optimizer.param_groups[0]
            self._make_direction()
            self.report.update_ratio = group["lr"] * self._direction_ratio()
            self._gather_direction()
            self._apply(group["lr"], decay=1 - group["lr"] * group["weight_decay"])
        else:
            assert self.report.alpha is not None
            self._apply(self.report.alpha, decay=1.0)
        self.moments = self._new_moments
        self._new_moments = []
        self.update += 1
        self._redraw()
        return True

    def _make_direction(self) -> None:
        """S → D in place, for this rank's rows; the new moments are kept aside."""
        settings, sketches = self.settings, self._own_sketches()
        self._new_moments = [
            updated_moment(v, s, settings.beta2)
            for v, s in zip(self.moments, sketches, strict=True)
        ]
        factors = row_factors(
            settings.rule,
            sketches,
            self._new_moments,
            [target.rows * self.pg.tp.size() for target in self.capture.targets],
            beta2=settings.beta2,
            eps=settings.eps,
            step=self.update + 1,
            # The ranks that together hold a layer's rows once.
            reduce_sums=lambda sums: all_reduce(all_reduce(sums, self.pg.intra_dp_cp), self.pg.tp),
        )
        for s, factor in zip(sketches, factors, strict=True):
            s.mul_(factor.unsqueeze(1))

    def _scale_to_update_ratio(self) -> None:
        """Scale all D together so that ‖D A‖ = ρ ‖W‖ over all targets."""
        ratio = self._direction_ratio()
        self.report.update_ratio = 0.0
        if ratio == 0:
            return
        for d in self._own_sketches():
            d.mul_(self.control.config.update_ratio / ratio)
        self.report.update_ratio = self.control.config.update_ratio

    def _reconstructed_squares(self) -> torch.Tensor:
        """‖X A‖² of this rank's rows of each target, X = S or D: float64 [targets].

        It is ⟨Xᵀ X, A Aᵀ⟩, of two r × r matrices; for row-parallel targets A Aᵀ is a sum over the
        tensor-parallel ranks' columns.
        """
        grams = [self.capture.projections.gram(i) for i in range(len(self.capture.targets))]
        split = [g for g, t in zip(grams, self.capture.targets, strict=True) if t.row_parallel]
        if split and self.pg.tp.size() > 1:
            for gram, whole in zip(split, all_reduce(torch.stack(split), self.pg.tp), strict=True):
                gram.copy_(whole)
        return torch.stack(
            [
                (x.t() @ x).double().mul_(gram).sum()
                for x, gram in zip(self._own_sketches(), grams, strict=True)
            ]
        )

    def _direction_ratio(self) -> float:
        """‖D A‖ / ‖W‖ over all targets of the whole model."""
        change = self._sum(self._reconstructed_squares(), self.pg.intra_dist_opt)
        weights = _squares([target.weight for target in self.capture.targets])
        return math.sqrt(max(0.0, change) / self._sum(weights, self.pg.mp))

    @staticmethod
    def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> float:
        return float(all_reduce(values.sum().unsqueeze(0), group))

    def _gather_direction(self) -> None:
        """Round own rows to the wire type into the proxies' buffer, and gather all rows."""
        for target, span, d in zip(
            self.capture.targets, self._spans, self._own_sketches(), strict=True
        ):
            target.proxy[span].copy_(d)
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)
        self.capture.gather_directions()
        self.report.direction_gathered = True

    def _choose_alpha(self) -> bool:
        report = self.report
        if self.control.config.mode == "fixed_ratio":
            report.alpha = 1.0
            return True
        started = time.perf_counter()
        if self.probe is None:
            raise RuntimeError("step_control.mode kl_budget: set `probe` before each step")
        expected = self.control.expected_kl(self.update)
        report.kl_predicted = self.predictor.predict(self.probe, expected)
        report.kl_budget = self.control.budget(self.update)
        report.probe_seconds = time.perf_counter() - started
        try:
            report.alpha = self.control.alpha(report.kl_predicted, report.kl_budget)
        except ValueError as error:
            report.failure = str(error)
            return False
        if report.update_ratio is not None:
            report.update_ratio *= report.alpha
        return True

    def _apply(self, scale: float, *, decay: float) -> None:
        """W ← decay·W - F A with F = scale·D rounded to the wire type, the same on every holder."""
        projections = self.capture.projections
        self.report.decay = decay
        for index, (target, master) in enumerate(
            zip(self.capture.targets, self.masters, strict=True)
        ):
            # The same numbers on every rank: rounded after scaling, before applying.
            rounded = (self.capture.direction(index).float() * scale).to(target.proxy.dtype)
            self.capture.keep_applied(index, rounded)
            factor = rounded.float().mul_(projections.scale)
            master.update(factor, projections.transposed(index, torch.float32), decay)
        self.capture.release_directions()

    def _redraw(self) -> None:
        if self.update % self.sketch.refresh == 0:
            self.capture.projections.redraw(self.update // self.sketch.refresh)

    # --- Megatron's interface ---------------------------------------------------------------

    def get_grads_for_grad_norm(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Tensors whose joint norm is that of the reconstructed gradient S A (mode `lr`)."""
        if not self._lr_mode:
            return []  # no clipping: the sketches take no part in the joint norm
        return [self._reconstructed_squares().clamp_min(0).sqrt().float()]

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Main parameters whose `grad` may be clipped: none but in mode `lr`."""
        return super().get_parameters() if self._lr_mode else []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The DDP buffer is zeroed by `zero_grad_buffer`."""

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Take the targets' current weights as the masters' value."""
        assert state_dict is None, "masters are reloaded from the model's own weights"
        for target, master in zip(self.capture.targets, self.masters, strict=True):
            master.load(target.weight.detach().float())

    # --- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters and step control; tensors are in `sharded_state_dict`."""
        return {"update": self.update, "step_control": self.control.state_dict()}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Counters, row moments [d] and fp32 weights [d, k]; A and S describe nothing."""
        tensors: dict[str, list[ShardedTensor]] = {}
        for index, target in enumerate(self.capture.targets):
            values = {"row_moment": self._whole_moment(index)}
            if self.masters[index].nbytes:  # an fp32 weight is in the model's own state
                values["master"] = self.masters[index].value()
            for kind, value in values.items():
                name = f"optimizer.sketch.{kind}.{target.name}"
                tensors[name] = self._pieces(name, target, value, is_loading)
        return {"common": self.state_dict(), "tensors": tensors}

    def _whole_moment(self, index: int) -> torch.Tensor:
        """The moment of all rows of a target on this tensor-parallel rank, [d/tp]."""
        span = self._spans[index]
        moment = torch.zeros(self.capture.targets[index].rows, device=self.moments[index].device)
        moment[span] = self.moments[index]
        return all_reduce(moment, self.pg.intra_dp_cp)

    def _pieces(
        self, name: str, target: Target, value: torch.Tensor, is_loading: bool
    ) -> list[ShardedTensor]:
        """A [d/tp] moment or a part of W [d, k] by its place in the whole tensor."""
        rank, size = self.pg.tp.rank(), self.pg.tp.size()
        axis = 1 if target.row_parallel and value.dim() == 2 else 0
        found = []
        for number, piece in enumerate(value.chunk(target.strided, 0)):
            place = (axis, number * size + rank, target.strided * size)
            data = torch.empty_like(piece) if is_loading else piece.contiguous()
            found.append(
                ShardedTensor.from_rank_offsets(name, data, place, replica_id=self.pg.dp_cp.rank())
            )
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `sharded_state_dict` gave, after Megatron has filled its tensors."""
        self.update = state_dict["common"]["update"]
        self.control.load_state_dict(state_dict["common"]["step_control"])
        tensors = state_dict["tensors"]
        for target, span, moment, master in zip(
            self.capture.targets, self._spans, self.moments, self.masters, strict=True
        ):
            moment.copy_(torch.cat(tensors[f"optimizer.sketch.row_moment.{target.name}"])[span])
            if master.nbytes:
                master.load(torch.cat(tensors[f"optimizer.sketch.master.{target.name}"]))
        self.capture.projections.redraw(self.update // self.sketch.refresh)


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Squared L2 norm of each tensor, float64 [tensors]."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float32).double() for t in tensors]
    return torch.stack(norms).square()
