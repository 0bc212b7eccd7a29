"""Charts of hypotheses: what each member answers to examples whose targets are numbers, beside the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mheads.common.errors import UserError
from mheads.report.charts.chart import MANY_MEMBERS, Line, LineChart

MOST_SORTED = 60  # examples side by side
TRAJECTORIES = 3  # charts


def chart_hypotheses(
    rows: Sequence[int],
    inputs: np.ndarray,
    targets: np.ndarray,
    hypotheses: np.ndarray,
    probabilities: np.ndarray | None = None,
) -> list[LineChart]:
    """The answers of members [M, N, ...], their probabilities [M, N] and the targets [N, ...] of N examples.

    One number is drawn against the input if that is one number too, otherwise for some examples in the order of their
    targets. Trajectories in the plane [N, T, 2] have a chart for each of some examples.
    """
    shape = targets.shape[1:]
    if len(shape) == 2 and shape[1] == 2:
        return [
            _draw_trajectories(
                rows[n], targets[n], hypotheses[:, n], None if probabilities is None else probabilities[:, n]
            )
            for n in np.unique(np.linspace(0, len(targets) - 1, TRAJECTORIES).round().astype(int))
        ]
    if targets[0].size > 1:
        raise UserError(
            f"targets of shape {list(shape)} are not drawn: this shows one number, or trajectories [T, 2] in the plane"
        )
    names = _name_members(len(hypotheses), None if probabilities is None else probabilities.mean(1))
    y, answers = targets.reshape(-1), hypotheses.reshape(len(hypotheses), -1)
    if inputs[0].size == 1:
        return [_draw_against_input(inputs.reshape(-1).astype(float), y, answers, names)]
    return [_draw_sorted(y, answers, names)]


def _draw_against_input(x: np.ndarray, y: np.ndarray, answers: np.ndarray, names: Sequence[str]) -> LineChart:
    order = np.argsort(x, kind="stable")
    at = x[order].tolist()
    lines = [Line("target", at, y[order].tolist(), "faint", mark="point", joined=False)]
    lines += [
        Line(name, at, answer[order].tolist(), m) for m, (name, answer) in enumerate(zip(names, answers, strict=True))
    ]
    return LineChart("Answers to each input", _thin(lines), "input", "answer", x_range=(at[0], at[-1]))


def _draw_sorted(y: np.ndarray, answers: np.ndarray, names: Sequence[str]) -> LineChart:
    order = np.argsort(y, kind="stable")
    order = order[np.unique(np.linspace(0, len(y) - 1, min(len(y), MOST_SORTED)).round().astype(int))]
    at = list(range(1, len(order) + 1))
    lines = [
        Line(name, at, answer[order].tolist(), m, mark="point", joined=False)
        for m, (name, answer) in enumerate(zip(names, answers, strict=True))
    ]
    lines.append(Line("target", at, y[order].tolist(), "ink"))
    return LineChart("Answers to some examples", _thin(lines), "examples in the order of their targets", "answer")


def _draw_trajectories(
    number: int, target: np.ndarray, hypotheses: np.ndarray, probabilities: np.ndarray | None
) -> LineChart:
    names = _name_members(len(hypotheses), probabilities)
    lines = []
    for m, (name, (x, y)) in enumerate(zip(names, hypotheses.swapaxes(1, 2).tolist(), strict=True)):
        lines.append(Line(name, x, y, m))
    x, y = target.T.tolist()
    lines.append(Line("target", x, y, "ink", mark="point"))
    across = [x for line in lines for x in line.x]
    return LineChart(
        f"Example {number}",
        _thin(lines),
        f"x of example {number}",
        "y",
        x_range=(min(across), max(across)),
        own_names=True,
        size=(4.4, 3.5),
    )


def _name_members(count: int, probabilities: np.ndarray | None) -> list[str]:
    if probabilities is None:
        return [f"member {m}" for m in range(count)]
    return [f"member {m} ({100 * p:.0f} %)" for m, p in enumerate(probabilities)]


def _thin(lines: Sequence[Line]) -> list[Line]:
    """Members of many are thin and have no names."""
    many = len(lines) > MANY_MEMBERS
    return [replace(line, thin=many and isinstance(line.colour, int)) for line in lines]
