"""Who started this process: a table of the variables that each launcher sets, and what they say together.

A plain command in an sbatch script or an salloc shell is one process, however many tasks the job has: only srun starts
tasks.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mheads.common.errors import UserError


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher, by name."""

    name: str
    rank: str
    size: str
    local_rank: str
    here: str  # the number of ranks on this host; if there are several hosts, srun has a list of numbers
    job: tuple[str, ...] = ()  # together what the ranks of one launch, and no others, have in common
    hosts: str = ""  # the list of hosts
    meeting: tuple[str, ...] = ()  # set by a launcher that may leave out what is said of this host

    @property
    def needed(self) -> tuple[str, ...]:
        """If these are set, the launcher is at work; if only some of them are, something is wrong."""
        return (self.rank, self.size, *(self.meeting or (self.local_rank, self.here)))


TORCHRUN = Launcher(
    "torchrun", rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", here="LOCAL_WORLD_SIZE",
    meeting=("MASTER_ADDR", "MASTER_PORT"),
)  # fmt: skip
OPEN_MPI = Launcher(
    "mpirun", rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE", local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    here="OMPI_COMM_WORLD_LOCAL_SIZE", job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)  # fmt: skip
MPICH = Launcher(  # and Intel MPI
    "mpirun", rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID", here="MPI_LOCALNRANKS"
)
SRUN = Launcher(
    "srun", rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
    here="SLURM_STEP_TASKS_PER_NODE", job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    hosts="SLURM_STEP_NODELIST",
)  # fmt: skip
# mpirun before srun: Open MPI and MPICH start their helpers by srun, whose variables then say nothing.
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SRUN)
DEFAULT_PORT = 29500
# Slurm numbers the steps that no srun of the user's started (a batch script, the shell of salloc) from the top.
RESERVED_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Launch:
    """One process of a launch, and the address and port at which its ranks meet, as torchrun sets them."""

    launcher: str  # torchrun, mpirun, srun, or env: RANK, WORLD_SIZE, ... set by hand
    rank: int
    size: int
    local_rank: int
    one_host: bool
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    restart: int = 0
    agent: bool = False  # torchrun keeps a store at the address


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that this process belongs to, from what its launcher left in the environment."""
    given = {name: value for name, value in environ.items() if value.strip()}
    if not 0 <= _integer(given, "SLURM_STEP_ID", -1) < RESERVED_STEPS:  # a batch script has SLURM_PROCID=0 as well
        given = {name: value for name, value in given.items() if not name.startswith("SLURM_")}
    complete = [row for row in LAUNCHERS if all(name in given for name in row.needed)]
    for row in LAUNCHERS if not complete else ():
        if row.rank in given or row.size in given:
            here, missing = ([name for name in row.needed if (name in given) is there] for there in (True, False))
            raise UserError(
                f"{_show(given, here)} without {', '.join(missing)}: start with {row.name}, which sets all of them, "
                f"or unset {', '.join(here)} to train in one process"
            )
    inner = _read(TORCHRUN, given) if TORCHRUN in complete else None
    outer = next((_read(row, given) for row in complete if row is not TORCHRUN), None)
    if outer is None or (outer.size == 1 and inner is not None):
        return inner
    if inner is not None and inner.launcher == "torchrun":
        if given.get("GROUP_WORLD_SIZE") == "1":
            raise UserError(
                f"{outer.launcher} started {outer.size} copies of torchrun, which know nothing of each other "
                f"(GROUP_WORLD_SIZE=1): give them --nnodes {outer.size} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:PORT, or start torchrun once"
            )
        return inner
    by_hand = {TORCHRUN.rank: outer.rank, TORCHRUN.size: outer.size}
    if any(_integer(given, name, value) != value for name, value in by_hand.items()):
        raise UserError(
            f"{_show(given, by_hand)}, but {outer.launcher} says rank {outer.rank} of {outer.size}: "
            f"unset RANK and WORLD_SIZE, {outer.launcher} is enough"
        )
    return outer


def _read(row: Launcher, given: Mapping[str, str]) -> Launch:
    """What a launcher says, if it can be."""
    rank, size, local_rank = (_integer(given, name, 0) for name in (row.rank, row.size, row.local_rank))
    if not (0 <= rank < size and 0 <= local_rank < size):
        raise UserError(
            f"{_show(given, (row.rank, row.size, row.local_rank, row.here))} cannot be: a rank is one of 0 to size-1, "
            "here and on its host; start again with torchrun, mpirun or srun, and set none of these by hand"
        )
    address, port = given.get("MASTER_ADDR"), _integer(given, "MASTER_PORT", 0)
    if "MASTER_PORT" in given and not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port} is not a port: give one from 1 to 65535")
    # No word about this host: it has one process, as Kubernetes operators do it.
    together = given.get(row.here, "1") == given[row.size]
    one_host = together or address == "localhost" or (address or "").startswith("127.")
    # A port for each job, below those that Linux gives to outgoing connections: two launches may share a host.
    job = ".".join(given[name] for name in row.job if name in given) or str(os.getppid())
    of_job = 16384 + zlib.crc32(job.encode()) % 16384
    if one_host and not (address and port):
        address, port = "127.0.0.1", of_job
    elif row.hosts in given:
        address, port = address or first_host(given[row.hosts]), port or of_job
    if address is None:
        raise UserError(
            f"{_show(given, row.needed)}: the ranks are on several hosts, and nothing says where they meet: "
            "set MASTER_ADDR (mpirun -x MASTER_ADDR=<host of rank 0>; MPICH, Intel MPI: -genv MASTER_ADDR <that host>)"
        )
    launch = Launch(row.name, rank, size, local_rank, one_host, address, port or DEFAULT_PORT)
    if row is not TORCHRUN:
        return launch
    if "TORCHELASTIC_RUN_ID" not in given:
        return replace(launch, launcher="env")
    agent = given.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return replace(launch, restart=_integer(given, "TORCHELASTIC_RESTART_COUNT", 0), agent=agent)


def first_host(text: str) -> str:
    """The first of a list of hosts in Slurm's short form: of `n[03-05,7],login` it is n03."""
    first = re.sub(r"\[(\d+)(-\d+)?(,\d+(-\d+)?)*\]", r"\1", text).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", first):
        raise UserError(f"{text!r} is not a list of hosts such as n[03-05,7],login: set MASTER_ADDR")
    return first


def _integer(given: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(given.get(name, default))
    except ValueError:
        raise UserError(f"{name}={given[name]!r} is not a whole number: unset it, or let the launcher set it") from None


def _show(given: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={given[name]}" for name in names if name in given)
