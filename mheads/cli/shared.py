"""What commands share: the two consoles, and the arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mheads.common.console import Console

console = Console()
errors = Console(stderr=True)

Recipe = Annotated[str, typer.Argument(help="A recipe's name (digits, ...) or the path of a YAML file that you trust.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change, dotted: loss.k=2.")
]
# torchrun reads the whole command and takes --run for its own --run-path: hence --folder, with the old name beside it.
FOLDER = ("--folder", "-f", "--run", "-r")
RunPath = Annotated[Path, typer.Argument(help="A run folder.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the run folder names, if its network is not built in.")
]
Quiet = Annotated[bool, typer.Option(help="No progress bar.")]
OtherClasses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Also measure how confidence tells other data apart (AUROC, FPR95): data.name=cifar100. May be given "
        "several times, once for each key.",
    ),
]
OtherSource = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Also measure accuracy on data of the same classes from another source, such as corrupted images: "
        "data.name=npz, and once more data.path=corrupted.npz.",
    ),
]
Split = Annotated[str | None, typer.Option(help="train, validation or test; by default what training evaluated on.")]
