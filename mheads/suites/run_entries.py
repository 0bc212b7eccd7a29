"""What the document of a suite keeps of a run: figures, digests of what decides them, and how to train it again.

{"seed", "config", "marks", "command", "result", "versions", "machine"}. "config" is a digest of the job, "marks" are
those of the data and the code that the run was trained with. With "test", runs that were trained without the validation
examples are measured on the test set, also with temperatures or kernels fitted on the validation examples; with "ood"
or "shifted" of a suite also on other data. "weights", "data", "ood_data" and "shifted_data" are digests of what was
measured, and on what; "validation" has the figures on the validation examples by which rows choose (`best_of`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads.api.evaluate import FurtherExamples, evaluate_run, name_outputs, outputs_and_weights_of
from mheads.api.run import load
from mheads.common import atomic_files, packed_arrays
from mheads.common.device import describe_cpu
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import schema
from mheads.problems import is_single_label
from mheads.runs.folder import RunFolder
from mheads.suites.findings import read_value
from mheads.suites.jobs import SuiteJob
from mheads.suites.metric_names import is_number
from mheads.suites.planner import Planner, hide_local_paths
from mheads.suites.suite import Suite

OTHER_DIGESTS = ("ood_data", "shifted_data")


def add_run(document: dict[str, Any], job: SuiteJob, planner: Planner, suite: Suite) -> None:
    """Adds a finished run, in the place of one with the same seed; one that no row shows is left out."""
    key = planner.key(suite, job)
    if key not in {entry["run"] for entry in document["rows"]}:
        return
    folder, runs = job.folder, document["runs"].get(key, ())
    trained = result = folder.read_result()
    config, validated = digest_job(job), {}
    measured = describe_measured(job, planner, suite)
    if planner.options.test or measured:
        measured["weights"] = atomic_files.digest(folder.model)
        wanted = measured | {"config": config}
        by = sorted({row.by for row in suite.rows if row.best_of and planner.options.test})
        for run in runs:
            # Runs from before digests of other data were kept stand as they are.
            known = {key: run.get(key, value if key in OTHER_DIGESTS else None) for key, value in wanted.items()}
            if wanted == known and run.get("validation", {}).keys() >= {*by}:
                return  # measuring takes time
        if by:
            numbers = measure(folder, result, job.config.optim.iterations)
            validated = {"validation": {metric: read_value(numbers, metric, document["members"]) for metric in by}}
        scales = planner.options.test and is_single_label(folder.read_data().problem)
        examples = FurtherExamples("validation" if scales else None, suite.ood, suite.shifted)
        split = "test" if planner.options.test else None
        kernels = "validation" if planner.options.test else None
        result = trained | evaluate_run(folder.path, None, Silent(), (), split, True, examples, calibrate_from=kernels)
    marks = digest_data_and_code(folder.read_identity())
    check_same_marks(document, key, job, {"marks": marks})
    entry = {
        "seed": job.seed,
        "config": config,
        "marks": marks,
        **measured,
        **validated,
        "command": planner.command(job),
        "result": measure(folder, result, job.config.optim.iterations),
        "versions": trained["versions"],
        "machine": trained.get("machine") or describe_cpu(),  # of runs from before it was kept, this one
    }
    others = [run for run in runs if run["seed"] != job.seed]
    document["runs"][key] = sorted([*others, entry], key=lambda run: run["seed"])


def describe_measured(job: SuiteJob, planner: Planner, suite: Suite) -> dict[str, Any]:
    """On which data a run is measured, where they are not those that training evaluated on, or not these alone."""
    measured: dict[str, Any] = {}
    for name, keys in (("ood", suite.ood), ("shifted", suite.shifted)):
        if keys:
            measured[name] = [*map(hide_local_paths, keys)]
            if digest := planner.other_data(job, keys):
                measured[f"{name}_data"] = digest
    if (planner.options.test or measured) and (digest := planner.test_set(job)):
        measured["data"] = digest
    return measured


def write_half_outputs(job: SuiteJob, path: Path, split: str) -> None:
    """Writes the outputs of a run on the examples of a split as float16, with their labels, compressed.

    A file of the same weights stays as it is.
    """
    weights = atomic_files.digest(job.folder.model)
    with suppress(OSError, ValueError, KeyError), packed_arrays.open_arrays(path) as file:  # else it is written anew
        if str(file["weights_digest"]) == weights:
            return
    run = load(job.folder.path, trust=True)
    outputs, member_weights, targets = outputs_and_weights_of(run, split)
    limit = torch.finfo(torch.float16).max
    halves = outputs.clamp(-limit, limit).half(), None if member_weights is None else member_weights.half()
    arrays = name_outputs(*halves, targets) | {"weights_digest": np.array(weights)}
    with atomic_files.saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.hold_lock(path.parent):  # another process may measure the same run
        atomic_files.write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def digest_data_and_code(identity: dict[str, Any]) -> dict[str, str]:
    """Digests of what a config only names: the data, and the code of network and loss."""
    code = [identity[part].get("code", {}) for part in ("network", "loss")]
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:8]
    return {"data": str(identity["data"]), "code": digest}


def check_same_marks(document: dict[str, Any], key: str, job: SuiteJob, entry: dict[str, Any]) -> None:
    """Raises an error if other runs of the row are of other data or code than this one, or were measured on other data:
    their mean would be of neither."""
    for run in document["runs"].get(key, ()):
        if run["seed"] != job.seed and (difference := _find_difference(run, entry, job.by_seed)):
            raise UserError(
                f"{job.name} has {difference} than seed {run['seed']} has in the results, and a mean over both would "
                "be of neither: move the results away, or give another folder with -o"
            )


def _find_difference(run: dict[str, Any], entry: dict[str, Any], by_seed: bool) -> str | None:
    """What differs between two runs of a row, of what is known of both: older versions did not keep all."""

    def differ(key: str, one: dict[str, Any] = run, other: dict[str, Any] = entry) -> bool:
        return key in one and key in other and one[key] != other[key]

    marks = run.get("marks", {}), entry.get("marks", {})
    if differ("data", *marks) and not by_seed:
        return "other data"
    if differ("code", *marks):
        return "other code of its network or loss"
    if differ("data") and not by_seed:
        return "another test set"
    for name, digest in zip(("ood", "shifted"), OTHER_DIGESTS, strict=True):
        by_digest = digest in run and digest in entry and not by_seed
        if differ(digest if by_digest else name):  # a text names a file, which may lie elsewhere or change
            return f"other data for --{name}"
    return None


def digest_job(job: SuiteJob) -> str:
    """A name for what decides the results of a run, the same wherever its files lie: its config, of classical MCL how
    many rounds, and what it starts from."""

    def without_folders(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_folders(part) for key, part in value.items()}
        return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value

    own = job.config.digest(without_folders)
    further = [f"rounds {job.rounds}"] * (job.rounds is not None) + [digest_job(need) for need in job.needs]
    return hashlib.sha256(" ".join([own, *further]).encode()).hexdigest()[:8] if further else own


def has_local_files(job: SuiteJob) -> bool:
    """Whether files of this machine decide the results, of which a digest knows no more than the name."""
    values, needs = schema.flatten(job.config), {os.path.realpath(need.path) for need in job.needs}
    places = [values[key] or "" for key in schema.PATHS if key != "data.root"]  # what is fetched is checked
    return any(os.path.isabs(place) and os.path.realpath(place) not in needs for place in places)


def measure(folder: RunFolder, result: dict[str, Any], iterations: int) -> dict[str, Any]:
    """What a run gives for a table: the numbers of its result, the training loss, and how evenly members own."""
    numbers: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict) and key != "versions":
            numbers |= {f"{key}_{part}": number for part, number in value.items() if is_number(number)}
        elif is_number(value) or key in ("members", "problem", "split"):
            numbers[key] = value
    for who, values in result.get("top_k", {}).items():
        numbers["top_k" if who == "ensemble_mean" else f"top_k_{who}"] = values
    numbers |= {
        key: result[key] for key in ("nll_by_members", "nll_by_members_scaled", "distortion_by_points") if key in result
    }
    steps = folder.read_log().steps
    late = [line for line in steps if line["iteration"] > result["iterations"] - iterations / 10] or steps[-1:]
    if late:
        numbers["train_loss"] = round(sum(line["loss"] for line in late) / len(late), 6)
        means = [sum(line["member_losses"]) / len(line["member_losses"]) for line in late]
        numbers["member_train_loss"] = round(sum(means) / len(means), 6)
    if len(result["members"]) > 1:
        numbers["evenness"] = round(evenness([sum(row) for row in result["ownership"]]), 6)
    return numbers


def evenness(owned: list[float]) -> float:
    """The entropy of the members' shares of the examples, as a part of what it can be: 1 if all own as many."""
    shares = [count / sum(owned) for count in owned if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(owned)) if len(shares) > 1 else 0.0
