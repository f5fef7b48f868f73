"""Megatron's local attention in forward mode: rotary embeddings, and a block of queries at a time.

The attention module itself holds all scores [b, heads, s, s] at once and, with their tangents,
several times over: for a long response more memory than all else in a probe's pass. Here a block of
queries meets the keys that it may see: memory grows with s instead of s², causal attention
multiplies half as much, and what is done element by element stays in the cache.

Both functions take the original first, for what they do not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

SCORES = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Scores of one block, by the device: a few such matrices are what its cache has room for."""
FEWEST_QUERIES = 16
"""Of a block, however many keys there are."""
HIDDEN = -10000.0
"""The score of what may not be seen, as in Megatron."""

Original = Callable[..., Tensor]


def rotated(
    original: Original, t: Tensor, freqs: Tensor, *others: Any, mscale: float = 1.0, **named: Any
) -> Tensor:
    """Queries or keys [s, b, heads, c], rotated by angles [s, 1, 1, c] as Megatron does."""
    value, tangent = forward_ad.unpack_dual(t)
    half = freqs.shape[-1] // 2
    if tangent is None or any((*others, *named.values())) or 2 * half != t.shape[-1]:
        return original(t, freqs, *others, mscale=mscale, **named)
    cos, sin = ((turn(freqs) * mscale).to(t.dtype) for turn in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        result = x * cos
        result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        result[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return result

    with torch._C.DisableTorchFunction():  # nothing in here has a tangent of its own
        return forward_ad.make_dual(rotate(value), rotate(tangent))


def attention(
    original: Original,
    module: DotProductAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> Tensor:
    """What local attention makes of dual tensors, [s, b, heads · c].

    With Z = scale · Q Kᵀ and P = softmax(Z), the tangent of P V is Ṗ V + P V̇, where
    Ṗ = P ∘ (Ż - Σ P ∘ Ż).

    Args:
        query: [s, b, heads, c].
        key: [t, b, groups, c].
        value: likewise.
        attention_mask: [1 or b, 1, s, t] bool, true where nothing may be seen; None: by the
            kind of the module.
    """
    softmax = module.scale_mask_softmax
    moving = all(forward_ad.unpack_dual(x).tangent is not None for x in (query, key, value))
    drops = module.training and module.attention_dropout.p > 0
    odd = softmax.window_size is not None and min(softmax.window_size) < 0
    if not moving or drops or odd or module.softmax_offset is not None:
        return original(module, query, key, value, attention_mask, **others)
    with torch._C.DisableTorchFunction():
        return _by_blocks(module, query, key, value, attention_mask)


def _by_blocks(
    module: DotProductAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """`attention` where all has a tangent."""
    (length, batch, heads, channels), (there, _, groups, _) = query.shape, key.shape
    softmax = module.scale_mask_softmax
    wide = softmax.input_in_float16 and softmax.softmax_in_fp32
    behind, ahead = there, there  # how far a query sees
    if softmax.window_size is not None:
        (behind, ahead), mask = softmax.window_size, None
    elif mask is None and module.attn_mask_type == AttnMaskType.causal:
        ahead = 0

    def by_group(dual: Tensor) -> list[Tensor]:
        """Value and tangent [s, b, heads, c] as [b · groups, heads of a group, s, c]."""
        parts = [part.unflatten(2, (groups, -1)) for part in forward_ad.unpack_dual(dual)]
        return [part.permute(1, 2, 3, 0, 4).flatten(0, 1) for part in parts]

    queries, keys, values = by_group(query), by_group(key), by_group(value)
    result, change = (query.new_empty(length, batch, heads, channels) for _ in range(2))
    fitting = SCORES[query.device.type] // (batch * heads * there)
    size = max(FEWEST_QUERIES, 1 << fitting.bit_length() >> 1)  # a power of two: quicker products
    for first in range(0, length, size):
        last = min(first + size, length)
        begin, end = max(0, first - behind), min(last + ahead, there)
        q, dq = (part[:, :, first:last].flatten(1, 2) for part in queries)
        k, dk, v, dv = (part[:, 0, begin:end] for part in (*keys, *values))

        scores = _products((q, k), scale=module.softmax_scale)
        moved = _products((dq, k), (q, dk), scale=module.softmax_scale)
        if wide:
            scores, moved = scores.float(), moved.float()
        if softmax.scale is not None:
            scores, moved = scores.mul_(softmax.scale), moved.mul_(softmax.scale)
        by_head = scores.view(batch, heads, last - first, end - begin)
        if mask is not None:
            by_head.masked_fill_(mask[..., first:last, begin:end], HIDDEN)
        elif min(behind, ahead) < there:
            here = torch.arange(first, last, device=key.device).unsqueeze(1)
            seen = torch.arange(begin, end, device=key.device)
            by_head.masked_fill_((seen > here + ahead) | (seen < here - behind), HIDDEN)

        weights = torch.softmax(scores, dim=-1)
        moved.mul_(weights)
        moved.addcmul_(weights, moved.sum(dim=-1, keepdim=True), value=-1)
        weights, moved = weights.to(v.dtype), moved.to(v.dtype)
        for whole, block in (
            (result, torch.bmm(weights, v)),
            (change, torch.bmm(moved, v).baddbmm_(weights, dv)),
        ):
            block = block.unflatten(1, (-1, last - first)).unflatten(0, (batch, groups))
            whole[first:last] = block.permute(3, 0, 1, 2, 4).flatten(2, 3)
    return forward_ad.make_dual(result.flatten(2), change.flatten(2))


def _products(*pairs: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """scale · Σ x yᵀ, of batches of matrices."""
    total = pairs[0][0].new_empty(1)
    for index, (x, y) in enumerate(pairs):
        total = torch.baddbmm(total, x, y.mT, beta=float(index > 0), alpha=scale)
    return total
