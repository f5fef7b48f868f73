"""Forward-mode (JVP) rules for Megatron's autograd functions, which have none of their own.

With them, `torch.autograd.forward_ad` runs through a GPTModel of local layers. `RULES` is all there
is: maps that are linear in their input (the tangent goes through the same map), fused activations
and fused softmaxes. A function without a rule is a `MissingRule` that names it. Compiled functions,
through which torch would lose a tangent without a word, run uncompiled. `QUICKER` has rules in
place of some of torch's own, which pass over memory more often than they have to, and `WHOLE` what
stands for whole functions of Megatron: attention, which would hold all scores at once.
"""

from __future__ import annotations

import functools
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
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_logra.optimizer import forward_attention

Function = type[torch.autograd.Function]
Values = tuple[Any, ...]
Tangents = tuple[Any, ...]
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


def _mul(result: Tensor, of: Values, moved: Tangents) -> Tensor:
    (x, y), (dx, dy) = of, moved
    if dy is None:
        return dx * y
    return x * dy if dx is None else torch.addcmul(dx * y, x, dy)


def _add(result: Tensor, of: Values, moved: Tangents, *, alpha: float = 1) -> Tensor:
    dx, dy = moved
    if dx is not None and dy is not None:
        return torch.add(dx, dy, alpha=alpha)
    only = dy * alpha if dx is None else dx
    # A tangent of its own, which `add_` may write to, with the strides that torch wants.
    return torch.empty_like(result).copy_(only)


def _add_in_place(result: Tensor, of: Values, moved: Tangents, *, alpha: float = 1) -> Tensor:
    dx, dy = moved
    return dx if dy is None else dx.add_(dy, alpha=alpha)


def _bmm(result: Tensor, of: Values, moved: Tangents) -> Tensor:
    return _baddbmm(result, (result, *of), (None, *moved), beta=0.0)


def _baddbmm(
    result: Tensor, of: Values, moved: Tangents, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    (_, x, y), (dz, dx, dy) = of, moved
    total = None if dz is None else dz * beta
    for first, second in ((dx, y), (x, dy)):
        if first is None or second is None:
            continue
        if total is None:
            total = torch.baddbmm(result, first, second, beta=0.0, alpha=alpha)
        else:
            total.baddbmm_(first, second, alpha=alpha)
    assert total is not None
    return total


def _plain_silu(result: Tensor, of: Values, moved: Tangents, **_: Any) -> Tensor:
    if result.data_ptr() == of[0].data_ptr():
        raise MissingRule("no forward-mode rule for silu in place, which overwrites its input")
    return torch.ops.aten.silu_backward(moved[0], of[0])


def _plain_softmax(result: Tensor, of: Values, moved: Tangents, *, dim: int, **_: Any) -> Tensor:
    """torch's exponentiates the scores again, where those that are masked underflow."""
    weighted = result * moved[0]
    return torch.addcmul(weighted, result, weighted.sum(dim=dim, keepdim=True), value=-1)


def _rms_norm(
    result: Tensor, of: Values, moved: Tangents, *, weight: Tensor | None, eps: float
) -> Tensor:
    """γ · r · (ẋ - x · r² · mean(x ẋ)) with r = 1/√(mean(x²) + ε); in at least fp32."""
    x, (size,) = of
    wide = torch.promote_types(x.dtype, torch.float32)
    values, change = x.to(wide), moved[0].to(wide)
    squares = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square() / size
    inverse = (squares + eps).rsqrt()
    along = torch.linalg.vecdot(values, change).unsqueeze(-1) / size
    found = torch.addcmul(change, values, along * inverse.square(), value=-1).mul_(inverse)
    return (found if weight is None else found.mul_(weight)).to(x.dtype)


QUICKER: dict[Any, Callable[..., Tensor]] = {
    torch.Tensor.mul: _mul,
    torch.Tensor.add: _add,
    torch.Tensor.add_: _add_in_place,
    torch.bmm: _bmm,
    torch.baddbmm: _baddbmm,
    torch.nn.functional.silu: _plain_silu,
    torch.nn.functional.softmax: _plain_softmax,
    torch.nn.functional.rms_norm: _rms_norm,
}
"""rule(result, arguments, tangents or None, **keywords): tangents of functions that are torch's.

torch's are the same, with more passes over memory: zeros for what has no tangent, and sums.
"""


WHOLE: dict[tuple[Any, str], Callable[..., Tensor]] = {
    (DotProductAttention, "forward"): forward_attention.attention,
    (rope_utils, "_apply_rotary_pos_emb_bshd"): forward_attention.rotated,
}
"""own(original, *arguments): functions of Megatron that have one of their own in forward mode."""


class _Quicker(TorchFunctionMode):
    """Within: `QUICKER` instead of torch's own rules."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each function of torch."""
        kwargs, rule = kwargs or {}, QUICKER.get(function)
        if rule is None:
            return function(*args, **kwargs)
        duals = [_unpacked(argument) for argument in args]
        values, tangents = tuple(d[0] for d in duals), tuple(d[1] for d in duals)
        in_place = function is torch.Tensor.add_
        if all(tangent is None for tangent in (tangents[:1] if in_place else tangents)):
            return function(*args, **kwargs)
        result = function(*values, **kwargs)
        return forward_ad.make_dual(result, rule(result, values, tangents, **kwargs))


def _unpacked(argument: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(argument, Tensor):
        return argument, None
    return forward_ad.unpack_dual(argument)


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
    for (owner, name), own in WHOLE.items():
        _replace(owner, name, own)


def _replace(owner: Any, name: str, own: Callable[..., Tensor]) -> None:
    original = getattr(owner, name)
    if hasattr(original, "_logra_forward"):
        return

    @functools.wraps(original)
    def chosen(*arguments: Any, **named: Any) -> Tensor:
        if in_forward_mode():
            return own(original, *arguments, **named)
        return original(*arguments, **named)

    chosen._logra_forward = original  # type: ignore[attr-defined]
    setattr(owner, name, chosen)


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
    with torch.compiler.set_stance("force_eager"), forward_ad.dual_level(), _Quicker():
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
