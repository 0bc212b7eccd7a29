"""Predicts how long training a config on ranks would take, placed in one or more ways; also as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mheads.common.atomic_files import write_atomically
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.distributed.placement import Placement
from mheads.distributed.planning.job import Cluster, Job
from mheads.distributed.planning.search import Prediction, predict
from mheads.training.rank_plan import job_of, place


@dataclass(frozen=True)
class Plan:
    """A job on a cluster, placed in one or more ways; the first is one rank, for comparison."""

    name: str
    job: Job
    cluster: Cluster
    speed: str
    ways: dict[str, tuple[Placement, Prediction]]

    def to_json(self) -> dict[str, Any]:
        job, cluster = self.job, self.cluster
        return {
            "recipe": self.name,
            "members": job.tree.num_members,
            "batch": job.rows,
            "micro_batches": job.micro_batches,
            "ranks": cluster.ranks,
            "workers": cluster.workers,
            "bandwidth_bytes_per_second": cluster.bandwidth,
            "latency_seconds": cluster.latency,
            "speed": self.speed,
            "placements": {
                way: {
                    "replicas": placement.replicas,
                    "slots": placement.slots,
                    "stages": dict(placement.stages),
                    "images_per_second": job.rows / prediction.step_seconds,
                    **asdict(prediction),
                }
                for way, (placement, prediction) in self.ways.items()
            },
        }


def make_plan(config: Config, cluster: Cluster, flops: float | None, how: str | None, name: str) -> Plan:
    """The plan at `flops` per second and rank (None: measured), placed by `how` (None: the config's way, and auto)."""
    if flops is not None and not flops > 0:
        raise UserError(f"--flops is {flops:g}: it must be above 0")
    job = job_of(config)
    loads = job.measured() if flops is None else job.counted(flops / cluster.workers)
    ways: dict[str, str | Mapping[str, int]] = {"auto": "auto"}
    if how is not None:
        ways = {how: how}
    elif isinstance(config.placement, Mapping):
        ways = {"as given": config.placement, **ways}
    else:
        ways = {"default": "default", **ways}
    alone = Cluster(1, cluster.workers)
    one = place("default", job, alone)
    found = {"one rank": (one, predict(job, alone, loads, one))}
    for way, value in ways.items():
        placement = place(value, job, cluster, loads)
        found[way] = (placement, predict(job, cluster, loads, placement))
    speed = "measured on this machine" if flops is None else f"{flops / 1e12:g} TFLOP/s per rank"
    return Plan(name, job, cluster, speed, found)


def write_json(plan: Plan, path: Path) -> None:
    write_atomically(path, json.dumps(plan.to_json(), indent=1) + "\n")
