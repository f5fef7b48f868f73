"""Tiny random models of transformers' own classes, one for each family, with odd sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 131,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Heads are more than groups, head_dim is not hidden/heads, nothing is a power of two."""

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_TWO_BASES = {
    _LOCAL: {"rope_type": "default", "rope_theta": 500.0},
    _GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 7000.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"hidden_size": 72}),
    "qwen2-window": (
        "Qwen2",
        {
            "hidden_size": 72,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"hidden_size": 72, "num_hidden_layers": 4}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL, _LOCAL],
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "rope_parameters": _TWO_BASES,
        },
    ),
}
"""Prefix of the classes in transformers, and what is special."""


def reference(family: str, generator: torch.Generator, **changes: Any) -> torch.nn.Module:
    """A model in which every norm weight and bias is random, too."""
    prefix, special = FAMILIES[family]
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    model = model_class(config_class(**(SIZES | special | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model
