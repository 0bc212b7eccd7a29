"""A plan in the terminal: how long training a config on ranks would take."""

from __future__ import annotations

from collections import defaultdict

import rich.table
from rich.console import Group, RenderableType
from rich.text import Text

from mheads.cli.printing.rank_text import mesh_text, names, ranks_of, seconds
from mheads.common.number_words import count
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.prediction import Prediction
from mheads.distributed.planning.workload import Cluster
from mheads.training.plan_ranks import RankPlan
from mheads.trees.tree_spec import Tree

FEW = 10  # slots that have a line each, even if several hold the same
MOST_LINES = 12


def show(plan: RankPlan) -> Group:
    workload, cluster = plan.workload, plan.cluster
    cut = f"batch {workload.rows} in {count(workload.micro_batches, 'micro-batch', 'es')}"
    parts: list[RenderableType] = [
        Text(f"{plan.name}, {count(workload.tree.num_members, 'member')}, {cut}", style="bold"),
        Text(
            f"{count(cluster.ranks, 'rank')} of {count(cluster.workers, 'worker')}, {plan.speed}; "
            f"{cluster.bandwidth / 1e9:g} GB/s, {cluster.latency * 1e6:g} µs"
        ),
        _figures(plan),
    ]
    if plan.key is not None:
        counted = "" if plan.measured else " Counted costs do not see that fewer rows at a time take longer each."
        parts.append(
            Text(
                f"{plan.key} is faster: ranks that share a stage divide its micro-batches, and there are more ranks "
                "than these. Their number decides the bits of a run, so `mheads train` does not change it by itself: "
                f"give this key to a new run.{counted}\n"
            )
        )
    several = list(plan.ways.items())[1:]
    for i, (way, (placement, prediction)) in enumerate(several):
        if same := [earlier for earlier, (other, _) in several[:i] if other == placement]:
            parts.append(Text.assemble((way, "bold"), f": the same as {same[0]}"))
        else:
            parts.append(_holdings(way, workload.tree, placement, prediction, cluster))
    return Group(*parts)


def _figures(plan: RankPlan) -> rich.table.Table:
    ways = list(plan.ways.values())
    first = ways[0][1].step_seconds
    rows = [
        ["step", *(seconds(p.step_seconds) for _, p in ways)],
        ["images/s", *(f"{plan.workload.rows / p.step_seconds:,.0f}" for _, p in ways)],
        ["speed-up", *(f"{first / p.step_seconds:.2f}" for _, p in ways)],
        ["idle", *(f"{100 * p.idle_share:.1f}%" for _, p in ways)],
        ["exposed communication", *(seconds(p.exposed_seconds) for _, p in ways)],
        ["floats per step", *(f"{p.floats_sent:,}" for _, p in ways)],
        ["replicas x slots", *(f"{placement.replicas} x {placement.slots}" for placement, _ in ways)],
    ]
    head: list[str | Head] = ["predicted", *(Head(way, right=True) for way in plan.ways)]
    return terminal_table(Table("The plan", head, text_rows(rows)))


def _holdings(way: str, tree: Tree, placement: Placement, prediction: Prediction, cluster: Cluster) -> Group:
    """Which ranks hold what, and how busy that keeps them; of many slots, those that hold the same share a line."""
    held = [placement.stages_on(slot) for slot in range(placement.slots)]
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for slot, stages in enumerate(held):
        alike = tuple(tree.nodes[name].layers for name in stages)
        groups[alike if placement.slots > FEW else slot].append(slot)
    rows = []
    for slots in list(groups.values())[:MOST_LINES]:
        busy = sum(prediction.compute_seconds[slot] for slot in slots) / (len(slots) * cluster.workers)
        holds = names(dict.fromkeys(stage for slot in slots for stage in held[slot]))
        each = f", {len(held[slots[0]])} each" if len(slots) > 1 else ""
        idle = f"{100 * (1 - busy / prediction.step_seconds):.0f}%"
        rows.append([ranks_of(placement, slots), f"{holds}{each}", seconds(busy), idle])
    if more := list(groups.values())[MOST_LINES:]:
        rows.append([f"... {sum(map(len, more))} more", "", "", ""])
    head: list[str | Head] = ["who", "holds", Head("computes", right=True), Head("idle", right=True)]
    title = Text.assemble((way, "bold"), f": {mesh_text(placement, cluster.ranks)}")
    return Group(title, terminal_table(Table(way, head, text_rows(rows))))
