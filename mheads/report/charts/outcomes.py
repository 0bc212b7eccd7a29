"""Charts of what was learned: who owns what, what k and sharing change, how far members differ and can be trusted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mheads.problems.metrics import BINS
from mheads.report.charts.chart import HeatMap, Line, LineChart, shorten

Results = Sequence[Mapping[str, Any]]  # what result.json holds, of one run or of several trials
Level = tuple[str, float] | None  # what an Oracle compares with: its name and value
# The lines of the whole ensemble.
TOGETHER = {"Ensemble-Mean": {"colour": "ink"}, "Ensemble-Scored": {"colour": "ink", "dashes": "dotted"}}
Bins = Mapping[str, Mapping[str, Sequence[float]]]  # of each predictor: `confidence`, `accuracy` and `examples`


def map_ownership(counts: Mapping[str, np.ndarray], classes: Sequence[str]) -> list[HeatMap]:
    """Who owns which class: each member's share of each class's examples, from counts [M, C] of ensembles by title."""
    for title, table in counts.items():
        if table.ndim != 2 or table.shape[1] != len(classes):
            raise ValueError(f"ownership {title!r} is {table.shape}, expected (M, {len(classes)})")
    return [
        HeatMap(
            title,
            name_members(len(table)),
            _name_columns(classes),
            100 * share_out(table[None]),
            "owned by the member, %",
        )
        for title, table in counts.items()
    ]


def map_ownership_over_time(
    name: str,
    title: str,
    moments: np.ndarray,
    counts: np.ndarray,
    classes: Sequence[str],
    pictures: Sequence[str] = (),
    lasting: bool = False,
) -> HeatMap:
    """Who owns which class at moments [T], from counts [T, M, C]; `lasting` as in `share_out`."""
    percents, labels = 100 * share_out(counts, lasting), [f"iteration {moment:,}" for moment in moments]
    rows = name_members(counts.shape[1])
    columns = _name_columns(classes)
    return HeatMap(title, rows, columns, percents, "owned by the member, %", labels, pictures=pictures, name=name)


def _name_columns(groups: Sequence[str]) -> Sequence[str]:
    """The groups whose owners are shown; what has no classes is one group."""
    return ["all examples"] if list(groups) == ["all"] else groups


def share_out(counts: np.ndarray, lasting: bool = False) -> np.ndarray:
    """Counts [T, M, C] to each member's part of each class; where a class has none NaN, or if `lasting` what was."""
    totals = counts.sum(1, keepdims=True)
    shares = np.where(totals > 0, counts / np.where(totals > 0, totals, 1), np.nan)
    for t in range(1, len(shares) if lasting else 0):
        shares[t] = np.where(np.isnan(shares[t]), shares[t - 1], shares[t])
    return shares


def map_disagreement(pairs: np.ndarray, title: str) -> HeatMap:
    """How often two members answer differently, from percents [M, M]."""
    percents = np.array(pairs, float)
    np.fill_diagonal(percents, np.nan)
    columns = [str(m) for m in range(len(percents))]
    return HeatMap(title, name_members(len(percents)), columns, percents[None], "different answers, %", name="differ")


def name_members(count: int) -> list[str]:
    return [f"member {m}" for m in range(count)]


def chart_k(runs: Mapping[int, Results], measure: str = "accuracy, %", level: Level = None) -> LineChart:
    """Oracle, Ensemble-Mean and members against k; several results of one k are trials."""
    ks = sorted(runs)
    points = [(k, value) for k in ks for result in runs[k] for value in result["members"]]
    x, y = zip(*points, strict=True)
    lines = [
        Line("members", x, y, "faint", mark="point", joined=False),
        _trials(Line("Oracle", ks, [], 0, "dashed", "ring"), "oracle", runs),
        _trials(Line("Ensemble-Mean", ks, [], 1, mark="dot"), "ensemble_mean", runs),
        *_scored(ks, runs),
    ]
    return LineChart("What k changes", lines, "k: members that learn from an example", measure, level=level)


def chart_splits(runs: Mapping[str, Results], measure: str = "accuracy, %") -> LineChart:
    """Ensemble-Mean and mean member against the last layer that members share, over bars of parameters.

    runs: the results by the name of the layer, in the order from sharing nothing to sharing everything.
    """
    at, by_place = range(len(runs)), dict(enumerate(runs.values()))
    parameters = [float(np.mean([result["parameters"] for result in results])) for results in runs.values()]
    scale, unit = (1e6, "million parameters") if max(parameters) >= 1e6 else (1e3, "thousand parameters")
    lines = [
        _trials(Line("Ensemble-Mean", at, [], 0, mark="ring"), "ensemble_mean", by_place),
        _trials(Line("mean member", at, [], 1, "dashed", "dot"), "single", by_place),
        *_scored(at, by_place),
    ]
    return LineChart(
        "What sharing changes",
        lines,
        "members share the layers up to",
        measure,
        x_names=[shorten(name) for name in runs],
        bars=(unit, [count / scale for count in parameters]),
        size=(max(5.0, 0.7 * len(runs) + 1.5), 3.8),
    )


def _scored(at: Sequence[int], runs: Mapping[int, Results]) -> list[Line]:
    """A line of Ensemble-Scored, where all results at an x have it."""
    some = [x for x in at if all("ensemble_scored" in result for result in runs[x])]
    return [_trials(Line("Ensemble-Scored", some, [], 2, "dotted", "square"), "ensemble_scored", runs)] if some else []


def _trials(line: Line, key: str, runs: Mapping[int, Results]) -> Line:
    """The line with the means over the trials at each x, and their standard deviations if there are some."""
    values = [np.array([result[key] for result in runs[int(x)]], float) for x in line.x]
    deviations = [float(v.std(ddof=1)) if len(v) > 1 else 0.0 for v in values]
    y = [float(v.mean()) for v in values]
    return Line(line.name, line.x, y, line.colour, line.dashes, line.mark, errors=deviations if any(deviations) else ())


def chart_answers(
    runs: Mapping[str, tuple[float, float]],
    measure: str = "accuracy, %",
    scored: Collection[str] = (),
    level: Level = None,
) -> LineChart:
    """One answer or several: how good the one answer of each run is, and how good its Oracle.

    runs: both, by title; the answer is the Ensemble-Mean, and Ensemble-Scored of those that `scored` names.
    """
    lines = [
        Line(name, [answer], [oracle], i, mark="square" if name in scored else "dot", joined=False)
        for i, (name, (answer, oracle)) in enumerate(runs.items())
    ]
    kinds = {line.mark for line in lines}
    meanings = {mark: name for mark, name in (("dot", "Ensemble-Mean"), ("square", "Ensemble-Scored")) if mark in kinds}
    both = len(meanings) > 1
    answer = "one answer" if both else f"{next(iter(meanings.values()))} (one answer)"
    return LineChart(
        "One answer or several",
        lines,
        f"{answer}, {measure}",
        f"Oracle (best of M answers), {measure}",
        level=level,
        named_points=True,
        marks=meanings if both else {},
        size=(7.0, 4.4),
    )


def chart_reliability(bins: Bins) -> LineChart:
    """Accuracy against confidence of each predictor, over how often each confidence occurs."""
    diagonal = Line("as accurate as confident", [0, 100], [0, 100], "faint", "dotted")
    above, below = [diagonal], []
    for i, (name, values) in enumerate(bins.items()):
        known = [b for b, examples in enumerate(values["examples"]) if examples]
        confidence = [values["confidence"][b] for b in known]
        counts = [100 * values["examples"][b] / sum(values["examples"]) for b in known]
        style: dict[str, Any] = TOGETHER.get(name, {"colour": i})
        above.append(Line(name, confidence, [values["accuracy"][b] for b in known], mark="dot", **style))
        below.append(Line(name, confidence, counts, mark="point", **style))
    note = (
        "Above the dotted line an answer is better than it thinks, below it is worse. Answers are taken together in "
        f"{BINS} bins of confidence; below, how many answers are in each."
    )
    occurrence = LineChart("", below, "confidence, %", "examples, %", (0, 100), (0, None))
    return LineChart(
        "Reliability", above, "confidence, %", "right answers, %", (0, 100), (0, 100), note=note, below=occurrence,
        size=(4.2, 4.6),
    )  # fmt: skip
