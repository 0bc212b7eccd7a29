"""`mheads distil` trains one network on an ensemble's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, Quiet, RunPath, Trust, console


def distil(
    run: RunPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Config keys to change from the run's: model=..., teacher.weight=0.5."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(*FOLDER, help="The run folder; by default RUN-distilled.")] = None,
    quiet: Quiet = False,
    trust: Trust = False,
) -> None:
    """One network from many: it learns what the run's ensemble answers to the training examples.

    Example: mheads distil runs/mcl --folder runs/small
    """
    from mheads.api.distil import distil as learn
    from mheads.cli.printing.result_tables import comparison_table
    from mheads.common.progress import Terminal

    run = run.expanduser()
    run = run if run.name not in ("", "..") else run.resolve()
    path = folder.expanduser() if folder else run.with_name(f"{run.name}-distilled")
    console.print(comparison_table(learn(run, overrides or [], path, Terminal(console, bar=not quiet), trust)))
