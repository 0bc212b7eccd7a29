"""`mheads eval` measures a trained run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import OtherClasses, OtherSource, RunPath, Split, Trust, console


def eval(
    run: RunPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Other data, data.path=other.npz, or eval.views=[]."),
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Also save outputs [M, N, C] and labels [N] to this .npz file.")
    ] = None,
    split: Split = None,
    temperature_from: Annotated[
        str | None,
        typer.Option(metavar="SPLIT", help="Also fit temperatures on this split (validation), and measure with them."),
    ] = None,
    ood: OtherClasses = None,
    shifted: OtherSource = None,
    trust: Trust = False,
) -> None:
    """Compute the metrics of a run anew: on its test set, on another split, on other data.

    Example: mheads eval runs/mcl --outputs outputs.npz

    Example: mheads eval runs/mcl --split test --temperature-from validation --ood data.name=cifar100
    """
    from mheads.api.evaluate import FurtherExamples, evaluate_run
    from mheads.cli.printing.result_tables import result_table
    from mheads.common.progress import Terminal

    further = FurtherExamples(temperature_from, ood or (), shifted or ())
    console.print(result_table(evaluate_run(run, outputs, Terminal(console), overrides or [], split, trust, further)))
