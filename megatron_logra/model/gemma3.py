"""What Gemma 3 has beyond Megatron's GPT, for local and for Transformer Engine's layers.

Its attention and MLP end in a norm of their own, before the residual is added; the layers with a
sliding window rotate by another base than the others; embeddings are multiplied by √hidden. (The
(1 + γ) norms, the windows, the norms of queries and keys and the scale of the attention are in
Megatron's configuration.) The norms are modules inside attention and MLP, so that linears stay what
they are to sketches: modules whose output is W x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    sharded_state_dict_default,
)
from torch import Tensor

if TYPE_CHECKING:
    from megatron_logra.model.gpt import GPTArguments


@dataclass(kw_only=True)
class Gemma3AttentionSubmodules(SelfAttentionSubmodules):
    """With the class of the norm at the end."""

    post_layernorm: Any


@dataclass(kw_only=True)
class Gemma3MLPSubmodules(MLPSubmodules):
    """With the class of the norm at the end."""

    post_layernorm: Any


class Gemma3Attention(SelfAttention):
    """Self-attention with the rotary base of its layer, and a norm at the end."""

    def __init__(
        self, config: TransformerConfig, submodules: Gemma3AttentionSubmodules, **options: Any
    ) -> None:
        super().__init__(config=config, submodules=submodules, **options)
        self.post_layernorm = _norm(config, submodules)

    def own_angles(self, angles: Tensor) -> Tensor:
        """The half of what `TwoBases` gives that belongs to this layer, [s, 1, 1, c]."""
        window, skip = self.config.window_size, self.config.window_attn_skip_freq
        local = is_layer_window_attention(window, skip, self.layer_number)
        return angles.chunk(2, dim=-1)[int(local)]

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Hidden states [s, b, h] → the same; never a bias that is left to add."""
        if rotary_pos_emb is not None:
            rotary_pos_emb = self.own_angles(rotary_pos_emb)
        output, bias = super().forward(
            hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **options
        )
        return self.post_layernorm(output if bias is None else output + bias), None


class Gemma3MLP(MLP):
    """The MLP with a norm at the end."""

    def __init__(
        self, config: TransformerConfig, submodules: Gemma3MLPSubmodules, **options: Any
    ) -> None:
        super().__init__(config=config, submodules=submodules, **options)
        self.post_layernorm = _norm(config, submodules)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Hidden states [s, b, h] → the same; never a bias that is left to add."""
        output, bias = super().forward(hidden_states, *args, **options)
        return self.post_layernorm(output if bias is None else output + bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, where what it does not know is for one tensor-parallel rank alone."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return found | sharded_state_dict_default(
            self.post_layernorm,
            f"{prefix}post_layernorm.",
            sharded_offsets,
            ensure_metadata_has_dp_cp_group(metadata),
            tp_group=self.tp_group,
        )


def _norm(
    config: TransformerConfig, submodules: Gemma3AttentionSubmodules | Gemma3MLPSubmodules
) -> torch.nn.Module:
    norm: torch.nn.Module = submodules.post_layernorm(
        config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
    )
    return norm


class TwoBases(RotaryEmbedding):
    """Angles by two bases, side by side: [s, 1, 1, 2c], of layers without and with a window.

    Args:
        local: the embedding of the layers with a window.
        options: those of RotaryEmbedding, for the others.
    """

    def __init__(self, local: RotaryEmbedding, **options: Any) -> None:
        super().__init__(**options)
        self.local = local

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of the positions offset … offset + max_seq_len - 1."""
        parts = super().get_emb(max_seq_len, offset), self.local.get_emb(max_seq_len, offset)
        return torch.cat(parts, dim=-1)


def wanted(arguments: GPTArguments) -> bool:
    """Whether the model's layers are Gemma 3's."""
    return bool(arguments.post_layernorms)


def complete(model: GPTModel, arguments: GPTArguments) -> None:
    """Give a GPT what it needs outside of the layers to be a Gemma 3."""
    config = model.config
    if wanted(arguments):
        place: dict[str, Any] = {
            "kv_channels": config.kv_channels,
            "rotary_percent": arguments.rotary_percent,
            "use_cpu_initialization": config.use_cpu_initialization,
            "cp_group": model.pg_collection.cp,
        }
        base = arguments.rotary_base_local or arguments.rotary_base
        model.rotary_pos_emb = TwoBases(
            RotaryEmbedding(rotary_base=base, **place),
            rotary_base=arguments.rotary_base,
            seq_len_interpolation_factor=arguments.seq_len_interpolation_factor,
            rope_scaling=arguments.rope_scaling,
            rope_scaling_factor=arguments.rope_scaling_factor,
            **place,
        )
    if arguments.scale_embeddings and model.pre_process:
        root = torch.tensor(math.sqrt(config.hidden_size), dtype=config.params_dtype, device="cpu")
        scale = float(root)
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output * scale)
