"""Sample weights [M, N] of a config: which member learns from which training examples (`sampling`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads import data as datasets
from mheads import networks
from mheads.common import atomic_files, fingerprint
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.resampling import Request
from mheads.engine.measure import all_answers
from mheads.problems import finds_objects, is_single_label
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run, load_data, make_engine


def build_sample_weights(
    config: Config, members: int, data: Data, array: Any = None, clusters: dict[str, Any] | None = None
) -> tuple[np.ndarray | None, list[list[int]] | None, dict[str, Any]]:
    """The sample weights [M, N], the classes of specialists, and digests of what decides them besides the config.

    `array` and `clusters`: see `assemble_experiment`.
    """
    _check_classes(config, data)
    sampling, classes = config.sampling, data.problem.groups
    groups: list[list[int]] | None = None
    digests: dict[str, Any] = {}
    options = sampling.options
    where = str(options.get("path", "sampling"))
    if sampling.entry.from_run:
        clusters = clusters or cluster_classes(config)
        groups = _number_classes(clusters["groups"], classes, options["generalist"], data.name)
        digests = {f"the weights of {options['generalist']}": clusters["weights"], "the groups of classes": groups}
    elif sampling.entry.by_class:
        at_random = options["groups"] == "random"
        groups = datasets.deal(config.seed, members, len(classes)) if at_random else options["groups"]
    elif "path" in options:
        array = datasets.read_sample_weights(options["path"])
    elif sampling.name == "array" and array is None:
        raise UserError(
            "sampling = array is only for fit in Python, which takes the array itself: give sampling.name=file and "
            "sampling.path"
        )
    array = datasets.select_training_rows(array, data.rows, members, data.num_given)
    labels = data.problem.group(torch.as_tensor(data.train.targets)).numpy()
    request = Request(config.seed, members, labels, len(classes), groups, array, where)
    sample_weights = sampling.entry.make(**options)(request)
    if array is not None and sample_weights is not None:
        digests = {f"the sample weights of {where}": fingerprint.weights({"": torch.from_numpy(sample_weights)})}
    return sample_weights, groups, digests


def _check_classes(config: Config, data: Data) -> None:
    sampling, problem = config.sampling, data.problem
    if not sampling.entry.by_class:
        return
    remedy = "use full, bagging or subset, or say with sampling.name=file who learns from which"
    if finds_objects(problem):
        raise UserError(
            f"sampling = {sampling.name} deals out examples by their class, and an image has objects of several: "
            f"{remedy} image"
        )
    if len(problem.groups) < 2:
        raise UserError(
            f"sampling = {sampling.name} deals out examples by their class, and {problem.name} has none to deal out: "
            f"{remedy} example"
        )


def cluster_classes(config: Config) -> dict[str, Any]:
    """Groups of classes, by name, that the run `sampling.generalist` takes for each other, and a digest of its weights.

    It answers the examples that its training evaluated on: those that it held out, or else its test set.
    """
    folder = RunFolder(config.sampling.options["generalist"])
    folder.require()
    generalist, facts = folder.read_config(), folder.read_data()
    if not is_single_label(facts.problem):
        raise UserError(
            f"sampling.generalist = {folder.path} learned {facts.problem.name}: give a run that tells classes apart"
        )
    _check_generalist(config, generalist, folder.path)
    data = load_data(generalist)
    if data.fingerprint != facts.fingerprint:
        raise UserError(
            f"sampling.generalist = {folder.path} was trained on other data than {data.name} is now: checksum "
            f"{facts.fingerprint} there, {data.fingerprint} now; bring back the data that it was trained on"
        )
    net = build_net_of_run(folder, generalist, Silent().warn, trust=_same_model(config, generalist))
    folder.load_weights(net, Silent().warn, final=True)
    generalist = generalist.model_copy(update={"device": config.device, "engine": config.engine})
    with closing(make_engine(generalist, net)) as engine:
        answers, _, _ = all_answers(engine, data.test, facts.inputs, facts.problem)
    groups = datasets.confusable(facts.problem.mean(answers.double()), config.members, config.seed)
    names = facts.problem.classes
    return {"groups": [[names[c] for c in group] for group in groups], "weights": atomic_files.digest(folder.model)}


def _same_model(one: Config, other: Config) -> bool:
    return (one.model, one.model_args) == (other.model, other.model_args)


def _check_generalist(config: Config, generalist: Config, path: Path) -> None:
    """Raises if the data of the generalist are not known, or if it would run code that the user has not named."""
    name = f"sampling.generalist = {path}"
    if not datasets.names_examples(generalist.data):
        raise UserError(
            f"{name} was trained from Python on arrays, and does not keep them: give its class "
            "probabilities to mheads.data.confusable, and the groups that it returns to sampling.groups"
        )
    if not networks.is_ours(generalist.model, generalist.model_args) and not _same_model(config, generalist):
        theirs, ours = (
            f"{each.model} with model_args = {each.model_args!r}" if generalist.model == config.model else each.model
            for each in (generalist, config)
        )
        raise UserError(
            f"{name} names code of its own, {theirs}: only the model of this run, {ours}, "
            "is trusted. Give a run of it, or of a built-in network"
        )


def _number_classes(
    groups: Sequence[Sequence[str]], classes: Sequence[str], run: Path | None, data: str
) -> list[list[int]]:
    known = {name for group in groups for name in group}
    if known != set(classes):
        odd = sorted(known ^ set(classes))
        raise UserError(
            f"sampling.generalist = {run} was trained on other classes than those of {data}: {odd[0]!r} is not in both "
            f"({len(odd)} such classes); give a run of the same classes"
        )
    return [sorted(classes.index(name) for name in group) for group in groups]
