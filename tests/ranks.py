"""A pool of processes that stand ready to be the ranks of small runs over gloo.

Importing torch and Megatron takes seconds a process, so they are started once a session.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIME_LIMIT = 240.0  # seconds for one run


class Ranks:
    """Up to `size` processes; more are started when they are first needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on ranks 0 … world_size - 1; returns their results in order.

        Raises:
            RuntimeError: with the traceback of the first rank that failed.
        """
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        team = self._workers[:world_size]
        for rank, (_, pipe) in enumerate(team):
            pipe.send((rank, world_size, port, function, args))
        results = []
        for rank, (_, pipe) in enumerate(team):
            if not pipe.poll(TIME_LIMIT):
                self.close()
                raise RuntimeError(f"rank {rank} gave no answer in {TIME_LIMIT:.0f} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.close()
                raise RuntimeError(f"rank {rank} of {world_size} has died") from None
        for rank, (failure, _) in enumerate(results):
            if failure:
                self.close()  # the others may hang in a collective
                raise RuntimeError(f"rank {rank} of {world_size}:\n{failure}")
        return [value for _, value in results]

    def close(self) -> None:
        """End all processes."""
        for process, _ in self._workers:
            process.kill()
        self._workers.clear()


def _serve(pipe: Connection) -> None:
    import torch
    from torch import distributed as dist

    from megatron_logra import distributed, platform

    torch.set_num_threads(1)
    platform.install()
    from megatron.core.distributed import DistributedDataParallel

    while True:
        try:
            rank, world_size, port, function, args = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        try:
            result = function(*args)
            if dist.is_initialized():
                dist.barrier()  # no rank leaves its groups while another is still in them
            pipe.send((None, result))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
        finally:
            distributed.shutdown()
            # A group's threads end with its last reference. Megatron's DDP is never collected
            # (it and its gradient hooks hold each other through C++), so it is emptied.
            for thing in gc.get_objects():
                if type(thing) is DistributedDataParallel:
                    vars(thing).clear()
            gc.collect()
