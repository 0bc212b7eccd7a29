"""What a table says: means over trials, and the paper's figures beside those that can be compared with them.

All of it follows from the document of a suite (see `results.py`), so tables need no runs.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from mheads import problems
from mheads.config import read as configs
from mheads.config import schema
from mheads.problems.baselines import near_chance
from mheads.problems.metric_text import HIGHER, LOWER, begins_with, format_metric, label
from mheads.problems.metrics import LEAST_K
from mheads.problems.uncertainty import deep_ensemble_equivalent
from mheads.suites.metric_names import MEMBER, read_figure

Document = dict[str, Any]
NOT_RUN = "not run"


class Trials(NamedTuple):
    """The values of a metric, one for each trial."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def trials(document: Document, row: str, metric: str) -> Trials | None:
    """What the runs of a row give for a metric; None if none of them has it."""
    values = by_seed(document, row, metric)
    return Trials(list(values.values())) if values else None


def by_seed(document: Document, row: str, metric: str) -> dict[int, float]:
    """A number for each trial that has one, by the seed that the trial shares with those of other rows."""
    return {seed: v for seed, v in _values(document, row, metric).items() if isinstance(v, int | float)}


def rows_run(document: Document) -> list[str]:
    return [entry["name"] for entry in document["rows"] if num_trials(document, entry["name"])]


def has_value(document: Document, row: str, metric: str) -> bool:
    return bool(_values(document, row, metric))


def not_run(document: Document) -> str:
    """The rows that no run is known of, in a sentence; empty if there are none."""
    names = [entry["name"] for entry in document["rows"] if not num_trials(document, entry["name"])]
    return f"Not run: {', '.join(names)}." if names else ""


def describe_chance(document: Document) -> str:
    """Rows whose Oracle is hardly above that of members which always give one class each, in a sentence, or nothing."""
    levels: dict[str, list[str]] = {}
    for row in rows_run(document):
        near = [run["result"]["oracle_chance"] for run in _runs(document, row) if near_chance(run["result"])]
        if near and "oracle" not in _entry(document, row).get("metrics", {}):  # of which the row shows another number
            levels.setdefault(format_metric(max(near), "oracle"), []).append(row)
    if not levels:
        return ""
    names = ", ".join(row for rows in levels.values() for row in rows)
    parts = [f"{level} ({', '.join(rows)})" for level, rows in levels.items()] if len(levels) > 1 else [*levels]
    return f"Near chance: {names}; members that always give one class each have an Oracle of {', '.join(parts)}."


def describe_machines(document: Document) -> str:
    """Which rows were run on which kind of CPU, in a sentence, where there are several kinds."""
    kinds: dict[str, list[str]] = {}
    for row in rows_run(document):
        for run in _runs(document, row):
            kinds.setdefault(run.get("machine", ""), []).append(row)
    if len(kinds) < 2:
        return ""
    parts = [f"{', '.join(dict.fromkeys(rows))} on {kind}" for kind, rows in sorted(kinds.items())]
    return f"On {len(kinds)} kinds of CPU, whose bits differ: {'; '.join(parts)}."


def num_trials(document: Document, row: str) -> int:
    return len(_runs(document, row))


def _entry(document: Document, row: str) -> dict[str, Any]:
    return next((entry for entry in document["rows"] if entry["name"] == row), {})


def _runs(document: Document, row: str) -> list[dict[str, Any]]:
    entry = _entry(document, row)
    if entry.get("best_of"):
        return _choose(document, entry)
    return sorted(document["runs"].get(entry.get("run"), ()), key=lambda run: run["seed"])


def _choose(document: Document, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each seed that all rows of `best_of` have, the run with the best figure on the validation examples.

    Nothing is chosen where none of them has that figure. Where results are those of the test set, a run of which that
    figure was not kept cannot be chosen.
    """
    by, test, candidates = entry["by"], document.get("test"), dict[int, list[dict[str, Any]]]()
    for key in entry["best_of"]:
        for run in document["runs"].get(key, ()):
            if not test or by in run.get("validation", {}):
                candidates.setdefault(run["seed"], []).append(run)
    sign = 1 if higher_is_better(document, by) else -1

    def validated(run: dict[str, Any]) -> float:
        figure = run["validation"][by] if test else read_value(run["result"], by, document["members"])
        return -math.inf if figure is None else sign * figure  # one that diverged has no figure

    complete = (runs for _, runs in sorted(candidates.items()) if len(runs) == len(entry["best_of"]))
    return [max(runs, key=validated) for runs in complete if any(validated(run) > -math.inf for run in runs)]


def _values(document: Document, row: str, metric: str) -> dict[int, Any]:
    source = _source(document, row, metric)
    num_members = document.get("members", 0)
    if source.startswith("dee"):
        return _equivalents(document, row, source.removeprefix("dee"))
    values = {run["seed"]: read_value(run["result"], source, num_members) for run in _runs(document, row)}
    return {seed: value for seed, value in values.items() if value is not None}


def _source(document: Document, row: str, metric: str) -> str:
    """The metric of a run that a row shows in the column of another."""
    source: str = _entry(document, row).get("metrics", {}).get(metric, metric)
    return source


def _equivalents(document: Document, row: str, scaled: str) -> dict[int, float]:
    """How many members of the row of independent ones, of the same seed, a row is worth: by `deep_ensemble_equivalent`.

    What is worth more than all of them counts as all of them.
    """
    likelihoods = _beside_independent(document, row, scaled)
    return {seed: min(deep_ensemble_equivalent(*pair), len(pair[1])) for seed, pair in likelihoods.items()}


def _beside_independent(document: Document, row: str, scaled: str) -> dict[int, tuple[float, list[float]]]:
    """The negative log-likelihood of a row, and those of 1, 2, .. independent members, by seed."""
    who = _source(document, row, "ensemble_mean")
    independent = {run["seed"]: run["result"] for run in _runs(document, document.get("independent", ""))}
    found = {}
    for run in _runs(document, row):
        nll = run["result"].get(f"nll{scaled}_{who}")
        known = independent.get(run["seed"], {}).get(f"nll_by_members{scaled}")
        if nll is not None and known and None not in known:
            found[run["seed"]] = nll, known
    return found


def _bound(document: Document, row: str, metric: str) -> str:
    """What stands for equivalents that are not between one and all independent members in any seed, or nothing."""
    source = _source(document, row, metric)
    if not source.startswith("dee"):
        return ""
    likelihoods = _beside_independent(document, row, source.removeprefix("dee")).values()
    if all(nll > known[0] for nll, known in likelihoods):
        return "< 1"
    most = {len(known) for _, known in likelihoods}
    above = len(most) == 1 and all(nll < min(known) for nll, known in likelihoods)
    return f"> {most.pop()}" if above else ""


def read_value(result: dict[str, Any], metric: str, num_members: int) -> Any:
    """The value of a metric in what a document keeps of a run; None if it has none."""
    values, index = result.get("members", ()), -1
    if metric == "distortion_of_points":  # of as many as the table has hypotheses
        values, index = result.get("distortion_by_points", ()), num_members - 1
    elif metric.startswith("top_m"):  # as many guesses of one answer as the Oracle of the table has
        values, index = result.get(metric.replace("top_m", "top_k"), ()), num_members - 1
        if len(values) == num_members and (num_members < LEAST_K or values[index] == 100):
            return None  # these are all classes: a list of LEAST_K or more may have them, a shorter one does
    elif match := MEMBER.match(metric):
        index = int(match[1])
    else:
        return result.get(metric)
    return values[index] if 0 <= index < len(values) else None


def why_missing(document: Document, row: str, metric: str) -> str:
    """Why a row has no number for a metric."""
    if not _entry(document, row):
        return "is no row here"
    return f"has no {label(metric)}" if num_trials(document, row) else NOT_RUN


# The paper's figures.


def paper(document: Document, row: str, metric: str) -> dict[str, Any] | None:
    """The paper's figure, see `read_figure`; None where these runs cannot be compared with it."""
    return None if _differences(document) else _figure(document, row, metric)


def has_paper(document: Document, metric: str) -> bool:
    return any(paper(document, entry["name"], metric) for entry in document["rows"])


def why_no_paper(document: Document) -> str:
    """Why the paper's figures are not set beside these, in a sentence; empty where they are, or where it has none."""
    differences = _differences(document)
    if not any(entry.get("paper") for entry in document["rows"]) or not differences:
        return ""
    return f"The paper's figures are not shown beside these, since its runs are others: here {', '.join(differences)}."


def _figure(document: Document, row: str, metric: str) -> dict[str, Any] | None:
    figure = _entry(document, row).get("paper", {}).get(metric)
    return None if figure is None else read_figure(metric, figure)


def _differences(document: Document) -> list[str]:
    """What makes these runs other ones than the paper's: a part of the training or of its examples, other settings."""
    differences = []
    if document.get("own_recipe"):
        differences.append(f"{document['recipe']} is a file of this name, not the recipe of the package")
    if document["scale"] != 1:
        differences.append(f"training takes {document['scale']:g} of the iterations")
    if document["validation"]:
        differences.append(f"{document['validation']:,} training examples are held out")
        if not document.get("test"):
            differences.append("they are what is measured on")
    if overrides := [text for text in document["overrides"] if any(map(_is_other_run, configs.keys_of(text)))]:
        differences.append(f"{', '.join(overrides)} {'is' if len(overrides) == 1 else 'are'} set")
    return differences


def _is_other_run(key: str) -> bool:
    """Whether another value of this key makes another run, and not the same one elsewhere."""
    elsewhere = key.startswith("data.") and key in schema.PATHS
    return not elsewhere and schema.decides_result(key, schema.Config())


# Which way is better.


def higher_is_better(document: Document, metric: str) -> bool:
    """Whether more of a metric is better; of accuracies and errors, which have the same names, the runs tell."""
    for names, higher in ((LOWER, False), (HIGHER, True)):
        if any(begins_with(metric, name) for name in names):
            return higher
    return in_percent(document)


def in_percent(document: Document) -> bool:
    """Whether what is learned is measured in percent; otherwise in units of the targets, by errors."""
    return all(is_in_percent(run["result"]) for runs in document["runs"].values() for run in runs)


def is_in_percent(result: dict[str, Any]) -> bool:
    """The same for what one run has learned."""
    kind = result.get("problem")
    return kind not in problems.PROBLEMS or problems.PROBLEMS[kind].unit == "%"


# Figures as text.


def format_ours(document: Document, row: str, metric: str) -> str:
    percent = in_percent(document)
    if metric == "members":  # of the first trial: means would blur them, since member 0 is another one in each
        members = next(iter(_values(document, row, "members").values()), None)
        form = ".1f" if percent else ".4g"
        return NOT_RUN if members is None else " ".join("-" if v is None else f"{v:{form}}" for v in members)
    values = trials(document, row, metric)
    if values is None:
        return "" if num_trials(document, row) else NOT_RUN
    seeds = f" (n = {len(values.values)})" if len(values.values) < num_trials(document, row) else ""
    if bound := _bound(document, row, metric):
        return bound + seeds
    figure: dict[str, float | None] = {"mean": values.mean, "std": values.std}
    if len(values.values) > 1 and "min" in (_figure(document, row, metric) or {}):
        figure |= {"min": min(values.values), "max": max(values.values)}
    return _format(figure, metric, percent) + seeds


def format_paper(document: Document, row: str, metric: str) -> str:
    figure = paper(document, row, metric) or {}
    if "members" in figure:
        return " ".join(f"{value:.1f}" for value in figure["members"])
    return _format(figure, metric, in_percent(document)) if figure else ""


def _format(figure: dict[str, float | None], metric: str, percent: bool) -> str:
    """A mean with what else there is: `80.72 ± 0.10 (80.60 to 80.80)`."""
    texts = {key: format_metric(value, metric, percent) for key, value in figure.items() if value is not None}
    text = texts["mean"] + (f" ± {texts['std']}" if "std" in texts else "")
    return text + (f" ({texts['min']} to {texts['max']})" if "min" in texts else "")


def format_difference(document: Document, row: str, metric: str) -> str:
    """How far ours is above the paper's."""
    values, figure = trials(document, row, metric), paper(document, row, metric)
    if values is None or figure is None or "mean" not in figure:
        return ""
    above = values.mean - figure["mean"]
    return f"{'-' if above < 0 else '+'}{format_metric(abs(above), metric, in_percent(document))}"
