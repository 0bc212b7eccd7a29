"""Tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def result_table(result: dict[str, Any]) -> Table:
    """One run: its members, the two measures, and the rest."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="left")
    several = len(result["members"]) > 1
    table.add_row("members", "  ".join(f"{a:.2f}" for a in result["members"]) + (" %" if not several else ""))
    if several:
        table.add_row("mean member", f"{result['single']:.2f} %")
        table.add_row("Ensemble-Mean", f"[bold]{result['ensemble_mean']:.2f} %[/]")
        table.add_row("Oracle", f"[bold]{result['oracle']:.2f} %[/]")
        table.add_row("disagreement", f"{result['disagreement']:.2f} %")
    table.add_row("negative log-likelihood", _number(result["nll"]["ensemble_mean"], ".4f"))
    table.add_row("calibration error", _number(result["calibration_error"]["ensemble_mean"], ".2f") + " %")
    table.add_row("parameters", f"{result['parameters']:,}")
    table.add_row("training", f"{result['iterations']:,} iterations, {result['seconds']:.1f} s")
    return table


def comparison_table(results: dict[str, dict[str, Any]]) -> Table:
    """Several runs side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "members", "mean\nmember", "Ens.-\nMean", "Oracle", "para-\nmeters", "seconds"):
        table.add_column(name, justify="left" if name in ("", "members") else "right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name,
            " ".join(f"{a:.1f}" for a in result["members"]),
            f"{result['single']:.2f}",
            f"{result['ensemble_mean']:.2f}",
            f"{result['oracle']:.2f}",
            f"{result['parameters']:,}",
            f"{result['seconds']:.1f}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
