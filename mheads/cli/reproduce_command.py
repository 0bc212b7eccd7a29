"""`mheads reproduce` runs a table of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mheads.cli.shared import FOLDER, OtherClasses, OtherSource, console
from mheads.common.errors import UserError

if TYPE_CHECKING:
    from mheads.suites.reproduce import SuiteRequest


def reproduce(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name (standard, mcl, ...) or the path of a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change in all rows.")
    ] = None,
    *,
    recipe: Annotated[
        str | None, typer.Option(help="What is trained: a recipe's name or a YAML file; by default the suite's own.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Runs of each row, with seeds that follow one another.")] = 1,
    seed: Annotated[int, typer.Option(help="The seed of the first trial.")] = 0,
    scale: Annotated[float, typer.Option(help="Train for this part of the iterations, with the schedule scaled.")] = 1,
    validation: Annotated[
        int | None,
        typer.Option(
            help="Hold out the last n training examples and evaluate on them: to choose, not to report. By default as "
            "many as the recipe's data.validation."
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="With --validation: show the same runs on the test set, to report a choice.")
    ] = False,
    ood: OtherClasses = None,
    shifted: OtherSource = None,
    every: Annotated[bool, typer.Option("--all", help="All suites of the package, one after another.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Train this row alone; may be given several times.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and the time that they will take; train nothing.")
    ] = False,
    only_tables: Annotated[
        bool, typer.Option("--tables", help="Train nothing: make the tables anew, without a suite all of them.")
    ] = False,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Train nothing: take over the runs in another folder of results, such as further seeds; without a "
            "suite those of all its files. May be given several times.",
        ),
    ] = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Also write the outputs of runs, as float16, to outputs/ in the results.")
    ] = False,
    folder: Annotated[Path, typer.Option(*FOLDER, help="Where the runs go.")] = Path("runs/reproduce"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Where tables and figures go.")] = Path("results"),
) -> None:
    """Run a table of the paper and set it beside ours; finished runs are reused, and the same command resumes.

    Example: mheads reproduce standard --recipe cifar10_quick --trials 3
    """
    _check_together(suite, every, bool(only), dry_run, train=not (only_tables or merge))
    options = {"seed": seed, "scale": scale, "validation": validation, "overrides": tuple(overrides or ())}
    options |= {"test": test, "ood": tuple(ood or ()), "shifted": tuple(shifted or ())}
    request = {"trials": trials, "only": tuple(only or ()), "outputs": outputs}
    if suite is None and not every:
        return _make_tables(merge or (), output, {"recipe": recipe, **options, **request})
    request |= {"folder": folder, "output": output, "sources": merge or ()}
    return _run(suite, recipe, options, request, dry_run, train=not (only_tables or merge))


def _check_together(suite: str | None, every: bool, only: bool, dry_run: bool, train: bool) -> None:
    """Raises an error for options that do not go together."""
    from mheads.suites.suite import SUITES

    if suite is None and train and not every:
        raise UserError(f"give a suite: {', '.join(SUITES)}, the path of a YAML file, or --all")
    if every and (suite is not None or only or not train):
        raise UserError("--all is all rows of all suites: give no suite, --only, --tables or --merge with it")
    if dry_run and not train:
        raise UserError("--dry-run lists what would be trained, and --tables and --merge train nothing: leave one out")


def _run(
    suite: str | None, recipe: str | None, options: dict[str, Any], request: dict[str, Any], dry_run: bool, train: bool
) -> None:
    """Runs a suite, or all that come with the package; or says what that takes."""
    from mheads.suites.dry_run import print_plan, print_plan_of_all
    from mheads.suites.merge import find_results
    from mheads.suites.reproduce import Reproduction, for_each
    from mheads.suites.reproduce import reproduce as run
    from mheads.suites.suite import SUITES

    find_results(request["sources"])
    requests = _make_requests(list(SUITES) if suite is None else [suite], recipe, options, request)
    if suite is None and dry_run:
        print_plan_of_all(requests, console)
    elif dry_run:
        for_each(requests, console, lambda one: print_plan(Reproduction(one, console), console))
    else:
        for_each(requests, console, lambda one: run(one, console, train=train))


def _make_requests(
    suites: Sequence[str], recipe: str | None, options: dict[str, Any], request: dict[str, Any]
) -> list[SuiteRequest]:
    """What is asked of suites: one request for each recipe of each, with its own validation unless one is given."""
    from mheads.suites.jobs import Options
    from mheads.suites.planner import Planner
    from mheads.suites.reproduce import SuiteRequest
    from mheads.suites.suite import read_suite

    requests = []
    for suite in map(read_suite, suites):
        for one in [recipe] if recipe else suite.own_recipes:
            held_out = options["validation"]
            if held_out is None:
                held_out = Planner(Options(one, overrides=options["overrides"])).held_out(suite)
            requests.append(SuiteRequest(suite.source, Options(one, **options | {"validation": held_out}), **request))
    return requests


def _make_tables(merge: Sequence[Path], output: Path, of_a_suite: dict[str, Any]) -> None:
    """Makes all tables anew; options of a suite are for one of them."""
    from mheads.common.number_words import count
    from mheads.common.progress import Terminal
    from mheads.suites.merge import merge_folders
    from mheads.suites.reproduce import write_tables

    usual = {"seed": 0, "scale": 1, "trials": 1}
    if given := [f"--{key}" for key, value in of_a_suite.items() if value not in (None, (), False, usual.get(key))]:
        raise UserError(f"{', '.join(given)}: without a suite, all files are taken as they are; give a suite with it")
    for path, gained in merge_folders(merge, output, Terminal(console).warn).items() if merge else ():
        console.print(f"{path}: {count(gained, 'new run')}", soft_wrap=True)
    for path in write_tables(output, console):
        console.print(f"{path} read", soft_wrap=True)
