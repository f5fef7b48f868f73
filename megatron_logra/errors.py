"""The two ways in which a run ends early on purpose."""


class UserError(Exception):
    """The user's input is wrong: one line that names the key, file or value and what was expected.

    The command line prints the message alone and exits with code 2.
    """


class StopRequested(Exception):
    """A signal asked the run to stop; a checkpoint has been saved (exit code 75)."""
