"""`mheads classical` trains classical MCL in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, Overrides, Quiet, Recipe, console


def classical(
    recipe: Recipe,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="The largest number of rounds, each of optim.iterations.")] = 10,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when a smaller share of the examples changes its member.")
    ] = 0.001,
    folder: Annotated[
        Path | None, typer.Option(*FOLDER, help="Where the rounds go; by default runs/classical-RECIPE-DIGEST.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Classical MCL: k-means on the inputs, then rounds of training on one's own examples and sharing them out anew.

    Example: mheads classical digits optim.iterations=100 --rounds 5 --folder runs/classical
    """
    from mheads.config import read as configs

    config = configs.load(recipe, overrides or [])
    from mheads.api.classical_mcl import train_rounds
    from mheads.cli.printing.rounds import RoundTerminal, rounds_table
    from mheads.config.options_without_effect import check_idle_options

    path = folder.expanduser() if folder else Path("runs") / f"classical-{Path(recipe).stem}-{config.digest()}"
    if not path.exists():
        check_idle_options(config, overrides or [])
    summary = train_rounds(config, path, lambda label: RoundTerminal(console, label, bar=not quiet), rounds, tolerance)
    console.print(rounds_table(summary))
