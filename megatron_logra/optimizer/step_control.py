"""How far a step goes: the KL budget and the factor α (method, section 4).

With K the predicted KL at α = 1, the step's KL is α² K to second order, and

    α = min(α_max, √(budget / (c K)))

where c = 1, unless `adaptive` is on: then c is a moving geometric average of realised over
predicted KL, ln c ← ln c + w (ln clip(realised / (α² K), ¼, 4) - ln c), beginning with the first
ratio. It corrects what the second order leaves out and stays the same from step to step: a
curvature that makes large steps go less far than predicted, or Adam's part on the non-targets. It
cannot correct what differs from step to step. It takes what rounding to bf16 adds for movement, and
makes steps of less than some 1e-4 nats, which measure several times as much, smaller still. It
learns nothing between two measurements of the realised KL. And as the ratio depends on the step's
size, c lags behind a changing budget by about 1/w measurements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatron_logra.config import StepControlConfig

RATIO_EXPECTED = (0.5, 2.0)
"""Where the ratio of realised to predicted KL should be."""
RATIO_PATIENCE = 3
"""Measurements in a row outside after which there is a warning."""
RATIO_TRUSTED = (0.25, 4.0)
"""Ratios beyond these count as these in the adaptive correction."""


@dataclass
class _State:
    mismatch_average: float | None = None
    log_ratio: float | None = None
    """ln c, nothing before the first measurement."""
    unexpected_in_a_row: int = 0
    """Measurements whose ratio was not as expected."""
    last_predicted: float | None = None
    """Predicted KL of the last update, at α = 1."""


class StepControl:
    """Budget schedule, mismatch subtraction and α."""

    def __init__(self, config: StepControlConfig) -> None:
        self.config = config
        self.state = _State()

    @property
    def mismatch_average(self) -> float | None:
        """m̄, the average of max(0, mismatch); None before the first."""
        return self.state.mismatch_average

    @property
    def correction(self) -> float:
        """c, by which predictions are multiplied."""
        if not self.config.adaptive or self.state.log_ratio is None:
            return 1.0
        return math.exp(self.state.log_ratio)

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
        state = self.state
        state.mismatch_average = _moved(
            state.mismatch_average, max(0.0, mismatch), self.config.mismatch_ema
        )

    def observe_prediction(self, predicted: float) -> None:
        """Take in the predicted KL at α = 1 of an update that was applied."""
        self.state.last_predicted = predicted

    def observe_realised(
        self, predicted: float, realised: float, along: float | None = None
    ) -> str | None:
        """Take in a measurement after a step.

        Args:
            predicted: KL of the step as applied, nats per token.
            realised: the measured one.
            along: the part of it along the prediction, if known.

        Returns:
            A warning, if this is the last of `RATIO_PATIENCE` measurements in a row that are far
            from their predictions. Where the part along the prediction is as predicted, the rest is
            not the step's, and the first of these warnings says enough.
        """
        if predicted <= 0 or not math.isfinite(realised):
            return None
        state, ratio = self.state, realised / predicted
        low, high = RATIO_TRUSTED
        trusted = math.log(min(max(ratio, low), high))
        state.log_ratio = _moved(state.log_ratio, trusted, self.config.adaptive_ema)
        low, high = RATIO_EXPECTED
        if low <= ratio <= high:
            state.unexpected_in_a_row = 0
            return None
        state.unexpected_in_a_row += 1
        times = state.unexpected_in_a_row
        warning = (
            f"the realised KL has been outside {low:g} to {high:g} times the predicted one "
            f"{times} times in a row, now {ratio:.2g} times: "
        )
        if along is not None and ratio > high and low <= along / predicted <= high:
            if times != RATIO_PATIENCE:
                return None
            return (
                f"{warning}along the prediction it is {along / predicted:.2g} times; the other "
                f"{realised - along:.1e} nats a token are rounding, or what Adam does to the rest"
            )
        if times % RATIO_PATIENCE:
            return None
        return (
            f"{warning}the steps are too large for the prediction, or too small for the precision"
        )

    def expected_kl(self, update: int) -> float:
        """A rough idea of the next prediction: the last one, or the budget."""
        last = self.state.last_predicted
        return last if last is not None and last > 0 else self.scheduled_budget(update)

    def budget(self, update: int) -> float:
        """max(budget - m̄, floor · budget)."""
        budget = self.scheduled_budget(update)
        if not self.config.mismatch_subtraction or self.mismatch_average is None:
            return budget
        return max(budget - self.mismatch_average, self.config.budget_floor * budget)

    def alpha(self, predicted: float, budget: float) -> float:
        """α = min(α_max, √(budget / (c · predicted))); 1 where nothing moves (predicted = 0).

        Raises:
            ValueError: the prediction is negative or not finite.
        """
        if not math.isfinite(predicted) or predicted < 0:
            raise ValueError(f"predicted KL is {predicted}; expected a finite number >= 0")
        if predicted == 0:
            return 1.0
        return min(self.config.alpha_max, math.sqrt(budget / self.correction / predicted))

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s state."""
        self.state = _State(**state)


def _moved(average: float | None, value: float, weight: float) -> float:
    """An exponential moving average after one more value; it starts at its first one."""
    return value if average is None else average + weight * (value - average)
