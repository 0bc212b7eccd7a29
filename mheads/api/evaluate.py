"""What is done with finished runs: evaluate them on their test set, and take them elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads.api import fit
from mheads.api.export import export
from mheads.api.run import Run
from mheads.caffe import weights as blobs
from mheads.common import nested_values
from mheads.common.atomic_files import check_place, write_atomically
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.progress import Watcher, telling
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.data import TARGET_KINDS
from mheads.data.catalog import DATASETS
from mheads.data.splits import Split
from mheads.engine.measure import all_answers, in_eval_mode, measure
from mheads.problems import Problem, finds_objects
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run, load_data, make_engine
from mheads.training.log_and_checkpoint import summary


def evaluate_run(
    path: Path,
    outputs_file: Path | None,
    watch: Watcher,
    overrides: Sequence[str] = (),
    split: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Computes the metrics of a run anew; optionally saves the outputs [M, N, C] and labels [N] behind them, and the
    weights [M, N] by the scores of the members, if they have some.

    The examples are those that training evaluated on, another `split`, or other data: `overrides` of the
    config's data keys. Inputs are preprocessed as in training.
    """
    folder = RunFolder(path)
    config = folder.read_config()
    if outputs_file is not None:
        check_place(outputs_file)
    net = build_net_of_run(folder, config, watch.warn, trust=trust)
    weights = folder.load_weights(net, watch.warn)
    with telling(watch):
        data, examples, split = load_examples_of_run(folder, overrides, split)
    kept: list[tuple[np.ndarray, list[np.ndarray]]] = []
    counted: list[np.ndarray] = []

    def keep(found: torch.Tensor, weights: torch.Tensor | None, targets: Value) -> None:
        if outputs_file is not None:
            kept.append((found.cpu().numpy(), [leaf.cpu().numpy() for leaf in nested_values.leaves(targets)]))
            counted.extend([] if weights is None else [weights.cpu().numpy()])

    with closing(make_engine(config, net)) as engine:
        result = measure(engine, examples, data.inputs, data.problem, watch, keep)
    assert result is not None  # there are examples
    if outputs_file is not None:
        arrays = {
            "outputs": np.concatenate([o for o, _ in kept], 1),
            **dict(zip(TARGETS, map(np.concatenate, zip(*(t for _, t in kept), strict=True)), strict=False)),
            "classes": np.array(_classes(data.problem)),
            **({"weights": np.concatenate(counted, 1)} if counted else {}),
        }
        write_atomically(outputs_file, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return summary(result, net, split, weights.iteration, weights.seconds)


def outputs_of(run: Run | str | Path, split: str | None = None, **data: Any) -> tuple[torch.Tensor, Value]:
    """Outputs [M, N, C] and targets of a run on its training, validation or test examples, in their order.

    By default on those that training evaluated on. `data` are other data keys than the run's: `path="other.npz"`. A run
    that `fit` trained on arrays does not keep them: `run.predict(x)` gives its outputs.
    """
    outputs, _, targets = outputs_and_weights_of(run, split, **data)
    return outputs, targets


def outputs_and_weights_of(
    run: Run | str | Path, split: str | None = None, **data: Any
) -> tuple[torch.Tensor, torch.Tensor | None, Value]:
    """As `outputs_of`, with the weights [M, N] by the scores of the members between them, if they have some."""
    run = run if isinstance(run, Run) else fit.load(run)
    overrides = [f"data.{key}={json.dumps(value, default=str)}" for key, value in data.items()]
    facts, examples, _ = load_examples_of_run(RunFolder(run.folder), overrides, split)
    with closing(make_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
        return all_answers(engine, examples, facts.inputs, facts.problem)


TARGETS = ("labels", "box_targets", "regions", "images")  # the names of what targets hold; most hold labels alone
SPLITS = ("train", "validation", "test")
DATA_KEYS = (
    *("name", "root", "path", "test_path", "validation", "resize", "crop", "limit"),
    *("regions.proposals", "regions.with_objects", "regions.strict"),
)


def load_examples_of_run(
    folder: RunFolder, overrides: Sequence[str] = (), split: str | None = None
) -> tuple[DataFacts, Split, str]:
    """What the run knows of its data, and the examples to evaluate on."""
    trained, facts = folder.read_config(), folder.read_data()
    for override in overrides:
        key = override.partition("=")[0]
        if key not in [f"data.{name}" for name in DATA_KEYS]:
            reason = "inputs are preprocessed as in training" if key.startswith("data.") else "the run is what it is"
            raise UserError(
                f"{override!r}: {reason}; other data to evaluate on is given by "
                f"{', '.join(f'data.{name}' for name in DATA_KEYS)}"
            )
    config = configs.read(folder.config, overrides)
    if config.data.name not in DATASETS:
        raise UserError(
            f"{folder.path} was trained from Python on arrays: evaluate it there, mheads.load(run).evaluate(x, y), "
            "or give other data, data.name=npz data.path=..."
        )
    if split is None:
        split = "validation" if config.data.validation else "test"
    if split not in SPLITS:
        raise UserError(f"split {split!r}: there are {', '.join(SPLITS)}")
    if split == "validation" and not config.data.validation:
        raise UserError(
            f"--split validation: {folder.path} held no examples out (data.validation is 0); "
            "give --split train or test, or data.validation=N"
        )
    held_out = config
    if split == "test":  # the real one, which training did not look at
        held_out = _update_data(config, validation=0)
    same = config.data == trained.data
    takes = DATASETS[config.data.name].takes("problem") and config.data.problem != "examples"
    if overrides and takes and facts.problem.name in TARGET_KINDS:
        # Other targets are read as those of the run, whatever they look like.
        held_out = _update_data(held_out, problem=facts.problem.name)
    if config.data.normalize == "init":  # inputs are preprocessed as in training: where it started may be gone
        config, held_out = (_update_data(one, normalize="none") for one in (config, held_out))
    data = load_data(held_out, only="test" if split == "test" and not same else None)
    before = data.fingerprint if held_out == config or not same else load_data(config).fingerprint
    if same and before != facts.fingerprint:
        raise UserError(
            f"{folder.path} was trained on other data than {data.name} is now: checksum "
            f"{facts.fingerprint} there, {before} now; bring back the data it was trained on"
        )
    if data.seen is not None:
        facts.check(data.seen, data.name)
    examples = data.train.without_augmentation() if split == "train" else data.test  # type: ignore[attr-defined]  # it is a source
    if not len(examples):
        raise UserError(f"{data.name} has no {split} examples to evaluate on")
    if tuple(examples.shape) != facts.shape:
        raise UserError(f"examples of shape {tuple(examples.shape)}, but {folder.path} was trained on {facts.shape}")
    here, there = data.problem, facts.problem
    if here.name != there.name:
        raise UserError(f"{data.name} is {here.name}, but {folder.path} was trained for {there.name}")
    classes, known = _classes(here), _classes(there)
    if classes != known[: len(classes)]:
        raise UserError(
            f"the classes of {data.name} are {', '.join(classes)}; those that {folder.path} was trained on are "
            f"{', '.join(known)}: give data with the same classes in the same order"
        )
    there.check_targets(examples.targets, f"{data.name}: {split}")
    if finds_objects(there) and finds_objects(here):
        facts = replace(facts, problem=replace(there, truths=here.truths))  # which a run does not keep
        examples = examples.with_statistics_of(there)  # type: ignore[union-attr]  # they are regions
    return facts, examples, split


def _update_data(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=keys)})


def _classes(problem: Problem) -> tuple[str, ...]:
    """The names of the classes; an example of several is in no group of theirs."""
    return getattr(problem, "classes", problem.groups)


def export_run(path: Path, file: Path, what: str, watch: Watcher, trust: bool = False) -> None:
    """Writes a run to one file that needs no mheads, and says what it takes and gives: see `api/export.py`."""
    run = fit.load(path, trust=trust, warn=watch.warn)
    if file.suffix in blobs.SUFFIXES:
        number = int(what.removeprefix("member:")) if re.fullmatch(r"member:\d+", what) else 0
        if run.net.num_members > 1 and what != f"member:{number}":
            raise UserError(
                f"--what {what}: a {file.suffix} holds the weights of one member: give --what member:0, say"
            )
        blobs.write(check_place(file), run.net.member(number))
        watch.say(f"{file}: the weights of member {number}, as Caffe keeps them")
        return
    difference = export(run, file, what)
    watch.say(f"{file}: {what}, within {difference:.1g} of the run's own answers")
