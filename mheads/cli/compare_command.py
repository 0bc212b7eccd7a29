"""`mheads compare` prints runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import console


def compare(runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")]) -> None:
    """Print the results of several runs side by side, and the settings that differ.

    Example: mheads compare runs/single runs/tree runs/mcl
    """
    from mheads.report.compare import compare_records, show
    from mheads.runs.read_run import read_all

    show(compare_records(read_all(runs)), console)
