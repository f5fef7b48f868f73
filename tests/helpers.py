"""Tiny models and configurations for the tests."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_logra.config import Config, config_from_dict
from megatron_logra.model.gpt import build_model, transformer_config

TINY_SPEC: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 12,
    "vocab_size": 131,
    "max_sequence_length": 64,
    "rotary_base": 5000.0,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "share_embeddings_and_output_weights": False,
    # Large enough that attention and predictions are far from uniform.
    "init_method_std": 0.2,
}
"""Every feature: grouped queries, QKV bias, QK norm, untied output layer, odd sizes."""


def tiny_config(spec: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A configuration of a tiny fp32 model; `spec` and the sections override single keys."""
    data: dict[str, Any] = {
        "model": {"spec": TINY_SPEC | (spec or {}), "tokenizer": "bytes"},
        "train": {"precision": "fp32", "seq_length": 64},
    }
    for name, values in sections.items():
        data.setdefault(name, {}).update(copy.deepcopy(values))
    return config_from_dict(data)


def tiny_model(
    pg: ProcessGroupCollection, spec: dict[str, Any] | None = None, **sections: Any
) -> GPTModel:
    """A model of `tiny_config`, with random weights of its `train.seed`."""
    config, arguments = transformer_config(tiny_config(spec, **sections))
    return build_model(config, arguments, pg)
