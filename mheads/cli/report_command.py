"""`mheads report` writes the page of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, Trust, console
from mheads.common.errors import UserError


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders; several are set side by side. With --suite: KEY=VALUE as `mheads reproduce` was given."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .html; by default report.html in the run folder, or beside several."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Write it anew while training goes on; the open page loads itself again.")
    ] = False,
    suite: Annotated[str | None, typer.Option(help="Instead of runs: those of `mheads reproduce SUITE`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="With --suite: the recipe; by default the suite's own.")] = None,
    scale: Annotated[float, typer.Option(help="With --suite: the part of the iterations.")] = 1,
    validation: Annotated[
        int | None, typer.Option(help="With --suite: training examples held out, if not the recipe's own.")
    ] = None,
    folder: Annotated[Path, typer.Option(*FOLDER, help="With --suite: where its runs are.")] = Path("runs/reproduce"),
    trust: Trust = False,
) -> None:
    """Write a page to open in a browser: results, curves, ownership over time, the hardest images, in one HTML file.

    Example: mheads report runs/mcl
    """
    from mheads.common.progress import Terminal
    from mheads.report.page import report as pages
    from mheads.suites.jobs import Options
    from mheads.suites.page import report_suite
    from mheads.suites.paper_rows import paper_figures
    from mheads.suites.planner import Planner
    from mheads.suites.suite import read_suite

    given = [str(run) for run in runs or ()]
    if not all("=" in key for key in given) if suite else not given:
        raise UserError("give run folders, or --suite SUITE for the runs of mheads reproduce")
    watch = Terminal(console)
    if suite is not None:
        if follow:
            raise UserError("--watch follows runs: give their folders instead of --suite")
        options = Options(recipe or read_suite(suite).own_recipes[0], scale=scale, overrides=tuple(given))
        held_out = Planner(options).held_out(read_suite(suite)) if validation is None else validation
        options = replace(options, validation=held_out)
        page = report_suite(suite, options, output, watch, folder)
    else:
        page = (pages.follow if follow else pages.report)(runs or [], output, watch, trust, paper=paper_figures)
    console.print(str(page), soft_wrap=True)
