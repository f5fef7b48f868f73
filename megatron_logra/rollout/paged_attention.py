"""Attention over a paged KV cache in plain torch: what flash-attn does for Megatron's engine.

The steps, their types and so their roundings are those of Megatron's unfused attention, with which
local layers train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCORES = 1 << 26  # scores of one request that exist at once, unless one query has more


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    return_attn_probs: bool = False,
) -> Any:
    """Causal attention of requests with any numbers of new tokens, behind each other.

    Args:
        q: [tokens, heads, c]; places past the last request are padding.
        k: [blocks, tokens of a block, groups, c], the cache; the new tokens are in it.
        v: like `k`.
        cu_seqlens_q: [requests + 1], where each request's new tokens begin and end.
        cu_seqlens_k: [requests + 1], the same of all its tokens.
        max_seqlen_q: most new tokens of a request (not read).
        max_seqlen_k: most tokens of a request (not read).
        softmax_scale: factor of the scores.
        causal: always true here.
        window_size: (left, right): tokens that are seen before a query; -1 is all.
        block_table: [requests, blocks of a request], places in the cache.
        return_attn_probs: return the log-sum-exp of the scores as well.

    Returns:
        [tokens, heads, c], zero in padding; or that, log-sum-exp [heads, tokens], and None.
    """
    assert causal
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.size(1), q.size(0), dtype=torch.float32)
    starts, totals = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    single = [i for i, total in enumerate(totals) if total and starts[i + 1] - starts[i] == 1]
    if single:  # requests that decode, all at once
        rows = torch.tensor([starts[i] for i in single], device=q.device)
        chosen = torch.tensor(single, device=q.device)
        lengths = cu_seqlens_k.diff()[chosen]
        result, sums = _decode(
            q[rows, None], k, v, lengths, block_table[chosen], softmax_scale, window_size
        )
        out[rows], lse[:, rows] = result[:, 0], sums[:, :, 0].T
    for i, total in enumerate(totals):
        start, end = starts[i], starts[i + 1]
        if end - start < 2:
            continue
        blocks = block_table[i : i + 1, : -(-total // k.size(1))]
        keys, values = _gathered(k, blocks)[:, :total], _gathered(v, blocks)[:, :total]
        step = max(1, _SCORES // (q.size(1) * total))
        for first in range(start, end, step):
            last = min(first + step, end)
            places = torch.arange(total - (end - first), total - (end - last), device=q.device)
            seen = _seen(places[None], total, window_size)
            result, sums = _attend(q[None, first:last], keys, values, seen, softmax_scale)
            out[first:last], lse[:, first:last] = result[0], sums[0]
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Causal attention of requests with the same number of new tokens each, mostly one.

    Args:
        q: [requests, new, heads, c].
        k_cache: [blocks, tokens of a block, groups, c]; the new tokens are in it.
        v_cache: like `k_cache`.
        cache_seqlens: [requests], all tokens of each; 0 for padding.
        softmax_scale: factor of the scores.
        causal: always true here.
        window_size: (left, right): tokens that are seen before a query; -1 is all.
        block_table: [requests, blocks of a request], places in the cache.
        num_splits: how flash-attn divides the work (not read).
        return_softmax_lse: return the log-sum-exp of the scores as well.

    Returns:
        [requests, new, heads, c], zero in padding; or that and log-sum-exp [requests, heads, new].
    """
    assert causal
    result = _decode(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_size)
    return result if return_softmax_lse else result[0]


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """[requests, new, heads, c] and [requests, heads, new], for requests of any lengths."""
    new = q.size(1)
    longest = int(lengths.max())
    blocks = block_table[:, : -(-longest // k.size(1))].clamp_min(0)  # -1 beyond a request's last
    keys, values = _gathered(k, blocks)[:, :longest], _gathered(v, blocks)[:, :longest]
    places = lengths[:, None] - new + torch.arange(new, device=q.device)
    # What is behind a request's end may be anything, such as the NaN of fresh memory.
    behind = torch.arange(longest, device=q.device) >= lengths[:, None]
    values = values.masked_fill(behind[:, :, None, None], 0.0)
    out, lse = _attend(q, keys, values, _seen(places, longest, window), scale)
    return out.masked_fill((lengths == 0)[:, None, None, None], 0.0), lse


def _gathered(cache: Tensor, blocks: Tensor) -> Tensor:
    """[blocks, size, groups, c] at [requests, n] → [requests, n · size, groups, c]."""
    return cache[blocks.long()].flatten(1, 2)


def _seen(places: Tensor, total: int, window: tuple[int, int]) -> Tensor:
    """[requests, new] places of queries → [requests, new, total], what each may look at."""
    distance = places[:, :, None] - torch.arange(total, device=places.device)
    seen = distance >= 0
    return seen & (distance <= window[0]) if window[0] >= 0 else seen


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[b, m, heads, c] at [b, total, groups, c] → [b, m, heads, c] and [b, heads, m] float32."""
    b, m, heads, c = q.shape
    groups = k.size(2)
    # The query heads that share a key head are the rows of one matrix product.
    query = q.view(b, m, groups, -1, c).permute(0, 2, 3, 1, 4).reshape(b * groups, -1, c)
    key, value = (t.transpose(1, 2).reshape(b * groups, -1, c) for t in (k, v))
    scores = torch.baddbmm(query.new_empty(1), query, key.mT, beta=0.0, alpha=scale).float()
    scores = scores.view(b, heads, m, -1).masked_fill_(~seen[:, None], float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = scores.softmax(dim=-1).to(v.dtype).view(b * groups, -1, scores.size(-1))
    out = torch.bmm(weights, value).view(b, heads, m, c).transpose(1, 2)
    return out, lse
