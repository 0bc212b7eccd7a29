"""Begins a run, or resumes it: what its folder holds, and the stages of its newest checkpoint.

`Recorder.open` in `log_and_checkpoint.py` calls these; `runs/check_resume.py` decides whether a run may be resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mheads.common import fingerprint
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.engine.interface import Engine
from mheads.runs import shards
from mheads.runs.checkpoint import UNREADABLE, Checkpoints
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder, describe_damage
from mheads.runs.shards import Writers
from mheads.training.experiment import Experiment
from mheads.training.init_weights import compare_with_source


def open_folder(
    folder: RunFolder, experiment: Experiment, checkpoints: Checkpoints, total: int, watch: Watcher
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the run folder holds, as plain data, and the tensors of its newest checkpoint."""
    config, data = experiment.config, experiment.data
    resuming = folder.prepare(config, DataFacts.of(data), experiment.identity(), watch.warn)
    opened: dict[str, Any] = {"resuming": resuming, "finished": False, "step": 0, "state": None}
    if not resuming:
        if experiment.net.history.origin:
            watch.say(experiment.net.history.origin)
        for line in experiment.describe_specialists():
            watch.say(line)
        if differing := compare_with_source(config, experiment.net, data):
            source = config.init if RunFolder(Path(config.init)).exists() else "an earlier run"
            watch.warn("\n  ".join([f"the weights of {source} were trained on other data:", *differing]))
        return opened, {}
    checkpoints.recover()
    steps = checkpoints.steps()
    checkpoints.run = folder.read_identity()["run"]
    opened["finished"] = folder.is_finished(total)
    for path, problem in folder.problems().items():
        if opened["finished"] and not steps:
            watch.warn(f"{path} {problem}, and there is no checkpoint to make it anew from")
        elif opened["finished"] or path.exists():  # a file that a killed process had yet to write is not damaged
            watch.warn(f"{path} {problem}; made anew")
            opened["finished"] = False
    if opened["finished"]:
        for path, problem in checkpoints.damages().items():
            watch.warn(describe_damage(path, problem))
        watch.on_finished(folder.path)
        return opened, {}
    if steps and steps[0] > total:
        watch.warn(f"iteration {total} is to be the last: checkpoints after it are removed")
    checkpoint = checkpoints.newest(watch.warn, total)
    if checkpoint is None:
        if experiment.start not in (None, fingerprint.weights(experiment.net.state_dict())):
            raise UserError(
                f"{folder.path} has no checkpoint to resume from, and the weights of this net are not those that "
                "training started from: build a new TreeNet"
            )
        return opened, {}
    state = {key: value for key, value in checkpoint.state.items() if key not in ("config", "identity")}
    return {**opened, "step": checkpoint.step, "state": state}, checkpoint.tensors


def try_shards(engine: Engine, checkpoints: Checkpoints, writers: Sequence[int]) -> None:
    """Finds out whether all ranks have the folder in common; if so, each writes the stages that it holds.

    Those that write none, since others hold the same, read theirs there.
    """
    folder = checkpoints.folder
    launch, _ = engine.agree(lambda: (shards.begin_trial(folder), None))
    if not engine.is_main:
        shards.join_trial(folder, launch, engine.rank)
    tried = engine.gather({str(engine.rank): torch.empty(0)})
    shared, _ = engine.agree(lambda: (shards.end_trial(folder, launch, [*map(int, tried)]), None))
    if shared and engine.notes is not None:
        checkpoints.writers = Writers(writers, engine.rank, engine.notes, launch)


def load_stages(
    engine: Engine,
    checkpoints: Checkpoints,
    writers: Sequence[int],
    step: int,
    tensors: dict[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """The tensors of the stages of this process in a checkpoint, of which the main rank has read its own."""
    with engine.pausing():
        try:
            if checkpoints.writers is not None:
                return tensors or checkpoints.load(step, checkpoints.wanted)
            if engine.is_main and len(writers) > 1:
                tensors = checkpoints.load(step)
        except UNREADABLE as error:
            raise UserError(
                f"rank {engine.rank} cannot read checkpoint {checkpoints.path(step)} ({error}), which the main rank "
                "found whole: look at the disk or its mount there, and give the same command again"
            ) from error
    whole = engine.broadcast(tensors or {})
    return {name: tensor for name, tensor in whole.items() if checkpoints.wanted(name)}
