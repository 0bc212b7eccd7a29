"""`mheads reproduce` runs a table of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, console
from mheads.common.errors import UserError


def reproduce(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name (standard, mcl, ...) or the path of a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change in all rows.")
    ] = None,
    *,
    recipe: Annotated[
        str | None, typer.Option(help="What is trained: a recipe's name or a YAML file; by default the suite's own.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Runs of each row, with seeds that follow one another.")] = 1,
    seed: Annotated[int, typer.Option(help="The seed of the first trial.")] = 0,
    scale: Annotated[float, typer.Option(help="Train for this part of the iterations, with the schedule scaled.")] = 1,
    validation: Annotated[
        int, typer.Option(help="Hold out the last n training examples and evaluate on them: to choose, not to report.")
    ] = 0,
    test: Annotated[
        bool, typer.Option("--test", help="With --validation: show the same runs on the test set, to report a choice.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Train this row alone; may be given several times.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and the time that they will take; train nothing.")
    ] = False,
    only_tables: Annotated[
        bool, typer.Option("--tables", help="Train nothing: make the tables anew, without a suite all of them.")
    ] = False,
    folder: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/reproduce"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Where tables, figures and JSON files go.")] = Path(
        "results"
    ),
) -> None:
    """Run a table of the paper and set it beside ours; finished runs are reused, and the same command resumes.

    Example: mheads reproduce standard --recipe cifar10_quick --trials 3
    """
    from mheads.suites.jobs import Options
    from mheads.suites.reproduce import Reproduction, SuiteRequest, write_tables
    from mheads.suites.reproduce import reproduce as run
    from mheads.suites.suite import SUITES, read_suite

    if suite is None:
        if not only_tables:
            raise UserError(f"give a suite: {', '.join(SUITES)}, or the path of a YAML file")
        for path in write_tables(output, console):
            console.print(f"{path} read", soft_wrap=True)
        return
    for name in [recipe] if recipe else read_suite(suite).own_recipes:
        options = Options(name, seed, scale, validation, tuple(overrides or ()), test)
        request = SuiteRequest(suite, options, trials, only or (), folder, output)
        if dry_run:
            Reproduction(request, console).print_plan()
        else:
            run(request, console, train=not only_tables)
