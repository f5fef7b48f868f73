"""Tiny models and configurations for the tests."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
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


def letters_config(
    run_dir: Path, spec: dict[str, Any], function: str = "Letters", **sections: dict[str, Any]
) -> Config:
    """Steps that move the policy far; 3 problems and 3 micro-batches do not divide by 2."""
    base: dict[str, dict[str, Any]] = {
        "sketch": {"rank": 8},
        "algorithm": {"name": "grpo"},
        "rollout": {"batch_size": 5, "sampling": {"max_tokens": 5, "stop": list("ABCDEFGH")}},
        "train": {"steps": 3, "prompts_per_step": 3, "responses_per_prompt": 4}
        | {"micro_batch_size": 4},
        "step_control": {"probe_responses": 3, "realised_kl_interval": 1, "factor_dtype": "fp32"}
        | {"update_ratio": 0.05, "kl_budget": 0.1, "kl_budget_final": 0.1},
        "eval": {"problems": 5, "interval": 1},
        "checkpoint": {"interval": 1, "keep": 3},
        "logging": {"run_dir": str(run_dir), "tensorboard": False},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    config = tiny_config(spec, **base)
    environment = {"kind": "python", "function": f"trainer_environments:{function}"}
    return Config.model_validate({**config.model_dump(), "environment": environment})


def save_tiny_llama(directory: Path, vocabulary: int) -> Path:
    """A Hugging Face directory with a random Llama with tied embeddings."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process and those that it has started listen."""
    process = psutil.Process(pid)
    return [
        tuple(connection.laddr)
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def quick(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Parameters of a test: those that are not chosen are marked slow."""
    values = list(values)
    assert set(chosen) <= set(values)
    return [v if v in chosen else _slow(v) for v in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
