"""What a row takes: parameters, operations of training and inference, counted from its config; hours from its runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mheads.common.errors import UserError
from mheads.common.table import Head, Table, text_rows
from mheads.suites import findings
from mheads.suites.jobs import SuiteJob
from mheads.suites.planner import Planner
from mheads.suites.suite import Suite
from mheads.training.plan_ranks import ConfigWorkload, make_workload

HEADS = ("hours", "parameters", "training FLOP", "FLOP per answer")
PREFIXES = ("", " k", " M", " G", " T", " P", " E")


def count_cost(job: SuiteJob) -> dict[str, float]:
    """The parameters of a run, the FLOP of an answer of all its members to one example, and those of its training.

    A multiply-add is 2 FLOP, and a layer without products counts nothing. Members that skip the backward pass of
    examples which they do not learn from (MCL) are counted so. Raises where the shape of an example is not known.
    """
    config, workload = job.config, make_workload(job.config)
    loads, steps = _count(workload), [(config.optim.iterations, workload)]
    if config.pretrain:
        steps.append((config.pretrain, replace(workload, share=1.0)))
    training = sum(count * sum(_count(step)[1:]) * workload.rows for count, step in steps)
    return {"parameters": loads[0], "inference": loads[1], "training": training * (job.rounds or 1)}


def _count(workload: ConfigWorkload) -> tuple[int, int, int]:
    """Parameters of all stages; FLOP of the forward and of the backward pass of one example."""
    if workload.in_order:  # batch statistics need all rows
        workload = replace(workload, share=1.0)
    loads = workload.count_loads(1.0).values()
    return sum(x.parameters for x in loads), round(sum(x.forward for x in loads)), round(sum(x.backward for x in loads))


def add_costs(
    document: dict[str, Any], planner: Planner, suite: Suite, known: Mapping[str, dict[str, float]] | None = None
) -> None:
    """Counts what the rows that have runs take, each once. Where that cannot be counted, since the data are not here,
    it is what is `known` of the run; nothing where it depends on the choice."""
    for entry in document["rows"]:
        if entry["run"] in document["runs"] and "cost" not in entry:
            entry["cost"] = (known or {}).get(entry["run"], {})
            names = planner.expand(suite).row(entry["name"]).best_of or [entry["name"]]
            with suppress(UserError):
                cost, *others = (count_cost(planner.job(suite, name, planner.options.seed)) for name in names)
                entry["cost"] = cost if all(other == cost for other in others) else {}


def compute_table(document: dict[str, Any]) -> Table | None:
    """A line for each row that was run; None where nothing is known."""
    rows = []
    for entry in document["rows"]:
        cost, seconds = entry.get("cost"), findings.trials(document, entry["name"], "seconds")
        if cost and seconds and not entry.get("metrics"):  # a row that shows a part of a run is not the run
            hours = f"{seconds.mean / 3600:.2f}"
            counts = [f"{cost['parameters']:,}", *(in_words(cost[key]) for key in ("training", "inference"))]
            rows.append([entry["name"], hours, *counts])
    if not rows:
        return None
    heads = [Head(text, right=text != "row", whole=text == "row") for text in ("row", *HEADS)]
    return Table("What a run takes", heads, text_rows(rows))


def in_words(count: float) -> str:
    """A large number with three digits and the letter of its size: 12.3 G."""
    size = 0
    while count >= 999.5 and size + 1 < len(PREFIXES):
        count, size = count / 1000, size + 1
    return f"{count:.3g}{PREFIXES[size]}"
