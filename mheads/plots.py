"""`mheads plot`: a figure of one run or of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mheads import api, evaluation
from mheads.errors import UserError
from mheads.metrics import Metrics
from mheads.progress import Watcher
from mheads.record import Record, read_all
from mheads.report import charts, figures
from mheads.report.figures import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def plot(what: str, paths: Sequence[Path], output: Path | None, watch: Watcher, trust: bool = False) -> Path:
    """Draws `what` of the runs to a file, by default WHAT.png in the folder of the first; returns where it is."""
    if what not in PLOTS:
        raise UserError(f"there is no plot {what!r}: give {', '.join(PLOTS)}")
    output = output or paths[0] / f"{what}.png"
    if output.suffix not in SUFFIXES:
        raise UserError(f"{output}: give a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    records = read_all(paths)
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
    for record in records:
        loss = record.config.loss
        if loss.name not in ("mcl", "independent"):
            raise UserError(f"{record.folder.path} was trained with {loss.name}, which has no k: leave it out")
        runs[loss.options["k"] if loss.name == "mcl" else record.config.members].append(record.evaluated())
    return charts.choices_figure(runs, _measure(records))


def splits(records: Sequence[Record], *_: Any) -> Figure:
    """Ensemble-Mean against the layers that members share, from none to all."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
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


def disagreement(records: Sequence[Record], *_: Any) -> Figure:
    """How often two members answer differently."""
    found = {}
    for record in records:
        result = record.evaluated()
        if "disagreement_pairs" not in result:
            raise UserError(
                f"{record.folder.path} is {record.data.problem.name}: its members give no class to differ in"
            )
        found[record.title] = np.asarray(result["disagreement_pairs"], float)
    return charts.disagreement_figure(found if len(records) > 1 else found[records[0].title])


def reliability(records: Sequence[Record], watch: Watcher, trust: bool) -> Figure:
    """Accuracy against confidence on the examples that a run was evaluated on."""
    bins = {}
    for record in records:
        run = api.load(record.folder.path, trust=trust, warn=watch.warn)
        if record.data.problem.name != "classification":
            raise UserError(f"{record.folder.path} is {record.data.problem.name}: reliability is about classes")
        outputs, targets = evaluation.outputs_of(run)
        metrics = Metrics(outputs.shape[0], outputs.shape[2])
        metrics.update(outputs, targets)
        for name, found in metrics.reliability().items():
            bins[f"{record.title}, {name}" if len(records) > 1 else name] = found
    return charts.reliability_figure(bins)


PLOTS: dict[str, Callable[..., Figure]] = {
    "ownership": ownership,
    "history": history,
    "wins": wins,
    "k": choices,
    "splits": splits,
    "disagreement": disagreement,
    "reliability": reliability,
}


def _one(records: Sequence[Record], what: str) -> Record:
    if len(records) > 1:
        raise UserError(f"{what} shows one run, and there are {len(records)}: plot them one by one")
    return records[0]


def _measure(records: Sequence[Record]) -> str:
    return records[0].data.problem.measure
