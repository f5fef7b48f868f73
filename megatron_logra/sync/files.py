"""Payloads as files in a shared directory, for rollout workers in processes of their own.

    HEAD                          JSON: the run, its newest version, and its newest refresh
    update_0000012/piece_000      pieces of the update that made version 12
    refresh_0000010/piece_000     pieces of whole weights at version 10
    wanted/NAME                   a receiver that cannot go on asks for a refresh

Every file is written under another name, flushed and renamed; HEAD is replaced last, once all
trainer ranks have written. So a reader sees whole versions only, whatever is killed when. A
refresh and the updates after it are kept, which is all that a late or restarted receiver needs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_logra import distributed, whole_file
from megatron_logra.sync.payload import Payload, PayloadError, assemble
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.sender import Sender

HEAD = "HEAD"
_VERSION = re.compile(r"(update|refresh)_(\d{7,})")


@dataclass(frozen=True)
class Head:
    """What a directory offers."""

    run: str
    """The trainer's start."""
    version: int
    """Newest version."""
    refresh: int
    """Newest version of which there are whole weights."""
    dense: bool = False
    """Whether there are whole weights only."""


def read_head(directory: Path) -> Head | None:
    """What the directory offers; None before the trainer's first word."""
    try:
        return Head(**json.loads((directory / HEAD).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None


class FileSender:
    """Publishes a trainer's updates. All methods are called by all trainer ranks.

    Args:
        directory: shared with the receivers; made if it is missing.
        sender: makes the pieces.
        refresh_interval: updates between whole weights; the updates since the last but one are
            kept.
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
        """Publish whole weights, in place of whatever another run has left; returns bytes."""

        def clear() -> None:
            with self._explained():
                self.directory.mkdir(parents=True, exist_ok=True)
                (self.directory / HEAD).unlink(missing_ok=True)
                for path in self.directory.iterdir():
                    if _VERSION.fullmatch(path.name):
                        shutil.rmtree(path)

        distributed.first(clear)
        return self._publish("refresh")

    def publish(self) -> int:
        """Publish the update that has just been applied; returns the bytes of all pieces.

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

    def _publish(self, kind: str) -> int:
        version = self.sender.learner.update
        place = self.directory / f"{kind}_{version:07d}"
        data = self.sender.update() if kind == "update" else self.sender.refresh()

        def write() -> int:
            if data is None:
                return 0
            with self._explained():
                whole_file.write(place / f"piece_{self.sender.piece:03d}", data)
            return len(data)

        sent = sum(distributed.each(write))
        if kind == "refresh":
            self._refreshed = version
        head = Head(self.sender.run, version, self._refreshed, self.dense)

        def announce() -> None:
            with self._explained():
                whole_file.write(self.directory / HEAD, json.dumps(asdict(head)).encode())
                if kind == "refresh":
                    _prune(self.directory, version)

        distributed.first(announce)
        return sent

    def _explained(self) -> AbstractContextManager[None]:
        return whole_file.explained(
            self.directory,
            "weights for rollout workers",
            "they still find the version before",
        )


class FileFollower:
    """Brings a receiver to a directory's versions. Called by all ranks of the receiver.

    Args:
        directory: where the trainer publishes.
        receiver: what follows.
        name: names this worker where it asks for a refresh.
    """

    def __init__(self, directory: Path, receiver: Receiver, name: str) -> None:
        self.directory = directory
        self.receiver = receiver
        self.name = name
        self.healed: list[str] = []
        """Why whole weights were taken in place of updates, each time."""

    def catch_up(self, version: int | None = None) -> bool:
        """Apply what is new, up to `version` (default: the newest).

        What is missing or damaged is replaced by whole weights, as soon as there are newer ones.

        Returns:
            Whether the receiver has that version, or a later one.
        """
        head = distributed.first(lambda: read_head(self.directory))
        if head is None:
            return False
        goal = head.version if version is None else min(version, head.version)
        receiver = self.receiver
        if receiver.run != head.run:
            reason = f"run {head.run} follows {receiver.run}" if receiver.run else None
            if not self._refresh(head.refresh, reason):
                return False
        if head.dense and receiver.version < goal and not self._refresh(head.refresh, None):
            return False
        while receiver.version < goal:
            failure = self._attempt("update", receiver.version + 1, receiver.apply)
            if failure is None:
                continue
            newest = head.refresh
            if newest <= receiver.version or not self._refresh(newest, failure):
                distributed.first(self._ask)
                return False
        return version is None or receiver.version >= version

    def _refresh(self, version: int, reason: str | None) -> bool:
        failure = self._attempt("refresh", version, self.receiver.refresh)
        if failure is not None:
            distributed.first(self._ask)
            return False
        if reason is not None:
            self.healed.append(reason)
        return True

    def _attempt(self, kind: str, version: int, use: Callable[[Payload], None]) -> str | None:
        """Read and use a payload on all ranks; why it failed on any."""
        place = self.directory / f"{kind}_{version:07d}"
        payload, failure = None, None
        try:
            payload = assemble([path.read_bytes() for path in sorted(place.glob("piece_???"))])
        except (OSError, PayloadError) as error:
            failure = f"{place.name}: {error}"
        failures = [text for text in distributed.each(lambda: failure) if text is not None]
        if failures:
            return failures[0]
        assert payload is not None
        try:
            use(payload)
        except PayloadError as error:
            failure = f"{place.name}: {error}"
        failures = [text for text in distributed.each(lambda: failure) if text is not None]
        return failures[0] if failures else None

    def _ask(self) -> None:
        """Ask the trainer for whole weights with its next update."""
        with whole_file.explained(self.directory, "a wish for whole weights is"):
            whole_file.write(self.directory / "wanted" / self.name, b"", flush=False)


def _prune(directory: Path, refreshed: int) -> None:
    """Delete what no receiver needs after the refresh of version `refreshed`.

    The refresh before it stays with its updates, for receivers that are reading them just now.
    """
    found = sorted(
        (int(match[2]), path)
        for path in directory.iterdir()
        if (match := _VERSION.fullmatch(path.name))
    )
    refreshes = [v for v, path in found if path.name.startswith("refresh") and v < refreshed]
    for version, path in found:
        if refreshes and version < refreshes[-1]:
            shutil.rmtree(path)


def _take_wishes(directory: Path) -> bool:
    """Whether a receiver has asked for a refresh; what it asked is forgotten."""
    wishes = list((directory / "wanted").glob("*"))
    for wish in wishes:
        wish.unlink()
    return bool(wishes)
