"""Tables of results and of datasets."""

from __future__ import annotations

from typing import Any

import rich.table

from mheads.common.table import Cell, Head, Table, text_rows
from mheads.common.terminal_table import terminal_facts, terminal_table
from mheads.data.catalog import DATASETS, Dataset
from mheads.problems import PROBLEMS
from mheads.problems.baselines import top
from mheads.runs.result_rows import result_rows


def result_table(result: dict[str, Any]) -> rich.table.Table:
    """A table of one run: its members, the two measures, and the rest."""
    rest = (
        [["measured on", f"{result['examples']:,} examples of the {result['split']} set"]] if "split" in result else []
    )
    rest += [
        ["parameters", f"{result['parameters']:,}"],
        ["training", f"{result['iterations']:,} iterations, {result['seconds']:.1f} s"],
    ]
    rows = result_rows(PROBLEMS[result["problem"]], result) + text_rows(rest)
    return terminal_facts(Table("The result of this run", ["measure", "here"], rows))


def comparison_table(results: dict[str, dict[str, Any]]) -> rich.table.Table:
    """A table of several runs side by side."""
    scored = any("ensemble_scored" in result for result in results.values())
    answers = ["ensemble_mean", *(["ensemble_scored"] if scored else [])]
    most = max(len(result["members"]) for result in results.values())
    best = {name: top(result, most) for name, result in results.items()} if most > 1 else {}
    fair = [f"top-{most}"] if any(value is not None for value in best.values()) else []
    titles = ("Ens.-\nMean", "Ens.-\nScored")[: len(answers)]
    numbers = ("mean\nmember", *titles, "Oracle", *fair, "para-\nmeters", "seconds")
    head = [Head(name, right=name in numbers, whole=True) for name in ("", "members", *numbers)]
    rows = [
        [
            Cell(name),
            Cell(" ".join(f"{a:.1f}" for a in result["members"])),
            *(_number(result.get(key), ".2f") for key in ("single", *answers, "oracle")),
            *(_number(best[name], ".2f") for _ in fair),
            _number(result["parameters"], ","),
            _number(result["seconds"], ".1f"),
        ]
        for name, result in results.items()
    ]
    return terminal_table(Table("All runs", head, rows), padding=0)


def _number(value: float | None, form: str) -> Cell:
    return Cell("") if value is None else Cell(format(value, form), value)


def dataset_table() -> rich.table.Table:
    """The table of `mheads data list`."""

    def place(entry: Dataset) -> str:
        if entry.needs_path:
            return "data.path=..."
        return "yes" if entry.available else f"mheads data get {entry.name}"

    rows = [[entry.name, entry.description, place(entry)] for entry in DATASETS.values()]
    head = [Head("name", whole=True), Head("what"), Head("here", whole=True)]
    return terminal_table(Table("Datasets", head, text_rows(rows)), edge=True)
