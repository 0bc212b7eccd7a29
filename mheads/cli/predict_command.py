"""`mheads predict` shows what a run answers to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import RunPath, Trust, console


def predict(
    run: RunPath,
    files: Annotated[list[Path], typer.Argument(help="Images, folders of images, or .npz and .csv files of examples.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the answers to this .csv, or outputs [M, N, ...] to this .npz."),
    ] = None,
    resize: Annotated[bool, typer.Option(help="Scale images of another size to the one trained on.")] = False,
    trust: Trust = False,
) -> None:
    """Show every member's answer to an image, the ensemble's, and how far they agree.

    Example: mheads predict runs/mcl pictures -o answers.csv
    """
    from mheads.api.predict import predict_files
    from mheads.cli.printing.answers import tables
    from mheads.common.progress import Terminal

    left_out: list[str] = []
    watch = Terminal(console)
    for predicted in predict_files(run, files, resize, watch, trust, output, left_out):
        for table in tables(predicted, watch):
            console.print(table)
    if left_out:
        raise typer.Exit(1)
