"""`mheads tree` draws the tree of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import Overrides, Recipe, console


def tree(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Also show what each of this many ranks holds, and what they send.")
    ] = None,
) -> None:
    """Draw the tree of a recipe: which layers are shared by which members, and what that saves.

    Example: mheads tree cifar10_quick split=conv2 --ranks 4
    """
    from mheads.config import read as configs

    config = configs.load(recipe, overrides or [])
    from mheads.cli.printing.tree import draw

    console.print(draw(config, ranks))
