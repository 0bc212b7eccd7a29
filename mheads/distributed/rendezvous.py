"""How the ranks of a launch find each other: torch's store, once all are there.

Rank 0 keeps the store, unless torchrun does: the others lose it when rank 0 ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mheads.common.errors import UserError
from mheads.distributed.launcher import Launch

T = TypeVar("T")
Store = Any  # torch.distributed.Store, whose `clone` has no annotation


def rendezvous(launch: Launch, seconds: float) -> Store:
    """A store that all ranks share, once all are there; after `seconds` an error that says what is missing."""
    end = time.monotonic() + seconds
    # Ranks that were started again read nothing that the ranks before them wrote.
    store = PrefixStore(f"mheads/{launch.restart}", _connect(launch, end, seconds))
    keys = [f"here/{rank}" for rank in range(launch.size)]
    try:
        if store.add(keys[launch.rank], 1) > 1:
            raise UserError(
                f"two processes are rank {launch.rank} of {launch.size}: start each rank once, "
                f"and one launch at a time on a MASTER_PORT"
            )
        missing = await_keys(store, keys, end - time.monotonic())
    except RuntimeError as error:  # torch.distributed.DistError
        raise UserError(
            f"rank {launch.rank} lost rank 0 while waiting for the others: look for an error of rank 0 above"
        ) from error
    if missing:
        ranks = ", ".join(key.removeprefix("here/") for key in missing)
        raise UserError(
            f"rank {launch.rank} waited {seconds:g} s, but of {launch.size} ranks these did not come: {ranks}; look "
            "for their errors above, or start all of them"
        )
    return store


def _connect(launch: Launch, end: float, seconds: float) -> Store:
    """The store itself on rank 0, unless torchrun keeps it; a client on the others."""
    place, reason, answered = (launch.address, launch.port), "no answer", False
    options: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    if launch.rank == 0 and not launch.agent:
        options |= {"is_master": True, "master_listen_fd": _listen(launch).detach()}
    while not answered and time.monotonic() < end:  # torch's own attempts fill the terminal with C++ frames
        try:
            socket.create_connection(place, timeout=max(end - time.monotonic(), 0.01)).close()
            answered = True
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.05)
    if answered:  # torch waits for ever for a port that is open but says nothing
        try:
            return in_background(lambda: TCPStore(*place, **options)).result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            reason = "something listens there, but it is not rank 0"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    raise UserError(
        f"rank {launch.rank} of {launch.size} cannot reach {'rank 0' if launch.rank else 'itself'} at "
        f"{launch.address}:{launch.port} in {seconds:g} s ({reason}): check that MASTER_ADDR is the host of rank 0 as "
        "this host knows it, that MASTER_PORT is free there, that no firewall is between, and that rank 0 is running"
    )


def _listen(launch: Launch) -> socket.socket:
    """The socket of the store: ranks on one host listen at its address alone."""
    if launch.one_host:
        with suppress(OSError):
            return socket.create_server((launch.address, launch.port))
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", launch.port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UserError(
            f"rank 0 cannot open port {launch.port} ({error.strerror}): set MASTER_PORT to a port that is free"
        ) from error


# Asking the store.


def await_keys(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Waits for keys; returns those that have not come after so many seconds."""
    end = time.monotonic() + seconds
    while not store.check(list(keys)):  # `wait` would do, but writes warnings of its own when it gives up
        if time.monotonic() > end:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.02)
    return []


def ask(store: Store, question: Callable[[Store], T], seconds: float = 3.0) -> T | None:
    """What the store answers; None if it does not answer in time."""
    with suppress(RuntimeError, TimeoutError):
        return in_background(lambda: question(store.clone())).result(seconds)
    return None


def in_background(call: Callable[[], T]) -> Future[T]:
    """Begins a call that may never return, in a thread that no exit of the process waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
