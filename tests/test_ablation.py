"""The ablation of step control, on a tiny model in place of the downloaded one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from test_quickstart import CHANGES, tiny_directory  # noqa: F401

from megatron_logra import cli
from megatron_logra.config import load_config
from megatron_logra.metrics import read_metrics

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "ablation_step_control" / "run.py"


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_command_trains_every_arm_once_and_draws(
    ablation: ModuleType,
    tiny_directory: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "ablation"
    changes = [c for c in CHANGES if not c.startswith("train.steps")]
    # Wrong integers score more than none at all, so that a random model has something to learn.
    changes += ["environment.scorer=last_integer", "algorithm.failure_reward=-1.0"]
    command = ["--seeds", "5", "--directory", str(directory), "--model", str(tiny_directory)]
    calls: list[list[str]] = []

    def train(arguments: list[str]) -> int:
        calls.append(arguments)
        return cli.main(arguments)

    assert ablation.main([*command, "--steps", "2", *changes], train) == 0
    assert len(calls) == len(ablation.ARMS)
    ratios = {}
    for arm in ablation.ARMS:
        records = read_metrics(directory / f"{arm}-seed5")
        assert [record["step"] for record in records] == [0, 1]
        ratios[arm] = [r["train/update_ratio"] for r in records if not r["train/skipped"]]
    assert ratios["fixed"] == pytest.approx([6e-5] * 2)
    assert ratios["fixed-10x"] == pytest.approx([6e-4] * 2)
    summary = json.loads((directory / "summary.json").read_text())
    assert set(summary) == set(ablation.ARMS)
    for values in summary.values():
        assert all(len(of_seeds) == 1 for of_seeds in values.values())
        assert 0 <= values["accuracy_after"][0] <= 1
    assert (directory / "ablation.png").read_bytes().startswith(b"\x89PNG")
    # Called again it trains nothing; with more steps it goes on.
    assert ablation.main([*command, "--steps", "2", *changes], train) == 0
    assert len(calls) == 3 and "finished before" in capsys.readouterr().out


def test_a_run_that_fails_ends_the_ablation_with_its_exit_code(
    ablation: ModuleType, tmp_path: Path
) -> None:
    assert ablation.main(["--directory", str(tmp_path), "--model", "x"], lambda _: 75) == 75
    assert list(tmp_path.iterdir()) == []


def test_every_arm_is_a_valid_configuration(ablation: ModuleType) -> None:
    modes = {
        arm: load_config(ablation.CONFIG, ["model.hf=x", *ablation.arm_settings(arm, 6e-5)])
        for arm in ablation.ARMS
    }
    assert [config.step_control.mode for config in modes.values()] == [
        "kl_budget",
        "fixed_ratio",
        "fixed_ratio",
    ]
