"""Signals that ask to stop."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_told: list[Callable[[int], None]] = []  # whom signals call now, the innermost last
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal is gone


@contextmanager
def handling(tell: Callable[[int], None], numbers: Sequence[int] = STOP, once: bool = False) -> Iterator[None]:
    """Inside, these signals call `tell`; with `once` the first does, and a second one acts as it did before.

    What ends as if nobody had asked it to stop, because it was about to end anyway, leaves that to whoever is outside.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            _leave_terminal()
        received.append(signum)
        tell(signum)
        if once:
            restore()

    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []  # under nohup
    before = {number: signal.signal(number, handle) for number in numbers if number not in ignored}
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)
        restore()
    if received and _told:
        _told[-1](received[0])


def output_closed() -> None:
    """Nobody reads what is printed: as at a hang-up, whoever saves what there is does so, and anybody else ends."""
    if not _told:
        raise SystemExit(128 + signal.SIGPIPE)
    _told[-1](signal.SIGPIPE)


def _leave_terminal() -> None:
    """Has output that went to the terminal, which is gone, go nowhere: to write there would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for out in (1, 2):
        if stat.S_ISCHR(os.fstat(out).st_mode):
            os.dup2(nowhere, out)
    os.close(nowhere)
