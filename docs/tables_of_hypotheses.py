"""Fills the tables in docs/hypotheses.md from results/hypotheses-*.json: `python docs/tables_of_hypotheses.py`.

A row for each data set, a column for each row of the suite; means with standard errors over trials.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

from mheads.common.atomic_files import write_atomically
from mheads.suites import findings, results
from mheads.suites.jobs import Options
from mheads.suites.suite import read_suite

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/hypotheses.md"
ROWS = {
    "one_gaussian": "one network",
    "gaussian_ensemble": "deep ensemble",
    "mixture_density": "mixture density",
    "independent": "independent",
    "mcl": "mcl",
    "scored": "scored",
    "relaxed": "relaxed",
    "evolving": "evolving",
    "annealed": "annealed",
}
TABLES = {
    "distortion": ("distortion",),
    "one answer": ("ensemble_scored", "ensemble_mean"),
    "nll": ("nll",),
    "nll of cells": ("nll_voronoi",),
}


def make(metrics: tuple[str, ...]) -> str:
    """The Markdown of a table: of each row the first of these metrics that it has, the lowest mean in bold."""
    lines = [f"| | n | {' | '.join(ROWS.values())} |", f"| --- | ---:{' | ---:' * len(ROWS)} |"]
    for recipe in read_suite("hypotheses").own_recipes:
        path = ROOT / "results" / results.file_name("hypotheses", Options(recipe))
        if not path.is_file():
            continue
        document = results.load(path)
        figures = {}
        for row in ROWS:
            known = [found for metric in metrics if (found := findings.trials(document, row, metric))]
            if known:
                figures[row] = known[0]
        if not figures:
            continue
        best = min(figures, key=lambda row: figures[row].mean)
        cells = [_cell(figures[row], row == best) if row in figures else "" for row in ROWS]
        trials = max(findings.num_trials(document, row) for row in ROWS)
        lines.append(f"| {recipe} | {trials} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: findings.Trials, best: bool) -> str:
    error = "" if figure.std is None else f" ± {figure.std / math.sqrt(len(figure.values)):.2g}"
    mean = f"{figure.mean:.3g}"
    return f"**{mean}**{error}" if best else mean + error


def _fill(table: str, match: re.Match[str]) -> str:
    return table


def main() -> None:
    page = PAGE.read_text()
    for name, metrics in TABLES.items():
        place = rf"(?<=<!-- {name} -->\n\n)\|.*?(?=\n\n)"
        page, count = re.subn(place, partial(_fill, make(metrics)), page, flags=re.DOTALL)
        assert count == 1, f"the page has one table after <!-- {name} -->"
    write_atomically(PAGE, page)


if __name__ == "__main__":
    main()
