"""Fills the tables in docs/hypotheses.md and docs/tabular.md from results/*.json: `python docs/tables_by_data_set.py`.

A row for each data set, a column for each row of the suite; means with standard errors over trials.
"""

from __future__ import annotations

import math
import re
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, wilcoxon

from mheads.common.atomic_files import write_atomically
from mheads.suites import findings, results
from mheads.suites.jobs import Options
from mheads.suites.suite import read_suite
from mheads.suites.verdicts import LEVEL, p_value

ROOT = Path(__file__).parents[1]
TEST_SHARE = 0.1  # of the examples of a UCI data set, in each split


class Page(NamedTuple):
    """The suite of a page, its rows with the heads of their columns, and for each table the metrics that it shows.

    Of several metrics the first that a row has. With `beside`, a table also counts data sets on which a row differs
    from that one.
    """

    suite: str
    rows: dict[str, str]
    tables: dict[str, tuple[str, ...]]
    test: bool = False  # results of runs without validation examples, on the test set
    beside: str | None = None


PAGES = {
    "docs/hypotheses.md": Page(
        "hypotheses",
        {
            "one_network": "one network",
            "points_of_network": "five points of it",
            "one_gaussian": "one, with variance",
            "points_of_gaussian": "five points of it",
            "gaussian_ensemble": "deep ensemble",
            "mixture_density": "mixture density",
            "independent": "independent",
            "mcl": "mcl",
            "scored": "scored",
            "relaxed": "relaxed",
            "evolving": "evolving",
            "annealed": "annealed",
        },
        {
            "distortion": ("distortion",),
            "one answer": ("ensemble_scored", "ensemble_mean"),
            "nll": ("nll",),
            "nll of cells": ("nll_voronoi",),
        },
    ),
    "docs/tabular.md": Page(
        "tabular",
        {
            "one": "one network",
            "wide": "one wide network",
            "eight": "independent",
            "tree_fc1": "split at fc1",
            "tree_fc2": "split at fc2",
            "tree_fc3": "split at fc3",
            "scaled": "scaled inputs",
        },
        {"rmse": ("ensemble_mean",), "nll": ("nll",), "member": ("single",)},
        test=True,
        beside="eight",
    ),
}


@cache
def load_documents(suite: str, test: bool) -> dict[str, results.Document]:
    """The results of a suite by recipe, as far as there are some."""
    read, documents = read_suite(suite), {}
    for recipe in read.own_recipes:
        held_out = read.recipes[recipe].validation if test else 0
        path = ROOT / "results" / results.file_name(suite, Options(recipe, validation=held_out, test=test))
        if path.is_file():
            documents[recipe] = results.load(path)
    return documents


def make(page: Page, metrics: tuple[str, ...]) -> str:
    """The Markdown of a table: of each row the first of these metrics that it has, the lowest mean in bold."""
    documents = load_documents(page.suite, page.test)
    rows = {row: head for row, head in page.rows.items() if any(_values(d, row, metrics) for d in documents.values())}
    lines = [f"| | n | {' | '.join(rows.values())} |", f"| --- | ---:{' | ---:' * len(rows)} |"]
    figures: dict[str, dict[str, dict[int, float]]] = {}  # by recipe, row and seed
    for recipe, document in documents.items():
        known = {row: values for row in page.rows if (values := _values(document, row, metrics))}
        if not known:
            continue
        seeds = sorted(set.intersection(*map(set, known.values())))  # rows are compared on the same splits
        figures[recipe] = {row: {seed: values[seed] for seed in seeds} for row, values in known.items()}
        means = {row: np.mean([*values.values()]) for row, values in figures[recipe].items()}
        best = min(means, key=means.__getitem__)
        cells = [_cell([*figures[recipe][row].values()], row == best) if row in known else "" for row in rows]
        lines.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    complete = [known for known in figures.values() if len(known) == len(page.rows)]
    if page.beside is not None and complete:
        logarithms = not metrics[0].startswith("nll")
        lines += [_rank(page, complete), _relate(page, page.beside, complete, logarithms)]
        lines.append(_count_verdicts(page, page.beside, complete))
    return "\n".join(lines)


def _values(document: results.Document, row: str, metrics: tuple[str, ...]) -> dict[int, float]:
    shown = next((entry.get("metrics", {}) for entry in document["rows"] if entry["name"] == row), {})
    if shown and not shown.keys() & {*metrics}:  # a run in another light, which this table does not show
        return {}
    return next((values for metric in metrics if (values := findings.by_seed(document, row, metric))), {})


def _cell(values: list[float], best: bool) -> str:
    figure = findings.Trials(values)
    error = "" if figure.std is None else f" ± {figure.std / math.sqrt(len(figure.values)):.2g}"
    mean = f"{figure.mean:.3g}"
    return f"**{mean}**{error}" if best else mean + error


def _rank(page: Page, figures: list[dict[str, dict[int, float]]]) -> str:
    """The mean over data sets of the rank of each row's mean, 1 for the lowest."""
    ranks = np.mean([rankdata([np.mean([*known[row].values()]) for row in page.rows]) for known in figures], 0)
    cells = [f"**{rank:.1f}**" if rank == ranks.min() else f"{rank:.1f}" for rank in ranks]
    return f"| mean rank | | {' | '.join(cells)} |"


def _relate(page: Page, beside: str, figures: list[dict[str, dict[int, float]]], logarithms: bool) -> str:
    """How far a row is from the row `beside`, over data sets: the geometric mean of ratios of means, or of what may be
    negative the median difference; with p of Wilcoxon's signed-rank test over data sets."""
    means = np.array([[np.mean([*known[row].values()]) for row in page.rows] for known in figures])
    values = np.log(means) if logarithms else means
    differences = (values.T - values[:, [*page.rows].index(beside)]).T
    cells = []
    for row, column in zip(page.rows, differences.T, strict=True):
        distance = f"{np.exp(column.mean()):.2f}" if logarithms else f"{np.median(column):+.2f}"
        cells.append("" if row == beside else f"{distance} (p = {wilcoxon(column).pvalue:.2g})")
    title = "ratio to" if logarithms else "difference from"
    return f"| {title} {page.rows[beside]} | | {' | '.join(cells)} |"


def _count_verdicts(page: Page, beside: str, figures: list[dict[str, dict[int, float]]]) -> str:
    """Data sets on which a row is lower and higher than the row `beside`, by the suites' paired test over seeds."""
    cells = []
    for row in page.rows:
        signs = [0, 0]
        for known in figures:
            seeds = known[row].keys() & known[beside].keys()
            margin = np.array([known[row][seed] - known[beside][seed] for seed in sorted(seeds)])
            if len(margin) > 1 and p_value(margin, TEST_SHARE) < LEVEL:
                signs[int(margin.mean() > 0)] += 1
        cells.append("" if row == beside else f"{signs[0]} / {signs[1]}")
    return f"| better / worse than {page.rows[beside]} | | {' | '.join(cells)} |"


def _fill(table: str, match: re.Match[str]) -> str:
    return table


def main() -> None:
    for path, page in PAGES.items():
        text = (ROOT / path).read_text()
        for name, metrics in page.tables.items():
            place = rf"(?<=<!-- {name} -->\n\n)\|.*?(?=\n\n)"
            text, count = re.subn(place, partial(_fill, make(page, metrics)), text, flags=re.DOTALL)
            assert count == 1, f"{path} has one table after <!-- {name} -->"
        write_atomically(ROOT / path, text)


if __name__ == "__main__":
    main()
