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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

import mheads
from mheads.console import clean
from mheads.distributed.comm import Courier
from mheads.distributed.launch import Launch, rendezvous, use_interface
from mheads.distributed.wire import GONE
from mheads.engine.threads import own_cores
from mheads.errors import UserError

T = TypeVar("T")
FAULT = "fault"
TIMEOUT = 60.0  # until the recipe says otherwise
TIMEOUT_TO_START = 30.0  # at least: some launchers are slow
PATIENCE = 5.0  # seconds that a rank has to end by itself after a failure
EXIT_CODE = 3  # of a rank that ends because another one did
NEVER = timedelta(days=365)  # gloo must not judge by the clock
SILENT = "has given no sign of life"
NETWORK = (
    "check that every host can open any port of every other (a firewall may leave only MASTER_PORT), and set "
    "GLOO_SOCKET_IFNAME to the interface that they have in common"
)


class RankFailure(UserError):  # noqa: N818, it is the failure of another
    """Another rank is lost, hangs, or has given up."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class World:
    """This process among the others. `lead` is rank 0."""

    def __init__(self, launch: Launch, timeout: float = TIMEOUT) -> None:
        """Others have `timeout` seconds to come and to connect; who is there has no less than 60 until all are."""
        to_start = max(timeout, TIMEOUT_TO_START)
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.lead = self.rank == 0
        self.timeout = max(timeout, TIMEOUT)  # from `build` on, what the recipe says
        self._lock = threading.Lock()
        self.failure: RankFailure | None = None
        self.courier: Courier | None = None
        self.watch()
        self._closing = threading.Event()
        self._ending = False  # whoever meets a failure says so
        self.cores = 1  # of this machine, those that are this rank's
        self._counts: dict[str, int] = {}
        self.store = rendezvous(launch, to_start)
        self._own_store = _clone(self.store)  # a client that hangs must not hang the others
        self._last_cycle = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name=f"mheads-{target.__name__}", daemon=True)
            for target in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()
        self._connect(to_start)

    def _connect(self, seconds: float) -> None:
        """Connects each rank with each. What goes wrong is a failure, which `check` raises.

        gloo waits for as long as it is told to wait for everything: a thread lets it, while the beat goes on.
        """
        interface, store = use_interface(self.launch), self._own_store
        store.set(f"place/{self.rank}", f"rank {self.rank} ({socket.gethostname()}, {interface or 'any interface'})")
        machine, cpus = f"machine/{_machine()}", own_cores()
        store.append(machine, json.dumps(cpus) + "\n")
        errors: list[Exception] = []

        def run() -> None:
            try:
                dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size, timeout=NEVER)
                store.set(f"connected/{self.rank}", "1")
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="mheads-connect", daemon=True)
        thread.start()
        keys = {rank: f"connected/{rank}" for rank in (range(self.size) if self.lead else [self.rank])}
        until = time.monotonic() + seconds
        try:
            while self.failure is None and not store.check(list(keys.values())):
                thread.join(0.02)
                if errors:
                    why = str(errors[0]).splitlines()[0]
                    self.report(self.rank, f"rank {self.rank} cannot use the network ({interface}): {why}; {NETWORK}")
                elif self.lead and time.monotonic() > until:
                    missing = [rank for rank, key in keys.items() if not store.check([key])]
                    who = ", ".join(store.get(f"place/{rank}").decode() for rank in missing)
                    self.report(0, f"not connected to all others after {seconds:g} s: {who}; {NETWORK}")
                elif not thread.is_alive():
                    time.sleep(0.02)
            # Each rank wrote down its cores before it began to connect.
            self.cores = share_of_cores(cpus, [json.loads(line) for line in store.get(machine).splitlines()])
        except RuntimeError:
            self._fail(0, f"rank 0 {GONE}")

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

    def bandwidth(self) -> float:
        """Bytes a second between the first rank and the last, measured there and back by these two; others get 0."""
        last, block = self.size - 1, torch.zeros(1 << 20)
        other = {0: last, last: 0}.get(self.rank)
        if other is None:
            return 0.0
        turns = (dist.send, dist.recv) if self.lead else (dist.recv, dist.send)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            try:
                for turn in turns:
                    turn(block, other)
            except RuntimeError:
                self.report(other, f"rank {other} {GONE}")
                self.check()
                raise
            seconds.append(time.perf_counter() - began)
        return 2 * block.nbytes / min(seconds)

    # Agreement, through the store: for the few things that are settled before training begins.

    def share(self, what: str, decide: Callable[[], Any]) -> Any:
        """What the lead decides, plain data, on every rank; a mistake that it finds is everybody's."""
        key = self._key(what)
        if self.lead:
            try:
                decision = {"found": decide()}
            except UserError as error:
                decision = {"error": str(error)}
            self._set(key, json.dumps(decision))
        decision = json.loads(self._get(key))
        if "error" in decision:
            raise UserError(decision["error"])
        return decision["found"]

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Refuses, on all ranks, if a rank differs from the lead in any of these facts."""
        key = self._key(what)
        self._set(f"{key}/{self.rank}", json.dumps(facts))

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

    def _set(self, key: str, text: str) -> None:
        self.check()
        with self._asking():
            self.store.set(key, text)

    def _get(self, key: str) -> bytes:
        with self._asking():
            while not self.store.check([key]):
                self.check()
                self._closing.wait(0.02)
            return self.store.get(key)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A store that breaks off is the end of rank 0."""
        try:
            yield
        except RuntimeError as error:
            self.check()
            raise RankFailure(0, f"rank 0 {GONE}") from error

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
        if not self._ending:
            if sys.stdout.isatty():
                print("\x1b[?25h", end="")  # a progress bar has hidden the cursor
            name = "" if self.lead else f"rank {self.rank} "
            print(clean(f"{name}error: {self.failure}"), file=sys.stderr)
        leave(EXIT_CODE)

    def _beat(self) -> None:
        """Tells how far this rank is, and looks at those it watches."""
        store = self._own_store
        seen = {rank: _Seen() for rank in (range(1, self.size) if self.lead else range(1))}
        present: list[int] = []
        count = 0
        before = time.monotonic()
        while not self._closing.is_set():
            try:
                store.set(f"beat/{self.rank}", json.dumps([count, self._progress(), bool(self._busy())]))
                if store.check([FAULT]):
                    self._fail(*json.loads(store.get(FAULT)))
                    return
                present += [rank for rank in seen if rank not in present and store.check([f"beat/{rank}"])]
                beats = store.multi_get([f"beat/{rank}" for rank in present]) if present else []
            except RuntimeError:
                return  # the guard will notice that this has ended
            now = self._last_cycle = time.monotonic()
            if now - before > self.timeout / 2:
                # This process was stopped for a while, perhaps with all others: they get the time to say something.
                for one in seen.values():
                    one.alive = one.moved = now
            before = now
            for rank, beat in zip(present, beats, strict=True):
                seen[rank].hear(json.loads(beat), now)
            for rank, one in seen.items():
                reason = one.judge(now, self.timeout)
                if reason:
                    text = f"rank {rank} {reason} for {self.timeout:g} s (timeout)"
                    quiet = [now - other.alive > self.timeout / 2 for other in seen.values()]
                    if reason == SILENT and len(seen) > 1 and all(quiet):
                        text += ", nor has any other: the network of rank 0 may be cut"
                    self.report(rank, text)
                    return
            count += 1
            self._closing.wait(min(0.5, self.timeout / 10))

    def _guard(self) -> None:
        """Notices that the store does not answer."""
        before = time.monotonic()
        while not self._closing.wait(min(0.5, self.timeout / 10)):
            now = time.monotonic()
            if now - before > self.timeout / 2:
                self._last_cycle = now  # this process was stopped for a while
            before = now
            if self.failure is None and now - self._last_cycle > self.timeout:
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
        self._set(f"done/{self.rank}", "1")
        if self.lead:
            for rank in range(self.size):
                self._get(f"done/{rank}")
            self._set("all-done", "1")
        self._get("all-done")
        # All have done all: whatever becomes of a rank from here on is no failure.
        self._closing.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        self._tell(f"left/{self.rank}", "1")
        if self.lead:
            self._appears([f"left/{rank}" for rank in range(self.size)], PATIENCE)
        dist.destroy_process_group()

    def abort(self, error: BaseException) -> bool:
        """Tells the others why this rank ends. Whether this rank should say so itself: not if the lead does."""
        self._ending = True
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
            self._appears([f"gone/{guilty}"], 1)  # if it only hangs, it may still read why it has to go

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

    def hear(self, beat: Sequence[Any], now: float) -> None:
        count, progress, busy = beat
        if count != self.beat[0]:
            self.alive = now
        if progress != self.beat[1] or not busy:
            self.moved = now
        self.beat = list(beat)

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


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store


def share_of_cores(own: list[int], all_here: list[list[int]]) -> int:
    """How many cores a rank has for itself: a launcher may have bound each rank of a machine to its own, or none."""
    return max(1, int(sum(1 / sum(cpu in cpus for cpus in all_here) for cpu in own) + 1e-9))


def _machine() -> str:
    """The same for all ranks of one machine, in whichever container."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _code_checksum() -> str:
    digest = hashlib.sha256()
    root = Path(mheads.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
