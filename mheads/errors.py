"""Errors that are the user's to mend."""


class UserError(Exception):
    """A mistake in what the user gave: its message says what, where, and what to do next.

    The command line shows the message alone, without a traceback, and exits with code 2.
    """


def named(error: BaseException) -> str:
    """An error of somebody else's code, with its kind."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
