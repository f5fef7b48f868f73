"""What all transports of payloads have in common on the trainer's side, and where both sides meet.

Trainer and workers meet in a directory:

    HEAD            JSON: the run, its newest version, its newest refresh, and how pieces travel
    wanted/NAME     a receiver that cannot go on asks for a refresh

HEAD is replaced once all trainer ranks have their pieces ready. So a reader sees whole versions
only, whatever is killed when. A refresh and the updates after it are kept, which is all that a late
or restarted receiver needs.
"""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_logra import distributed, whole_file
from megatron_logra.errors import UserError
from megatron_logra.sync.payload import Kind
from megatron_logra.sync.sender import Sender

HEAD = "HEAD"
VERSION_DIRECTORY = re.compile(r"(update|refresh)_(\d{7,})")
"""Names of what the file transport leaves in the directory."""


def version_name(kind: Kind, version: int) -> str:
    """How a version's update or refresh is called, in messages and in files."""
    return f"{kind}_{version:07d}"


@dataclass(frozen=True)
class Head:
    """What a trainer offers."""

    run: str
    """The trainer's start."""
    version: int
    """Newest version."""
    refresh: int
    """Newest version of which there are whole weights."""
    dense: bool = False
    """Whether there are whole weights only."""
    transport: str = "files"
    """How pieces travel: `files`, `gloo` or `nccl`."""
    address: str = ""
    """gloo, nccl: HOST:PORT of the trainer's store."""
    pieces: int = 0
    """gloo, nccl: trainer ranks that send."""


def read_head(directory: Path) -> Head | None:
    """What the directory offers; None before the trainer's first word.

    Raises:
        UserError: the file cannot be read, or no trainer has written it.
    """
    file = directory / HEAD
    try:
        return Head(**json.loads(file.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: expected what a trainer offers: {error}") from None


def wish(directory: Path, name: str) -> None:
    """Ask the trainer for whole weights with its next update, as worker `name`."""
    with whole_file.explained(directory, "a wish for whole weights is"):
        whole_file.write(directory / "wanted" / name, b"", flush=False)


class Publisher(ABC):
    """Offers a trainer's updates. All methods are called by all trainer ranks.

    Args:
        directory: shared with the receivers; made if it is missing.
        sender: makes the pieces.
        refresh_interval: updates between whole weights.
        dense: send whole weights each time, and no updates.
    """

    def __init__(
        self,
        directory: Path,
        sender: Sender,
        *,
        refresh_interval: int = 100,
        dense: bool = False,
    ) -> None:
        self.directory = directory
        self.sender = sender
        self.refresh_interval = refresh_interval
        self.dense = dense
        self._refreshed = -1

    def start(self) -> int:
        """Offer whole weights, in place of whatever another run has left; returns bytes."""

        def clear() -> None:
            with self._explained():
                self.directory.mkdir(parents=True, exist_ok=True)
                (self.directory / HEAD).unlink(missing_ok=True)
                for path in self.directory.iterdir():
                    if VERSION_DIRECTORY.fullmatch(path.name):
                        shutil.rmtree(path)

        distributed.first(clear)
        return self._publish("refresh")

    def publish(self) -> int:
        """Offer the update that has just been applied; returns the bytes of all pieces.

        Raises:
            UserError: it cannot be written; readers still find the version before.
        """
        if self.dense:
            return self._publish("refresh")
        version = self.sender.learner.update
        sent = self._publish("update")
        wanted = distributed.first(lambda: _take_wishes(self.directory))
        if wanted or version - self._refreshed >= self.refresh_interval:
            sent += self._publish("refresh")
        return sent

    def wanted(self) -> bool:
        """Whether a receiver asks for whole weights. Called by one rank, unlike the others."""
        return bool(_wishes(self.directory))

    def refresh_if_wanted(self) -> int:
        """Offer the weights as they are if a receiver asks for them; returns bytes."""
        wanted = distributed.first(lambda: _take_wishes(self.directory))
        return self._publish("refresh") if wanted else 0

    @abstractmethod
    def close(self) -> None:
        """No receiver need be served any more."""

    @abstractmethod
    def _put(self, kind: Kind, version: int, data: bytearray) -> None:
        """Have this rank's piece ready for receivers.

        Raises:
            OSError: it cannot be written.
        """

    @abstractmethod
    def _forget(self, refreshed: int) -> None:
        """Delete what no receiver needs after the refresh of version `refreshed`."""

    def _head(self, version: int) -> Head:
        return Head(self.sender.run, version, self._refreshed, self.dense)

    def _publish(self, kind: Kind) -> int:
        version = self.sender.learner.update
        sender = self.sender
        data = sender.update() if kind == "update" else sender.refresh(exact=not self.dense)

        def put() -> int:
            if data is None:
                return 0
            with self._explained():
                self._put(kind, version, data)
            return len(data)

        sent = sum(distributed.each(put))
        if kind == "refresh":
            self._refreshed = version
        head = self._head(version)

        def announce() -> None:
            with self._explained():
                whole_file.write(self.directory / HEAD, json.dumps(asdict(head)).encode())

        distributed.first(announce)
        if kind == "refresh":
            self._forget(version)
        return sent

    def _explained(self) -> AbstractContextManager[None]:
        return whole_file.explained(
            self.directory,
            "weights for rollout workers",
            "they still find the version before",
        )


def _take_wishes(directory: Path) -> bool:
    """Whether a receiver has asked for a refresh; what it asked is forgotten."""
    wishes = _wishes(directory)
    for path in wishes:
        path.unlink()
    return bool(wishes)


def _wishes(directory: Path) -> list[Path]:
    # Not one that is still being written, under a name with a dot: it would be missed there.
    return list((directory / "wanted").glob("[!.]*"))
