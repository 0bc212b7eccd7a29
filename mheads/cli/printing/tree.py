"""The tree of a config, drawn in the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree as Drawing

from mheads.cli.printing.rank_text import mesh_text, names, numbers, ranks_of
from mheads.common.number_words import count
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.config.schema import Config
from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.prediction import traffic
from mheads.distributed.planning.workload import Cluster
from mheads.training.build_from_config import make_tree
from mheads.training.plan_ranks import ConfigWorkload, make_workload, place
from mheads.trees.tree_spec import Node


def draw(config: Config, ranks: int | None = None) -> Group:
    """Draws every stage with its layers, members and parameters, and what the sharing saves.

    With a number of ranks also who would hold each stage, and what goes from rank to rank.
    """
    on_ranks = None if ranks is None else _place(config, ranks)
    # No stage is built: one network is enough to know all layers.
    net = make_tree(config, only=()) if on_ranks is None else on_ranks[0].net
    sizes, tree = net.facts.layer_sizes(), net.tree
    title = f"{config.model}, {count(tree.num_members, 'member')}"
    drawing = Drawing(Text(title, style="bold"), guide_style="dim")

    def add(node: Node, to: Drawing) -> None:
        label = Text.assemble(
            (node.name, "bold green" if node.children else "bold"),
            ("" if on_ranks is None else f"  {_rank_text(on_ranks[1], node.name)}", "magenta"),
            f"  {' '.join(node.layers)}  ",
            (f"{sum(sizes[layer] for layer in node.layers):,} parameters", "cyan"),
            (f"  member{'s' if len(node.members) > 1 else ''} {', '.join(map(str, node.members))}", "dim"),
        )
        below = to.add(label)
        for child in node.children:
            add(tree.nodes[child], below)

    for root in tree.roots:
        add(root, drawing)
    total = sum(sizes[layer] for node in tree.nodes.values() for layer in node.layers)
    text = f"{total:,} parameters"
    if tree.num_members > 1:
        independent = tree.num_members * sum(sizes.values())
        saved = 100 * (1 - total / independent)
        text += f"; independent members would have {independent:,}: sharing saves {saved:.1f}%"
    return Group(drawing, Text(text), *([] if on_ranks is None else _exchanges(*on_ranks)))


def _place(config: Config, ranks: int) -> tuple[ConfigWorkload, Placement, int]:
    workload = make_workload(config)
    return workload, place(config.placement, workload, Cluster(ranks)), ranks


def _rank_text(placement: Placement, stage: str) -> str:
    return ranks_of(placement, placement.stages[stage])


def _exchanges(workload: ConfigWorkload, placement: Placement, ranks: int) -> list[RenderableType]:
    """The mesh, and a line for what is exchanged for each stage; equal lines are joined."""
    exchanges = traffic(workload, workload.count_loads(1.0), placement)
    texts: list[RenderableType] = [Text(mesh_text(placement, ranks))]
    rows = []
    for floats, group in groupby(exchanges, key=lambda one: (one.outputs, one.gradients, one.weights)):
        alike = list(group)
        each = " each" if len(alike) > 1 else ""
        slots = numbers(slot for one in alike for slot in one.slots)
        rows.append([names(one.stage for one in alike), slots, *(f"{number:,}{each}" for number in floats)])
    if rows:
        head: list[str | Head] = ["stage", "slots" if placement.replicas > 1 else "ranks"]
        head += [Head(title, right=True) for title in ("outputs", "their gradients", "weight gradients")]
        texts.append(terminal_table(Table("Floats that are exchanged for a batch", head, text_rows(rows))))
    total = sum(one.outputs + one.gradients + one.weights for one in exchanges)
    return [*texts, Text(f"{total:,} floats per step are given to other ranks")]
