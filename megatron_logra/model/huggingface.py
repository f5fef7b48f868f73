"""Hugging Face checkpoints of the Llama family: their configuration and their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_logra.errors import UserError
from megatron_logra.model.parameters import EMBEDDING, local_part, named_parameters, whole_shape

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"add_qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_layernorm": True},
}
"""Supported architectures, with what each adds to the common specification."""

ROPE_TYPES = ("default", "linear", "llama3")

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only values of Llama 3's frequency scaling that Megatron's rotary embedding knows."""


def read_spec(directory: str | Path) -> dict[str, Any]:
    """The model specification (as in `model.spec`) that a checkpoint's config.json describes.

    Raises:
        UserError: config.json is missing, malformed, or describes something unsupported.
    """
    path = Path(directory) / "config.json"
    hf = _read_json(path)
    name = (hf.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {name}; supported: {', '.join(ARCHITECTURES)}")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf.get(key):
            raise UserError(f"{path}: {key}={hf[key]!r} is not supported; expected false")
    if name.startswith("Mistral") and hf.get("sliding_window") is not None:
        raise UserError(f"{path}: sliding_window is not supported; expected null")
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act={hf['hidden_act']!r} is not supported; expected silu")
    required = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    for key in required:
        if type(hf.get(key)) is not int or hf[key] < 1:
            raise UserError(f"{path}: {key}: expected a positive integer, got {hf.get(key)!r}")
    heads = hf["num_attention_heads"]
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "layernorm_epsilon": float(hf.get("rms_norm_eps", 1e-6)),
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings", False)),
        **ARCHITECTURES[name],
        **_rope(path, hf),
    }


def _rope(path: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's part of the specification."""
    # The older form has rope_theta beside rope_scaling, the newer one all in rope_parameters.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    base = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(f"{path}: rope type {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{path}: partial_rotary_factor is not supported; expected 1.0")
    if kind == "default":
        return {"rotary_base": base}
    if not isinstance(rope.get("factor"), int | float):
        raise UserError(f"{path}: rope type {kind} needs a number as factor")
    factor = float(rope["factor"])
    if kind == "linear":
        return {"rotary_base": base, "seq_len_interpolation_factor": factor}
    for key, value in LLAMA3_ROPE.items():
        if rope.get(key) != value:
            raise UserError(
                f"{path}: rope type llama3 with {key}={rope.get(key)!r}; supported: {value}"
            )
    return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": factor}


def _interleave_groups(parts: list[Tensor], config: TransformerConfig) -> Tensor:
    """q, k, v [·, h] (or biases) → Megatron's order: by group, its queries, its key, its value."""
    groups = config.num_query_groups
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _stack(parts: list[Tensor], _config: TransformerConfig) -> Tensor:
    """All parts, one below the other."""
    return torch.cat(parts)


@dataclass(frozen=True)
class _Rule:
    """How one parameter of the model comes out of tensors of the checkpoint."""

    sources: tuple[str, ...]
    join: Callable[[list[Tensor], TransformerConfig], Tensor] = _stack


def _qkv(kind: str) -> _Rule:
    return _Rule(tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), _interleave_groups)


MODEL_RULES = {
    "embedding.word_embeddings.weight": _Rule(("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": _Rule(("model.norm.weight",)),
    "output_layer.weight": _Rule(("lm_head.weight",)),
}
"""Parameters outside the layers."""

LAYER_RULES = {
    "input_layernorm.weight": _Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": _Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": _Rule(("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": _Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": _Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": _Rule(("mlp.down_proj.weight",)),
}
"""Parameters of layer i: `decoder.layers.i.` here, `model.layers.i.` there."""


def rules(config: TransformerConfig, tied: bool) -> dict[str, _Rule]:
    """The rule of every parameter of the whole model, by its layout-independent name."""
    absent = set()
    if not (config.add_qkv_bias or config.add_bias_linear):
        absent.add("self_attention.linear_qkv.bias")
    if not config.qk_layernorm:
        absent |= {f"self_attention.{x}_layernorm.weight" for x in "qk"}
    found = {k: r for k, r in MODEL_RULES.items() if not (tied and k == "output_layer.weight")}
    for i in range(config.num_layers):
        for name, rule in LAYER_RULES.items():
            if name not in absent:
                sources = tuple(f"model.layers.{i}.{source}" for source in rule.sources)
                found[f"decoder.layers.{i}.{name}"] = _Rule(sources, rule.join)
    return found


@torch.no_grad()
def load_hf_weights(directory: str | Path, model: GPTModel) -> None:
    """Copy a checkpoint's weights into `model`, cast to the parameters' type.

    Every tensor of the checkpoint must have its place in the whole model, and every parameter of
    this rank's part of the model is filled.

    Raises:
        UserError: a file is missing or damaged, a tensor is missing, left over or of another shape.
    """
    tied = model.share_embeddings_and_output_weights
    checkpoint = _Checkpoint(Path(directory))
    table = rules(model.config, tied)
    _check_names(checkpoint, {source for rule in table.values() for source in rule.sources}, tied)
    tp = model.pg_collection.tp
    for name, parameter in named_parameters(model):
        # On a last pipeline stage the tied output weight is a parameter of its own.
        key = EMBEDDING if tied and name == "output_layer.weight" else name
        if key not in table:
            raise UserError(f"{directory}: the model's {name} has no counterpart in a checkpoint")
        rule = table[key]
        parts = [checkpoint.read(source) for source in rule.sources]
        expected = whole_shape(parameter, tp.size())
        try:
            whole = rule.join(parts, model.config)
        except RuntimeError:
            whole = None
        if whole is None or tuple(whole.shape) != expected:
            shapes = ", ".join(
                f"{s} {list(p.shape)}" for s, p in zip(rule.sources, parts, strict=True)
            )
            raise UserError(
                f"{directory}: {shapes} cannot make {name}, which needs {list(expected)}"
            )
        parameter.copy_(local_part(whole, parameter, tp.rank(), tp.size()))


def _check_names(checkpoint: _Checkpoint, expected: set[str], tied: bool) -> None:
    for name in sorted(expected):
        if name not in checkpoint.files:
            raise UserError(f"{checkpoint.directory}: tensor {name} is missing")
    for name in sorted(checkpoint.files.keys() - expected):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # written by old versions; it follows from the configuration
        same = tied and name == "lm_head.weight"
        if same and torch.equal(
            checkpoint.read(name), checkpoint.read("model.embed_tokens.weight")
        ):
            continue
        raise UserError(f"{checkpoint.directory}: tensor {name} has no place in this model")


class _Checkpoint:
    """The tensors of a directory with model.safetensors, or shards and their index.

    Attributes:
        files: tensor name → the file that holds it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if index.exists():
            shards = _read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise UserError(f"{index}: expected a weight_map")
            self.files = {str(name): directory / str(file) for name, file in shards.items()}
        elif single.exists():
            self.files = dict.fromkeys(self._names(single), single)
        else:
            raise UserError(
                f"{directory}: expected model.safetensors or model.safetensors.index.json"
            )
        for file in sorted(set(self.files.values())):
            present = set(self._names(file))
            for name, holder in self.files.items():
                if holder == file and name not in present:
                    raise UserError(f"{file}: tensor {name} is missing")

    def read(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU, as it was stored."""
        try:
            with safe_open(self.files[name], framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.files[name]}: cannot read {name}: {error}") from None

    @staticmethod
    def _names(path: Path) -> list[str]:
        if not path.exists():
            raise UserError(f"{path}: missing")
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a complete safetensors file: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object")
    return data
