"""The training loop: resumed runs, skipped steps, stops, evaluation, and constant memory."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import quick, tiny_config
from megatron.core.dist_checkpointing import load_plain_tensors

from megatron_logra import checkpoint
from megatron_logra.config import Config, dump_yaml
from megatron_logra.errors import UserError
from megatron_logra.metrics import METRIC_KEYS, MetricsWriter, read_metrics
from megatron_logra.rl import evaluate, trainer
from megatron_logra.rl.environments import build_environment
from megatron_logra.rl.policy import build_policy
from megatron_logra.rl.rollouts import RolloutMaker, evenly_spaced

SPEC = {"num_layers": 2, "hidden_size": 32, "vocab_size": 260, "init_method_std": 0.1}
# A random model stops by itself now and then.
SAMPLING = {"max_tokens": 5, "stop": [chr(i) for i in range(ord("A"), ord("Z"))]}
# Times differ between runs, and so does the memory that other tests have used in this process.
VARIES = ("time/", "rollout/tokens_per_s", "memory/peak_bytes", "host/", "gpu/")


_GPU = [metric.key for metric in METRIC_KEYS if metric.key.startswith("gpu/")]


def config_for(run_dir: Path, **sections: dict[str, Any]) -> Config:
    """A run of six tiny steps; sections override single keys."""
    base: dict[str, dict[str, Any]] = {
        "sketch": {"rank": 8},
        "algorithm": {"name": "grpo"},
        "rollout": {"batch_size": 5, "sampling": SAMPLING},
        "train": {
            "steps": 6,
            "prompts_per_step": 3,
            "responses_per_prompt": 4,
            "micro_batch_size": 4,
        },
        "step_control": {"probe_responses": 3, "realised_kl_interval": 2, "kl_budget": 1e-2},
        "eval": {"problems": 6, "interval": 4},
        "checkpoint": {"interval": 3},
        "logging": {"run_dir": str(run_dir), "tensorboard": False},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    reward = base.pop("environment", {}).get("reward", "early")
    config = tiny_config({**SPEC, **base.pop("spec", {})}, **base)
    environment = {
        "kind": "python",
        "function": "trainer_environments:Letters",
        "params": {"reward": reward},
    }
    return Config.model_validate({**config.model_dump(), "environment": environment})


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """Where two runs' records differ."""
    assert [record["step"] for record in first] == [record["step"] for record in second]
    return [
        f"step {a['step']} {key}: {a.get(key)} and {b.get(key)}"
        for a, b in zip(first, second, strict=True)
        for key in {**a, **b}
        if a.get(key) != b.get(key)
    ]


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """The records without what varies from run to run."""
    return [
        {key: value for key, value in record.items() if not key.startswith(VARIES)}
        for record in read_metrics(run_dir)
    ]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, by name."""
    found = load_plain_tensors(str(run_dir / "checkpoints" / f"iter_{step:07d}"))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys() and first
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not different


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "grpo bf16": {"train": {"precision": "bf16"}},
    "reinforce, non-targets by Adam": {
        "algorithm": {"name": "reinforce"},
        "optimizer": {"non_targets": "adam", "adam": {"lr": 1e-3, "decay": "cosine"}},
    },
    "learning rate": {
        "step_control": {"mode": "lr", "lr": {"lr": 1e-2, "warmup_steps": 2, "decay": "linear"}},
        "optimizer": {"rule": "plain"},
    },
    "dense Adam bf16": {
        "optimizer": {"kind": "adam", "adam": {"lr": 1e-3, "warmup_steps": 2}},
        "train": {"precision": "bf16"},
    },
    "sft": {"algorithm": {"name": "sft"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_at_any_checkpoint_is_the_uninterrupted_run_to_the_last_bit(
    tmp_path: Path, kind: str
) -> None:
    sections = {name: dict(values) for name, values in KINDS[kind].items()}
    sections["train"] = {
        "steps": 6,
        "prompts_per_step": 3,
        "responses_per_prompt": 4,
        "micro_batch_size": 4,
        **sections.get("train", {}),
    }
    whole, again = tmp_path / "whole", tmp_path / "again"
    summary = trainer.run(config_for(whole, **sections))
    assert summary["updates"] > 3, "too few updates to tell anything"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "iter_0000006")
    (again / "checkpoints" / "latest").write_text("iter_0000003\n")
    trainer.run(config_for(again, **sections), resume=True)
    records = measured(whole)
    assert [record["step"] for record in records] == list(range(6))
    assert not differences(measured(again), records)
    assert_same_tensors(tensors(whole, 6), tensors(again, 6))


def test_a_record_lost_between_save_and_write_is_restored(tmp_path: Path) -> None:
    trainer.run(config_for(tmp_path / "run"))
    expected = measured(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "iter_0000006")
    (checkpoints / "latest").write_text("iter_0000003\n")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])  # killed in the middle of a line
    trainer.run(config_for(tmp_path / "run"), resume=True)
    assert not differences(measured(tmp_path / "run"), expected)


def test_every_documented_key_is_in_every_record(tmp_path: Path) -> None:
    trainer.run(config_for(tmp_path))
    records = read_metrics(tmp_path)
    for record in records:
        assert {metric.key for metric in METRIC_KEYS} <= record.keys()
    updates = [record for record in records if not record["train/skipped"]]
    null = {key for key, value in updates[0].items() if value is None}
    # One rank reduces nothing; no checkpoint, baseline or learning rate in this step.
    assert null <= {
        *("time/reduce_s", "time/checkpoint_s", "time/eval_s", "reward/baseline", "train/lr"),
        *("policy/kl_realised", "policy/kl_correction", "train/grad_norm"),
        *([] if torch.cuda.is_available() else _GPU),
    }
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config_for(
        tmp_path
    ).model_dump(mode="json")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_and_trainer_agree_on_logprobs(tmp_path: Path, temperature: float) -> None:
    sampling = {**SAMPLING, "temperature": temperature}
    trainer.run(config_for(tmp_path, rollout={"batch_size": 5, "sampling": sampling}))
    for record in read_metrics(tmp_path):
        if not record["train/skipped"]:
            assert abs(record["policy/mismatch"]) < 2e-6
            assert record["policy/importance_truncated"] == record["policy/clipped"] == 0


def test_the_split_into_micro_batches_changes_nothing_but_rounding(tmp_path: Path) -> None:
    found = []
    for size in (1, 3, 12):
        train = {"steps": 2, "prompts_per_step": 3, "responses_per_prompt": 4}
        run_dir = tmp_path / str(size)
        trainer.run(config_for(run_dir, train={**train, "micro_batch_size": size}))
        found.append(read_metrics(run_dir))
    for records in found[1:]:
        for record, first in zip(records, found[0], strict=True):
            for key in ("train/loss", "train/sketch_norm", "policy/kl_predicted", "policy/entropy"):
                assert record[key] == pytest.approx(first[key], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", quick(("logra", "adam"), ("logra",)))
def test_training_raises_the_reward(tmp_path: Path, kind: str) -> None:
    trainer.run(
        config_for(
            tmp_path,
            spec={"init_method_std": 0.3},
            optimizer={"kind": kind, "adam": {"lr": 1e-2}},
            step_control={
                "update_ratio": 0.05,
                "kl_budget": 0.1,
                "kl_budget_final": 0.1,
                "schedule": "constant",
                "realised_kl_interval": 0,
            },
            train={
                "steps": 9,
                "prompts_per_step": 8,
                "responses_per_prompt": 8,
                "micro_batch_size": 64,
            },
            eval={"at_start": False, "at_end": False},
        )
    )
    rewards = [record["reward/mean"] for record in read_metrics(tmp_path)]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3


def test_a_batch_without_signal_changes_nothing_but_the_data_position(tmp_path: Path) -> None:
    config = config_for(
        tmp_path,
        environment={"reward": "equal"},
        train={
            "steps": 3,
            "prompts_per_step": 3,
            "responses_per_prompt": 2,
            "max_skipped_in_a_row": 1,  # and it is no failure
        },
        checkpoint={"interval": 1, "keep": 3},
    )
    summary = trainer.run(config)
    assert (summary["updates"], summary["skipped"], summary["steps"]) == (0, 3, 3)
    assert all(record["train/skipped"] == 1 for record in read_metrics(tmp_path))
    assert_same_tensors(tensors(tmp_path, 1), tensors(tmp_path, 3))
    initial = build_policy(config).chunks[0]
    path = tmp_path / "checkpoints" / "iter_0000003"
    loaded = checkpoint.load(path, checkpoint.weights_state(build_policy(config).chunks))
    for name, value in initial.named_parameters():
        assert torch.equal(loaded["model0"][name], value)
    assert loaded["trainer"]["data_position"] == 9 and loaded["learner"]["update"] == 0


def test_a_sequence_that_is_not_finite_is_named_and_skipped_until_too_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_for(
        tmp_path,
        algorithm={"name": "sft"},
        train={
            "steps": 60,
            "prompts_per_step": 8,
            "responses_per_prompt": 1,
            "max_skipped_in_a_row": 2,
        },
        eval={"at_start": False, "at_end": False},
    )
    environment = build_environment(config.environment, config.train.seed)
    batches = [[environment.train_problem(8 * step + i) for i in range(8)] for step in range(60)]
    bad = [{p.id for p in problems if "z" in p.question} for problems in batches]
    run = trainer.Trainer(config, environment, None)
    with torch.no_grad():  # only sequences with this letter are affected
        run.policy.chunks[0].embedding.word_embeddings.weight[ord("z")] = math.nan
    first = next(step for step in range(1, 60) if bad[step - 1] and bad[step])
    with pytest.raises(RuntimeError, match=r"2 steps in a row failed.*not finite"):
        run.run()
    environment.close()
    records = read_metrics(tmp_path)
    assert [bool(record["train/skipped"]) for record in records] == [
        bool(named) for named in bad[: first + 1]
    ]
    assert not all(bad[: first + 1]), "no step succeeded"
    said = capfd.readouterr().err.splitlines()
    for step, named in enumerate(bad[: first + 1]):
        lines = [line for line in said if f"step {step} skipped" in line]
        assert len(lines) == bool(named)
        assert all(name in line for line in lines for name in named)


@pytest.mark.slow
def test_live_tensors_are_constant_over_fifty_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int]] = []
    write = MetricsWriter.write

    def counting(self: MetricsWriter, step: int, metrics: Any) -> Any:
        gc.collect()
        live = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        counts.append((len(live), sum(t.numel() * t.element_size() for t in live)))
        return write(self, step, metrics)

    monkeypatch.setattr(MetricsWriter, "write", counting)
    train = {"prompts_per_step": 2, "responses_per_prompt": 3, "micro_batch_size": 3}
    trainer.run(
        config_for(
            tmp_path,
            spec={"num_layers": 1},
            train={**train, "steps": 54},
            rollout={"batch_size": 6, "sampling": {"max_tokens": 3}},
            eval={"at_start": False, "at_end": False},
            checkpoint={"interval": 0, "save_at_end": False},
        )
    )
    steady = counts[4:]
    assert len(steady) == 50
    assert len(set(steady)) == 1, sorted(set(steady))


def test_a_stop_request_saves_and_the_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    train = {"steps": 12, "prompts_per_step": 3, "responses_per_prompt": 4}
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    config = config_for(stopped, train=train, checkpoint={"interval": 0})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "megatron_logra", "train", str(tmp_path / "config.yaml")]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums are split as here
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = stopped / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    done = len(read_metrics(stopped))
    assert 2 <= done < 12
    assert checkpoint.latest(stopped / "checkpoints") is not None
    trainer.run(config, resume=True)
    trainer.run(config_for(whole, train=train, checkpoint={"interval": 0}))
    assert not differences(measured(stopped), measured(whole))
    assert_same_tensors(tensors(stopped, 12), tensors(whole, 12))


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    config = config_for(tmp_path, train={"steps": 1, "prompts_per_step": 2})
    trainer.run(config, resume=True)  # nothing there yet: from the start
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"logging\.run_dir.*--resume"):
        trainer.run(config)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_another_model_or_optimizer_cannot_go_on_with_a_checkpoint(tmp_path: Path) -> None:
    train = {"steps": 1, "prompts_per_step": 2}
    trainer.run(config_for(tmp_path, train=train))
    kept = sorted((tmp_path / "checkpoints").rglob("*"))
    other = config_for(tmp_path, train=train).model_dump()
    other["model"]["spec"]["hidden_size"] = 16
    with pytest.raises(UserError, match="hidden_size 32, here 16"):
        trainer.run(Config.model_validate(other), resume=True)
    with pytest.raises(UserError, match="kind logra, here adam"):
        trainer.run(config_for(tmp_path, train=train, optimizer={"kind": "adam"}), resume=True)
    assert sorted((tmp_path / "checkpoints").rglob("*")) == kept


def test_weights_of_a_checkpoint_start_a_new_run(tmp_path: Path) -> None:
    trainer.run(config_for(tmp_path / "first"))
    source = tmp_path / "first" / "checkpoints" / "iter_0000006"
    config = config_for(
        tmp_path / "second",
        environment={"reward": "equal"},  # no update: the weights stay what they were
        checkpoint={"load": str(source)},
        train={"steps": 1, "prompts_per_step": 2, "responses_per_prompt": 2},
    )
    trainer.run(config)
    first, second = tensors(tmp_path / "first", 6), tensors(tmp_path / "second", 1)
    weights = [name for name in second if "optimizer" not in name]
    assert weights and all(torch.equal(first[name], second[name]) for name in weights)


def test_kept_samples_are_bounded_and_belong_to_their_step(tmp_path: Path) -> None:
    trainer.run(
        config_for(
            tmp_path,
            logging={"run_dir": str(tmp_path), "tensorboard": False, "rollouts_kept": 2},
        )
    )
    files = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert files == ["step_0000004.jsonl", "step_0000005.jsonl"]
    lines = (tmp_path / "rollouts" / files[1]).read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 4 and {sample["step"] for sample in samples} == {5}
    for sample in samples:
        share = sum(c < "@" for c in sample["response"]) / max(len(sample["response"]), 1)
        assert sample["reward"] == share


def test_evenly_spaced_places() -> None:
    assert evenly_spaced(64, 8) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert evenly_spaced(3, 8) == [0, 1, 2] and evenly_spaced(5, 0) == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 1, "seq_length": 8}}, "train.seq_length: the prompt of problem"),
        (
            {"rollout": {"sampling": {"max_tokens": 4, "stop": ["ab"]}}},
            "rollout.sampling.stop: expected texts of one token",
        ),
        ({"checkpoint": {"load": "nowhere"}}, "nowhere: no such checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    config = config_for(tmp_path, **sections)
    with pytest.raises(UserError, match=message) as error:
        trainer.run(config)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "metrics.jsonl").exists() or not read_metrics(tmp_path)


def wilson_by_search(right: int, n: int) -> tuple[float, float]:
    """Where |right/n - p| = z sqrt(p (1 - p) / n), by bisection."""
    share = right / n

    def excess(p: float) -> float:
        return abs(share - p) - 1.959963984540054 * math.sqrt(p * (1 - p) / n)

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if excess(middle) <= 0 else (inside, middle)
        return inside

    return (root(share, 0.0) if right else 0.0), (root(share, 1.0) if right < n else 1.0)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (47, 128), (1, 1)])
def test_the_interval_is_wilsons_with_one_response_a_problem(right: int, n: int) -> None:
    found = evaluate.interval([1.0] * right + [0.0] * (n - right))
    assert found == pytest.approx(wilson_by_search(right, n), abs=1e-9)


def test_the_interval_counts_alike_responses_once() -> None:
    alike = evaluate.interval([1.0] * 20 + [0.0] * 20)
    assert alike == pytest.approx(wilson_by_search(20, 40), abs=1e-9)
    mixed = evaluate.interval([0.25, 0.75] * 20)
    assert mixed[1] - mixed[0] < 0.6 * (alike[1] - alike[0])


def test_evaluation_does_not_depend_on_the_batch_and_repeats(tmp_path: Path) -> None:
    results = []
    for batch_size in (1, 7, 7):
        config = config_for(tmp_path, rollout={"batch_size": batch_size})
        results.append(evaluate.run(config))
    assert results[0] == results[1] == results[2]
    written = json.loads((tmp_path / "eval.json").read_text())
    assert written == results[2]
    assert {"pass@1", "n", "interval", "checkpoint", "environment", "greedy"} <= written.keys()


def test_evaluation_reads_the_checkpoint_that_is_asked_for(tmp_path: Path) -> None:
    config = config_for(tmp_path, checkpoint={"interval": 3})
    summary = trainer.run(config)
    latest = evaluate.run(config)
    assert latest["checkpoint"] == str(tmp_path / "checkpoints" / "iter_0000006")
    assert latest["reward_mean"] == summary["after"]["sampled"]["reward_mean"]
    older = tmp_path / "checkpoints" / "iter_0000003"
    assert evaluate.run(config, older)["checkpoint"] == str(older)
    with pytest.raises(UserError, match="no such checkpoint"):
        evaluate.run(config, tmp_path / "checkpoints" / "iter_0000009")


def test_generate_prints_what_the_engine_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path)
    texts = evaluate.generate(config, ["ab?", "xy?"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts) and len(texts) == 2
    policy = build_policy(config)
    environment = build_environment(config.environment, 0)
    try:
        maker = RolloutMaker(policy, environment)
        prompts = [policy.tokenizer.encode_chat([{"role": "user", "content": "ab?"}])]
        (response,) = maker.engine.generate(
            prompts,
            1,
            config.rollout.sampling,
            seed=config.train.seed,
            update=0,
            stream="generate",
            stop_token_ids=policy.stop_tokens(config.rollout.sampling),
        )[0]
    finally:
        environment.close()
    assert policy.tokenizer.decode(response.token_ids) == texts[0]


@pytest.mark.parametrize("kind", ["logra", "adam"])
def test_a_run_saved_before_its_first_update_resumes(tmp_path: Path, kind: str) -> None:
    sections: dict[str, dict[str, Any]] = {
        "optimizer": {
            "kind": kind,
            "non_targets": "adam",
            "adam": {"lr": 1e-3, "weight_decay": 0.1},
        },
        "train": {"prompts_per_step": 2, "responses_per_prompt": 3, "steps": 2},
    }
    whole, again = tmp_path / "whole", tmp_path / "again"
    summary = trainer.run(config_for(whole, **sections))
    assert summary["updates"] == 2
    config = config_for(again, **sections)
    environment = build_environment(config.environment, config.train.seed)
    trainer.Trainer(config, environment, None)._save({})  # as a stop in the first step would
    environment.close()
    trainer.run(config, resume=True)
    assert_same_tensors(tensors(again, 2), tensors(whole, 2))
