"""Attention in forward mode equals Megatron's own, and its tangent central differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_logra.optimizer import forward_ad as rules
from megatron_logra.optimizer import forward_attention

LENGTH, BATCH, HEADS, CHANNELS = 37, 2, 4, 6


def attention(pg, kind: AttnMaskType = AttnMaskType.causal, **fields: Any) -> DotProductAttention:
    fields.setdefault("num_query_groups", HEADS)
    config = TransformerConfig(
        num_layers=4, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, **fields
    )
    module = DotProductAttention(config, 3, kind, "self", pg_collection=pg)
    return module.eval()


def moved(call, inputs, tangents) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and tangent of a function, in forward mode."""
    with torch.no_grad(), rules.forward_mode():
        dual = call(*map(forward_ad.make_dual, inputs, tangents))
        value, tangent = forward_ad.unpack_dual(dual)
        return value.clone(), tangent.clone()


def differences(call, inputs, tangents, step: float = 1e-5) -> torch.Tensor:
    """The derivative by central differences."""
    with torch.no_grad():
        up, down = (
            call(*(x + sign * step * dx for x, dx in zip(inputs, tangents, strict=True))).clone()
            for sign in (1, -1)
        )
    return (up - down) / (2 * step)


def assert_follows(call, inputs, tangents) -> None:
    """In forward mode a function has its own value, and central differences as its tangent."""
    value, tangent = moved(call, inputs, tangents)
    torch.testing.assert_close(value, call(*inputs), rtol=1e-12, atol=1e-12)
    expected = differences(call, inputs, tangents)
    assert (tangent - expected).norm() < 1e-8 * expected.norm()


def draw(generator, groups: int = HEADS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values in float64, and tangents."""
    shapes = [(LENGTH, BATCH, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    inputs, tangents = (
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for _ in range(2)
    )
    return inputs, tangents


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"num_query_groups": 2},
    "one group": {"num_query_groups": 1},
    "window": {"window_size": (4, 0)},
    "grouped window": {"num_query_groups": 2, "window_size": (2, 0)},
    "window both ways": {"window_size": (3, 2)},
    "window to the end": {"window_size": (3, 99)},
    "scaled by layer": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
}


@pytest.fixture(params=[1, 32, 64])
def queries(request, monkeypatch) -> int:
    """How many queries a block may have: fewer than the fewest, some, all."""
    monkeypatch.setitem(forward_attention.SCORES, "cpu", request.param * BATCH * HEADS * LENGTH)
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_attention_by_blocks_follows_central_differences(case, queries, pg, generator) -> None:
    module = attention(pg, **CASES[case])
    inputs, tangents = draw(generator, CASES[case].get("num_query_groups", HEADS))
    assert_follows(lambda *tensors: module(*tensors, None), inputs, tangents)


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_given_mask_hides_what_it_says(batch, queries, pg, generator) -> None:
    module = attention(pg, AttnMaskType.padding)
    inputs, tangents = draw(generator)
    mask = torch.rand(batch, 1, LENGTH, LENGTH, generator=generator) < 0.4
    mask[..., 0] = False
    assert_follows(lambda *tensors: module(*tensors, mask), inputs, tangents)


def test_in_bf16_it_rounds_where_megatron_does(pg, generator) -> None:
    module = attention(pg, bf16=True, params_dtype=torch.bfloat16)
    inputs, tangents = draw(generator)
    rounded = [x.bfloat16() for x in inputs]
    value, tangent = moved(
        lambda *tensors: module(*tensors, None), rounded, [x.bfloat16() for x in tangents]
    )
    assert value.dtype == tangent.dtype == torch.bfloat16
    own = module(*rounded, None)
    assert (value.double() - own.double()).norm() < 0.002 * own.double().norm()
    wide = attention(pg)
    expected = differences(lambda *tensors: wide(*tensors, None), inputs, tangents)
    assert (tangent.double() - expected).norm() < 0.02 * expected.norm()


def test_what_blocks_do_not_cover_goes_megatrons_way(pg, generator, monkeypatch) -> None:
    inputs, tangents = draw(generator)
    plain, offset = attention(pg), attention(pg)
    offset.softmax_offset = torch.randn(HEADS, dtype=torch.float64, generator=generator)
    for module, moving in ((offset, tangents), (plain, [tangents[0], None, tangents[2]])):

        def call(*tensors: torch.Tensor, module=module) -> torch.Tensor:
            return module(*tensors, None)

        with torch.no_grad(), rules.forward_mode():
            duals = [
                x if dx is None else forward_ad.make_dual(x, dx)
                for x, dx in zip(inputs, moving, strict=True)
            ]
            tangent = forward_ad.unpack_dual(call(*duals)).tangent.clone()
        still = [
            torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, moving, strict=True)
        ]
        expected = differences(call, inputs, still)
        assert (tangent - expected).norm() < 1e-8 * expected.norm()


ROTATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (CHANNELS, {}),
    "scaled": (CHANNELS, {"mscale": 1.3}),
    "a part": (4, {}),
    "interleaved": (CHANNELS, {"rotary_interleaved": True}),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_follow_megatrons(case, generator) -> None:
    channels, options = ROTATIONS[case]
    (x, *_), (tangent, *_) = draw(generator)
    half = torch.randn(LENGTH, 1, 1, channels // 2, dtype=torch.float64, generator=generator)
    angles = torch.cat((half, half), -1)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(tensor, angles, **options)

    value, moves = moved(call, [x], [tangent])
    torch.testing.assert_close(value, call(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moves, call(tangent), rtol=1e-12, atol=1e-12)  # it is linear


def test_a_block_of_queries_is_all_that_is_held(pg, generator, monkeypatch) -> None:
    """Megatron's attention would hold scores of all 37 at once."""
    largest = 0
    softmax = torch.softmax

    def watched(scores: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return softmax(scores, **options)

    monkeypatch.setitem(forward_attention.SCORES, "cpu", 31 * BATCH * HEADS * LENGTH)
    monkeypatch.setattr(torch, "softmax", watched)
    module, (inputs, tangents) = attention(pg), draw(generator)
    moved(lambda *tensors: module(*tensors, None), inputs, tangents)
    assert largest == 16 * BATCH * HEADS * 32  # what the last of them may see
