"""Context parallelism: which positions a rank holds, and attention across them for local layers.

Positions are divided as Megatron divides rotary embeddings: into 2·n equal blocks, of which rank i
holds the i-th from the front and the i-th from the back. Under a causal mask that is equal work.
Megatron's local attention knows no context parallelism (Transformer Engine's does). The one here
gathers keys and values over the ranks, which costs their memory once a layer but no new kernel;
its backward sums their gradients where they belong.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch import distributed as dist


def length_multiple(context: int, sequence: int) -> int:
    """What the length of a sequence has to be a multiple of, so that ranks can share its positions.

    Args:
        context: context-parallel ranks, each of which holds two blocks.
        sequence: tensor-parallel ranks that divide positions between linears; 1 if they do not.
    """
    return sequence * (2 * context if context > 1 else 1)


def own_positions(length: int, group: dist.ProcessGroup) -> Tensor:
    """Positions of a sequence that this rank holds, [length / n] int64 in their order here.

    Args:
        length: of the whole sequence, a multiple of 2·n.
        group: the n context-parallel ranks.
    """
    return _positions(length, group.rank(), group.size())


def own_share(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's positions of [b, s, …]: [b, s/n, …]."""
    if group.size() == 1:
        return tensor
    return tensor.index_select(1, own_positions(tensor.shape[1], group).to(tensor.device))


def _positions(length: int, rank: int, ranks: int) -> Tensor:
    blocks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat((blocks[rank], blocks[2 * ranks - 1 - rank]))


class ContextParallelAttention(DotProductAttention):
    """Causal attention from this rank's positions to those of all context-parallel ranks."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)  # the base refuses more
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s/n, b, heads, c], twice [s/n, b, groups, c] → [s/n, b, heads · c]."""
        group = self.pg_collection.cp
        channels = key.shape[-1]
        both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
        length = both.shape[0]
        there = torch.cat([_positions(length, rank, group.size()) for rank in range(group.size())])
        here = own_positions(length, group)[:, None]
        softmax = self.scale_mask_softmax
        window = softmax.window_size
        mask = there > here
        if window is not None:
            mask |= there < here - window[0]
        keys, values = both[..., :channels].contiguous(), both[..., channels:].contiguous()
        softmax.window_size = None  # it would make a mask of its own, for positions in order
        try:
            return super().forward(query, keys, values, mask[None, None].to(query.device))
        finally:
            softmax.window_size = window
