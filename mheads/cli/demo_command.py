"""`mheads demo`, the embedded example: four ways to use four networks on real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.cli.shared import FOLDER, console
from mheads.common.console import Console

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
    "is for answers that have no such list, such as numbers, masks or boxes."
)


def demo(
    run: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/demo"),
) -> None:
    """Compare four ways to use four networks on real digits: a table and a picture in about a minute, no download.

    Example: mheads demo
    """
    run_demo(run, console)


def run_demo(folder: Path, console: Console) -> None:
    """Trains each ensemble (or finds it finished), then shows the table, draws who owns which class, and writes a page
    of it all."""
    import numpy as np
    from rich.text import Text

    from mheads.cli.printing.result_tables import comparison_table
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
    from mheads.runs.record import Record
    from mheads.training.loop import train_config

    results, records = {}, []
    for title, overrides in ENSEMBLES.items():
        config = configs.load("digits", overrides)
        run = RunFolder(folder / title.replace(",", "").replace("=", "").replace(" ", "-").lower())
        console.print(
            Text.assemble((title, "bold"), f"  mheads train digits {' '.join(overrides)} -f {run.path}"), soft_wrap=True
        )
        results[title] = train_config(config, run, Terminal(console))
        records.append(Record.read(run.path, title))
    console.print(comparison_table(results))
    owners = {title: np.asarray(result["ownership"]) for title, result in results.items() if len(result["members"]) > 1}
    picture = folder / "ownership.png"
    save(draw(map_ownership(owners, load("digits").problem.groups)), picture)
    console.print(ABOUT)
    page = folder / "report.html"
    runs = [ShownRun(record) for record in records]
    write_atomically(page, make_comparison(runs, "Four ways to use four networks", ABOUT).html())
    console.print(f"Who owns which digit: {picture}", soft_wrap=True)
    console.print(f"All of it, to open in a browser: {page}", soft_wrap=True)
