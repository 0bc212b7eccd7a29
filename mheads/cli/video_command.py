"""`mheads video` makes a video of ownership over training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import RunPath, console


def video(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .mp4 or .gif; by default ownership.mp4 in the run folder."),
    ] = None,
    pictures: Annotated[
        str, typer.Option(help="Of the classes: typical (an example near the mean) or mean.")
    ] = "typical",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long it plays.")] = 12,
) -> None:
    """Show how members came to own their classes: each class's picture, as bright as the member learns from it.

    Example: mheads video runs/mcl -o mcl.gif
    """
    from mheads.common.progress import Terminal
    from mheads.report.ownership_video import make_video

    console.print(str(make_video(run, output, pictures, seconds, Terminal(console))), soft_wrap=True)
