"""A study runs every cell once, resumes, and compares only what is complete."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_logra.errors import UserError

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tools"))

import scaling_study as tool  # noqa: E402

STUDY: dict[str, Any] = {
    "base": str(REPO / "examples" / "scaling" / "base.yaml"),
    "baseline": "optimizer=adam",
    "grids": [
        {
            "optimizer": {"adam": {"optimizer.kind": "adam"}, "r=4": {"sketch.rank": 4}},
            "ranks": {"1": {}},
            "seed": {0: {"train.seed": 0}, 1: {"train.seed": 1}},
        }
    ],
}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "directory": str(tmp_path / "out"), **changes}))
    return path


def record(step: int, **values: float) -> dict[str, Any]:
    memory = ("static", "peak", "gradients", "optimizer", "sketches", "projections")
    return {
        "step": step,
        **{f"memory/{kind}_bytes": 10 + place for place, kind in enumerate(memory)},
        "time/step_s": 1.0 + step,
        "reward/mean": 0.1 * step,
        "train/tokens": 100,
        **values,
    }


def finish(cell: tool.Cell, step_s: float, tokens: int = 100) -> None:
    """As if the cell had been run."""
    cell.directory.mkdir(parents=True)
    records = [record(i, **{"time/step_s": step_s, "train/tokens": tokens}) for i in range(4)]
    text = "".join(json.dumps(r) + "\n" for r in records)
    (cell.directory / "metrics.jsonl").write_text(text)
    (cell.directory / tool.DONE).write_text("{}\n")


def test_the_example_study_is_one_and_its_runs_are_different() -> None:
    study = tool.Study(REPO / "examples" / "scaling" / "study.yaml")
    assert len(study.cells) == 40
    assert len({cell.directory for cell in study.cells}) == 40
    assert {cell.ranks for cell in study.cells} == {1, 2, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "kind=adam"}, "no grid has the axis kind"),
        ({"grids": {"seed": {}}}, "grids: expected"),
        ({"grids": [{**STUDY["grids"][0], "ranks": {"many": {}}}]}, "ranks many"),
        ({"overrides": ["train.steps=4"]}, "overrides: expected"),
        ({"basis": "base.yaml"}, "expected the keys base, baseline"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml"),
        ({"grids": [{**STUDY["grids"][0], "x": {"y": {"train.stepz": 1}}}]}, "train.stepz"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        tool.Study(write(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_pairs_are_compared_seed_by_seed_with_an_interval(tmp_path: Path) -> None:
    study = tool.Study(write(tmp_path))
    by = {(dict(c.labels)["optimizer"], dict(c.labels)["seed"]): c for c in study.cells}
    for (kind, seed), seconds in {
        ("adam", "0"): 2.0,
        ("adam", "1"): 4.0,
        ("r=4", "0"): 1.0,
        ("r=4", "1"): 3.0,
    }.items():
        finish(by[kind, seed], seconds)
    assert tool.gather(study) == 0
    (row,) = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    ratios = [1 / 2, 3 / 4]
    assert float(row["step_s"]) == pytest.approx(statistics.fmean(ratios))
    half = 12.706 * statistics.stdev(ratios) / 2**0.5
    assert float(row["step_s_±"]) == pytest.approx(half) and row["seeds"] == "2"
    assert (tmp_path / "out" / "optimizer.png").stat().st_size > 10_000


def test_an_incomplete_pair_is_not_compared_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tool.Study(write(tmp_path))
    for cell in study.cells[:-1]:
        finish(cell, 1.0)
    assert tool.gather(study) == 2
    assert not list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert "r=4 is not compared; missing: r=4 seed 1" in capsys.readouterr().err


def test_fits_find_the_exponent_and_the_slope_of_each_axis_of_numbers(tmp_path: Path) -> None:
    ranks = {f"r={r}": {"sketch.rank": r} for r in (4, 16, 64)}
    grid = {"optimizer": {"adam": {"optimizer.kind": "adam"}} | ranks, "seed": {0: {}, 1: {}}}
    study = tool.Study(write(tmp_path, grids=[grid]))
    for cell in study.cells:
        r = tool.number_of(dict(cell.labels)["optimizer"]) or 1
        finish(cell, step_s=3 * r**0.5, tokens=100)
    found = tool.fits(study, tool.table(study))
    (fit,) = [fit for fit in found if fit["measure"] == "step_s"]
    assert fit["axis"] == "optimizer" and fit["points"] == 6, "adam is no number"
    assert fit["exponent"] == pytest.approx(0.5) and fit["power_r2"] == pytest.approx(1)
    assert fit["exponent_±"] == pytest.approx(0, abs=1e-6)
    exact = statistics.linear_regression([4, 4, 16, 16, 64, 64], [6, 6, 12, 12, 24, 24])
    assert (fit["slope"], fit["intercept"]) == pytest.approx(exact) and fit["linear_r2"] < 1
    assert tool.gather(study) == 0 and (tmp_path / "out" / "fits.csv").exists()


@pytest.mark.parametrize(
    ("label", "number"), [("r=16", 16), ("7M", 7e6), ("1e-2", 0.01), ("2", 2), ("adam", None)]
)
def test_labels_are_numbers_where_they_end_in_one(label: str, number: float | None) -> None:
    assert tool.number_of(label) == number


def test_what_is_given_for_all_runs_gives_way_to_the_grid(tmp_path: Path) -> None:
    given = {"train.seed": 8, "train.responses_per_prompt": 2, "train.prompts_per_step": 3}
    path = write(tmp_path, overrides=given)
    study = tool.Study(path, ["train.steps=7", "train.seed=9", "train.prompts_per_step=5"])
    assert all("train.steps=7" in cell.overrides for cell in study.cells)
    for cell in study.cells:
        config = tool.load_config(study.base, list(cell.overrides))
        assert config.train.responses_per_prompt == 2 and config.train.prompts_per_step == 5
        assert config.train.steps == 7 and str(config.train.seed) == dict(cell.labels)["seed"]
    with pytest.raises(UserError, match="train.stepz"):
        tool.Study(write(tmp_path), ["train.stepz=7"])


def test_a_setting_that_has_no_baseline_in_the_grid_lacks_no_pair(tmp_path: Path) -> None:
    grid = {"optimizer": {"r=4": {"sketch.rank": 4}}, "ranks": {"2": {}}, "seed": {0: {}}}
    study = tool.Study(write(tmp_path, grids=[*STUDY["grids"], grid]))
    for cell in study.cells:
        finish(cell, 1.0)
    assert tool.gather(study) == 0
    (row,) = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert row["ranks"] == "1"


def test_rewards_count_up_to_the_tokens_that_all_have_trained_on() -> None:
    records = [record(i) for i in range(8)]
    assert tool.measures(records, tokens=400)["reward"] == pytest.approx(0.3)
    assert tool.measures(records, tokens=800)["reward"] == pytest.approx((0.6 + 0.7) / 2)
    found = tool.measures(records)
    assert found["step_s"] == 5.0, "the first step warms up"
    assert found["state_bytes"] == 12 + 13 + 14 + 15


@pytest.mark.slow
def test_cells_run_once_and_two_ranks_are_two(tmp_path: Path) -> None:
    grid = {
        "optimizer": {"adam": {"optimizer.kind": "adam"}, "r=4": {"sketch.rank": 4}},
        "ranks": {"2": {"train.steps": 2}},
        "seed": {0: {"train.seed": 0}},
    }
    path = write(tmp_path, grids=[grid])
    study = tool.Study(path)
    assert tool.run(study, only=1) == 0
    assert [cell.done for cell in study.cells] == [False, True]
    (row,) = [r for r in tool.table(study) if r["done"]]
    assert row["comm_bytes"] > 0 and row["state_bytes"] > 0 and row["ranks"] == "2"
    before = (study.cells[1].directory / "metrics.jsonl").stat().st_mtime_ns
    assert tool.run(study, only=1) == 0, "done: not again"
    assert (study.cells[1].directory / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--only 2"):
        tool.run(study, only=2)
