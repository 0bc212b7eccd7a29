"""How an engine computes: the config's `engine`, `optim` and `device` with every `auto` decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mheads.data.views import View

CPU = torch.device("cpu")


@dataclass(frozen=True)
class EngineOptions:
    """`workers` are threads and never change a result. Each batch is cut into `micro_batches`, each of these into
    `pieces` for the stages that members share, and a step takes `accumulate` batches. `seed` is that of the dropout
    masks. `precision` is what stages compute in: in bfloat16, weights, losses, statistics and sums stay in float32.
    `cores` is how many the threads of a stage are chosen for. `stacked` names the sibling stages that run as one, on
    `stack_threads` threads. An evaluation averages outputs over `views` of the examples."""

    workers: int
    micro_batches: int
    seed: int = 0
    accumulate: int = 1
    device: torch.device = CPU
    precision: torch.dtype = torch.float32
    cores: int = 2
    stacked: tuple[tuple[str, ...], ...] = ()
    stack_threads: int = 1
    views: tuple[View, ...] = ()
    pieces: int = 1

    def to_dict(self) -> dict[str, Any]:
        """What decides the bits of a run besides its config, for result.json: how every `auto` was decided."""
        shared = {"shared_micro_batches": self.micro_batches * self.pieces} if self.pieces > 1 else {}
        return {
            "micro_batches": self.micro_batches,
            **shared,
            "cores": self.cores,
            "stacks": [len(names) for names in self.stacked],
            "stack_threads": self.stack_threads,
        }
