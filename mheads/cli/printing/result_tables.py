"""Tables of results and of datasets."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from mheads import problems
from mheads.data.catalog import DATASETS
from mheads.engine.diagnostics import learning_rows
from mheads.problems.base import ANSWERS
from mheads.problems.baselines import top

MEASURES = (*ANSWERS.values(), "Oracle")  # of the whole ensemble


def result_table(result: dict[str, Any]) -> Table:
    """A table of one run: its members, the two measures, and the rest."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="left")
    for name, text in problems.PROBLEMS[result["problem"]].rows(result):
        table.add_row(name, Text(text, style="bold" if name in MEASURES else ""))
    for name, text in learning_rows(result.get("learning") or {}):
        table.add_row(name, text)
    table.add_row("parameters", f"{result['parameters']:,}")
    table.add_row("training", f"{result['iterations']:,} iterations, {result['seconds']:.1f} s")
    return table


def comparison_table(results: dict[str, dict[str, Any]]) -> Table:
    """A table of several runs side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    scored = any("ensemble_scored" in result for result in results.values())
    answers = ("Ens.-\nMean", *(["Ens.-\nScored"] if scored else []))
    most = max(len(result["members"]) for result in results.values())
    beside = {name: top(result, most) for name, result in results.items()} if most > 1 else {}
    fair = [f"top-{most}"] if any(value is not None for value in beside.values()) else []
    for name in ("", "members", "mean\nmember", *answers, "Oracle", *fair, "para-\nmeters", "seconds"):
        table.add_column(name, justify="left" if name in ("", "members") else "right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name,
            " ".join(f"{a:.1f}" for a in result["members"]),
            f"{result['single']:.2f}",
            f"{result['ensemble_mean']:.2f}",
            *([f"{result['ensemble_scored']:.2f}" if "ensemble_scored" in result else ""] if scored else []),
            f"{result['oracle']:.2f}",
            *["" if beside[name] is None else f"{beside[name]:.2f}" for _ in fair],
            f"{result['parameters']:,}",
            f"{result['seconds']:.1f}",
        )
    return table


def dataset_table() -> Table:
    """The table of `mheads data list`."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("name", "what", "here"):
        table.add_column(name, no_wrap=name != "what")
    for entry in DATASETS.values():
        if entry.needs_path:
            here = "data.path=..."
        elif entry.available:
            here = "yes"
        else:
            here = f"mheads data get {entry.name}"
        table.add_row(entry.name, entry.description, here)
    return table
