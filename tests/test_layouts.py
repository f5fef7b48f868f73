"""Every parallel layout gives the same run, and a checkpoint of one continues under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import Trajectory, train
from reference import make_checkpoint

UPDATES = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "dp2": (2, {}),
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2-tp2": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
}
FP32 = {"step_control": {"factor_dtype": "fp32", "realised_kl_interval": 1}}
VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": FP32,
    "non-targets": {**FP32, "optimizer": {"non_targets": "adam"}},
    "lr": {
        "step_control": {"mode": "lr", "factor_dtype": "fp32", "lr": {"lr": 0.1, "clip_grad": 0.1}}
    },
    "adam": {"optimizer": {"kind": "adam", "adam": {"lr": 1e-3}}},  # a control of the harness
    "recomputed": {**FP32, "train": {"recompute": "full"}},
    "selective": {**FP32, "train": {"recompute": "selective"}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", True, layers=4)  # a vocabulary of 131: padded under TP
    return path


@pytest.fixture(scope="module")
def references(ranks, directory) -> dict[str, Trajectory]:
    """Each variant on one rank."""
    return {
        name: ranks.run(1, train, directory, sections, UPDATES)[0]
        for name, sections in VARIANTS.items()
    }


def assert_same(run: Trajectory, reference: Trajectory, tolerance: float = 1e-5) -> None:
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        error = (run.weights[name] - weight).norm() / weight.norm()
        assert error < tolerance, name
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        assert mine["applied"] == theirs["applied"]
        for key in ("kl_predicted", "alpha", "sketch_norm", "update_ratio", "grad_norm"):
            if theirs[key] is not None:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
        if theirs["kl_realised"] is not None:
            assert mine["kl_realised"] == pytest.approx(theirs["kl_realised"], rel=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_trajectory(layout, variant, ranks, directory, references):
    size, parallel = LAYOUTS[layout]
    sections = {**VARIANTS[variant], "parallel": parallel}
    for run in ranks.run(size, train, directory, sections, UPDATES):
        assert_same(run, references[variant])


def test_updates_are_large_enough_for_the_comparison(directory, references, ranks):
    """The weights move by more than the tolerance in each update, so a lost one would be seen."""
    short = ranks.run(1, train, directory, VARIANTS["frozen"], UPDATES - 1)[0]
    with pytest.raises(AssertionError):
        assert_same(Trajectory(references["frozen"].steps, short.weights, {}), references["frozen"])


@pytest.mark.parametrize("master", ["sharded", "replicated"])
@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
def test_bf16_masters_follow_one_rank(layout, master, ranks, directory):
    """bf16 activations round differently from layout to layout; the weights stay within 1e-3."""
    size, parallel = LAYOUTS[layout]
    sections = {"train": {"precision": "bf16"}, "optimizer": {"master": master}}
    reference = ranks.run(1, train, directory, sections, UPDATES)[0]
    runs = ranks.run(size, train, directory, {**sections, "parallel": parallel}, UPDATES)
    for run in runs:
        for name, weight in reference.weights.items():
            assert (run.weights[name] - weight).norm() < 1e-3 * weight.norm(), name
    for name, weight in runs[0].weights.items():
        assert all(torch.equal(run.weights[name], weight) for run in runs), name


def test_fp32_masters_are_divided_over_data_parallel_ranks(ranks, directory):
    sections = {"train": {"precision": "bf16"}}
    (one,) = ranks.run(1, train, directory, sections, 1)
    for run in ranks.run(2, train, directory, sections, 1):
        assert run.bytes_by_kind["master"] * 2 == one.bytes_by_kind["master"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_ranks_nan_skips_the_step_on_all(layout, ranks, directory, references):
    size, parallel = LAYOUTS[layout]
    sections = {**FP32, "parallel": parallel}
    runs = ranks.run(size, _train_poisoned, directory, sections)
    for run in runs:
        assert [step["applied"] for step in run.steps] == [True, False, True]
        assert run.steps[1]["reason"] == "a sketch is not finite"
    for name, weight in runs[0].weights.items():
        assert all(torch.equal(run.weights[name], weight) for run in runs), name
        assert weight.isfinite().all()


def _train_poisoned(directory: Path, sections: dict[str, Any]) -> Trajectory:
    return train(directory, sections, 3, poison=1)


SAVED = ["one", "tp2-sequence", "dp2"]
RESUMED = {"frozen": FP32, "bf16": {"train": {"precision": "bf16"}}}


@pytest.mark.parametrize("variant", ["frozen", "non-targets"])
@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_continues_under_any_layout(
    saved, variant, ranks, directory, references, tmp_path
):
    layouts = {"one": (1, {}), **LAYOUTS}
    size, parallel = layouts[saved]
    ranks.run(
        size, _train_and_save, directory, {**VARIANTS[variant], "parallel": parallel}, tmp_path
    )
    for size, parallel in layouts.values():
        sections = {**VARIANTS[variant], "parallel": parallel}
        for run in ranks.run(size, _load_and_train, directory, sections, tmp_path):
            expected = Trajectory(references[variant].steps[2:], references[variant].weights, {})
            assert_same(run, expected)


def _train_and_save(directory: Path, sections: dict[str, Any], root: Path) -> None:
    train(directory, sections, 2, save=root)


def _load_and_train(directory: Path, sections: dict[str, Any], root: Path) -> Trajectory:
    return train(directory, sections, UPDATES - 2, first=2, load=root / "iter_0000002")
