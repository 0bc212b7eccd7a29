"""The processes of a run: how they connect, agree and leave."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

import mheads
from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.distributed.collectives import Group
from mheads.distributed.launcher import Launch
from mheads.distributed.lost_ranks import GONE, PATIENCE, TIMEOUT, RankFailure, Watch, ask
from mheads.distributed.rendezvous import rendezvous, use_interface
from mheads.engine.threads import own_cores

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

TIMEOUT_TO_START = 30.0  # at least: some launchers are slow
NEVER = timedelta(days=365)  # gloo must not judge by the clock
ALL_PAIRS = 64  # ranks up to which each is connected with each at the start
NETWORK = (
    "check that every host can open any port of every other (a firewall may leave only MASTER_PORT), and set "
    "GLOO_SOCKET_IFNAME to the interface that they have in common"
)


class World:
    """This process among the others. The main rank is rank 0."""

    def __init__(self, launch: Launch, timeout: float = TIMEOUT) -> None:
        """Others have `timeout` seconds to come and to connect; who is there has no less than 60 until all are."""
        to_start = max(timeout, TIMEOUT_TO_START)
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.is_main = self.rank == 0
        self.nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self.cores = 1  # of this machine, those that are this rank's
        self._counts: dict[str, int] = {}
        self.store: Any = rendezvous(launch, to_start)
        self.watch = Watch(self.store, self.rank, self.size, max(timeout, TIMEOUT))  # then what the recipe says
        self._connect(to_start)

    def _connect(self, seconds: float) -> None:
        """Connects each rank with each, or, where they are many, when they first talk to each other.

        What goes wrong is a failure, which `watch.check` raises.

        gloo waits for as long as it is told to wait for everything: a thread lets it, while the beat goes on.
        """
        interface, store = use_interface(self.launch), self.store.clone()  # that of gloo waits for the others
        store.set(f"place/{self.rank}", f"rank {self.rank} ({socket.gethostname()}, {interface or 'any interface'})")
        machine, cpus = f"machine/{_machine()}", own_cores()
        store.append(machine, json.dumps(cpus) + "\n")
        errors: list[Exception] = []
        if self.size > ALL_PAIRS:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

        def run() -> None:
            try:
                backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
                dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=NEVER)
                store.set(f"connected/{self.rank}", "1")
                dist.barrier()  # a stranger may have been taken for a rank: then this waits
                store.set(f"greeted/{self.rank}", "1")
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="mheads-connect", daemon=True)
        thread.start()
        awaited = range(self.size) if self.is_main else [self.rank]
        until = time.monotonic() + seconds
        try:
            while self.watch.failure is None and not store.check([f"greeted/{rank}" for rank in awaited]):
                time.sleep(0.02)
                if errors:
                    why = str(errors[0]).splitlines()[0]
                    self.watch.report(
                        self.rank, f"rank {self.rank} cannot use the network ({interface}): {why}; {NETWORK}"
                    )
                elif self.is_main and time.monotonic() > until:
                    missing = self._without(store, "connected") or self._without(store, "greeted")
                    who = ", ".join(store.get(f"place/{rank}").decode() for rank in missing)
                    self.watch.report(0, f"not connected to all others after {seconds:g} s: {who}; {NETWORK}")
            # Each rank wrote down its cores before it began to connect.
            self.cores = share_of_cores(cpus, [json.loads(line) for line in store.get(machine).splitlines()])
        except RuntimeError:
            self.watch.fail(0, f"rank 0 {GONE}")

    def _without(self, store: Store, step: str) -> list[int]:
        """The ranks that have not yet told of a step."""
        return [rank for rank in range(self.size) if not store.check([f"{step}/{rank}"])]

    @property
    def group(self) -> Group:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def wire_device(self, device: torch.device) -> torch.device:
        """Where the collectives of this world take tensors from: NCCL from GPUs, gloo from the host."""
        return device if self.nccl and device.type == "cuda" else torch.device("cpu")

    def bandwidth(self) -> float:
        """Measures bytes per second between the first rank and the last, there and back; the other ranks get 0."""
        last, block = self.size - 1, torch.zeros(1 << 20)
        other = {0: last, last: 0}.get(self.rank)
        if other is None:
            return 0.0
        turns = (dist.send, dist.recv) if self.is_main else (dist.recv, dist.send)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            try:
                for turn in turns:
                    turn(block, other)
            except RuntimeError:
                self.watch.report(other, f"rank {other} {GONE}")
                self.watch.check()
                raise
            seconds.append(time.perf_counter() - began)
        return 2 * block.nbytes / min(seconds)

    # Agreement, through the store: for the few things that are settled before training begins.

    def share(self, what: str, decide: Callable[[], Any]) -> Any:
        """What the main rank decides, plain data, on every rank; a mistake that it finds is everybody's."""
        key = self._key(what)
        if self.is_main:
            try:
                decision = {"found": decide()}
            except UserError as error:
                decision = {"error": str(error)}
            self._set(key, json.dumps(decision))
        decision = json.loads(self._get(key))
        if "error" in decision:
            raise UserError(decision["error"])
        return decision["found"]

    def decide(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        """The same for a decision that comes with something that the main rank alone keeps."""
        kept: list[T] = []

        def plain() -> Any:
            decision, own = decide()
            kept.append(own)
            return decision

        return self.share("decision", plain), kept[0] if kept else None

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Refuses, on all ranks, if a rank differs from the main rank in any of these facts."""
        key = self._key(what)
        self._set(f"{key}/{self.rank}", json.dumps([socket.gethostname(), facts]))

        def differences() -> list[str]:
            lines = []
            for rank in range(1, self.size):
                host, theirs = json.loads(self._get(f"{key}/{rank}"))
                at = "" if host == socket.gethostname() else f" ({host})"
                for name, value in facts.items():
                    if theirs.get(name) != value:
                        values = f"{short(theirs.get(name))} there, {short(value)} on rank 0"
                        lines.append(f"  rank {rank}{at} has another {name}: {values}")
            return lines

        disagreements = self.share(f"{what}-differences", differences)
        if disagreements:
            more = [f"  and {len(disagreements) - 10} more"] if len(disagreements) > 10 else []
            raise UserError("the ranks do not agree:\n" + "\n".join(disagreements[:10] + more))

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks before anything is built."""
        return {
            "mheads version": mheads.__version__,
            "code (checksum of the package)": _code_checksum(),
            "torch version": torch.__version__,
            "Python version": platform.python_version(),
        }

    def _key(self, what: str) -> str:
        """Each agreement has a key of its own; all ranks come to the same ones in the same order."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{what}/{count}"

    def _set(self, key: str, text: str) -> None:
        self.watch.check()
        with self._asking():
            self.store.set(key, text)

    def _get(self, key: str) -> bytes:
        with self._asking():
            while not self.store.check([key]):
                self.watch.check()
                time.sleep(0.02)
            value: bytes = self.store.get(key)
            return value

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A store that breaks off is the end of rank 0."""
        try:
            yield
        except RuntimeError as error:
            self.watch.check()
            raise RankFailure(0, f"rank 0 {GONE}") from error

    # Leaving.

    def close(self) -> None:
        """When all is done: nobody leaves before all are here, or the store would go with the first."""
        self._set(f"done/{self.rank}", "1")
        if self.is_main:
            for rank in range(self.size):
                self._get(f"done/{rank}")
            self._set("all-done", "1")
        self._get("all-done")
        self.watch.end()
        self._tell(f"left/{self.rank}", "1")
        if self.is_main:
            self._appears([f"left/{rank}" for rank in range(self.size)], PATIENCE)
        dist.destroy_process_group()

    def abort(self, error: BaseException) -> bool:
        """Tells the others why this rank ends. Whether this rank should say so itself: not if the main rank does."""
        self.watch.ending = True
        if isinstance(error, RankFailure):
            return True
        text = str(error) or type(error).__name__
        self._tell(f"error/{self.rank}", text)
        # A mistake that all ranks find is reported by one.
        told = not self.is_main and self._appears(["error/0"], 2)
        self.watch.write_down(self.rank, f"rank {self.rank} gave up: {text}")
        return not told

    def farewell(self, error: BaseException) -> None:
        """The main rank may keep the store: it stays until the others have read what happened, or for a moment."""
        self._tell(f"gone/{self.rank}", "1")
        if self.is_main:
            guilty = error.rank if isinstance(error, RankFailure) else self.rank
            self._appears([f"gone/{rank}" for rank in range(self.size) if rank != guilty], 3)
            self._appears([f"gone/{guilty}"], 1)  # if it only hangs, it may still read why it has to go

    def _tell(self, key: str, text: str) -> None:
        ask(self.store, lambda store: store.set(key, text))

    def _appears(self, keys: list[str], seconds: float) -> bool:
        """Whether the store gets these keys in time."""

        def look(store: Any) -> bool:
            present: bool
            until = time.monotonic() + seconds
            while not (present := store.check(keys)) and time.monotonic() < until:
                time.sleep(0.02)
            return present

        return ask(self.store, look, seconds + 1) or False


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
