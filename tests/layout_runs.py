"""What each rank does in the layout tests: train a little, and give back whole weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from reference import Batch, config_for, make_batches
from torch import distributed as dist
from training import make_learner, probe_of

from megatron_logra import checkpoint, distributed
from megatron_logra.model.gpt import forward_head
from megatron_logra.model.parameters import named_parameters, whole_shape
from megatron_logra.optimizer.learner import Learner


@dataclass(frozen=True)
class Trajectory:
    """A run's results by update, the whole weights afterwards, and bytes by kind of this rank."""

    steps: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    bytes_by_kind: dict[str, int]


def train(
    directory: Path,
    sections: dict[str, Any],
    updates: int,
    *,
    first: int = 0,
    load: Path | None = None,
    save: Path | None = None,
    poison: int | None = None,
) -> Trajectory:
    """Run updates `first` … `first + updates - 1` of the fixed data under a layout.

    Args:
        directory: Hugging Face checkpoint.
        sections: of the configuration.
        load: checkpoint to start from.
        save: root directory in which to save afterwards.
        poison: update in which the last rank's sketch gets a NaN.
    """
    cfg = config_for(directory, **sections)
    pg = distributed.initialize(cfg.parallel, 0)
    learner = make_learner(cfg, pg)
    if load is not None:
        loaded = checkpoint.load(load, _state(learner, True))
        checkpoint.set_weights(learner.chunks, loaded)
        learner.load_state_dict(loaded["learner"])
    steps = []
    for update in range(first, first + updates):
        generator = torch.Generator().manual_seed(update)
        batches = make_batches(generator, [[18, 9], [12, 20], [6, 32], [8, 28]])
        backward(learner, batches)
        if poison == update and dist.get_rank() == dist.get_world_size() - 1:
            assert learner.sketch is not None
            target, span = learner.sketch.capture.targets[0], learner.sketch._spans[0]
            target.sketch[span.start if span.stop > span.start else 0, 0] = float("nan")
        steps.append(asdict(learner.step(probe_of(batches[0]))))
    if save is not None:
        checkpoint.save(save, first + updates, _state(learner, False), {}, keep=9)
    return Trajectory(steps, whole_weights(learner), learner.memory_bytes())


def _state(learner: Learner, is_loading: bool) -> dict[str, Any]:
    weights = checkpoint.weights_state(learner.chunks)
    return {**weights, "learner": learner.sharded_state_dict(weights["model0"], is_loading)}


def backward(learner: Learner, batches: list[Batch]) -> None:
    """Gradients of all batches; data-parallel ranks share them, the vocabulary is divided."""
    pg = learner.pg
    mine = batches[pg.dp.rank() :: pg.dp.size()]

    def forward_step(left: Any, model: torch.nn.Module) -> Any:
        batch = next(left)

        def head(hidden: torch.Tensor, logits_fn: Any) -> Any:
            targets = batch.tokens.roll(-1, 1).t().contiguous()
            loss = vocab_parallel_cross_entropy(logits_fn(hidden).float(), targets, 0.0, pg.tp)
            weights = torch.nn.functional.pad(batch.weights[:, 1:], (0, 1)).t()
            return (weights * loss).sum(), batch.mask.sum().int(), {}

        return forward_head(model, batch.tokens, batch.positions, head), lambda output: output

    learner.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=learner.chunks,
        num_microbatches=len(mine),
        seq_length=mine[0].tokens.shape[1],
        micro_batch_size=2,
        forward_only=False,
    )


@torch.no_grad()
def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    """All parameters of the whole model by name, fp32, gathered from the ranks."""
    tp, found = learner.pg.tp, {}
    for name, parameter in named_parameters(learner.chunks[0].module):
        whole = parameter.detach().float().contiguous()
        if tp.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(whole) for _ in range(tp.size())]
            dist.all_gather(parts, whole, group=tp)
            dim, stride = parameter.partition_dim, parameter.partition_stride
            pieces = [part.chunk(stride, dim) for part in parts]
            whole = torch.cat([p[i] for i in range(stride) for p in pieces], dim)
        rows = whole_shape(parameter, tp.size())[0]
        assert not whole[rows:].any()  # a vocabulary's padding stays what it was
        found[name] = whole[:rows]
    return found
