"""The embedded example: four ways to use four networks on real digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from mheads import config as configs
from mheads.data import load
from mheads.progress import Terminal
from mheads.report.figures import ownership_figure, save
from mheads.run_folder import RunFolder
from mheads.terminal.tables import comparison_table
from mheads.train import train_config

ENSEMBLES = {
    "single model": ["members=1"],
    "independent": ["members=4"],
    "TreeNet, conv1": ["members=4", "split=conv1"],
    # With so few images, members that start as generalists specialise better (chosen on a validation split).
    "MCL, k=1": ["members=4", "loss.name=mcl", "loss.k=1", "pretrain=300"],
}


def run_demo(folder: Path, console: Console) -> None:
    """Trains each ensemble (or finds it finished), then shows the table and draws who owns which class."""
    results = {}
    for title, overrides in ENSEMBLES.items():
        config = configs.load("digits", overrides)
        run = RunFolder(folder / title.replace(",", "").replace("=", "").replace(" ", "-").lower())
        console.print(
            f"[bold]{title}[/]  mheads train digits {' '.join(overrides)} -f {escape(str(run.path))}", soft_wrap=True
        )
        results[title] = train_config(config, run, Terminal(console))
    console.print(comparison_table(results))
    owners = {title: np.asarray(result["ownership"]) for title, result in results.items() if len(result["members"]) > 1}
    picture = folder / "ownership.png"
    save(ownership_figure(owners, load("digits").problem.groups), picture)
    console.print(
        "Averaged, independent members beat one of them. Under MCL each digit teaches only the member that does best "
        "on it: members become specialists, poor alone, and one of the four answers is nearly always right (Oracle).\n"
        f"Who owns which digit: {escape(str(picture))}"
    )
