"""Predicts how long a step on several ranks takes and what it sends, by playing the tasks and collectives of the ranks
engine in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.simulation import Simulation
from mheads.distributed.planning.stage_loads import StageLoad
from mheads.distributed.planning.workload import Cluster, Workload


@dataclass(frozen=True)
class Exchange:
    """What the ranks that share a stage give each other in a step, in floats of the whole batch: its output, the
    gradients of its output, and the gradients of its weights."""

    stage: str
    slots: tuple[int, ...]
    outputs: int
    gradients: int
    weights: int


def traffic(workload: Workload, loads: Mapping[str, StageLoad], placement: Placement) -> list[Exchange]:
    """What is exchanged for each stage; for members, where the loss needs all of them, also their outputs."""
    simulation = Simulation(workload, loads, 1)
    floats = simulation.count_by_stage(placement)
    exchanges = []
    for name, slots in placement.stages.items():
        down, up, weights = (floats.get((kind, name), 0) for kind in ("down", "up", "sum"))
        if down or up or weights:
            exchanges.append(Exchange(name, slots, down, up, weights))
    if outputs := floats.get(("loss", ""), 0):
        exchanges.append(Exchange("loss", tuple(range(placement.slots)), outputs, 0, 0))
    return exchanges


@dataclass(frozen=True)
class Prediction:
    """A training step with its update: its time, the part in which cores have nothing to do, and what is sent.

    `compute_seconds` are those of all workers of each rank. `exposed_seconds`: how much shorter the step would be if
    sending took no time. `floats_sent` is what the ranks give to collectives.
    """

    micro_batches: int
    step_seconds: float
    compute_seconds: tuple[float, ...]
    idle_share: float
    exposed_seconds: float
    floats_sent: int
    exchanges: tuple[Exchange, ...]


def predict(workload: Workload, cluster: Cluster, loads: Mapping[str, StageLoad], placement: Placement) -> Prediction:
    """Predicts a step."""
    simulation = Simulation(workload, loads, cluster.workers)
    seconds, compute = simulation.run(placement, cluster.seconds_per_float, cluster.latency)
    ideal, _ = simulation.run(placement, 0.0, 0.0)
    exchanges = tuple(traffic(workload, loads, placement))
    return Prediction(
        workload.micro_batches,
        seconds,
        tuple(compute),
        max(0.0, 1 - sum(compute) / (placement.ranks * cluster.workers * seconds)) if seconds else 0.0,
        max(0.0, seconds - ideal),  # a greedy order can, rarely, gain from a late message
        sum(one.outputs + one.gradients + one.weights for one in exchanges),
        exchanges,
    )
