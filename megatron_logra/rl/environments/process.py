"""A worker process that can be killed: the only time limit that also holds inside C code, in
threads, and against code that catches every exception.

The worker is a fresh interpreter that talks over a socket. It inherits no torch state, does not
import the program's main module, and has a fixed hash seed, so that problem generators that
iterate over sets give the same problems in every run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from megatron_logra.errors import UserError, one_line

_START_LIMIT_S = 300.0  # importing libraries and building data sets on a busy machine
_STDERR = 2
_START_CODE = "import sys; from {module} import serve; serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Failure:
    """A call that gave no result."""

    reason: str


class WorkerProcess:
    """Runs the methods of one object in a process of its own; started by the first call.

    Calls from several threads wait for each other. A call that exceeds its limit kills the
    process; the next call starts a new one, with a new object.

    Args:
        factory: `module:name` of the callable that makes the object, inside the worker.
        arguments: its keyword arguments (pickled).
        label: how errors name this worker.
        quiet: drop what the worker prints; otherwise it goes to standard error.
    """

    def __init__(
        self, factory: str, arguments: dict[str, Any], *, label: str, quiet: bool = True
    ) -> None:
        self._factory, self._arguments = factory, arguments
        self._label, self._quiet = label, quiet
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """The running worker's process id, None when there is none."""
        return self._process.pid if self._process is not None else None

    def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """The result of one method.

        Raises:
            UserError: the method raised one, failed otherwise, or took longer than `limit_s`.
        """
        (result,) = self.map(method, [arguments], limit_s=limit_s)
        if isinstance(result, Failure):
            raise UserError(f"{self._label}: {method.replace('_', ' ')}: {result.reason}")
        return result

    def map(self, method: str, calls: Sequence[tuple[Any, ...]], *, limit_s: float) -> list[Any]:
        """The results of one method for many tuples of arguments, in one message.

        Returns:
            As many entries as `calls`, in their order. An entry is a `Failure` if its call raised
            an exception, took longer than `limit_s` seconds or took the process down.

        Raises:
            UserError: the object could not be made, or a call raised UserError.
        """
        results: list[Any] = []
        with self._lock:
            while len(results) < len(calls):
                if self._process is not None and self._process.poll() is not None:
                    self._stop()  # it died while nobody asked it anything
                connection = self._connection or self._start()
                try:
                    connection.send((method, list(calls[len(results) :]), limit_s))
                    while len(results) < len(calls):
                        if not connection.poll(limit_s):
                            self._stop()
                            results.append(Failure(f"took longer than {limit_s:g} s"))
                            break
                        results.append(self._unpack(connection.recv()))
                except (EOFError, ConnectionError):
                    self._stop()
                    results.append(Failure("the process ended unexpectedly"))
                except BaseException:
                    self._stop()  # results still to come would be taken for those of another call
                    raise
        return results

    def close(self) -> None:
        """End the process; a later call starts it again."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
        # The user's modules may lie in the working directory, as with `python -m`.
        environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), os.getcwd()])
        # Slurm sends a request to stop to every process of a job; it is for the trainer, which ends
        # its step first. A blocked signal stays blocked in the child.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        with theirs, _signals_restored(former):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START_CODE.format(module=__name__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self._quiet else _STDERR,
                start_new_session=True,  # Ctrl-C is for the trainer, and killpg for us
            )
        self._connection = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, os.getpid())
        try:
            self._connection.send((self._factory, self._arguments))
            if not self._connection.poll(_START_LIMIT_S):
                raise UserError(f"{self._label}: start took longer than {_START_LIMIT_S:g} s")
            answer = self._unpack(self._connection.recv())
        except (EOFError, ConnectionError):
            self._stop()
            raise UserError(f"{self._label}: its worker process ended at the start") from None
        except BaseException:
            self._stop()
            raise
        if isinstance(answer, Failure):
            self._stop()
            raise UserError(f"{self._label}: {answer.reason}")
        return self._connection

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._connection = self._finalizer = None

    def _unpack(self, message: tuple[str, Any]) -> Any:
        kind, value = message
        if kind == "user_error":
            raise UserError(f"{self._label}: {value}")
        return Failure(value) if kind == "failure" else value


@contextlib.contextmanager
def _signals_restored(mask: Iterable[int]) -> Iterator[None]:
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return  # a fork of the program ends; the worker is not its own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(descriptor: int) -> None:
    """The worker's main loop: make the object, then answer calls until the socket closes."""
    with contextlib.suppress(EOFError, ConnectionError):  # the program has ended
        _answer(Connection(descriptor))


def _answer(connection: Connection) -> None:
    factory, arguments = connection.recv()
    made: list[Any] = []

    def make() -> None:
        module, _, name = factory.partition(":")
        made.append(getattr(import_module(module), name)(**arguments))

    connection.send(_guarded(make))
    while made:
        method, calls, limit_s = connection.recv()
        function = getattr(made[0], method)
        for call in calls:
            # Should the parent die, nobody is left to kill us: the kernel does, after more
            # processor time than the parent would have waited.
            signal.setitimer(signal.ITIMER_PROF, (2 * limit_s + 10) * (os.cpu_count() or 1))
            reply = _guarded(function, *call)
            signal.setitimer(signal.ITIMER_PROF, 0)
            try:
                connection.send(reply)
            except ConnectionError:
                raise
            except Exception as error:  # not picklable
                connection.send(("failure", one_line(error)[:500]))


def _guarded(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "result", function(*arguments)
    except UserError as error:
        return "user_error", str(error)
    except (Exception, SystemExit) as error:
        return "failure", one_line(error)[:500]
