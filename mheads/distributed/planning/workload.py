"""What is to be done, and by which ranks: the two things that every prediction is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mheads.common.errors import UserError
from mheads.engine.micro_batches import Pieces, count_pieces
from mheads.trees.tree_spec import Tree

BANDWIDTH = 1.25e9  # bytes per second: 10 Gbit/s
LATENCY = 50e-6


@dataclass(frozen=True)
class Workload:
    """A training step: a tree on `rows` examples, cut into micro-batches, and these into `pieces` for shared stages.

    `separable`: the loss needs no gathering. `loss_floats`: what a member gives to the loss for an example, of so many
    numbers in its output. `share`: the part of the rows that a member learns from. `in_order`: its
    micro-batches follow one another, because running statistics are updated in their order.
    """

    tree: Tree
    rows: int
    micro_batches: int
    separable: bool
    share: float = 1.0
    in_order: bool = False
    loss_floats: Callable[[int], int] = int
    pieces: int = 1

    @property
    def pieces_by_stage(self) -> Pieces:
        return count_pieces(self.tree, self.pieces, self.rows, self.micro_batches)

    @property
    def divisible(self) -> int:
        """How many micro-batches replicas can share."""
        return 1 if self.in_order else self.micro_batches


@dataclass(frozen=True)
class Cluster:
    """Ranks with `workers` cores each. A rank sends and receives `bandwidth` bytes per second at once, one message
    after the other; a message is `latency` seconds under way."""

    ranks: int
    workers: int = 1
    bandwidth: float = BANDWIDTH
    latency: float = LATENCY
    bytes_per_float: int = 4

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("workers", self.workers), ("bandwidth", self.bandwidth)):
            if not value > 0:
                raise UserError(f"--{name} is {value:g}: it must be above 0")
        if not self.latency >= 0:
            raise UserError(f"--latency is {self.latency:g}: it must not be below 0")

    @property
    def seconds_per_float(self) -> float:
        return self.bytes_per_float / self.bandwidth
