"""`mheads plot`: a figure of one run or of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mheads.api import evaluate, fit
from mheads.common.atomic_files import check_output
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.problems import is_single_label
from mheads.report.figures import charts, figures
from mheads.report.figures.figures import Figure
from mheads.runs.record import Record, one_network, read_all

SUFFIXES = (".png", ".svg", ".pdf")


def plot(what: str, paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False) -> Path:
    """Draws `what` of the runs to a file, by default WHAT.png in the folder of the first; returns where it is."""
    if what not in PLOTS:
        raise UserError(f"there is no plot {what!r}: give {', '.join(PLOTS)}")
    if output is not None:
        check_output(output, SUFFIXES)
    records = read_all(paths)
    output = output or paths[0] / f"{what}.png"
    for record in records:
        if not record.finished:
            watch.warn(f"{record.folder.path} is not finished: this shows it at iteration {record.iteration:,}")
    figures.save(PLOTS[what](records, watch, trust), output)
    return output


def ownership(records: Sequence[Record], *_: Any) -> Figure:
    """Who owns which class, one panel for each run."""
    groups = records[0].data.problem.groups
    for record in records[1:]:
        if record.data.problem.groups != groups:
            raise UserError(
                f"{record.folder.path} and {records[0].folder.path} have other classes: plot them one by one"
            )
    owned = {record.title: np.asarray(record.evaluated()["ownership"]) for record in records}
    return figures.ownership_figure(owned if len(records) > 1 else owned[records[0].title], groups)


def history(records: Sequence[Record], *_: Any) -> Figure:
    """Losses and the measures of each evaluation against iterations."""
    record = _one(records, "history")
    record.evaluated()
    return figures.history_figure(*record.log, record.data.problem.measure)


def wins(records: Sequence[Record], *_: Any) -> Figure:
    """Who wins how many examples, over time."""
    record = _one(records, "wins")
    if not record.log.steps:
        raise UserError(f"{record.folder.path} has no line in its log yet: a smaller log.every writes more")
    return charts.wins_figure(record.log.steps)


def choices(records: Sequence[Record], *_: Any) -> Figure:
    """Oracle and Ensemble-Mean against k; members that learn from everything are those of k = M."""
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    _refuse_others(records, _what)
    _refuse_others([r for r in records if "k" in r.config.loss.options], lambda r: f"of the loss {r.config.loss.name}")
    for record in records:
        loss = record.config.loss
        if "k" not in loss.options and loss.name != "independent":
            raise UserError(f"{record.folder.path} was trained with {loss.name}, which has no k: leave it out")
        runs[loss.options.get("k", record.config.members)].append(record.evaluated())
    members = max(record.config.members for record in records)
    return charts.choices_figure(runs, _measure(records), _baseline(records, members))


def splits(records: Sequence[Record], *_: Any) -> Figure:
    """Ensemble-Mean against the layers that members share, from none to all."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    _refuse_others(records, _what)
    for record in records:
        if not record.finished:
            raise UserError(f"{record.folder.path} is not finished: plot splits of finished runs")
        if record.config.members == 1 and record.config.split is None:
            name = "single"
        else:
            name = "none" if isinstance(record.config.split, int | None) else str(record.config.split)
        runs[name].append(record.evaluated())
    least = {name: -results[0]["parameters"] for name, results in runs.items()}  # who shares more has fewer
    return charts.splits_figure({name: runs[name] for name in sorted(runs, key=least.__getitem__)}, _measure(records))


def _baseline(records: Sequence[Record], members: int) -> tuple[str, float] | None:
    """What an Oracle of so many members compares with, by name."""
    found = one_network(records, members) if members > 1 else None
    return None if found is None else (f"top-{members} of one network ({found[0]})", found[1])


def answers(records: Sequence[Record], *_: Any) -> Figure:
    """Oracle against the one answer that the ensemble gives: with scores the one that they weigh."""
    _refuse_others(records, _on)
    found = {record.title: record.evaluated() for record in records}
    pairs = {name: (r.get("ensemble_scored", r["ensemble_mean"]), r["oracle"]) for name, r in found.items()}
    points = {name: tuple(np.array(pair, float)) for name, pair in pairs.items()}  # None, not finite, becomes NaN
    scored = [name for name, result in found.items() if "ensemble_scored" in result]
    members = max(record.config.members for record in records)
    return charts.answers_figure(points, _measure(records), scored, _baseline(records, members))


def disagreement(records: Sequence[Record], *_: Any) -> Figure:
    """How often two members answer differently."""
    found = {}
    if all(record.config.members == 1 for record in records):
        raise UserError(f"{records[0].folder.path} has one member, which cannot differ: give a run of several")
    for record in records:
        if record.config.members == 1:
            continue
        result = record.evaluated()
        if "disagreement_pairs" not in result:
            raise UserError(
                f"{record.folder.path} is {record.data.problem.name}: its members give no class to differ in"
            )
        found[record.title] = np.asarray(result["disagreement_pairs"], float)
    return charts.disagreement_figure(found if len(found) > 1 else next(iter(found.values())))


def reliability(records: Sequence[Record], watch: Watcher, trust: bool) -> Figure:
    """Accuracy against confidence on the examples that a run was evaluated on."""
    bins = {}
    for record in records:
        problem = record.data.problem
        if not is_single_label(problem):
            raise UserError(f"{record.folder.path} is {problem.name}: reliability is about classes")
        run = fit.load(record.folder.path, trust=trust, warn=watch.warn)
        outputs, weights, targets = evaluate.outputs_and_weights_of(run)
        metrics = problem.metrics(outputs.shape[0], scored=weights is not None)
        metrics.update(outputs, targets, weights)
        for name, found in metrics.reliability().items():
            if record.config.members == 1:
                name = "the network"  # which is its own mean
            bins[f"{record.title}, {name}" if len(records) > 1 else name] = found
    return charts.reliability_figure(bins)


PLOTS: dict[str, Callable[..., Figure]] = {
    "ownership": ownership,
    "history": history,
    "wins": wins,
    "k": choices,
    "splits": splits,
    "answers": answers,
    "disagreement": disagreement,
    "reliability": reliability,
}


def _one(records: Sequence[Record], what: str) -> Record:
    if len(records) > 1:
        raise UserError(f"{what} shows one run, and there are {len(records)}: plot them one by one")
    return records[0]


def _what(record: Record) -> str:
    return f"{record.config.model} on {_on(record)}"


def _on(record: Record) -> str:
    """What it was measured on. Shown only where something in it differs."""
    return (
        f"the {record.evaluated()['split']} set of {record.data.name} ({record.measured}), {record.data.problem.name}"
    )


def _refuse_others(records: Sequence[Record], what: Callable[[Record], str]) -> None:
    """Refuses runs of which one axis would say nothing."""
    for record in records[1:]:
        if what(record) != what(records[0]):
            raise UserError(
                f"{records[0].folder.path} is {what(records[0])}, and {record.folder.path} {what(record)}: plot those "
                "that are alike"
            )


def _measure(records: Sequence[Record]) -> str:
    return records[0].data.problem.measure
