"""`mheads eval` measures a trained run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import RunPath, Split, Trust, console


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
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Also measure how confidence tells other data apart (AUROC, FPR95): data.name=cifar100. May be given "
            "several times, once for each key.",
        ),
    ] = None,
    shifted: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Also measure accuracy on data of the same classes from another source, such as corrupted images: "
            "data.name=npz, and once more data.path=corrupted.npz.",
        ),
    ] = None,
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
