"""How far a step goes: the KL budget and the factor α (method, section 4)."""

from __future__ import annotations

import math
from typing import Any

from megatron_logra.config import StepControlConfig


class StepControl:
    """Budget schedule, mismatch subtraction and α; its only state is the mismatch's average."""

    def __init__(self, config: StepControlConfig) -> None:
        self.config = config
        self.mismatch_average: float | None = None

    def scheduled_budget(self, update: int) -> float:
        """KL budget of update `update` (counted from 0), nats per token, before subtraction."""
        config = self.config
        if config.schedule == "constant":
            return config.kl_budget
        progress = min(update / config.schedule_steps, 1.0)
        if config.schedule == "cosine":
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return config.kl_budget + (config.kl_budget_final - config.kl_budget) * progress

    def observe_mismatch(self, mismatch: float) -> None:
        """Take in a batch's mean of [rollout logprob - trainer logprob] over its tokens."""
        value = max(0.0, mismatch)
        if self.mismatch_average is None:
            self.mismatch_average = value
        else:
            weight = self.config.mismatch_ema
            self.mismatch_average += weight * (value - self.mismatch_average)

    def budget(self, update: int) -> float:
        """max(budget - m̄, floor · budget)."""
        budget = self.scheduled_budget(update)
        if not self.config.mismatch_subtraction or self.mismatch_average is None:
            return budget
        return max(budget - self.mismatch_average, self.config.budget_floor * budget)

    def alpha(self, predicted: float, budget: float) -> float:
        """α = min(α_max, sqrt(budget / predicted)); 1 where nothing moves (predicted = 0).

        Raises:
            ValueError: the prediction is negative or not finite.
        """
        if not math.isfinite(predicted) or predicted < 0:
            raise ValueError(f"predicted KL is {predicted}; expected a finite number >= 0")
        if predicted == 0:
            return 1.0
        return min(self.config.alpha_max, math.sqrt(budget / predicted))

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints."""
        return {"mismatch_average": self.mismatch_average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s state."""
        self.mismatch_average = state["mismatch_average"]
