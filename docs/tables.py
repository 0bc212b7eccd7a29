"""Fills the tables in README.md and docs/paper.md from results/*.json: `python docs/tables.py` after new results.

The README shows what has been run; docs/paper.md shows all rows, with the paper's figures beside ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mheads import config
from mheads.suites import findings, results, suite

ROOT = Path(__file__).parents[1]
RECIPE = "cifar10_quick"
METRICS = ("single", "ensemble_mean", "oracle")
ROWS = [
    ("standard", "single", "single network"),
    ("standard", "random_init", "random initialisation"),
    ("standard", "bagging", "bagging"),
    ("standard", "combined", "both"),
    ("standard", "unique_subset", "unique subsets"),
    ("tree", "tree_conv1", "TreeNet split at conv1"),
    ("averaged", "score_averaged", "score-averaged loss"),
    ("averaged", "prob_averaged", "probability-averaged loss, in log space"),
    ("averaged", "prob_averaged_direct", "probability-averaged loss, direct form"),
    ("mcl", "mcl_k1", "MCL, k=1"),
    ("mcl", "mcl_k2", "MCL, k=2"),
    ("mcl", "mcl_k3", "MCL, k=3"),
    ("pretrain", "pretrain_4000_k1", "MCL, k=1, after 4,000 iterations of pretraining"),
]


def documents() -> dict[str, dict[str, Any]]:
    """The results of each suite in full length; without runs where there are none yet."""
    found = {}
    for name in dict.fromkeys(name for name, _, _ in ROWS):
        path = ROOT / "results" / f"{name}-{RECIPE}.json"
        table = suite.read(name).on(RECIPE, config.load(RECIPE))
        rows = [{"name": row, "run": row, "paper": table.paper.get(row, {})} for row in table.names]
        found[name] = results.load(path) if path.is_file() else {"rows": rows, "runs": {}}
    return found


def tables() -> dict[Path, str]:
    """The table of each page."""
    pages = {ROOT / "README.md": (False, " | ---:"), ROOT / "docs/paper.md": (True, " | ---")}
    found = documents()
    made = {}
    for page, (whole, column) in pages.items():
        lines = [
            f"| | {' | '.join(findings.label(metric) for metric in METRICS)} |",
            f"| ---{column * len(METRICS)} |",
        ]
        for name, row, label in ROWS:
            document = found[name]
            if whole or findings.num_trials(document, row):
                lines.append(f"| {label} | {' | '.join(cell(document, row, metric) for metric in METRICS)} |")
        made[page] = "\n".join(lines)
    return made


def cell(document: dict[str, Any], row: str, metric: str) -> str:
    """Our figure, and the paper's in brackets."""
    paper = findings.theirs(document, row, metric)
    return findings.ours(document, row, metric) + (f" ({paper})" if paper else "")


def filled(page: str, table: str) -> str:
    """The page with the table in its place."""
    text, count = re.subn(r"(?<=<!-- results -->\n\n)\|.*?(?=\n\n)", lambda _: table, page, flags=re.DOTALL)
    assert count == 1, "a page has one table after <!-- results -->"
    return text


if __name__ == "__main__":
    for path, made in tables().items():
        path.write_text(filled(path.read_text(), made))
