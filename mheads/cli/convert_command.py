"""`mheads convert` turns a Caffe net into a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import console


def convert(
    net: Annotated[Path, typer.Argument(help="A Caffe net, or a solver that names one (.prototxt).")],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOLVER] [KEY=VALUE]...", help="Its solver (.prototxt), and config keys to change."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the recipe to this .yaml file instead of printing it.")
    ] = None,
) -> None:
    """Turn a Caffe or MPI-Caffe net and its solver into a recipe.

    Example: mheads convert net.prototxt solver.prototxt data=cifar10 -o mine.yaml
    """
    from mheads.caffe.convert import convert_files

    text = convert_files(net, more or [], output)
    if text is not None:
        console.print(text.rstrip(), soft_wrap=True)
