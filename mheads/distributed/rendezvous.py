"""How the ranks of a launch find each other: a store that they share, and the network interface that they use.

    store = rendezvous(launch, 60.0)
    use_interface(launch)

Rank 0 keeps the store, unless torchrun does: the others lose it when rank 0 ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import struct
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mheads.common.errors import UserError
from mheads.distributed.launcher import MPICH, Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ELSEWHERE = "192.0.2.1"  # an address of documentation (RFC 5737): whatever leads there is the default route


def rendezvous(launch: Launch, timeout: float) -> Store:
    """A store that all ranks share, once all are there; after `timeout` seconds an error that says what is missing."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    deadline = _Deadline(timeout)
    with ExitStack() as afterwards:
        listener = _listen(launch) if launch.rank == 0 and not launch.agent else None
        if launch.address is not None and launch.port is not None:
            address, port = launch.address, launch.port
        else:
            address, path = "127.0.0.1", meeting_file(launch)
            if listener is None:
                port = _read_port(path, launch, deadline)
            else:
                port = listener.getsockname()[1]
                _write_port(path, port, afterwards)
        store = _connect(launch, address, port, listener, deadline)
        # Ranks that were started again read nothing that the ranks before them wrote.
        store = PrefixStore(f"mheads/{launch.restart}", store)
        _await_all(store, launch, deadline)
        return store


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def __str__(self) -> str:
        return f"{self.timeout.total_seconds():g} s"


def _listen(launch: Launch) -> socket.socket:
    """A socket at the address by which the other ranks know this host; at all of them only if that cannot be told."""
    if launch.address is None or launch.port is None:
        return socket.create_server(("127.0.0.1", 0))  # no other host can reach it
    with suppress(OSError):
        addresses = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in sorted(addresses, key=lambda one: one[0] != socket.AF_INET):
            # The name of this host may be a loopback address here, and another one where the other hosts look it up.
            if str(place[0]).startswith("127.") and not launch.one_host:
                continue
            try:
                return socket.create_server(place[:2], family=family)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    break  # said below, where it fails again
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", launch.port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UserError(
            f"rank 0 cannot open port {launch.port} ({error.strerror}): set MASTER_PORT to a port that is free"
        ) from error


def _connect(launch: Launch, address: str, port: int, listener: socket.socket | None, deadline: _Deadline) -> Store:
    """The store itself for whoever has a socket to listen at, a client for the others."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stores: list[Store] = []
    reason = "no answer"

    def run() -> None:
        nonlocal reason
        handle = None if listener is None else listener.detach()
        try:
            store = TCPStore(
                address, port, is_master=handle is not None, timeout=deadline.timeout, wait_for_workers=False,
                master_listen_fd=handle,
            )  # fmt: skip
            stores.append(store)
        except Exception as error:
            reason = str(error).splitlines()[0]

    answered = False
    while deadline.left and not answered:  # torch's own attempts fill the terminal with C++ frames
        try:
            socket.create_connection((address, port), timeout=max(deadline.left, 0.01)).close()
            answered = True
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.1, deadline.left))
    if answered:  # torch waits for ever for a port that is open but says nothing: let a thread wait
        reason = "something listens there, but it is not rank 0"
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(deadline.left)
    if stores:
        return stores[0]
    raise UserError(
        f"rank {launch.rank} of {launch.size} cannot reach {'rank 0' if launch.rank else 'itself'} at {address}:{port} "
        f"in {deadline} ({reason}): check that MASTER_ADDR is the host of rank 0 as this host knows it, that "
        f"MASTER_PORT is free there, that no firewall is between, and that rank 0 is running"
    )


def _await_all(store: Store, launch: Launch, deadline: _Deadline) -> None:
    """Sign in, and wait for the others."""
    keys = [f"here/{rank}" for rank in range(launch.size)]
    try:
        if store.add(keys[launch.rank], 1) > 1:
            raise UserError(
                f"two processes are rank {launch.rank} of {launch.size}: start each rank once, "
                f"and one launch at a time on a MASTER_PORT"
            )
        while not store.check(keys):  # `wait` would do, but writes warnings of its own when it gives up
            if not deadline.left:
                missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise UserError(
                    f"rank {launch.rank} waited {deadline}, but of {launch.size} ranks these did not come: "
                    f"{', '.join(missing)}; look for their errors above, or start all of them"
                )
            time.sleep(0.02)
    except RuntimeError as error:  # torch.distributed.DistError
        raise UserError(
            f"rank {launch.rank} lost rank 0 while waiting for the others: look for an error of rank 0 above"
        ) from error


# --- on one host: rank 0 takes any free port and writes it into a file whose name all ranks know ---


def meeting_file(launch: Launch) -> Path:
    job = launch.job or _launching_process()
    digest = hashlib.sha256(f"{launch.launcher} {job}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"mheads-{os.getuid()}-{digest}")


def _launching_process() -> str:
    """The nearest ancestor that was given no rank itself (a wrapper script was), and when it started."""
    pid, started = os.getppid(), ""
    with suppress(OSError):  # no /proc, or a process of another user: as far as can be seen
        while True:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            started = stat[19]
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(entry.startswith(f"{MPICH.rank}=".encode()) for entry in environ):
                break
            pid = int(stat[1])
    return f"{pid} {started}"


def _write_port(path: Path, port: int, afterwards: ExitStack) -> None:
    """Holds a lock on the file. It goes with the process: a file without one is left over from a former job."""
    try:
        handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # for this user's eyes only
        afterwards.callback(os.close, handle)
        afterwards.callback(Path(draft).unlink, missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, f"{port}\n".encode())
        os.replace(draft, path)
        afterwards.callback(path.unlink, missing_ok=True)
    except OSError as error:
        raise UserError(
            f"rank 0 cannot tell the others its port through {path} ({error.strerror}): "
            f"set TMPDIR to a folder on this host that can be written, or MASTER_ADDR and MASTER_PORT"
        ) from error


def _read_port(path: Path, launch: Launch, deadline: _Deadline) -> int:
    while deadline.left:
        with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:  # rank 0 holds it
                    return int(file.read())
        time.sleep(0.02)
    raise UserError(
        f"rank {launch.rank} of {launch.size} waited {deadline} for rank 0 to write {path}: check that rank 0 is "
        f"running, and that TMPDIR is the same for all ranks; or set MASTER_ADDR and MASTER_PORT"
    )


# --- the network ---


def use_interface(launch: Launch) -> str | None:
    """Have gloo use the interface that leads to the other ranks, unless the user has named one.

    By itself gloo takes the address of the host's name, which on many clusters is another network or 127.0.1.1.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if variable not in os.environ:
        own: str | None = "127.0.0.1"
        if launch.address is not None and not launch.one_host:
            # On its own host the name of rank 0 may be a loopback address, where the other hosts could not find it.
            towards = (_address_towards(target) for target in (launch.address, ELSEWHERE))
            own = next((address for address in towards if address and not address.startswith("127.")), None)
        name = own and _interface_with(own)
        if name:
            os.environ[variable] = name
    return os.environ.get(variable)


def _address_towards(target: str) -> str | None:
    """This host's address on the way to another; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((target, 9))
        address: str = probe.getsockname()[0]
        return address
    return None


def _interface_with(address: str) -> str | None:
    siocgifaddr = 0x8915  # Linux: the IPv4 address of an interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
