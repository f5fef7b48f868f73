"""Files that other processes read while a run goes on: there whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_logra.errors import UserError


def write(path: Path, data: bytes | bytearray, *, flush: bool = True) -> None:
    """Write a file under another name and rename it; its directory is made if it is missing.

    Args:
        flush: have it on disk before it gets its name, so that it outlives a crash of the machine.

    Raises:
        OSError: it cannot be written; what had its name before is untouched.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextmanager
def explained(directory: Path, what: str, consequence: str = "") -> Iterator[None]:
    """Within: an OSError about files of `directory` becomes a `UserError`.

    Args:
        what: the files, for people.
        consequence: of their not being written.
    """
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(directory).free / 2**20 if directory.exists() else 0
        raise UserError(
            f"{directory}: {what} not written ({error.strerror}; {free:.0f} MiB free there)"
            + (f"; {consequence}" if consequence else "")
        ) from error
