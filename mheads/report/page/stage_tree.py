"""The tree of a run as nested boxes, which the page lays out from the input on the left to the members on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mheads.report.charts.chart import NUM_COLOURS
from mheads.trees.tree_spec import Node

MOST_LEAVES = 12  # with more members, leaves that are alike are drawn as one


@dataclass(frozen=True)
class StageBox:
    """A stage: a leaf has the colour of its member, s0 to s7; `note` says which rank holds the stage."""

    title: str
    layers: tuple[str, ...]
    parameters: int
    note: str = ""
    colour: str = ""
    children: tuple[StageBox, ...] = ()


def box_stages(
    nodes: Mapping[str, Node], names: Sequence[str], sizes: Mapping[str, int], ranks: Mapping[str, int]
) -> tuple[StageBox, ...]:
    """The boxes of these stages and of all below them; sizes: parameters by layer, ranks: by stage."""
    many = sum(not node.children for node in nodes.values()) > MOST_LEAVES
    leaves = [name for name in names if not nodes[name].children]
    together = many and len(leaves) > 1
    boxes = []
    for name in (name for name in names if not (together and name in leaves[1:])):
        node = nodes[name]
        members = [m for leaf in leaves for m in nodes[leaf].members] if together and name in leaves else node.members
        note = f"rank {ranks[name]}" if name in ranks else ""
        boxes.append(
            StageBox(
                name if node.children else name_members(members),
                node.layers,
                sum(sizes[layer] for layer in node.layers),
                "each with its own" if members is not node.members else note,
                "" if node.children else f"s{members[0] % NUM_COLOURS if len(members) == 1 else NUM_COLOURS - 1}",
                box_stages(nodes, node.children, sizes, ranks),
            )
        )
    return tuple(boxes)


def name_members(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"member {members[0]}"
    in_a_row = list(members) == list(range(members[0], members[-1] + 1))
    return f"members {members[0]} to {members[-1]}" if in_a_row else f"members {', '.join(map(str, members))}"
