"""An experiment: the network, the loss and the data of a config, and who learns from which examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mheads import data as datasets
from mheads.common import fingerprint
from mheads.common.check_precision import check_precision
from mheads.common.device import refuse_beyond_memory, resolve
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.batches import Batches, BatchStream
from mheads.data.splits import TaughtSplit
from mheads.engine.interface import Engine
from mheads.losses import Loss, independent
from mheads.problems import widen_classes
from mheads.runs import tensorboard
from mheads.training import check_experiment as checks
from mheads.training.build_from_config import adapt_loss, build_loss, build_net, load_data, make_engine
from mheads.training.build_sample_weights import build_sample_weights
from mheads.training.init_weights import digest_init
from mheads.training.measure_whitening import measure_covariance, whiten_first_layers
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
    digests: dict[str, Any] = field(default_factory=dict, kw_only=True)  # of arrays that the config does not decide

    def make_engine(self) -> Engine:
        return make_engine(self.config, self.net, self.loss)

    def identity(self) -> dict[str, Any]:
        """What decides the result besides the config, as plain data: see `common/fingerprint.py`."""
        return {
            "data": self.data.fingerprint,
            "network": self.net.identity,
            "loss": self._loss_identity(),
            "start": self.start or digest_init(self.config.init),
            "sampling": self.digests,
            "place": fingerprint.place(self.config.model),  # where its code was: not compared, but searched again
        }

    def _loss_identity(self) -> dict[str, Any]:
        loss = self.loss
        roots = [part for part in (loss.function, loss.base_loss, loss.schedule) if part is not None]
        identity: dict[str, Any] = {"name": loss.name, "code": fingerprint.code(*roots)}
        if modules := fingerprint.modules(*roots):
            identity["layers"] = modules
        if loss.schedule is not None:
            identity["iterations"] = self.config.optim.iterations
        return identity

    def describe_specialists(self) -> list[str]:
        """A line for each specialist: which classes it learns, by name."""
        names = self.data.problem.groups
        return [f"member {m} learns {_shorten([names[c] for c in group])}" for m, group in enumerate(self.groups or [])]

    def loss_at(self, step: int) -> Loss:
        """The loss of a step. It depends on the step alone, so that resumed runs and ranks get the same bits.

        A loss that changes over training has all of `optim.iterations` for it, as the learning rate has, after
        pretraining.
        """
        start = self.config.pretrain
        if step < start:
            return independent(self.loss.base_loss)
        return self.loss.at(step - start, self.config.optim.iterations, self.net.num_members)

    @property
    def evaluated_on(self) -> str:
        """Which split `data.test` is."""
        return "test" if self.data.held_out is None else "validation"

    def batches(self, engine: Engine) -> Batches:
        """The stream that training reads from."""
        return self.stream()

    def stream(self, inputs: range | None = None) -> BatchStream:
        optim, members = self.config.optim, self.net.num_members
        rows, alternating = optim.batch_size * optim.accumulate, self.config.data.mirror == "alternating"
        return BatchStream(self.data, self.config.seed, rows, members, self.sample_weights, inputs, alternating)


def _shorten(names: Sequence[str]) -> str:
    """Names, the first twenty of them if there are many."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def build_experiment(config: Config, data: Data | None = None) -> Experiment:
    """The experiment of a config, on its data or these. Raises if parts do not fit each other; writes nothing."""
    resolve(config.device)
    loss = build_loss(config)
    net = build_net(config)
    refuse_beyond_memory(3 * net.num_bytes(), f"weights, gradients and momentum of {net.num_members:,} members")
    return assemble_experiment(config, net, loss, load_data(config) if data is None else data)


def assemble_experiment(
    config: Config,
    net: TreeNet,
    loss: Loss,
    data: Data,
    *,
    array: Any = None,
    clusters: dict[str, Any] | None = None,
    answers: Any = None,
) -> Experiment:
    """The experiment made of these parts; raises if they do not fit each other.

    `array` are the sample weights [M, N] of `sampling: array`; `clusters` is what `cluster_classes` returned, if it was
    called; `answers` [N, C] are the teacher's, where they are not in the file of `teacher.answers`.
    """
    check_precision(config.precision, resolve(config.device), net.dtype)
    if config.log.tensorboard:
        tensorboard.require()
    checks.check_test_examples(data)
    whiten_first_layers(net, measure_covariance(net, data))
    data, digests = _add_teacher(config, data, answers)
    batch, outputs = checks.probe_network(net, loss, data)
    checks.check_single_examples(config, net, data)
    checks.check_rows(net, batch, outputs)
    problem = widen_classes(data.problem, outputs, net.network_name)
    data = replace(data, problem=problem.taught_by(loss.of_scores, loss.learns_variances))
    checks.check_outputs(net, data, outputs)
    checks.warn_of_absent_classes(config, data)
    checks.check_views(config, tuple(data.train.shape), data.problem, data.side)
    loss.check(net.num_members, config.sampling.name)
    checks.check_whole_batches(config, net, loss)
    loss = adapt_loss(loss, data, config, outputs)
    checks.warn_of_scale_of_targets(config, loss, data)
    checks.warn_of_untaught_outputs(net, loss, data.problem, outputs)
    sample_weights, groups, more = build_sample_weights(config, net.num_members, data, array, clusters)
    checks.check_weights_on_examples(loss, data)
    checks.check_gradients(config, net, loss, data, sample_weights, batch, outputs)
    sample_weights = datasets.multiply_weights(sample_weights, data.weights, net.num_members)
    return Experiment(config, net, loss, data, sample_weights, groups=groups, digests=digests | more)


def _add_teacher(config: Config, data: Data, answers: Any) -> tuple[Data, dict[str, Any]]:
    """The data with what a teacher answers to the training examples, if there is one, and a digest of that."""
    path = config.teacher.answers
    if path is None:
        return data, {}
    where = "teacher"
    if isinstance(path, Path):
        answers, where = datasets.read_answers(path), str(path)
    elif answers is None:
        raise UserError(
            "teacher.answers = array is only for fit in Python, which takes the array itself: give teacher.answers=FILE"
        )
    answers = datasets.check_answers(answers, data, where)
    digest = fingerprint.weights({"": torch.from_numpy(answers)})
    taught = TaughtSplit(data.train, answers)  # type: ignore[arg-type]  # it is a source
    return replace(data, train=taught), {f"the answers of {where}": digest}
