"""Runs suites for the command line: a bar while they run, a table after each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from mheads.bench.suites import SUITES, run
from mheads.errors import UserError
from mheads.files import write_atomically


def run_suites(
    name: str, rounds: int, json_file: Path | None, console: Console, figure_file: Path | None = None
) -> None:
    """One suite or all; JSON holds the one result, or one for each name."""
    if name != "all" and name not in SUITES:
        raise UserError(f"there is no benchmark {name!r}: give {', '.join(SUITES)} or all")
    if figure_file is not None:
        if name not in ("comm", "all"):
            raise UserError(f"--figure: {name} has none, comm has")
        if figure_file.suffix not in (".png", ".svg", ".pdf"):
            raise UserError(f"--figure {figure_file}: give a file that ends in .png, .svg or .pdf")
    results: dict[str, Any] = {}
    for suite in SUITES if name == "all" else [name]:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"bench {suite}", total=None)

            def advance(done: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            results[suite] = run(suite, advance, rounds)
        console.print(table(results[suite]))
    if figure_file is not None:
        from mheads.report.figures import communication_figure, save

        save(communication_figure(by_network(results["comm"])), figure_file)
    if json_file is not None:
        text = json.dumps(results if name == "all" else results[name], indent=1) + "\n"
        write_atomically(json_file, text)


def by_network(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The layers of the networks in a result of `comm`, for its figure."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in result.items():
        if isinstance(value, dict) and "network" in value:
            layer = key.removeprefix(f"{value['network']}_")
            found.setdefault(f"{value['network']} x{value['members']}, batch {value['batch']}", {})[layer] = value
    return found


def table(result: dict[str, Any]) -> RenderableType:
    machine = result["machine"]
    title = f"{result['suite']}: {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for key, value in result.items():
        if key in ("suite", "machine") or (isinstance(value, dict) and "network" in value):
            continue
        text = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        drawn.add_row(key, text)
    networks = by_network(result)
    return Group(*(layers_table(name, layers) for name, layers in networks.items()), drawn) if networks else drawn


def layers_table(name: str, layers: dict[str, Any]) -> Table:
    """What `comm` found for each layer that the members of a network may share; the rest is in the JSON."""
    drawn = Table(title=f"{name}, two ranks", title_justify="left", box=box.SIMPLE_HEAD)
    drawn.add_column("shared up to")
    for column in ("floats, one way", "transfer", "step", "transfer", "exposed", "predicted"):
        drawn.add_column(column, justify="right")
    for layer, found in layers.items():
        drawn.add_row(
            layer,
            f"{found['floats_forward']:,}",
            f"{found['transfer_ms']:.1f} ms",
            f"{found['best_ms']:.0f} ms",
            f"{100 * found['transfer_fraction']:.1f}%",
            f"{100 * found['exposed_fraction_median']:.1f}%",
            f"{found['predicted_ms']:.0f} ms",
        )
    return drawn
