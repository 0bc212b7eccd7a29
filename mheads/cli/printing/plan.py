"""A plan in the terminal: how long training a config on ranks would take."""

from __future__ import annotations

from collections import defaultdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mheads.cli.printing.rank_text import mesh_text, names, ranks_of, seconds
from mheads.common.number_words import count
from mheads.distributed.placement import Placement
from mheads.distributed.planning.job import Cluster
from mheads.distributed.planning.search import Prediction
from mheads.training.plan_ranks import RankPlan
from mheads.trees.tree_spec import Tree


def show(plan: RankPlan) -> Group:
    job, cluster = plan.job, plan.cluster
    cut = f"batch {job.rows} in {count(job.micro_batches, 'micro-batch', 'es')}"
    parts: list[RenderableType] = [
        Text(f"{plan.name}, {count(job.tree.num_members, 'member')}, {cut}", style="bold"),
        Text(
            f"{count(cluster.ranks, 'rank')} of {count(cluster.workers, 'worker')}, {plan.speed}; "
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


def _figures(plan: RankPlan) -> Table:
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
        "floats per step": [f"{p.floats_sent:,}" for _, p in found],
        "replicas x slots": [f"{m.replicas} x {m.slots}" for m, _ in found],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _holdings(way: str, tree: Tree, placement: Placement, prediction: Prediction, cluster: Cluster) -> RenderableType:
    """Which ranks hold what, and how busy that keeps them; of many slots, those that hold the same share a line."""
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
