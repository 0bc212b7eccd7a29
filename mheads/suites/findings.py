"""What a table says: means over trials, the paper's figures beside them, and whether what it claims holds here.

All of it follows from the document of a suite (see `results.py`), so tables need no runs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from mheads import problems
from mheads.suites.suite import MEMBER, Term, read_figure

LABELS = {
    "members": "members",
    "single": "mean member",
    "ensemble_mean": "Ensemble-Mean",
    "ensemble_mean_scores": "mean of scores",
    "ensemble_scored": "Ensemble-Scored",
    "oracle": "Oracle",
    "top_m": "top-M",
    "on_proposals": "boxes as proposed",
    "train_loss": "training loss",
    "member_train_loss": "training loss of a member",
}
NOT_RUN = "not run"
SAID = {relation: f"{relation} than" for relation in ("better", "worse", "no better", "no worse")}
MOST_OPEN = 5  # claims that have a line each
# What is better whatever the problem; the others follow it.
LOWER = (
    *("train_loss", "member_train_loss", "nll", "calibration_error", "mae"),
    *("seconds", "peak_memory", "parameters", "iterations"),
)
HIGHER = ("evenness", "learning_entropy", "r2", "disagreement", "spread_correlation")


class Trials(NamedTuple):
    """The values of a metric, one for each trial."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def label(metric: str) -> str:
    return LABELS.get(metric, metric.replace("_", " "))


def trials(document: dict[str, Any], row: str, metric: str) -> Trials | None:
    """What the runs of a row give for a metric; None if none of them has it."""
    found = [value for value in _values(document, row, metric) if isinstance(value, int | float)]
    return Trials(found) if found else None


def members(document: dict[str, Any], row: str) -> list[float] | None:
    """The members of the first trial, which means would blur: member 0 is another one in each."""
    found = _values(document, row, "members")
    return found[0] if found else None


def num_trials(document: dict[str, Any], row: str) -> int:
    return len(_runs(document, row))


def _entry(document: dict[str, Any], row: str) -> dict[str, Any]:
    return next((entry for entry in document["rows"] if entry["name"] == row), {})


def _runs(document: dict[str, Any], row: str) -> list[dict[str, Any]]:
    return sorted(document["runs"].get(_entry(document, row).get("run"), ()), key=lambda run: run["seed"])


def _values(document: dict[str, Any], row: str, metric: str) -> list[Any]:
    source = _entry(document, row).get("metrics", {}).get(metric, metric)
    found = (_value(run["result"], source, document.get("members", 0)) for run in _runs(document, row))
    return [value for value in found if value is not None]


def _value(result: dict[str, Any], metric: str, num_members: int) -> Any:
    if metric.startswith("top_m"):  # as many guesses of one answer as the Oracle of the table has
        known = result.get(metric.replace("top_m", "top_k"), [])
        return known[num_members - 1] if 1 <= num_members <= len(known) else None
    if (of_member := MEMBER.match(metric)) is None:
        return result.get(metric)
    return dict(enumerate(result.get("members", ()))).get(int(of_member[1]))


def paper(document: dict[str, Any], row: str, metric: str) -> dict[str, Any] | None:
    """The paper's figure, see `read_figure`."""
    figure = _entry(document, row).get("paper", {}).get(metric)
    return None if figure is None else read_figure(metric, figure)


def has_paper(document: dict[str, Any], metric: str) -> bool:
    return any(metric in entry.get("paper", {}) for entry in document["rows"])


# Claims.


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in our runs; `holds` is None where they are missing, and `whole` tells if all are there."""

    claim: str
    holds: bool | None
    figures: str
    whole: bool = True

    @property
    def word(self) -> str:
        if self.holds is None:
            return "open"
        return "does not hold" if not self.holds else "holds" if self.whole else "holds so far"


def verdicts(document: dict[str, Any]) -> list[Verdict]:
    """What is found of each claim; many that nothing is known of are one."""
    found = [_verdict(document, claim) for claim in document["claims"]]
    unknown = [verdict for verdict in found if verdict.holds is None]
    if len(unknown) <= MOST_OPEN:
        return found
    missing = dict.fromkeys(part for verdict in unknown for part in verdict.figures.split(", "))
    together = Verdict(f"{len(unknown)} claims of which nothing is known yet", None, ", ".join(missing))
    return [*(verdict for verdict in found if verdict.holds is not None), together]


def _verdict(document: dict[str, Any], claim: dict[str, Any]) -> Verdict:
    return _relation(document, claim) if claim.get("order") is None else _order(document, claim)


def _order(document: dict[str, Any], claim: dict[str, Any]) -> Verdict:
    """From best to worst; rows that have not been run are left out of it, and named."""
    rows, metric = claim["order"], claim["by"]
    higher = higher_is_better(document, metric)
    said = claim.get("say") or f"{label(metric)}: {(' > ' if higher else ' < ').join(rows)}"
    found = {row: values.mean for row in rows if (values := trials(document, row, metric))}
    missing = [row for row in rows if row not in found]
    means = list(found.values())
    holds = all(a > b if higher else a < b for a, b in pairwise(means)) if len(means) > 1 else None
    percent = in_percent(document)
    figures = [f"{row} {number(mean, metric, percent)}" for row, mean in found.items()]
    figures += [f"{row} {_why_not(document, row, metric)}" for row in missing]
    return Verdict(said, holds, ", ".join(figures), not missing)


def _relation(document: dict[str, Any], claim: dict[str, Any]) -> Verdict:
    relation = claim["is"]
    terms = [Term.of(claim[side]) for side in ("left", "right")]
    said = claim.get("say") or f"{claim['left']} is {SAID.get(relation, relation)} {claim['right']}"
    parts = {part: trials(document, *part) for term in terms for part in term.parts}
    if missing := [f"{part[0]} {_why_not(document, *part)}" for part, found in parts.items() if found is None]:
        return Verdict(said, None, ", ".join(dict.fromkeys(missing)))
    means = {part: found.mean for part, found in parts.items() if found is not None}
    left, right = (term.value([means[part] for part in term.parts]) for term in terms)
    sign = 1 if higher_is_better(document, terms[0].metric) else -1
    holds = {
        "better": sign * left > sign * right,
        "no worse": sign * left >= sign * right,
        "worse": sign * left < sign * right,
        "no better": sign * left <= sign * right,
        "above": left > right,
        "below": left < right,
        "about": abs(left - right) <= claim.get("within", 0.25) * abs(right),
    }[relation]
    percent = in_percent(document)
    sides = zip(("left", "right"), (left, right), terms, strict=True)
    beside = [f"{claim[side]} {number(value, term.metric, percent)}" for side, value, term in sides if term.row]
    return Verdict(said, holds, ", ".join(beside))


def _why_not(document: dict[str, Any], row: str, metric: str) -> str:
    if not _entry(document, row):
        return "is no row here"
    return f"has no {label(metric)}" if num_trials(document, row) else NOT_RUN


def higher_is_better(document: dict[str, Any], metric: str) -> bool:
    """Whether more of a metric is better; of accuracies and errors, which have the same names, the runs tell."""
    for names, higher in ((LOWER, False), (HIGHER, True)):
        if any(metric == name or metric.startswith(f"{name}_") for name in names):
            return higher
    return in_percent(document)


def in_percent(document: dict[str, Any]) -> bool:
    """Whether what is learned is measured in percent; otherwise in units of the targets, by errors."""
    kinds = {run["result"].get("problem") for runs in document["runs"].values() for run in runs}
    return all(problems.PROBLEMS[kind].unit == "%" for kind in kinds if kind in problems.PROBLEMS)


# Figures as text.


def number(value: float, metric: str, percent: bool = True) -> str:
    if "loss" in metric or "nll" in metric or metric == "evenness":
        return f"{value:.3f}"
    return f"{value:.2f}" if percent or abs(value) >= 1000 else f"{value:.4g}"


def ours(document: dict[str, Any], row: str, metric: str) -> str:
    percent = in_percent(document)
    if metric == "members":
        found = members(document, row)
        form = ".1f" if percent else ".4g"
        return NOT_RUN if found is None else " ".join("-" if value is None else f"{value:{form}}" for value in found)
    values = trials(document, row, metric)
    if values is None:
        return "" if num_trials(document, row) else NOT_RUN
    text = number(values.mean, metric, percent)
    if values.std is not None:
        text += f" ± {number(values.std, metric, percent)}"
    if len(values.values) > 1 and "min" in (paper(document, row, metric) or {}):
        lowest, highest = (number(end(values.values), metric, percent) for end in (min, max))
        text += f" ({lowest} to {highest})"
    return text


def theirs(document: dict[str, Any], row: str, metric: str) -> str:
    figure = paper(document, row, metric)
    if figure is None:
        return ""
    if "members" in figure:
        return " ".join(f"{value:.1f}" for value in figure["members"])
    percent = in_percent(document)
    said = {key: number(value, metric, percent) for key, value in figure.items() if value is not None}
    text = said["mean"] + (f" ± {said['std']}" if "std" in said else "")
    return text + (f" ({said['min']} to {said['max']})" if "min" in said else "")


def apart(document: dict[str, Any], row: str, metric: str) -> str:
    """How far ours is above the paper's."""
    values, figure = trials(document, row, metric), paper(document, row, metric)
    if values is None or figure is None or "mean" not in figure:
        return ""
    above = values.mean - figure["mean"]
    return f"{'-' if above < 0 else '+'}{number(abs(above), metric, in_percent(document))}"
