"""`mheads cuts` lists where a network can be split."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import console
from mheads.common.errors import UserError


def cuts(
    model: Annotated[
        str,
        typer.Argument(help="A network's name, your own as package.module:factory, or a recipe that names one."),
    ],
    model_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Arguments of the factory: depth=20. After a recipe, config keys to change."
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of an example: 3,32,32. Built-in networks and recipes know theirs.")
    ] = None,
) -> None:
    """Where a network can be split, what lies above and below, and what four members would cost at each place.

    Example: mheads cuts cifar10_quick --shape 3,32,32
    """
    from mheads.cli.printing.cuts import cuts_table
    from mheads.config import read as configs
    from mheads.networks import INPUT_SHAPES, NETWORKS
    from mheads.training.build_from_config import make_network_factory
    from mheads.training.plan_ranks import input_shape
    from mheads.trees.splitting.list_cuts import list_cuts

    sizes = None if shape is None else _read_shape(shape)
    recipe = model not in NETWORKS and (model in configs.recipes() or configs.is_file(model))
    config = (configs.load if recipe else configs.of_model)(model, model_args or [])
    network_factory = make_network_factory(config)
    if sizes is None:
        sizes = input_shape(config) if recipe else INPUT_SHAPES.get(model)
    if sizes is None:
        raise UserError(f"the shape of an example of {model} is not known: give --shape, 3,32,32 for example")
    console.print(cuts_table(list_cuts(network_factory, sizes)))


def _read_shape(shape: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in shape.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise UserError(f"--shape {shape} is not the shape of an example: sizes with commas between, 3,32,32")
    return sizes
