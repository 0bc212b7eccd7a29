"""`mheads config` prints a config with all its values."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import Overrides, Recipe, console


def config(
    recipe: Recipe,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="Say in a comment what each key means.")] = True,
) -> None:
    """Print a recipe's config as YAML with all values filled in: what training would take, or a file to start from.

    Example: mheads config digits loss=mcl > mine.yaml
    """
    from mheads.config import read as configs

    loaded = configs.load(recipe, overrides or [])
    from mheads.cli.printing.recipes import annotate
    from mheads.config.options_without_effect import check_idle_options

    check_idle_options(loaded, overrides or [])
    console.print(annotate(loaded) if describe else loaded.to_yaml().rstrip(), soft_wrap=True)
