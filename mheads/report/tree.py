"""The tree of a config, drawn in the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text
from rich.tree import Tree as Drawing

from mheads.config import Config
from mheads.experiment import factory
from mheads.tree import Node, children, describe, parse, whole_spec


def draw(config: Config) -> Group:
    """Every stage with its layers, members and parameters, and what the sharing saves."""
    network = factory(config)()  # one is enough to know the layers of all
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in children(network)}
    tree = parse(whole_spec(config.members, config.split), describe(network), config.members, config.model)
    members = f"{tree.num_members} member{'s' if tree.num_members != 1 else ''}"
    drawing = Drawing(Text(f"{config.model}, {members}", style="bold"), guide_style="dim")

    def add(node: Node, to: Drawing) -> None:
        label = Text.assemble(
            (node.name, "bold green" if node.children else "bold"),
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
    return Group(drawing, Text(text))
