"""`--nproc N`: the ranks of a run as N processes of the same command on this machine.

They find each other by the variables that torchrun sets, too. The launcher passes on requests to
stop, and ends all ranks once one has failed: without it the others would wait for it forever.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from megatron_logra import stopping
from megatron_logra.errors import EXIT_STOPPED, EXIT_USER_ERROR

_GRACE_S = 15.0
"""Seconds in which the other ranks may end by themselves once one has failed."""
_POLL_S = 0.05
_SPOKEN = "MEGATRON_LOGRA_SPOKEN"
"""Variable with the path of a file that the first rank to say why the run ends makes."""
_LIFELINE = "MEGATRON_LOGRA_LIFELINE"
"""Variable with the descriptor of a pipe that is closed when the launcher is gone."""


def is_rank() -> bool:
    """Whether this process is a rank that some launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks_for_all() -> bool:
    """Whether this rank is the one to say why the run ends; True for the first to ask.

    What one rank fails from comes before what the others then fail from, so it is the first. Under
    another launcher, each rank speaks for itself.
    """
    path = os.environ.get(_SPOKEN)
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone, and its directory with it
        return True
    return True


def stop_with_launcher() -> None:
    """Have this rank asked to stop, as by SIGTERM, if its launcher is killed."""
    descriptor = os.environ.get(_LIFELINE)
    if descriptor is None:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True)
class Helper:
    """A group of ranks that serves the run, and is started again if it dies."""

    arguments: Sequence[str]
    """Its command line."""
    ranks: int
    restarts: int
    """How often it may be started again."""


def launch(arguments: Sequence[str], ranks: int, helpers: Sequence[Helper] = ()) -> int:
    """Run the command line `arguments` on `ranks` local ranks.

    Args:
        helpers: groups of ranks that are started beside them and ended with them.

    Returns:
        The ranks' exit code: 2 if one found the user's input wrong, 75 if they stopped on request,
        0 if all are done, else 1.
    """
    lifeline, ours = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    tended: list[_Tended] = []
    try:
        with tempfile.TemporaryDirectory() as directory, _passing_on(processes) as interrupted:
            variables = {
                **os.environ,
                _SPOKEN: os.path.join(directory, "spoken"),
                _LIFELINE: str(lifeline),
            }
            # Megatron overlaps tensor-parallel reductions in the order of one queue.
            variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            # Else gloo listens where this host's name leads, if it does.
            if any(name == "lo" for _, name in socket.if_nameindex()):
                variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
            cores, everybody = len(os.sched_getaffinity(0)), ranks + sum(h.ranks for h in helpers)
            variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // everybody)))
            processes += _start(arguments, ranks, 0, variables)
            del variables[_SPOKEN]  # helpers speak for themselves
            device = ranks
            for helper in helpers:
                tended.append(_Tended(helper, device, variables))
                device += helper.ranks
            return _exit_code(_watch(processes, tended, interrupted))
    finally:
        for process in [*processes, *(process for group in tended for process in group.processes)]:
            process.kill()
            process.wait()
        os.close(lifeline)
        os.close(ours)


def _start(
    arguments: Sequence[str], ranks: int, first_device: int, variables: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of one group, which find each other at a port of their own."""
    common = {
        **variables,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_logra", *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(first_device + rank)},
            pass_fds=[int(variables[_LIFELINE])],
        )
        for rank in range(ranks)
    ]


class _Tended:
    """A helper's processes: if one dies, all of the group are started again."""

    def __init__(self, helper: Helper, first_device: int, variables: dict[str, str]) -> None:
        self.helper = helper
        self.restarts = 0
        self._start = lambda: _start(helper.arguments, helper.ranks, first_device, variables)
        self.processes = self._start()

    def tend(self) -> int | None:
        """Start the group again if one of it has died; its exit code, if it cannot be."""
        failed = [code for process in self.processes if (code := process.poll())]
        if not failed:
            return None
        for process in self.processes:
            process.kill()
            process.wait()
        ended = f"{' '.join(self.helper.arguments)}: ended with exit code {failed[0]}"
        if self.restarts == self.helper.restarts or failed[0] == EXIT_USER_ERROR:
            _say(f"{ended}; so the run ends")
            return failed[0]
        self.restarts += 1
        _say(f"{ended}; started again ({self.restarts} of {self.helper.restarts})")
        self.processes = self._start()
        return None


def _watch(
    processes: list[subprocess.Popen[bytes]], tended: list[_Tended], interrupted: stopping.Request
) -> dict[int, int]:
    """Wait until all have ended; returns the exit codes by rank of those not killed here."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    while len(codes) < len(processes):
        for rank, process in enumerate(processes):
            code = process.poll()
            if code is not None and rank not in codes:
                codes[rank] = code
        if deadline is None and (interrupted.made or any(codes.values())):
            deadline = time.monotonic() + _GRACE_S
        for group in tended if deadline is None else ():
            code = group.tend()
            if code is not None:
                return {0: code}
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for rank, code in codes.items():  # a rank that was killed could not say anything itself
        if code < 0:
            _say(f"rank {rank} was ended by {signal.Signals(-code).name}; so the run ends")
            return codes
    for rank, code in codes.items():
        if code not in (0, EXIT_USER_ERROR, EXIT_STOPPED):
            _say(f"rank {rank} ended with exit code {code}; so the run ends")
            return codes
    return codes


def _exit_code(codes: dict[int, int]) -> int:
    found = set(codes.values())
    if EXIT_USER_ERROR in found:
        return EXIT_USER_ERROR
    return found.pop() if found in ({0}, {EXIT_STOPPED}) else 1


@contextlib.contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[stopping.Request]:
    """Send SIGTERM and SIGUSR1 on to the ranks.

    A keyboard's SIGINT reaches them by itself; it makes the request that is yielded.
    """
    interrupted = stopping.Request()

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupted.make()
            return
        for process in processes:
            process.send_signal(number)  # not sent to one that has ended

    with stopping.handled(handle, (*stopping.REQUESTS, signal.SIGINT)):
        yield interrupted


def _say(text: str) -> None:
    print(f"megatron-logra: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port that nothing uses, below those that systems give to outgoing connections.

    The first rank only listens on it seconds later.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
