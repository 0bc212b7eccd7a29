"""The metrics that columns and claims of a suite may name, and the paper's figures for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from mheads.common import safe_yaml
from mheads.common.errors import UserError, did_you_mean
from mheads.problems import PROBLEMS
from mheads.problems.base import ANSWERS

# What `run_entries.measure` adds to the numbers of a result; of `learning` and `top_k` the rest is lists.
ADDED = (
    *("members", "top_m", "top_m_single", "train_loss", "member_train_loss", "evenness"),
    *("iterations", "parameters", "seconds", "peak_memory", "learning_entropy", "dee", "dee_scaled"),
    "distortion_of_points",
)
MEMBER = re.compile(r"^member_(\d+)$")  # the metric of one member by its number


@cache
def metric_names() -> tuple[str, ...]:
    """Numbers of results of all kinds, those in a group with an underscore (`nll_single`), and what suites add."""
    names = [*ADDED]
    for kind in dict.fromkeys(problem.result_type for problem in PROBLEMS.values()):
        hints = get_type_hints(kind)
        for field in fields(kind):
            group = "dict" in str(hints[field.name])
            if group and field.name not in ("further", "classes", "top_k"):  # whose parts are groups again, or lists
                names += [f"{field.name}_{part}" for part in ("single", *ANSWERS, "oracle")]
            elif not group and "list" not in str(hints[field.name]):
                names.append(field.name)
    return tuple(dict.fromkeys(names))


def check_metric(metric: str, where: str) -> None:
    known = metric_names()
    if metric not in known and not MEMBER.match(metric):
        hint = did_you_mean(metric, known)
        raise UserError(f"{where} names {metric!r}{hint}, and no result has it; there are {', '.join(known)}")


def check_shown(metrics: Mapping[str, str], where: str) -> None:
    """Raises an error for members in the place of a number, or a number in theirs."""
    for column, metric in metrics.items():
        if column != metric and "members" in (column, metric):
            raise ValueError(
                f"{where}: {column}: {metric}: the metric members is a list of numbers, so its column is called "
                "members too; give other columns a metric that is one number"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_figure(metric: str, figure: Any, where: str = "the paper's figure") -> dict[str, Any]:
    """A figure of the paper as {"mean", "std", "min", "max"}, or {"members": [...]} for one of each member."""
    match figure:
        case list() if metric == "members" and all(map(is_number, figure)):
            return {"members": figure}
        case [mean, std] if is_number(mean) and (std is None or is_number(std)):
            return {"mean": mean, "std": std}
        case dict() if figure.keys() == {"mean", "min", "max"} and all(map(is_number, figure.values())):
            return dict(figure)
        case _ if is_number(figure):
            return {"mean": figure}
    raise ValueError(
        f"{where} = {safe_yaml.short(figure)}: give a number, [mean, standard deviation] or {{mean: , min: , max: }}"
    )
