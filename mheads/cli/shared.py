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
Split = Annotated[str | None, typer.Option(help="train, validation or test; by default what training evaluated on.")]
