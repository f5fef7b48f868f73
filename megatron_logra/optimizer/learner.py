"""The learner: a model with its data-parallel wrappers, its optimizers and their step.

It builds, for `optimizer.kind: logra`, a DDP over the sketch proxies with the
`SketchDistributedOptimizer`, chained with Megatron's own optimizer if non-targets are trained; and
for `adam`, Megatron's DistributedOptimizer alone. The training loop sees one object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra import data_parallel, distributed, memory
from megatron_logra.config import Config, ScheduleConfig
from megatron_logra.model.parameters import whole_name
from megatron_logra.optimizer.adam_state import allow_loading
from megatron_logra.optimizer.master_weights import Fp32Master
from megatron_logra.optimizer.predicted_kl import PredictedKL, ProbeBatch
from megatron_logra.optimizer.sketch_optimizer import SketchDistributedOptimizer, StepReport
from megatron_logra.optimizer.step_control import StepControl
from megatron_logra.sketch.capture import SketchCapture, SketchProxies, Target
from megatron_logra.sketch.layout import sketch_layout


@dataclass(frozen=True)
class StepResult:
    """What a step did; numbers are None where they do not apply."""

    applied: bool
    """Whether the weights changed."""
    reason: str | None = None
    """Why they did not."""
    kl_predicted: float | None = None
    """Predicted KL at α = 1, nats per token."""
    kl_predicted_scaled: float | None = None
    """Predicted KL of the step taken, α² times that."""
    kl_budget: float | None = None
    """The KL budget."""
    alpha: float | None = None
    """α."""
    kl_realised: float | None = None
    """Measured KL of the step taken, where it was measured."""
    kl_ratio: float | None = None
    """Realised over predicted KL of the step taken."""
    kl_along: float | None = None
    """The part of the realised KL that lies along the prediction, without rounding."""
    kl_correction: float | None = None
    """c, by which `step_control.adaptive` multiplied the prediction."""
    update_ratio: float | None = None
    """‖ΔW‖/‖W‖ over the targets."""
    sketch_norm: float | None = None
    """‖S‖ over the targets."""
    grad_norm: float | None = None
    """Norm by which gradients were clipped, if any were."""
    lr: float | None = None
    """Learning rate, where there is one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of `reduce` (at the end of the backward passes), `probe` (predicting and measuring the
    KL) and `apply`."""
    notes: tuple[str, ...] = ()
    """What should be said to people: which estimator is in use, predictions that are off."""


class Learner:
    """Trains model chunks.

    Args:
        chunks: this rank's model chunks. Weights that are not trained are frozen here.
        tconfig: their configuration; its gradient functions are set here.
        cfg: the whole configuration.
        pg: process groups.

    Raises:
        UserError: the sketch section does not fit the model.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        tconfig: TransformerConfig,
        cfg: Config,
        pg: ProcessGroupCollection,
    ) -> None:
        self.cfg = cfg
        self.tconfig = tconfig
        self.pg = pg
        self.update = 0
        """Updates applied so far."""
        self.control = StepControl(cfg.step_control)
        sketched = cfg.optimizer.kind == "logra"
        train_others = cfg.optimizer.kind == "adam" or cfg.optimizer.non_targets == "adam"
        capture = None
        if sketched:
            factor_dtype = _DTYPES[cfg.step_control.factor_dtype]
            capture = SketchCapture(
                chunks,
                cfg.sketch,
                factor_dtype,
                tp_group=pg.tp,
                sequence_parallel=tconfig.sequence_parallel,
                whole_name=whole_name,
            )
            if not train_others:
                for chunk in chunks:
                    chunk.requires_grad_(False)
        ddp_config = data_parallel.ddp_config(cfg.parallel, pg.dp_cp.size())
        # With all weights frozen it has no buffers; Megatron's schedule wants it all the same.
        self.chunks = [_wrap(chunk, tconfig, ddp_config, pg) for chunk in chunks]
        self.config = _optimizer_config(cfg)
        self.schedulers: list[OptimizerParamScheduler] = []
        optimizers: list[MegatronOptimizer] = []
        self.sketch: SketchDistributedOptimizer | None = None
        self.predictor: PredictedKL | None = None
        self._sketch_ddps: list[DistributedDataParallel] = []
        if capture is not None:
            self.predictor = PredictedKL(
                self.chunks,
                capture,
                temperature=cfg.rollout.sampling.temperature
                if cfg.algorithm.name != "sft"
                else 1.0,
                chunk=cfg.algorithm.logprob_chunk,
                rows=cfg.train.micro_batch_size,
                max_tokens=cfg.step_control.probe_max_tokens,
                estimator=cfg.step_control.estimator,
                pg=pg,
            )
            self._sketch_ddps = [
                _wrap_proxies(targets, tconfig, ddp_config, pg, cfg.sketch.rank)
                for targets in capture.by_chunk
            ]
            if ddp_config.overlap_grad_reduce:
                # Proxies are not in the graph, so DDP's own hooks on them never fire.
                capture.sketch_ready = data_parallel.start_reductions(self._sketch_ddps)
            self.sketch = SketchDistributedOptimizer(
                self.config,
                sketch_ddps=self._sketch_ddps,
                capture=capture,
                predictor=self.predictor,
                optimizer=cfg.optimizer,
                sketch=cfg.sketch,
                control=self.control,
                pg=pg,
            )
            optimizers.append(self.sketch)
            if cfg.step_control.mode == "lr":
                self.schedulers.append(_scheduler(self.sketch, cfg.step_control.lr, cfg))
        self.adam: DistributedOptimizer | None = None
        if train_others:
            chained = get_megatron_optimizer(
                self.config, self.chunks, pg_collection=pg, use_gloo_process_groups=False
            )
            assert isinstance(chained, ChainedOptimizer)
            (self.adam,) = chained.chained_optimizers
            allow_loading(self.adam)
            optimizers.append(self.adam)
            self.schedulers.append(_scheduler(self.adam, cfg.optimizer.adam, cfg))
        self.optimizer = ChainedOptimizer(optimizers)
        self._reduce_seconds = 0.0
        self._sent = dict.fromkeys(COMMUNICATION, 0)
        tconfig.finalize_model_grads_func = self._finalize_grads
        tconfig.no_sync_func = self._no_sync

    # --- gradients --------------------------------------------------------------------------

    @property
    def _ddps(self) -> list[DistributedDataParallel]:
        return [*self.chunks, *self._sketch_ddps]

    def zero_grad(self) -> None:
        """Zero sketches and gradients; call it before the forward-backward passes of a step."""
        self._sent = dict.fromkeys(COMMUNICATION, 0)
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(
        self, forward_step: Callable[..., Any], batches: Sequence[Any], seq_length: int
    ) -> list[Any]:
        """Run micro-batches through Megatron's schedule for this layout, and reduce the gradients.

        Args:
            forward_step: called with an iterator over `batches` and a model chunk, as Megatron's
                schedules do.
            batches: this data-parallel rank's micro-batches, the same on all ranks of a replica.
            seq_length: longest sequence of them; they may differ.

        Returns:
            The micro-batches' reports on the last pipeline stage; an empty list elsewhere.
        """
        chunks = len(self.chunks)
        iterators = [iter(batches) for _ in self.chunks]
        reports: list[Any] = get_forward_backward_func(
            self.pg.pp.size(), chunks if chunks > 1 else None
        )(
            forward_step_func=forward_step,
            data_iterator=iterators if chunks > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=seq_length,
            micro_batch_size=self.cfg.train.micro_batch_size,
            forward_only=False,
            p2p_communicator=P2PCommunicator(self.pg.pp, self.tconfig),
            pg_collection=self.pg,
        )
        return reports

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Megatron's schedule runs all micro-batches but the last in here."""
        with ExitStack() as stack:
            for ddp in self._ddps:
                stack.enter_context(ddp.no_sync())
            yield

    def _finalize_grads(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Reduce gradients and sketches, and divide both by the global batch's tokens."""
        started = time.perf_counter()
        finalize_model_grads(model, num_tokens, **kwargs)
        sizes = self.pg.intra_dp_cp.size(), self.cfg.parallel.optimizer_instances
        for chunk in self.chunks:
            buffers = [buffer.grad_data for buffer in chunk.buffers]
            self._sent["gradient"] += data_parallel.reduce_bytes(buffers, *sizes)
        for ddp in self._sketch_ddps:
            ddp.finish_grad_sync()
            buffers = [buffer.grad_data for buffer in ddp.buffers]
            self._sent["sketch"] += data_parallel.reduce_bytes(buffers, *sizes)
            if num_tokens is not None:  # by now the sum over all ranks
                ddp.scale_gradients(1.0 / num_tokens.clamp(min=1))
        self._reduce_seconds = time.perf_counter() - started

    # --- the step ---------------------------------------------------------------------------

    def step(self, probe: ProbeBatch | None, mismatch: float | None = None) -> StepResult:
        """Take one step from the gradients that the backward passes left.

        Args:
            probe: responses on which the KL is predicted; needed in mode `kl_budget`.
            mismatch: mean over the batch's tokens of [rollout logprob - trainer logprob].

        Returns:
            What happened. If it was not applied, weights, moments, counters, schedules and
            projections are as they were before.

        Raises:
            ValueError: no position of the probe carries loss; nothing has changed.
        """
        if probe is not None:
            probe.require_tokens()
        begun = time.perf_counter()
        lr = self._lr()
        # Each rank sees what it has reduced: its own share of the gradients.
        if self.adam is not None and distributed.any_rank(not all(map(_finite, self.chunks))):
            return StepResult(applied=False, reason="a gradient is not finite", lr=lr)
        before = self.control.state_dict()
        if mismatch is not None and math.isfinite(mismatch):
            self.control.observe_mismatch(mismatch)
        old_policy = None
        chosen = self.predictor.estimator if self.predictor is not None else "auto"
        if self.sketch is not None:
            self.sketch.probe = probe
            if self._measures_realised() and probe is not None:
                assert self.predictor is not None
                old_policy = self.predictor.remember(probe)
        started = time.perf_counter()
        applied, grad_norm, _ = self.optimizer.step()
        taken = time.perf_counter() - started
        report = self.sketch.report if self.sketch is not None else StepReport()
        self._count_gathers(applied, report)
        if not applied:
            self.control.load_state_dict(before)
            if self.predictor is not None:
                self.predictor.forget()
        realised = ratio = along = None
        notes = []
        if self.predictor is not None and self.predictor.estimator != chosen:
            notes.append(f"KL predicted by {self.predictor.estimator}: {self.predictor.reason}")
        scaled = None
        if report.kl_predicted is not None and report.alpha is not None:
            scaled = report.alpha**2 * report.kl_predicted
        corrects = self.cfg.step_control.adaptive and self.predictor is not None
        correction = self.control.correction if corrects else None
        if applied:
            self.update += 1
            for scheduler in self.schedulers:
                scheduler.step(1)
            if report.kl_predicted is not None:
                self.control.observe_prediction(report.kl_predicted)
            if old_policy is not None and probe is not None and self.predictor is not None:
                measured = self.predictor.realised(probe, old_policy)
                realised, along = measured.kl, measured.along
                if scaled is not None and scaled > 0:
                    ratio = realised / scaled
                    warning = self.control.observe_realised(scaled, realised, along)
                    notes += [warning] if warning is not None else []
        measuring = time.perf_counter() - begun - taken
        seconds = {
            "reduce": self._reduce_seconds,
            "probe": report.probe_seconds + measuring,
            "apply": taken - report.probe_seconds,
        }
        return StepResult(
            applied=applied,
            reason=None if applied else report.failure or "the optimizer did not step",
            kl_predicted=report.kl_predicted,
            kl_predicted_scaled=scaled,
            kl_budget=report.kl_budget,
            alpha=report.alpha,
            kl_realised=realised,
            kl_ratio=ratio,
            kl_along=along,
            kl_correction=correction,
            update_ratio=report.update_ratio,
            sketch_norm=report.sketch_norm,
            grad_norm=float(grad_norm) if grad_norm is not None and self._clips else None,
            lr=lr,
            seconds=seconds,
            notes=tuple(notes),
        )

    @property
    def _clips(self) -> bool:
        """Whether there are gradients with a norm: sketches have one in mode `lr` only."""
        return self.adam is not None or self.cfg.step_control.mode == "lr"

    def _measures_realised(self) -> bool:
        interval = self.cfg.step_control.realised_kl_interval
        return interval > 0 and self.update % interval == 0

    def _lr(self) -> float | None:
        if not self.schedulers:
            return None
        return float(self.schedulers[0].optimizer.param_groups[0]["lr"])

    # --- accounts ---------------------------------------------------------------------------

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held on this rank by kind, counted from the tensors themselves."""
        return memory.count(self.chunks, self._sketch_ddps, self.sketch, self.adam)

    def comm_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent over data-parallel collectives since `zero_grad`, by kind.

        gradient, sketch: reduce-scatters of the fp32 buffers, and all-reduces of each rank's share
        over optimizer instances. parameter: all-gathers of directions in the factor type, of the
        bf16 weights of sharded masters, and of parameters that Adam trains. A reduce-scatter or
        all-gather over n ranks counts as in a ring, (n - 1)/n of its buffer.
        """
        return dict(self._sent)

    def _count_gathers(self, applied: bool, report: StepReport) -> None:
        """Add what a step has gathered."""
        size, gathered = self.pg.intra_dp_cp.size(), []
        if report.direction_gathered:
            gathered += [buffer.param_data for ddp in self._sketch_ddps for buffer in ddp.buffers]
        if self.sketch is not None and applied:
            for master in self.sketch.masters:
                gathered += [master.weight] if isinstance(master, Fp32Master) else []
        if self.adam is not None and applied:
            gathered += [buffer.param_data for chunk in self.chunks for buffer in chunk.buffers]
        self._sent["parameter"] += data_parallel.gather_bytes(gathered, size)

    # --- checkpoints ------------------------------------------------------------------------

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """State for Megatron's distributed checkpoints.

        Args:
            model_sharded_state_dict: that of the model chunks, with their own tensors inside.
            is_loading: whether it is a template to be filled.
        """
        state: dict[str, Any] = {
            "update": self.update,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }
        if self.sketch is not None:
            state["sketch"] = self.sketch.sharded_state_dict(None, is_loading)
        if self.adam is not None:
            if is_loading:
                self.adam._init_optimizer_states_with_dummy_values()
            state["adam"] = self.adam.sharded_state_dict(
                model_sharded_state_dict,
                is_loading,
                metadata={"distrib_optim_sharding_type": "fully_reshardable"},
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `sharded_state_dict` described, once the model's weights are loaded."""
        self.update = state["update"]
        for scheduler, scheduler_state in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(scheduler_state)
        if self.sketch is not None:
            self.sketch.load_state_dict(state["sketch"])
        if self.adam is not None:
            self.adam.load_state_dict(state["adam"])


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMMUNICATION = ("gradient", "sketch", "parameter")
"""Kinds of data-parallel communication."""


def _wrap(
    model: torch.nn.Module,
    tconfig: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    pg: ProcessGroupCollection,
) -> DistributedDataParallel:
    parameters = [p for p in model.parameters() if p.requires_grad]
    bucket_size = data_parallel.bucket_size(ddp_config, pg.pp.rank())
    layout = data_parallel.dense_layout(parameters, bucket_size, pg.intra_dp_cp.size(), ddp_config)
    return DistributedDataParallel(
        tconfig, ddp_config, model, pg_collection=pg, full_param_layout=layout
    )


def _wrap_proxies(
    targets: list[Target],
    tconfig: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    pg: ProcessGroupCollection,
    rank: int,
) -> DistributedDataParallel:
    proxies = [target.proxy for target in targets]
    bucket_size = data_parallel.bucket_size(ddp_config, pg.pp.rank())
    layout = sketch_layout(proxies, rank, pg.intra_dp_cp.size(), ddp_config, bucket_size)
    return DistributedDataParallel(
        tconfig,
        ddp_config,
        SketchProxies(tconfig, targets),
        pg_collection=pg,
        full_param_layout=layout,
    )


def _optimizer_config(cfg: Config) -> OptimizerConfig:
    """One configuration for all optimizers of the chain, as Megatron demands."""
    adam = cfg.optimizer.adam
    joint = cfg.optimizer.kind == "logra" and cfg.step_control.mode == "lr"
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=min(adam.min_lr, adam.lr),
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        bf16=cfg.train.precision == "bf16",
        params_dtype=_DTYPES[cfg.train.precision],
        use_distributed_optimizer=True,
        clip_grad=cfg.step_control.lr.clip_grad if joint else adam.clip_grad,
    )


def _scheduler(
    optimizer: MegatronOptimizer, schedule: ScheduleConfig, cfg: Config
) -> OptimizerParamScheduler:
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = schedule.lr, schedule.min_lr
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps or max(cfg.train.steps, schedule.warmup_steps + 1),
        lr_decay_style=schedule.decay,
        start_wd=schedule.weight_decay,
        end_wd=schedule.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _finite(ddp: DistributedDataParallel) -> bool:
    # A NaN is both extremes. One pass and no copies, of which `isfinite` on all of it makes three.
    extremes = [torch.stack(buffer.grad_data.aminmax()) for buffer in ddp.buffers]
    return all(bool(pair.isfinite().all()) for pair in extremes)
