"""Errors that are the user's to mend."""


class UserError(Exception):
    """A mistake in what the user gave: its message says what, where, and what to do next.

    The command line shows the message alone, without a traceback, and exits with code 2.
    """
