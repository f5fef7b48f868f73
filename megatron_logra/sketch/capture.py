"""Capture: linears that yield sketches instead of weight gradients.

Each target linear y = x Wᵀ gets a proxy parameter U [d, r], standing for the U of
y = x Wᵀ + (x Aᵀ) Uᵀ at U = 0. Its gradient is exactly the sketch, ∂loss/∂U = dYᵀ (X Aᵀ) = G Aᵀ.
U never enters the forward; a hook on the linear projects the input, keeps P = X Aᵀ [n, r] for the
backward, and adds dYᵀ P to `U.main_grad`, in Megatron's flat fp32 buffer. The weight itself is
frozen, so no dense gradient exists and the linear keeps no input.

The same hook adds the low-rank direction's tangent in forward mode (see `predicted_kl`).
Modules are found by name alone; nothing here knows the model's class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.config import SketchConfig
from megatron_logra.errors import UserError
from megatron_logra.sketch.projection import Columns, Projections


@dataclass(frozen=True, eq=False)
class Target:
    """A linear whose weight is trained by sketches."""

    name: str
    """Module name within its model chunk, such as decoder.layers.0.mlp.linear_fc1."""
    weight: torch.nn.Parameter
    """W [d, k], frozen for autograd."""
    proxy: torch.nn.Parameter
    """U [d, r] in the factor's type; `main_grad` is S. Carries the direction to all ranks."""

    @property
    def sketch(self) -> torch.Tensor:
        """S [d, r], float32: the proxy's place in Megatron's gradient buffer."""
        return self.proxy.main_grad  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """d, output features."""
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        """k, input features."""
        return self.weight.shape[1]


class SketchProxies(MegatronModule):
    """Holds a model chunk's proxy parameters, so that Megatron's DDP can be built over them."""

    def __init__(self, config: TransformerConfig, targets: list[Target]) -> None:
        super().__init__(config)
        for target in targets:
            self.register_parameter(target.name.replace(".", "/"), target.proxy)


class SketchCapture:
    """The hooks on all targets of a model chunk, and the projections they use.

    Args:
        model: the model chunk; the weights of its targets are frozen.
        config: the sketch section of the configuration.
        factor_dtype: type of the proxies, to which α·D is rounded.

    Raises:
        UserError: no module matches the targets, or the rank exceeds a layer's dimensions.
    """

    def __init__(
        self, model: torch.nn.Module, config: SketchConfig, factor_dtype: torch.dtype
    ) -> None:
        self.targets: list[Target] = []
        self._tangent = False
        for name, module in _find_targets(model, config.targets):
            weight = module.weight
            assert isinstance(weight, torch.nn.Parameter)
            if config.rank > min(weight.shape):
                raise UserError(
                    f"sketch.rank: {config.rank} exceeds layer {name} of {weight.shape[0]} × "
                    f"{weight.shape[1]}; expected at most {min(weight.shape)}"
                )
            weight.requires_grad_(False)
            proxy = torch.nn.Parameter(
                torch.zeros(weight.shape[0], config.rank, dtype=factor_dtype, device=weight.device)
            )
            module.register_forward_hook(self._hook(len(self.targets)))
            self.targets.append(Target(name, weight, proxy))
        columns = [Columns(target.name, 0, target.columns) for target in self.targets]
        device = self.targets[0].weight.device
        self.projections = Projections(
            columns, config.rank, config.distribution, config.seed, device
        )

    def _hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            if not self._tangent and not torch.is_grad_enabled():
                return None  # generation, evaluation, or the first pass of recomputation
            linear_output, *rest = output if isinstance(output, tuple) else (output,)
            if self._tangent:
                linear_output = self._add_tangent(index, inputs[0], linear_output)
            else:
                linear_output = self._capture(index, inputs[0], linear_output)
            return (linear_output, *rest) if isinstance(output, tuple) else linear_output

        return hook

    def _capture(self, index: int, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            projected = self.projections.project(x.reshape(-1, x.shape[-1]), index)
        return _Capture.apply(output, projected, self.targets[index].proxy)

    def _add_tangent(self, index: int, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """ẏ += -(x Aᵀ) Dᵀ, with D in the proxy; never forms D A."""
        primal, tangent = forward_ad.unpack_dual(output)
        x = forward_ad.unpack_dual(x).primal
        direction = self.targets[index].proxy.detach().to(x.dtype)
        change = self.projections.project(x, index) @ direction.t()
        tangent = -change if tangent is None else tangent - change
        return forward_ad.make_dual(primal, tangent)

    @contextmanager
    def tangent(self) -> Iterator[None]:
        """Within: the proxies hold a direction D and linears add its tangent (forward mode)."""
        self._tangent = True
        try:
            yield
        finally:
            self._tangent = False


class _Capture(torch.autograd.Function):
    """Identity on a linear's output whose backward adds dYᵀ P to the proxy's `main_grad`."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, projected: torch.Tensor, proxy: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(projected)
        ctx.proxy = proxy
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (projected,) = ctx.saved_tensors
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        accumulate_product(ctx.proxy.main_grad, grad, projected)
        ctx.proxy.grad_added_to_main_grad = True
        return grad_output, None, None


def accumulate_product(total: torch.Tensor, grad: torch.Tensor, projected: torch.Tensor) -> None:
    """total [d, r] += gradᵀ [d, n] · projected [n, r], summed in fp32 whatever the inputs' type."""
    if total.is_cuda and grad.dtype != total.dtype:
        # One tensor-core product with fp32 output; no fp32 copies of the activations.
        total.add_(torch.mm(grad.t(), projected, out_dtype=total.dtype))
    else:
        total.addmm_(grad.t().to(total.dtype), projected.to(total.dtype))


def _find_targets(
    model: torch.nn.Module, names: list[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        and module.weight.dim() == 2
    ]
    for wanted in names:
        if not any(name.rsplit(".", 1)[-1] == wanted for name, _ in linears):
            known = sorted({name.rsplit(".", 1)[-1] for name, _ in linears})
            raise UserError(
                f"sketch.targets: no linear is named {wanted!r}; expected names among: "
                + ", ".join(known)
            )
    for name, module in linears:
        if name.rsplit(".", 1)[-1] in names:
            yield name, module
