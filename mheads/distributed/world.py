"""The processes of a run: how they find each other, agree, notice that one is lost, and leave.

Every rank tells the store how far it is, again and again (its beat). The lead watches all, all watch the lead. A rank
whose beat stands still is lost; one whose beat goes on, but which has work and makes no progress, hangs; one that only
waits for others is innocent, however long that takes. Whoever finds a fault first writes it down for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import mheads
from mheads.distributed.comm import Courier
from mheads.distributed.launch import Launch, rendezvous, use_interface
from mheads.engine.threads import available_cores
from mheads.errors import UserError

T = TypeVar("T")
FAULT = "fault"
TIMEOUT = 60.0  # until the recipe says otherwise
PATIENCE = 5.0  # seconds that a rank has to end by itself after a failure
EXIT_CODE = 3  # of a rank that ends because another one did
NEVER = timedelta(days=365)  # gloo must not judge by the clock


class RankFailure(UserError):  # noqa: N818, it is the failure of another
    """Another rank is lost, hangs, or has given up."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class World:
    """This process among the others. `lead` is rank 0."""

    def __init__(self, launch: Launch, timeout: float = TIMEOUT) -> None:
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.lead = self.rank == 0
        self.timeout = timeout
        self._lock = threading.Lock()
        self.failure: RankFailure | None = None
        self.courier: Courier | None = None
        self.watch()
        self._closing = threading.Event()
        self._last_cycle = time.monotonic()
        self._counts: dict[str, int] = {}
        self.store = rendezvous(launch, max(timeout, 30.0))
        use_interface(launch)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size, timeout=NEVER)
        self._own_store = _clone(self.store)  # a client that hangs must not hang the others
        self._threads = [
            threading.Thread(target=target, name=f"mheads-{target.__name__}", daemon=True)
            for target in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def watch(
        self,
        fail: Callable[[RankFailure], None] | None = None,
        progress: Callable[[], int] = int,
        busy: Callable[[], bool] = bool,
    ) -> None:
        """What the beat tells of whoever works here, and who is told of a failure."""
        self._progress, self._busy = progress, busy
        with self._lock:
            self._on_failure = fail
            failure = self.failure
        if failure is not None and fail is not None:
            fail(failure)

    def open_courier(self, peers: Iterable[int]) -> Courier:
        """The traffic with other ranks, from now to the end."""
        self.courier = Courier(self.rank, peers, self.lost)
        return self.courier

    @property
    def cores(self) -> int:
        """Of this machine, those that are this rank's."""
        return max(1, available_cores() // self.launch.local_size)

    def bandwidth(self) -> float:
        """Bytes a second between the first rank and the last, measured there and back; every rank calls it."""
        last, block = self.size - 1, torch.zeros(1 << 20)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            if self.rank == 0:
                dist.send(block, last)
                dist.recv(block, last)
            elif self.rank == last:
                dist.recv(block, 0)
                dist.send(block, 0)
            seconds.append(time.perf_counter() - began)
        return 2 * block.nbytes / min(seconds)

    # Agreement, through the store: for the few things that are settled before training begins.

    def share(self, what: str, decide: Callable[[], Any]) -> Any:
        """What the lead decides, plain data, on every rank."""
        key = self._key(what)
        if self.lead:
            self.store.set(key, json.dumps(decide()))
        return json.loads(self._get(key))

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Refuses, on all ranks, if a rank differs from the lead in any of these facts."""
        key = self._key(what)
        self.store.set(f"{key}/{self.rank}", json.dumps(facts))

        def differences() -> list[str]:
            lines = []
            for rank in range(1, self.size):
                theirs = json.loads(self._get(f"{key}/{rank}"))
                here, there = facts.get("host"), theirs.get("host")
                for name in facts:
                    if name != "host" and theirs.get(name) != facts[name]:
                        at = "" if here == there else f" ({there})"
                        values = f"{theirs.get(name)!r} there, {facts[name]!r} on rank 0"
                        lines.append(f"  rank {rank}{at} has another {name}: {values}")
            return lines

        found = self.share(f"{what}-differences", differences)
        if found:
            more = [f"  and {len(found) - 10} more"] if len(found) > 10 else []
            raise UserError("the ranks do not agree:\n" + "\n".join(found[:10] + more))

    def _key(self, what: str) -> str:
        """Each agreement has a key of its own; all ranks come to the same ones in the same order."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{what}/{count}"

    def _get(self, key: str) -> bytes:
        while not self.store.check([key]):
            self.check()
            self._closing.wait(0.02)
        return self.store.get(key)

    # Faults.

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def lost(self, rank: int, error: BaseException) -> None:
        """The connection to a rank broke. It may have left because of another's fault, which it then wrote down."""
        if not self._closing.is_set():
            self.report(rank, str(error))

    def report(self, rank: int, reason: str) -> None:
        """A fault, written down for all unless there is one: everybody ends with the first."""
        self._fail(*self._write_fault(rank, reason))

    def _write_fault(self, rank: int, reason: str) -> tuple[int, str]:
        """The first fault: who, and why."""
        with suppress(RuntimeError, TimeoutError):  # whoever keeps the store is gone: what we saw ourselves must do
            kept = self._try(lambda store: store.compare_set(FAULT, "", json.dumps([rank, reason])))
            rank, reason = json.loads(kept)
        return rank, reason

    def _try(self, ask: Callable[[Any], T], seconds: float = 3.0) -> T:
        """Asks the store from a thread of its own, since an answer may never come."""
        answers: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(ask(_clone(self.store)))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not answers:
            raise TimeoutError
        return answers[0]

    def _fail(self, rank: int, reason: str) -> None:
        with self._lock:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure = RankFailure(rank, reason)
            tell = self._on_failure
        # The work in hand is finished and what is being saved is saved; but if it is this rank that hangs, it never is.
        last_resort = threading.Timer(PATIENCE, self._leave_anyhow)
        last_resort.daemon = True
        last_resort.start()
        if tell is not None:
            tell(self.failure)

    def _leave_anyhow(self) -> None:
        name = "" if self.lead else f"rank {self.rank} "
        print(f"{name}error: {self.failure}", file=sys.stderr)
        leave(EXIT_CODE)

    def _beat(self) -> None:
        """Tells how far this rank is, and looks at those it watches."""
        store = self._own_store
        watched = range(1, self.size) if self.lead else range(1)
        seen = {rank: _Seen() for rank in watched}
        count = 0
        while not self._closing.is_set():
            try:
                store.set(f"beat/{self.rank}", json.dumps([count, self._progress(), bool(self._busy())]))
                if store.check([FAULT]):
                    self._fail(*json.loads(store.get(FAULT)))
                    return
                present = [rank for rank in watched if store.check([f"beat/{rank}"])]
                beats = store.multi_get([f"beat/{rank}" for rank in present]) if present else []
            except RuntimeError:
                return  # the guard will notice that this has ended
            now = self._last_cycle = time.monotonic()
            for rank, beat in zip(present, beats, strict=True):
                reason = seen[rank].judge(json.loads(beat), now, self.timeout)
                if reason:
                    self.report(rank, f"rank {rank} {reason} for {self.timeout:g} s (timeout)")
                    return
            count += 1
            self._closing.wait(min(0.5, self.timeout / 10))

    def _guard(self) -> None:
        """Notices that the store does not answer."""
        while not self._closing.wait(min(0.5, self.timeout / 10)):
            if self.failure is None and time.monotonic() - self._last_cycle > self.timeout:
                self._fail(
                    0,
                    f"rank 0 cannot be reached: its store has not answered for {self.timeout:g} s (timeout); "
                    "its process or machine is gone, or the network between is cut",
                )

    # Leaving.

    def close(self) -> None:
        """When all is done: nobody leaves before all are here, or the store would go with the first."""
        if self.courier is not None:
            self.courier.close()
        self.store.set(f"done/{self.rank}", "1")
        if self.lead:
            for rank in range(self.size):
                self._get(f"done/{rank}")
            self.store.set("all-done", "1")
        self._get("all-done")
        self._closing.set()
        for thread in self._threads:
            thread.join()
        dist.barrier()
        dist.destroy_process_group()

    def abort(self, error: BaseException) -> bool:
        """Tells the others why this rank ends. Whether this rank should say so itself: not if the lead does."""
        if isinstance(error, RankFailure):
            return True
        text = str(error) or type(error).__name__
        self._tell(f"error/{self.rank}", text)
        # A mistake that all ranks find is reported by one.
        told = not self.lead and self._appears(["error/0"], 2)
        self._write_fault(self.rank, f"rank {self.rank} gave up: {text}")
        return not told

    def farewell(self, error: BaseException) -> None:
        """The lead may keep the store: it stays until the others have read what happened, or for a moment."""
        self._tell(f"gone/{self.rank}", "1")
        if self.lead:
            guilty = error.rank if isinstance(error, RankFailure) else self.rank
            self._appears([f"gone/{rank}" for rank in range(self.size) if rank != guilty], 3)

    def _tell(self, key: str, text: str) -> None:
        with suppress(RuntimeError, TimeoutError):
            self._try(lambda store: store.set(key, text))

    def _appears(self, keys: list[str], seconds: float) -> bool:
        """Whether the store gets these keys in time."""

        def look(store: Any) -> bool:
            until = time.monotonic() + seconds
            while not (found := store.check(keys)) and time.monotonic() < until:
                time.sleep(0.02)
            return found

        with suppress(RuntimeError, TimeoutError):
            return self._try(look, seconds + 1)
        return False

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks before anything is built."""
        return {
            "host": socket.gethostname(),
            "mheads version": mheads.__version__,
            "code (checksum of the package)": _code_checksum(),
            "torch version": torch.__version__,
            "Python version": platform.python_version(),
        }


class _Seen:
    """What a watcher remembers of a rank."""

    def __init__(self) -> None:
        self.beat: list[Any] = [None, None, False]
        self.alive = self.moved = time.monotonic()

    def judge(self, beat: Sequence[Any], now: float, timeout: float) -> str | None:
        count, progress, busy = beat
        if count != self.beat[0]:
            self.alive = now
        if progress != self.beat[1] or not busy:
            self.moved = now
        self.beat = list(beat)
        if now - self.alive > timeout:
            return "has given no sign of life"
        if now - self.moved > timeout:
            return "has work and made no progress"
        return None


def leave(code: int) -> None:
    """Ends this process at once: threads that wait for a lost rank would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store


def _code_checksum() -> str:
    digest = hashlib.sha256()
    root = Path(mheads.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
