"""What a table shows of the result of a run."""

from __future__ import annotations

from typing import Any

from mheads.common.table import Cell
from mheads.engine.diagnostics import learning_rows
from mheads.problems.base import ANSWERS, Problem

MEASURES = (*ANSWERS.values(), "Oracle")  # of the whole ensemble


def result_rows(problem: Problem, result: dict[str, Any]) -> list[list[Cell]]:
    """The name and the text of each measure; those of the whole ensemble are strong."""
    rows = [*problem.rows(result), *learning_rows(result.get("learning") or {})]
    return [[Cell(name), Cell(text, strong=name in MEASURES)] for name, text in rows]
