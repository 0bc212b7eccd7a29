"""Rows that begin with the same pretraining share it: the first one trains it, the others go on from its checkpoint.

A run keeps the checkpoint at the end of its pretraining. Another that has the same config but for what follows begins
with a copy of it, and from there on is trained like a run that was interrupted: with the same bits as from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mheads.common import atomic_files, fingerprint
from mheads.common.errors import UserError
from mheads.common.number_words import count
from mheads.common.progress import Watcher
from mheads.config import schema
from mheads.config.schema import Config
from mheads.runs.checkpoint import UNREADABLE, Checkpoint, Checkpoints
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import good_lines
from mheads.suites.jobs import SuiteJob
from mheads.training.experiment import Experiment

AFTERWARDS = {"pretrain", "loss.k"}  # keys that do not change the iterations before the loss begins


def shared_iterations(one: Config, other: Config) -> int:
    """How many iterations of pretraining two runs have in common."""
    keys = {key for key in schema.differing(one, other) if schema.decides_result(key, other)}
    return min(one.pretrain, other.pretrain) if keys <= AFTERWARDS else 0


def leave_out_shared(jobs: Sequence[SuiteJob], finished: Sequence[SuiteJob]) -> list[SuiteJob]:
    """The jobs without the pretraining that they get from a finished run, or from one before them in this order."""
    left: list[SuiteJob] = []
    for i, job in enumerate(jobs):
        shared = 0
        for other in (*finished, *jobs[:i]) if job.config.pretrain else ():
            if other.config.pretrain and (steps := shared_iterations(other.config, job.config)):
                kept = Checkpoints(other.folder.checkpoints).steps() if other in finished else [steps]
                shared = max(shared, *(step for step in kept if step <= steps), 0)
        if shared and job.rounds is None and not job.steps_done():
            job = replace(job, config=job.config.model_copy(update={"pretrain": job.config.pretrain - shared}))
        left.append(job)
    return left


def begin_with_shared(folder: RunFolder, experiment: Experiment, others: Iterable[RunFolder], watch: Watcher) -> int:
    """Begins the run of this folder with the longest pretraining that one of the others has kept for it.

    Returns how many iterations that spares.
    """
    if folder.exists() or not experiment.config.pretrain:
        return 0
    found = [(checkpoint, other) for other in others if (checkpoint := _find_checkpoint(other, experiment)) is not None]
    if not found:
        return 0
    checkpoint, other = max(found, key=lambda pair: pair[0].step)
    lines, damaged = good_lines(other.metrics, checkpoint.state["log"])
    if damaged:
        return 0
    _write(folder, experiment, checkpoint, lines, watch)
    watch.say(
        f"the first {count(checkpoint.step, 'iteration')} are those of {other.path.name}, whose checkpoint is used"
    )
    return checkpoint.step


def _find_checkpoint(other: RunFolder, experiment: Experiment) -> Checkpoint | None:
    """The newest checkpoint of a run within the pretraining that it shares; None if there is none that is whole."""
    config = experiment.config
    try:
        if not other.exists() or not (shared := shared_iterations(other.read_config(), config)):
            return None
        identity, own = other.read_identity(), experiment.identity()
        if identity["data"] != own["data"] or fingerprint.differences(*map(_describe_start, (identity, own))):
            return None
        return Checkpoints(other.checkpoints, run=identity["run"]).newest(lambda damage: None, shared)
    except (UserError, *UNREADABLE):  # damaged, or removed by who trains in it
        return None


def _describe_start(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run without the arguments of its loss that matter once the loss begins."""
    code = {name: dict(part) for name, part in identity["loss"]["code"].items()}
    for part in code.values():
        part["values"] = {key: at for key, at in part.get("values", {}).items() if f"loss.{key}" not in AFTERWARDS}
    return {**identity, "loss": {**identity["loss"], "code": code}}


def _write(folder: RunFolder, experiment: Experiment, checkpoint: Checkpoint, lines: bytes, watch: Watcher) -> None:
    """Makes the folder what it would be if its run had been killed at this checkpoint."""
    folder.prepare(experiment.config, DataFacts.of(experiment.data), experiment.identity(), watch.warn)
    checkpoints = Checkpoints(folder.checkpoints)
    try:
        atomic_files.write_atomically(folder.metrics, lines)
        checkpoints.config, checkpoints.identity = experiment.config.to_yaml(), folder.read_identity()
        state = {key: value for key, value in checkpoint.state.items() if key not in ("step", "config", "identity")}
        checkpoints.save(checkpoint.step, checkpoint.tensors, state)
        checkpoints.wait()
    except UserError:
        folder.discard()
        raise
    finally:
        checkpoints.close()
        folder.release()
