"""Checkpoints: Megatron distributed checkpoints that are either whole or not there.

A checkpoint is written into a hidden directory next to its final place, hashed, flushed to disk
and renamed; only then does the file `latest` name it. So a save that is killed at any moment, or
that finds the disk full, leaves the previous checkpoint as it was. Loading compares every file
with its hash before a single weight is touched.

    checkpoints/
      latest          text: the name of the newest whole checkpoint
      iter_0000020/   the state after 20 steps: *.distcp and .metadata (Megatron's format),
                      checkpoint.json (step, model, configuration), integrity.json (hashes)
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    _verify_integrity_manifest_impl,
    save_integrity_manifest,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_logra import distributed
from megatron_logra.errors import UserError, lost_a_rank

# Its advice to use another library concerns saves in the background.
logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").setLevel(logging.ERROR)

LATEST = "latest"
DESCRIPTION = "checkpoint.json"
_EXTRA = "_extra_state"
_NAME = re.compile(r"iter_(\d{7,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
# What Megatron and torch raise when a file cannot be written, or is not what was written.
_FAILURES = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    CheckpointingException,
    CheckpointException,
)


def directory_name(step: int) -> str:
    """Name of the directory that holds the state after `step` steps."""
    return f"iter_{step:07d}"


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoint directories under `root`, oldest step first; unfinished ones are not."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def save(
    root: Path, step: int, state: ShardedStateDict, description: dict[str, Any], keep: int
) -> Path:
    """Write `root/iter_<step>`, make it the latest, delete older ones. Called by all ranks.

    Args:
        root: the run's `checkpoints` directory; made if it is missing.
        step: completed steps.
        state: Megatron sharded state dictionary; what is not sharded must be plain Python values,
            the same on all ranks.
        description: JSON values that identify the checkpoint (`model`, `config`, …).
        keep: number of checkpoints to keep, this one included.

    Raises:
        UserError: it cannot be written (a full disk, no permission). The previous checkpoints and
            `latest` are untouched.
    """
    draft = Draft(root, step, description, keep)
    with draft:
        draft.begin()
        draft.guarded(lambda: dist_checkpointing.save(state, str(draft.path)))
        draft.publish()
    return draft.final


class Draft:
    """A checkpoint on its way: written next to its final place, where it is whole or not at all.

    All ranks make one. As a context manager it deletes, in the end, what was not published.

    Args:
        root, step, description, keep: as `save` has them.
    """

    def __init__(self, root: Path, step: int, description: dict[str, Any], keep: int) -> None:
        self.root, self.step, self.description, self.keep = root, step, description, keep
        self.final = root / directory_name(step)
        self.path = root / (_UNFINISHED + self.final.name)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)

    def guarded[T](self, action: Callable[[], T]) -> T:
        """A part of a save, whose failures are `UserError`s."""
        _write_results_stay_in_this_process()
        try:
            with _quiet():
                return action()
        except _FAILURES as error:
            if lost_a_rank(error):
                raise
            raise UserError(_save_failure(self.root, self.final, error)) from error

    def begin(self) -> None:
        """Make the empty directory `path`. Called by all ranks."""

        def make() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.root)
            self.path.mkdir()

        distributed.first(lambda: self.guarded(make))

    def publish(self) -> None:
        """Hash what all ranks have written, and give it its name. Called by all ranks."""

        def finish() -> None:
            text = json.dumps({"step": self.step, **self.description}, indent=2, allow_nan=False)
            (self.path / DESCRIPTION).write_text(text + "\n")
            save_integrity_manifest(str(self.path))
            flush(self.path)
            _publish(self.root, self.path, self.final)
            older = [p for p in list_checkpoints(self.root) if _step_of(p) < self.step]
            for path in older[: max(0, len(older) - (self.keep - 1))]:
                shutil.rmtree(path)

        distributed.first(lambda: self.guarded(finish))


def latest(root: Path) -> Path | None:
    """The checkpoint that `root/latest` names; None if there has never been one.

    Raises:
        UserError: `latest` names a checkpoint that is missing or damaged. The message names the
            newest good one, if there is any; nothing is chosen in its place.
    """
    pointer = root / LATEST
    if not pointer.exists():
        return None
    name = pointer.read_text().strip()
    path = root / name
    problem = "not the name of a checkpoint" if not _NAME.fullmatch(name) else _damage(path)
    if problem is None:
        return path
    good = next((p for p in reversed(list_checkpoints(root)) if p != path and not _damage(p)), None)
    remedy = (
        f"the newest good one is {good.name}: write that name into {pointer} to go on from it"
        if good
        else "there is no good one beside it"
    )
    raise UserError(f"{path}: {problem}; {remedy}")


def read_description(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """What `save` was told about a checkpoint, after every file has been compared with its hash.

    Args:
        path: checkpoint directory.
        verified: that comparison has just been made (by `latest`).

    Raises:
        UserError: there is no checkpoint at `path`, or it is damaged.
    """
    problem = None if verified else _damage(path)
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    description: dict[str, Any] = json.loads((path / DESCRIPTION).read_text())
    return description


def require_same(
    path: Path, stored: dict[str, Any], expected: dict[str, Any], section: str
) -> None:
    """Compare two flat descriptions of a model (or of an optimizer).

    Raises:
        UserError: they differ; names the first keys that do, with both values.
    """
    names = [name for name in {**expected, **stored} if expected.get(name) != stored.get(name)]
    if names:
        pairs = (f"{name} {stored.get(name)}, here {expected.get(name)}" for name in names[:4])
        raise UserError(f"{path}: checkpoint of another {section}: {'; '.join(pairs)}")


def load(path: Path, state: ShardedStateDict) -> dict[str, Any]:
    """Fill `state` from a checkpoint. Called by all ranks, after `read_description`.

    Args:
        path: checkpoint directory.
        state: sharded state dictionary of what is to be loaded; the checkpoint may hold more.

    Returns:
        The state dictionary with tensors in place of their sharded descriptions.

    Raises:
        UserError: something that is asked for is not there, or has another shape.
    """
    try:
        with _quiet():
            loaded: dict[str, Any] = dist_checkpointing.load(
                state, str(path), strict=StrictHandling.RAISE_UNEXPECTED
            )
    except _FAILURES as error:
        raise UserError(f"{path}: does not fit this run: {_one_line(error)}") from error
    return loaded


def weights_state(chunks: Sequence[torch.nn.Module]) -> ShardedStateDict:
    """Sharded state of the weights of a rank's model chunks, wrapped or not.

    Without Megatron's "extra states", which are for fp8 and empty otherwise: so a checkpoint does
    not depend on the layers' implementation.
    """
    state: ShardedStateDict = {}
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        found = chunk.sharded_state_dict()
        state[f"model{index}"] = {k: v for k, v in found.items() if not k.endswith(_EXTRA)}
    return state


def set_weights(chunks: Sequence[torch.nn.Module], loaded: dict[str, Any]) -> None:
    """Put what `load` returned for `weights_state` into the model chunks."""
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        result = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
        missing = [name for name in result.missing_keys if not name.endswith(_EXTRA)]
        assert not missing and not result.unexpected_keys, result


def write_weights(chunks: Sequence[torch.nn.Module], path: Path) -> None:
    """Write the weights alone into an empty directory; what makes a checkpoint of it is not here.

    Raises:
        OSError, RuntimeError, CheckpointingException: they cannot be written.
    """
    _write_results_stay_in_this_process()
    with _quiet():
        dist_checkpointing.save(weights_state(chunks), str(path))


def rng_state(pg: ProcessGroupCollection) -> ShardedObject:
    """The random states of this rank's Python, NumPy, torch and Megatron's tracker.

    Only dropout draws from them: data order, sampling noise, projections and first weights come
    from counters and seeds. They belong to a layout, and can only be loaded under the same one.
    """
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng_state",
        states,
        (pg.pp.size(), pg.dp_cp.size(), pg.tp.size()),
        (pg.pp.rank(), pg.dp_cp.rank(), pg.tp.rank()),
    )


def layout(pg: ProcessGroupCollection) -> dict[str, int]:
    """Under which layout a checkpoint is written."""
    return {
        "tensor": pg.tp.size(),
        "pipeline": pg.pp.size(),
        "context": pg.cp.size(),
        "data": pg.dp.size(),
    }


def set_rng_state(states: dict[str, Any]) -> None:
    """Put back what `load` returned for `rng_state`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint directory; None if every file has the hash it was given."""
    if not path.is_dir():
        return "no such checkpoint directory"
    if not (path / DESCRIPTION).is_file():
        return f"not a checkpoint of this program, or an interrupted one ({DESCRIPTION} is missing)"
    try:
        # By this process alone: Megatron's public function has all ranks wait for the first.
        _verify_integrity_manifest_impl(str(path))
    except (CheckpointingException, OSError, ValueError, KeyError) as error:
        return f"damaged: {_one_line(error)}"
    return None


def _publish(root: Path, unfinished: Path, final: Path) -> None:
    """Rename a whole checkpoint to its name, and name it in `latest`."""
    if final.exists():  # left by an earlier run from before whose end this one was resumed
        final.rename(root / (_REPLACED + final.name))
    unfinished.rename(final)
    pointer = root / (_UNFINISHED + LATEST)
    pointer.write_text(final.name + "\n")
    flush(pointer)
    pointer.replace(root / LATEST)
    flush(root)
    _remove_leftovers(root)


def _remove_leftovers(root: Path) -> None:
    """Delete what a killed save has left."""
    for path in root.glob(".*"):
        if path.name.startswith((_UNFINISHED, _REPLACED)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def flush(path: Path) -> None:
    """Have a file, or a directory and the files in it, on disk before going on."""
    for part in (*path.iterdir(), path) if path.is_dir() else (path,):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_results_stay_in_this_process() -> None:
    """Spare a helper process.

    Megatron's writer hands its results over through a queue in a manager process, because it can
    run in a process of its own. Starting one by spawn takes seconds and imports the main module
    anew. Here it runs in this process, one save at a time: a plain queue does.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings to Megatron about names that it is to replace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        warnings.filterwarnings("ignore", module=r"megatron\.core\.dist_checkpointing")
        yield


def _save_failure(root: Path, final: Path, error: BaseException) -> str:
    free = "unknown space"
    if root.exists():
        free = f"{shutil.disk_usage(root).free / 2**20:.0f} MiB"
    whole = list_checkpoints(root)
    last = f"the last good one is {whole[-1].name}" if whole else "there is no earlier one"
    return f"{final}: checkpoint not saved ({_one_line(error)}; {free} free there); {last}"


def _one_line(error: BaseException) -> str:
    """The operating system's message if `error` quotes one, else its last line."""
    text = str(error)
    system = re.search(r"\[Errno \d+\] [^\n:;()]*(?:: '[^'\n]*')?", text)
    return system[0].strip() if system else text.strip().splitlines()[-1].strip()
