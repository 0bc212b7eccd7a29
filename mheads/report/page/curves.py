"""The charts of a page: measures and losses over training, who wins, how far confidence can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mheads.problems.baselines import top
from mheads.problems.metrics import BINS
from mheads.report.figures.figures import spans_decades, trained_loss
from mheads.report.page.html import Chart, Missing, Part
from mheads.report.page.svg import Line, bars, equal_lines, line_chart, series
from mheads.runs.metrics_log import Log
from mheads.runs.record import Record

MANY_MEMBERS = 12  # from here on the members' lines are thin and not named
TOGETHER = (("ensemble_mean", "Ensemble-Mean", "ink"), ("ensemble_scored", "Ensemble-Scored", "ink dotted"))
ORACLE = ("oracle", "Oracle", "ink dashed")
TRAINED = (
    "The trained loss is what the optimizer makes smaller. A member's own is over all examples, those that it does not "
    "learn from too, and may rise meanwhile."
)


def measures(record: Record) -> Part:
    """Members, Ensemble-Mean and Oracle at each evaluation."""
    lines = record.log.evaluations
    if not lines:
        return Missing("There is no evaluation in metrics.jsonl yet.")
    at = [line["iteration"] for line in lines]
    members = len(lines[0]["members"])
    found = _members(at, [line["members"] for line in lines])
    if members > 1:
        for key, name, style in (*TOGETHER, ORACLE):
            if all(key in line for line in lines):
                found.append(Line(name, at, [line[key] for line in lines], style))
        beside = [top(line, members) for line in lines]
        if None not in beside:
            found.append(Line(f"top-{members} of Ensemble-Mean", at, beside, "faint dashed"))
    measure = record.data.problem.measure
    split = lines[-1]["split"]
    return _chart(f"{measure.partition(',')[0].capitalize()} on the {split} set", found, measure)


def losses(log: Log) -> Part:
    """What is trained, and each member's own loss, on the training batches."""
    if not log.steps:
        return Missing("There is no step in metrics.jsonl yet; a smaller log.every writes more.")
    at = [line["iteration"] for line in log.steps]
    lines = _members(at, [line["member_losses"] for line in log.steps])
    if trained := trained_loss(log.steps):
        lines.append(Line(trained[0], at, trained[1], "ink"))
    chart = _chart(
        "Loss on the training batches", lines, "loss", decades=spans_decades([y for line in lines for y in line.y])
    )
    own = TRAINED if len(lines) > 2 and lines[-1].name == "trained loss" else ""
    return replace(chart, note=f"{own} {chart.note}".strip())


def wins(log: Log) -> Part:
    """The part of the examples that each member won."""
    if not log.steps:
        return Missing("There is no step in metrics.jsonl yet; a smaller log.every writes more.")
    at = [line["iteration"] for line in log.steps]
    won = [[100 * part for part in line.get("wins", line["share"])] for line in log.steps]
    top, least = max(max(row) for row in won), min(min(row) for row in won)
    if top - least < 0.01:
        return Missing("All members learned from equally many examples at all times.")
    lines = _members(at, won)
    return _chart("Examples that each member learns from", lines, "examples won, %", (0, max(10, top)))


def reliability(bins: Mapping[str, Mapping[str, Sequence[float]]], members: int) -> Chart:
    """Accuracy against confidence, over how often each confidence occurs in the ensemble's answers."""
    answer = "Ensemble-Scored" if "Ensemble-Scored" in bins else "Ensemble-Mean"
    who = answer if members > 1 else "network"  # one member is its own mean
    together = [(name, style) for _, name, style in TOGETHER if name in bins]
    shown = [("members", "s0"), *together] if members > 1 else together[:1]
    lines = [Line("as accurate as confident", [0, 100], [0, 100], "faint dotted")]
    for name, style in shown:
        found = bins[name]
        there = [i for i, examples in enumerate(found["examples"]) if examples]
        lines.append(
            Line(
                name if members > 1 else who,
                [found["confidence"][i] for i in there],
                [found["accuracy"][i] for i in there],
                style,
            )
        )
    occurs = list(bins[answer]["examples"])
    return Chart(
        "Reliability",
        line_chart(lines, "confidence, %", "accuracy, %", (0, 100), (0, 100)),
        [(line.style, line.name) for line in lines],
        f"Above the dotted line an answer is better than it thinks, below it is worse. Answers are taken together in "
        f"{BINS} bins of confidence; below, how many of the {who}'s answers are in each.",
        bars(occurs, f"confidence of the {who}", "examples"),
    )


def compared(records: Sequence[Record], key: str, name: str) -> Part:
    """One measure of several runs against the iteration."""
    return _compared(records, [(record.title, key) for record in records], name)


def one_answer(records: Sequence[Record]) -> Part:
    """What each run answers with against the iteration: Ensemble-Scored where members have scores, else the mean."""
    scored = [any("ensemble_scored" in line for line in record.log.evaluations) for record in records]
    if not any(scored):
        return compared(records, "ensemble_mean", "Ensemble-Mean")
    shown = [TOGETHER[has_scores][:2] for has_scores in scored]
    lines = [(f"{record.title}, {who}", key) for record, (key, who) in zip(records, shown, strict=True)]
    return _compared(records, lines, "One answer")


def _compared(records: Sequence[Record], shown: Sequence[tuple[str, str]], title: str) -> Part:
    """A line for each run: its name, and the key of what it shows."""
    lines = []
    for i, (record, (name, key)) in enumerate(zip(records, shown, strict=True)):
        found = [line for line in record.log.evaluations if key in line]
        if found:
            lines.append(Line(name, [line["iteration"] for line in found], [line[key] for line in found], series(i)))
    if not lines:
        return Missing(f"No run has an evaluation with {title} yet.")
    return _chart(title, lines, records[0].data.problem.measure)


def _members(at: Sequence[float], values: Sequence[Sequence[float | None]]) -> list[Line]:
    number = len(values[0])
    thin = " thin" if number > MANY_MEMBERS else ""
    return [Line(f"member {m}", at, [row[m] for row in values], series(m) + thin) for m in range(number)]


def _same(lines: Sequence[Line]) -> str:
    found = equal_lines(lines)
    return f"Equal throughout: {found}." if found else ""


def _chart(title: str, lines: Sequence[Line], y_label: str, y_range: Any = None, decades: bool = False) -> Chart:
    members = [line for line in lines if line.name.startswith("member ")]
    named = [line for line in lines if len(members) <= MANY_MEMBERS or line not in members]
    note = f"{len(members)} members, one thin line each." if len(members) > MANY_MEMBERS else _same(lines)
    svg = line_chart(lines, "iteration", y_label, None, y_range, decades)
    return Chart(title, svg, [(line.style, line.name) for line in named] if len(lines) > 1 else [], note)
