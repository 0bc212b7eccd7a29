"""Fills the tables in README.md, docs/paper.md and docs/forest.md from results/*.json; draws docs/images/answers.png:
`python docs/tables.py` after new results.

The README shows a few rows; docs/paper.md shows all rows, with the paper's figures beside ours, and the rows that were
run for a fifth of the iterations.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mheads.common.atomic_files import write_atomically
from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.problems.metric_text import label
from mheads.report.charts.outcomes import chart_answers
from mheads.report.figures import Figure, draw
from mheads.report.figures.figure import save
from mheads.suites import findings, results
from mheads.suites.expand import expand
from mheads.suites.jobs import Options
from mheads.suites.suite import read_suite

ROOT = Path(__file__).parents[1]
RECIPE = "cifar10_quick"
WHOLE = Options(RECIPE)
FIFTH_OF_IT = Options(RECIPE, scale=0.2, validation=5000, test=True)  # chosen on what was held out
HALF_WIDTH = Options("cifar10_fast", validation=5000, test=True)
FULL = [
    ("standard", "single", "mean member of random initialisation"),
    ("standard", "one_network", "one network, trained alone"),
    ("standard", "random_init", "random initialisation"),
    ("standard", "bagging", "bagging"),
    ("standard", "combined", "both"),
    ("standard", "unique_subset", "unique subsets"),
    ("tree", "tree_conv1", "TreeNet split at conv1"),
    ("tree", "tree_conv2", "TreeNet split at conv2"),
    ("tree", "tree_conv3", "TreeNet split at conv3"),
    ("tree", "tree_ip1", "TreeNet split at ip1"),
    ("tree", "tree_binary", "TreeNet split in two at conv1, and in two again at conv2"),
    ("averaged", "score_averaged", "score-averaged loss"),
    ("averaged", "prob_averaged", "probability-averaged loss, in log space"),
    ("averaged", "prob_averaged_direct", "probability-averaged loss, direct form"),
    ("mcl", "mcl_k1", "MCL, k=1"),
    ("mcl", "mcl_k2", "MCL, k=2"),
    ("mcl", "mcl_k3", "MCL, k=3"),
    ("mcl", "mcl_k1_same", "MCL, k=1, from identical weights"),
    ("pretrain", "pretrain_4000_k1", "MCL, k=1, after 4,000 iterations of pretraining"),
    ("mixture", "mixture_*", "MCL with k=1 and cross-entropy, weight *"),
    ("mixture", "all_*", "larger steps alone, all losses times 1 + *"),
    ("modern", "relaxed_*_wins", "relaxed MCL, epsilon *, by wins"),
]
SHORT = [
    ("standard", "one_network", "one network"),
    ("standard", "random_init", "independent: random initialisation"),
    ("tree", "tree_conv1", "TreeNet, split after conv1"),
    ("tree", "tree_conv2", "TreeNet, split after conv2: half the arithmetic"),
    ("averaged", "score_averaged", "score-averaged loss"),
    ("mcl", "mcl_k1", "MCL, k=1"),
    ("mcl", "mcl_k2", "MCL, k=2"),
    ("pretrain", "pretrain_4000_k1", "MCL, k=1, after pretraining"),
    ("mixture", "mixture_4", "MCL, k=1, with cross-entropy (`ce_weight` 4)"),
]
# A star stands for the values of an option that have been run. `_wins` rows divide by wins, loss.normalize.
FIFTH = [
    ("modern", "random_init", "random initialisation"),
    ("modern", "mcl_k1", "MCL, k=1"),
    ("mixture", "mixture_*", "MCL with k=1 and cross-entropy, weight *"),
    ("mixture", "all_*", "larger steps alone, all losses times 1 + *"),
    ("specialists", "specialists", "labels dealt at random"),
    ("specialists", "clustered", "labels that are confused together"),
    ("classical", "classical", "classical MCL"),
    ("modern", "relaxed_*_wins", "relaxed, epsilon *, by wins"),
    ("modern", "relaxed_*", "relaxed, epsilon *"),
    ("modern", "evolving_*_wins", "evolving, until * of the iterations, by wins"),
    ("modern", "evolving_*", "evolving, until * of the iterations"),
    ("modern", "annealed_*_wins", "annealed, temperature *, by wins"),
    ("modern", "annealed_*", "annealed, temperature *"),
    ("modern", "confident_*", "confident, beta *"),
    ("modern", "scored", "scored"),
]
FOREST = [
    ("forest", "single_32", "one network"),
    ("forest", "single_32_16epochs", "one network, 16 epochs"),
    ("forest", "single_64", "one network of twice the width"),
    ("forest", "four_16", "four networks of half the width"),
    ("forest", "tree_block3_32", "tree, split after block 3"),
    ("forest", "tree_block3.conv1_32", "tree, split after conv1 of block 3"),
    ("forest", "tree_block2_32", "tree, split after block 2"),
    ("forest", "tree_block2_32_mixture", "the same, MCL mixed with cross-entropy"),
    ("forest", "tree_block2_32_summed", "the same, summed gradients"),
    ("forest", "frozen_block2_32", "the same, trunk trained before and frozen"),
    ("forest", "tree_block1_32", "tree, split after block 1"),
    ("forest", "four_32", "four networks"),
]
COSTS = ("training", "inference")  # as multiples of those of the first row
UNCERTAINTY = (
    *COSTS,
    *("single", "ensemble_mean", "nll_scaled_ensemble_mean", "dee_scaled", "accuracy_shifted_ensemble_mean"),
    *("auroc_ensemble_mean", "disagreement", "oracle"),
)
ACCURACIES = ("single", "ensemble_mean", "oracle", "top_m")


class Table(NamedTuple):
    """A table of a page, after the comment `<!-- name -->`."""

    page: Path
    name: str
    rows: list[tuple[str, str, str]]  # suite, row, label
    metrics: tuple[str, ...] = ACCURACIES
    options: Options = WHOLE
    whole: bool = True  # names rows that have not been run below
    column: str = " | ---"


TABLES = [
    Table(ROOT / "README.md", "results", SHORT, whole=False, column=" | ---:"),
    Table(ROOT / "docs/paper.md", "results", FULL),
    Table(
        ROOT / "docs/paper.md",
        "results at 0.2",
        FIFTH,
        (*ACCURACIES[:2], "ensemble_scored", "oracle", "top_m"),
        FIFTH_OF_IT,
    ),
    Table(ROOT / "docs/forest.md", "forest", FOREST, UNCERTAINTY, HALF_WIDTH, column=" | ---:"),
]


@cache
def document(name: str, options: Options) -> dict[str, Any]:
    """The results of a suite; without runs where there are none yet."""
    path = ROOT / "results" / results.file_name(name, options)
    table = expand(read_suite(name), options.recipe, configs.load(options.recipe))
    rows = [{"name": row, "run": row, "paper": table.paper.get(row, {})} for row in table.names]
    return results.load(path) if path.is_file() else {"rows": rows, "runs": {}}


def make(table: Table) -> str:
    """The Markdown of a table, without columns that no row has a figure for; rows that were not run are one line."""
    runs = {(name, each) for name, row, _ in table.rows for each in names(name, row, table.options)}
    metrics = [
        metric
        for metric in table.metrics
        if metric in COSTS or any(findings.trials(document(name, table.options), each, metric) for name, each in runs)
    ]
    lines = [f"| | n | {' | '.join(map(label, metrics))} |", f"| ---{table.column * (1 + len(metrics))} |"]
    not_run = []
    for name, row, title in table.rows:
        kept = document(name, table.options)
        run = [each for each in names(name, row, table.options) if findings.num_trials(kept, each)]
        short = title.partition(", ")[0] if "*" in row else title
        not_run += [] if run or any(f"| {short}, " in line for line in lines) else [short]
        for each in run:
            cells = " | ".join(cell(kept, each, metric, table.options) for metric in metrics)
            text = title.replace("*", value(each, row) or "")
            lines.append(f"| {text} | {findings.num_trials(kept, each)} | {cells} |")
    if not_run and table.whole:
        lines += ["", f"Not run: {'; '.join(dict.fromkeys(not_run))}."]
    return "\n".join(lines)


def names(name: str, row: str, options: Options) -> list[str]:
    """The rows of a suite that a row of ours stands for."""
    return [entry["name"] for entry in document(name, options)["rows"] if value(entry["name"], row) is not None]


def value(name: str, row: str) -> str | None:
    """What a row's star stands for in a name, and None if the name is not of this row."""
    match = re.fullmatch(re.escape(row).replace(r"\*", r"([\d.]+)"), name)
    return match and "".join(match.groups())


def cell(kept: dict[str, Any], row: str, metric: str, options: Options) -> str:
    """Our figure, and the paper's in brackets, which is of all iterations; a cost in units of the first row's."""
    if metric in COSTS:
        costs = {entry["name"]: entry.get("cost", {}) for entry in kept["rows"]}
        return f"{costs[row][metric] / costs[kept['rows'][0]['name']][metric]:.1f}" if costs[row] else ""
    paper = findings.format_paper(kept, row, metric) if options == WHOLE else ""
    return findings.format_ours(kept, row, metric) + (f" ({paper})" if paper else "")


def fill(page: str, table: Table) -> str:
    """The page with the table in its place."""
    place = rf"(?<=<!-- {re.escape(table.name)} -->\n\n)\|.*?(?=\n\n)(?:\n\nNot run: [^\n]*)?"
    text, count = re.subn(place, lambda _: make(table), page, flags=re.DOTALL)
    assert count == 1, f"a page has one table after <!-- {table.name} -->"
    return text


def answers() -> Figure:
    """What each way gives as one answer, and as the best of four."""
    points = {}
    for name, row, _ in FULL:
        if row in ("prob_averaged_direct", "one_network"):  # which lie on prob_averaged and single
            continue
        kept = document(name, WHOLE)
        for each in names(name, row, WHOLE):
            if findings.num_trials(kept, each):
                mean, oracle = (findings.trials(kept, each, metric).mean for metric in ("ensemble_mean", "oracle"))
                points[each] = mean, oracle
    standard = document("standard", WHOLE)
    best = findings.trials(standard, "one_network", "top_m")
    level = best and (f"top-{standard['members']} of one network", best.mean)
    return draw([chart_answers(points, level=level)])


def main() -> None:
    """All is made before anything is written: a damaged file of results changes no page."""
    try:
        pages: dict[Path, str] = {}
        for table in TABLES:
            pages[table.page] = fill(pages.get(table.page) or table.page.read_text(), table)
        picture = answers()
        for page, text in pages.items():
            write_atomically(page, text)
        save(picture, ROOT / "docs/images/answers.png")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
