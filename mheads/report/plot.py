"""`mheads plot`: the figures of one run or of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mheads.common.atomic_files import check_output
from mheads.common.errors import UserError, did_you_mean
from mheads.common.progress import Watcher
from mheads.problems import is_single_label
from mheads.problems.baselines import tell_collapse
from mheads.report.charts import outcomes, over_training
from mheads.report.charts.chart import Chart
from mheads.report.charts.hypotheses import chart_hypotheses
from mheads.report.figures import Figure, draw
from mheads.report.figures.figure import SUFFIXES, save
from mheads.report.shown_run import ShownRun
from mheads.runs.read_run import Record, one_network, read_all


def plot(name: str, paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False) -> Path:
    """Draws a figure of the runs to a file, by default NAME.png in the folder of the first; returns where it is."""
    find_figure(name)
    if output is not None:
        check_output(output, SUFFIXES)
    if not paths:
        raise UserError(f"give the run folders that {name} shows")
    records = read_all(paths)
    output = output or paths[0] / f"{name}.png"
    for record in records:
        if not record.finished:
            at = f"iteration {record.iteration:,}{record.evaluated}"
            watch.warn(f"{record.place} is not finished: this shows it at {at}")
    save(draw_figure(name, [ShownRun(record, watch, trust) for record in records]), output)
    return output


def draw_figure(name: str, runs: Sequence[ShownRun]) -> Figure:
    """A figure of the table by its name."""
    figure = find_figure(name)
    if figure.one_run and len(runs) > 1:
        raise UserError(f"{name} shows one run, and there are {len(runs)}: plot them one by one")
    return draw(figure.describe(runs))


def find_figure(name: str) -> FigureEntry:
    if name not in FIGURES:
        raise UserError(f"there is no plot {name!r}{did_you_mean(name, FIGURES)}: give {', '.join(FIGURES)}")
    return FIGURES[name]


def ownership(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """Which member owns which class, one map for each run."""
    records = [run.record for run in runs]
    groups = records[0].data.problem.groups
    for record in records[1:]:
        if record.data.problem.groups != groups:
            raise UserError(f"{record.place} and {records[0].place} have other classes: plot them one by one")
    maps: list[Chart] = []
    for record in records:
        result, title = record.require_result(), record.title if len(records) > 1 else ""
        if tell_collapse(result):
            title = f"{title} (Oracle near chance)" if title else "Oracle near chance: members may have collapsed"
        maps += outcomes.map_ownership({title: np.asarray(result["ownership"])}, groups)
    return maps


def history(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """The training loss and each member's own; members, Ensemble-Mean and Oracle at each evaluation; of one run."""
    record = runs[0].record
    record.require_result()
    losses = [over_training.chart_losses(record.log.steps)] if record.log.steps else []
    if losses and not record.log.evaluations:
        return losses
    return [*losses, over_training.chart_measures(record.log.evaluations, record.data.problem.measure)]


def wins(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """How many examples each member wins, over time; of one run."""
    return [over_training.chart_wins(runs[0].record.log.steps)]


def k(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """Oracle and Ensemble-Mean against k of MCL and others; independent members are k = M, runs of one k are trials."""
    records, results = [run.record for run in runs], defaultdict(list)
    check_alike(records, name_task)
    check_alike(
        [record for record in records if "k" in record.config.loss.options],
        lambda record: name_loss(record, but="k"),
    )
    check_alike([record for record in records if record.config.members > 1], name_split)
    check_alike(records, name_pretraining)
    for record in records:
        loss = record.config.loss
        if "k" not in loss.options and loss.name != "independent":
            raise UserError(f"{record.place} was trained with {loss.name}, which has no k: leave it out")
        results[loss.options.get("k", record.config.members)].append(record.require_result())
    return [outcomes.chart_k(results, records[0].data.problem.measure, find_level(records))]


def splits(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """Ensemble-Mean and mean member against the last shared layer, over bars of parameters; of finished runs."""
    records, results = [run.record for run in runs], defaultdict[str, list[dict[str, Any]]](list)
    check_alike(records, name_task)
    several = [record for record in records if record.config.members > 1]
    check_alike(several, name_loss)
    check_alike(several, lambda record: f"of {record.config.members} members")
    check_alike(records, name_pretraining)
    for record in records:
        if not record.finished:
            raise UserError(f"{record.place} is not finished: plot splits of finished runs")
        split = record.config.split
        if isinstance(split, dict) and list(split.values()) == [record.config.members]:
            (split,) = split  # {conv1: 4}, as Python writes conv1
        name = str(split) if record.config.is_split else "none"
        results["single" if record.config.members == 1 and name == "none" else name].append(record.require_result())
    order = sorted(results, key=lambda name: -results[name][0]["parameters"])  # who shares more has fewer
    return [outcomes.chart_splits({name: results[name] for name in order}, records[0].data.problem.measure)]


def answers(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """The Oracle of each run against its one answer: Ensemble-Mean (dots), or Ensemble-Scored (squares)."""
    records = [run.record for run in runs]
    check_alike(records, name_examples)
    results = {record.title: record.require_result() for record in records}
    pairs = {name: (r.get("ensemble_scored", r["ensemble_mean"]), r["oracle"]) for name, r in results.items()}
    points = {name: tuple(np.array(pair, float)) for name, pair in pairs.items()}  # None, not finite, becomes NaN
    scored = [name for name, result in results.items() if "ensemble_scored" in result]
    return [outcomes.chart_answers(points, records[0].data.problem.measure, scored, find_level(records))]


def disagreement(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """How often two members answer differently."""
    records = [run.record for run in runs if run.record.config.members > 1]
    if not records:
        raise UserError(
            f"{runs[0].record.place} has one member, and disagreement needs two: give a run of several members"
        )
    for record in records:
        if "disagreement_pairs" not in record.require_result():
            raise UserError(
                f"disagreement is only for classification, but {record.place} is {record.data.problem.name}"
            )
    return [
        outcomes.map_disagreement(
            record.require_result()["disagreement_pairs"], record.title if len(records) > 1 else ""
        )
        for record in records
    ]


def reliability(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """Accuracy against confidence, of members and of the Ensemble-Mean."""
    for record in (run.record for run in runs):
        if not is_single_label(record.data.problem):
            raise UserError(f"reliability is only for classification, but {record.place} is {record.data.problem.name}")
    bins = {(run, name): values for run in runs for name, values in run.reliability.items()}
    several = len(runs) > 1
    named = {f"{run.record.title}, {name}" if several else name: values for (run, name), values in bins.items()}
    return [outcomes.chart_reliability(named)]


def hypotheses(runs: Sequence[ShownRun]) -> Sequence[Chart]:
    """What each member answers to some examples, beside their targets: a number, or a trajectory; of one run."""
    n = runs[0].numbers
    return chart_hypotheses(n.rows, n.inputs, n.targets, n.hypotheses, n.probabilities)


class FigureEntry(NamedTuple):
    """A figure: the function that describes it, whose docstring is its line of help."""

    describe: Callable[[Sequence[ShownRun]], Sequence[Chart]]
    one_run: bool = False
    asks_net: bool = False  # about examples

    @property
    def help(self) -> str:
        return (self.describe.__doc__ or "").partition(".")[0]


FIGURES = {
    "ownership": FigureEntry(ownership),
    "history": FigureEntry(history, one_run=True),
    "wins": FigureEntry(wins, one_run=True),
    "k": FigureEntry(k),
    "splits": FigureEntry(splits),
    "answers": FigureEntry(answers),
    "disagreement": FigureEntry(disagreement),
    "reliability": FigureEntry(reliability, asks_net=True),
    "hypotheses": FigureEntry(hypotheses, one_run=True, asks_net=True),
}


def find_level(records: Sequence[Record]) -> tuple[str, float] | None:
    """The name and value of what the Oracle of most members compares with."""
    members = max(record.config.members for record in records)
    guesses = one_network(records, members) if members > 1 else None
    return None if guesses is None else (f"top-{members} of one network ({guesses[0]})", guesses[1])


def name_task(record: Record) -> str:
    return f"{record.config.model} on {name_examples(record)}"


def name_loss(record: Record, but: str = "") -> str:
    """The loss of a run and its options, but for one."""
    loss = record.config.loss
    return f"trained with {loss.name} { {k: v for k, v in loss.options.items() if k != but} or '' }".rstrip()


def name_split(record: Record) -> str:
    return f"split at {record.config.split}" if record.config.is_split else "not split"


def name_pretraining(record: Record) -> str:
    return f"pretrained for {record.config.pretrain} iterations"


def name_examples(record: Record) -> str:
    """What a run was measured on; shown only where something in it differs."""
    split = record.require_result()["split"]
    return f"the {split} set of {record.data.name} ({record.measured}), {record.data.problem.name}"


def check_alike(records: Sequence[Record], describe: Callable[[Record], str]) -> None:
    """Raises for runs that one axis would not describe."""
    for record in records[1:]:
        first, other = describe(records[0]), describe(record)
        if first != other:
            raise UserError(f"{records[0].place} is {first}, and {record.place} {other}: plot those that are alike")
