"""The Hugging Face models that there is a place for: their tensors and their configurations.

A family is a table and a function. The table says which tensors of a Hugging Face checkpoint make
which parameter of Megatron's GPT (`*` is the number of the layer), and serves both directions. The
function turns config.json into a specification, as in `model.spec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_logra.errors import UserError


@dataclass(frozen=True)
class Rule:
    """How one parameter of the whole model is made of Hugging Face tensors, and taken apart.

    `rows`: the parts lie one below the other. `groups`: queries, keys and values are interleaved by
    query group, as Megatron has them: a group's queries, its key, its value.
    """

    sources: tuple[str, ...]
    order: Literal["rows", "groups"] = "rows"

    def join(self, parts: list[Tensor], config: TransformerConfig) -> Tensor:
        """The parameter of its parts, in the order of `sources`."""
        if self.order == "rows":
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        groups = config.num_query_groups
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor, config: TransformerConfig) -> list[Tensor]:
        """The parts of a parameter: the inverse of `join`."""
        if self.order == "rows":
            return list(whole.split([n for n, *_ in self.shapes(whole.shape, config)]))
        groups = config.num_query_groups
        heads = [rows // groups for rows, *_ in self.shapes(whole.shape, config)]
        parts = whole.unflatten(0, (groups, -1)).split(heads, 1)
        return [part.flatten(0, 1) for part in parts]

    def shapes(
        self, whole: tuple[int, ...] | torch.Size, config: TransformerConfig
    ) -> list[tuple[int, ...]]:
        """Shapes of the parts of a parameter of shape `whole`."""
        rows, *rest = whole
        if self.order == "rows":
            sizes = [rows // len(self.sources)] * len(self.sources)
        else:
            assert config.kv_channels is not None and config.num_query_groups is not None
            kv = config.num_query_groups * config.kv_channels
            sizes = [config.num_attention_heads * config.kv_channels, kv, kv]
        return [(size, *rest) for size in sizes]


Table = dict[str, Rule]


def _rows(*sources: str) -> Rule:
    return Rule(sources)


def _groups(sources: str) -> Rule:
    return Rule(tuple(sources.replace("?", x) for x in "qkv"), "groups")


LLAMA: Table = {
    "embedding.word_embeddings.weight": _rows("model.embed_tokens.weight"),
    "decoder.layers.*.input_layernorm.weight": _rows("model.layers.*.input_layernorm.weight"),
    "decoder.layers.*.self_attention.linear_qkv.weight": _groups(
        "model.layers.*.self_attn.?_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_qkv.bias": _groups(
        "model.layers.*.self_attn.?_proj.bias"
    ),
    "decoder.layers.*.self_attention.q_layernorm.weight": _rows(
        "model.layers.*.self_attn.q_norm.weight"
    ),
    "decoder.layers.*.self_attention.k_layernorm.weight": _rows(
        "model.layers.*.self_attn.k_norm.weight"
    ),
    "decoder.layers.*.self_attention.linear_proj.weight": _rows(
        "model.layers.*.self_attn.o_proj.weight"
    ),
    "decoder.layers.*.self_attention.linear_proj.bias": _rows(
        "model.layers.*.self_attn.o_proj.bias"
    ),
    "decoder.layers.*.pre_mlp_layernorm.weight": _rows(
        "model.layers.*.post_attention_layernorm.weight"
    ),
    "decoder.layers.*.mlp.linear_fc1.weight": _rows(
        "model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"
    ),
    "decoder.layers.*.mlp.linear_fc1.bias": _rows(
        "model.layers.*.mlp.gate_proj.bias", "model.layers.*.mlp.up_proj.bias"
    ),
    "decoder.layers.*.mlp.linear_fc2.weight": _rows("model.layers.*.mlp.down_proj.weight"),
    "decoder.layers.*.mlp.linear_fc2.bias": _rows("model.layers.*.mlp.down_proj.bias"),
    "decoder.final_layernorm.weight": _rows("model.norm.weight"),
    "output_layer.weight": _rows("lm_head.weight"),
}
"""Llama and all that name their tensors as it does; which of them exist follows from the model."""

GEMMA3: Table = LLAMA | {
    "decoder.layers.*.self_attention.post_layernorm.weight": _rows(
        "model.layers.*.post_attention_layernorm.weight"
    ),
    "decoder.layers.*.pre_mlp_layernorm.weight": _rows(
        "model.layers.*.pre_feedforward_layernorm.weight"
    ),
    "decoder.layers.*.mlp.post_layernorm.weight": _rows(
        "model.layers.*.post_feedforward_layernorm.weight"
    ),
}
"""Gemma 3: what Llama calls the norm after attention is one indeed. Norms hold γ of (1 + γ)."""


class Fields:
    """The keys of a config.json.

    Args:
        path: the file, for messages.
        values: what is in it.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def __getitem__(self, key: str) -> Any:
        """The value; None if the key is absent."""
        return self.values.get(key)

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer; without `default` it has to be there."""
        value = default if self[key] is None else self[key]
        if type(value) is not int or value < 1:
            raise self.wrong(key, "expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; without `default` it has to be there."""
        value = default if self[key] is None else self[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "expected a number")
        return float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse all values but these (an absent key is None)."""
        if self[key] not in allowed:
            expected = " or ".join("absent" if v is None else str(v).lower() for v in allowed)
            raise self.wrong(key, f"not supported; expected {expected}")

    def section(self, key: str) -> Fields:
        """A nested object; empty if it is absent."""
        value = self[key] or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "expected an object")
        return Fields(self.path, value)

    def wrong(self, key: str, reason: str) -> UserError:
        """What to raise where this key's value will not do."""
        return UserError(f"{self.path}: {key}={self[key]!r}: {reason}")


def _common(f: Fields) -> dict[str, Any]:
    """What all families have in common."""
    heads, hidden = f.positive("num_attention_heads"), f.positive("hidden_size")
    groups = f.positive("num_key_value_heads", heads)
    if heads % groups:
        raise f.wrong("num_key_value_heads", f"expected a divisor of num_attention_heads={heads}")
    return {
        "num_layers": f.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": f.positive("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": f.positive("head_dim", hidden // heads),
        "layernorm_epsilon": f.number("rms_norm_eps", 1e-6),
        "vocab_size": f.positive("vocab_size"),
        "max_sequence_length": f.positive("max_position_embeddings"),
        "share_embeddings_and_output_weights": bool(f["tie_word_embeddings"]),
    }


def _silu_and_rope(f: Fields, default_base: float = 1e4) -> dict[str, Any]:
    """What all but Gemma have in common."""
    f.only("hidden_act", None, "silu")
    return _common(f) | _rope(f, default_base)


def _llama(f: Fields) -> dict[str, Any]:
    biases = {bool(f["attention_bias"]), bool(f["mlp_bias"])}
    if len(biases) > 1:
        raise f.wrong("attention_bias", "not supported without mlp_bias, nor that without it")
    return _silu_and_rope(f) | ({"add_bias_linear": True} if True in biases else {})


def _mistral(f: Fields) -> dict[str, Any]:
    everywhere = f["sliding_window"] is not None
    return _silu_and_rope(f) | _windows(f, [everywhere] * f.positive("num_hidden_layers"))


def _qwen2(f: Fields) -> dict[str, Any]:
    return _silu_and_rope(f) | _qwen_windows(f) | {"add_qkv_bias": True}


def _qwen3(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", None, False)
    return _silu_and_rope(f) | _qwen_windows(f) | {"qk_layernorm": True}


def _smollm3(f: Fields) -> dict[str, Any]:
    for key in ("attention_bias", "mlp_bias"):
        f.only(key, None, False)
    layers = f.positive("num_hidden_layers")
    interval = f["no_rope_layer_interval"] or 4
    rotated = f["no_rope_layers"] or [(i + 1) % interval for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise f.wrong("no_rope_layers", f"expected a list of {layers} numbers, one a layer")
    without = [int(not rotates) for rotates in rotated[:layers]]
    wanted = bool(f["use_sliding_window"]) and f["sliding_window"] is not None
    windows = _windows(f, [wanted and bool(w) for w in _sliding(f, without)])
    return _silu_and_rope(f, 2e6) | windows | ({"no_rope_freq": without} if any(without) else {})


def _gemma3(f: Fields) -> dict[str, Any]:
    for key in ("attention_bias", "use_bidirectional_attention"):
        f.only(key, None, False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        f.only(key, None)
    f.only("hidden_activation", "gelu_pytorch_tanh")
    layers = f.positive("num_hidden_layers")
    pattern = f["sliding_window_pattern"] or 6
    local = _sliding(f, [(i + 1) % pattern for i in range(layers)])
    ropes = f.section("rope_parameters")  # one of each kind of layer; the older form has one global
    ropes = ropes if ropes["full_attention"] else Fields(f.path, {})
    old = {"rope_theta": f["rope_theta"] or 1e6, **(f["rope_scaling"] or {})}
    whole, part = ropes.section("full_attention").values or old, ropes.section("sliding_attention")
    if part["rope_type"] not in (None, "default"):
        raise part.wrong("rope_type", "not supported in layers with a window; expected default")
    base = part.number("rope_theta", f.number("rope_local_base_freq", 1e4))
    return {
        **_common(f),
        "share_embeddings_and_output_weights": f["tie_word_embeddings"] is not False,
        **_rope(Fields(f.path, {"rope_parameters": whole}), 1e6),
        **_windows(f, [bool(is_local) for is_local in local]),
        "activation_func": "gelu_tanh",
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": f.number("query_pre_attn_scalar", 256) ** -0.5,
        "rotary_base_local": base,
        "post_layernorms": True,
        "scale_embeddings": True,
    }


@dataclass(frozen=True)
class Family:
    """One architecture."""

    tensors: Table
    spec: Callable[[Fields], dict[str, Any]]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(LLAMA, _llama),
    "MistralForCausalLM": Family(LLAMA, _mistral),
    "Qwen2ForCausalLM": Family(LLAMA, _qwen2),
    "Qwen3ForCausalLM": Family(LLAMA, _qwen3),
    "SmolLM3ForCausalLM": Family(LLAMA, _smollm3),
    "Gemma3ForCausalLM": Family(GEMMA3, _gemma3),
}
"""By the name in config.json. SmolLM2 and Qwen2.5 are a Llama and a Qwen2 by that name."""


IMAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
}
"""Models of images and text whose text part is a family: its name, and the values that transformers
(5.x) takes where its `text_config` does not say them."""
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.")


def architecture(hf: dict[str, Any]) -> str:
    """The name of a config.json's architecture; `none` if it has none."""
    return str((hf.get("architectures") or ["none"])[0])


def is_image_model(hf: dict[str, Any]) -> bool:
    """Whether a config.json describes a model of images and text."""
    return architecture(hf) in IMAGE_MODELS


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """A config.json's part about the language model, as that of a model of text alone."""
    if not is_image_model(hf):
        return hf
    name, defaults = IMAGE_MODELS[architecture(hf)]
    general = {key: hf[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in hf}
    return {**defaults, **general, **(hf.get("text_config") or {}), "architectures": [name]}


def text_name(name: str) -> str | None:
    """What a tensor of a model of images and text is called without images; None if left out."""
    for prefix, plain in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return None if name.removeprefix("model.").startswith(_IMAGE_PREFIXES) else name


def family_of(path: Path, hf: dict[str, Any]) -> Family:
    """The family of the model that the config.json at `path` describes.

    Raises:
        UserError: it is none of these.
    """
    name = architecture(hf)
    if name not in FAMILIES:
        raise UserError(
            f"{path}: architecture {name}; supported: {', '.join(FAMILIES)}; more are trained and "
            "converted with Megatron-Bridge: pip install 'megatron-logra[bridge]' on a machine "
            "with Transformer Engine"
        )
    return FAMILIES[name]


def rules(family: Family, config: TransformerConfig, tied: bool) -> Iterator[tuple[str, Rule]]:
    """The rule of every parameter of the whole model, with its layout-independent name, by layers.

    Args:
        tied: whether there is no output layer but the embedding.
    """
    biases = {True: (".bias",), False: ("linear_qkv.bias",) if config.add_qkv_bias else ()}
    table = {
        name: rule
        for name, rule in family.tensors.items()
        if not (tied and name == "output_layer.weight")
        and (config.qk_layernorm or ("q_layernorm" not in name and "k_layernorm" not in name))
        and (not name.endswith(".bias") or name.endswith(biases[bool(config.add_bias_linear)]))
    }
    inner = [name for name in table if "*" in name]
    outer = [name for name in table if "*" not in name]
    first = [name for name in outer if name.startswith("embedding")]
    yield from ((name, table[name]) for name in first)
    for layer in range(config.num_layers):
        for name in inner:
            rule, number = table[name], str(layer)
            sources = tuple(source.replace("*", number) for source in rule.sources)
            yield name.replace("*", number), Rule(sources, rule.order)
    yield from ((name, table[name]) for name in outer if name not in first)


def _sliding(f: Fields, default: list[int]) -> list[bool]:
    """Which layers have a window: by `layer_types`, or else where `default` is not 0."""
    types = f["layer_types"]
    if types is None:
        return [bool(window) for window in default]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != len(default) or {*types} - {*known}:
        raise f.wrong("layer_types", f"expected {len(default)} of {' or '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


def _qwen_windows(f: Fields) -> dict[str, Any]:
    layers = f.positive("num_hidden_layers")
    if not f["use_sliding_window"] or f["sliding_window"] is None:
        return {}
    first = f["max_window_layers"] if f["max_window_layers"] is not None else 28
    return _windows(f, _sliding(f, [int(i >= first) for i in range(layers)]))


def _windows(f: Fields, local: list[bool]) -> dict[str, Any]:
    """Sliding windows of the layers where `local` says so."""
    if not any(local):
        return {}
    window = [f.positive("sliding_window") - 1, 0]  # positions before a token, without itself
    if all(local):
        return {"window_size": window}
    return {"window_size": window, "window_attn_skip_freq": [int(layer) for layer in local]}


LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only values of Llama 3's frequency scaling that Megatron's rotary embedding knows."""


def _rope(f: Fields, default_base: float = 1e4) -> dict[str, Any]:
    """The rotary embedding's part of the specification."""
    # The older form has rope_theta beside rope_scaling, the newer one all in rope_parameters.
    rope = f.section("rope_parameters" if f["rope_parameters"] else "rope_scaling")
    base = {"rotary_base": rope.number("rope_theta", f.number("rope_theta", default_base))}
    kind = rope["rope_type"] or rope["type"] or "default"
    for keys in (rope, f):
        keys.only("partial_rotary_factor", None, 1, 1.0)
    match kind:
        # `dynamic` scales beyond max_position_embeddings only, and no sequence may be that long.
        case "default" | "dynamic":
            return base
        case "linear":
            return base | {"seq_len_interpolation_factor": rope.number("factor")}
        case "llama3":
            for key, value in LLAMA3_ROPE.items():
                rope.only(key, value)
            return base | {"rope_scaling": True, "rope_scaling_factor": rope.number("factor")}
        case "yarn":
            return base | _yarn(rope, f)
    supported = "default, linear, dynamic, llama3, yarn"
    raise UserError(f"{f.path}: rope type {kind!r}; supported: {supported}")


def _yarn(rope: Fields, f: Fields) -> dict[str, Any]:
    """YaRN (Peng et al. 2023), by the names of Megatron's fields."""
    factor = rope.number("factor")
    mscale, mscale_all = rope["mscale"], rope["mscale_all_dim"]
    if rope["attention_factor"] is not None and factor > 1:
        # Megatron makes it of two numbers: (0.1 m ln s + 1) / (0.1 m' ln s + 1).
        mscale, mscale_all = (rope.number("attention_factor") - 1) / (0.1 * math.log(factor)), 0.0
    elif not (mscale and mscale_all):
        mscale = mscale_all = None
    original = rope["original_max_position_embeddings"] or f["max_position_embeddings"]
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(rope["beta_fast"] or 32),
        "yarn_beta_slow": float(rope["beta_slow"] or 1),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": mscale_all,
        "yarn_correction_range_round_to_int": rope["truncate"] is not False,
    }
