"""Training ranks that generate in a layout of their own give the run of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import letters_config, quick
from layout_runs import whole_weights
from test_ranks import VARIES, assert_same_records, assert_same_weights

from megatron_logra import dry_run
from megatron_logra.config import Config, config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.metrics import read_metrics
from megatron_logra.planner.report import plan, table
from megatron_logra.rl import evaluate, trainer

SPEC = {"num_layers": 4, "hidden_size": 32, "vocab_size": 260, "init_method_std": 0.1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2-sequence to one": (2, {"tensor": 2, "sequence": True}, {"engine": "dynamic"}),
    "pp2 to tp2": (2, {"pipeline": 2}, {"layout": {"tensor": 2}}),
    "dp2 to pp2": (2, {}, {"layout": {"pipeline": 2}, "engine": "dynamic"}),
    "cp2 to one": (2, {"context": 2}, {"engine": "dynamic"}),
    "dp2 to tp2": (2, {}, {"layout": {"tensor": 2}}),
    "tp2-pp2 to tp2-dp2": (4, {"tensor": 2, "pipeline": 2}, {"layout": {"tensor": 2}}),
    "pp2-dp2 to dp4": (4, {"pipeline": 2}, {}),
}


def config_for(run_dir: Path, **sections: dict[str, Any]) -> Config:
    return letters_config(run_dir, SPEC, **sections)


def with_copy(run_dir: Path, parallel: dict[str, Any], own: dict[str, Any], **more: Any) -> Config:
    rollout = config_for(run_dir).rollout.model_dump()
    rollout |= {"sync": "dense", "layout": {}, "dynamic": {"block_tokens": 8}} | own
    return config_for(run_dir, parallel=parallel, rollout=rollout, **more)


def _run(config: Config, resume: bool = False) -> tuple[Any, Any, int]:
    """Train; the last whole weights of the trainer and of the copy, and the copy's bytes here."""
    kept: dict[str, Any] = {}

    class Copy(trainer.RolloutCopy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept["copy"] = self

    class Learner(trainer.Learner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept["learner"] = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "RolloutCopy", Copy)
        patch.setattr(trainer, "Learner", Learner)
        trainer.run(config, resume=resume)
    copy = kept.get("copy")
    trained = whole_weights(kept["learner"])
    if copy is None:
        return trained, None, 0
    return trained, whole_weights(copy.policy), copy.bytes


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory) -> tuple[Path, Any]:
    run_dir = tmp_path_factory.mktemp("reference")
    ((weights, _, _),) = ranks.run(1, _run, config_for(run_dir))
    return run_dir, weights


@pytest.mark.parametrize("case", quick(CASES, list(CASES)[:3]))
def test_a_run_that_generates_in_another_layout_is_that_of_one_rank(
    case, ranks, reference, tmp_path
):
    size, parallel, own = CASES[case]
    config = with_copy(tmp_path, parallel, own)
    assert config.generating.parallel.timeout_s == config.parallel.timeout_s
    found = ranks.run(size, _run, config)
    for trained, copied, _ in found:
        assert_same_weights(trained, reference[1])
        assert all(torch.equal(copied[name], weight) for name, weight in trained.items())
    assert_same_records(tmp_path, reference[0], (*VARIES, "sync/"))
    largest = max(bytes_ for _, _, bytes_ in found)
    planned = plan(config, size)["rollout_copy"]
    assert planned["weights"] == largest
    for record in read_metrics(tmp_path):
        assert record["sync/bytes"] == sum(bytes_ for _, _, bytes_ in found)
        assert record["memory/rollout_copy_bytes"] == largest
        assert abs(record["policy/mismatch"]) < 1e-5


def test_a_copy_in_bf16_has_the_trainers_bits_and_follows_a_resumed_run(ranks, tmp_path):
    size, parallel, own = CASES["tp2-sequence to one"]
    config = with_copy(tmp_path, parallel, own, train={"steps": 2, "precision": "bf16"})
    whole = with_copy(tmp_path, parallel, own, train={"steps": 3, "precision": "bf16"})
    before = ranks.run(size, _run, config)
    for found, (_, old, _) in zip(ranks.run(size, _run, whole, True), before, strict=True):
        trained, copied, _ = found
        assert all(torch.equal(copied[name], weight) for name, weight in trained.items())
        assert any(not torch.equal(copied[name], weight) for name, weight in old.items())


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [("dp2 to pp2", {"non_targets": "adam"}), ("pp2 to tp2", {"kind": "adam"})],
)
def test_a_tied_embedding_reaches_the_first_stage_and_the_last(case, optimizer, ranks, tmp_path):
    size, parallel, own = CASES[case]
    config = with_copy(tmp_path, parallel, own, train={"steps": 1}, optimizer=optimizer)
    spec = {**config.model.spec, "share_embeddings_and_output_weights": True}
    model = config.model.model_copy(update={"spec": spec})
    for trained, copied, _ in ranks.run(size, _run, config.model_copy(update={"model": model})):
        assert all(torch.equal(copied[name], weight) for name, weight in trained.items())


def test_an_evaluation_takes_the_layout_that_generates(ranks, tmp_path):
    """On one rank, though training took two."""
    config = with_copy(tmp_path, {"tensor": 2}, {})
    ranks.run(2, _run, config)
    trained = read_metrics(tmp_path)[-1]
    (found,) = ranks.run(1, evaluate.run, config)
    assert found["pass@1"] == trained["eval/pass@1"]
    assert found["checkpoint"].endswith("iter_0000003")


def test_a_dry_run_builds_the_copy_as_planned(ranks, tmp_path):
    config = with_copy(tmp_path, {"tensor": 2, "pipeline": 2}, {"layout": {"tensor": 2}})
    (planned,) = ranks.run(1, dry_run.run, config, 4)
    assert planned["rollout_copy"]["weights"] > planned["largest"]["logra"]["weights"]
    assert "copy that generates" in table(planned, config, ["logra"])
    config = with_copy(tmp_path, {"tensor": 2}, {"layout": {"tensor": 3}})
    with pytest.raises(RuntimeError, match=r"rollout.layout.tensor=3: need a multiple of 3 ranks"):
        ranks.run(1, dry_run.run, config, 4)


@pytest.mark.parametrize("call", [evaluate.run, plan])
def test_who_only_generates_names_the_layouts_own_keys(call, ranks, tmp_path):
    config = with_copy(tmp_path, {}, {"layout": {"tensor": 2, "pipeline": 2}})
    words = r"UserError: rollout.layout.tensor=2, rollout.layout.pipeline=2: need a multiple of 4"
    with pytest.raises(RuntimeError, match=words):
        ranks.run(2, call, config)


@pytest.mark.parametrize(
    ("own", "spec", "words"),
    [
        ({"layout": {"tensor": 3}}, {}, r"rollout.layout.tensor=3: need a multiple of 3 ranks"),
        ({"layout": {"pipeline": 2}}, {"num_layers": 3}, r"rollout.layout.pipeline: 2 does not"),
        ({}, {"vocab_size": 261}, r"rollout.layout.tensor=1: a vocabulary of 261 is padded"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_clear_line(own, spec, words, ranks, tmp_path):
    config = with_copy(tmp_path, {"tensor": 2}, own)
    if spec:
        model = config.model.model_copy(update={"spec": config.model.spec | spec})
        config = config.model_copy(update={"model": model})
    with pytest.raises(RuntimeError, match=words):
        ranks.run(2, trainer.run, config)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"layout": {}}}, "rollout.sync=dense, got colocated and shared"),
        ({"rollout": {"sync": "dense"}}, "or dense with a rollout.layout"),
        (
            {"rollout": {"layout": {}, "sync": "dense", "placement": "separate"}},
            "got separate and dense; workers have rollout.workers.tensor",
        ),
        (
            {
                "rollout": {"layout": {}, "sync": "dense"},
                "parallel": {"pipeline": 2, "virtual_pipeline": 2},
            },
            "parallel.virtual_pipeline=2 cannot be resharded",
        ),
        (
            {"rollout": {"layout": {}, "sync": "dense"}, "algorithm": {"name": "sft"}},
            "rollout.layout: is of no use to algorithm sft",
        ),
        ({"rollout": {"layout": {"tensor": 0}, "sync": "dense"}}, "rollout.layout.tensor"),
    ],
)
def test_a_layout_where_none_belongs_is_refused(sections, words, tmp_path):
    with pytest.raises(UserError, match=words):
        config_from_dict({**config_for(tmp_path).model_dump(), **sections})
