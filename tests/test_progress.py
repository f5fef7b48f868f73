"""The progress line, seen through a small model of a terminal."""

from __future__ import annotations

import io
import random

import pytest

from megatron_logra.progress import Progress, format_seconds


class Terminal(io.StringIO):
    """A stream that says it is a terminal; `screen` is what a person would see."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = [[]]
        column = 0
        for character in self.getvalue():
            if character == "\n":
                lines.append([])
                column = 0
            elif character == "\r":
                column = 0
            else:
                line = lines[-1]
                line[column : column + 1] = [character]
                column += 1
        return ["".join(line).rstrip() for line in lines]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


RECORD = {
    "reward/mean": 0.53125,
    "policy/kl_predicted_scaled": 9.8e-3,
    "policy/alpha": 1.2,
    "rollout/tokens_per_s": 812.4,
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_the_live_line_tells_step_reward_kl_speed_and_remaining_time():
    terminal, clock = Terminal(), Clock()
    progress = Progress(25, stream=terminal, clock=clock)
    clock.now += 12
    progress.step(0, RECORD)
    assert terminal.screen() == [
        "step 1/25  reward 0.531  KL 9.8e-03  alpha 1.20  812 tok/s  12.0 s/step  ETA 4:48"
    ]
    progress.phase("rollout", 32, 64)
    assert terminal.screen()[0].endswith("ETA 4:48  rollout 32/64")
    progress.phase("probe")
    assert terminal.screen()[0].endswith("ETA 4:48  probe")
    assert terminal.getvalue().isascii()


def test_the_line_never_reaches_the_terminals_width(monkeypatch):
    terminal, clock, rng = Terminal(), Clock(), random.Random()
    progress = Progress(10**6, stream=terminal, clock=clock)
    for step in range(50):
        width = rng.randint(2, 100)
        monkeypatch.setenv("COLUMNS", str(width))
        clock.now += 1
        progress.step(step, RECORD)
        progress.phase("forward_backward", rng.randint(0, 99), 100)
        last = terminal.getvalue().rpartition("\r")[2]
        assert len(last) < width
    assert "\n" not in terminal.getvalue()


def test_a_shorter_line_leaves_nothing_of_a_longer_one():
    terminal = Terminal()
    progress = Progress(3, stream=terminal, clock=Clock())
    progress.phase("a_very_long_phase_name")
    progress.phase("b")
    assert terminal.screen() == ["step 0/3  b"]


def test_an_exception_begins_on_a_line_of_its_own():
    terminal = Terminal()

    def fail():
        with Progress(3, stream=terminal, clock=Clock()) as progress:
            progress.phase("rollout")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    terminal.write("Traceback")
    assert terminal.screen() == ["step 0/3  rollout", "Traceback"]


def test_messages_stay_above_the_live_line():
    terminal = Terminal()
    progress = Progress(3, stream=terminal, clock=Clock())
    progress.phase("rollout")
    progress.message("accuracy 0.21")
    progress.phase("reward")
    progress.close()
    assert terminal.screen() == ["accuracy 0.21", "step 0/3  reward", ""]


def test_within_a_step_the_line_is_redrawn_at_most_ten_times_a_second():
    terminal, clock = Terminal(), Clock()
    progress = Progress(3, stream=terminal, clock=clock)
    for done in range(1000):
        clock.now += 0.001
        progress.phase("rollout", done, 1000)
    assert terminal.getvalue().count("\r") <= 11
    progress.phase("rollout", 1000, 1000)
    assert terminal.screen() == ["step 0/3  rollout 1000/1000"]


def test_elsewhere_lines_come_at_an_interval_and_at_both_ends():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, stream=stream, interval_s=10, clock=clock) as progress:
        for step in range(100):
            clock.now += 1
            progress.phase("rollout", 1, 2)
            progress.step(step, RECORD)
    printed = [int(line.split()[1].partition("/")[0]) for line in stream.getvalue().splitlines()]
    assert printed == [1, *range(11, 100, 10), 100]
    assert "\r" not in stream.getvalue()
    assert "ETA" not in stream.getvalue().splitlines()[-1]


def test_the_remaining_time_follows_the_last_ten_steps():
    clock, rng = Clock(), random.Random()
    progress = Progress(200, start_step=40, stream=io.StringIO(), clock=clock)
    assert progress.eta_s() is None
    seconds = [rng.uniform(0.1, 9) for _ in range(30)]
    for index, duration in enumerate(seconds):
        clock.now += duration
        progress.step(40 + index, {})
        recent = seconds[max(0, index - 9) : index + 1]
        expected = (200 - 41 - index) * sum(recent) / len(recent)
        assert progress.eta_s() == pytest.approx(expected, rel=1e-9)


def test_skipped_time_is_not_a_steps_time():
    clock = Clock()
    progress = Progress(11, stream=io.StringIO(), clock=clock)
    clock.now += 100
    progress.skip_time()
    clock.now += 2
    progress.step(0, {})
    assert progress.eta_s() == pytest.approx(20)


def test_nulls_are_left_out_and_skipped_steps_told():
    stream = io.StringIO()
    progress = Progress(1, stream=stream, clock=Clock())
    progress.step(0, {"reward/mean": None, "policy/alpha": None, "train/skipped": 1})
    assert stream.getvalue() == "step 1/1  SKIPPED  0.0 s/step\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.9, "1:00:00"), (7325, "2:02:05")],
)
def test_seconds_as_clock_time(seconds, text):
    assert format_seconds(seconds) == text
