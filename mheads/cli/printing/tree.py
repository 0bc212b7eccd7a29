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
from mheads.distributed.placement import Placement
from mheads.distributed.step_time.placement_search import count_exchanged_floats, traffic
from mheads.distributed.step_time.workload import Cluster
from mheads.training.build_from_config import make_tree
from mheads.training.plan_ranks import ConfigWorkload, make_workload, place
from mheads.trees.tree_spec import Node, Tree


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
    return Group(drawing, Text(text), *([] if on_ranks is None else _edges(*on_ranks)))


def _place(config: Config, ranks: int) -> tuple[ConfigWorkload, Placement, int]:
    workload = make_workload(config)
    return workload, place(config.placement, workload, Cluster(ranks)), ranks


def _rank_text(placement: Placement, stage: str) -> str:
    return ranks_of(placement, [placement.stages[stage]])


def _edges(workload: ConfigWorkload, placement: Placement, ranks: int) -> list[RenderableType]:
    """The mesh, and a line for each output that goes to other ranks; equal lines are joined."""
    loads = workload.count_loads(1.0)
    edges = traffic(workload, loads, placement)
    texts: list[RenderableType] = [Text(mesh_text(placement, ranks))]
    rows = []
    for (forth, back, _), group in groupby(
        edges, key=lambda e: (e.forward, e.backward, _is_leaf(workload.tree, e.stage))
    ):
        alike = list(group)
        each = " each" if len(alike) > 1 else ""
        slots = [numbers(e.source for e in alike), numbers(e.target for e in alike)]
        rows.append([names(dict.fromkeys(e.stage for e in alike)), *slots, f"{forth:,}{each}", f"{back:,}{each}"])
    if rows:
        head: list[str | Head] = ["output of", "from slot" if placement.replicas > 1 else "from rank", "to"]
        head += [Head(title, right=True) for title in ("floats per batch", "back")]
        texts.append(terminal_table(Table("What is sent", head, text_rows(rows))))
    sent = sum(e.forward + e.backward for e in edges), count_exchanged_floats(loads, placement)
    text = f"{sum(sent):,} floats per step between ranks"
    if placement.replicas > 1:
        text += f", {sent[1]:,} of them gradients of weights between replicas"
    return [*texts, Text(text)]


def _is_leaf(tree: Tree, stage: str) -> bool:
    return not tree.nodes[stage].children
