"""Bytes by kind from the configuration alone, without building the model.

The shapes of a dense GPT follow from its configuration; the flat buffers' places and padding come
from the same functions that lay them out, run over tensors without memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.config import Config
from megatron_logra.memory import KINDS
from megatron_logra.model.gpt import GPTArguments, transformer_config
from megatron_logra.optimizer.master_weights import master_bytes
from megatron_logra.sketch.layout import sketch_layout
from megatron_logra.sketch.projection import projection_bytes

_SIZE = {"bf16": 2, "fp32": 4}
_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One parameter."""

    name: str
    """Name of its module, and `.bias` for a bias."""
    size: tuple[int, ...]
    """Its shape."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()


def parameter_shapes(config: TransformerConfig, arguments: GPTArguments) -> list[Shape]:
    """All parameters of a dense GPT on one rank, in the order of the model."""
    hidden, kv = config.hidden_size, config.kv_channels
    ffn, heads, groups = (
        config.ffn_hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
    )
    assert kv is not None and ffn is not None and groups is not None
    layer_norm = config.normalization == "LayerNorm"
    shapes = [Shape("embedding.word_embeddings", (arguments.vocab_size, hidden))]

    def norm(name: str, size: int) -> None:
        shapes.append(Shape(name, (size,)))
        if layer_norm:
            shapes.append(Shape(f"{name}.bias", (size,)))

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes.append(Shape(name, (out, into)))
        if bias:
            shapes.append(Shape(f"{name}.bias", (out,)))

    for index in range(config.num_layers):
        at = f"decoder.layers.{index}"
        norm(f"{at}.input_layernorm", hidden)
        linear(f"{at}.self_attention.linear_proj", hidden, heads * kv, config.add_bias_linear)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        linear(f"{at}.self_attention.linear_qkv", (heads + 2 * groups) * kv, hidden, qkv_bias)
        if config.qk_layernorm:
            norm(f"{at}.self_attention.q_layernorm", kv)
            norm(f"{at}.self_attention.k_layernorm", kv)
        norm(f"{at}.pre_mlp_layernorm", hidden)
        inner = 2 * ffn if config.gated_linear_unit else ffn
        linear(f"{at}.mlp.linear_fc1", inner, hidden, config.add_bias_linear)
        linear(f"{at}.mlp.linear_fc2", hidden, ffn, config.add_bias_linear)
    norm("decoder.final_layernorm", hidden)
    if not arguments.share_embeddings_and_output_weights:
        shapes.append(Shape("output_layer", (arguments.vocab_size, hidden)))
    return shapes


def static_memory(cfg: Config, kind: Literal["logra", "adam"] | None = None) -> dict[str, int]:
    """Bytes of one rank by kind (see `memory.KINDS`) and their sum `static`.

    Args:
        cfg: the configuration.
        kind: optimizer; default `optimizer.kind`.
    """
    tconfig, arguments = transformer_config(cfg)
    shapes = parameter_shapes(tconfig, arguments)
    kind = kind or cfg.optimizer.kind
    targets: list[Shape] = []
    if kind == "logra":
        targets = [s for s in shapes if s.name.rsplit(".", 1)[-1] in cfg.sketch.targets]
    others = [s for s in shapes if s not in targets]
    trained = others if kind == "adam" or cfg.optimizer.non_targets == "adam" else []
    precision = cfg.train.precision
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    sizes = dict.fromkeys(KINDS, 0)
    sizes["weights"] = _SIZE[precision] * sum(s.numel for s in shapes if s not in trained)
    if trained:
        layout = DistributedOptimizer.compute_full_param_layout(
            _meta(trained, _DTYPE[precision]), None, 1, ddp_config
        )
        elements = _buffer_elements(layout)
        numbers = sum(s.numel for s in trained)
        sizes["weights"] += _SIZE[precision] * elements
        sizes["gradients"] = 4 * elements
        sizes["master"] = 4 * numbers if precision == "bf16" else 0
        sizes["optimizer"] = 8 * numbers  # two fp32 moments
    if targets:
        rank, distribution = cfg.sketch.rank, cfg.sketch.distribution
        factor = cfg.step_control.factor_dtype
        proxies = [Shape(s.name, (s.size[0], rank)) for s in targets]
        elements = _buffer_elements(
            sketch_layout(_meta(proxies, _DTYPE[factor]), rank, 1, ddp_config)
        )
        sizes["sketches"] = (4 + _SIZE[factor]) * elements
        sizes["optimizer"] += 4 * sum(s.size[0] for s in targets)
        numbers = sum(s.numel for s in targets)
        sizes["master"] += master_bytes(numbers, precision, cfg.optimizer.master)
        columns = sum(s.size[1] for s in targets)
        sizes["projections"] = projection_bytes(columns, rank, distribution)
    return sizes | {"static": sum(sizes.values())}


def _meta(shapes: list[Shape], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(s.size, dtype=dtype, device="meta")) for s in shapes]


def _buffer_elements(layout: object) -> int:
    (buffer,) = layout.layouts.values()  # type: ignore[attr-defined]
    return buffer.bucket_indices[-1][1]
