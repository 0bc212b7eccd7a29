"""Where the answers of members differ, and which classes they confuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mheads.common.table import Cell, Table
from mheads.problems import is_single_label
from mheads.report.page.evidence import Evidence
from mheads.report.page.html import Grid, Grids, Missing, Part, percents
from mheads.runs.record import Record

MANY_CLASSES = 40  # from here on a confusion matrix is a list of the most frequent confusions
MOST_CONFUSIONS = 20


def agreement(record: Record, evidence: Evidence | None, why: str) -> list[Part]:
    """How often two members differ, and the answers to each class; or why that is not known."""
    found: list[Part] = []
    result = record.result or {}
    members = [f"member {m}" for m in range(record.config.members)]
    if "disagreement_pairs" in result and len(members) > 1:
        differ = np.asarray(result["disagreement_pairs"], float) / 100
        np.fill_diagonal(differ, np.nan)
        title = "How often two members answer differently, %"
        found.append(
            Grids([Grid("differ", title, members, [f"{m}" for m in range(len(members))], percents(differ)[None], [""])])
        )
    if not is_single_label(record.data.problem):
        return found or [Missing(f"Members give {record.data.problem.answer_kind}, not one class that could differ.")]
    if evidence is None:
        return [*found, Missing(f"Which classes are confused is not known: {why}")]
    names, counts = record.data.problem.groups, evidence.confusion
    if len(names) > MANY_CLASSES:
        return [*found, _confusions(names, counts[0], evidence.together[0])]
    totals = counts.sum(2, keepdims=True)
    parts = np.where(totals > 0, counts / np.maximum(totals, 1), np.nan)
    who = [*evidence.together, *members] if len(members) > 1 else ["the network"]
    grid = Grid(
        "confusion", "Answers to the examples of each class, %", names, names, percents(parts[: len(who)]), who,
        "true class", shown=0,
    )  # fmt: skip
    return [
        *found,
        Grids([grid], "choice", "A row is a true class, a column an answer; right answers are on the diagonal."),
    ]


def _confusions(names: Sequence[str], counts: np.ndarray, who: str) -> Table:
    """The most frequent confusions, where there are too many classes for a matrix."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    most = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS]
    rows = []
    for true, said in zip(*np.unravel_index(most, wrong.shape), strict=True):
        if n := int(wrong[true, said]):
            part = 100 * n / counts[true].sum()
            rows.append([Cell(names[true]), Cell(names[said]), Cell(f"{n:,}", n), Cell(f"{part:.1f} %", part)])
    head = ["true class", "answer", "examples", "of the class"]
    return Table(f"The most frequent confusions of the {who}", head, rows, sortable=True)
