"""Which of a job's ranks train and which generate, for `train --workers-among-ranks`.

srun starts all ranks of a job in one step. With `rollout.placement: separate` the last of them
become the rollout workers, each a world of its own; the others train. A worker ends when the
trainer's first rank does, however that ends: what the job ends with is the trainer's to say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from datetime import timedelta
from typing import NoReturn

from torch import distributed as dist

from megatron_logra import launcher, stopping
from megatron_logra.config import Config
from megatron_logra.distributed import check_layout, shared_store
from megatron_logra.errors import UserError

_JOIN = timedelta(minutes=5)
_kept: list[dist.TCPStore] = []
"""The store that the first rank serves for as long as it lives."""


def take(config: Config) -> int | None:
    """Take this rank's role; called by all ranks of the job.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT become those of the world that it belongs to.

    Returns:
        The index of the rollout worker that this rank belongs to; None for a trainer's rank.

    Raises:
        UserError: the ranks do not suffice, a worker's are on two nodes, or not all have come.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("--workers-among-ranks: expected srun's ranks, got torchrun's")
    workers = config.rollout.workers
    generating, each = workers.count * workers.ranks, workers.ranks
    trainers = ranks - generating
    if trainers < 1:
        raise UserError(
            f"rollout.workers: {generating} ranks generate, of {ranks} that the job has; expected "
            "some that train"
        )
    check_layout(config.parallel, trainers)  # all ranks refuse it together
    _check_nodes(trainers, ranks, each)
    store = _meet(rank, ranks)
    if rank < trainers:
        index, first, size = None, 0, trainers
    else:
        index = (rank - trainers) // each
        first, size = trainers + index * each, each
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    port = f"port/{first}"
    if rank == first:
        store.set(port, str(launcher.free_port()))
    os.environ |= {
        "RANK": str(rank - first),
        "WORLD_SIZE": str(size),
        "MASTER_PORT": store.get(port).decode(),
    }
    if index is not None:
        for number in stopping.REQUESTS:  # the trainer's to act upon
            signal.signal(number, signal.SIG_IGN)
        # A plain connection to the first rank's store: torch's own fills the log when it breaks.
        lifeline = socket.create_connection((store.host, store.port))
        threading.Thread(target=_end_with_trainer, args=(lifeline,), daemon=True).start()
    return index


def _check_nodes(trainers: int, ranks: int, each: int) -> None:
    """Refuse a worker whose ranks are not all on one node: they meet at 127.0.0.1."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    for first in range(trainers, ranks, each):
        if first // local != (first + each - 1) // local:
            raise UserError(
                f"rollout.workers: ranks {first} to {first + each - 1} are one worker's, but not "
                f"all on a node of {local} ranks"
            )


def _meet(rank: int, ranks: int) -> dist.TCPStore:
    """Wait for all ranks of the job, so that every one sees how the first ends."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = shared_store(host, port, ranks, _JOIN, serve=rank == 0)
    except (OSError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"WORLD_SIZE={ranks}: not all ranks have come to {host}:{port}: {reason}"
        ) from None
    _kept.append(store)
    return store


def _end_with_trainer(lifeline: socket.socket) -> NoReturn:
    with contextlib.suppress(OSError):
        lifeline.recv(1)  # nothing comes, until the first rank is gone
    os._exit(0)
