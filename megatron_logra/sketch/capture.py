"""Capture: linears that yield sketches instead of weight gradients.

Each target linear y = x Wᵀ gets a proxy parameter U, standing for the U of y = x Wᵀ + (x Aᵀ) Uᵀ at
U = 0. Its gradient is exactly the sketch, ∂loss/∂U = dYᵀ (X Aᵀ) = G Aᵀ. U never enters the forward;
a hook on the linear projects the input, keeps P = X Aᵀ [n, r] for the backward, and adds dYᵀ P to
`U.main_grad`, in Megatron's flat fp32 buffer. The weight itself is frozen, so no dense gradient
exists and the linear keeps no input.

A sketch is sharded by its rows. Under tensor parallelism a rank's U [d/tp, r] has, for a
column-parallel linear, the rows of its part of W; for a row-parallel one, whose W is split by
columns, an equal block of all rows, and P is a sum over the ranks, each of which draws its own
columns of A. What crosses ranks is n × r or d × r (x and y are a linear's input and output as
Megatron passes them, with sequence parallelism each rank's own positions):

                    P                                   S
    column          of a share of x, gathered           dYᵀ P
    column, seq.    of own positions, gathered          dYᵀ P
    row             summed                              own rows of dYᵀ P
    row, seq.       summed, own positions               dYᵀ P [d, r] summed, own rows

The same hook moves the model along the low-rank direction D without touching a weight (see
`predicted_kl`): by a tangent in forward mode, or by a side path of a given length.
Modules are found by name alone; nothing here knows the model's class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from megatron_logra.config import SketchConfig
from megatron_logra.errors import UserError
from megatron_logra.optimizer.forward_ad import MissingRule
from megatron_logra.sketch.projection import Columns, Projections


@dataclass(frozen=True, eq=False)
class Target:
    """A linear whose weight is trained by sketches."""

    name: str
    """Module name in the whole model, such as decoder.layers.0.mlp.linear_fc1."""
    weight: torch.nn.Parameter
    """This rank's part of W [d, k], frozen for autograd."""
    proxy: torch.nn.Parameter
    """U [d/tp, r] in the factor's type; `main_grad` is S. Carries the direction to all ranks."""
    row_parallel: bool
    """Whether W is split by columns over tensor-parallel ranks (else by rows)."""
    strided: int
    """Parts that each rank holds of W's rows: 2 for gate and up in one matrix, else 1."""

    @property
    def sketch(self) -> torch.Tensor:
        """This rank's rows of S, [d/tp, r] float32: the proxy's place in the gradient buffer."""
        return self.proxy.main_grad  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """Rows of S on this rank, d/tp."""
        return self.proxy.shape[0]

    @property
    def columns(self) -> int:
        """Columns of this rank's part of W."""
        return self.weight.shape[1]


class SketchProxies(MegatronModule):
    """Holds a model chunk's proxy parameters, so that Megatron's DDP can be built over them."""

    def __init__(self, config: TransformerConfig, targets: list[Target]) -> None:
        super().__init__(config)
        for target in targets:
            self.register_parameter(target.name.replace(".", "/"), target.proxy)


def round_to_bf16(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 values as bf16: one of the two beside each, by chance, so that the mean is the value.

    The values are overwritten.
    """
    # Four draws of 16 bits from each of 64: drawing is most of the work.
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    words.random_(-(1 << 63), None, generator=generator)
    noise = words.view(torch.int16)[: values.numel()].view(values.shape)
    unknown = values.isnan()  # whose bits may carry over into a number
    # bf16 is the high half of fp32: the sum carries over with the low half as its probability.
    bits = values.view(torch.int32).add_(noise).add_(1 << 15)
    rounded = bits.bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)
    return rounded.masked_fill_(unknown, math.nan)


class SketchCapture:
    """The hooks on all targets of this rank's model chunks, and the projections they use.

    Args:
        chunks: the model chunks; the weights of their targets are frozen.
        config: the sketch section of the configuration.
        factor_dtype: type of the proxies, to which α·D is rounded.
        tp_group: the tensor-parallel ranks of these chunks.
        sequence_parallel: whether activations between linears are split by positions.
        whole_name: a module's name in the whole model, from a chunk and its name there.
        with_proxies: False where weights are only moved, and nothing is captured: the proxies then
            have a shape but no memory.

    Raises:
        UserError: no module matches the targets, or the rank exceeds a layer's dimensions.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: SketchConfig,
        factor_dtype: torch.dtype,
        *,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        whole_name: Callable[[Any, str], str] = lambda _chunk, name: name,
        with_proxies: bool = True,
    ) -> None:
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel and tp_group.size() > 1
        self.by_chunk: list[list[Target]] = []
        self._proxy_device = None if with_proxies else torch.device("meta")
        self.sketch_ready: Callable[[torch.nn.Parameter], None] = lambda proxy: None
        """Called with a target's proxy after each micro-batch has been added to its sketch."""
        self._tangent = False
        self._tangent_met = False
        self._side_path: float | None = None
        self._rounding: torch.Generator | None = None
        self._whole_directions: dict[int, torch.Tensor] = {}
        self._to_sum: list[_Partial] = []
        self._to_gather: list[_Partial] = []
        self._names: list[list[str]] = []
        columns = []
        for chunk in chunks:
            self.by_chunk.append([])
            self._names.append([])
            for name, module in _find_targets(chunk, config.targets):
                target = self._attach(whole_name(chunk, name), module, config, factor_dtype)
                first = target.columns * tp_group.rank() if target.row_parallel else 0
                columns.append(Columns(target.name, first, first + target.columns))
                self.by_chunk[-1].append(target)
                self._names[-1].append(name)
        self.targets = [target for targets in self.by_chunk for target in targets]
        """All of them, chunk by chunk."""
        device = self.targets[0].weight.device
        # What makes a linear's output ask for a gradient, where nothing before it is trained.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self.projections = Projections(
            columns, config.rank, config.distribution, config.seed, device
        )

    def _attach(
        self,
        name: str,
        module: torch.nn.Module,
        config: SketchConfig,
        factor_dtype: torch.dtype,
    ) -> Target:
        weight, tp = module.weight, self.tp_group.size()
        assert isinstance(weight, torch.nn.Parameter)
        row_parallel = getattr(weight, "partition_dim", 0) == 1
        d, k = weight.shape[0], weight.shape[1]
        d, k = (d, k * tp) if row_parallel else (d * tp, k)
        if config.rank > min(d, k):
            raise UserError(
                f"sketch.rank: {config.rank} exceeds layer {name} of {d} × {k}; expected at most "
                f"{min(d, k)}"
            )
        if d % tp:
            raise UserError(f"parallel.tensor: {tp} does not divide the {d} rows of layer {name}")
        weight.requires_grad_(False)
        proxy = torch.nn.Parameter(
            torch.zeros(
                (d // tp, config.rank),
                dtype=factor_dtype,
                device=self._proxy_device or weight.device,
            )
        )
        hook = self._hook(sum(map(len, self.by_chunk)), _bias_without_gradient(module))
        module.register_forward_hook(hook)
        strided = 1 if row_parallel else getattr(weight, "partition_stride", 1)
        return Target(name, weight, proxy, row_parallel, strided)

    def _hook(self, index: int, bias: torch.nn.Parameter | None) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            moves = self._tangent or self._side_path is not None
            if not moves and not torch.is_grad_enabled():
                return None  # generation, evaluation, or the first pass of recomputation
            linear_output, *rest = output if isinstance(output, tuple) else (output,)
            x = _linear_input(module, inputs[0])
            if self._tangent:
                with torch._C.DisableTorchFunction():  # no rule is asked for in here
                    linear_output = self._add_tangent(index, x, linear_output)
            elif self._side_path is not None:
                linear_output = self._moved(linear_output, self._change(index, x))
            else:
                projected = self._project_later(index, x)
                leaf = self._anchor if bias is None or not bias.requires_grad else bias
                linear_output = _Capture.apply(linear_output, projected, leaf, self, index)
            return (linear_output, *rest) if isinstance(output, tuple) else linear_output

        return hook

    @torch.no_grad()
    def _project(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """P [positions, b, r] for the positions that the linear's output has on this rank."""
        if not (self.targets[index].row_parallel or self.sequence_parallel):
            return self.projections.project(x, index)  # rather than a message of each layer
        projected = self._project_later(index, x)
        if isinstance(projected, _Partial):
            self._exchange()
            return projected.value
        return projected

    @torch.no_grad()
    def _project_later(self, index: int, x: torch.Tensor) -> torch.Tensor | _Partial:
        """P as `_project` has it, but what other ranks have of it comes with `_exchange`."""
        size = self.tp_group.size()
        if size == 1:
            return self.projections.project(x, index)
        if self.targets[index].row_parallel:
            partial = _Partial(self.projections.project(x, index))
            self._to_sum.append(partial)
            return partial
        if self.sequence_parallel:
            positions = (x.shape[0] * size, *x.shape[1:-1])
            projected = self.projections.project(x, index)
        else:  # all ranks have all of x: each projects an equal part
            positions = x.shape[:-1]
            rows = x.flatten(0, -2)
            count = -(-len(rows) // size)
            own = rows[count * self.tp_group.rank() :][:count]
            projected = self.projections.project(own, index)
            projected = torch.nn.functional.pad(projected, (0, 0, 0, count - len(own)))
        partial = _Partial(projected, positions)
        self._to_gather.append(partial)
        return partial

    @torch.no_grad()
    def _exchange(self) -> None:
        """Complete each P that is not yet: one message for the layers of a micro-batch, not each.

        The first backward pass that needs one asks for all, at the same place on all ranks.
        """
        if self._to_sum:
            if self.sequence_parallel:
                _sum_own_positions(self._to_sum, self.tp_group)
            else:
                _sum(self._to_sum, self.tp_group)
            self._to_sum.clear()
        if self._to_gather:
            _gather_positions(self._to_gather, self.tp_group)
            self._to_gather.clear()

    def accumulate(self, index: int, grad: torch.Tensor, projected: torch.Tensor) -> None:
        """S += dYᵀ P, for this rank's rows; grad [n, d] and projected [n, r]."""
        target = self.targets[index]
        if not target.row_parallel or self.tp_group.size() == 1:
            accumulate_product(target.sketch, grad, projected)
        elif self.sequence_parallel:
            whole = torch.zeros(grad.shape[1], projected.shape[1], device=grad.device)
            accumulate_product(whole, grad, projected)
            own = torch.empty_like(target.sketch)
            dist.reduce_scatter_tensor(own, whole, group=self.tp_group)
            target.sketch.add_(own)
        else:
            first = target.rows * self.tp_group.rank()
            accumulate_product(target.sketch, grad[:, first : first + target.rows], projected)

    @torch.no_grad()
    def gather_directions(self) -> None:
        """Collect the rows of row-parallel targets' directions from the tensor-parallel ranks."""
        own = {i: t.proxy.detach() for i, t in enumerate(self.targets) if t.row_parallel}
        if self.tp_group.size() > 1 and own:
            wholes = _gathered(list(own.values()), self.tp_group)
            self._whole_directions = dict(zip(own, wholes, strict=True))

    def keep_applied(self, index: int, factor: torch.Tensor) -> None:
        """Leave in the proxy the rows of α·D that it has, as they are applied to the weights.

        Args:
            factor: as from `direction`, in the factor's type.
        """
        target = self.targets[index]
        first = target.rows * self.tp_group.rank() if target.row_parallel else 0
        target.proxy.data.copy_(factor[first : first + target.rows])

    def release_directions(self) -> None:
        """Free what `gather_directions` collected."""
        self._whole_directions = {}

    def direction(self, index: int) -> torch.Tensor:
        """D for this rank's part of W: all its rows, [rows of the part, r] in the factor's type."""
        whole = self._whole_directions.get(index)
        return self.targets[index].proxy.detach() if whole is None else whole.flatten(0, 1)

    def _change(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """(x Aᵀ) Dᵀ, with D in the proxy, like the linear's output; never forms D A."""
        return self._project(index, x) @ self.direction(index).to(x.dtype).t()

    @torch.no_grad()
    def _less_change(self, index: int, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """ẏ - (x Aᵀ) Dᵀ, in ẏ itself: after the linears, it is elementwise work that costs."""
        projected, direction = self._project(index, x), self.direction(index).to(x.dtype)
        # Nobody else has what a linear has just made; as a view made without gradients torch would
        # not have it written to.
        result = tangent.data.contiguous()
        result.flatten(0, -2).addmm_(projected.flatten(0, -2), direction.t(), alpha=-1)
        return result

    def _moved(self, output: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """output - scale · change, in output's type.

        In bf16 rounded stochastically: an output is on bf16's grid already, and rounding to the
        nearest would take back every change of less than half its distance.
        """
        assert self._side_path is not None and self._rounding is not None
        moved = output.float().sub_(change.float(), alpha=self._side_path)
        if output.dtype != torch.bfloat16:
            return moved.to(output.dtype)
        return round_to_bf16(moved, self._rounding)

    def _add_tangent(self, index: int, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """ẏ += -(x Aᵀ) Dᵀ."""
        primal, tangent = forward_ad.unpack_dual(output)
        x = forward_ad.unpack_dual(x).primal
        if tangent is not None:
            tangent = self._less_change(index, x, tangent)
        elif self._tangent_met:
            raise MissingRule(
                f"something before {self.targets[index].name} loses forward mode's tangent"
            )
        else:
            tangent = -self._change(index, x)
        self._tangent_met = True
        return forward_ad.make_dual(primal, tangent)

    @contextmanager
    def tangent(self) -> Iterator[None]:
        """Within: the proxies hold a direction D and linears add its tangent (forward mode).

        Raises:
            MissingRule: the tangent has vanished between the first target and another one.
        """
        self._tangent, self._tangent_met = True, False
        try:
            yield
        finally:
            self._tangent = False

    @contextmanager
    def side_path(self, scale: float, seed: int = 0) -> Iterator[None]:
        """Within: linears compute y - scale · (x Aᵀ) Dᵀ, with D in the proxies.

        Args:
            seed: of the rounding of bf16 outputs, which leaves all other random states alone. It is
                the same on all ranks, so that copies of an output stay copies.
        """
        self._side_path = scale
        self._rounding = torch.Generator(self.targets[0].weight.device).manual_seed(seed)
        try:
            yield
        finally:
            self._side_path = self._rounding = None

    def follow(self, twins: Sequence[torch.nn.Module]) -> None:
        """Hook the targets' counterparts in other chunks over the same weights."""
        pairs = zip(twins, self._names, strict=True)
        modules = [twin.get_submodule(name) for twin, names in pairs for name in names]
        for index, module in enumerate(modules):
            module.register_forward_hook(self._hook(index, None))


@dataclass
class _Partial:
    """P [positions, b, r] of a linear and a micro-batch: this rank's part until `_exchange`."""

    value: torch.Tensor
    positions: tuple[int, ...] = ()
    """[positions, b] of the whole, where ranks have parts of it."""


def _sum(parts: list[_Partial], group: dist.ProcessGroup) -> None:
    """Sum over the ranks."""
    flat = torch.cat([part.value.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    for part, value in zip(parts, flat.split([p.value.numel() for p in parts]), strict=True):
        part.value = value.view_as(part.value)


def _sum_own_positions(parts: list[_Partial], group: dist.ProcessGroup) -> None:
    """Sum over the ranks, of which each keeps its own positions."""
    rows = [part.value.view(group.size(), -1) for part in parts]
    flat = torch.cat(rows, dim=1)
    own = torch.empty_like(flat[0])
    dist.reduce_scatter_tensor(own, flat.view(-1), group=group)
    for part, value in zip(parts, own.split([row.shape[1] for row in rows]), strict=True):
        part.value = value.view(-1, *part.value.shape[1:])


def _gather_positions(parts: list[_Partial], group: dist.ProcessGroup) -> None:
    """Collect all positions, of which each rank has its own."""
    for part, ranks in zip(parts, _gathered([p.value for p in parts], group), strict=True):
        rows = ranks.flatten(0, -2)[: math.prod(part.positions)]
        part.value = rows.unflatten(0, part.positions)


def _gathered(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Each tensor of all ranks, [ranks, …]: views of one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    ranks = flat.new_empty(group.size(), len(flat))
    dist.all_gather_into_tensor(ranks.view(-1), flat, group=group)
    pieces = ranks.split([tensor.numel() for tensor in tensors], 1)
    return [p.unflatten(1, tensor.shape) for p, tensor in zip(pieces, tensors, strict=True)]


class _Capture(torch.autograd.Function):
    """Identity on a linear's output whose backward adds dYᵀ P to the sketch.

    `leaf` is the linear's bias, if its gradient is missing without this; else an empty tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        projected: torch.Tensor | _Partial,
        leaf: torch.Tensor,
        capture: SketchCapture,
        index: int,
    ) -> torch.Tensor:
        whole = isinstance(projected, torch.Tensor)
        ctx.save_for_backward(*([projected] if whole else []))
        ctx.partial = None if whole else projected
        ctx.capture, ctx.index, ctx.is_bias = capture, index, leaf.numel() > 0
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.partial is None:
            (projected,) = ctx.saved_tensors
        else:
            ctx.capture._exchange()
            projected, ctx.partial = ctx.partial.value, None
        rows = grad_output.flatten(0, -2)
        ctx.capture.accumulate(ctx.index, rows, projected.flatten(0, -2))
        ctx.capture.sketch_ready(ctx.capture.targets[ctx.index].proxy)
        return grad_output, None, rows.sum(0) if ctx.is_bias else None, None, None


def accumulate_product(total: torch.Tensor, grad: torch.Tensor, projected: torch.Tensor) -> None:
    """total [d, r] += gradᵀ [d, n] · projected [n, r], summed in fp32 whatever the inputs' type."""
    if total.is_cuda and grad.dtype != total.dtype:
        # One tensor-core product with fp32 output; no fp32 copies of the activations.
        total.add_(torch.mm(grad.t(), projected, out_dtype=total.dtype))
    else:
        total.addmm_(grad.t().to(total.dtype), projected.to(total.dtype))


@torch.no_grad()
def _linear_input(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What a linear multiplies, where it gets `x`: Transformer Engine's may have a norm inside.

    The layers here have none; those of other programs, such as Megatron-Bridge's models, do.
    """
    gamma = getattr(module, "layer_norm_weight", None)
    if gamma is None:
        return x
    size, scale = x.shape[-1:], gamma.float()
    if module.zero_centered_gamma:
        scale = scale + 1
    if module.normalization == "RMSNorm":
        normed = torch.nn.functional.rms_norm(x.float(), size, scale, module.eps)
    else:
        beta = module.layer_norm_bias.float()
        normed = torch.nn.functional.layer_norm(x.float(), size, scale, beta, module.eps)
    return normed.to(module.weight.dtype)


def _bias_without_gradient(module: torch.nn.Module) -> torch.nn.Parameter | None:
    """The bias that a linear adds itself: Megatron's gives it no gradient under a frozen weight."""
    if not isinstance(module, ColumnParallelLinear) or module.skip_bias_add:
        return None
    return cast(torch.nn.Parameter | None, module.bias)


# Matrices that cannot be sketched: the one is looked up and not multiplied; the other serves pieces
# of the hidden states in place, and the realised KL needs it unchanged.
_NO_TARGETS = ("word_embeddings", "output_layer")


def _find_targets(
    model: torch.nn.Module, names: list[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        and module.weight.dim() == 2
        and name.rsplit(".", 1)[-1] not in _NO_TARGETS
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
