"""`mheads cuts` lists where a network can be split."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import console
from mheads.common.errors import UserError


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
    from mheads.config.read import of_model
    from mheads.training.build_from_config import make_network_factory
    from mheads.trees.splitting.list_cuts import list_cuts

    sizes = _read_shape(model, shape)
    network_factory = make_network_factory(of_model(model, model_args or []))
    if sizes is None:
        raise UserError(f"the shape of an example of {model} is not known: give --shape, 3,32,32 for example")
    console.print(cuts_table(list_cuts(network_factory, sizes)))


def _read_shape(model: str, shape: str | None) -> tuple[int, ...] | None:
    from mheads.networks import INPUT_SHAPES

    try:
        sizes = INPUT_SHAPES.get(model) if shape is None else tuple(int(size) for size in shape.split(","))
    except ValueError:
        sizes = (0,)
    if sizes is not None and min(sizes) < 1:
        raise UserError(f"--shape {shape} is not the shape of an example: sizes with commas between, 3,32,32")
    return sizes
