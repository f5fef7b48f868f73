"""Payloads over process groups of torch.distributed (gloo or NCCL), for workers of the same job.

Trainer and workers are worlds of their own, so that a worker may die and join again. Each trainer
rank that sends keeps its pieces in host memory and has a thread that gives them to whoever asks:

    asked/PIECE     queue in the trainer's TCPStore: questions to the rank that has PIECE (JSON)
    LINK/PIECE/…    rendezvous of the group of two, that rank and a worker's first one
    int64 [2]       answer to a question: its number, and the piece's bytes (-1: not here)
    uint8 [bytes]   the piece itself, in messages of at most `MESSAGE` bytes

A piece is what the file transport writes: header, blocks, checksum (see `sync.payload`). Training
waits for no worker. What fails on the way ends a link; the worker's next question comes by another.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from megatron_logra import distributed, platform
from megatron_logra.errors import UserError
from megatron_logra.sync.payload import Kind, Piece
from megatron_logra.sync.sender import Sender
from megatron_logra.sync.transport import Head, Publisher, version_name

Backend = Literal["gloo", "nccl"]
Log = dict[tuple[Kind, int], torch.Tensor]
"""Pieces, uint8 on the CPU, by kind and version."""

MESSAGE = 2**26
"""Bytes of one message: each of them may take as long as the time limit."""
LOGGED = 10
"""Updates before the newest refresh that are kept, for workers that are a little behind."""
_POLL_S = 0.01
_CONNECT_S = 60.0
_LEAVE_S = 5.0


class GroupSender(Publisher):
    """Offers a trainer's updates to workers that ask for them over process groups.

    Host memory of each rank that sends: its pieces of the newest refresh, of the updates since,
    and of `LOGGED` ones before.

    Args:
        directory: shared with the receivers, for HEAD and wishes; made if it is missing.
        sender: makes the pieces.
        backend: `gloo` from host memory, `nccl` from this rank's GPU.
        host: address of this process under which workers find it, on rank 0. Default: MASTER_ADDR.
        timeout_s: longest wait for a worker that has asked to take a message; others wait with it.
        refresh_interval: updates between whole weights.
        dense: send whole weights each time, and no updates.

    Raises:
        UserError: `nccl` without a GPU.
    """

    def __init__(
        self,
        directory: Path,
        sender: Sender,
        *,
        backend: Backend = "gloo",
        host: str | None = None,
        timeout_s: float = 60.0,
        refresh_interval: int = 100,
        dense: bool = False,
    ) -> None:
        super().__init__(directory, sender, refresh_interval=refresh_interval, dense=dense)
        _check(backend)
        self.backend = backend
        self._log: Log = {}
        timeout = timedelta(seconds=timeout_s)
        host = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
        store = None
        if distributed.rank() == 0:
            store = distributed.hosted_store(host, 0, timeout)
        self.address: str = distributed.first(lambda: f"{host}:{store.port if store else 0}")
        self._pieces = sum(distributed.each(lambda: sender.sends))
        self._server: _Server | None = None
        if sender.sends:
            store = store or _connect(self.address, timeout)
            self._server = _Server(store, sender.piece, self._log, backend, timeout)
            self._server.start()

    def close(self) -> None:
        """Answer no more questions."""
        if self._server is not None:
            self._server.close()

    def _put(self, kind: Kind, version: int, data: bytearray) -> None:
        self._log[kind, version] = torch.frombuffer(data, dtype=torch.uint8)

    def _forget(self, refreshed: int) -> None:
        for kind, version in list(self._log):
            oldest = refreshed if kind == "refresh" else refreshed - LOGGED + 1
            if version < oldest:
                del self._log[kind, version]

    def _head(self, version: int) -> Head:
        return Head(
            self.sender.run,
            version,
            self._refreshed,
            self.dense,
            self.backend,
            self.address,
            self._pieces,
        )


class _Server(threading.Thread):
    """Answers the questions to one trainer rank, one after the other."""

    def __init__(
        self, store: dist.Store, piece: int, log: Log, backend: Backend, timeout: timedelta
    ) -> None:
        super().__init__(name="weights for rollout workers", daemon=True)
        self._store = store
        self._piece = piece
        self._log = log
        self._backend = backend
        self._timeout = timeout
        self._groups: dict[str, tuple[str, _Pair]] = {}
        """By worker: its newest link, and the group of it."""
        self._device = platform.device()
        self._closed = threading.Event()

    def close(self) -> None:
        """End, after the answer that is being given unless a worker does not take it."""
        self._closed.set()
        self.join(_LEAVE_S)

    def run(self) -> None:
        if self._backend == "nccl":  # a thread begins with the first GPU
            torch.cuda.set_device(self._device)
        asked = f"asked/{self._piece}"
        try:
            while not self._closed.wait(_POLL_S):
                while not self._closed.is_set() and self._store.queue_len(asked):
                    self._answer(self._store.queue_pop(asked))
        except dist.DistError:
            return  # the store is gone, and the trainer's first rank with it: the run ends

    def _answer(self, question: bytes) -> None:
        try:
            asked = json.loads(question)
            worker, link, number = str(asked["worker"]), str(asked["link"]), int(asked["number"])
            wanted: tuple[Kind, int] = (asked["kind"], int(asked["version"]))
            piece = self._log.get(wanted)
        except (ValueError, TypeError, KeyError):
            _say(f"not a question for weights, passed over: {question[:80]!r}")
            return
        try:
            if self._groups.get(worker, ("", None))[0] != link:
                self._groups.pop(worker, None)
                pair = _Pair(self._store, link, self._piece, 0, self._backend, self._timeout)
                self._groups[worker] = link, pair
            _, pair = self._groups[worker]
            pair.send(torch.tensor([number, -1 if piece is None else len(piece)]))
            if piece is not None:
                for message in piece.split(MESSAGE):
                    pair.send(message)
        except RuntimeError as error:
            self._groups.pop(worker, None)
            _say(f"rollout {worker} has not taken {version_name(*wanted)}: {_first_line(error)}")


class GroupReader:
    """A worker's end, on its first rank.

    Args:
        name: names the worker; of two that have the same, only the later one is served.
        timeout_s: longest wait for a message, which may have to wait for other workers' ones.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout = timedelta(seconds=timeout_s)
        self._link: _Link | None = None

    def read(self, head: Head, kind: Kind, version: int) -> list[Piece]:
        """The pieces that the trainer has of a version.

        Raises:
            ConnectionError: it is gone, does not send in time, or answers another question.
            UserError: `nccl` without a GPU.
        """
        _check(head.transport)
        if self._link is not None and self._link.head.address != head.address:
            self._link = None  # of a former start of the trainer
        try:
            if self._link is None:
                self._link = _Link(head, self.name, self.timeout)
            return self._link.ask(kind, version)
        except (RuntimeError, OSError) as error:
            self._link = None
            raise ConnectionError(f"{head.address}: {_first_line(error)}") from None


class _Link:
    """A worker's groups of two with all trainer ranks that send."""

    def __init__(self, head: Head, worker: str, timeout: timedelta) -> None:
        self.head = head
        self._worker = worker
        self._timeout = timeout
        self._store = _connect(head.address, timeout)
        self._name = secrets.token_hex(8)
        self._pairs: list[_Pair] = []
        self._number = 0

    def ask(self, kind: Kind, version: int) -> list[Piece]:
        self._number += 1
        question = {"worker": self._worker, "link": self._name, "number": self._number}
        question |= {"kind": kind, "version": version}
        found = [self._take(piece, json.dumps(question)) for piece in range(self.head.pieces)]
        return [data for data in found if data is not None]

    def _take(self, piece: int, question: str) -> Piece | None:
        # A rank is asked when its piece is next: it has not to wait until others have sent theirs.
        self._store.queue_push(f"asked/{piece}", question)
        if piece == len(self._pairs):
            backend = self.head.transport
            self._pairs.append(_Pair(self._store, self._name, piece, 1, backend, self._timeout))
        pair = self._pairs[piece]
        number, size = pair.receive(torch.empty(2, dtype=torch.int64)).tolist()
        if number != self._number:
            raise ConnectionError(f"answer to question {number}, but asked was {self._number}")
        if size < 0:
            return None
        whole = torch.empty(size, dtype=torch.uint8)
        for message in whole.split(MESSAGE):
            pair.receive(message)
        return memoryview(whole.numpy())


class _Pair:
    """A process group of a trainer rank (0) and a worker's first one (1)."""

    def __init__(
        self,
        store: dist.Store,
        link: str,
        piece: int,
        rank: int,
        backend: str,
        timeout: timedelta,
    ) -> None:
        self._other = 1 - rank
        place = dist.PrefixStore(f"{link}/{piece}", store)
        self._group: Any  # torch's stubs know no send and recv of these classes
        if backend == "gloo":
            self._device = torch.device("cpu")
            self._group = dist.ProcessGroupGloo(place, rank, 2, timeout)
        else:
            self._device = platform.device()
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(place, rank, 2, options)

    def send(self, values: torch.Tensor) -> None:
        """Send a tensor of the CPU."""
        self._group.send([values.to(self._device)], self._other, 0).wait()

    def receive(self, values: torch.Tensor) -> torch.Tensor:
        """Fill a tensor of the CPU, and return it."""
        box = values.to(self._device)
        self._group.recv([box], self._other, 0).wait()
        return values.copy_(box) if box is not values else values


def _check(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise UserError("rollout.transport: nccl needs a GPU for each rank; expected gloo or files")


def _connect(address: str, timeout: timedelta) -> dist.TCPStore:
    """A client of the trainer's store.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    # torch would go on trying, and fill the screen.
    socket.create_connection((host, int(port)), _CONNECT_S).close()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _say(text: str) -> None:
    print(f"megatron-logra: {text}", file=sys.stderr, flush=True)
