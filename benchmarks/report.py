"""Runs suites for the command line: a bar while they run, a table after each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from benchmarks.suites import SUITES, run
from mheads.common.atomic_files import write_atomically
from mheads.common.errors import UserError


def run_suites(
    name: str, rounds: int, json_file: Path | None, console: Console, figure_file: Path | None = None
) -> None:
    """Runs one suite or all; the JSON file holds the one result, or one for each name."""
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
        from benchmarks.communication_figure import communication_figure
        from mheads.report.figures.figure import save

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


# What the table calls the sides in the JSON; others keep their name.
SIDES = {
    "ours": "mheads",
    "ours_score_averaged": "mheads, score-averaged",
    "loop": "plain loop",
    "loop_channels_last": "channels-last loop",
    "vmap": "torch.func vmap",
    "grouped": "grouped convolution",
    "compile": "torch.compile",
    "dense": "where all learn",
    "k1": "MCL, k=1",
    "k2": "MCL, k=2",
    "k3": "MCL, k=3",
    "single": "single model",
    "single_one_core": "single model, one core",
}
BASES = {"mcl": "dense", "tree": "independent"}  # what a suite's ratios compare with; elsewhere it is ours


def table(result: dict[str, Any]) -> RenderableType:
    """A result in words: what each side takes, how they compare, and the rest line by line."""
    machine = result["machine"]
    text = f"{result['suite']}: {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    parts: list[RenderableType] = [Text(text, style="bold")]
    parts += [layers_table(name, layers) for name, layers in by_network(result).items()]
    sides = {key: value for key, value in result.items() if isinstance(value, dict) and "best_ms" in value}
    sides = {key: value for key, value in sides.items() if "network" not in value and "median_ms" in value}
    told = {"suite", "machine", *sides}
    if sides:
        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("", "best", "median"):
            drawn.add_column(title, justify="right" if title else "left", no_wrap=True)
        drawn.add_column("beside the others")
        for key, value in sides.items():
            drawn.add_row(_side(key), _ms(value["best_ms"]), _ms(value["median_ms"]), compared(result, key))
            told |= {f"ratio_{key}", f"ratio_{key}_median"}
        parts.append(drawn)
    for key, value in result.items():
        if key not in told and not (isinstance(value, dict) and "network" in value):
            said = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else f"{value}"
            parts.append(Text(f"{key.replace('_', ' ')}: {said}"))
    return Group(*parts)


def compared(result: dict[str, Any], side: str) -> str:
    """Compares a side with the base of its ratio: best against best, and in brackets median against median."""
    if f"ratio_{side}" not in result:
        return ""
    base = "ours_score_averaged" if side.endswith("fusion") else BASES.get(result["suite"], "ours")
    best, median = (float(result[key]) for key in (f"ratio_{side}", f"ratio_{side}_median"))
    if best >= 1:
        return f"{_side(base)} is {best:.2f} times as fast (medians: {median:.2f})"
    return f"{1 / best:.2f} times as fast as {_side(base)} (medians: {1 / median:.2f})"


def _side(key: str) -> str:
    return SIDES.get(key, key.replace("_", " "))


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


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
