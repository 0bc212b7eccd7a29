"""`mheads recipes` lists the recipes of the package."""

from __future__ import annotations

from mheads.cli.shared import console


def recipes() -> None:
    """List the recipes that come with mheads: what each trains, on what, and for how long.

    Example: mheads recipes
    """
    from mheads.cli.printing.recipes import recipe_table

    console.print(recipe_table())
