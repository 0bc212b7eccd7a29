"""Timing: all sides in one process, turn by turn, best and median of n."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mheads.common.nested_values import Value
from mheads.engine.cost import costs_on
from mheads.engine.threads import available_cores
from mheads.trees.treenet import TreeNet

PAUSE = 0.03  # seconds: OpenMP's threads of one side spin for a while afterwards, and would slow down the next side


@dataclass(frozen=True)
class Times:
    """Seconds of each round."""

    seconds: list[float]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, float]:
        return {"best_ms": round(1e3 * self.best, 2), "median_ms": round(1e3 * self.median, 2)}


def interleave(
    sides: dict[str, Callable[[], Any]], rounds: int, progress: Callable[[int, int], None], warmup: int = 2
) -> dict[str, Times]:
    """Times each side once per round, in an order that moves on by one each round.

    A side that returns seconds has timed itself, in another process.
    """
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    threads = torch.get_num_threads()
    for turn in range(warmup + rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            time.sleep(PAUSE)
            began = time.perf_counter()
            own = sides[name]()
            seconds = own if isinstance(own, float) else time.perf_counter() - began
            torch.set_num_threads(threads)
            if turn >= warmup:
                found[name].append(seconds)
        progress(turn + 1, warmup + rounds)
    return {name: Times(seconds) for name, seconds in found.items()}


def ratio(name: str, theirs: Times, ours: Times) -> dict[str, float]:
    """How many times as long they take: best against best, median against median."""
    return {
        f"ratio_{name}": round(theirs.best / ours.best, 3),
        f"ratio_{name}_median": round(theirs.median / ours.median, 3),
    }


def matmul_rate() -> Callable[[], None]:
    """A side whose time gives the rate of float32 matrix products on all cores: `MATMUL_FLOPS` per call."""
    a, b = torch.randn(MATMUL_SIDE, MATMUL_SIDE), torch.randn(MATMUL_SIDE, MATMUL_SIDE)
    out = torch.empty(MATMUL_SIDE, MATMUL_SIDE)

    def multiply() -> None:
        for _ in range(MATMUL_REPEATS):
            torch.mm(a, b, out=out)

    return multiply


MATMUL_SIDE, MATMUL_REPEATS = 2048, 3
MATMUL_FLOPS = 2 * MATMUL_SIDE**3 * MATMUL_REPEATS


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": available_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def step_multiply_adds(net: TreeNet, shape: tuple[int, ...], side: dict[str, Value] | None = None) -> int:
    """Useful multiply-adds of a training step, per example."""
    costs = costs_on(net, torch.zeros((1, *shape), dtype=next(net.parameters()).dtype), side)
    return sum(costs[name].step(node.parent is None) for name, node in net.tree.nodes.items())
