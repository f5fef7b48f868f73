"""A run stops before its job's end, and is not resumed for ever where it fails."""

from __future__ import annotations

import itertools
import json
import random
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_trainer import config_for, measured

from megatron_logra import attempts, checkpoint, stopping
from megatron_logra.errors import StopRequested, UserError
from megatron_logra.rl import trainer

_ASKED_AGAIN = """
import signal, sys
from megatron_logra import stopping

def ask_again(*_):
    signal.raise_signal(signal.SIGTERM)
    return ask_again

with stopping.requests() as request:
    sys.settrace(ask_again)  # at every line of the handler
    signal.raise_signal(signal.SIGUSR1)
    sys.settrace(None)
print(request.made)
"""


def test_a_request_that_comes_while_another_is_handled_hangs_nothing() -> None:
    # Slurm's reaches a study and its run, which gets the study's as well.
    done = subprocess.run(
        [sys.executable, "-c", _ASKED_AGAIN], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "True\n", done.stderr


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_no_step_is_begun_that_would_not_be_saved_in_time() -> None:
    draw = random.Random()
    for _ in range(50):
        clock = Clock()
        end = clock.now + draw.uniform(50, 5000)
        step, save = draw.uniform(0.1, 200), draw.uniform(0.1, 200)
        deadline = stopping.Deadline(end, lambda end=end: end, state_bytes=0, clock=clock)
        deadline.save_took(save)
        for number in itertools.count():  # noqa: B007
            clock.now += step * draw.uniform(0.9, 1.1)
            deadline.step_took(step)
            if deadline.reached():
                break
        if number:  # that there was time for a step, a save and the exit
            assert clock.now + save + 10 < end
        # And not long before: a step and a half, two saves and the exit's time.
        assert end - clock.now < 2.5 * step + 1.6 * save + 30


def test_the_slowest_recent_step_and_the_last_save_count() -> None:
    deadline = stopping.Deadline(None, lambda: None, state_bytes=10**9)
    assert deadline.needed_s == pytest.approx(20 + 1.5 * 10)  # 100 MB/s for a first save
    deadline.save_took(4)
    for seconds in (3, 40, 2):
        deadline.step_took(seconds)
    assert deadline.needed_s == pytest.approx(20 + 1.25 * 40 + 1.5 * 4)
    for _ in range(10):
        deadline.step_took(2)
    assert deadline.needed_s == pytest.approx(20 + 1.25 * 2 + 1.5 * 4)
    assert not deadline.reached()


def test_an_end_that_is_moved_counts_as_it_is_now() -> None:
    clock = Clock()
    ends = [clock.now + 30, clock.now + 3000, clock.now + 300]
    deadline = stopping.Deadline(ends[0], lambda: ends[1], state_bytes=0, clock=clock)
    deadline.step_took(20)
    assert not deadline.reached(), "extended"
    ends[1] = ends[2]
    clock.now += 61
    assert not deadline.reached() and deadline.end == ends[2], "cut short, seen within a minute"
    clock.now += 210
    assert deadline.reached() and "another step" in deadline.reason()


def test_the_end_comes_from_scontrol_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopping.job_end({}) is None
    assert stopping.job_end({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME=soon"):
        stopping.job_end({"SLURM_JOB_END_TIME": "soon"})
    program = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for told, expected in (
        ("JobId=7 StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T01:00:00 Dead=1", 1),
        ("JobId=7 EndTime=Unknown", None),
    ):
        program.write_text(f"#!/bin/sh\n[ $4 = 7 ] && echo '{told}'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        end = stopping.job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1"})
        wanted = time.mktime((2026, 1, 1, 1, 0, 0, 0, 0, -1)) if expected else None
        assert end == wanted
    # The last task of an array has the array's own number, by which all tasks are shown.
    program.write_text("#!/bin/sh\n[ $4 = 7_3 ] && echo 'JobId=7 EndTime=2026-01-01T01:00:00'\n")
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert stopping.job_end(task) == time.mktime((2026, 1, 1, 1, 0, 0, 0, 0, -1))
    program.write_text("#!/bin/sh\nexit 1\n")
    assert stopping.job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5"}) == 5


def test_a_run_without_time_left_saves_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    checkpoints = {"interval": 0}
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    with pytest.raises(StopRequested, match=r"stopped after step 1, saved .*the job ends at"):
        trainer.run(config_for(stopped, checkpoint=checkpoints))
    assert [a["end"] for a in attempts.read(stopped)] == ["stopped on request"]
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    trainer.run(config_for(stopped, checkpoint=checkpoints), resume=True)
    trainer.run(config_for(whole, checkpoint=checkpoints))
    assert measured(stopped) == measured(whole)
    assert [a["step"] for a in attempts.read(stopped)] == [0, 1]


# --- attempts -------------------------------------------------------------------------------------


def attempt(run_dir: Path, step: int, end: BaseException | None) -> None:
    """One start from `step`; it ends with `end`, or by itself."""
    with suppress(RuntimeError, StopRequested, UserError), attempts.recorded(run_dir, step):
        if end is not None:
            raise end


CRASH = RuntimeError("a GPU fell off\nthe bus")


@pytest.mark.parametrize(
    ("story", "refused"),
    [
        ([(5, CRASH)] * 2, False),
        ([(5, CRASH)] * 3, True),
        ([(0, CRASH)] * 3 + [(5, CRASH)] * 2, False),
        ([(5, CRASH), (5, StopRequested()), (5, CRASH), (5, CRASH)], False),
        ([(5, CRASH), (5, CRASH), (5, UserError("no"))], False),
        ([(5, StopRequested())] * 5, False),
        ([(4, CRASH), (5, CRASH), (5, CRASH)], False),
    ],
)
def test_three_failures_from_one_step_on_are_enough(
    story: list[tuple[int, BaseException]], refused: bool, tmp_path: Path
) -> None:
    for step, end in story:
        attempts.check(tmp_path, step)
        attempt(tmp_path, step, end)
    assert [a["step"] for a in attempts.read(tmp_path)] == [step for step, _ in story]
    if not refused:
        attempts.check(tmp_path, 5)
        return
    with pytest.raises(UserError, match="failed 3 times after step 5.*a GPU fell off the bus") as e:
        attempts.check(tmp_path, 5)
    assert "\n" not in str(e.value)
    attempts.check(tmp_path, 6)  # a new checkpoint is progress


def test_killed_attempts_count_and_a_broken_line_hides_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        with attempts.recorded(tmp_path, 2):
            pass
        path = tmp_path / attempts.ATTEMPTS_FILE
        path.write_text("\n".join(path.read_text().splitlines()[:-1]) + '\n{"en')  # killed
    with pytest.raises(UserError, match="ended without a word"):
        attempts.check(tmp_path, 2)
    with attempts.recorded(tmp_path, 2):
        pass
    assert [a["end"] for a in attempts.read(tmp_path)] == [None, None, None, "done"]
    assert json.loads((tmp_path / attempts.ATTEMPTS_FILE).read_text().splitlines()[-1])


def test_a_run_that_fails_again_and_again_is_refused_and_a_new_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, checkpoint={"interval": 0})
    update = trainer.Trainer._update

    def failing(self: trainer.Trainer, *arguments: object) -> object:
        if self.state.step == 2:
            raise RuntimeError("the third step fails")
        return update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.Trainer, "_update", failing)
    for number in range(3):
        with pytest.raises(RuntimeError, match="the third step fails"):
            trainer.run(config, resume=number > 0)
    with pytest.raises(UserError, match="failed 3 times after step 0.*the third step fails"):
        trainer.run(config, resume=True)
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.undo()
    trainer.run(config)
    assert [a["end"] for a in attempts.read(tmp_path)] == ["done"]
