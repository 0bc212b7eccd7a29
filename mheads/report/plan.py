"""What training a config on ranks would take, in the terminal and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mheads.config import Config
from mheads.distributed.placement import Placement
from mheads.errors import UserError
from mheads.files import write_atomically
from mheads.planning.job import Cluster, Job
from mheads.planning.recipe import job_of, place
from mheads.planning.search import Prediction, predict
from mheads.tree import Tree


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
    """`flops` operations a second a rank, or measured on this machine; `how`, or as the config says and auto."""
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
    speed = "measured on this machine" if flops is None else f"{flops / 1e12:g} TFLOP/s a rank"
    return Plan(name, job, cluster, speed, found)


def write_json(plan: Plan, path: Path) -> None:
    write_atomically(path, json.dumps(plan.to_json(), indent=1) + "\n")


def show(plan: Plan) -> Group:
    job, cluster = plan.job, plan.cluster
    cut = f"batch {job.rows} in {_count(job.micro_batches, 'micro-batch', 'es')}"
    parts: list[RenderableType] = [
        Text(f"{plan.name}, {_count(job.tree.num_members, 'member')}, {cut}", style="bold"),
        Text(
            f"{_count(cluster.ranks, 'rank')} of {_count(cluster.workers, 'worker')}, {plan.speed}; "
            f"{cluster.bandwidth / 1e9:g} GB/s, {cluster.latency * 1e6:g} µs"
        ),
        _figures(plan),
    ]
    several = list(plan.ways.items())[1:]
    for i, (way, (placement, prediction)) in enumerate(several):
        same = [other for other, (found, _) in several[:i] if found == placement]
        if same:
            parts.append(Text.assemble((way, "bold"), f": the same as {same[0]}"))
        else:
            parts.append(_holdings(way, job.tree, placement, prediction, cluster))
    return Group(*parts)


def _figures(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("predicted")
    for way in plan.ways:
        table.add_column(way, justify="right")
    found = list(plan.ways.values())
    first = found[0][1].step_seconds
    rows = {
        "step": [seconds(p.step_seconds) for _, p in found],
        "images/s": [f"{plan.job.rows / p.step_seconds:,.0f}" for _, p in found],
        "speed-up": [f"{first / p.step_seconds:.2f}" for _, p in found],
        "idle": [f"{100 * p.idle_share:.1f}%" for _, p in found],
        "exposed communication": [seconds(p.exposed_seconds) for _, p in found],
        "floats a step": [f"{p.floats_sent:,}" for _, p in found],
        "replicas x slots": [f"{m.replicas} x {m.slots}" for m, _ in found],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _holdings(way: str, tree: Tree, placement: Placement, prediction: Prediction, cluster: Cluster) -> RenderableType:
    """Which ranks hold what, and how busy that keeps them; slots that hold alike in one line if there are many."""
    held = [placement.owned(slot) for slot in range(placement.slots)]
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for slot, stages in enumerate(held):
        alike = tuple(tree.nodes[name].layers for name in stages)
        groups[alike if placement.slots > 10 else slot].append(slot)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("who")
    table.add_column("holds", overflow="fold")
    table.add_column("computes", justify="right")
    table.add_column("idle", justify="right")
    for slots in list(groups.values())[:12]:
        busy = sum(prediction.compute_seconds[slot] for slot in slots) / (len(slots) * cluster.workers)
        holds = names(stage for slot in slots for stage in held[slot])
        table.add_row(
            ranks_of(placement, slots),
            f"{holds}, {len(held[slots[0]])} each" if len(slots) > 1 else holds,
            seconds(busy),
            f"{100 * (1 - busy / prediction.step_seconds):.0f}%",
        )
    if len(groups) > 12:
        table.add_row(f"... {sum(map(len, list(groups.values())[12:]))} more", "", "", "")
    return Group(Text.assemble((way, "bold"), f": {mesh_text(placement, cluster.ranks)}"), table)


def mesh_text(placement: Placement, ranks: int) -> str:
    """The mesh in words, and whether anybody is left over."""
    where = _count(placement.slots, "rank")
    text = f"one tree on {where}" if placement.replicas == 1 else f"{placement.replicas} replicas of {where} each"
    if placement.ranks < ranks:
        text += f"; {_count(ranks - placement.ranks, 'rank')} of {ranks} with nothing to do"
    return text


def ranks_of(placement: Placement, slots: Iterable[int]) -> str:
    """The ranks of these slots in every replica: `rank 0`, `ranks 1-3, 5-7`."""
    ranks = [replica * placement.slots + slot for slot in slots for replica in range(placement.replicas)]
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}"


def numbers(found: Iterable[int]) -> str:
    """Numbers in short: `0, 2-5`."""
    spans: list[list[int]] = []
    for number in sorted(set(found)):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return some([span(*pair) for pair in spans])


def names(stages: Iterable[str]) -> str:
    """Stages in short: `trunk, conv2/0-3`."""
    spans: list[tuple[str, int, int] | str] = []
    for stage in stages:
        head, slash, tail = stage.rpartition("/")
        last = spans[-1] if spans else ""
        if not tail.isdigit():
            spans.append(stage)
        elif isinstance(last, tuple) and last[0] == head + slash and last[2] + 1 == int(tail):
            spans[-1] = (last[0], last[1], int(tail))
        else:
            spans.append((head + slash, int(tail), int(tail)))
    return some([s if isinstance(s, str) else f"{s[0]}{span(s[1], s[2])}" for s in spans])


def some(texts: list[str]) -> str:
    """All of a few, the first and the last of many."""
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-3 or not value else f"{1e6 * value:.0f} µs"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{plural if number != 1 else ''}"
