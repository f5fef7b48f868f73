"""Separate rollout workers give the colocated run, keep a bounded lag, and survive their deaths."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import letters_config, quick

from megatron_logra import cli, roles
from megatron_logra.config import Config, config_from_dict, dump_yaml
from megatron_logra.errors import UserError
from megatron_logra.metrics import read_metrics

TESTS = Path(__file__).parent
SPEC = {"num_layers": 2, "hidden_size": 32, "vocab_size": 260, "init_method_std": 0.1}
SEPARATE = {"placement": "separate", "sync": "sketch"}
FREE = ("time/", "rollout/tokens_per_s", "memory/", "comm/", "sync/", "host/", "gpu/")


def config_for(run_dir: Path, function: str = "Letters", **sections: dict[str, Any]) -> Config:
    own: dict[str, dict[str, Any]] = {
        "train": {"steps": 4},
        "step_control": {"realised_kl_interval": 0},
        "eval": {"interval": 2},
        "checkpoint": {"interval": 2, "keep": 2},
    }
    for name, values in sections.items():
        own[name] = own.get(name, {}) | values
    return letters_config(run_dir, SPEC, function, **own)


def start(config: Config, *arguments: str) -> subprocess.Popen[str]:
    run_dir = Path(config.logging.run_dir)
    file = run_dir.parent / f"{run_dir.name}.yaml"
    file.write_text(dump_yaml(config))
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_logra", "train", str(file), *arguments],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
        | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    try:
        _, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def assert_same_records(run_dir: Path, reference: Path) -> None:
    records, expected = read_metrics(run_dir), read_metrics(reference)
    assert len(records) == len(expected) == 4
    for record, other in zip(records, expected, strict=True):
        for key, value in other.items():
            if not key.startswith(FREE):
                wanted = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
                assert record[key] == wanted, (record["step"], key)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("colocated") / "run"
    finish(start(config_for(run_dir)))
    return run_dir


@pytest.mark.parametrize(
    ("workers", "sync", "transport"),
    [
        ({"count": 2}, "sketch", "gloo"),
        pytest.param({"count": 2}, "sketch", "files", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, "sketch", "gloo", marks=pytest.mark.slow),
        pytest.param({}, "dense", "files", marks=pytest.mark.slow),
        pytest.param({}, "dense", "gloo", marks=pytest.mark.slow),
    ],
)
def test_the_on_policy_run_is_the_colocated_one(workers, sync, transport, colocated, tmp_path):
    run_dir = tmp_path / "run"
    rollout = {**SEPARATE, "sync": sync, "workers": workers, "audit_interval": 1}
    rollout["transport"] = transport
    config = config_for(run_dir, rollout={**config_for(run_dir).rollout.model_dump(), **rollout})
    finish(start(config))
    assert_same_records(run_dir, colocated)
    for record in read_metrics(run_dir):
        assert record["rollout/lag"] == record["rollout/stale"] == 0
        assert record["sync/bytes"] > 0 and record["sync/version"] == record["step"] + 1
        if sync == "sketch" and record["step"] and workers != {"tensor": 2}:
            assert record["sync/drift_max"] == 0


def test_a_resumed_trainer_brings_the_workers_to_its_version(colocated, tmp_path):
    run_dir = tmp_path / "run"
    rollout = config_for(run_dir).rollout.model_dump() | SEPARATE
    first = config_for(run_dir, rollout=rollout)
    finish(start(first, "train.steps=2"))
    finish(start(first, "--resume"))
    assert_same_records(run_dir, colocated)


def rollout_pids(launcher: int) -> list[int]:
    """Process ids of the launcher's rollout workers."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if b"rollout-worker" in command]


@pytest.mark.parametrize(
    ("transport", "steps"),
    quick([("files", 60), ("files", 200), ("gloo", 200)], [("files", 60)]),
)
def test_an_asynchronous_run_keeps_its_lag_and_outlives_a_worker(transport, steps, tmp_path):
    """Random delays of scoring, and one of two workers killed on the way."""
    run_dir = tmp_path / "run"
    rollout = config_for(run_dir).rollout.model_dump() | SEPARATE
    rollout |= {"max_lag": 2, "workers": {"count": 2}, "refresh_interval": 20}
    rollout |= {"transport": transport}
    config = config_for(
        run_dir,
        "Delayed",
        rollout=rollout,
        train={"steps": steps, "prompts_per_step": 2, "responses_per_prompt": 2},
        eval={"at_start": False, "at_end": False, "interval": 0},
        checkpoint={"interval": 0},
    )
    process = start(config)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") >= 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    killed = rollout_pids(process.pid)[0]
    os.kill(killed, signal.SIGKILL)
    said = finish(process)
    assert "ended with exit code -9; started again (1 of 3)" in said
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == list(range(steps))
    assert all(record["rollout/lag"] <= 2 and record["rollout/stale"] == 0 for record in records)
    assert max(record["rollout/lag"] for record in records) == 2
    versions = [record["sync/version"] for record in records]
    applied = [1 - record["train/skipped"] for record in records]
    assert versions == [sum(applied[: i + 1]) for i in range(steps)]
    assert not list((run_dir / "exchange").glob("run_*/request_*")), "a request was never answered"


def test_a_worker_that_always_dies_ends_the_run_with_the_reason(tmp_path):
    rollout = config_for(tmp_path / "run").rollout.model_dump() | SEPARATE
    rollout |= {"workers": {"restarts": 0}}
    config = config_for(tmp_path / "run", rollout=rollout, train={"steps": 5000})
    process = start(config)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(rollout_pids(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rollout-worker" in said and "so the run ends" in said


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"placement": "separate"}, "rollout.sync: expected shared with"),
        ({"sync": "sketch"}, "rollout.sync: expected shared with"),
        ({"transport": "gloo"}, "rollout.transport: gloo needs rollout.placement=separate"),
        ({"max_lag": 1}, "rollout.max_lag: more than 0 needs rollout.placement=separate"),
        ({**SEPARATE, "workers": {"count": 0}}, "rollout.workers.count"),
    ],
)
def test_impossible_placements_are_one_line(section, words, tmp_path):
    data = config_for(tmp_path).model_dump()
    data["rollout"] |= section
    with pytest.raises(UserError, match=words) as raised:
        config_from_dict(data)
    assert "\n" not in str(raised.value)


def test_a_trainer_that_waits_for_a_dead_worker_stops_on_request(tmp_path):
    """A trainer alone: nobody answers, and SIGTERM still saves and ends it."""
    rollout = config_for(tmp_path / "run").rollout.model_dump() | SEPARATE
    config = config_for(tmp_path / "run", rollout=rollout, eval={"at_start": False})
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_logra", "train", str(file)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "RANK": "0"}
        | {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "exchange").glob("run_*/request_*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "stopped while rollout workers were at work" in said


def test_workers_that_cannot_be_end_the_run_with_exit_2(tmp_path):
    rollout = config_for(tmp_path / "run").rollout.model_dump() | SEPARATE
    config = config_for(tmp_path / "run", rollout=rollout | {"workers": {"tensor": 5}})
    process = start(config)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "num_attention_heads" in said and "ended with exit code 2; so the run ends" in said
    assert "Traceback" not in said


def test_an_exchange_directory_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    rollout = config_for(tmp_path / "run").rollout.model_dump() | SEPARATE
    rollout |= {"exchange_dir": str(tmp_path / "file"), "workers": {"restarts": 0}}
    process = start(config_for(tmp_path / "run", rollout=rollout))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert f"error: {tmp_path}/file" in said and "not written (" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("ranks", "environment", "message"),
    [
        (4, {}, r"rollout\.workers: 4 ranks generate, of 4 that the job has"),
        (5, {}, r"parallel\.tensor=2: need a multiple of 2 ranks, but this run has 1"),
        (
            6,
            {"LOCAL_WORLD_SIZE": "3"},
            r"ranks 2 to 3 are one worker's, but not all on a node of 3",
        ),
        (6, {"TORCHELASTIC_RUN_ID": "none"}, "expected srun's ranks, got torchrun's"),
    ],
)
def test_ranks_that_cannot_be_divided_into_roles_are_one_line(
    ranks, environment, message, monkeypatch, tmp_path
):
    rollout = config_for(tmp_path).rollout.model_dump() | SEPARATE
    rollout |= {"workers": {"count": 2, "tensor": 2}}
    config = config_for(tmp_path, rollout=rollout, parallel={"tensor": 2})
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8", **environment}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        roles.take(config)


def test_only_ranks_can_have_workers_among_them(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RANK", raising=False)
    rollout = config_for(tmp_path).rollout.model_dump() | SEPARATE
    file = tmp_path / "c.yaml"
    file.write_text(dump_yaml(config_for(tmp_path, rollout=rollout)))
    assert cli.main(["train", str(file), "--workers-among-ranks"]) == 2
    assert "--workers-among-ranks: expected to be a rank" in capsys.readouterr().err
