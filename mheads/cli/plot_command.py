"""`mheads plot` draws a figure of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import Trust, console


def plot(
    name: Annotated[str | None, typer.Argument(help="The figure; without it, all figures are listed.")] = None,
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; some figures take one.")] = None,
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
    from mheads.report.plot import FIGURES
    from mheads.report.plot import plot as draw

    if name is None:
        for known, figure in FIGURES.items():
            console.print(f"{known:12}  {figure.help}", soft_wrap=True)
    else:
        console.print(str(draw(name, runs or [], output, Terminal(console), trust)), soft_wrap=True)
