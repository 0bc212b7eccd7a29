"""Everything that depends on the device is here; a GPU is untested so far."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from mheads.common.errors import UserError


def resolve(name: str, local_rank: int = 0) -> torch.device:
    """The device of this name; `auto` is a GPU where there is one, and ranks on one machine share its GPUs evenly."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r}: give auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {name!r}: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device = {name!r}, but torch sees no GPU here; use device=cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device = {name!r}, but the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


def default_workers(device: torch.device, cores: int) -> int:
    """How many worker threads there are by default: one per core, or one to feed a GPU."""
    return cores if device.type == "cpu" else 1


def refuse_beyond_memory(num_bytes: int, what: str) -> None:
    """Refuses to take more memory than there is: the system would end the process without a word."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > there:
        raise UserError(
            f"{what} need {num_bytes / 1e9:,.1f} GB, and this machine has {there / 1e9:,.1f}: take fewer members, "
            "a split that shares more, a smaller network, or more ranks"
        )


def peak_memory() -> int:
    """The most bytes that this process has used so far; of a process that only went on with a run, since then."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would begin with that of the process that started this one
        return 1024 * int(next(x for x in status.read_text().splitlines() if x.startswith("VmHWM")).split()[1])
    import resource  # which Windows lacks

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
