"""One network from many: what a run answers to the training examples is what another network learns.

    runs/small.npz, runs/small/      the answers, and the run of the network that learned them

The run is an ordinary one with `teacher.answers`: the same command resumes where it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.progress import Mute, Watcher, forward_warnings
from mheads.config import read as configs
from mheads.config.options_without_effect import check_idle_options
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.catalog import names_examples
from mheads.data.sample_weights import read_array
from mheads.distributed.launcher import detect
from mheads.engine.measure import answers
from mheads.problems import is_single_label
from mheads.runs.check_resume import without_force
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.runs.read_run import titles
from mheads.training.build_from_config import build_loss, build_net, build_net_of_run, load_data, make_engine
from mheads.training.experiment import assemble_experiment
from mheads.training.loop import train_config
from mheads.trees.treenet import TreeNet

# One network from fresh weights; all else is as it was for the members.
ONE = (
    *("members=1", "split=null", "init=random", "init_map={}", "init_members=null", "freeze=[]", "sampling=full"),
    *("loss=independent", "teacher={answers: null}", "pretrain=0", "placement=default"),
)


def distil(
    path: Path, overrides: Sequence[str], folder: Path, watch: Watcher, trust: bool = False
) -> dict[str, dict[str, Any]]:
    """Trains a network in `folder` on what the run at `path` answers; returns both results by their titles.

    The config is that of the run for one member, with the overrides. If these change the data, the results are not of
    the same examples, and that of the run is left out.
    """
    teacher = RunFolder(path)
    config = _make_config(teacher, overrides, folder)
    launch = detect()
    if launch is not None and launch.size > 1:
        raise UserError(
            f"distil computes the answers of the run in one process, but {launch.launcher} started {launch.size}: "
            "start distil in one process, stop it after its first steps, and resume on ranks with mheads train "
            f"{folder / 'config.yaml'} -f {folder}"
        )
    net = build_net_of_run(teacher, teacher.read_config(), watch.warn, trust=trust)
    teacher.load_weights(net, watch.warn, final=True)
    with forward_warnings(watch):
        data = load_data(config)
    facts = teacher.read_data()
    _check_data(facts, data, path)
    file = config.teacher.answers
    assert isinstance(file, Path)
    run = RunFolder(folder)
    if run.exists() and not file.exists():
        raise UserError(f"{folder} holds a run that has no {file.name} beside it: give another --folder")
    run.refuse_other_content()
    _check_experiment(config, data)
    marks = {"weights": atomic_files.digest(teacher.model), "data": data.fingerprint}
    if not _has_answers(file, marks, path):
        with atomic_files.saving(file):  # before the run is asked, which takes time
            file.parent.mkdir(parents=True, exist_ok=True)
        probabilities = _answer(config, teacher, net, data, watch)
        arrays = {"answers": probabilities.numpy(), **{key: np.array(mark) for key, mark in marks.items()}}
        atomic_files.write_atomically(file, lambda stream: np.savez(stream, **arrays))  # type: ignore[arg-type]
    with without_force():
        result = train_config(config, run, watch)
    same = config.data == teacher.read_config().data
    before, after = titles([path, folder])
    return {**({before: teacher.read_result()} if same else {}), after: result}


def _answer(config: Config, teacher: RunFolder, net: TreeNet, data: Data, watch: Watcher) -> Tensor:
    """What the run answers to the training examples [N, C], on the device and with the workers of the new run."""
    facts, parts = teacher.read_data(), []
    asked = teacher.read_config().model_copy(update={"device": config.device, "engine": config.engine})
    examples = data.train.without_augmentation()  # type: ignore[attr-defined]  # it is a source
    with closing(make_engine(asked, net)) as engine:
        watch.say(f"asking {teacher.path} about {len(examples):,} training examples")
        for outputs, weights, _ in answers(engine, examples, facts.inputs, facts.problem, watch):
            parts.append(facts.problem.mean(outputs.double(), weights).float().cpu())
    return torch.cat(parts)


def _check_experiment(config: Config, data: Data) -> None:
    """Raises if parts do not fit each other, before the run is asked: that takes time, and writes a file."""
    answers = np.full((len(data.train), len(data.problem.groups)), 1 / len(data.problem.groups), np.float32)
    trial = config.model_copy(update={"teacher": config.teacher.model_copy(update={"answers": "array"})})
    with forward_warnings(Mute()):  # training gives them again
        assemble_experiment(trial, build_net(trial), build_loss(trial), data, answers=answers)


def _make_config(teacher: RunFolder, overrides: Sequence[str], folder: Path) -> Config:
    teacher.require()
    keys = {key for override in overrides for key in configs.keys_of(override)}
    if "teacher.answers" in keys:
        raise UserError(
            f"distil sets teacher.answers to the answers of {teacher.path}: leave it out, or train with a file of "
            "your own, mheads train RECIPE teacher.answers=FILE"
        )
    arguments = ["model_args={}"] if "model" in keys else []  # they were those of the other network
    answers = f"teacher.answers={json.dumps(f'{folder.absolute()}.npz')}"
    try:
        config = configs.read(teacher.config, [*ONE, *arguments, *overrides, answers])
    except configs.ConfigError as error:  # the config of a run is right, so that these are not
        raise configs.ConfigError(f"{teacher.path} with {' '.join(overrides)}", error.problems) from error
    if not folder.exists():
        check_idle_options(config, overrides)
    if not names_examples(config.data):
        raise UserError(
            f"{teacher.path} was trained from Python on arrays, and does not keep them: there, "
            "fit(net, train=(x, y), teacher=mheads.load(run).answer(x)) does the same; or give data, data.name=npz "
            "data.path=..."
        )
    if config.data.normalize == "init" and teacher.read_config().data.normalize == "init":
        raise UserError(
            "data.normalize=init takes the normalisation of the run that training starts from, but distil starts from "
            "new weights: give data.normalize=mean_image or another"
        )
    return config


def _check_data(facts: DataFacts, data: Data, path: Path) -> None:
    """Raises for data that the run has no answers for."""
    if not is_single_label(facts.problem) or not is_single_label(data.problem):
        other = facts.problem if not is_single_label(facts.problem) else data.problem
        raise UserError(
            f"{path}: probabilities of classes can be learned from a run, and this is {other.name}; in Python, "
            "fit(net, train=(x, run.answer(x))) learns other answers"
        )
    if data.problem.classes != facts.problem.classes:
        raise UserError(
            f"the classes of {data.name} are {', '.join(data.problem.classes)}; those that {path} was trained on are "
            f"{', '.join(facts.problem.classes)}: give data with the same classes in the same order"
        )
    if tuple(data.train.shape) != facts.shape:
        raise UserError(f"examples of shape {tuple(data.train.shape)}, but {path} was trained on {facts.shape}")
    if data.seen is not None:
        facts.check(data.seen, data.name)


def _has_answers(file: Path, marks: dict[str, str], path: Path) -> bool:
    """Whether the file has the answers of this very run to these very examples; raises if it has others."""
    if not file.exists():
        return False
    known = {key: str(read_array(file, (key,), "--folder", "answers")) for key in marks}
    if known != marks:
        what = "answers of another run than" if known["weights"] != marks["weights"] else "answers to other examples of"
        raise UserError(f"{file} holds {what} {path}: give another --folder, or move that file")
    return True
