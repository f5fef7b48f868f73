"""Which modules a transformer layer is made of: Megatron's local ones, or Transformer Engine's.

Both give the same module and parameter names, so that sketches, weight maps and checkpoints need
not know which was taken: norms are modules of their own (never fused into the linear that follows,
whose input then stays visible to a forward hook).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_logra.errors import UserError
from megatron_logra.model.context_parallel import ContextParallelAttention
from megatron_logra.model.gemma3 import (
    Gemma3Attention,
    Gemma3AttentionSubmodules,
    Gemma3MLP,
    Gemma3MLPSubmodules,
)
from megatron_logra.model.norm import Norm

FUSED_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Where fused layers keep what are norms of their own here; checkpoints use these names, too."""

Implementation = Literal["local", "transformer_engine"]


def choose_implementation(wanted: str) -> Implementation:
    """Resolve `model.implementation`: `auto` takes Transformer Engine where it and a GPU are.

    Raises:
        UserError: Transformer Engine is asked for but cannot run here.
    """
    gpu = torch.cuda.is_available()
    installed = importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and not (gpu and installed):
        lack = "no GPU is present" if installed else "transformer_engine is not installed"
        raise UserError(f"model.implementation=transformer_engine: {lack}; expected auto or local")
    if wanted == "local" or not (gpu and installed):
        return "local"
    return "transformer_engine"


def block_spec(
    config: TransformerConfig,
    implementation: Implementation,
    pp_rank: int,
    vp_stage: int | None = None,
    *,
    gemma3: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage (or one of its chunks) and the final norm of a dense GPT.

    Args:
        gemma3: with Gemma 3's attention and MLP.
    """
    norm, column, row, core = _modules(implementation)
    if config.context_parallel_size > 1 and implementation == "local":
        core = ContextParallelAttention
    head_norm = norm if config.qk_layernorm else IdentityOp
    linears = {"linear_qkv": column, "linear_proj": row}
    head = {"core_attention": core, "q_layernorm": head_norm, "k_layernorm": head_norm}
    attention: type[SelfAttention] = SelfAttention
    mlp: type[MLP] = MLP
    attention_parts: SelfAttentionSubmodules = SelfAttentionSubmodules(**linears, **head)
    mlp_parts: MLPSubmodules = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    if gemma3:
        attention, mlp = Gemma3Attention, Gemma3MLP
        attention_parts = Gemma3AttentionSubmodules(**linears, **head, post_layernorm=norm)
        mlp_parts = Gemma3MLPSubmodules(linear_fc1=column, linear_fc2=row, post_layernorm=norm)
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention_parts,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=partial(mlp.as_mlp_submodule, submodules=mlp_parts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=FUSED_NAMES,
        ),
    )
    layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _modules(implementation: Implementation) -> tuple[Any, Any, Any, Any]:
    """Norm, column-parallel linear, row-parallel linear and core attention."""
    if implementation == "local":
        return Norm, ColumnParallelLinear, RowParallelLinear, DotProductAttention
    from megatron.core.extensions import transformer_engine as te

    return te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TEDotProductAttention
