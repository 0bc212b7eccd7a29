"""Charts over training: measures of evaluations, losses and wins of steps. Their lines are those of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mheads.common.errors import UserError
from mheads.problems.baselines import top
from mheads.report.charts.chart import MANY_MEMBERS, Line, LineChart, spans_decades

LogLines = Sequence[Mapping[str, Any]]
LOSS = "loss on the training batches"
NO_STEP = "There is no step in metrics.jsonl yet; a smaller log.every writes more"
TRAINED = (
    "The trained loss is what the optimizer makes smaller. A member's own is over all examples, those that it does not "
    "learn from too, and may rise meanwhile."
)


def chart_measures(evaluations: LogLines, measure: str) -> LineChart:
    """Members, Ensemble-Mean and Oracle at each evaluation."""
    if not evaluations:
        raise UserError("There is no evaluation in metrics.jsonl yet")
    at, num_members = [line["iteration"] for line in evaluations], len(evaluations[0]["members"])
    few = len(at) < 30  # so that each evaluation has a mark
    lines = _member_lines(at, [line["members"] for line in evaluations])
    if few:
        lines = [replace(line, mark="point") for line in lines]
    if num_members > 1:  # one member is all of these
        for key, together in {
            "ensemble_mean": Line("Ensemble-Mean", at, [], "ink", mark="dot"),
            "ensemble_scored": Line("Ensemble-Scored", at, [], "ink", "dotted", "dot"),
            "oracle": Line("Oracle", at, [], "ink", "dashed", "ring"),
        }.items():
            if all(key in line for line in evaluations):
                values = [line[key] for line in evaluations]
                lines.append(replace(together, y=values, mark=together.mark if few else ""))
        guesses = [top(line, num_members) for line in evaluations]
        if None not in guesses:
            name = f"top-{num_members} of Ensemble-Mean"
            lines.append(Line(name, at, guesses, "faint", "dashed", "point" if few else ""))
    what = measure.partition(",")[0]
    title = f"{what[0].upper()}{what[1:]} on the {evaluations[-1].get('split', 'test')} set"
    return _with_note(LineChart(title, lines, "iteration", measure, size=(4.5, 3.4)))


def chart_losses(steps: LogLines) -> LineChart:
    """The loss that is trained, and each member's own, on the training batches."""
    if not steps:
        raise UserError(NO_STEP)
    at = [line["iteration"] for line in steps]
    lines = _member_lines(at, [line["member_losses"] for line in steps])
    if trained := _find_trained_loss(steps):
        lines.append(Line(trained[0], at, trained[1], "ink"))
    note = TRAINED if len(lines) > 2 and lines[-1].name == "trained loss" else ""
    chart = LineChart(LOSS.capitalize(), lines, "iteration", LOSS, note=note, size=(4.5, 3.4))
    return _with_note(replace(chart, log_scale=spans_decades(lines)))


def chart_wins(steps: LogLines) -> LineChart:
    """The part of the examples that each member won, in percent."""
    if not steps:
        raise UserError(NO_STEP)
    won = [[100 * part for part in line.get("wins", line["share"])] for line in steps]
    lines = _member_lines([line["iteration"] for line in steps], won)
    title, last = "Examples that each member learns from", won[-max(1, len(won) // 5) :]
    idle = [str(m) for m in range(len(won[0])) if not any(row[m] for row in last)]
    note = f"Members that won nothing in the last fifth of training: {', '.join(idle)}. Do not rely on their answers."
    note = note if idle else ""
    return _with_note(
        LineChart(title, lines, "iteration", "examples won, %", y_range=(0, None), note=note, size=(6.0, 3.4))
    )


def chart_runs(title: str, logs: Sequence[tuple[str, str, LogLines]], measure: str) -> LineChart:
    """One measure of several runs: the name of each, the key of its measure, and its evaluations."""
    lines = []
    for i, (name, key, evaluations) in enumerate(logs):
        if known := [line for line in evaluations if key in line]:
            lines.append(Line(name, [line["iteration"] for line in known], [line[key] for line in known], i))
    if not lines:
        raise UserError(f"No run has an evaluation with {title} yet")
    return _with_note(LineChart(title, lines, "iteration", measure))


def _member_lines(at: Sequence[float], values: Sequence[Sequence[float | None]]) -> list[Line]:
    """A line for each member, of values [T][M]."""
    num_members = len(values[0])
    many = num_members > MANY_MEMBERS
    return [Line(f"member {m}", at, [row[m] for row in values], m, thin=many) for m in range(num_members)]


def _find_trained_loss(steps: LogLines) -> tuple[str, list[float]] | None:
    """What the optimizer makes smaller, at each logged step, and what to call it; None in logs that do not have it.

    Under MCL that is the winners' losses: it falls while the members' own rise, on examples that are not theirs. Where
    all members learn from everything it is their sum, and is shown for one of them, so that both can be seen.
    """
    if not all("loss" in line for line in steps):
        return None
    losses, members = [round(line["loss"], 6) for line in steps], len(steps[0]["member_losses"])  # rounded as theirs
    summed = all(line["loss"] > 0.8 * sum(line["member_losses"]) for line in steps)
    if members == 1 or not summed:
        return "trained loss", losses
    return f"trained loss / {members}", [loss / members for loss in losses]


def _with_note(chart: LineChart) -> LineChart:
    """The chart, with what its lines do not show by themselves added to its note."""
    thin, equal = sum(line.thin for line in chart.lines), chart.equal_lines
    note = f"{thin} members, one thin line each." if thin else f"Equal throughout: {equal}." if equal else ""
    return replace(chart, note=f"{chart.note} {note}".strip())
