"""How gradients and sketches are reduced over data-parallel ranks: Megatron's DDP and its buckets.

With overlap, a flat buffer is cut into buckets, and the reduction of each starts as soon as the
last micro-batch's backward pass has filled it. With several optimizer instances (one a node, say)
ranks share state with those of their own instance only: a bucket is reduce-scattered within each
instance, then each rank's share all-reduced across instances; parameters are gathered within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout

from megatron_logra.config import ParallelConfig


def ddp_config(parallel: ParallelConfig, ranks: int) -> DistributedDataParallelConfig:
    """Settings of Megatron's DDP for `ranks` data- and context-parallel ranks."""
    overlap = parallel.overlap_grad_reduce
    # Large buckets for many ranks: a ring is bound by latency if each share is small.
    default = max(40_000_000, 1_000_000 * ranks)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=ranks > 1 if overlap is None else overlap,
        bucket_size=parallel.bucket_size or default,
        num_distributed_optimizer_instances=parallel.optimizer_instances,
    )


def bucket_size(config: DistributedDataParallelConfig, stage: int) -> int | None:
    """Numbers after which a bucket is closed; None makes one of the whole buffer.

    Later pipeline stages end their backward passes earlier: nobody waits for their reduction.
    """
    return config.bucket_size if config.overlap_grad_reduce and stage == 0 else None


def dense_layout(
    parameters: list[torch.nn.Parameter],
    bucket_size: int | None,
    ranks: int,
    config: DistributedDataParallelConfig,
) -> FullParamLayout:
    """Megatron's layout of parameters in flat buffers, with padding between buckets counted in.

    Its fully reshardable checkpoints leave that padding out of a buffer's tensor, and then look for
    parameters where they are in the padded one: all behind the first padding would be saved wrong.
    (There are several buckets with overlap, and where a tied embedding has one of its own.)
    """
    layout = DistributedOptimizer.compute_full_param_layout(parameters, bucket_size, ranks, config)
    for buffer in layout.layouts.values():
        sizes = [end - start for start, end in buffer.bucket_indices]
        buffer.per_bucket_numel_unpadded[:-1] = sizes[:-1]
    return layout


def start_reductions(
    ddps: Iterable[DistributedDataParallel],
) -> Callable[[torch.nn.Parameter], None]:
    """A function to call with a parameter of `ddps` each time a micro-batch's gradient is in it."""
    groups = {p: group for ddp in ddps for p, group in ddp.param_to_bucket_group.items()}
    return lambda parameter: groups[parameter].register_grad_ready(parameter)


def gather_bytes(buffers: Iterable[torch.Tensor], ranks: int) -> int:
    """Bytes that one of `ranks` ranks sends in a ring to all-gather or reduce-scatter."""
    return sum(b.numel() * b.element_size() * (ranks - 1) // ranks for b in buffers)


def reduce_bytes(buffers: Iterable[torch.Tensor], ranks: int, instances: int) -> int:
    """Bytes that one rank of `instances` times `ranks` sends to reduce `buffers`, in rings."""
    buffers = list(buffers)
    shares = sum(b.numel() * b.element_size() // ranks for b in buffers)
    return gather_bytes(buffers, ranks) + 2 * shares * (instances - 1) // instances
