"""The embedded example: four ways to use four networks on real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from mheads.common.atomic_files import write_atomically
from mheads.common.progress import Terminal
from mheads.config import read as configs
from mheads.data import load
from mheads.report.charts.outcomes import map_ownership
from mheads.report.figures import draw
from mheads.report.figures.figure import save
from mheads.report.page.several_runs import make_comparison
from mheads.report.shown_run import ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.read_run import Record
from mheads.training.loop import train_config

ENSEMBLES = {
    "single model": ["members=1"],
    "independent": ["members=4"],
    "TreeNet, conv1": ["members=4", "split=conv1"],
    # With so few images, members that start as generalists specialise better (chosen on a validation split).
    "MCL, k=1": ["members=4", "loss.name=mcl", "loss.k=1", "pretrain=300"],
}

ABOUT = (
    "Averaged, independent members beat one of them. Under MCL each digit teaches only the member that does best on "
    "it: members become specialists, poor alone, and one of the four answers is nearly always right (Oracle). But so "
    "is one of the four best classes of the single model (top-4), which is what an Oracle of four compares with: MCL "
    "is for answers that lie far apart and have no such list, such as trajectories."
)


def train_demo(folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Trains each ensemble, or finds it finished; the results by title."""
    results = {}
    for title, overrides in ENSEMBLES.items():
        run = RunFolder(_run_path(folder, title))
        command = f"  mheads train digits {' '.join(overrides)} -f {run.path}"
        console.print(Text.assemble((title, "bold"), command), soft_wrap=True)
        results[title] = train_config(configs.load("digits", overrides), run, Terminal(console))
    return results


def write_demo(folder: Path, results: dict[str, dict[str, Any]]) -> tuple[Path, Path]:
    """Draws who owns which class, and writes a page of all runs; returns both paths."""
    owners = {title: np.asarray(result["ownership"]) for title, result in results.items() if len(result["members"]) > 1}
    picture, page = folder / "ownership.png", folder / "report.html"
    save(draw(map_ownership(owners, load("digits").problem.groups)), picture)
    runs = [ShownRun(Record.read(_run_path(folder, title), title)) for title in results]
    write_atomically(page, make_comparison(runs, "Four ways to use four networks", ABOUT).html())
    return picture, page


def _run_path(folder: Path, title: str) -> Path:
    return folder / title.replace(",", "").replace("=", "").replace(" ", "-").lower()
