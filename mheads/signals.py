"""Signals that ask to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handling(tell: Callable[[int], None], numbers: Sequence[int] = STOP, once: bool = False) -> Iterator[None]:
    """Inside, these signals call `tell`; with `once` the first does, and a second one acts as it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(signum: int, frame: FrameType | None) -> None:
        tell(signum)
        if once:
            restore()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        restore()
