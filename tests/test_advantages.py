"""Advantages against numpy, and what must be exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_logra.config import AlgorithmConfig
from megatron_logra.rl.advantages import (
    GRPO_EPS,
    RunningBaseline,
    advantages,
    group_relative,
    zero_variance_fraction,
)


def test_running_baseline_is_the_average_of_the_batches_before(generator: torch.Generator) -> None:
    ema = 0.25
    baseline = RunningBaseline(ema)
    expected: float | None = None
    for _ in range(6):
        rewards = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        mean = float(np.mean(rewards.numpy()))
        before = mean if expected is None else expected
        np.testing.assert_allclose(
            baseline.advantages(rewards).numpy(), rewards.numpy() - before, atol=1e-14
        )
        expected = mean if expected is None else (1 - ema) * expected + ema * mean
        assert baseline.value == pytest.approx(expected, abs=1e-14)


def test_restored_baseline_continues_to_the_last_bit(generator: torch.Generator) -> None:
    batches = torch.rand(8, 4, 2, generator=generator)
    whole, first, second = (RunningBaseline(0.1) for _ in range(3))
    expected = [whole.advantages(batch) for batch in batches]
    for batch in batches[:3]:
        first.advantages(batch)
    second.load_state_dict(first.state_dict())
    for batch, advantage in zip(batches[3:], expected[3:], strict=True):
        assert torch.equal(second.advantages(batch), advantage)
    fresh = RunningBaseline(0.1)
    fresh.load_state_dict(RunningBaseline(0.1).state_dict())
    assert torch.equal(fresh.advantages(batches[0]), expected[0])


@pytest.mark.parametrize("normalise", [True, False])
def test_group_relative_advantages_equal_numpy(generator: torch.Generator, normalise: bool) -> None:
    rewards = torch.randn(7, 5, generator=generator)
    reference = rewards.double().numpy()
    expected = reference - reference.mean(1, keepdims=True)
    if normalise:
        expected /= np.std(reference, axis=1, keepdims=True) + GRPO_EPS
    result = group_relative(rewards, normalise_std=normalise)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-13)


def test_group_with_one_outcome_gives_exactly_zero(generator: torch.Generator) -> None:
    # 0.1 three times: their floating-point mean need not be 0.1.
    values = torch.cat([torch.tensor([0.1, 0.7]), torch.rand(40, generator=generator)])
    for samples in (2, 3, 7):
        for normalise in (True, False):
            rewards = values[:, None].expand(-1, samples).contiguous().double()
            rewards[-1, 0] += 1.0
            result = group_relative(rewards, normalise_std=normalise)
            assert torch.count_nonzero(result[:-1]) == 0
            assert torch.count_nonzero(result[-1]) == samples
            expected = (len(values) - 1) / len(values)
            assert zero_variance_fraction(rewards) == pytest.approx(expected, abs=1e-15)


def test_groups_of_one_have_no_variance_to_speak_of() -> None:
    assert zero_variance_fraction(torch.rand(5, 1)) is None


def test_algorithm_chooses_the_advantage(generator: torch.Generator) -> None:
    rewards = torch.rand(4, 3, generator=generator)
    baseline = RunningBaseline(0.5)
    grpo = advantages(rewards, AlgorithmConfig(name="grpo"), baseline)
    assert torch.equal(grpo, group_relative(rewards))
    assert baseline.value is None
    reinforce = advantages(rewards, AlgorithmConfig(name="reinforce"), baseline)
    assert torch.equal(reinforce, rewards.double() - rewards.double().mean())
    assert baseline.value == rewards.double().mean().item()
    with pytest.raises(ValueError, match="sft"):
        advantages(rewards, AlgorithmConfig(name="sft"), baseline)
