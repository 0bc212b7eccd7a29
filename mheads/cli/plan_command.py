"""`mheads plan` predicts the training speed on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import Overrides, Recipe, console


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks there would be.")],
    bandwidth: Annotated[float, typer.Option(help="Bandwidth of each rank, in GB/s in each direction.")] = 1.25,
    latency: Annotated[float, typer.Option(help="Latency of a message, in microseconds.")] = 50,
    workers: Annotated[int, typer.Option(min=1, help="Worker threads per rank.")] = 1,
    flops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a rank sustains; by default measured on this machine.")
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="default or auto; without it, both the recipe's and auto.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Predict the training speed on ranks: time per step, idle cores, waiting for messages, who holds what.

    Example: mheads plan cifar10_quick split=conv2 --ranks 16 --bandwidth 10 --flops 2
    """
    from mheads.config import read as configs

    config = configs.load(recipe, overrides or [])
    from mheads.cli.printing.plan import show
    from mheads.distributed.planning.workload import Cluster
    from mheads.training.plan_ranks import make_plan

    cluster = Cluster(ranks, workers, bandwidth * 1e9, latency / 1e6)
    prediction = make_plan(config, cluster, None if flops is None else flops * 1e12, placement, recipe)
    console.print(show(prediction))
    if json_file is not None:
        prediction.write(json_file)
