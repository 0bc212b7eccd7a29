"""How long collectives take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wires:
    """What collectives take: an all-gather passes blocks around a ring, an all-to-all sends all at once."""

    seconds_per_float: float
    latency: float

    def gather(self, ranks: int, block: float) -> float:
        return (ranks - 1) * (self.latency + block * self.seconds_per_float)

    def exchange(self, floats: float) -> float:
        return self.latency + floats * self.seconds_per_float
