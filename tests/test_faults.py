"""Ranks that do not come, stop, hang or die: the run ends with its reason, nothing is harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_ranks import config_for, rank_pids, start, wait_for_steps

from megatron_logra import checkpoint
from megatron_logra.config import dump_yaml

TESTS = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
}


def command(directory: Path, *overrides: str) -> list[str]:
    """`train` of a short run in `directory`/run."""
    (directory / "config.yaml").write_text(dump_yaml(config_for(directory / "run")))
    return ["-m", "megatron_logra", "train", str(directory / "config.yaml"), *overrides]


def test_ranks_that_do_not_come_are_told_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, *command(tmp_path, "parallel.timeout_s=2.0")],
        env={**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("megatron-logra:"))
    assert "WORLD_SIZE=2" in line and "within 2 s" in line
    assert not (tmp_path / "run").exists()


def test_a_stop_request_before_training_ends_at_once(tmp_path):
    process = subprocess.Popen(
        [sys.executable, *command(tmp_path)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    caught = f"/proc/{process.pid}/status"
    while not _catches_sigterm(Path(caught)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "before training began" in said and "Traceback" not in said


def _catches_sigterm(status: Path) -> bool:
    (mask,) = (line.split()[1] for line in status.read_text().splitlines() if "SigCgt" in line)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_slow_rank_is_waited_for_and_one_that_hangs_is_not(tmp_path):
    # Long enough for two ranks to import what they need on a busy machine.
    process = start(tmp_path, "parallel.timeout_s=40.0")
    wait_for_steps(process, tmp_path, 1)
    pids = rank_pids(process.pid)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(3)
    os.kill(pids[1], signal.SIGCONT)
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    wait_for_steps(process, tmp_path, steps + 2)
    os.kill(pids[1], signal.SIGSTOP)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "lost another rank" in said and "Timed out" in said and "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_last_checkpoint(tmp_path, in_background):
    process = start(
        tmp_path, "checkpoint.interval=1", f"checkpoint.async_save={str(in_background).lower()}"
    )
    root = tmp_path / "run" / "checkpoints"
    wait_for_steps(process, tmp_path, 2)
    pids = rank_pids(process.pid)
    deadline = time.monotonic() + 60
    while not (root / "latest").exists() or not list(root.glob(".unfinished-iter*/*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline
    os.kill(pids[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 was ended by SIGKILL" in said
    path = checkpoint.latest(root)
    assert path is not None and checkpoint.read_description(path)["step"] >= 1
    assert checkpoint.list_checkpoints(root)[-1] == path


def test_torchrun_starts_the_ranks(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29717"]
    quick = ["train.steps=1", "eval.at_start=false", "eval.at_end=false"]
    done = subprocess.run(
        [sys.executable, *torchrun, *command(tmp_path, *quick)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 steps, 1 updates") == 1
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert path is not None
    assert checkpoint.read_description(path)["layout"]["data"] == 2
