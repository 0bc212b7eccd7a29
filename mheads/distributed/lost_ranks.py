"""The watch over the other ranks: who is lost, who hangs, and that all end with the name of the first.

Every rank tells the store how far it is, again and again (its beat). The main rank watches all, all watch the main
rank. A rank whose beat stands still is lost; one whose beat continues, but which has work and makes no progress,
hangs; one that only waits for others is innocent, however long that takes. Whoever finds a fault first writes it down
for all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mheads.common.console import clean
from mheads.common.errors import UserError
from mheads.distributed.rendezvous import Store, ask, in_background

FAULT = "fault"
TIMEOUT = 60.0  # until the recipe says otherwise
PATIENCE = 5.0  # seconds that a rank has to end by itself after a failure
EXIT_CODE = 3  # of a rank that ends because another one did
SILENT = "has given no sign of life"
GONE = "has ended, or its connection is lost; the same command goes on from the newest checkpoint"


class RankFailure(UserError):  # noqa: N818, it is the failure of another
    """Another rank is lost, hangs, or has given up."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class Watch:
    """What this rank tells of itself and sees of others, from the moment that all are there until `end`."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.failure: RankFailure | None = None
        self.over = threading.Event()  # nothing is a failure any more
        self.ending = False  # this rank says itself why it ends
        self._lock = threading.Lock()
        self._lost_connection = ""  # what a collective here said when it broke off
        self._suspected = 0.0  # since when a rank is known to have gone
        self.tell()
        self._store = store
        self._seen = {other: RankHeartbeat() for other in (range(1) if rank else range(1, size))}
        self._thread = threading.Thread(target=self._watch, name="mheads-watch", daemon=True)
        self._thread.start()

    def tell(
        self,
        fail: Callable[[RankFailure], None] | None = None,
        progress: Callable[[], int] = int,
        busy: Callable[[], bool] = bool,
    ) -> None:
        """Says whose progress the beat reports, and which function hears of a failure."""
        self._progress, self._busy = progress, busy
        with self._lock:
            self._on_failure = fail
            failure = self.failure
        if failure is not None and fail is not None:
            fail(failure)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def suspect(self, error: BaseException) -> None:
        """A collective failed: some rank has gone, and its beat will tell which. It may have said why."""
        self._lost_connection = self._lost_connection or f"rank {self.rank} lost a connection: {error}"
        self._suspected = self._suspected or time.monotonic()

    def report(self, rank: int, reason: str) -> None:
        """Writes a fault down for all ranks, unless there is one already: all end with the first."""
        self.fail(*self.write_down(rank, reason))

    def write_down(self, rank: int, reason: str) -> tuple[int, str]:
        """The first fault: who, and why."""
        kept = ask(self._store, lambda store: store.compare_set(FAULT, "", json.dumps([rank, reason])))
        # Whoever keeps the store may be gone: what we saw ourselves must do.
        return (rank, reason) if kept is None else tuple(json.loads(kept))

    def fail(self, rank: int, reason: str) -> None:
        with self._lock:
            if self.failure is not None or self.over.is_set():
                return
            self.failure = RankFailure(rank, reason)
            tell = self._on_failure
        # The work in hand is finished and what is being saved is saved; but if it is this rank that hangs, it never is.
        last_resort = threading.Timer(PATIENCE, self._leave_anyhow)
        last_resort.daemon = True
        last_resort.start()
        if tell is not None:
            tell(self.failure)

    def end(self) -> None:
        """Ends the watch when all ranks are done: from here on the end of a rank is not a failure."""
        self.over.set()
        self._thread.join(PATIENCE)

    def _leave_anyhow(self) -> None:
        if not self.ending:
            if sys.stdout.isatty():
                print("\x1b[?25h", end="")  # a progress bar has hidden the cursor
            name = f"rank {self.rank} " if self.rank else ""
            print(clean(f"{name}error: {self.failure}"), file=sys.stderr)
        leave(EXIT_CODE)

    @property
    def _pause(self) -> float:
        return min(0.5, self.timeout / 10)

    def _watch(self) -> None:
        """Tells how far this rank is, and looks at those it watches, as long as the store answers."""
        store, beats, now = self._store.clone(), 0, time.monotonic()
        answer, answered = None, now
        while self.failure is None and not self.over.wait(self._pause if beats else 0):
            before, now = now, time.monotonic()
            if now - before > self.timeout / 2:
                # This process was stopped for a while, perhaps with all others: they get the time to say something.
                answered = now
                for one in self._seen.values():
                    one.alive = one.moved = now
            answer = answer or in_background(lambda: self._exchange(store, beats))  # noqa: B023
            try:
                fault, heard = answer.result(self._pause)
            except TimeoutError:
                if now - answered > self.timeout:
                    self.fail(
                        0,
                        f"rank 0 cannot be reached: its store has not answered for {self.timeout:g} s (timeout); "
                        "its process or machine is gone, or the network between is cut",
                    )
                continue
            except RuntimeError:
                fault, heard = (0, f"rank 0 {GONE}"), {}
            answer, answered, beats = None, now, beats + 1
            for rank, (suspects, *beat) in heard.items():
                self._seen[rank].hear(beat, now)
                self._suspected = self._suspected or (now if suspects else 0.0)
            if fault is not None:
                self.fail(*fault)
            else:
                self._accuse(now)

    def _exchange(self, store: Store, count: int) -> tuple[tuple[int, str] | None, dict[int, Any]]:
        """Tells the store of this rank; the fault that is written down there, and the beats of those it watches."""
        beat = [self._suspected > 0, count, self._progress(), bool(self._busy())]
        store.set(f"beat/{self.rank}", json.dumps(beat))
        begun = [rank for rank, one in self._seen.items() if one.beat[0] is not None or store.check([f"beat/{rank}"])]
        beats = store.multi_get([f"beat/{rank}" for rank in begun]) if begun else []
        fault = tuple(json.loads(store.get(FAULT))) if store.check([FAULT]) else None
        return fault, dict(zip(begun, map(json.loads, beats), strict=True))

    def _accuse(self, now: float) -> None:
        """Reports the first of those it watches that is lost or hangs."""
        for rank, one in self._seen.items():
            # If a rank is known to have gone, four beats are enough.
            if self._suspected and now - max(one.alive, self._suspected - 1) > 4 * self._pause:
                return self.report(rank, f"rank {rank} {GONE}")
            if reason := one.judge(now, self.timeout):
                text = f"rank {rank} {reason} for {self.timeout:g} s (timeout)"
                quiet = [now - other.alive > self.timeout / 2 for other in self._seen.values()]
                if reason == SILENT and len(quiet) > 1 and all(quiet):
                    text += ", nor has any other: the network of rank 0 may be cut"
                return self.report(rank, text)
        if self._lost_connection and now - self._suspected > self.timeout:
            self.report(self.rank, self._lost_connection)
        return None


class RankHeartbeat:
    """What a watcher remembers of a rank."""

    def __init__(self) -> None:
        self.beat: Sequence[Any] = (None, None, False)
        self.alive = self.moved = time.monotonic()

    def hear(self, beat: Sequence[Any], now: float) -> None:
        count, progress, busy = beat
        if count != self.beat[0]:
            self.alive = now
        if progress != self.beat[1] or not busy:
            self.moved = now
        self.beat = beat

    def judge(self, now: float, timeout: float) -> str | None:
        if now - self.alive > timeout:
            return SILENT
        if self.beat[2] and now - self.moved > timeout:
            return "has work and made no progress"
        return None


def leave(code: int) -> NoReturn:
    """Ends this process at once: threads that wait for a lost rank would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
