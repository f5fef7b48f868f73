"""When a run has to stop: on request, or because its job ends before another step would be saved.

The batch system kills a job at its end time, whatever it is doing. How long a step and a save take
is measured as the run goes on, so the last step that still fits is the last one that is begun. The
time that starting up has taken counts by itself: the end is a time of day, not a duration.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron_logra.errors import UserError

END_VARIABLE = "SLURM_JOB_END_TIME"
"""Set by newer versions of Slurm: the job's end in seconds since 1970."""
_RECENT = 10
"""Steps of which the slowest is expected next."""
_STEP_MARGIN = 1.25
_SAVE_MARGIN = 1.5
"""The next step or save may take so many times as long."""
_EXIT_S = 20.0
"""Seconds to write the last record and to end."""
_FIRST_SAVE_BYTES_PER_S = 100e6
"""What is assumed of a rank's first save."""
_ASK_EVERY_S = 60.0
_ASK_LIMIT_S = 10.0


class Deadline:
    """Whether another step and a save still fit before the job ends.

    Args:
        end: of the job in seconds since 1970; None if it has none.
        ask: returns the end once more, for it may be moved: now and then, and before it is acted
            upon.
        state_bytes: what this rank has to save, for the time of a save before there has been one.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        end: float | None,
        ask: Callable[[], float | None],
        state_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.end = end
        self._ask, self._clock = ask, clock
        self._save_s = state_bytes / _FIRST_SAVE_BYTES_PER_S
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._asked = clock()

    def step_took(self, seconds: float) -> None:
        """Account for a step, without its save."""
        self._steps_s.append(seconds)

    def save_took(self, seconds: float) -> None:
        """Account for a save that the run has waited for."""
        self._save_s = seconds

    @property
    def needed_s(self) -> float:
        """Seconds that another step, a save and the exit are expected to take at most."""
        step = max(self._steps_s, default=0.0)
        return _STEP_MARGIN * step + _SAVE_MARGIN * self._save_s + _EXIT_S

    def reached(self) -> bool:
        """Whether there is no time for another step."""
        if self.end is None:
            return False
        if self._is_near() or self._clock() - self._asked >= _ASK_EVERY_S:
            self.end, self._asked = self._ask(), self._clock()
        return self._is_near()

    def _is_near(self) -> bool:
        return self.end is not None and self._clock() + self.needed_s >= self.end

    def reason(self) -> str:
        """Why it is reached, for people."""
        assert self.end is not None
        at = datetime.datetime.fromtimestamp(self.end).strftime("%H:%M:%S")
        return f"the job ends at {at}, and another step and a save take {self.needed_s:.0f} s"


def job_end(environment: Mapping[str, str] = os.environ) -> float | None:
    """When this Slurm job ends, in seconds since 1970; None outside one, or without a limit.

    Asks scontrol, who knows of a limit that was changed, and else takes SLURM_JOB_END_TIME.

    Raises:
        UserError: that variable is no time.
    """
    job = environment.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_TASK_ID" in environment:  # the last task has the number of the whole array
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    told = _ask_scontrol(job) if job else None
    if told is not None:
        return _parse(told)
    given = environment.get(END_VARIABLE)
    if given is None:
        return None
    if not given.isdecimal():
        raise UserError(f"{END_VARIABLE}={given}: expected seconds since 1970")
    return float(given)


def _ask_scontrol(job: str) -> str | None:
    """What `scontrol show job` says about the end; None if it says nothing."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):  # not in this container, or no controller
        return None
    found = re.search(r"\bEndTime=(\S+)", done.stdout)
    return found[1] if found else None


def _parse(told: str) -> float | None:
    """Slurm's local time, such as 2026-11-30T08:15:00, in seconds since 1970; `Unknown` is None."""
    try:
        return datetime.datetime.fromisoformat(told).timestamp()
    except ValueError:
        return None


REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and to stop."""


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = REQUESTS
) -> Iterator[None]:
    """Within: `handler` gets these signals. They reach the main thread only: elsewhere, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)


class Request:
    """Whether a signal has asked to stop.

    A plain flag: `threading.Event` takes a lock, and a second signal that comes while the first
    one's handler holds it would wait for itself.
    """

    def __init__(self) -> None:
        self.made = False

    def make(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Ask; as a signal's handler, too."""
        self.made = True


@contextmanager
def requests() -> Iterator[Request]:
    """What a request to stop sets, so that the step it comes in is finished first."""
    request = Request()
    with handled(request.make):
        yield request
