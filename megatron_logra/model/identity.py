"""What makes a checkpoint one of a certain model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.model.gpt import GPTArguments

_ALWAYS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "normalization", "layernorm_epsilon", "gated_linear_unit", "qk_layernorm"),
    *("add_bias_linear", "add_qkv_bias"),
)
_IF_SET = (
    *("window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_scale"),
    "layernorm_zero_centered_gamma",
)
_ARGUMENTS_IF_CHANGED = (
    *("rotary_base_local", "post_layernorms", "scale_embeddings"),
    *(field.name for field in fields(GPTArguments) if field.name.startswith("yarn_")),
)
# The length only bounds what may be fed, and the seed no longer matters once there are weights.
_NOT_IDENTITY = ("max_sequence_length", "seed")


def describe(config: TransformerConfig, arguments: GPTArguments) -> dict[str, Any]:
    """The model in plain values, the layout left out; what few models have only where they do."""
    found = {name: getattr(config, name) for name in _ALWAYS}
    found["activation_func"] = getattr(config.activation_func, "__name__", "unknown")
    for field in fields(GPTArguments):
        value = getattr(arguments, field.name)
        default = field.name in _ARGUMENTS_IF_CHANGED and value == field.default
        if not default and field.name not in _NOT_IDENTITY:
            found[field.name] = _plain(value)
    for name in _IF_SET:
        value = getattr(config, name)
        if value:
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A value as it comes out of JSON."""
    return list(value) if isinstance(value, tuple) else value
