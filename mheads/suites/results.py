"""The document of a suite on a recipe: what was run, what came out, and what the paper says. Plain data, kept as JSON.

{"suite", "about", "recipe", "own_recipe", "members", "scale", "validation", "test", "test_share", "independent",
 "cost_figure", "overrides", "ood", "shifted", "command", "metrics",
 "rows": [{"name", "run", "metrics", "paper", "cost", "best_of", "by"}], "claims": [...],
 "runs": {"random_init": [{"seed", "config", "marks", "command", "result", "versions", "machine"}]}}

A row's "run" is the key of its runs: see `Planner.key`; "best_of" are those of the runs that it chooses from.
`run_entries.py` says what is kept of a run. Tables and figures are made from these files alone, so that they can be
made anew where there are no runs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mheads.common import atomic_files, safe_yaml, schemas
from mheads.common.errors import UserError
from mheads.suites.claims import Claim
from mheads.suites.compute import add_costs
from mheads.suites.expand import ExpandedSuite
from mheads.suites.jobs import Options
from mheads.suites.metric_names import check_shown, read_figure
from mheads.suites.planner import Planner, hide_local_paths
from mheads.suites.run_entries import check_same_marks, digest_job, has_local_files
from mheads.suites.suite import SUITES, RecipeChanges

Document = dict[str, Any]


def file_name(suite: str, options: Options) -> str:
    return f"{suite}-{options.short}{options.suffix}{'-test' if options.test else ''}.json"


def make_document(table: ExpandedSuite, planner: Planner) -> Document:
    """The document without runs."""
    options, suite = planner.options, table.suite
    changes = suite.recipes.get(options.short, RecipeChanges())
    jobs = {row.name: planner.job(suite, row.name, options.seed) for row in table.rows}
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        rows.append({"name": row.name, "run": planner.key(suite, jobs[row.name])})
        further: dict[str, Any] = {"metrics": row.metrics, "paper": table.paper.get(row.name)}
        if row.best_of:
            further |= {"best_of": [planner.key(suite, jobs[name]) for name in row.best_of], "by": row.by}
        rows[-1] |= {key: value for key, value in further.items() if value}
    skipped = {"recipes", "except_"}
    other_data = {"ood": options.ood, "shifted": options.shifted}
    return {
        "suite": suite.name,
        "about": suite.about,
        "recipe": options.short,
        **({"own_recipe": True} if options.has_name_of_another else {}),
        "members": max(job.config.members for job in jobs.values()),  # a row may be of one network
        "scale": options.scale,
        "validation": options.validation,
        **({"test": True} if options.test else {}),
        **({"test_share": changes.test_share} if changes.test_share else {}),
        **({"independent": suite.independent} if suite.independent else {}),
        **({"cost_figure": suite.cost_figure} if suite.cost_figure else {}),
        "overrides": [hide_local_paths(override) for override in options.overrides],
        **{name: [*map(hide_local_paths, keys)] for name, keys in other_data.items() if keys},
        "command": "",
        "metrics": suite.metrics,
        "rows": rows,
        "claims": [claim.model_dump(by_alias=True, exclude_defaults=True, exclude=skipped) for claim in table.claims],
        "runs": {},
    }


def command(suite: str, options: Options, seeds: Sequence[int], held_out: int, show: Callable[[str], str] = str) -> str:
    """The command that runs a suite with these seeds, in rising order; several where there are gaps between them.

    `held_out` is how many validation examples there are without --validation.
    """
    if gap := next((i for i in range(1, len(seeds)) if seeds[i] != seeds[i - 1] + 1), None):
        return " && ".join(command(suite, options, part, held_out, show) for part in (seeds[:gap], seeds[gap:]))
    words = ["mheads", "reproduce", suite, "--recipe", show(options.recipe)]
    words += ["--trials", str(len(seeds))] if len(seeds) > 1 else []
    words += ["--seed", str(seeds[0])] if seeds[0] else []
    words += ["--scale", f"{options.scale:g}"] if options.scale != 1 else []
    words += ["--validation", str(options.validation)] if options.validation or held_out else []
    words += ["--test"] if options.test else []
    words += [word for key in options.ood for word in ("--ood", show(key))]
    words += [word for key in options.shifted for word in ("--shifted", show(key))]
    return shlex.join([*words, *map(show, options.overrides)])


# Taking over runs.


def merge(
    document: Document,
    path: Path,
    table: ExpandedSuite,
    planner: Planner,
    seeds: Sequence[int] = (),
    sources: Sequence[Path] = (),
) -> None:
    """Takes over runs that the document lacks, from its file, those of other suites and other folders of results. None
    is lost: one in the file that is of another experiment is an error, unless another file has it. The command is of
    these runs and of `seeds`."""
    others = [other for at, other in load_all(path.parent, lambda _: None).items() if at != path]
    others += [load(at) for source in sources for at in sorted(source.glob("*.json"))]
    elsewhere = [run for other in others for runs in other["runs"].values() for run in runs]
    elsewhere = [run for run in elsewhere if run["result"].get("split", "test") == planner.options.split]
    before = load(path) if path.is_file() else None
    if before is not None:
        _merge_own(document, before, path, elsewhere, table, planner)
    _merge_others(document, elsewhere, table, planner)
    for runs in document["runs"].values():
        runs.sort(key=lambda run: run["seed"])
    known = {row["run"]: row["cost"] for row in (before or {"rows": []})["rows"] if row.get("cost")}
    add_costs(document, planner, table.suite, known)
    options, source = planner.options, table.suite.source
    shown = sorted({seed for _, seed in _seeds(document)} | set(seeds)) or [options.seed]
    source = Path(source).name if Path(source).is_absolute() else source
    document["command"] = command(source, options, shown, planner.held_out(table.suite), hide_local_paths)


def _merge_own(
    document: Document, before: Document, path: Path, elsewhere: list[Any], table: ExpandedSuite, planner: Planner
) -> None:
    if before["runs"] and [*map(hide_local_paths, before["overrides"])] != document["overrides"]:
        old, new = (" ".join(each["overrides"]) or "none" for each in (before, document))
        raise UserError(
            f"{path} holds results with other overrides ({old} there, {new} here): give another folder with -o"
        )
    rows = {entry["run"]: entry["name"] for entry in document["rows"]}
    known = _seeds(document)
    for key, runs in before["runs"].items():
        for run in runs:
            seed = run["seed"]
            ours = key in rows and digest_job(planner.job(table.suite, rows[key], seed)) == run["config"]
            if not ours and run not in elsewhere:
                raise UserError(
                    f"{path} holds a run that is not of this suite: {key} with seed {seed}, {run['command']}; "
                    "move the file, or give another folder with -o"
                )
            if ours and (key, seed) not in known:
                document["runs"].setdefault(key, []).append(run)


def _merge_others(document: Document, elsewhere: list[Any], table: ExpandedSuite, planner: Planner) -> None:
    """Rows of one name are one run in all suites, also where the run itself is gone or was never here."""
    known = _seeds(document)
    for name in table.names:
        for run in elsewhere:
            job = planner.job(table.suite, name, run["seed"])
            key, place = planner.key(table.suite, job), shlex.quote(str(planner.public_path(job)))
            same = run["command"].endswith(f" -f {place}") and run["config"] == digest_job(job)
            if same and not has_local_files(job) and (key, run["seed"]) not in known:
                check_same_marks(document, key, job, run)
                document["runs"].setdefault(key, []).append(run)
                known.add((key, run["seed"]))


def _seeds(document: Document) -> set[tuple[str, int]]:
    """The runs that a document has, each by its key and seed."""
    return {(key, run["seed"]) for key, runs in document["runs"].items() for run in runs}


# Files.


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Row(_Model):
    name: str
    run: str
    metrics: dict[str, str] = {}
    paper: dict[str, Any] = {}
    cost: dict[str, int | float] = {}  # see `compute.count_cost`
    best_of: list[str] = []
    by: str = "ensemble_mean"

    @model_validator(mode="after")
    def _check_figures(self) -> _Row:
        check_shown(self.metrics, f"rows.{self.name}.metrics")
        for metric, figure in self.paper.items():
            read_figure(metric, figure)
        return self


class _Result(_Model):
    __pydantic_extra__: dict[str, float | list[float | None] | None]
    problem: str
    split: str = "test"
    members: list[float | None]
    seconds: float


class _Run(_Model):
    seed: int = Field(ge=0)
    config: str
    command: str
    result: _Result
    validation: dict[str, float | None] = {}
    versions: dict[str, str]
    machine: str


class _Document(_Model):
    """What the rest of the program takes for granted in a document."""

    suite: str
    about: str = ""
    recipe: str
    own_recipe: bool = False
    members: int
    scale: float
    validation: int
    test: bool = False
    test_share: float = 0.0
    independent: str = ""
    cost_figure: list[str] = []
    overrides: list[str]
    ood: list[str] = []
    shifted: list[str] = []
    command: str
    metrics: list[str]
    rows: list[_Row]
    claims: list[Claim]
    runs: dict[str, list[_Run]]

    @model_validator(mode="after")
    def _check_seeds(self) -> _Document:
        for key, runs in self.runs.items():
            seeds = [run.seed for run in runs]
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise ValueError(f"runs.{key} has seed {twice[0]} more than once")
        return self


def load(path: Path) -> Document:
    try:
        document: Document = safe_yaml.unseal(atomic_files.read_text(path))
        schemas.check(_Document, document)
        return document
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a file of results ({error}): bring it back, or move it out of that folder"
        ) from error


def load_all(folder: Path, warn: Callable[[str], None]) -> dict[Path, Document]:
    """All documents in a folder, in the order of the suites. A file that is none gives a warning and is left out."""
    documents: dict[Path, Document] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            documents[path] = load(path)
        except UserError as error:
            warn(f"left out: {error}")
    order = [*SUITES]

    def key(item: tuple[Path, Document]) -> tuple[int, str, int, float]:
        document = item[1]
        place = order.index(document["suite"]) if document["suite"] in order else len(order)
        return place, document["recipe"], document.get("validation", 0), -document["scale"]

    return dict(sorted(documents.items(), key=key))


def save(document: Document, path: Path) -> None:
    atomic_files.write_atomically(path, safe_yaml.seal(document, indent=1, ensure_ascii=False))


def check_writable(path: Path) -> None:
    """Raises an error if results cannot be written there, before anything is trained for them."""
    folder = next(place for place in (path.parent.absolute(), *path.parent.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is not a folder"
        raise UserError(f"{path.parent}: {folder} {why}; give another folder with -o")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file: move it, or give another folder with -o")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Makes a folder of results; inside, no other process writes to it."""
    with atomic_files.saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with atomic_files.hold_lock(folder):
        yield
