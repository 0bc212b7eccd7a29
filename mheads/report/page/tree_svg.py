"""The tree of a run as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mheads.report.charts.chart import NUM_COLOURS
from mheads.report.page.templates import render

BOX, GAP, PAD, LINE = 200, 40, 10, 17  # of a stage: width, between levels, inside, of a line of text
INPUT = 112  # width of the box of the input
MOST_LEAVES = 12  # with more members, leaves that are alike are drawn as one
LETTERS = 25  # of a line in a box
MOST_LINES = 3  # of the names of layers

Point = tuple[float, float]


@dataclass(frozen=True)
class StageBox:
    """A stage that is drawn as a box; `note` says which rank holds it."""

    name: str
    layers: tuple[str, ...]
    members: tuple[int, ...]
    children: tuple[str, ...]
    parameters: int
    note: str = ""


def draw_tree(stages: Mapping[str, StageBox], roots: Sequence[str], shape: str) -> Markup:
    """Stages from the input, of this shape, on the left to the members on the right."""
    tree = _Tree(stages)
    places = tree.add_below(roots, 0)
    middle = sum(y for _, y in places) / len(places)
    text = "; ".join(
        f"{stage.name}: {' '.join(stage.layers)}, {stage.parameters:,} parameters, members "
        f"{', '.join(map(str, stage.members))}"
        for stage in stages.values()
    )
    return render(
        "tree.svg",
        text=f"The tree of stages. {text}",
        width=math.ceil(tree.width),
        height=math.ceil(max(26, tree.height)),
        input=shape,
        input_width=INPUT,
        box_width=BOX,
        pad=PAD,
        middle=middle,
        boxes=tree.boxes,
        edges=[*((INPUT, middle, x, y) for x, y in places), *tree.edges],
    )


class _Tree:
    """Places boxes: leaves one below the other, a stage beside the middle of its children."""

    def __init__(self, stages: Mapping[str, StageBox]) -> None:
        self.stages, self.height, self.width = stages, 0.0, 0.0
        self.boxes, self.edges = list[dict[str, object]](), list[tuple[float, float, float, float]]()
        self.many = sum(not stage.children for stage in stages.values()) > MOST_LEAVES

    def add_below(self, names: Sequence[str], level: int) -> list[Point]:
        """Adds these stages and all below them; returns the middles of their left sides."""
        leaves = [self.stages[name] for name in names if not self.stages[name].children]
        if self.many and len(leaves) > 1:  # such a stage is drawn once for all
            members = tuple(m for stage in leaves for m in stage.members)
            joined = StageBox("alike", leaves[0].layers, members, (), leaves[0].parameters, "each with its own")
            others = [self.add_below([name], level)[0] for name in names if self.stages[name].children]
            return [*others, self._add(joined, level, [])]
        return [
            self._add(stage, level, self.add_below(stage.children, level + 1) if stage.children else [])
            for stage in (self.stages[name] for name in names)
        ]

    def _add(self, stage: StageBox, level: int, children: list[Point]) -> Point:
        lines = _wrap(stage.layers)
        size = 2 * PAD + LINE * (2 + len(lines) + bool(stage.note))
        x = INPUT + GAP + level * (BOX + GAP)
        if children:
            top = max(0.0, sum(y for _, y in children) / len(children) - size / 2)
            self.height = max(self.height, top + size)
        else:
            top = self.height + (12 if self.height else 0)
            self.height = top + size
        self.width = max(self.width, x + BOX + 1)
        middle = round(top + size / 2, 1)
        self.edges += [(x + BOX, middle, *child) for child in children]
        texts = [(stage.name if children else name_members(stage.members), "strong"), *((line, "") for line in lines)]
        texts += [(text, "dim") for text in (f"{stage.parameters:,} parameters", stage.note) if text]
        alone = f"s{stage.members[0] % NUM_COLOURS}" if len(stage.members) == 1 else "s7"
        self.boxes.append(
            {
                "title": f"{stage.name}: {' '.join(stage.layers)}",
                "x": x,
                "top": round(top, 1),
                "height": size,
                "texts": [
                    (round(top + PAD + LINE * (i + 0.75), 1), kind, text) for i, (text, kind) in enumerate(texts)
                ],
                "colour": "" if children else alone,
            }
        )
        return x, middle


def name_members(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"member {members[0]}"
    row = list(members) == list(range(members[0], members[-1] + 1))
    text = f"members {members[0]} to {members[-1]}" if row else f"members {', '.join(map(str, members))}"
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def _wrap(layers: Sequence[str]) -> list[str]:
    """Names of layers in a few lines; what does not fit is counted."""
    lines: list[str] = []
    for i, layer in enumerate(layers):
        name = layer if len(layer) <= LETTERS else f"{layer[: LETTERS - 1]}…"
        if lines and len(lines[-1]) + 1 + len(name) <= LETTERS:
            lines[-1] += f" {name}"
        elif len(lines) < MOST_LINES:
            lines.append(name)
        else:
            left = f" … +{len(layers) - i}"
            lines[-1] = lines[-1][: LETTERS - len(left)] + left
            break
    return lines
