"""`mheads export` writes an ensemble to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import RunPath, Trust, console


def export(
    run: RunPath,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The file: .pt2 (torch.export), .onnx, or .caffemodel and .h5 for weights."
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            help="answer: of the ensemble, weighted by scores if members have some; mean: without them; members: "
            "outputs [M, B, ...]; member:N: those of one; hypotheses: answers [M, B, ...] and probabilities [M, B]."
        ),
    ] = "answer",
    trust: Trust = False,
) -> None:
    """One file for anywhere: the ensemble and its preprocessing, raw examples in, checked against the run's answers.

    Example: mheads export runs/mcl -o mcl.onnx
    """
    from mheads.api.export import export_run
    from mheads.common.progress import Terminal

    export_run(run, output, what, Terminal(console), trust)
