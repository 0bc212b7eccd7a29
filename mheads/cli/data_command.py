"""`mheads data` fetches datasets and lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from mheads.cli.shared import console

data = typer.Typer(help="Fetch, verify and list datasets.", no_args_is_help=True)


@data.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A dataset that is fetched, such as cifar10.")],
    force: Annotated[bool, typer.Option(help="Fetch again even if it is there.")] = False,
) -> None:
    """Fetch a dataset, verify it, and keep it in the cache.

    Example: mheads data get cifar10
    """
    from mheads import data as datasets
    from mheads.common.progress import fetching

    with fetching(console, name) as progress:
        path = datasets.get(name, progress=progress, force=force)
    console.print(f"{name} is in {path}", soft_wrap=True)


@data.command("list")
def list_datasets() -> None:
    """List the datasets, and say which are here."""
    from mheads.cli.printing.result_tables import dataset_table
    from mheads.data.catalog import DATASETS

    console.print(dataset_table())
    for entry in DATASETS.values():
        if entry.available and entry.cached_at is not None:
            console.print(f"{entry.name} is in {entry.cached_at}", soft_wrap=True)  # a path is not broken into lines
