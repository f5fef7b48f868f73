"""The ways in which a run ends early, and their exit codes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75


class UserError(Exception):
    """The user's input is wrong: one line that names the key, file or value and what was expected.

    The command line prints the message alone and exits with code 2.
    """


class StopRequested(Exception):
    """A signal asked the run to stop; a checkpoint has been saved (exit code 75)."""


@contextmanager
def speaking_of(section: str) -> Iterator[None]:
    """Within: what is wrong with a layout is said of the section that it was made from."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("parallel.", f"{section}.")) from None


def one_line(error: BaseException) -> str:
    """An error's kind and text, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def lost_a_rank(error: BaseException) -> bool:
    """Whether `error` is what a rank sees when another one has ended."""
    return several_ranks() and any(text in str(error) for text in _LOST)


def several_ranks() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    size = os.environ.get("WORLD_SIZE", "1")
    return size.isdecimal() and int(size) > 1


_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "Timed out waiting",
)
