"""The document of a suite on a recipe: what was run, what came out, and what the paper says. Plain data, kept as JSON.

{"suite", "about", "recipe", "members", "scale", "validation", "test", "overrides", "command", "metrics",
 "rows": [{"name", "run", "metrics", "paper"}], "claims": [...],
 "runs": {"random_init": [{"seed", "config", "marks", "command", "result", "versions", "machine"}]}}

A row's "run" is the key of its runs: see `Planner.key`. With "test", runs that were trained without the validation
examples are measured on the test set; "weights" and "data" are digests of what was measured, and on what. "marks"
are those of the data and the code that a run was trained with.

Tables and figures are made from these files alone, so that they can be made anew where there are no runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mheads.api.evaluate import evaluate_run
from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import schema
from mheads.runs.folder import RunFolder
from mheads.suites.jobs import Job, Options, Planner, public
from mheads.suites.suite import SUITES, Relation, Suite, Table, Term, check_shown, read_figure

Document = dict[str, Any]


def file_name(suite: str, options: Options) -> str:
    return f"{suite}-{options.short}{options.suffix}{'-test' if options.test else ''}.json"


def make(table: Table, planner: Planner, trials: int) -> Document:
    """The document without runs."""
    options, suite = planner.options, table.suite
    rows, members = [], 1
    for row in table.rows:
        job = planner.job(suite, row.name, options.seed)
        run, members = planner.key(suite, job), max(members, job.config.members)  # a row may be of one network
        entry: dict[str, Any] = {"name": row.name, "run": run}
        if row.metrics:
            entry["metrics"] = row.metrics
        if figures := table.paper.get(row.name):
            entry["paper"] = figures
        rows.append(entry)
    claims = [
        claim.model_dump(by_alias=True, exclude_defaults=True, exclude={"recipes", "except_"}) for claim in table.claims
    ]
    return {
        "suite": suite.name,
        "about": suite.about,
        "recipe": options.short,
        "members": members,
        "scale": options.scale,
        "validation": options.validation,
        **({"test": True} if options.test else {}),
        "overrides": [public(override) for override in options.overrides],
        "command": command(_shown(suite), options, range(options.seed, options.seed + trials), public),
        "metrics": suite.metrics,
        "rows": rows,
        "claims": claims,
        "runs": {},
    }


def command(suite: str, options: Options, seeds: Sequence[int], show: Callable[[str], str] = str) -> str:
    """The command that runs a suite with these seeds, in rising order; several where there are gaps between them."""
    if gap := next((i for i in range(1, len(seeds)) if seeds[i] != seeds[i - 1] + 1), None):
        return " && ".join(command(suite, options, part, show) for part in (seeds[:gap], seeds[gap:]))
    words = ["mheads", "reproduce", suite, "--recipe", show(options.recipe)]
    words += ["--trials", str(len(seeds))] if len(seeds) > 1 else []
    words += ["--seed", str(seeds[0])] if seeds[0] else []
    words += ["--scale", f"{options.scale:g}"] if options.scale != 1 else []
    words += ["--validation", str(options.validation)] if options.validation else []
    words += ["--test"] if options.test else []
    return shlex.join([*words, *map(show, options.overrides)])


def _shown(suite: Suite) -> str:
    """The suite as a command names it, without a path of this machine."""
    return Path(suite.source).name if Path(suite.source).is_absolute() else suite.source


def add(document: Document, job: Job, planner: Planner, suite: Suite) -> None:
    """Adds a finished run, in the place of one with the same seed; one that no row shows is left out."""
    key = planner.key(suite, job)
    if key not in {entry["run"] for entry in document["rows"]}:
        return
    folder, runs = job.folder, document["runs"].get(key, ())
    result, own = folder.read_result(), digest(job)
    further: dict[str, Any] = {}
    if planner.options.test:
        further["weights"] = atomic_files.digest(folder.model)
        if fingerprint := planner.test_set(job):
            further["data"] = fingerprint
        if any(further | {"config": own} == {key: run.get(key) for key in (*further, "config")} for run in runs):
            return  # measuring takes time
        result = evaluate_run(folder.path, None, Silent(), split="test", trust=True)
    marks = marks_of(folder.read_identity())
    check_alike(document, key, job, marks)
    entry = {
        "seed": job.seed,
        "config": own,
        "marks": marks,
        **further,
        "command": planner.command(job),
        "result": measures(folder, result, job.config.optim.iterations),
        "versions": folder.read_result()["versions"],
        "machine": machine(),
    }
    others = [run for run in runs if run["seed"] != job.seed]
    document["runs"][key] = sorted([*others, entry], key=lambda run: run["seed"])


def marks_of(identity: dict[str, Any]) -> dict[str, str]:
    """What a config only names: digests of the data, and of the code of network and loss."""
    code = [identity[part].get("code", {}) for part in ("network", "loss")]
    found = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:8]
    return {"data": str(identity["data"]), "code": found}


def check_alike(document: Document, key: str, job: Job, marks: dict[str, str]) -> None:
    """Refuses a run beside others of its row that are of other data or code: their mean would be of neither."""
    for run in document["runs"].get(key, ()):
        known = run.get("marks", {})  # which earlier versions did not keep
        other = [name for name, mark in marks.items() if known.get(name, mark) != mark]
        if other and run["seed"] != job.seed:
            what = {"data": "other data", "code": "other code of its network or loss"}[other[0]]
            raise UserError(
                f"{job.name} has {what} than seed {run['seed']} has in the results, and a mean over both would be of "
                "neither: move the results away, or give another folder with -o"
            )


def digest(job: Job) -> str:
    """A name for what decides the results of a run, the same wherever its files lie: its config, of classical MCL how
    many rounds, and what it starts from."""

    def unplaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: unplaced(part) for key, part in value.items()}
        return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value

    own = job.config.digest(unplaced)
    further = [f"rounds {job.rounds}"] * (job.rounds is not None) + [digest(need) for need in job.needs]
    return hashlib.sha256(" ".join([own, *further]).encode()).hexdigest()[:8] if further else own


def machine() -> str:
    """The kind of machine, as far as it decides bits."""
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def measures(folder: RunFolder, result: dict[str, Any], iterations: int) -> dict[str, Any]:
    """What a run gives for a table: the numbers of its result, the training loss, and how evenly members own."""
    found: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict) and key != "versions":
            found |= {f"{key}_{part}": number for part, number in value.items() if _is_number(number)}
        elif _is_number(value) or key in ("members", "problem", "split"):
            found[key] = value
    for who, values in result.get("top_k", {}).items():
        found["top_k" if who == "ensemble_mean" else f"top_k_{who}"] = values
    steps = folder.read_log().steps
    late = [line for line in steps if line["iteration"] > result["iterations"] - iterations / 10] or steps[-1:]
    if late:
        found["train_loss"] = round(sum(line["loss"] for line in late) / len(late), 6)
        means = [sum(line["member_losses"]) / len(line["member_losses"]) for line in late]
        found["member_train_loss"] = round(sum(means) / len(means), 6)
    if len(result["members"]) > 1:
        found["evenness"] = round(evenness([sum(row) for row in result["ownership"]]), 6)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evenness(owned: list[float]) -> float:
    """The entropy of the members' shares of the examples, as a part of what it can be: 1 if all own as many."""
    shares = [count / sum(owned) for count in owned if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(owned)) if len(shares) > 1 else 0.0


# Files.


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Row(_Part):
    name: str
    run: str
    metrics: dict[str, str] = {}
    paper: dict[str, Any] = {}

    @model_validator(mode="after")
    def _figures(self) -> _Row:
        check_shown(self.metrics, f"rows.{self.name}.metrics")
        for metric, figure in self.paper.items():
            read_figure(metric, figure)
        return self


class _Claim(_Part):
    say: str = ""
    order: list[str] | None = None
    by: str = ""
    left: str = ""
    is_: Relation | None = Field(None, alias="is")
    right: str = ""
    within: float = 0.25

    @model_validator(mode="after")
    def _whole(self) -> _Claim:
        if self.order is None:
            for side in (self.left, self.right):
                Term.of(side)
        if not (self.is_ if self.order is None else self.by):
            raise ValueError("a claim has no `is`, or an order no `by`")
        return self


class _Run(_Part):
    seed: int = Field(ge=0)
    config: str
    command: str
    result: dict[str, float | str | list[float | None] | None]
    versions: dict[str, str]
    machine: str

    @model_validator(mode="after")
    def _kinds(self) -> _Run:
        for key, kind in (("members", list), ("problem", str), ("seconds", int | float)):
            if not isinstance(self.result.get(key), kind):
                raise ValueError(f"result.{key} is {safe_yaml.short(self.result.get(key))}")
        for key, value in self.result.items():
            if isinstance(value, str) and key not in ("problem", "split"):
                raise ValueError(f"result.{key} is {safe_yaml.short(value)}")
        return self


class _Document(_Part):
    """What the rest of the program takes for granted in a document."""

    suite: str
    about: str = ""
    recipe: str
    members: int
    scale: float
    validation: int
    test: bool = False
    overrides: list[str]
    command: str
    metrics: list[str]
    rows: list[_Row]
    claims: list[_Claim]
    runs: dict[str, list[_Run]]

    @model_validator(mode="after")
    def _once(self) -> _Document:
        for key, runs in self.runs.items():
            known = [(run.seed, run.config) for run in runs]  # earlier versions kept two recipes under one name
            if twice := [seed for seed, config in known if known.count((seed, config)) > 1]:
                raise ValueError(f"runs.{key} has seed {twice[0]} more than once")
        return self


def load(path: Path) -> Document:
    try:
        document: Document = safe_yaml.unsealed(atomic_files.read_text(path))
        _Document.model_validate(document)
        return document
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    except (OSError, ValueError) as error:
        why = str(error)
    raise UserError(f"{path} is not a file of results ({why}): bring it back, or move it out of that folder")


def merge(document: Document, path: Path, table: Table, planner: Planner, trials: int) -> None:
    """Takes over runs that the document lacks, from its file and from those of other suites. None is lost: one in the
    file that is of another experiment is refused, unless another file has it."""
    others = [found for at, found in all_in(path.parent, lambda _: None).items() if at != path]
    elsewhere = [run for other in others for runs in other["runs"].values() for run in runs]
    elsewhere = [run for run in elsewhere if run["result"].get("split", "test") == planner.options.split]
    if path.is_file():
        _merge_own(document, load(path), elsewhere, path, table, planner)
    _merge_others(document, elsewhere, table, planner)
    for runs in document["runs"].values():
        runs.sort(key=lambda run: run["seed"])
    options = planner.options
    seeds = {run["seed"] for runs in document["runs"].values() for run in runs}
    seeds |= set(range(options.seed, options.seed + trials))
    document["command"] = command(_shown(table.suite), options, sorted(seeds), public)


def _merge_own(
    document: Document, before: Document, elsewhere: list[Any], path: Path, table: Table, planner: Planner
) -> None:
    if [*map(public, before["overrides"])] != document["overrides"]:
        said = [" ".join(one["overrides"]) or "none" for one in (before, document)]
        raise UserError(
            f"{path} holds results with other overrides ({said[0]} there, {said[1]} here): give another folder with -o"
        )
    rows = {entry["name"]: entry["run"] for entry in document["rows"]}
    # Earlier versions called a run by its row alone, also where that is of another recipe: its config tells it apart.
    meant = {entry["run"]: entry["name"] for entry in document["rows"]}
    called = {entry["name"]: entry["run"] for entry in before["rows"]}
    own = _seeds(document)
    for key, runs in before["runs"].items():
        names = [meant[key]] if key in meant else []
        names += [name for name in rows if called.get(name) == key]
        for run in runs:
            jobs = {name: planner.job(table.suite, name, run["seed"]) for name in names}
            name = next((name for name, job in jobs.items() if digest(job) == run["config"]), None)
            if name is None and run not in elsewhere:
                raise UserError(
                    f"{path} holds a run that is not of this suite: {key} with seed {run['seed']}, {run['command']}; "
                    "move the file, or give another folder with -o"
                )
            if name is not None and (rows[name], run["seed"]) not in own:
                document["runs"].setdefault(rows[name], []).append(run)


def _merge_others(document: Document, elsewhere: list[Any], table: Table, planner: Planner) -> None:
    """Rows of one name are one run in all suites, also where the run itself is gone or was never here."""
    own = _seeds(document)
    for name in table.names:
        for run in elsewhere:
            job = planner.job(table.suite, name, run["seed"])
            known, place = (planner.key(table.suite, job), run["seed"]), shlex.quote(str(planner.public(job)))
            same = run["command"].endswith(f" -f {place}") and run["config"] == digest(job) and not _placed(job)
            if same and known not in own:
                document["runs"].setdefault(known[0], []).append(run)
                own.add(known)


def _placed(job: Job) -> bool:
    """Whether files of this machine decide the results, of which a digest knows no more than the name."""
    given, needs = schema.flatten(job.config), {os.path.realpath(need.path) for need in job.needs}
    places = [given[key] or "" for key in schema.PATHS if key != "data.root"]  # what is fetched is checked
    return any(os.path.isabs(place) and os.path.realpath(place) not in needs for place in places)


def _seeds(document: Document) -> set[tuple[str, int]]:
    """The runs that a document has, each by its key and seed."""
    return {(key, run["seed"]) for key, runs in document["runs"].items() for run in runs}


def check_writable(path: Path) -> None:
    """Refuses a place that results cannot be written to, before anything is trained for them."""
    folder = next(place for place in (path.parent.absolute(), *path.parent.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is not a folder"
        raise UserError(f"{path.parent}: {folder} {why}; give another folder with -o")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file: move it, or give another folder with -o")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder of results; inside, no other process writes to it."""
    with atomic_files.saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with atomic_files.locked(folder):
        yield


def save(document: Document, path: Path) -> None:
    atomic_files.write_atomically(path, safe_yaml.sealed(document, indent=1, ensure_ascii=False))


def all_in(folder: Path, warn: Callable[[str], None]) -> dict[Path, Document]:
    """All documents in a folder, in the order of the suites. A file that is none is told and left out."""
    found: dict[Path, Document] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path] = load(path)
        except UserError as error:
            warn(f"left out: {error}")
    known = {name: i for i, name in enumerate(SUITES)}

    def key(item: tuple[Path, Document]) -> tuple[int, str, int, float]:
        document = item[1]
        place = known.get(document["suite"], len(known))
        return place, document["recipe"], document.get("validation", 0), -document["scale"]

    return dict(sorted(found.items(), key=key))
