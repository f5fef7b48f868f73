"""From rewards to advantages, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_logra.config import AlgorithmConfig

GRPO_EPS = 1e-6
"""Added to a group's standard deviation, in units of reward."""


class RunningBaseline:
    """REINFORCE's baseline: the exponential moving average of the batches' mean rewards.

    A batch is measured against the average of the batches before it; the first one, which has
    none, against its own mean.

    Args:
        ema: weight of the newest batch.
    """

    def __init__(self, ema: float) -> None:
        self.ema = ema
        self.value: float | None = None

    def advantages(self, rewards: Tensor) -> Tensor:
        """Rewards minus baseline, of the shape of `rewards`, float64; then moves the baseline."""
        rewards = rewards.double()
        mean = rewards.mean().item()
        baseline = mean if self.value is None else self.value
        self.value = baseline + self.ema * (mean - baseline)
        return rewards - baseline

    def state_dict(self) -> dict[str, float | None]:
        """All there is to save."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from a saved state."""
        self.value = state["value"]


def group_relative(rewards: Tensor, *, normalise_std: bool = True) -> Tensor:
    """GRPO's advantages: how much better than the other responses to the same prompt.

    Args:
        rewards: [prompts, samples].
        normalise_std: divide by the group's population standard deviation plus `GRPO_EPS`.

    Returns:
        [prompts, samples] float64. A group with one outcome only gives exactly 0.
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(1, keepdim=True)
    if normalise_std:
        centred = centred / (rewards.std(1, correction=0, keepdim=True) + GRPO_EPS)
    # The mean of equal numbers can differ from them in the last bit.
    return centred.masked_fill(_one_outcome(rewards)[:, None], 0.0)


def zero_variance_fraction(rewards: Tensor) -> float | None:
    """Fraction of the groups [prompts, samples] with one outcome; None for groups of one."""
    return _one_outcome(rewards).double().mean().item() if rewards.shape[1] > 1 else None


def advantages(rewards: Tensor, algorithm: AlgorithmConfig, baseline: RunningBaseline) -> Tensor:
    """Advantages [prompts, samples] float64 by `algorithm.name`; reinforce moves `baseline`."""
    match algorithm.name:
        case "reinforce":
            return baseline.advantages(rewards)
        case "grpo":
            return group_relative(rewards, normalise_std=algorithm.normalise_std)
        case other:
            raise ValueError(f"{other} has no advantages")


def _one_outcome(rewards: Tensor) -> Tensor:
    return torch.eq(rewards, rewards[:, :1]).all(1)
