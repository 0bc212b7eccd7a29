"""Which device a name means, and what the machine has of memory."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

from mheads.common.errors import UserError

CPU = torch.device("cpu")
ACCELERATORS = ("cuda", "hpu", "mps", "mtia", "xpu")


def describe_cpu() -> str:
    """The kind of CPU, as far as it decides bits: `x86_64, AVX512`."""
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def resolve(name: str, local_rank: int = 0) -> torch.device:
    """The device of this name; `auto` is an accelerator where there is one, and ranks on one machine share its devices
    evenly."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if name == "auto":
        return CPU if accelerator is None else torch.device(accelerator.type, local_rank % count)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if accelerator is None or device.type != accelerator.type:
        if device.type not in ACCELERATORS:
            raise UserError(f"device = {name!r}: give auto, cpu, cuda, cuda:N or another accelerator that torch sees")
        available = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise UserError(f"device = {name!r}, but torch sees {available} here; use device=cpu or auto")
    if (device.index or 0) >= count:
        raise UserError(f"device = {name!r}, but the devices here are {device.type}:0 to {device.type}:{count - 1}")
    return device


def widen(t: Tensor) -> Tensor:
    """A tensor in the precision of sums: float64, which Apple's device lacks."""
    return t.float() if t.device.type == "mps" else t.double()


def default_workers(device: torch.device, cores: int) -> int:
    """How many worker threads there are by default: one per core, or one to feed an accelerator."""
    return cores if device.type == "cpu" else 1


def refuse_beyond_memory(num_bytes: int, what: str) -> None:
    """Refuses to take more memory than there is: the system would end the process without a word."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise UserError(
            f"{what} need {num_bytes / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f}: take fewer members, "
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
