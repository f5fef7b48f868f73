"""`attempts.jsonl` in the run directory: from which step each start of a run began, how it ended.

A run that fails is started again, by a batch script or by Slurm. One that fails each time before
it has saved anything new would go on like that until its allocation is used up: the file tells.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_logra.errors import StopRequested, UserError

ATTEMPTS_FILE = "attempts.jsonl"
LIMIT = 3
"""Failures in a row, all from the same step on, after which a run is not resumed."""
_SILENT = "ended without a word: killed, out of memory, out of time, or its node failed"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts in order: `step` at which each began and, unless it was killed, its `end`."""
    path = run_dir / ATTEMPTS_FILE
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # what a killed process leaves of its last line
            continue
        if "began" in entry:
            found.append({"step": entry["began"], "job": entry["job"], "end": None})
        elif found:
            found[-1]["end"] = entry["end"]
    return found


def check(run_dir: Path, step: int) -> None:
    """Refuse to begin at `step` once more if the last attempts have all failed from there.

    Raises:
        UserError: `LIMIT` attempts in a row began at this step and failed without a new checkpoint.
    """
    last = read(run_dir)[-LIMIT:]
    if len(last) < LIMIT or any(a["step"] != step or not _failed(a) for a in last):
        return
    why = last[-1]["end"] or _SILENT
    raise UserError(
        f"{run_dir}: failed {LIMIT} times after step {step} without saving a new one, last because "
        f"it {why}; to try again all the same, delete {run_dir / ATTEMPTS_FILE}"
    )


@contextmanager
def recorded(run_dir: Path, step: int) -> Iterator[None]:
    """Record that the run begins at `step`, and how it ends. Used by the first rank."""
    _append(run_dir, {"began": step, "job": os.environ.get("SLURM_JOB_ID"), "time": time.time()})
    try:
        yield
    except StopRequested:
        _append(run_dir, {"end": "stopped on request"})
        raise
    except UserError as error:  # it would be the same again; nobody starts it anew by himself
        _append(run_dir, {"end": f"refused: {' '.join(str(error).split())[:300]}"})
        raise
    except BaseException as error:
        text = " ".join(str(error).split())[:300]
        _append(run_dir, {"end": f"failed: {type(error).__name__}: {text}"})
        raise
    _append(run_dir, {"end": "done"})


def _failed(attempt: dict[str, Any]) -> bool:
    return attempt["end"] is None or attempt["end"].startswith("failed")


def _append(run_dir: Path, entry: dict[str, Any]) -> None:
    path = run_dir / ATTEMPTS_FILE
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
