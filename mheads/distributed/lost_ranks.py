"""The watch over the other ranks: who is lost, who hangs, and that all end with the name of the first.

Every rank tells the store how it is, again and again (its beat). The main rank watches all, all watch the main rank. A
rank whose beat stands still is lost; one whose beat continues, but which has work and makes no progress, hangs; one
that only waits for others is innocent, however long that takes. Whoever finds a fault first writes it down for all.
Time is counted in beats of one's own, so a process that was stopped for a while, as with all others by a laptop that
sleeps, blames nobody.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from mheads.common.console import clean
from mheads.common.errors import UserError
from mheads.distributed.rendezvous import Store, ask, in_background

FAULT, SUSPICION = "fault", "suspicion"  # keys of the store
TIMEOUT = 60.0  # until the recipe says otherwise
PATIENCE = 5.0  # seconds that a rank has to end by itself after a failure
SOON = 4  # beats in which a rank that is alive gives a sign of it
EXIT_CODE = 3  # of a rank that ends because another one did
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
        self.tell()
        self._store, self._watched = store, range(1) if rank else range(1, size)
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

    def _watch(self) -> None:
        """A beat, and a look at those it watches, again and again, as long as the store answers."""
        store, now, answer, answered, progress, idle, suspected = self._store.clone(), 0, None, 0, 0, 0, 0
        heard: dict[int, tuple[list[int], int]] = {}  # of each rank the last beat, and when it came
        while self.failure is None and not self.over.wait(pause := min(0.5, self.timeout / 10)):
            now, limit = now + 1, self.timeout / pause
            before, progress = progress, self._progress()
            idle = idle + 1 if self._busy() and progress == before else 0
            if answer is not None and not answer.done():
                if now - answered > limit:
                    why = "its process or machine is gone, or the network between is cut"
                    unanswered = f"its store has not answered for {self.timeout:g} s (timeout)"
                    self.fail(0, f"rank 0 cannot be reached: {unanswered}; {why}")
                continue
            if answer is not None:
                try:
                    fault, suspicion, beats = answer.result()
                except RuntimeError:
                    fault, suspicion, beats = (0, f"rank 0 {GONE}"), False, {}
                heard |= {rank: (beat, now) for rank, beat in beats.items() if beat != heard.get(rank, (None, 0))[0]}
                suspected = suspected or now * suspicion
                if fault is not None:
                    self.fail(*fault)
                else:
                    self._accuse(heard, now, limit, suspected)
            answer, answered = in_background(partial(self._exchange, store, [now, idle], set(heard))), now

    def _exchange(
        self, store: Store, beat: list[int], known: set[int]
    ) -> tuple[tuple[int, str] | None, bool, dict[int, list[int]]]:
        """Tells the store of this rank; the fault that is written down there, and the beats of those it watches."""
        store.set(f"beat/{self.rank}", json.dumps(beat))
        if self._lost_connection:
            store.set(SUSPICION, "1")
        begun = [rank for rank in self._watched if rank in known or store.check([f"beat/{rank}"])]
        beats = store.multi_get([f"beat/{rank}" for rank in begun]) if begun else []
        fault = tuple(json.loads(store.get(FAULT))) if store.check([FAULT]) else None
        return fault, store.check([SUSPICION]), dict(zip(begun, map(json.loads, beats), strict=True))

    def _accuse(self, heard: dict[int, tuple[list[int], int]], now: int, limit: float, suspected: int) -> None:
        """Reports the first of those it watches that is lost or hangs."""
        for rank in self._watched:
            (_, idle), alive = heard.get(rank, ([0, 0], 0))
            if suspected and now - max(alive, suspected) > SOON:
                return self.report(rank, f"rank {rank} {GONE}")
            if now - alive > limit or idle > limit:
                what = "has given no sign of life" if now - alive > limit else "has work and made no progress"
                return self.report(rank, f"rank {rank} {what} for {self.timeout:g} s (timeout)")
        if self._lost_connection and suspected and now - suspected > limit:
            self.report(self.rank, self._lost_connection)
        return None


def leave(code: int) -> NoReturn:
    """Ends this process at once: threads that wait for a lost rank would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
