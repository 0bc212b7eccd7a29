"""`mheads plot` draws a figure of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import Trust, console


def plot(
    what: Annotated[
        str, typer.Argument(help="ownership, history, wins, k, splits, answers, disagreement or reliability.")
    ],
    runs: Annotated[list[Path], typer.Argument(help="Run folders; history and wins take one.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .png, .svg or .pdf; by default in the folder of the first run."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Draw a figure of a run or of several side by side; unfinished runs are drawn as far as they are.

    Example: mheads plot ownership runs/mcl_k1 runs/mcl_k2 -o owners.png
    """
    from mheads.common.progress import Terminal
    from mheads.report.plot import plot as draw

    console.print(str(draw(what, runs, output, Terminal(console), trust)), markup=False, soft_wrap=True)
