"""The tree of a config, drawn in the terminal."""

from __future__ import annotations

import torch
from rich.console import Group
from rich.text import Text
from rich.tree import Tree as Drawing

from mheads.config import Config
from mheads.experiment import factory
from mheads.tree import Node, TreeNet


def draw(config: Config) -> Group:
    """Every stage with its layers, members and parameters, and what the sharing saves."""
    with torch.device("meta"):  # shapes are enough: CaffeNet's weights would take seconds to draw
        net = TreeNet(factory(config), config.members, config.split)
    return draw_net(net)


def draw_net(net: TreeNet) -> Group:
    drawing = Drawing(Text(f"{net.network_name}, {_count(net.num_members, 'member')}", style="bold"), guide_style="dim")

    def add(node: Node, to: Drawing) -> None:
        stage = net.stage(node.name)
        parameters = sum(p.numel() for p in stage.parameters())
        members = ", ".join(map(str, node.members))
        label = Text.assemble(
            (node.name, "bold green" if node.children else "bold"),
            f"  {' '.join(node.layers)}  ",
            (f"{parameters:,} parameters", "cyan"),
            (f"  member{'s' if len(node.members) > 1 else ''} {members}", "dim"),
        )
        below = to.add(label)
        for child in node.children:
            add(net.tree.nodes[child], below)

    for root in net.tree.roots:
        add(root, drawing)
    total, independent = net.num_parameters(), net.num_independent_parameters()
    text = f"{total:,} parameters"
    if net.num_members > 1:
        saved = 100 * (1 - total / independent)
        text += f"; independent members would have {independent:,}: sharing saves {saved:.1f}%"
    return Group(drawing, Text(text))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
