"""Takes the runs of other folders of results over: further seeds, trained elsewhere or at another time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mheads.common.errors import UserError
from mheads.suites import results
from mheads.suites.jobs import Options
from mheads.suites.planner import Planner, hide_local_paths
from mheads.suites.results import Document
from mheads.suites.suite import read_suite

Warn = Callable[[str], None]


def find_results(sources: Sequence[Path]) -> list[Path]:
    """The files in other folders of results; each folder has some."""
    files = {source: sorted(source.glob("*.json")) for source in sources}
    if lacking := [str(source) for source, paths in files.items() if not paths]:
        raise UserError(f"--merge {', '.join(lacking)}: no file of results there; give the -o of the other command")
    return [path for paths in files.values() for path in paths]


def merge_folders(sources: Sequence[Path], output: Path, warn: Warn) -> dict[Path, int]:
    """Adds the runs in other folders of results to those in `output`, and returns how many each file has gained.

    A row is filled in every suite that has it. No run folder is needed. A run that `output` has already stays as it is.
    All is checked before anything is written. No file is written for a suite without runs.
    """
    found = {path: results.load(path) for path in find_results(sources)}
    sources_by_path = {path: document for path, document in found.items() if document["runs"]}
    results.check_writable(output / "results.json")
    with results.lock(output):
        before = results.load_all(output, warn)
        merged = {
            output / path.name: _merge(output / path.name, sources_by_path[path], sources) for path in sources_by_path
        }
        for path, document in before.items():
            if path not in merged:
                try:
                    merged[path] = _merge(path, document, sources)
                except UserError as error:
                    warn(f"{path} stays as it is: {error}")
        _report_left_out(sources_by_path, merged, warn)
        merged = {path: document for path, document in merged.items() if document["runs"]}
        for path, document in merged.items():
            results.save(document, path)
    return {path: _count(document) - _count(before.get(path)) for path, document in merged.items()}


def _merge(path: Path, known: Document, sources: Sequence[Path]) -> Document:
    """The document of a file, of which one version is known, with the runs of all others."""
    words = shlex.split(known["command"])  # mheads reproduce SUITE --recipe RECIPE ...
    test = bool(known.get("test", False))
    options = Options(words[4], 0, known["scale"], known["validation"], tuple(known["overrides"]), test)
    try:
        suite = read_suite(words[2])
        ood, shifted = _find_other_data(known, "ood", suite.ood), _find_other_data(known, "shifted", suite.shifted)
        planner = Planner(replace(options, ood=ood, shifted=shifted))
        table = planner.expand(suite)
        document = results.make_document(table, planner)
    except UserError as error:
        raise UserError(f"{path.name}: {error}; or give the command that made it, with --merge") from error
    results.merge(document, path, table, planner, sources=sources)
    return document


def _find_other_data(known: Document, option: str, own: Sequence[str]) -> tuple[str, ...]:
    """The data keys that --ood or --shifted gave, if not the suite. A document from before they were kept has them with
    its runs."""
    kept = [run[option] for runs in known["runs"].values() for run in runs if option in run]
    keys = known.get(option) or (kept[0] if kept else [])
    return () if keys == [*map(hide_local_paths, own)] else tuple(keys)


def _report_left_out(found: dict[Path, Document], merged: dict[Path, Document], warn: Warn) -> None:
    """Warns of runs that are in no merged file, or in one with other figures."""
    by_name = {path.name: document for path, document in merged.items()}
    for path, source in found.items():
        for key, runs in source["runs"].items():
            known = {run["seed"]: run for run in by_name[path.name]["runs"].get(key, ())}
            for run in runs:
                if run["seed"] not in known:
                    why = "its config is not that of the suite here, or names files of a machine"
                elif known[run["seed"]]["result"] != run["result"]:
                    why = "the results have this run with other figures"
                else:
                    continue
                warn(f"{path}: {key} with seed {run['seed']} is left out: {why}")


def _count(document: Document | None) -> int:
    return sum(map(len, document["runs"].values())) if document else 0
