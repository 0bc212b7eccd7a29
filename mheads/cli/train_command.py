"""`mheads train`, and a training from its command to its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mheads.cli.shared import FOLDER, Overrides, Quiet, console, errors
from mheads.common.errors import UserError

if TYPE_CHECKING:
    from mheads.config.schema import Config


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name (digits, ...), the path of a YAML file, or of a Caffe net or solver (.prototxt)."
        ),
    ],
    overrides: Overrides = None,
    solver: Annotated[
        Path | None,
        typer.Option(
            help="The solver (.prototxt) of a Caffe net; it may also follow the net without --solver. A solver that "
            "names its net needs no net."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(*FOLDER, help="The run folder; by default runs/RECIPE-DIGEST.")] = None,
    force: Annotated[bool, typer.Option(help="Start afresh in a new folder beside the one that exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train; the same command again resumes, or says that the run is finished.

    Example: mheads train cifar10_quick loss.name=mcl loss.k=1 --folder runs/mcl
    """
    train_recipe(recipe, overrides or [], run, solver=solver, force=force, quiet=quiet)


def train_recipe(
    recipe: str,
    overrides: Sequence[str],
    run: Path | None,
    *,
    force: bool = False,
    quiet: bool = False,
    solver: Path | None = None,
) -> None:
    """Trains in a run folder, by default runs/RECIPE-DIGEST, on one process or on this one of several."""
    from mheads.config import read as configs
    from mheads.training.join_ranks import join_ranks

    solvers = [override for override in overrides if "=" not in override and configs.is_caffe(override)]
    if solvers and configs.is_caffe(recipe):
        if solver is not None or len(solvers) > 1:
            raise UserError(f"{', '.join([*map(str, filter(None, [solver])), *solvers])}: give one solver")
        solver, overrides = Path(solvers[0]), [override for override in overrides if override not in solvers]
    parsed: tuple[Config, list[str]] | Exception
    try:
        parsed = _load_config(recipe, overrides, solver)
    except (UserError, OSError) as error:  # raised below, where one rank reports it for all
        parsed = error
    with join_ranks(errors, None if isinstance(parsed, Exception) else parsed[0].timeout) as world:
        if isinstance(parsed, Exception):
            raise parsed
        config, notes = parsed
        # After the config, so that its mistakes are reported at once: importing torch takes a second.
        from mheads.cli.printing.result_tables import result_table
        from mheads.common.progress import Mute, Terminal
        from mheads.config.options_without_effect import check_idle_options
        from mheads.runs.folder import RunFolder
        from mheads.training.loop import train_config

        folder = RunFolder(run.expanduser() if run else Path("runs") / f"{Path(recipe).stem}-{config.digest()}")
        if force and folder.path.exists():
            folder = folder.beside()
        if not folder.exists():  # a run that was begun with such options resumes
            check_idle_options(config, overrides)
        watch = Terminal(console, bar=not quiet, folder=True) if world.is_main else Mute()
        for note in notes:
            watch.say(note)
        result = train_config(config, folder, watch, world.build_experiment, world.cores)
        if world.is_main:
            console.print(result_table(result))


def _load_config(recipe: str, overrides: Sequence[str], solver: Path | None) -> tuple[Config, list[str]]:
    """The config of a recipe or of a Caffe net, and notes on it."""
    from mheads.config import read as configs

    if configs.is_caffe(recipe):
        from mheads.caffe.convert import load

        return load(Path(recipe), solver, list(overrides))
    if solver is not None:
        raise UserError(
            f"--solver {solver} goes with a Caffe net, and {recipe} is a recipe: change keys of optim instead"
        )
    try:
        return configs.load(recipe, overrides), []
    except UserError:
        from mheads.suites.suite import SUITES

        if recipe in SUITES and recipe not in configs.recipes() and not Path(recipe).exists():
            raise UserError(f"{recipe} is a suite, which trains several runs: mheads reproduce {recipe}") from None
        raise
