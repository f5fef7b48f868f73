"""Forward-mode (JVP) rules for Megatron's autograd functions, which have none of their own.

With them, `torch.autograd.forward_ad` runs through a GPTModel of local layers. `RULES` is all there
is: maps that are linear in their input (the tangent goes through the same map), fused activations
and fused softmaxes. A function without a rule is a `MissingRule` that names it. Compiled functions,
through which torch would lose a tangent without a word, run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core import utils
from megatron.core.fusions import (
    fused_bias_geglu,
    fused_bias_gelu,
    fused_bias_swiglu,
    fused_softmax,
)
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

Function = type[torch.autograd.Function]
Rule = Callable[..., Tensor]
"""rule(forward, arguments, result, tangent): the tangent of a function's result, from the
function's forward(ctx, *arguments), its arguments, its result and its first argument's tangent. The
other arguments (weights, biases, masks) have no tangent."""


class MissingRule(RuntimeError):
    """A function in the model has no forward-mode rule; the message names it."""


def _linear(bias: int | None = None) -> Rule:
    """The rule of a map linear in its first argument.

    Args:
        bias: the place of an additive bias among the arguments, which a tangent must not receive.
    """

    def rule(forward: Any, arguments: tuple[Any, ...], result: Tensor, tangent: Tensor) -> Tensor:
        others = list(arguments)
        if bias is not None:
            others[bias] = None
        moved = forward(_NoContext(), tangent, *others[1:])
        # torch wants a new tensor or a view, never the argument itself.
        return moved.view_as(moved) if moved is tangent else moved

    return rule


def _activation(slope: Callable[[Tensor], tuple[Tensor, Tensor]], *, gated: bool) -> Rule:
    """The rule of f(x + b) or, gated, f(a) · c for x + b = (a, c); `slope` gives f and f'."""

    def rule(forward: Any, arguments: tuple[Any, ...], result: Tensor, tangent: Tensor) -> Tensor:
        x, *others = arguments
        if others and isinstance(others[0], Tensor):
            x = x + others[0]
        if not gated:
            return slope(x)[1] * tangent
        gate, up = x.chunk(2, dim=-1)
        gate_tangent, up_tangent = tangent.chunk(2, dim=-1)
        value, derivative = slope(gate)
        return derivative * gate_tangent * up + value * up_tangent

    return rule


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron's fused GELU is the approximation by tanh, with √(2/π) to eight digits."""
    root, cubic = 0.79788456, 0.044715
    tanh = torch.tanh(root * x * (1 + cubic * x * x))
    slope = root * (1 + 3 * cubic * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope


def _softmax(forward: Any, arguments: tuple[Any, ...], result: Tensor, tangent: Tensor) -> Tensor:
    """p · (ż - Σ p ż) for p = softmax(z), z = scale · x, the scale being the last argument."""
    weighted = result * tangent * arguments[-1]
    return weighted - result * weighted.sum(dim=-1, keepdim=True)


RULES: dict[Function, Rule] = {
    mappings._CopyToModelParallelRegion: _linear(),
    mappings._ReduceFromModelParallelRegion: _linear(),
    mappings._ScatterToModelParallelRegion: _linear(),
    mappings._GatherFromModelParallelRegion: _linear(),
    mappings._ScatterToSequenceParallelRegion: _linear(),
    mappings._GatherFromSequenceParallelRegion: _linear(),
    mappings._ReduceScatterToSequenceParallelRegion: _linear(),
    mappings._AllGatherFromTensorParallelRegion: _linear(),
    mappings._ReduceScatterToTensorParallelRegion: _linear(),
    layers.LinearWithFrozenWeight: _linear(bias=2),
    layers.LinearWithGradAccumulationAndAsyncCommunication: _linear(bias=2),
    utils.MakeViewlessTensor: _linear(),
    fused_bias_swiglu.SwiGLUFunction: _activation(_silu, gated=True),
    fused_bias_swiglu.BiasSwiGLUFunction: _activation(_silu, gated=True),
    fused_bias_geglu.GeGLUFunction: _activation(_gelu, gated=True),
    fused_bias_geglu.BiasGeGLUFunction: _activation(_gelu, gated=True),
    fused_bias_gelu.GeLUFunction: _activation(_gelu, gated=False),
    fused_softmax.ScaledSoftmax: _softmax,
    fused_softmax.ScaledMaskedSoftmax: _softmax,
    fused_softmax.ScaledUpperTriangMaskedSoftmax: _softmax,
}
"""Every rule, by the function it belongs to."""


class _NoContext:
    """Stands in for `ctx` when a forward is run for a tangent alone."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Nothing is kept."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing to set."""


def install() -> None:
    """Add the rules to Megatron's classes; a second call does nothing."""
    for function, rule in RULES.items():
        if "_logra_forward" not in vars(function):
            _add_rule(function, rule)


def _add_rule(function: Any, rule: Rule) -> None:
    forward = function.forward
    function._logra_forward = staticmethod(forward)

    def remembering(ctx: Any, *arguments: Any) -> Any:
        """The forward, which keeps what the rule needs only while a dual level is open."""
        result = forward(ctx, *arguments)
        if in_forward_mode():
            ctx.set_materialize_grads(False)  # no zeros of a weight's size for its tangent
            ctx.logra_call = arguments, result
        return result

    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> Tensor | None:
        if tangent is None:
            return None
        arguments, result = ctx.logra_call
        return rule(forward, arguments, result, tangent)

    function.forward = staticmethod(remembering)
    function.jvp = staticmethod(jvp)


def in_forward_mode() -> bool:
    """Whether a dual level is open."""
    return forward_ad._current_level >= 0


@contextmanager
def forward_mode() -> Iterator[None]:
    """Within: forward mode is on, by the rules above.

    Raises:
        MissingRule: a function of the model has none.
    """
    install()
    with torch.compiler.set_stance("force_eager"), forward_ad.dual_level():
        try:
            yield
        except NotImplementedError as error:
            raise MissingRule(f"no forward-mode rule for {_name_of(error)}") from error


def _name_of(error: NotImplementedError) -> str:
    """The function that torch asked for its rule, or what torch says about an operation."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "apply_jvp":
            function = type(trace.tb_frame.f_locals["self"])._forward_cls
            return f"{function.__module__}.{function.__qualname__}"
        trace = trace.tb_next
    return " ".join(str(error).split(" Please file")[0].split())
