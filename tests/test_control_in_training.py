"""What a run gives its step control, and what it takes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer import config_for, measured

from megatron_logra.optimizer.learner import Learner, StepResult
from megatron_logra.optimizer.predicted_kl import ProbeBatch
from megatron_logra.optimizer.step_control import StepControl
from megatron_logra.rl import trainer


def test_each_updates_budget_is_the_scheduled_one_less_the_runs_own_mismatch(
    tmp_path: Path,
) -> None:
    config = config_for(
        tmp_path / "run",
        train={"steps": 5, "precision": "bf16"},
        step_control={"kl_budget": 1e-3, "budget_floor": 0.01, "realised_kl_interval": 0},
    )
    trainer.run(config)
    control, smaller = StepControl(config.step_control), 0
    for update, record in enumerate(measured(tmp_path / "run")):
        control.observe_mismatch(record["policy/mismatch"])
        budget = record["policy/kl_budget"]
        assert budget == pytest.approx(control.budget(update), rel=1e-9)
        smaller += budget < control.scheduled_budget(update)
    assert smaller, "bf16's logprobs differ between rollout and training: nothing was subtracted"


def test_predictions_that_are_far_off_are_told_on_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    far = {"kl_budget": 50.0, "alpha_max": 1e4, "realised_kl_interval": 1}
    trainer.run(config_for(tmp_path / "run", train={"steps": 3}, step_control=far))
    screen = "".join(capfd.readouterr())
    assert "KL predicted by forward_ad" in screen
    assert "the realised KL has been outside 0.5 to 2 times the predicted one 3 times" in screen


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Learner, ProbeBatch, StepResult]]:
    """What each step of a run was given, and what came of it."""
    seen: list[tuple[Learner, ProbeBatch, StepResult]] = []
    step = Learner.step

    def watched(self: Learner, probe: ProbeBatch, *rest: Any) -> StepResult:
        result = step(self, probe, *rest)
        seen.append((self, probe, result))
        return result

    monkeypatch.setattr(Learner, "step", watched)
    return seen


def test_the_probe_has_the_configured_responses_and_tokens_of_each(tmp_path: Path, steps) -> None:
    control = {"probe_responses": 2, "probe_max_tokens": 3}
    trainer.run(config_for(tmp_path / "run", train={"steps": 2}, step_control=control))
    for _, probe, _ in steps:
        tokens = probe.mask.sum(1)
        assert len(tokens) == 2 and int(tokens.max()) == 3, tokens


def test_an_applied_steps_prediction_is_what_the_next_is_expected_to_be(
    tmp_path: Path, steps
) -> None:
    trainer.run(config_for(tmp_path / "run", train={"steps": 1}))
    ((learner, _, result),) = steps
    assert result.applied and learner.control.expected_kl(1) == result.kl_predicted


def test_supervised_training_has_no_sampling_temperature(tmp_path: Path) -> None:
    runs = []
    for temperature in (0.6, 1.3):
        config = config_for(
            tmp_path / str(temperature),
            algorithm={"name": "sft"},
            rollout={"sampling": {"temperature": temperature, "max_tokens": 5}},
            train={"steps": 2},
            eval={"interval": 0},
        )
        trainer.run(config)
        runs.append(
            [record["policy/kl_predicted"] for record in measured(tmp_path / str(temperature))]
        )
    assert runs[0] == runs[1] and None not in runs[0]
