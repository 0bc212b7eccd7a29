"""`mheads cuts` lists where a network can be split."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import console


def cuts(
    model: Annotated[str, typer.Argument(help="A network's name, or your own as package.module:factory.")],
    model_args: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the factory: depth=20.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Of an example: 3,32,32. Built-in networks know theirs.")] = None,
) -> None:
    """Where a network can be split, what lies above and below, and what four members would cost at each place.

    Example: mheads cuts cifar10_quick --shape 3,32,32
    """
    from mheads.cli.printing.cuts import cuts_table
    from mheads.training.find_cuts import cuts_of

    console.print(cuts_table(cuts_of(model, model_args or [], shape)))
