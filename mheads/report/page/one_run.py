"""The page of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.common.table import Cell, Table
from mheads.config.schema import Config
from mheads.engine.cost import costs_on
from mheads.problems import finds_objects, is_single_label
from mheads.problems.baselines import top
from mheads.problems.metric_text import label, number
from mheads.report.page import curves, describe, svg
from mheads.report.page.agreement import agreement
from mheads.report.page.detections import class_table
from mheads.report.page.evidence import Evidence, examine, looked_at, network, pictures
from mheads.report.page.html import (
    NOTHING,
    Code,
    Drawing,
    Facts,
    Grid,
    Grids,
    Hardest,
    Missing,
    Page,
    Part,
    Section,
    ownership_grid,
)
from mheads.runs.record import Record
from mheads.runs.result_rows import result_rows
from mheads.trees.multiply_adds import make_example
from mheads.trees.treenet import TreeNet

# What the paper says of a config: the name of its row, and the figure of each metric; None where it says nothing.
PaperFigures = Callable[[Config], tuple[str, dict[str, dict[str, Any]]] | None]


def page_of(
    record: Record, watch: Watcher, trust: bool = False, look: bool = True, paper: PaperFigures | None = None
) -> Page:
    """All that can be shown of a run; without `look`, only what needs neither network nor data."""
    net, why_no_net = _try(lambda: network(record, watch, trust))
    evidence, why = (None, why_no_net) if net is None else (None, "This is computed when the run is finished.")
    if net is not None and look:
        weighed = net
        evidence, why = _try(lambda: examine(record, weighed, watch))
    shown = pictures(record, watch) if look and record.config.members > 1 else []
    sections = [
        Section("run", "What was run", [Facts(describe.facts(record)), _tree(record, net, why_no_net)]),
        Section("results", "Results", _results(record, paper)),
        Section("curves", "Over training", [curves.measures(record), curves.losses(record.log)]),
    ]
    if record.config.members > 1:
        sections.append(Section("ownership", owned_title([record]), _ownership(record, shown), OWNED))
        sections.append(Section("wins", "Who wins", [curves.wins(record.log)], WINS))
    sections.append(Section("agreement", "Where answers differ", agreement(record, evidence, why)))
    if is_single_label(record.data.problem):
        trusted = [curves.reliability(evidence.reliability, record.config.members)] if evidence else [Missing(why)]
        sections.append(Section("reliability", "How far to trust it", trusted))
        sections.append(Section("hardest", "The hardest examples", _hardest(evidence, why), HARD))
        if len(record.data.shape) == 3:
            seen, why = (None, why) if evidence is None else _try(lambda: looked_at(record, weighed, evidence, watch))
            sections.append(Section("saliency", "What members look at", [seen or Missing(why)], LOOKED))
    sections.append(Section("cost", "What it cost", [_cost(record, net)]))
    sections.append(Section("repeat", "How to repeat it", _repeat(record)))
    problems = [f"{path.name} {problem}" for path, problem in record.folder.problems().items()]
    notes = [f"Something is wrong in the run folder: {problem}." for problem in problems]
    return Page(
        record.title,
        describe.sentence(record),
        headline(record),
        sections,
        describe.state(record),
        notes,
        _made(record),
    )


OWNED = (
    "A member owns an example if its loss on it is the lowest. Each cell is the member's share of a class, in percent; "
    "a column adds up to 100."
)
WINS = "Under Multiple Choice Learning an example is won by the members that learn from it; in other ensembles all do."
LOOKED = (
    "What in an image raises the score of its class, for each member; grey is nothing, and all maps of an image have "
    "one scale. Under Multiple Choice Learning the owner of an image responds more than the others."
)
HARD = (
    "Those that the ensemble gets wrong, the lowest probability of the true class first, and then those that only some "
    "members do; with everybody's answer and confidence."
)


def _try(make: Callable[[], Any]) -> tuple[Any, str]:
    """What can be made, or why it cannot."""
    try:
        return make(), ""
    except UserError as error:
        return None, f"{error}."


def headline(record: Record) -> list[tuple[str, str, str, str]]:
    """The two measures, or the one of a single network."""
    result = record.result
    if result is None:
        return []
    unit = record.data.problem.unit
    form = ".2f" if unit else ".4g"
    what = record.data.problem.measure.partition(",")[0]

    def entry(name: str, key: str, meaning: str) -> tuple[str, str, str, str]:
        value = result[key]
        return name, "not finite" if value is None else format(value, form), unit, meaning

    if len(result["members"]) == 1:
        return [entry(what[0].upper() + what[1:], "ensemble_mean", "of the one network")]
    together = "ensemble_scored" if "ensemble_scored" in result else "ensemble_mean"
    members = len(result["members"])
    beside = top(result, members)
    meaning = f"the truth is among the {members} best classes of the Ensemble-Mean: what the Oracle compares with"
    return [
        entry(label(together), together, f"{what} of what the members answer together"),
        entry("Oracle", "oracle", f"{what} if the best member is picked for each example"),
        *([] if beside is None else [(f"top-{members}", format(beside, form), unit, meaning)]),
        entry("Mean member", "single", f"{what} of a member alone, on average"),
    ]


def _tree(record: Record, net: TreeNet | None, why: str) -> Part:
    if net is None:
        return Missing(f"The tree is not drawn: {why}")
    sizes, tree = net.layer_sizes(), net.tree
    placement = record.config.placement
    placed = placement if isinstance(placement, dict) else {}
    stages = {
        name: svg.Stage(
            name, node.layers, node.members, node.children, sum(sizes[layer] for layer in node.layers),
            f"rank {placed[name]}" if name in placed else "",
        )
        for name, node in tree.nodes.items()
    }  # fmt: skip
    total, independent = net.num_parameters(), net.num_independent_parameters()
    note = f"{total:,} parameters."
    if independent > total:
        note += (
            f" Independent members would have {independent:,}: sharing saves {100 * (1 - total / independent):.1f} %."
        )
    drawn = svg.tree(stages, [root.name for root in tree.roots], " × ".join(map(str, record.data.shape)))
    least = 420 if len(stages) > len(tree.roots) else 0  # several levels are not squeezed until nobody can read them
    return Drawing("The tree: which layers are shared by which members", drawn, note, least)


def _results(record: Record, paper: PaperFigures | None) -> list[Part]:
    result = record.result
    if result is None:
        return [Missing("The run was not evaluated yet.")]
    found = result_rows(record.data.problem, result)
    more = [class_table(record, result)] if finds_objects(record.data.problem) else []
    beside = paper(record.config) if paper and record.finished else None
    note = f"On {result['examples']:,} examples of the {result['split']} set."
    if beside is None:
        return [Table("The result of this run", ["measure", "here"], found, note=note), *more]
    row, figures = beside
    metrics = {label(metric): metric for metric in figures}
    rows = []
    for name, text in found:
        metric = metrics.get(name.text)
        figure = figures[metric] if metric else {}
        apart = ""
        if metric and "mean" in figure and isinstance(result.get(metric), int | float):
            apart = f"{result[metric] - figure['mean']:+.2f}"
        rows.append([name, text, Cell(_figure(figure, metric or "")), Cell(apart)])
    note += f" The paper's figures are those of the row {row}."
    return [Table("This run beside the paper", ["measure", "here", "paper", "difference"], rows, note=note), *more]


def _figure(figure: dict[str, Any], metric: str) -> str:
    if "members" in figure:
        return "  ".join(f"{value:.2f}" for value in figure["members"])
    if "mean" not in figure:
        return ""
    return number(figure["mean"], metric) + (f" ± {number(figure['std'], metric)}" if figure.get("std") else "")


def ownership(record: Record, shown: Sequence[str], name: str, title: str, training: bool = False) -> Grid | str:
    """Who owned which class, of the examples evaluated on or of the training batches; or why that is not known."""
    try:
        at, counts = record.learned() if training else record.owned()
    except UserError as error:
        return f"{error}."
    groups = record.data.problem.groups
    if not len(at):
        return "There was no evaluation yet."
    return ownership_grid(name, title, at, np.asarray(counts, float), groups, shown, lasting=training)


def owned_title(records: Sequence[Record]) -> str:
    classes = any(len(record.data.problem.groups) > 1 for record in records)
    return f"Who owns which {'class' if classes else 'examples'}"


def _ownership(record: Record, shown: Sequence[str]) -> list[Part]:
    if len(record.data.problem.groups) == 0:
        return [Missing("There are no classes to own.")]
    found: list[Part] = []
    split = record.result["split"] if record.result else "test"
    for name, title, training in (
        ("learned", "Of the training examples: who learned what", True),
        ("owned", f"Of the {split} set: who has the lowest loss", False),
    ):
        grid = ownership(record, shown, name, title, training)
        if isinstance(grid, str):
            return [*found, Missing(grid)]
        alike = training and np.ptp(np.where(grid.cells == NOTHING, 0, grid.cells).astype(int), axis=1).max() <= 1
        if alike:
            continue  # all learn from everything
        found.append(Grids([grid]))
    return found


def _hardest(evidence: Evidence | None, why: str) -> list[Part]:
    if evidence is None:
        return [Missing(why)]
    if not evidence.hardest:
        return [Missing("No member gets any example wrong.")]
    return [Hardest(evidence.hardest)]


def multiply_adds(record: Record, net: TreeNet) -> int | None:
    """Of the whole tree on one example, forward; None for networks that need more than the example."""
    try:
        costs = costs_on(net, make_example(net, record.data.shape))
    except UserError:
        return None
    return sum(cost.forward for cost in costs.values())


def _cost(record: Record, net: TreeNet | None) -> Part:
    result = record.result or {}
    found = []
    if net is not None:
        found.append(("Parameters", f"{net.num_parameters():,}"))
        if (adds := multiply_adds(record, net)) is not None:
            found.append(("Multiply-adds", f"{adds:,} for the answers to one example"))
    elif "parameters" in result:
        found.append(("Parameters", f"{result['parameters']:,}"))
    if "seconds" in result:
        found.append(("Training", describe.seconds(result["seconds"])))
    pace = [line["images_per_second"] for line in record.log.steps if line.get("images_per_second")]
    if pace:
        found.append(("Pace", f"{float(np.median(pace)):,.0f} examples a second, in the median"))
    if result.get("peak_memory"):
        found.append(("Peak memory", f"{result['peak_memory'] / 1e6:,.0f} MB"))
    if record.folder.model.is_file():
        found.append(("Weights on disk", f"{record.folder.model.stat().st_size / 1e6:,.1f} MB"))
    return Facts(found) if found else Missing("Nothing is known yet.")


def _repeat(record: Record) -> list[Part]:
    versions = (record.result or {}).get("versions") or {}
    found: list[Part] = [Code("The command", describe.command(record.config))]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    found.append(Facts([("Seed", str(record.config.seed)), *([("Versions", said)] if said else [])]))
    found.append(Code("config.yaml", record.config.to_yaml(), folded=True))
    return found


def _made(record: Record) -> str:
    return f"Made by mheads from {record.folder.path.name}."
