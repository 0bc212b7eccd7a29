"""`mheads demo`, the embedded example: four ways to use four networks on real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, console


def demo(
    run: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/demo"),
) -> None:
    """Compare four ways to use four networks on real digits: a table and a picture in about a minute, no download.

    Example: mheads demo
    """
    from mheads.cli.printing.result_tables import comparison_table
    from mheads.suites.demo import ABOUT, train_demo, write_demo

    results = train_demo(run, console)
    console.print(comparison_table(results))
    picture, page = write_demo(run, results)
    console.print(ABOUT)
    console.print(f"Who owns which digit: {picture}", soft_wrap=True)
    console.print(f"All of it, to open in a browser: {page}", soft_wrap=True)
