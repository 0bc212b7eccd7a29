"""The rows of suites that a config is: what the paper says of a run."""

from __future__ import annotations

from typing import Any

from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.suites.jobs import Options, find_difference
from mheads.suites.metric_names import read_figure
from mheads.suites.planner import Planner
from mheads.suites.suite import SUITES, read_suite


def paper_figures(config: Config) -> tuple[str, dict[str, dict[str, Any]]] | None:
    """The first row with figures of the paper that trains exactly this: its name, and the figure of each metric."""
    for name in SUITES:
        suite = read_suite(name)
        for recipe, rows in suite.paper.items():
            if recipe not in configs.recipes() or configs.load(recipe).model != config.model:
                continue
            planner = Planner(Options(recipe, config.seed))
            for row in planner.expand(suite).rows:
                if row.name not in rows or row.metrics:  # a row that shows a part of a run is not the run
                    continue
                try:
                    job = planner.job(suite, row.name, config.seed)
                except UserError:  # it needs what is not here
                    continue
                if job.rounds is None and find_difference(job.config, config) is None:
                    figures = {metric: read_figure(metric, figure) for metric, figure in rows[row.name].items()}
                    return f"{row.name} of {name}, {recipe}", figures
    return None
