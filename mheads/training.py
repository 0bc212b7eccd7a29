"""A training from its command to its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mheads import config as configs
from mheads.console import Console
from mheads.distributed.session import session


def train_recipe(
    recipe: str,
    overrides: Sequence[str],
    run: Path | None,
    console: Console,
    errors: Console,
    *,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Trains in a run folder, by default runs/RECIPE-DIGEST, on one process or on this one of several."""
    with session(errors, configs.timeout(recipe, overrides)) as world:
        config = configs.load(recipe, overrides)
        # After the config, whose mistakes are told at once: torch takes a second.
        from mheads.progress import Silent, Terminal
        from mheads.run_folder import RunFolder
        from mheads.terminal.tables import result_table
        from mheads.train import train_config

        folder = RunFolder(run.expanduser() if run else Path("runs") / f"{Path(recipe).stem}-{config.digest()}")
        if force and folder.path.exists():
            folder = folder.beside()
        watch = Terminal(console, bar=not quiet, folder=True) if world.lead else Silent()
        result = train_config(config, folder, watch, world.build)
        if world.lead:
            console.print(result_table(result))
