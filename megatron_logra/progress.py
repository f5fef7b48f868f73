"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

_WINDOW = 10
"""Steps over which the duration of a step is averaged."""
_REDRAW_S = 0.1
"""Shortest time between two drawings of the live line within a step."""


class Progress:
    """Step, reward, KL, tokens per second and remaining time; within a step, the phase.

    On a terminal the line is redrawn in place. Elsewhere a step's line is printed when `interval_s`
    seconds have passed since the last one, and for the first and the last step. Use it as a context
    manager, so that a traceback begins on a line of its own. All but one of a run's ranks are
    `silent`.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        silent: bool = False,
    ) -> None:
        self.total_steps = total_steps
        self._stream = stream if stream is not None else sys.stderr
        self._silent = silent
        self._live = not silent and self._stream.isatty()
        self._interval_s = interval_s
        self._clock = clock
        self._done = start_step
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._step_began = clock()
        self._printed: float | None = None
        self._drawn = -_REDRAW_S
        self._numbers = ""
        self._shown = 0

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the current step is doing, such as `rollout` with 12 of 64 responses done."""
        if not self._live:
            return
        now = self._clock()
        if done is not None and done != total and now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        count = "" if done is None else f" {done}" if total is None else f" {done}/{total}"
        self._draw(self._line(f"{name}{count}"))

    def step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Step number `step`, counted from 0, is done; `metrics` is its record."""
        now = self._clock()
        self._seconds.append(now - self._step_began)
        self._step_began = now
        self._done = step + 1
        self._numbers = _numbers(metrics)
        if self._live:
            self._draw(self._line(""))
            return
        last = self._done >= self.total_steps
        if self._printed is None or last or now - self._printed >= self._interval_s:
            self._printed = now
            self._print(self._line(""))

    def skip_time(self) -> None:
        """Leave the time since the last step (an evaluation, say) out of the average."""
        self._step_began = self._clock()

    def message(self, text: str) -> None:
        """Print a line that stays, above the live line."""
        self.clear()
        self._print(text)

    def eta_s(self) -> float | None:
        """Seconds until the last step at the recent pace; None before the first step."""
        if not self._seconds:
            return None
        return max(0, self.total_steps - self._done) * sum(self._seconds) / len(self._seconds)

    def clear(self) -> None:
        """Wipe the live line, so that something else can be printed."""
        if self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()
            self._shown = 0

    def close(self) -> None:
        """End the live line; what it says stays on the screen."""
        if self._shown:
            self._print("")
            self._shown = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _line(self, tail: str) -> str:
        parts = [f"step {self._done}/{self.total_steps}", self._numbers]
        if self._seconds:
            parts.append(f"{sum(self._seconds) / len(self._seconds):.1f} s/step")
        eta = self.eta_s()
        if eta is not None and self._done < self.total_steps:
            parts.append(f"ETA {format_seconds(eta)}")
        parts.append(tail)
        return "  ".join(part for part in parts if part)

    def _draw(self, line: str) -> None:
        # One column is left free: a full line would wrap, and \r would no longer reach its start.
        width = max(1, shutil.get_terminal_size().columns - 1)
        line = line[:width]
        self._stream.write("\r" + line.ljust(min(self._shown, width)))
        self._stream.flush()
        self._shown = len(line)

    def _print(self, line: str) -> None:
        if self._silent:
            return
        self._stream.write(line + "\n")
        self._stream.flush()


def format_seconds(seconds: float) -> str:
    """`M:SS`, or `H:MM:SS` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(metrics: Mapping[str, float | int | None]) -> str:
    """The numbers of a record that a person follows. ASCII only: any terminal shows it."""
    parts = []
    for key, text in (
        ("reward/mean", "reward {:.3f}"),
        ("policy/kl_predicted_scaled", "KL {:.1e}"),
        ("policy/alpha", "alpha {:.2f}"),
        ("rollout/tokens_per_s", "{:.0f} tok/s"),
    ):
        value = metrics.get(key)
        if value is not None:
            parts.append(text.format(value))
    if "reward/mean" not in metrics and metrics.get("train/loss") is not None:
        parts.insert(0, f"loss {metrics['train/loss']:.4f}")
    if metrics.get("train/skipped"):
        parts.append("SKIPPED")
    return "  ".join(parts)
