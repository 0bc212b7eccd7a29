"""The processes of a run: how they connect, agree and leave."""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.distributed.launcher import Launch
from mheads.distributed.lost_ranks import FAULT, GONE, TIMEOUT, RankFailure, Watch
from mheads.distributed.rendezvous import ask, await_keys, in_background, rendezvous
from mheads.engine.threads import own_cores, share_of_cores

T = TypeVar("T")

TIMEOUT_TO_START = 30.0  # at least: some launchers are slow
TO_LEAVE = 2.0  # that the main rank waits for others, one of which may be lost
NEVER = timedelta(days=365)  # gloo must not judge by the clock
ALL_PAIRS = 64  # ranks up to which each is connected with each at the start
NETWORK = (
    "check that every host can open any port of every other (a firewall may leave only MASTER_PORT), and set "
    "GLOO_SOCKET_IFNAME on each host to its interface to the others: by itself gloo takes that of the host's name"
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
        self._agreements = itertools.count()  # each has a number: all ranks come to the same ones in the same order
        self.store: Any = rendezvous(launch, to_start)
        self.watch = Watch(self.store, self.rank, self.size, max(timeout, TIMEOUT))  # then what the recipe says
        self._connect(to_start)

    def _connect(self, seconds: float) -> None:
        """Connects each rank with each, or, where they are many, when they first talk to each other.

        What goes wrong is a failure, which `watch.check` raises. gloo waits for as long as it is told to wait for
        everything, so it connects in the background, while the watch goes on.
        """
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if self.launch.one_host and loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        if self.size > ALL_PAIRS:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        store, own = self.store.clone(), (_machine(), own_cores())
        cores: list[Any] = [None] * self.size

        def connect() -> None:
            backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=NEVER)
            store.set(f"connected/{self.rank}", "1")
            dist.all_gather_object(cores, own)  # a stranger may have been taken for a rank: then this waits

        connecting, end = in_background(connect), time.monotonic() + seconds
        with suppress(RankFailure), self._asking():
            while not connecting.done():
                self.watch.check()
                if self.is_main and time.monotonic() > end:
                    every = [f"connected/{rank}" for rank in range(self.size)]
                    who = ", ".join(key.replace("connected/", "rank ") for key in await_keys(store, every, 0) or every)
                    self.watch.report(0, f"not connected to all others after {seconds:g} s: {who}; {NETWORK}")
                time.sleep(0.02)
            if (error := connecting.exception()) is not None:
                why = f"rank {self.rank} cannot use the network: {str(error).splitlines()[0]}"
                self.watch.report(self.rank, f"{why}; {NETWORK}")
            self.watch.check()
            self.cores = share_of_cores(own[1], [cpus for machine, cpus in cores if machine == own[0]])

    def wire_device(self, device: torch.device) -> torch.device:
        """Where the collectives of this world take tensors from: NCCL from GPUs, gloo from the host."""
        return device if self.nccl and device.type == "cuda" else torch.device("cpu")

    # Agreement, through the store: for the few things that are settled before training begins.

    def share(self, what: str, decide: Callable[[], T]) -> T:
        """What the main rank decides, on every rank; a mistake that it finds is everybody's."""
        key = f"{what}/{next(self._agreements)}"
        if self.is_main:
            try:
                self.post(key, (decide(), None))
            except UserError as error:
                self.post(key, (None, str(error)))
        decision: tuple[T, str | None] = self.take(key)
        if decision[1] is not None:
            raise UserError(decision[1])
        return decision[0]

    def compare(self, what: str, facts: dict[str, Any]) -> None:
        """Refuses, on all ranks, if a rank differs from the main rank in any of these facts."""
        key = f"{what}/{next(self._agreements)}"
        self.post(f"{key}/{self.rank}", facts)

        def refuse() -> None:
            theirs = {rank: self.take(f"{key}/{rank}") for rank in range(1, self.size)}
            lines = [
                f"  rank {rank} has another {name}: {short(facts_of_rank.get(name))} there, {short(value)} on rank 0"
                for rank, facts_of_rank in theirs.items()
                for name, value in facts.items()
                if facts_of_rank.get(name) != value
            ]
            if lines:
                more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
                raise UserError("the ranks do not agree:\n" + "\n".join(lines[:10] + more))

        self.share(f"{what}-differences", refuse)

    def post(self, key: str, value: Any) -> None:
        """Leaves a note for other ranks, from any thread."""
        self.watch.check()
        with self._asking():
            self.store.set(key, pickle.dumps(value))

    def take(self, key: str) -> Any:
        """Waits for a note; the loss of a rank ends the wait."""
        with self._asking():
            while await_keys(self.store, [key], 0.1):
                self.watch.check()
            return pickle.loads(self.store.get(key))

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
        self.compare("end", {})
        self.watch.end()
        self.farewell()
        dist.destroy_process_group()

    def abort(self, error: BaseException) -> bool:
        """Tells the others why this rank ends. Whether this rank should say so itself: not if the main rank does."""
        self.watch.ending = True
        if isinstance(error, RankFailure):
            return True
        if not self.is_main:  # a mistake that all ranks find is reported by one
            ask(self.store, lambda store: await_keys(store, [FAULT], 2))
        text = f"gave up: {str(error) or type(error).__name__}"
        _, first = self.watch.write_down(self.rank, f"rank {self.rank} {text}")
        return self.is_main or not first.startswith("rank 0 gave up: ")

    def farewell(self) -> None:
        """Tells that this rank leaves. The main rank may keep the store: it stays until all have read what happened."""
        ask(self.store, lambda store: store.set(f"left/{self.rank}", "1"))
        if self.is_main:
            left = [f"left/{rank}" for rank in range(self.size)]
            ask(self.store, lambda store: await_keys(store, left, TO_LEAVE), TO_LEAVE + 1)


def _machine() -> str:
    """The same for all ranks of one machine, in whichever container."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
