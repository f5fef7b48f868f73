"""Budgets, α, the adaptive correction and the warning, by their formulas."""

from __future__ import annotations

import json
import math

import pytest

from megatron_logra.config import StepControlConfig, config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.optimizer.step_control import StepControl


def control(**settings: object) -> StepControl:
    return StepControl(StepControlConfig(**settings))


@pytest.mark.parametrize(
    ("schedule", "halfway", "late"),
    [("cosine", 1.1e-4, 2e-5), ("linear", 1.1e-4, 2e-5), ("constant", 2e-4, 2e-4)],
)
def test_budgets_fall_as_scheduled_and_then_stay(schedule, halfway, late):
    found = control(schedule=schedule, schedule_steps=100)
    assert found.budget(0) == 2e-4
    assert found.budget(50) == pytest.approx(halfway, rel=1e-12)
    assert found.budget(100) == pytest.approx(late, rel=1e-12) == found.budget(10**9)


def test_cosine_and_linear_differ_between_start_and_middle():
    quarter = {name: control(schedule=name).budget(75) for name in ("cosine", "linear")}
    assert quarter["linear"] == pytest.approx(2e-4 - 1.8e-4 / 4)
    assert quarter["cosine"] == pytest.approx(2e-4 - 1.8e-4 * 0.5 * (1 - math.cos(math.pi / 4)))


def test_mismatch_is_subtracted_down_to_the_floor():
    found = control(budget_floor=0.25, schedule="constant")
    assert found.budget(0) == 2e-4  # nothing is known yet
    found.observe_mismatch(-3.0)
    assert found.mismatch_average == 0 and found.budget(0) == 2e-4
    found.observe_mismatch(1e-4)
    assert found.budget(0) == pytest.approx(2e-4 - 0.3e-4)
    found.observe_mismatch(10.0)
    assert found.budget(0) == 0.25 * 2e-4
    off = control(mismatch_subtraction=False, schedule="constant")
    off.observe_mismatch(10.0)
    assert off.budget(0) == 2e-4


def test_alpha_meets_the_budget_up_to_its_maximum():
    found = control(alpha_max=2.5)
    assert found.alpha(1e-5, 4e-5) == pytest.approx(2.0)
    assert found.alpha(1e-5, 1e-7) == pytest.approx(0.1)
    assert found.alpha(1e-5, 1e-4) == found.alpha(1e-300, 1e-4) == 2.5
    assert found.alpha(0.0, 4e-5) == 1.0
    for bad in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite number"):
            found.alpha(bad, 1e-4)


def test_three_ratios_in_a_row_outside_are_a_warning():
    found = control()
    ratios = [1.0, 3.0, 0.1, 1.9, 2.1, 0.4, 5.0, 0.01, 9.0, 3.0, 0.5]
    said = [found.observe_realised(1e-5, 1e-5 * ratio) for ratio in ratios]
    assert [i for i, text in enumerate(said) if text] == [6, 9]
    assert "3 times in a row, now 5 times" in said[6]
    assert "6 times in a row" in said[9]
    assert found.observe_realised(0.0, 1.0) is None  # nothing was predicted
    assert found.observe_realised(1e-5, math.nan) is None
    assert found.state.unexpected_in_a_row == 0


def test_what_else_moves_the_policy_beside_a_step_as_predicted_is_told_once():
    found = control()
    said = [found.observe_realised(2e-5, 12e-5, 2.2e-5) for _ in range(9)]
    assert [i for i, text in enumerate(said) if text] == [2]
    assert "along the prediction it is 1.1 times" in said[2]
    assert "the other 9.8e-05 nats a token are rounding, or what Adam does to the rest" in said[2]
    found = control()
    said = [found.observe_realised(2e-5, 12e-5, 20e-5) for _ in range(6)]
    assert [i for i, text in enumerate(said) if text] == [2, 5]
    assert "too large for the prediction" in said[2]


def test_the_adaptive_correction_follows_its_formula():
    found = control(adaptive=True, adaptive_ema=0.5)
    assert found.correction == 1.0 and found.alpha(1e-4, 1e-4) == 1.0
    found.observe_realised(1e-4, 0.5e-4)
    assert found.correction == pytest.approx(0.5)
    assert found.alpha(1e-4, 1e-4) == pytest.approx(math.sqrt(2))
    found.observe_realised(1e-4, 2e-4)
    assert found.correction == pytest.approx(1.0)
    found.observe_realised(1e-4, 1.0)  # counts as 4
    assert found.correction == pytest.approx(2.0)
    found.observe_realised(1e-4, -1e-9)  # a KL below 0 is rounding; it counts as a quarter
    assert found.correction == pytest.approx(math.sqrt(0.5))
    off = control()
    off.observe_realised(1e-4, 0.5e-4)
    assert off.correction == 1.0 and off.alpha(1e-4, 1e-4) == 1.0


def test_the_correction_brings_a_steady_ratio_to_the_budget():
    """A policy that moves 0.6 times as far as the square predicts, by a curvature."""
    found = control(adaptive=True)
    realised = 0.0
    for _ in range(30):
        alpha = found.alpha(1e-4, 5e-5)
        realised = 1e-4 * alpha**2 * (1 - 0.4 * alpha)
        found.observe_realised(1e-4 * alpha**2, realised)
    assert realised == pytest.approx(5e-5, rel=1e-3)


def test_state_survives_a_checkpoint():
    found = control(adaptive=True)
    found.observe_mismatch(1e-5)
    found.observe_prediction(3e-6)
    for ratio in (3.0, 4.0):
        found.observe_realised(1e-5, ratio * 1e-5)
    twin = control(adaptive=True)
    twin.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert twin.state == found.state and twin.state is not found.state
    assert twin.budget(3) == found.budget(3) and twin.alpha(1e-4, 1e-4) == found.alpha(1e-4, 1e-4)
    assert twin.expected_kl(0) == 3e-6
    assert twin.observe_realised(1e-5, 3e-5) is not None  # the third in a row


def test_before_the_first_prediction_the_budget_is_expected():
    found = control()
    assert found.expected_kl(0) == found.budget(0)
    found.observe_prediction(0.0)
    assert found.expected_kl(0) == found.budget(0)


@pytest.mark.parametrize(
    "settings",
    [{"mode": "fixed_ratio"}, {"mode": "lr"}, {"realised_kl_interval": 0}],
)
def test_the_adaptive_correction_needs_predictions_and_measurements(settings):
    with pytest.raises(UserError, match="step_control.adaptive: needs"):
        config_from_dict({"model": {"hf": "x"}, "step_control": {"adaptive": True, **settings}})
