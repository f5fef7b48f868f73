"""Receivers hold the trainer's weights after every update, whatever their layout and the faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import make_checkpoint
from sync_runs import receive, send

UPDATES = 5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
}
STEP = {"step_control": {"update_ratio": 0.01, "kl_budget": 0.1, "kl_budget_final": 0.1}}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {**STEP},
    "bf16": {**STEP, "train": {"precision": "bf16"}},
    "non-targets": {**STEP, "optimizer": {"non_targets": "adam", "adam": {"lr": 1e-3}}},
    "decay": {"step_control": {"mode": "lr", "lr": {"lr": 0.1, "weight_decay": 0.5}}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", True, vocabulary=132, layers=2)
    return path


def assert_follows(received: Any, sent: Any, *, bits: bool, sections: dict[str, Any]) -> None:
    bf16 = sections.get("train", {}).get("precision") == "bf16"
    assert len(received) == len(sent)
    for mine, theirs in zip(received, sent, strict=True):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            if bits:
                assert torch.equal(mine[name], weight), name
            else:
                room = weight.abs() * (2**-7 if bf16 else 2**-20) + 1e-7
                assert bool(((mine[name] - weight).abs() <= room).all()), name
    first, last = sent[0], sent[-1]
    moved = [n for n in first if not torch.equal(first[n], last[n])]
    assert any("linear_fc1" in name for name in moved), "training moved nothing"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("trainer", "worker"), [("tp2", "tp2"), ("tp2", "one"), ("one", "pp2"), ("tp2-dp2", "pp2")]
)
def test_receivers_of_any_layout_follow(trainer, worker, variant, ranks, directory, tmp_path):
    sections = VARIANTS[variant]
    size, parallel = LAYOUTS[trainer]
    sent, _ = ranks.run(
        size, send, directory, {**sections, "parallel": parallel}, tmp_path, UPDATES
    )[0]
    size, parallel = LAYOUTS[worker]
    for received, drifts, healed in ranks.run(
        size, receive, directory, {**sections, "parallel": parallel}, tmp_path, UPDATES
    ):
        assert_follows(received, sent, bits=trainer == worker, sections=sections)
        assert healed == []
        assert all(drift.ulps <= 1 for drift in drifts[1:])
        assert trainer != worker or all(drift.largest == 0 for drift in drifts[1:])
