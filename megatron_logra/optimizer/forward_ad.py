"""Forward-mode (JVP) rules for Megatron's autograd functions, which have none of their own.

With them, `torch.autograd.forward_ad` runs through a GPTModel of local layers. All are here: maps
that are linear in their first argument (the tangent goes through the same map) and SwiGLU. A
function without a rule raises torch's error, which names it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core import utils
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel import layers, mappings

# Linear in argument 0; the others are not differentiated. The number is the place of an additive
# bias among the arguments, which a tangent must not receive.
_LINEAR_MAPS: dict[type[torch.autograd.Function], int | None] = {
    mappings._CopyToModelParallelRegion: None,
    mappings._ReduceFromModelParallelRegion: None,
    mappings._ScatterToModelParallelRegion: None,
    mappings._GatherFromModelParallelRegion: None,
    mappings._ScatterToSequenceParallelRegion: None,
    mappings._GatherFromSequenceParallelRegion: None,
    mappings._ReduceScatterToSequenceParallelRegion: None,
    mappings._AllGatherFromTensorParallelRegion: None,
    layers.LinearWithFrozenWeight: 2,
    layers.LinearWithGradAccumulationAndAsyncCommunication: 2,
    utils.MakeViewlessTensor: None,
}


class _NoContext:
    """Stands in for `ctx` when a forward is run for a tangent alone."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Nothing is kept."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing to set."""


def install() -> None:
    """Add the rules to Megatron's classes; a second call does nothing."""
    for function, bias in _LINEAR_MAPS.items():
        if "_logra_forward" not in vars(function):
            _add_linear_rule(function, bias)
    swiglu = fused_bias_swiglu.SwiGLUFunction
    if "_logra_forward" not in vars(swiglu):
        _remember_arguments(swiglu)
        swiglu.jvp = staticmethod(_swiglu_jvp)


def in_forward_mode() -> bool:
    """Whether a dual level is open."""
    return forward_ad._current_level >= 0


def _remember_arguments(function: Any) -> None:
    """Let the forward keep its arguments for `jvp`, only while a dual level is open."""
    forward = function.forward
    function._logra_forward = staticmethod(forward)

    def remembering(ctx: Any, *arguments: Any) -> Any:
        if in_forward_mode():
            ctx.logra_arguments = arguments
        return forward(ctx, *arguments)

    function.forward = staticmethod(remembering)


def _add_linear_rule(function: Any, bias: int | None) -> None:
    _remember_arguments(function)

    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> torch.Tensor | None:
        if tangent is None:
            return None
        arguments = list(ctx.logra_arguments)
        if bias is not None:
            arguments[bias] = None
        result = function._logra_forward(_NoContext(), tangent, *arguments[1:])
        # torch wants a new tensor or a view, never the argument itself.
        return result.view_as(result) if result is tangent else result

    function.jvp = staticmethod(jvp)


def _swiglu_jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
    """d(silu(a) · b) = silu'(a) · ȧ · b + silu(a) · ḃ."""
    gate, up = ctx.logra_arguments[0].chunk(2, dim=-1)
    gate_tangent, up_tangent = tangent.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return slope * gate_tangent * up + silu * up_tangent
