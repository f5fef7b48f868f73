"""bf16 weights keep fp32 precision, whichever way the missing bits are held."""

from __future__ import annotations

import pytest
import torch

from megatron_logra.optimizer.master_weights import (
    Fp32Master,
    Remainder,
    join_fp32,
    master_bytes,
    master_weight,
    split_fp32,
)


def awkward_numbers(generator: torch.Generator) -> torch.Tensor:
    """Random bit patterns of finite fp32 numbers, ties of the rounding to bf16 among them."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000  # exactly half way between two bf16 numbers
    values = bits.view(torch.float32)
    return values[values.isfinite() & (values.abs() < 3e38)]


def test_split_and_join_lose_no_bit(generator):
    values = awkward_numbers(generator)
    high, low = split_fp32(values)
    assert torch.equal(join_fp32(high, low).view(torch.int32), values.view(torch.int32))


def test_the_high_half_is_a_nearest_bf16(generator):
    values = awkward_numbers(generator)
    high, _ = split_fp32(values)
    error = (high.double() - values.double()).abs()
    best = (values.bfloat16().double() - values.double()).abs()
    assert torch.equal(error, best)


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_tiny_updates_accumulate_as_in_fp32(kind, generator, pg):
    start = torch.randn(40, 24, generator=generator).bfloat16()
    weight, exact = start.clone(), start.float()
    master = master_weight(weight, kind, pg.dp_cp)
    for _ in range(50):
        factor = torch.randn(40, 8, generator=generator) * 1e-5
        at = torch.randn(24, 8, generator=generator)
        master.update(factor, at, decay=0.999)
        exact.addmm_(factor, at.t(), beta=0.999, alpha=-1)
    assert torch.equal(master.value(), exact)
    assert torch.equal(weight, split_fp32(exact)[0] if kind == "replicated" else exact.bfloat16())


def test_bytes_are_those_of_the_formula(pg):
    weight = torch.zeros(6, 5, dtype=torch.bfloat16)
    assert Fp32Master(weight, pg.dp_cp).nbytes == master_bytes(30, "bf16", "sharded") == 120
    assert Remainder(weight).nbytes == master_bytes(30, "bf16", "replicated") == 60
    fp32 = master_weight(weight.float(), "replicated", pg.dp_cp)
    assert fp32.nbytes == master_bytes(30, "fp32", "replicated") == 0
