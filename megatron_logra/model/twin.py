"""A twin of a model for forward mode: Megatron's local layers over the same weights, no copy.

Transformer Engine's layers have no forward-mode rules; local ones have. The twin shares everything
with its model but the transformer layers, and the parameters of those are the model's own, also
where Transformer Engine keeps a norm's weight in the linear that follows it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_logra.model.gemma3 import Gemma3Attention
from megatron_logra.model.specs import FUSED_NAMES, block_spec

UNFUSED: dict[str, Any] = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "use_te_activation_func": False,
    "tp_comm_overlap": False,
    "gradient_accumulation_fusion": False,
}
"""Fields of the twin's configuration: kernels that local layers do not have or have no rules."""


def has_twin(model: nn.Module) -> bool:
    """Whether the model (wrapped or not) is one of `gpt.build_model` with Transformer Engine's
    layers."""
    (own,) = unwrap_model([model])
    # A configuration of another class is another program's, such as Megatron-Bridge's: its layers
    # may do what their parameters do not tell.
    return type(own.config) is TransformerConfig and any(
        cls.__module__.startswith("transformer_engine")
        for module in own.modules()
        for cls in type(module).__mro__
    )


def local_twin(model: nn.Module) -> GPTModel:
    """The model (wrapped or not) seen through local layers.

    It is for the forward pass alone; what changes the model's weights changes the twin's.

    Raises:
        ValueError: the layers' parameters do not correspond.
    """
    own: Any = unwrap_model([model])[0]
    config = copy.copy(own.config)
    for name, value in UNFUSED.items():
        setattr(config, name, value)
    decoder = own.decoder
    with torch.device("meta"), _OnMeta():
        block = TransformerBlock(
            config,
            block_spec(
                config,
                "local",
                own.pg_collection.pp.rank(),
                own.vp_stage,
                gemma3=any(isinstance(module, Gemma3Attention) for module in decoder.modules()),
            ),
            post_layer_norm=decoder.post_layer_norm,
            pre_process=decoder.pre_process,
            post_process=decoder.post_process,
            pg_collection=own.pg_collection,
            vp_stage=own.vp_stage,
        )
    share_parameters(decoder, block)
    twin = copy.copy(own)
    twin._modules = {**own._modules, "decoder": block}
    return twin


def share_parameters(source: nn.Module, local: nn.Module) -> None:
    """Put the parameters of a transformer block in the place of a local one's.

    Raises:
        ValueError: a parameter is missing, left over, or of another shape.
    """
    available = dict(source.named_parameters())
    for name, parameter in list(local.named_parameters()):
        found = available.pop(_name_in_source(name, available), None)
        if found is None:
            raise ValueError(f"twin: the model has no parameter for {name}")
        if found.shape != parameter.shape:
            raise ValueError(
                f"twin: {name} is {tuple(found.shape)}, expected {tuple(parameter.shape)}"
            )
        path, _, leaf = name.rpartition(".")
        local.get_submodule(path)._parameters[leaf] = found
    if available:
        raise ValueError(f"twin: local layers have no place for {', '.join(available)}")


def _name_in_source(name: str, available: dict[str, nn.Parameter]) -> str:
    if name not in available:
        for norm, fused in FUSED_NAMES.items():
            if name.rpartition(".")[0].endswith(norm.rstrip(".")):
                return name.replace(norm, fused)
    return name


class _OnMeta(TorchFunctionMode):
    """Makes every new tensor a meta tensor, whatever device it is asked to be on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
