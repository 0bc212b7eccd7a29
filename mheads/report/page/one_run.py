"""The page of one run: its panels, and what stands above them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from mheads.common.errors import UserError
from mheads.common.table import Cell, Table
from mheads.engine.cost import costs_on
from mheads.problems import gives_numbers, is_single_label
from mheads.problems.baselines import tell_chance, tell_collapse, top
from mheads.problems.metric_text import label
from mheads.report.charts.chart import HeatMap
from mheads.report.charts.hypotheses import chart_hypotheses
from mheads.report.charts.outcomes import chart_reliability, map_disagreement, map_ownership_over_time, name_members
from mheads.report.charts.over_training import chart_losses, chart_measures, chart_wins
from mheads.report.class_pictures import encode_png
from mheads.report.page import describe
from mheads.report.page.html import (
    CodeBlock,
    FactList,
    Gallery,
    Hardest,
    Headline,
    HeatMaps,
    Page,
    Part,
    StageTree,
    thin_out,
)
from mheads.report.page.panels import Panel, make_sections
from mheads.report.page.run_results import tabulate_precisions, tabulate_result
from mheads.report.page.stage_tree import box_stages
from mheads.report.saliency.command import describe_energy
from mheads.report.saliency.members import explain
from mheads.report.shown_run import ShownRun
from mheads.runs.read_run import Record
from mheads.trees.multiply_adds import make_example

MANY_CLASSES = 40  # from here on a confusion matrix is a list of the most frequent confusions
MOST_CONFUSIONS = 20
IMAGES = 6  # that members are shown to look at


def make_page(run: ShownRun) -> Page:
    """All that can be shown of a run."""
    record = run.record
    problems = [f"{path.name} {problem}" for path, problem in record.folder.problems().items()]
    notes = [f"Something is wrong in the run folder: {problem}." for problem in problems]
    if collapse := tell_collapse(record.result or {}):
        notes.append(f"{collapse}.")
    sections, lacking = make_sections(PANELS, run, record.data.problem.groups)
    return Page(
        record.title,
        describe.sentence(record),
        headline(record),
        sections,
        describe.state(record),
        notes,
        f"Made by mheads from {record.folder.path.name}.",
        lacking,
    )


def headline(record: Record) -> Headline:
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

    members = len(result["members"])
    if members == 1:
        return [entry(what[0].upper() + what[1:], "ensemble_mean", "of the one network")]
    together = "ensemble_scored" if "ensemble_scored" in result else "ensemble_mean"
    guesses = top(result, members)
    meaning = f"the truth is among the {members} best classes of the Ensemble-Mean: what the Oracle compares with"
    return [
        entry(label(together), together, f"{what} of what the members answer together"),
        entry("Oracle", "oracle", f"{what} if {record.data.problem.oracle_picks}{tell_chance(result)}"),
        *([] if guesses is None else [(f"top-{members}", format(guesses, form), unit, meaning)]),
        entry("Mean member", "single", f"{what} of a member alone, on average"),
    ]


def show_facts(run: ShownRun) -> Sequence[Part]:
    return [FactList(describe.facts(run.record))]


def show_tree(run: ShownRun) -> Sequence[Part]:
    net, placement = run.net, run.record.config.placement
    ranks = placement if isinstance(placement, dict) else {}
    roots = box_stages(net.tree.nodes, [root.name for root in net.tree.roots], net.facts.layer_sizes(), ranks)
    total, independent = net.num_parameters(), net.num_independent_parameters()
    note = f"{total:,} parameters."
    if independent > total:
        saved = 100 * (1 - total / independent)
        note += f" Independent members would have {independent:,}: sharing saves {saved:.1f} %."
    shape = " × ".join(map(str, run.record.data.shape))
    return [StageTree("The tree: which layers are shared by which members", shape, roots, note)]


def show_result(run: ShownRun) -> Sequence[Part]:
    return [tabulate_result(run.record, run.paper), *tabulate_precisions(run.record)]


def show_measures(run: ShownRun) -> Sequence[Part]:
    return [chart_measures(run.record.log.evaluations, run.record.data.problem.measure)]


def show_losses(run: ShownRun) -> Sequence[Part]:
    return [chart_losses(run.record.log.steps)]


def show_learned(run: ShownRun) -> Sequence[Part]:
    title = "Of the training examples: who learned what"
    chart = map_run(run.record, "learned", title, run.class_pictures, training=True)
    alike = np.ptp(np.nan_to_num(chart.percents).round(), axis=1).max() <= 1  # all learn from everything
    return [] if alike else [HeatMaps([chart])]


def show_owned(run: ShownRun) -> Sequence[Part]:
    split = run.record.result["split"] if run.record.result else "test"
    title = f"Of the {split} set: who has the lowest loss"
    return [HeatMaps([map_run(run.record, "owned", title, run.class_pictures)])]


def map_run(record: Record, name: str, title: str, pictures: Sequence[str], training: bool = False) -> HeatMap:
    """Who owned which class over time, of the examples evaluated on or of the training batches."""
    groups = record.data.problem.groups
    if not groups:
        raise UserError("There are no classes to own")
    moments, counts = record.read_learning() if training else record.read_ownership()
    if not len(moments):
        raise UserError("There was no evaluation yet")
    return thin_out(
        map_ownership_over_time(name, title, moments, np.asarray(counts, float), groups, pictures, training)
    )


def show_wins(run: ShownRun) -> Sequence[Part]:
    chart = chart_wins(run.record.log.steps)
    if np.ptp([y for line in chart.lines for y in line.y if y is not None]) < 0.01:
        raise UserError("All members learned from equally many examples at all times")
    return [chart]


def show_hypotheses(run: ShownRun) -> Sequence[Part]:
    n = run.numbers
    return chart_hypotheses(n.rows, n.inputs, n.targets, n.hypotheses, n.probabilities)


def show_disagreement(run: ShownRun) -> Sequence[Part]:
    result = run.record.result or {}
    if "disagreement_pairs" in result and run.record.config.members > 1:
        return [
            HeatMaps([map_disagreement(result["disagreement_pairs"], "How often two members answer differently, %")])
        ]
    return []


def show_confusion(run: ShownRun) -> Sequence[Part]:
    """The answers to each class: a matrix, or the most frequent confusions of very many classes."""
    problem, members = run.record.data.problem, run.record.config.members
    names, counts, together = problem.groups, run.evidence.confusion, run.evidence.together
    if len(names) > MANY_CLASSES:
        return [tabulate_confusions(names, counts[0], together[0])]
    totals = counts.sum(2, keepdims=True)
    percents = 100 * np.where(totals > 0, counts / np.maximum(totals, 1), np.nan)
    who = [*together, *name_members(members)] if members > 1 else ["the network"]
    title, note = (
        "Answers to the examples of each class, %",
        "A row is a true class, a column an answer; right answers ",
    )
    chart = HeatMap(title, names, names, percents[: len(who)], "", who, 0, "true class", name="confusion")
    return [HeatMaps([chart], "choice", f"{note}are on the diagonal.")]


def tabulate_confusions(names: Sequence[str], counts: np.ndarray, who: str) -> Table:
    """The most frequent confusions, where there are too many classes for a matrix."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    most = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS]
    rows = []
    for true, answer in zip(*np.unravel_index(most, wrong.shape), strict=True):
        if n := int(wrong[true, answer]):
            part = 100 * n / counts[true].sum()
            rows.append([Cell(names[true]), Cell(names[answer]), Cell(f"{n:,}", n), Cell(f"{part:.1f} %", part)])
    head = ["true class", "answer", "examples", "of the class"]
    return Table(f"The most frequent confusions of the {who}", head, rows, sortable=True)


def show_reliability(run: ShownRun) -> Sequence[Part]:
    return [chart_reliability(run.reliability)]


def show_hardest(run: ShownRun) -> Sequence[Part]:
    if not run.evidence.hardest:
        raise UserError("No member gets any example wrong")
    return [Hardest(run.evidence.hardest)]


def show_saliency(run: ShownRun) -> Sequence[Part]:
    """What members respond to in some images, by guided backprop, and how much more their owners do."""
    outputs = run.evidence.outputs
    saliency = explain(run.open(), run.examples, count=IMAGES, outputs=outputs, watch=run.watch)
    content = io.BytesIO()
    saliency.figure().savefig(content, format="png", dpi=110)
    text = f"Maps of {len(saliency.columns)} networks on {len(saliency.classes)} images: {', '.join(saliency.classes)}."
    picture = ("Guided backprop of the score of the true class", encode_png(content.getvalue()), text)
    energy = saliency.sample
    note = "" if energy is None else f"{describe_energy(energy, f'{energy.examples:,} images').capitalize()}."
    return [Gallery([picture], note)]


def show_cost(run: ShownRun) -> Sequence[Part]:
    record, result = run.record, run.record.result or {}
    facts = []
    try:
        facts.append(("Parameters", f"{run.net.num_parameters():,}"))
        costs = costs_on(run.net, make_example(run.net, record.data.shape))  # not of networks that need more than that
        adds = sum(cost.forward for cost in costs.values())
        facts.append(("Multiply-adds", f"{adds:,} for the answers to one example"))
    except UserError:
        if not facts and "parameters" in result:
            facts.append(("Parameters", f"{result['parameters']:,}"))
    if "seconds" in result:
        facts.append(("Training", describe.seconds(result["seconds"])))
    pace = [line["images_per_second"] for line in record.log.steps if line.get("images_per_second")]
    if pace:
        facts.append(("Pace", f"{float(np.median(pace)):,.0f} examples a second, in the median"))
    if result.get("peak_memory"):
        facts.append(("Peak memory", describe.megabytes(result["peak_memory"])))
    if record.folder.model.is_file():
        facts.append(("Weights on disk", describe.megabytes(record.folder.model.stat().st_size)))
    if not facts:
        raise UserError("Nothing is known yet")
    return [FactList(facts)]


def show_commands(run: ShownRun) -> Sequence[Part]:
    config = run.record.config
    versions = describe.versions(run.record)
    facts = [("Seed", str(config.seed)), *([("Versions", versions)] if versions else [])]
    command = CodeBlock("The command", describe.command(config))
    return [command, FactList(facts), CodeBlock("config.yaml", config.to_yaml(), folded=True)]


def has_members(run: ShownRun) -> bool:
    return run.record.config.members > 1


def has_classes(run: ShownRun) -> bool:
    return is_single_label(run.record.data.problem)


def has_images(run: ShownRun) -> bool:
    return has_classes(run) and len(run.record.data.shape) == 3


def has_drawn_numbers(run: ShownRun) -> bool:
    """Whether answers are one number, or trajectories in the plane."""
    problem = run.record.data.problem
    return gives_numbers(problem) and (problem.num_values == 1 or problem.shape[1:] == (2,))


PANELS: dict[str, Panel[ShownRun]] = {
    "facts": Panel("run", show_facts),
    "tree": Panel("run", show_tree, otherwise="The tree is not drawn: "),
    "result": Panel("results", show_result),
    "hypotheses": Panel("hypotheses", show_hypotheses, has_drawn_numbers),
    "measures": Panel("curves", show_measures),
    "losses": Panel("curves", show_losses),
    "learned": Panel("ownership", show_learned, has_members),
    "owned": Panel("ownership", show_owned, has_members),
    "wins": Panel("wins", show_wins, has_members),
    "disagreement": Panel("agreement", show_disagreement),
    "confusion": Panel("agreement", show_confusion, has_classes, "Which classes are confused is not known: "),
    "reliability": Panel("reliability", show_reliability, has_classes),
    "hardest": Panel("hardest", show_hardest, has_classes),
    "saliency": Panel("saliency", show_saliency, has_images),
    "cost": Panel("cost", show_cost),
    "commands": Panel("repeat", show_commands),
}
