"""`mheads saliency` shows what members respond to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mheads.cli.shared import RunPath, Trust, console


def saliency(
    run: RunPath,
    images: Annotated[
        list[Path] | None, typer.Argument(help="Images of your own; by default some that the run was evaluated on.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .png, .svg or .pdf; by default saliency.png in the run folder."),
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="Also show member 0 of this run, such as a standard ensemble.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Show what the strongest unit of this layer responds to, not the class score.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many images.")] = 6,
    by: Annotated[
        str, typer.Option(help="Whose highest correct response chooses the images: ensemble, or member (any one's).")
    ] = "ensemble",
    sample: Annotated[int, typer.Option(min=0, help="Measure energies on this many examples.")] = 500,
    resize: Annotated[bool, typer.Option(help="Scale images of another size to the one trained on.")] = False,
    trust: Trust = False,
) -> None:
    """Show what of an image each member responds to (guided backprop), and how much owners do more than others.

    Example: mheads saliency runs/mcl --beside runs/standard --layer conv2
    """
    from mheads.common.progress import Terminal
    from mheads.report.saliency.command import saliency as show

    options: dict[str, Any] = {"beside": beside, "layer": layer, "count": count, "by": by, "sample": sample}
    file = show(run, images or [], Terminal(console), output=output, **options, resize=resize, trust=trust)
    console.print(str(file), soft_wrap=True)
