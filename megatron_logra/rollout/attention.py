"""Quicker attention for decoding with Megatron's local (unfused) layers.

Megatron's static KV cache keeps keys without their rotary embedding and rotates all of them at
every step, and its unfused attention copies keys and values once per query head. Both costs grow
with the length of the sequence and exceed that of the weights after a few dozen tokens. While the
context manager is open, keys are rotated once, when they enter the cache, and a decode step reads
the cache in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from megatron_logra.model.gemma3 import Gemma3Attention


def decodes_quickly(model: GPTModel) -> bool:
    """Whether `quick_decoding` changes anything about `model`."""
    config = model.config
    return (
        len(_with_local_attention(model)) == len(model.decoder.layers)
        and model.position_embedding_type in ("rope", "yarn")
        and not (config.flash_decode or config.multi_latent_attention)
    )


def _with_local_attention(model: GPTModel) -> list[SelfAttention]:
    return [
        module
        for module in model.modules()
        if isinstance(module, SelfAttention)
        and isinstance(module.core_attention, DotProductAttention)
    ]


@contextmanager
def quick_decoding(model: GPTModel, length: int) -> Iterator[None]:
    """Let `model` decode as described above, over sequences of up to `length` tokens.

    Only the attention cores of the local layers with rotary embeddings are replaced, and put back
    at the end; other models (Transformer Engine's attention is quick by itself) stay as they are.
    Within, every forward pass needs a fresh static inference context or one filled within.
    """
    if not decodes_quickly(model):
        yield
        return
    cores = _with_local_attention(model)
    # As if for a packed sequence: of all positions, whatever a context-parallel rank trains on.
    angles, factor = model.rotary_pos_emb(length, packed_seq=True), 1.0
    if model.position_embedding_type == "yarn":
        angles, factor = angles
    originals = [module.core_attention for module in cores]
    position_embedding_type = model.position_embedding_type
    try:
        # Megatron's own layers do not rotate anything then: the cores below do.
        model.position_embedding_type = "none"
        for module, original in zip(cores, originals, strict=True):
            own = _angles_of(module, angles)
            module.core_attention = _DecodingCore(original, own, factor)
        yield
    finally:
        model.position_embedding_type = position_embedding_type
        for module, original in zip(cores, originals, strict=True):
            module.core_attention = original


def _angles_of(module: SelfAttention, angles: Tensor) -> Tensor | None:
    """The angles by which a layer rotates, [length, 1, 1, c]; None if it does not."""
    without = module.config.no_rope_freq
    if without and without[module.layer_number - 1]:
        return None
    return module.own_angles(angles) if isinstance(module, Gemma3Attention) else angles


class _DecodingCore(nn.Module):
    """Rotates queries and new keys, and attends from one query position to all cached keys."""

    def __init__(
        self, original: DotProductAttention, angles: Tensor | None, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.original = original
        self.angles = angles  # [length, 1, 1, rotated channels] float32; None: no rotation
        self.factor = factor  # YaRN's, on what is rotated
        softmax = original.scale_mask_softmax
        self.layer_scale = softmax.scale  # undoes the division by the layer's number, in float32
        self.plain = softmax.window_size is None and original.softmax_offset is None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """[new, b, heads, c], twice [all, b, groups, c] → [new, b, heads · c].

        `key` is a view of the cache whose last `new` positions are rotated in place.
        """
        new, total = query.size(0), key.size(0)
        if self.angles is not None:
            angles = self.angles[total - new : total]
            query = self._rotate(query, angles)
            key[total - new :] = self._rotate(key[total - new :], angles)
        if new > 1 or not self.plain:
            # Megatron's own, also of a subclass that divides positions over ranks.
            return DotProductAttention.forward(
                self.original, query, key, value, attention_mask, **options
            )
        _, batch, heads, channels = query.shape
        groups = key.size(2)
        # The query heads that share a key head are the rows of one small matrix product. Products
        # of transposed bf16 matrices are slow on CPUs: a plain copy first pays off.
        query = query.reshape(batch * groups, heads // groups, channels)
        key, value = (
            memory.reshape(total, batch * groups, channels).transpose(0, 1).contiguous()
            for memory in (key, value)
        )
        # The steps, their types and so their roundings are those of Megatron's attention. Any
        # others would move bf16 log-probabilities by more than a policy update does.
        scores = torch.baddbmm(
            query.new_empty(1), query, key.mT, beta=0.0, alpha=self.original.softmax_scale
        ).float()
        if self.layer_scale is not None:
            scores *= self.layer_scale
        result = torch.bmm(scores.softmax(dim=-1).to(value.dtype), value)
        return result.reshape(1, batch, heads * channels)

    def _rotate(self, tensor: Tensor, angles: Tensor) -> Tensor:
        original = self.original
        return apply_rotary_pos_emb(
            tensor,
            angles,
            config=original.config,
            mscale=self.factor,
            cp_group=original.pg_collection.cp,
        )
