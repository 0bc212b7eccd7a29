"""Who started this process, and how its ranks find each other.

    launch = detect()                       # torchrun, mpirun, srun, or variables set by hand; None: nobody
    store = rendezvous(launch, 60.0)
    use_interface(launch)

A plain command in an sbatch script or an salloc shell is one process, however many tasks the job has: only srun starts
tasks. `hint` says so to whoever forgot it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mheads.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# rank, size, rank on this host, size on this host
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # and Intel MPI
DEFAULT_PORT = 29500
# Slurm numbers the steps that no srun of the user's started (a batch script, the shell of salloc) from the top.
RESERVED_STEPS = 0xFFFFFFF0
ELSEWHERE = "192.0.2.1"  # an address of documentation (RFC 5737): whatever leads there is the default route


@dataclass(frozen=True)
class Launch:
    """One process of a launch. Without an address all ranks are on this host, and meet through a file."""

    launcher: str  # torchrun, mpirun, srun, or env: RANK, WORLD_SIZE, ... set by hand
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str | None = None
    port: int | None = None
    restart: int = 0
    job: str | None = None  # what the ranks of this launch, and no other ranks, have in common

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that this process belongs to, from what its launcher left in the environment."""
    given = {name: value for name, value in environ.items() if value.strip()}
    if all(name in given for name in TORCHRUN):
        return _torchrun(given)
    outer = _outer(given)
    by_hand = [name for name in ("RANK", "WORLD_SIZE") if name in given]
    if not by_hand:
        return outer
    if outer is None:
        raise _incomplete(given, TORCHRUN, "torchrun")
    wanted = {"RANK": outer.rank, "WORLD_SIZE": outer.size}
    if any(_integer(given, name) != wanted[name] for name in by_hand):
        raise _contradiction(given, by_hand, outer)
    return outer


def hint(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a process that nobody launched should tell its user: several tasks were reserved, and one is used."""
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or detect(environ) is not None:
        return None
    return f"SLURM_NTASKS={tasks}, but this command was not started by srun: one process; srun starts {tasks}"


def _outer(given: Mapping[str, str]) -> Launch | None:
    """mpirun before srun: Open MPI and MPICH start their helpers by srun, whose variables then say nothing."""
    return _mpirun(given) or _srun(given)


def _torchrun(given: Mapping[str, str]) -> Launch:
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in given else "env"
    try:
        outer = _outer(given)
    except UserError:  # leftovers of another launcher: these variables are complete without it
        outer = None
    rank, size = (_integer(given, name) for name in ("RANK", "WORLD_SIZE"))
    if outer is not None and outer.size > 1:
        if launcher == "env" and (rank, size) != (outer.rank, outer.size):
            raise _contradiction(given, ("RANK", "WORLD_SIZE"), outer)
        if launcher == "torchrun" and given.get("GROUP_WORLD_SIZE") == "1":
            raise UserError(
                f"{outer.launcher} started {outer.size} copies of torchrun, which know nothing of each other "
                f"(GROUP_WORLD_SIZE=1): give them --nnodes {outer.size} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:PORT, or start torchrun once"
            )
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name in given for name in local):
        if not all(name in given for name in local):
            raise _incomplete(given, local, "torchrun")
        local_rank, local_size = (_integer(given, name) for name in local)
    elif outer is not None and outer.size == size:
        local_rank, local_size = outer.local_rank, outer.local_size
    else:  # one process a host, as Kubernetes operators do it
        local_rank, local_size = 0, 1
    address, port = _endpoint(given)
    restart = _integer(given, "TORCHELASTIC_RESTART_COUNT", 0)
    launch = Launch(launcher, rank, size, local_rank, local_size, address, port, restart)
    return _checked(launch, given, ("RANK", "WORLD_SIZE", *local))


def _mpirun(given: Mapping[str, str]) -> Launch | None:
    families: list[tuple[str, ...]] = [OPEN_MPI, MPICH]
    names = next((names for names in families if all(name in given for name in names)), None)
    if names is None:
        # PMIx has no variable for the number of ranks.
        starts = [*families, ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE")]
        names = next((names for names in starts if names[0] in given or names[1] in given), None)
        if names is None or _is_srun(given):  # srun sets some of them too, depending on its --mpi
            return None
        raise _incomplete(given, names, "mpirun")
    if names[0] == "PMI_RANK" and _is_srun(given):
        step = given.get("SLURM_PROCID"), given.get("SLURM_STEP_NUM_TASKS", given.get("SLURM_NTASKS"))
        if step == (given["PMI_RANK"], given["PMI_SIZE"]):
            return None  # these are srun's own
    job = (given.get("PMIX_NAMESPACE") or given.get("OMPI_MCA_ess_base_jobid")) if names is OPEN_MPI else None
    rank, size, local_rank, local_size = (_integer(given, name) for name in names)
    launch = _checked(Launch("mpirun", rank, size, local_rank, local_size, job=job), given, names)
    if not launch.one_host and "MASTER_ADDR" not in given:
        raise UserError(
            f"{_show(given, names)}: the ranks are on several hosts, and nothing says where they meet: "
            f"mpirun -x MASTER_ADDR=<host of rank 0> ... (MPICH, Intel MPI: -genv MASTER_ADDR <host of rank 0>)"
        )
    return _meeting(launch, given, None, DEFAULT_PORT)


def _is_srun(given: Mapping[str, str]) -> bool:
    """Whether srun started this process: a batch script and the shell of salloc have SLURM_PROCID=0 as well."""
    return "SLURM_STEP_ID" in given and 0 <= _integer(given, "SLURM_STEP_ID") < RESERVED_STEPS


def _srun(given: Mapping[str, str]) -> Launch | None:
    if not _is_srun(given):
        return None
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    needed = ("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_PROCID", total, "SLURM_LOCALID")
    if any(name not in given for name in needed):
        raise _incomplete(given, needed, "srun")
    rank, size, local_rank = (_integer(given, name) for name in needed[2:])
    job = ".".join([given["SLURM_JOB_ID"], given["SLURM_STEP_ID"], given.get("SLURM_RESTART_COUNT", "0")])
    launch = Launch("srun", rank, size, local_rank, _tasks_here(given, size), job=job)
    _checked(launch, given, (*needed[2:], "SLURM_STEP_TASKS_PER_NODE"))
    hosts = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST")
    if not launch.one_host and "MASTER_ADDR" not in given and hosts is None:
        raise UserError(f"srun started {size} ranks on several hosts: set MASTER_ADDR to the host of rank 0")
    # A port for each job, below those that Linux gives to outgoing connections.
    return _meeting(launch, given, hosts, 16384 + zlib.crc32(job.encode()) % 16384)


def _tasks_here(given: Mapping[str, str], size: int) -> int:
    """How many tasks of the step this host has: `4(x2),3` lists them for the hosts in turn."""
    text = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE") or str(size)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not like 4(x2),3: start with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(given, "SLURM_NODEID", 0)
    if not 0 <= node < len(counts):
        raise UserError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={text} lists {len(counts)} hosts")
    return counts[node]


def expand_hosts(text: str) -> Iterator[str]:
    """Slurm's short form of a list of hosts: `n[03-05,7],login` is n03, n04, n05, n7, login."""
    numbers = r"\d+(?:-\d+)?"
    host = rf"(?:[^\[\],\s]|\[{numbers}(?:,{numbers})*\])+"
    if not re.fullmatch(f"{host}(?:,{host})*", text):
        raise UserError(f"{text!r} is not a list of hosts such as n[03-05,7],login: set MASTER_ADDR")
    for part in re.findall(host, text):
        pieces = re.split(r"\[(.*?)\]", part)  # text and ranges in turn
        choices = [_numbers(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    found = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [f"{i:0{len(first)}}" for i in range(int(first), int(last or first) + 1)]
    return found


def _meeting(launch: Launch, given: Mapping[str, str], hosts: str | None, default_port: int) -> Launch:
    """The launch with the address where its ranks meet: the user's, or the first of several hosts."""
    address, port = _endpoint(given)
    if launch.one_host:
        # A default port could be that of another launch on this host: no address unless both are given.
        return replace(launch, address=address, port=port) if address and port else launch
    return replace(launch, address=address or next(expand_hosts(hosts or "")), port=port or default_port)


def _endpoint(given: Mapping[str, str]) -> tuple[str | None, int | None]:
    if "MASTER_PORT" not in given:
        return given.get("MASTER_ADDR"), None
    port = _integer(given, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port} is not a port: give one from 1 to 65535")
    return given.get("MASTER_ADDR"), port


def _checked(launch: Launch, given: Mapping[str, str], names: Iterable[str]) -> Launch:
    """The launch, if its numbers are possible."""
    if not (0 <= launch.rank < launch.size and 0 <= launch.local_rank < launch.local_size <= launch.size):
        raise UserError(
            f"{_show(given, names)} cannot be: a rank is one of 0 to size-1, here and on its host; "
            f"start again with torchrun, mpirun or srun, and set none of these by hand"
        )
    return launch


def _incomplete(given: Mapping[str, str], names: Iterable[str], launcher: str) -> UserError:
    here, missing = ([name for name in names if (name in given) is there] for there in (True, False))
    return UserError(
        f"{_show(given, here)} without {', '.join(missing)}: start with {launcher}, which sets all of them, "
        f"or unset {', '.join(here)} to train in one process"
    )


def _contradiction(given: Mapping[str, str], names: Iterable[str], outer: Launch) -> UserError:
    return UserError(
        f"{_show(given, names)}, but {outer.launcher} says rank {outer.rank} of {outer.size}: "
        f"unset RANK and WORLD_SIZE, {outer.launcher} is enough"
    )


def _integer(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in given and default is not None:
        return default
    try:
        return int(given[name])
    except ValueError:
        raise UserError(f"{name}={given[name]!r} is not a whole number: unset it, or let the launcher set it") from None


def _show(given: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={given[name]}" for name in names if name in given)


# --- finding each other ---


def rendezvous(launch: Launch, timeout: float) -> Store:
    """A store that all ranks share, once all are there; after `timeout` seconds an error that says what is missing.

    Rank 0 keeps the store, unless torchrun does: the others lose it when rank 0 ends.
    """
    from torch.distributed import PrefixStore

    deadline = _Deadline(timeout)
    with ExitStack() as afterwards:
        if launch.launcher == "torchrun":
            store = _agent_store(launch, deadline)
        elif launch.address is None:
            store = _store_by_file(launch, deadline, afterwards)
        else:
            store = _store_at_address(launch, deadline)
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


def _agent_store(launch: Launch, deadline: _Deadline) -> Store:
    """torchrun's own store, or rank 0's where torchrun has none."""
    from torch.distributed import rendezvous

    if launch.rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        _await_listener(launch, deadline)
    return _connected(launch, deadline, lambda: next(rendezvous("env://", timeout=deadline.timeout))[0])


def _store_at_address(launch: Launch, deadline: _Deadline) -> Store:
    listener = None
    if launch.rank == 0:
        try:
            listener = _listen(launch)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot open port {launch.port} ({error.strerror}): set MASTER_PORT to a port that is free"
            ) from error
    _await_listener(launch, deadline)
    return _connected(launch, deadline, lambda: _tcp_store(launch.address, launch.port, listener, deadline))


def _listen(launch: Launch) -> socket.socket:
    """A socket at the address by which the other ranks know this host; at all of them only if that cannot be told."""
    assert launch.address is not None and launch.port is not None
    with suppress(OSError):
        found = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            # The name of this host may be a loopback address here, and another one where the other hosts look it up.
            if str(place[0]).startswith("127.") and not _stays_here(launch, launch.address):
                continue
            try:
                return socket.create_server(place[:2], family=family)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    break  # said below, where it fails again
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", launch.port), family=family, dualstack_ipv6=dual)


def _stays_here(launch: Launch, address: str | None) -> bool:
    """Whether all ranks are on this host."""
    return launch.one_host or address is None or address == "localhost" or address.startswith("127.")


def _store_by_file(launch: Launch, deadline: _Deadline, afterwards: ExitStack) -> Store:
    """Rank 0 takes any free port and writes it into a file whose name all ranks know.

    It holds a lock on the file. The lock goes with its process, so a file without one is left over from a former job.
    """
    path = _meeting_file(launch)
    if launch.rank > 0:
        port = _read_port(path, launch, deadline)
        return _tcp_store("127.0.0.1", port, None, deadline)
    listener = socket.create_server(("127.0.0.1", 0))  # no other host can reach it
    port = listener.getsockname()[1]
    store = _tcp_store("127.0.0.1", port, listener, deadline)
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
    return store


def _meeting_file(launch: Launch) -> Path:
    job = launch.job or _launching_process()
    digest = hashlib.sha256(f"{launch.launcher} {job}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"mheads-{os.getuid()}-{digest}")


def _launching_process() -> str:
    """The nearest ancestor that was given no rank itself (a wrapper script was), and when it started."""
    pid, started = os.getppid(), ""
    try:
        while True:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            started = stat[19]
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(entry.partition(b"=")[0] == b"PMI_RANK" for entry in environ):
                break
            pid = int(stat[1])
    except OSError:  # no /proc, or a process of another user: as far as can be seen
        pass
    return f"{pid} {started}"


def _read_port(path: Path, launch: Launch, deadline: _Deadline) -> int:
    while deadline.left:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                if os.fstat(file.fileno()).st_uid == os.getuid() and _locked(file.fileno()):
                    return int(file.read())
        except OSError:
            pass  # not there yet
        time.sleep(0.02)
    raise UserError(
        f"rank {launch.rank} of {launch.size} waited {deadline} for rank 0 to write {path}: check that rank 0 is "
        f"running, and that TMPDIR is the same for all ranks; or set MASTER_ADDR and MASTER_PORT"
    )


def _locked(handle: int) -> bool:
    """Whether another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _tcp_store(address: str | None, port: int | None, listener: socket.socket | None, deadline: _Deadline) -> Store:
    """The store itself for whoever has a socket to listen at, a client for the others."""
    from torch.distributed import TCPStore

    assert address is not None and port is not None
    handle = None if listener is None else listener.detach()
    return TCPStore(
        address, port, is_master=handle is not None, timeout=deadline.timeout, wait_for_workers=False,
        master_listen_fd=handle,
    )  # fmt: skip


def _await_listener(launch: Launch, deadline: _Deadline) -> None:
    """Try the address until something answers: torch's own attempts fill the terminal with C++ frames."""
    reason = "no answer"
    while deadline.left:
        try:
            socket.create_connection((launch.address, launch.port), timeout=max(deadline.left, 0.01)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(0.1, deadline.left))
    raise _unreachable(launch, deadline, reason)


def _connected(launch: Launch, deadline: _Deadline, connect: Callable[[], T]) -> T:
    """Run `connect` until the deadline: torch waits for ever for a port that is open but says nothing."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(connect())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline.left)
    if results:
        return results[0]
    reason = str(errors[0]).splitlines()[0] if errors else "something listens there, but it is not rank 0"
    raise _unreachable(launch, deadline, reason) from (errors[0] if errors else None)


def _unreachable(launch: Launch, deadline: _Deadline, reason: str) -> UserError:
    target = "rank 0" if launch.rank else "itself"
    return UserError(
        f"rank {launch.rank} of {launch.size} cannot reach {target} at {launch.address}:{launch.port} in {deadline} "
        f"({reason}): check that MASTER_ADDR is the host of rank 0 as this host knows it, that MASTER_PORT is free "
        f"there, that no firewall is between, and that rank 0 is running"
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


# --- the network ---


def use_interface(launch: Launch, address: str | None = None) -> str | None:
    """Have gloo use the interface that leads to the other ranks, unless the user has named one.

    By itself gloo takes the address of the host's name, which on many clusters is another network or 127.0.1.1.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if variable not in os.environ:
        name = _interface(launch, address or launch.address)
        if name is not None:
            os.environ[variable] = name
    return os.environ.get(variable)


def _interface(launch: Launch, address: str | None) -> str | None:
    if address is None or _stays_here(launch, address):
        return _interface_with("127.0.0.1")
    # On its own host the name of rank 0 may be a loopback address, where the other hosts could not find it.
    towards = (_address_towards(target) for target in (address, ELSEWHERE))
    own = next((found for found in towards if found is not None and not found.startswith("127.")), None)
    return None if own is None else _interface_with(own)


def _address_towards(target: str) -> str | None:
    """This host's address on the way to another; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _interface_with(address: str) -> str | None:
    siocgifaddr = 0x8915  # Linux: the IPv4 address of an interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
