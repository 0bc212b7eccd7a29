"""An experiment: a config turned into the network, the loss and the data that it names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads import data as datasets
from mheads import networks
from mheads.common import atomic_files, nested_values
from mheads.common import fingerprint as identity
from mheads.common.device import refuse_beyond_memory, resolve
from mheads.common.errors import UserError, warn
from mheads.common.progress import Silent
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.batches import Batches, BatchStream, Reader
from mheads.data.splits import TaughtSplit
from mheads.engine.interface import Engine
from mheads.engine.measure import all_answers
from mheads.losses import Loss, independent
from mheads.losses import check as promises
from mheads.problems import PROBABILITIES, are_probabilities, finds_objects, is_single_label, widened
from mheads.runs import tensorboard
from mheads.runs.folder import RunFolder
from mheads.training.build import (
    build_loss,
    build_net,
    final_loss,
    load_data,
    micro_batches,
    net_of_run,
    threads_engine,
)
from mheads.training.init_weights import donor_digest
from mheads.trees.checks.hidden_randomness_and_state import LayerError
from mheads.trees.member_scores import OWN, check_order
from mheads.trees.treenet import TreeNet


@dataclass(frozen=True)
class Experiment:
    """Everything that training needs."""

    config: Config
    net: TreeNet
    loss: Loss
    data: Data
    sample_weights: np.ndarray | None
    start: str | None = field(default=None, kw_only=True)  # a digest of the first weights, if not the config's
    groups: list[list[int]] | None = field(default=None, kw_only=True)  # the classes of specialists
    sampled: dict[str, Any] = field(
        default_factory=dict, kw_only=True
    )  # what decides the sample weights besides the config

    def engine(self) -> Engine:
        return threads_engine(self.config, self.net, self.loss)

    def identity(self) -> dict[str, Any]:
        """What decides the result besides the config, as plain data: see `common/fingerprint.py`."""
        return {
            "data": self.data.fingerprint,
            "network": self.net.identity,
            "loss": self._loss_identity(),
            "start": self.start or donor_digest(self.config.init),
            "sampling": self.sampled,
            "place": identity.place(self.config.model),  # where its code was: not compared, but searched again
        }

    def _loss_identity(self) -> dict[str, Any]:
        loss = self.loss
        roots = [part for part in (loss.function, loss.of, loss.schedule) if part is not None]
        found: dict[str, Any] = {"name": loss.name, "code": identity.code(*roots)}
        if modules := identity.modules(*roots):
            found["layers"] = modules
        if loss.schedule is not None:
            found["iterations"] = self.config.optim.iterations
        return found

    def specialties(self) -> list[str]:
        """A line for each specialist: which classes it learns, by name."""
        names = self.data.problem.groups
        return [f"member {m} learns {_some([names[c] for c in group])}" for m, group in enumerate(self.groups or [])]

    def loss_at(self, step: int) -> Loss:
        """The loss of a step. It depends on the step alone, so that resumed runs and ranks get the same bits.

        A loss that changes over training has all of `optim.iterations` for it, as the rate has, after pretraining.
        """
        start = self.config.pretrain
        if step < start:
            return independent(self.loss.of)
        return self.loss.at(step - start, self.config.optim.iterations, self.net.num_members)

    @property
    def evaluated_on(self) -> str:
        """Which split `data.test` is."""
        return "test" if self.data.held_out is None else "validation"

    def batches(self, engine: Engine) -> Batches:
        """The stream that training reads from."""
        return self.stream()

    def stream(self, inputs: range | None = None) -> BatchStream:
        optim = self.config.optim
        rows = optim.batch_size * optim.accumulate
        return BatchStream(self.data, self.config.seed, rows, self.net.num_members, self.sample_weights, inputs)


def _some(names: Sequence[str]) -> str:
    """Names, the first twenty of them if there are many."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def build(config: Config, data: Data | None = None) -> Experiment:
    """The experiment of a config, on its data or these. Refuses what does not fit together; writes nothing."""
    resolve(config.device)
    loss = build_loss(config)
    net = build_net(config)
    refuse_beyond_memory(3 * net.num_bytes(), f"weights, gradients and momentum of {net.num_members:,} members")
    return assemble(config, net, loss, load_data(config) if data is None else data)


def assemble(
    config: Config,
    net: TreeNet,
    loss: Loss,
    data: Data,
    *,
    given: Any = None,
    clustered: dict[str, Any] | None = None,
    answers: Any = None,
) -> Experiment:
    """The experiment made of these parts, if they fit each other.

    `given` are the sample weights [M, N] of `sampling: array`; `clustered` is what `cluster_classes` found, if it was
    asked; `answers` [N, C] are the teacher's, where they are not in the file of `teacher.answers`.
    """
    if config.log.tensorboard:
        tensorboard.require()
    if not len(data.test):
        raise UserError(f"{data.name} has no test examples to evaluate on; give some, or data.validation=N")
    data, sampled = _taught(config, data, answers)
    few = np.arange(min(2, len(data.train)))
    batch = Reader(data.train, data.preprocess, few)()
    inputs = batch.network_inputs(net.dtype)
    try:
        if data.seen is not None and data.seen.kind == "tokens":
            inputs = inputs.clone()
            inputs[0, -1] = int(data.seen.high)  # that the network knows
        outputs = net.probe(inputs, batch.side_inputs())
    except LayerError as error:
        if loss.name == "scored" and isinstance(error.__cause__, TypeError | LookupError | AttributeError):
            # With a score the last layer gives a dict, which no later operation can take.
            raise UserError(f"{error}; it goes on with what its last layer gives. For loss scored, {OWN}") from error
        if inputs.dim() == 4 and inputs.shape[1] == 1 and error.shapes == [tuple(inputs.shape)]:
            hint = "examples [N, H, W] are taken as grey images [N, 1, H, W]; if they are sequences [N, C, T], begin"
            raise UserError(f"{error} ({hint} with a layer that gives x.squeeze(1))") from error
        if inputs.is_floating_point():
            raise
        hint = f"{data.name} holds {data.seen}; integers are tokens, and numbers are given as float32"
        raise UserError(f"{error} ({hint})") from error
    check_order(outputs, net.network_name)
    if config.optim.batch_size == 1 and net.batch_statistics_layers():
        _probe_alone(net, data)
    if nested_values.num_rows(outputs) != batch.num_rows:
        raise UserError(
            f"{net.network_name} gives {nested_values.num_rows(outputs)} rows of outputs for {len(batch)} examples "
            f"with {batch.num_rows} targets: give one row per target"
        )
    data = replace(data, problem=widened(data.problem, outputs, net.network_name))
    if loss.of_scores and hasattr(data.problem, "of_scores"):
        data = replace(data, problem=replace(data.problem, of_scores=True))  # type: ignore[type-var]
    data.problem.check_output(outputs, net.network_name, data.name)
    if is_single_label(data.problem) and are_probabilities(data.problem.answer(outputs)):
        warn(f"{net.network_name} gives {PROBABILITIES}")
    loss.check(net.num_members, config.sampling.name)
    each = loss.each_batch or not loss.whole_batch
    parts = micro_batches(config, net, loss) * (1 if each else config.optim.accumulate)
    if (loss.whole_batch or loss.of_whole_batch) and parts > 1:
        why = " (loss.normalize=wins counts over them)" if config.loss.whole_batch else ""
        asked = config.engine.micro_batches
        remedies = [] if asked in ("auto", 1) else [f"engine.micro_batches=1 (it is {asked})"]
        remedies += [] if each else [f"optim.accumulate=1 (it is {config.optim.accumulate})"]
        who = f"the loss of one member, of = {loss.of_name}," if loss.of_whole_batch else loss.name
        raise UserError(
            f"{who} looks at whole batches{why}, but a {'batch' if each else 'step'} is cut into {parts} parts: use "
            f"{' and '.join(remedies)}"
        )
    loss = final_loss(loss, data, config)
    sample_weights, groups, decided_by = _sample(config, net.num_members, data, given, clustered)
    sampled |= decided_by
    if loss.averaged and data.weights is not None:
        raise UserError(f"{loss.name} averages the members and cannot take weights on examples: leave weights out")
    iterations = config.optim.iterations
    last = loss.at(iterations - 1, iterations, net.num_members)  # it may begin by teaching all alike
    weighted = sample_weights is not None or data.weights is not None
    gradients = promises.check(last, outputs, batch.targets, net.num_members, weighted)
    if all(torch.allclose(g, g[:1], rtol=1e-5) for g in gradients):  # the loss does not tell members apart
        for a, b in net.identical_members():
            same_sample_weights = sample_weights is None or np.array_equal(sample_weights[a], sample_weights[b])
            if same_sample_weights and not net.parted_by_dropout(a, b) and not net.parted_by_freezing(a, b):
                raise _identical(net, loss, a, b)
    sample_weights = datasets.multiply_weights(sample_weights, data.weights, net.num_members)
    return Experiment(config, net, loss, data, sample_weights, groups=groups, sampled=sampled)


def _probe_alone(net: TreeNet, data: Data) -> None:
    """Refuses batches of one example where a layer's statistics would be of one value; those of images are of many."""
    batch = Reader(data.train, data.preprocess, np.arange(1))()
    try:
        net.probe(batch.network_inputs(net.dtype), batch.side_inputs())
    except UserError as error:
        raise UserError(
            f"{error}; of a batch of one example it has no statistics: use a larger optim.batch_size, or a "
            "normalisation without batch statistics (GroupNorm)"
        ) from error


def _taught(config: Config, data: Data, given: Any) -> tuple[Data, dict[str, Any]]:
    """The data with what a teacher answers to the training examples, if there is one, and a digest of that."""
    path = config.teacher.answers
    if path is None:
        return data, {}
    if isinstance(path, Path):
        given, where = datasets.read_answers(path), str(path)
    elif given is None:
        raise UserError("teacher.answers = array is for fit, which is given one: give teacher.answers=FILE")
    else:
        where = "teacher"
    found = datasets.check_answers(given, data, where)
    digest = identity.weights({"": torch.from_numpy(found)})
    return replace(data, train=TaughtSplit(data.train, found)), {f"the answers of {where}": digest}


def _sample(
    config: Config, members: int, data: Data, given: Any, clustered: dict[str, Any] | None
) -> tuple[np.ndarray | None, list[list[int]] | None, dict[str, Any]]:
    """The sample weights [M, N], the classes of specialists, and what decides them besides the config."""
    sampling, classes = config.sampling, data.problem.groups
    if sampling.entry.by_class and finds_objects(data.problem):
        raise UserError(
            f"sampling = {sampling.name} deals out examples by their class, and an image has objects of several: use "
            "full, bagging or subset, or say with sampling.name=file who learns from which image"
        )
    if sampling.entry.by_class and len(classes) < 2:
        raise UserError(
            f"sampling = {sampling.name} deals out examples by their class, and {data.problem.name} has none to deal "
            "out: use full, bagging or subset, or say with sampling.name=file who learns from which example"
        )
    groups: list[list[int]] | None = None
    sampled: dict[str, Any] = {}
    options = sampling.options
    where = str(options.get("path", "sampling"))
    if sampling.entry.from_run:
        found = clustered or cluster_classes(config)
        groups = _numbered(found["groups"], classes, options["generalist"], data.name)
        sampled = {f"the weights of {options['generalist']}": found["weights"], "the groups of classes": groups}
    elif sampling.entry.by_class:
        dealt = options["groups"] == "random"
        groups = datasets.deal(config.seed, members, len(classes)) if dealt else options["groups"]
    elif "path" in options:
        given = datasets.read_sample_weights(options["path"])
    elif sampling.name == "array" and given is None:
        raise UserError("sampling = array is for fit, which is given one: give sampling.name=file and sampling.path")
    given = datasets.select_training_rows(given, data.rows, members, data.given)
    sample_weights = datasets.draw_sample_weights(
        sampling.name,
        seed=config.seed,
        members=members,
        labels=data.problem.group(torch.as_tensor(data.train.targets)).numpy(),
        num_classes=len(classes),
        groups=groups,
        given=given,
        where=where,
        **{key: value for key, value in options.items() if key != "groups"},
    )
    if given is not None and sample_weights is not None:
        sampled = {f"the sample weights of {where}": identity.weights({"": torch.from_numpy(sample_weights)})}
    return sample_weights, groups, sampled


def cluster_classes(config: Config) -> dict[str, Any]:
    """Groups of classes, by name, that the run `sampling.generalist` takes for each other, and a digest of its weights.

    It answers the examples that its training evaluated on: those that it held out, or else its test set.
    """
    path = config.sampling.options["generalist"]
    folder, said = RunFolder(path), f"sampling.generalist = {path}"
    folder.require()
    there, facts = folder.read_config(), folder.read_data()
    if not is_single_label(facts.problem):
        raise UserError(f"{said} learned {facts.problem.name}: give a run that tells classes apart")
    if there.data.name not in datasets.DATASETS:
        raise UserError(
            f"{said} was trained from Python on arrays, and does not keep them: give its class "
            "probabilities to mheads.data.confusable, and the groups that it returns to sampling.groups"
        )
    same = (there.model, there.model_args) == (config.model, config.model_args)  # which the user has named
    if not networks.is_ours(there.model, there.model_args) and not same:
        theirs, ours = (
            f"{one.model} with model_args = {one.model_args!r}" if there.model == config.model else one.model
            for one in (there, config)
        )
        raise UserError(
            f"{said} names code of its own, {theirs}: only the model of this run, {ours}, "
            "is trusted. Give a run of it, or of a built-in network"
        )
    data = load_data(there)
    if data.fingerprint != facts.fingerprint:
        raise UserError(
            f"{said} was trained on other data than {data.name} is now: checksum {facts.fingerprint} "
            f"there, {data.fingerprint} now; bring back the data that it was trained on"
        )
    net = net_of_run(folder, there, Silent().warn, trust=same)
    folder.load_weights(net, Silent().warn, final=True)
    here = there.model_copy(update={"device": config.device, "engine": config.engine})
    with closing(threads_engine(here, net)) as engine:
        answers, _, _ = all_answers(engine, data.test, facts.inputs, facts.problem)
    groups = datasets.confusable(facts.problem.mean(answers.double()), config.members, config.seed)
    names = facts.problem.classes
    return {"groups": [[names[c] for c in group] for group in groups], "weights": atomic_files.digest(folder.model)}


def _numbered(groups: Sequence[Sequence[str]], classes: Sequence[str], run: Path | None, data: str) -> list[list[int]]:
    known = {name for group in groups for name in group}
    if known != set(classes):
        odd = sorted(known ^ set(classes))
        raise UserError(
            f"sampling.generalist = {run} was trained on other classes than those of {data}: {odd[0]!r} is not in both "
            f"({len(odd)} such classes); give a run of the same classes"
        )
    return [sorted(classes.index(name) for name in group) for group in groups]


def _identical(net: TreeNet, loss: Loss, a: int, b: int) -> UserError:
    remedy = "sampling=bagging, dropout, or loss.name=mcl"
    if net.init == "same":
        return UserError(
            f"init=same with {loss.name} would keep the members identical for ever: every one gets the same gradient "
            f"from the same weights. Use init=random, {remedy}"
        )
    return UserError(
        f"members {a} and {b} start with the same weights, and {loss.name} would keep them identical for ever: every "
        f"one gets the same gradient. Does {net.network_name} seed torch itself, load weights or fill in constants? "
        f"Let it draw its weights, or use {remedy}"
    )
