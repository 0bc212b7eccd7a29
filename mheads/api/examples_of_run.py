"""The examples that a run is evaluated on: those of its training, another split of them, or other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.data import TARGET_KINDS, Data
from mheads.data.catalog import DATASETS, names_examples
from mheads.data.splits import NormalizedTargets, Split
from mheads.problems import Problem, finds_objects
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import load_data

SPLITS = ("train", "validation", "test")
DATA_KEYS = (
    *("name", "root", "path", "test_path", "validation", "resize", "crop", "limit", "table", "fold"),
    *("regions.proposals", "regions.with_objects", "regions.strict"),
)
NAMES_OF_DATA = ("name", "path", "test_path", "table")  # the data keys that decide which examples there are


def load_examples_of_run(
    folder: RunFolder, overrides: Sequence[str] = (), split: str | None = None, unlike: bool = False
) -> tuple[DataFacts, Split, str]:
    """What the run knows of its data, the examples to evaluate on, and the name of their split.

    By default they are those that training evaluated on; `overrides` are other data keys than the run's. Of data that
    are `unlike` the run's, labels do not matter.
    """
    check_overrides(overrides)
    facts, config = folder.read_data(), configs.read(folder.config, overrides)
    split = split or ("validation" if config.data.validation else "test")
    _check_split(folder, config, split)
    try:
        data = _load_data(folder, facts, config, split, bool(overrides))
    except UserError as error:
        if split == "validation" and error.key in ("x_train", "y_train"):
            error.hint = "or give --split test, for the test examples of these data"
        raise
    examples: Any = data.train.without_augmentation() if split == "train" else data.test  # type: ignore[attr-defined]
    if isinstance(examples, NormalizedTargets):  # members answer in the units of the targets
        examples = examples.source
    _check_shape(folder, facts, data, examples, split)
    if unlike:
        return facts, examples, split
    _check_like_training(folder, facts, data, examples, split)
    if finds_objects(facts.problem) and finds_objects(data.problem):
        examples = examples.with_statistics_of(facts.problem)
        facts = replace(facts, problem=replace(facts.problem, truths=data.problem.truths))  # which a run does not keep
    return facts, examples, split


def load_other_data(config: Config, overrides: Sequence[str]) -> tuple[Config, Data]:
    """The test examples that these data keys name, as a run of the config will be measured on, and their config."""
    check_overrides(overrides)
    other = configs.parse(config.to_yaml(), "the config", overrides)
    wanted = _update_data(_without_start(other), pad=0, mirror=False, validation=0)
    return other, load_data(wanted, only="test")


def load_own_data(config: Config) -> Data:
    """The data of a run that is not trained yet, nor what it starts from."""
    return load_data(_without_start(config))


def refuse_own_data(option: str, keys: Sequence[str], own: Config, other: Config) -> None:
    """Raises an error if the data keys of an option name the examples of the run itself."""
    if keys and all(getattr(own.data, key) == getattr(other.data, key) for key in NAMES_OF_DATA):
        raise UserError(
            f"--{option} {' '.join(keys)}: that is the run's own {own.data.name}, which nothing tells apart from "
            "itself; name other data, data.name=cifar100 or data.path=OTHER"
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises for a key that does not choose examples."""
    for override in overrides:
        key = override.partition("=")[0]
        if key not in [f"data.{name}" for name in DATA_KEYS]:
            reason = "settings of a finished run cannot be changed"
            if key.startswith("data."):
                reason = "inputs are preprocessed as in training"
            raise UserError(
                f"{override!r}: {reason}; other data to evaluate on is given by "
                f"{', '.join(f'data.{name}' for name in DATA_KEYS)}"
            )


def _check_split(folder: RunFolder, config: Config, split: str) -> None:
    if not names_examples(config.data):
        raise UserError(
            f"{folder.path} was trained from Python on arrays, which its folder does not hold: run.evaluate, run.plot "
            "and run.report take examples x, y, with run = mheads.load(folder); mheads eval takes data.name=npz "
            "data.path=FILE"
        )
    if split not in SPLITS:
        raise UserError(f"split {split!r}: there are {', '.join(SPLITS)}")
    if split == "validation" and not config.data.validation:
        raise UserError(
            f"--split validation: {folder.path} held no examples out (data.validation is 0); "
            "give --split train or test, or data.validation=N"
        )


def _load_data(folder: RunFolder, facts: DataFacts, config: Config, split: str, overridden: bool) -> Data:
    """The data of a config that has the split; raises if they are those of training and have changed since."""
    same = config.data == folder.read_config().data
    config = _without_start(config)
    wanted = config if same else _update_data(config, pad=0, mirror=False)  # which other data may not take
    if split == "test":  # the real one, which training did not look at
        wanted = _update_data(wanted, validation=0)
    poses = DATASETS[config.data.name].takes("problem") and config.data.problem != "examples"
    if overridden and poses and facts.problem.name in TARGET_KINDS:
        # Other targets are read as those of the run, whatever they look like.
        wanted = _update_data(wanted, problem=facts.problem.name)
    data = load_data(wanted, only="test" if split == "test" and not same else None)
    if same:
        now = data.fingerprint if wanted == config else load_data(config).fingerprint
        if now != facts.fingerprint:
            raise UserError(
                f"{folder.path} was trained on other data than {data.name} is now: checksum "
                f"{facts.fingerprint} there, {now} now; bring back the data it was trained on"
            )
    return data


def _without_start(config: Config) -> Config:
    """Inputs are preprocessed as in training: where a run started may be gone."""
    return _update_data(config, normalize="none") if config.data.normalize == "init" else config


def _update_data(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=keys)})


def _check_shape(folder: RunFolder, facts: DataFacts, data: Data, examples: Split, split: str) -> None:
    if data.seen is not None:
        facts.check(data.seen, data.name)
    if not len(examples):
        raise UserError(f"{data.name} has no {split} examples to evaluate on")
    if tuple(examples.shape) != facts.shape:
        raise UserError(
            f"{data.name} has examples of shape {tuple(examples.shape)}, but {folder.path} was trained on "
            f"{facts.shape}: give examples of that shape (data.resize and data.crop scale images in files)"
        )


def _check_like_training(folder: RunFolder, facts: DataFacts, data: Data, examples: Split, split: str) -> None:
    if data.problem.name != facts.problem.name:
        raise UserError(f"{data.name} is {data.problem.name}, but {folder.path} was trained for {facts.problem.name}")
    classes, known = class_names(data.problem), class_names(facts.problem)
    if classes != known[: len(classes)]:
        raise UserError(
            f"the classes of {data.name} are {', '.join(classes)}; those that {folder.path} was trained on are "
            f"{', '.join(known)}: give data with the same classes in the same order"
        )
    facts.problem.check_targets(examples.targets, f"{data.name}: {split}")


def class_names(problem: Problem) -> tuple[str, ...]:
    """The names of the classes; an example of several is in no group of theirs."""
    return getattr(problem, "classes", problem.groups)
