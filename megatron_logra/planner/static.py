"""What a rank keeps between steps: exactly the bytes that `Learner.memory_bytes` counts.

The flat buffers' places and padding come from the same functions that lay them out, run over
tensors without memory; tensor-parallel ranks hold equal parts.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from megatron_logra import data_parallel
from megatron_logra.config import Config
from megatron_logra.memory import KINDS
from megatron_logra.optimizer.master_weights import master_bytes
from megatron_logra.planner.shapes import BYTES, Chunk, Kind, Model, Shape, Stage, layout_of
from megatron_logra.sketch.layout import sketch_layout
from megatron_logra.sketch.projection import projection_bytes

_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def static_memory(
    cfg: Config, kind: Kind | None = None, *, ranks: int | None = None, rank: int = 0
) -> dict[str, int]:
    """Bytes of one rank by kind (see `memory.KINDS`) and their sum `static`.

    Args:
        cfg: the configuration.
        kind: optimizer; default `optimizer.kind`.
        ranks: of the run; default as few as `parallel` takes.
        rank: which of them.

    Raises:
        UserError: the configuration does not fit the model or the ranks.
    """
    layout = layout_of(cfg, ranks)
    model = Model(cfg, layout)
    stage = model.stage(layout.stage(rank), kind or cfg.optimizer.kind)
    return StageBuffers(model, stage).static()[layout.shard(rank)]


class StageBuffers:
    """The flat buffers of a pipeline stage, and who owns which part of them.

    Args:
        model: the model under its layout.
        stage: one of its stages.
    """

    def __init__(self, model: Model, stage: Stage) -> None:
        self.cfg = model.cfg
        self.stage = stage
        self.tensor = model.layout.tensor
        self.instances = model.cfg.parallel.optimizer_instances
        self.shards = model.layout.shards // self.instances
        """Ranks over which the optimizer state is divided."""
        self._ddp = data_parallel.ddp_config(model.cfg.parallel, model.layout.shards)
        self._bucket_size = data_parallel.bucket_size(self._ddp, stage.number)
        self.gradients = [self._dense_layout(c) for c in stage.chunks if c.trained]
        """Megatron's buffers of the weights that Adam trains, one a model chunk."""
        self.sketches = [self._sketch_layout(c) for c in stage.chunks if c.targets]
        """The sketches' buffers, one a model chunk."""

    @property
    def gradient_elements(self) -> int:
        """Length of the gradient buffers, padding included."""
        return sum(map(_length, self.gradients))

    @property
    def sketch_elements(self) -> int:
        """Length of the sketches' buffers, padding included."""
        return sum(map(_length, self.sketches))

    def static(self) -> list[dict[str, int]]:
        """Bytes by kind and their sum `static`, for each of the ranks that share the stage."""
        cfg, stage = self.cfg, self.stage
        weight, factor = BYTES[cfg.train.precision], BYTES[cfg.step_control.factor_dtype]
        common = dict.fromkeys(KINDS, 0)
        unbuffered = sum(s.numel for s in [*stage.targets, *stage.frozen])
        common["weights"] = weight * (unbuffered + self.gradient_elements)
        common["gradients"] = 4 * self.gradient_elements
        common["sketches"] = (4 + factor) * self.sketch_elements
        common["projections"] = projection_bytes(
            sum(s.size[1] for s in stage.targets), cfg.sketch.rank, cfg.sketch.distribution
        )
        found = []
        for shard, (trained, sketched) in enumerate(
            zip(
                _owned(self.gradients, self.shards), _owned(self.sketches, self.shards), strict=True
            )
        ):
            sizes = dict(common)
            sizes["master"] = master_bytes(
                self._master_elements(shard), cfg.train.precision, cfg.optimizer.master
            )
            if cfg.train.precision == "bf16":
                sizes["master"] += 4 * trained
            # Two fp32 moments for each number of Adam's; one for each row of a sketch.
            sizes["optimizer"] = 8 * trained + 4 * (sketched // cfg.sketch.rank)
            found.append(sizes | {"static": sum(sizes.values())})
        return found * self.instances

    def _master_elements(self, shard: int) -> int:
        """Elements of targets whose fp32 value this rank completes (see `master_weights`)."""
        if self.cfg.optimizer.master == "replicated":
            return sum(s.numel for s in self.stage.targets)
        total = 0
        for rows, columns in (s.size for s in self.stage.targets):
            share = -(-rows // self.shards)
            total += (min(share * (shard + 1), rows) - min(share * shard, rows)) * columns
        return total

    def _dense_layout(self, chunk: Chunk) -> PerBufferParamLayout:
        tensors = _meta(chunk.trained, _DTYPE[self.cfg.train.precision])
        return _only_buffer(
            DistributedOptimizer.compute_full_param_layout(
                tensors, self._bucket_size, self.shards, self._ddp
            )
        )

    def _sketch_layout(self, chunk: Chunk) -> PerBufferParamLayout:
        rank = self.cfg.sketch.rank
        proxies = [Shape(s.name, (sketch_rows(s, self.tensor), rank)) for s in chunk.targets]
        tensors = _meta(proxies, _DTYPE[self.cfg.step_control.factor_dtype])
        return _only_buffer(sketch_layout(tensors, rank, self.shards, self._ddp, self._bucket_size))


def sketch_rows(target: Shape, tensor: int) -> int:
    """Rows of a target's sketch on a tensor-parallel rank, from the rank's part of the weight.

    A row-parallel weight has all rows on each rank, and its sketch's rows are divided.
    """
    return target.size[0] // tensor if target.split == 1 else target.size[0]


def _meta(shapes: list[Shape], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    tensors = []
    for shape in shapes:
        tensor = torch.nn.Parameter(torch.empty(shape.size, dtype=dtype, device="meta"))
        tensor.shared_embedding = shape.tied  # type: ignore[attr-defined]
        tensors.append(tensor)
    return tensors


def _only_buffer(layout: FullParamLayout) -> PerBufferParamLayout:
    (buffer,) = layout.layouts.values()
    return buffer


def _length(layout: PerBufferParamLayout) -> int:
    return layout.bucket_indices[-1][1]


def _owned(layouts: list[PerBufferParamLayout], shards: int) -> list[int]:
    """Numbers of parameters, padding aside, in the parts of the buffers that each rank owns."""
    owned = [0] * shards
    for layout in layouts:
        for start, end, bucket in layout.param_index_map.values():
            first, last = layout.bucket_indices[bucket]
            share = (last - first) // shards
            for shard in range((start - first) // share, (end - 1 - first) // share + 1):
                low = first + share * shard
                owned[shard] += min(end, low + share) - max(start, low)
    return owned
