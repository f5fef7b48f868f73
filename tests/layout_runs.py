"""What each rank does in the layout tests: train a little, and give back whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.utils import unwrap_model
from reference import Batch, config_for, make_batches
from torch import distributed as dist
from training import make_learner, probe_of

from megatron_logra import checkpoint, distributed
from megatron_logra.model.context_parallel import own_share
from megatron_logra.model.gpt import forward_head
from megatron_logra.model.parameters import EMBEDDING, named_parameters, whole_shape
from megatron_logra.optimizer.learner import Learner
from megatron_logra.sync.receiver import Receiver


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
    activations: bool = False,
) -> Trajectory:
    """Run updates `first` … `first + updates - 1` of the fixed data under a layout.

    Args:
        directory: Hugging Face checkpoint.
        sections: of the configuration.
        load: checkpoint to start from.
        save: root directory in which to save afterwards.
        poison: update in which the last rank's sketch gets a NaN.
        activations: it is its last layer's output that does, in the backward passes' forward.
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
        if pg.cp.size() > 1:  # positions are divided evenly
            batches = [padded(batch, -(-batch.tokens.shape[1] // 8) * 8) for batch in batches]
        poisoned = poison == update and dist.get_rank() == dist.get_world_size() - 1
        with _nan_output(learner) if poisoned and activations else nullcontext():
            backward(learner, batches)
        if poisoned and not activations:
            assert learner.sketch is not None
            target, span = learner.sketch.capture.targets[0], learner.sketch._spans[0]
            target.sketch[span.start if span.stop > span.start else 0, 0] = float("nan")
        steps.append(asdict(learner.step(probe_of(batches[0]))))
    if save is not None:
        checkpoint.save(save, first + updates, _state(learner, False), {}, keep=9)
    return Trajectory(steps, whole_weights(learner), learner.memory_bytes())


@contextmanager
def _nan_output(learner: Learner) -> Iterator[None]:
    """The output of this rank's last layer has a NaN."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        hidden, *rest = output
        spoiled = hidden.clone()
        spoiled.view(-1)[0] = float("nan")
        return (spoiled, *rest)

    layer = learner.chunks[-1].module.decoder.layers[-1]
    handle = layer.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def train_and_save(directory: Path, sections: dict[str, Any], root: Path) -> None:
    """Two updates, then a checkpoint in `root`."""
    train(directory, sections, 2, save=root)


def load_each(
    directory: Path, sections: dict[str, Any], roots: list[Path], to: Path, updates: int
) -> list[Trajectory]:
    """Load what `train_and_save` left in each root, save it again in `to`/NAME and go on."""
    found = []
    for root in roots:
        path = root / "iter_0000002"
        train(directory, sections, 0, first=2, load=path, save=to / root.name)
        if updates:
            found.append(train(directory, sections, updates, first=2, load=path))
    return found


def train_watching_reductions(
    directory: Path, sections: dict[str, Any], updates: int
) -> tuple[Trajectory, list[tuple[int, int]]]:
    """`train`; and of each update how many reductions began before the backward passes ended, and
    how many there were."""
    counts: list[tuple[int, int]] = []
    begun = 0
    reduce, finalize = param_and_grad_buffer.dist_reduce_scatter_func, Learner._finalize_grads

    def reducing(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun += 1
        return reduce(*args, **kwargs)

    def finalizing(*args: Any, **kwargs: Any) -> None:
        nonlocal begun
        before = begun
        finalize(*args, **kwargs)
        counts.append((before, begun))
        begun = 0

    with (
        mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", reducing),
        mock.patch.object(Learner, "_finalize_grads", finalizing),
    ):
        return train(directory, sections, updates), counts


def reduced_sketches(
    directory: Path, sections: dict[str, Any], batches: list[Batch]
) -> dict[str, tuple[torch.Tensor, bool, int]]:
    """The sketch of all batches on this tensor-parallel rank, [d/tp, r], by the weight's name.

    Each data-parallel rank gives the rows it owns. With it: whether the target is row-parallel, and
    how many parts of the rows the rank holds.
    """
    cfg = config_for(directory, **sections)
    learner = make_learner(cfg, distributed.initialize(cfg.parallel, 0))
    backward(learner, batches)
    sketch = learner.sketch
    assert sketch is not None
    found = {}
    for target, span in zip(sketch.capture.targets, sketch._spans, strict=True):
        own = torch.zeros_like(target.sketch)
        own[span] = target.sketch[span]
        dist.all_reduce(own, group=learner.pg.intra_dp_cp)
        found[f"{target.name}.weight"] = (own, target.row_parallel, target.strided)
    return found


def _state(learner: Learner, is_loading: bool) -> dict[str, Any]:
    weights = checkpoint.weights_state(learner.chunks)
    return {**weights, "learner": learner.sharded_state_dict(weights, is_loading)}


@dataclass(frozen=True)
class Part:
    """What a rank gets of a batch, [b, s/cp] each; weights are those of the targets' loss."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def padded(batch: Batch, length: int) -> Batch:
    """With rows of `length`."""
    more = (0, length - batch.tokens.shape[1])
    pad = torch.nn.functional.pad
    return Batch(pad(batch.tokens, more), pad(batch.weights, more))


def part_of(batch: Batch, length: int, cp: dist.ProcessGroup) -> Part:
    """This rank's positions of a batch that is padded to `length`."""
    pad, whole = torch.nn.functional.pad, padded(batch, length)
    next_weights = pad(whole.weights[:, 1:], (0, 1))
    fields = (whole.tokens, whole.positions, whole.tokens.roll(-1, 1), next_weights, whole.mask)
    return Part(*(own_share(field, cp) for field in fields))


def backward(learner: Learner, batches: list[Batch]) -> None:
    """Gradients of all batches, which data-parallel ranks share; the vocabulary is divided."""
    pg = learner.pg
    mine = batches[pg.dp.rank() :: pg.dp.size()]
    lengths = [batch.tokens.shape[1] for batch in mine]
    if len(learner.chunks) > 1:  # the interleaved schedule wants one shape
        lengths = [max(lengths)] * len(lengths)
    parts = [part_of(batch, length, pg.cp) for batch, length in zip(mine, lengths, strict=True)]

    def forward_step(left: Any, model: torch.nn.Module) -> Any:
        part = next(left)

        def head(hidden: torch.Tensor, logits_fn: Any) -> Any:
            loss = vocab_parallel_cross_entropy(
                logits_fn(hidden).float(), part.targets.t().contiguous(), 0.0, pg.tp
            )
            return (part.weights.t() * loss).sum(), part.mask.sum().int(), {}

        return forward_head(model, part.tokens, part.positions, head), lambda output: output

    learner.zero_grad()
    learner.forward_backward(forward_step, parts, max(lengths))


@torch.no_grad()
def whole_weights(learner: Learner | Receiver) -> dict[str, torch.Tensor]:
    """All parameters of the whole model by name, fp32, gathered from the ranks."""
    tp, found = learner.pg.tp, {}
    chunks = unwrap_model(list(learner.chunks))
    own = (pair for chunk in chunks for pair in named_parameters(chunk))
    for name, parameter in own:
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
    stages: list[dict[str, torch.Tensor]] = [{}] * learner.pg.pp.size()
    dist.all_gather_object(stages, found, group=learner.pg.pp)
    if chunks[0].share_embeddings_and_output_weights and len(stages) > 1:
        copy = stages[-1].pop("output_layer.weight")
        assert torch.equal(copy, stages[0][EMBEDDING]), "the copies of a tied weight differ"
    return {name: weight for stage in stages for name, weight in stage.items()}
