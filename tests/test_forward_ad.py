"""Forward-mode rules, one by one, against central differences in float64."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
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
from torch.nn import functional

from megatron_logra import distributed
from megatron_logra.config import ParallelConfig
from megatron_logra.optimizer import forward_ad as rules

Tensors = Callable[..., torch.Tensor]
Cases = dict[rules.Function, tuple[tuple[int, ...], list[Callable[..., tuple[Any, ...]]]]]


def group_cases(group: Any) -> Cases:
    """For each function, the shape of its input and what its other arguments may be."""

    def linear_flags(sequence: bool) -> tuple[Any, ...]:
        # gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, buffers, group, GTP
        return (False, not sequence, sequence, None, None, group, 1)

    of_group = [lambda new: (group,)]
    shape = (4, 2, 6)
    found: Cases = {
        getattr(mappings, name): (shape, of_group)
        for name in (
            "_CopyToModelParallelRegion",
            "_ReduceFromModelParallelRegion",
            "_ScatterToModelParallelRegion",
            "_GatherFromModelParallelRegion",
            "_ScatterToSequenceParallelRegion",
            "_GatherFromSequenceParallelRegion",
            "_ReduceScatterToSequenceParallelRegion",
            "_AllGatherFromTensorParallelRegion",
            "_ReduceScatterToTensorParallelRegion",
        )
    }
    return found | {
        layers.LinearWithFrozenWeight: (
            shape,
            [
                lambda new: (new(5, 6), None, True, group),
                lambda new: (new(5, 6), new(5), True, group),
            ],
        ),
        layers.LinearWithGradAccumulationAndAsyncCommunication: (
            shape,
            [
                lambda new: (new(5, 6), None, *linear_flags(False)),
                lambda new: (new(5, 6), new(5), *linear_flags(False)),
                lambda new: (new(5, 6), new(5), *linear_flags(True)),
            ],
        ),
        utils.MakeViewlessTensor: (shape, [lambda new: (False,)]),
    }


ACTIVATIONS: Cases = {
    fused_bias_swiglu.SwiGLUFunction: ((7, 8), [lambda new: (False, False)]),
    fused_bias_swiglu.BiasSwiGLUFunction: ((7, 8), [lambda new: (new(8), False, False)]),
    fused_bias_geglu.GeGLUFunction: ((7, 8), [lambda new: ()]),
    fused_bias_geglu.BiasGeGLUFunction: ((7, 8), [lambda new: (new(8),)]),
    fused_bias_gelu.GeLUFunction: ((7, 8), [lambda new: (new(8),)]),
}
SOFTMAXES: Cases = {
    fused_softmax.ScaledSoftmax: ((3, 2, 5, 5), [lambda new: (0.7,)]),
    fused_softmax.ScaledMaskedSoftmax: ((3, 2, 5, 5), [lambda new: (new(3, 1, 5, 5) > 1, 0.7)]),
    fused_softmax.ScaledUpperTriangMaskedSoftmax: ((6, 5, 5), [lambda new: (0.7,)]),
}


def deviations(cases: Cases, seed: int) -> list[tuple[str, float]]:
    """For each case, how far the rule is from central differences, relative to the tangent."""
    generator = torch.Generator().manual_seed(seed)
    rules.install()

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    found = []
    for function, (shape, arguments) in cases.items():
        for make in arguments:
            x, tangent, others, step = new(*shape), new(*shape), make(new), 1e-5
            # A view: one of the functions takes nothing else.
            call = lambda value: function.apply(value.clone()[:], *others)  # noqa: B023, E731
            with torch.no_grad(), rules.forward_mode():
                dual = forward_ad.make_dual(x.clone(), tangent.clone())
                primal, ours = forward_ad.unpack_dual(call(dual))
                primal = primal.clone()
                up, down = (call(x + sign * step * tangent).clone() for sign in (1, -1))
                assert torch.equal(primal, call(x))
            expected = (up - down) / (2 * step)
            assert ours is not None
            found.append((function.__name__, float((ours - expected).norm() / expected.norm())))
    return found


def on_two_ranks(seed: int) -> list[tuple[str, float]]:
    pg = distributed.initialize(ParallelConfig(tensor=2), 0)
    return deviations(group_cases(pg.tp), seed + pg.tp.rank())


def test_every_rule_is_tried_below() -> None:
    assert {*group_cases(None), *ACTIVATIONS, *SOFTMAXES} == set(rules.RULES)


def test_maps_over_tensor_parallel_ranks_follow_central_differences(ranks, generator) -> None:
    for found in ranks.run(2, on_two_ranks, generator.seed() % 2**31):
        assert len(found) > 12
        for name, error in found:
            assert error < 1e-9, name


def test_fused_activations_follow_central_differences(generator) -> None:
    for name, error in deviations(ACTIVATIONS, generator.seed() % 2**31):
        # Megatron's constant for √(2/π) has eight digits, which the rule shares.
        assert error < 1e-8, name


@pytest.fixture
def softmax_kernels(monkeypatch) -> None:
    """What the CUDA extensions compute, in place of them: masked entries get no probability."""

    def softmax(x: torch.Tensor, mask: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
        z = x * scale.double().item()
        return torch.softmax(z if mask is None else z.masked_fill(mask, -1e4), -1)

    def causal(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return softmax(x, torch.ones(x.shape[-2:]).triu(1).bool(), scale)

    for name, forward in (
        ("scaled_softmax_cuda", lambda x, scale: softmax(x, None, scale)),
        ("scaled_masked_softmax_cuda", softmax),
        ("scaled_upper_triang_masked_softmax_cuda", causal),
    ):
        module = types.ModuleType(name)
        module.forward = forward
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("softmax_kernels")
def test_fused_softmaxes_follow_central_differences(generator) -> None:
    for name, error in deviations(SOFTMAXES, generator.seed() % 2**31):
        assert error < 1e-6, name  # the kernels take the scale as a float32


def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, written to a tensor that is read afterwards, while x and its tangent stay."""
    total = x * 1
    total.add_(y)
    return total


QUICKER = {
    torch.Tensor.mul: lambda x, y, z: [x * y, x * y[0], 2 * x, x * z, z * y],
    torch.Tensor.add: lambda x, y, z: [
        x + y,
        x + y[0],
        x + 2,
        x[:1] + z,
        z + y,
        x.add(y, alpha=3),
        z.add(y, alpha=3),
    ],
    torch.Tensor.add_: lambda x, y, z: [
        _added(x, y),
        _added(x, y[0]),
        _added(x, z),
        _added(z.clone(), y),
        (x + 2).add_(y, alpha=3),
    ],
    torch.bmm: lambda x, y, z: [torch.bmm(x, y.mT), torch.bmm(z, y.mT), torch.bmm(x, z.mT)],
    torch.baddbmm: lambda x, y, z: [
        torch.baddbmm(x @ z.mT, x, y.mT, beta=0.3, alpha=0.7),
        torch.baddbmm(z @ z.mT, x, y.mT, alpha=0.7),
        # What is not read may be anything.
        torch.baddbmm(torch.full_like(x @ z.mT, torch.nan), x, y.mT, beta=0.0, alpha=0.7),
        torch.baddbmm(z @ z.mT, z, y.mT),
        torch.baddbmm(x @ z.mT, z, z.mT, beta=0.3),
    ],
    functional.silu: lambda x, y, z: [functional.silu(x)],
    functional.softmax: lambda x, y, z: [functional.softmax(x, dim=1), torch.nn.Softmax(-1)(y)],
    functional.rms_norm: lambda x, y, z: [
        functional.rms_norm(x, (6,), z[0, 0], 1e-2),
        functional.rms_norm(x, (6,), eps=1e-2),
    ],
}
"""Uses of a function with x and y, which have tangents, and z, which has none: [3, 5, 6] each."""


def test_every_quicker_rule_is_tried_below() -> None:
    assert set(QUICKER) == set(rules.QUICKER)


@pytest.mark.parametrize("function", QUICKER, ids=lambda f: f.__name__)
def test_quicker_rules_follow_central_differences(function, generator) -> None:
    x, y, z, dx, dy = torch.randn(5, 3, 5, 6, dtype=torch.float64, generator=generator).unbind()
    uses, step = QUICKER[function], 1e-5
    with torch.no_grad():
        with rules.forward_mode():
            duals = uses(forward_ad.make_dual(x, dx), forward_ad.make_dual(y, dy), z)
            found = [tuple(part.clone() for part in forward_ad.unpack_dual(dual)) for dual in duals]
        up, down = (uses(x + sign * step * dx, y + sign * step * dy, z) for sign in (1, -1))
        for (value, tangent), plain, plus, minus in zip(
            found, uses(x, y, z), up, down, strict=True
        ):
            assert torch.equal(value, plain)
            expected = (plus - minus) / (2 * step)
            assert (tangent - expected).norm() < 1e-8 * expected.norm()


def test_a_quicker_rule_is_the_one_in_use(generator, monkeypatch) -> None:
    x, tangent = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).unbind()
    monkeypatch.setitem(rules.QUICKER, torch.Tensor.mul, lambda *_: torch.full_like(x, 7.0))
    with torch.no_grad(), rules.forward_mode():
        found = forward_ad.unpack_dual(forward_ad.make_dual(x, tangent) * 2)
        assert torch.equal(found.tangent, torch.full_like(x, 7.0))
        assert torch.equal(found.primal, x * 2)
    assert torch.equal(x * 2, x + x)


class Ruleless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Ruleless.apply, "test_forward_ad.Ruleless"),
        (lambda x: torch.igamma(x, x), "igamma"),
        (torch.linalg.ldl_factor, "ldl_factor"),
    ],
)
def test_a_function_without_a_rule_is_an_error_that_names_it(function, name) -> None:
    with pytest.raises(rules.MissingRule, match=name), torch.no_grad(), rules.forward_mode():
        function(forward_ad.make_dual(torch.rand(3, 3), torch.rand(3, 3)))


def test_a_compiled_function_keeps_its_tangent(generator) -> None:
    compiled = torch.compile(lambda x: x * torch.sigmoid(x))
    x, tangent = (torch.randn(9, dtype=torch.float64, generator=generator) for _ in range(2))
    with torch.no_grad(), rules.forward_mode():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent))).tangent
    sigmoid = torch.sigmoid(x)
    torch.testing.assert_close(found, tangent * sigmoid * (1 + x * (1 - sigmoid)))


def test_a_function_that_overwrites_its_input_has_no_rule():
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)
    with rules.forward_mode():
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(rules.MissingRule, match="silu in place"):
            functional.silu(dual, inplace=True)
