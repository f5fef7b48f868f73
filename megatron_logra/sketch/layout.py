"""Where the sketches lie in Megatron's flat buffer, aligned so that no row is split.

A sketch is sharded by its rows: data-parallel rank i owns the i-th equal share of every bucket.
Megatron's own layout cuts shares at any multiple of 64 elements; here parameters start, and shares
end, at multiples of the sketch rank as well, so that each row belongs to one rank.
"""

from __future__ import annotations

import math

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import (
    FullParamLayout,
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_param_start,
    pad_to_divisor,
)


def sketch_layout(
    proxies: list[torch.nn.Parameter],
    rank: int,
    data_parallel_size: int,
    ddp_config: object,
    bucket_size: int | None = None,
) -> FullParamLayout:
    """Layout of the proxy parameters in one buffer.

    Args:
        proxies: parameters [rows, r]; tensors on the meta device will do.
        rank: sketch rank r.
        data_parallel_size: ranks that share the buffer.
        ddp_config: Megatron's DistributedDataParallelConfig.
        bucket_size: elements after which a bucket is closed; None makes one bucket.
    """
    # Megatron's grouping gives the buffer's key and the bookkeeping; the places are ours.
    base = DistributedOptimizer.compute_full_param_layout(
        proxies, bucket_size, data_parallel_size, ddp_config
    )
    ((key, grouped),) = base.layouts.items()
    padded_nccl = ddp_config.pad_buckets_for_high_nccl_busbw  # type: ignore[attr-defined]
    share = math.lcm(bucket_end_divisor(1, padded_nccl), rank)
    places: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    bucket_start = end = 0

    def close_bucket() -> int:
        unpadded.append(end - bucket_start)
        bucket_end = pad_to_divisor(end, share * data_parallel_size)
        buckets.append((bucket_start, bucket_end))
        return bucket_end

    for proxy in reversed(proxies):  # the order in which the backward pass fills them
        start = pad_to_divisor(pad_param_start(end), math.lcm(64, rank))
        end = start + proxy.numel()
        places[proxy] = (start, end, len(buckets))
        if bucket_size is not None and end - bucket_start >= bucket_size:
            bucket_start = end = close_bucket()
    if end > bucket_start:
        close_bucket()
    layout = PerBufferParamLayout(
        param_index_map=places,
        bucket_indices=buckets,
        per_bucket_numel_unpadded=unpadded,
        param_indices=grouped.param_indices,
        num_optimizer_shards=data_parallel_size,
    )
    return FullParamLayout(layouts={key: layout})
