"""The worker's side of every transport: getting a receiver to the trainer's versions, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist

from megatron_logra import distributed, platform
from megatron_logra.sync import files
from megatron_logra.sync.payload import Kind, Payload, PayloadError, Piece, assemble
from megatron_logra.sync.process_groups import GroupReader
from megatron_logra.sync.receiver import Receiver
from megatron_logra.sync.transport import Head, read_head, version_name, wish


class Follower:
    """Brings a receiver to a trainer's versions. Called by all ranks of the receiver.

    How pieces travel is the trainer's choice; its HEAD says it.

    Args:
        directory: where the trainer's HEAD is.
        receiver: what follows.
        name: names this worker where it asks for something.
        timeout_s: gloo, nccl: longest wait for the trainer to send on; if it ends, that is seen at
            once.
    """

    def __init__(
        self, directory: Path, receiver: Receiver, name: str, *, timeout_s: float = 1800.0
    ) -> None:
        self.directory = directory
        self.receiver = receiver
        self.name = name
        self.healed: list[str] = []
        """What was wrong with a version, and what helped, each time."""
        self.failure: str | None = None
        """What is wrong with the version that was last tried, as long as nothing has helped."""
        self._groups = GroupReader(name, timeout_s)

    def catch_up(self, version: int | None = None) -> bool:
        """Apply what is new, up to `version` (default: the newest).

        What is missing or damaged is asked for once more, then replaced by whole weights, as soon
        as there are newer ones.

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
            if not self._refresh(head, reason):
                return False
        if head.dense and receiver.version < goal and not self._refresh(head, None):
            return False
        while receiver.version < goal:
            failure = self._replay(head, "update", receiver.version + 1, receiver.apply)
            if failure is None:
                continue
            if head.refresh <= receiver.version or not self._refresh(head, failure):
                distributed.first(lambda: wish(self.directory, self.name))
                return False
        return version is None or receiver.version >= version

    def _refresh(self, head: Head, reason: str | None) -> bool:
        if self._replay(head, "refresh", head.refresh, self.receiver.refresh) is not None:
            distributed.first(lambda: wish(self.directory, self.name))
            return False
        if reason is not None:
            self.healed.append(f"{reason}; took whole weights")
        return True

    def _replay(
        self, head: Head, kind: Kind, version: int, use: Callable[[Payload], None]
    ) -> str | None:
        """`_attempt`, and once more if that fails; why both have failed."""
        failure = self._attempt(head, kind, version, use)
        again = failure and self._attempt(head, kind, version, use)
        self.failure = again
        if failure is not None and again is None:
            self.healed.append(f"{failure}; took it again")
        return again

    def _attempt(
        self, head: Head, kind: Kind, version: int, use: Callable[[Payload], None]
    ) -> str | None:
        """Get and use a payload on all ranks; why it failed on any."""
        name = version_name(kind, version)
        payload, failure = None, None
        try:
            payload = assemble(self._pieces(head, kind, version))
        except (OSError, PayloadError) as error:
            failure = f"{name}: {error}"
        failure = distributed.any_reason(failure)
        if failure is not None:
            return failure
        assert payload is not None
        try:
            use(payload)
        except PayloadError as error:
            failure = f"{name}: {error}"
        return distributed.any_reason(failure)

    def _pieces(self, head: Head, kind: Kind, version: int) -> list[Piece]:
        """The pieces that there are of a version.

        Raises:
            OSError: they cannot be had.
        """
        if head.transport == "files":
            return files.read_pieces(self.directory, kind, version)
        return self._from_groups(head, kind, version)

    def _from_groups(self, head: Head, kind: Kind, version: int) -> list[Piece]:
        """The first rank gets the pieces, and hands them on within the worker."""
        own: list[Piece] = []

        def get() -> tuple[list[int], str | None]:
            try:
                own.extend(self._groups.read(head, kind, version))
            except ConnectionError as error:
                return [], str(error)
            return [len(piece) for piece in own], None

        sizes, failure = distributed.first(get)
        if failure is not None:
            raise ConnectionError(failure)
        if distributed.world_size() == 1:
            return own
        pieces: list[Piece] = []
        for number, size in enumerate(sizes):
            box = torch.empty(size, dtype=torch.uint8)
            if own:
                box = torch.frombuffer(own[number], dtype=torch.uint8)
            box = box.to(platform.device())
            dist.broadcast(box, src=0)
            pieces.append(memoryview(box.cpu().numpy()))
        return pieces
