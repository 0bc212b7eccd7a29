"""An experiment: a config turned into the network, the loss and the data that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mheads import data as datasets
from mheads import models, values
from mheads.config import Config
from mheads.data import Data
from mheads.data.batch import Batches, BatchStream
from mheads.device import default_workers, refuse_beyond_memory, resolve
from mheads.engine.threads import ThreadsEngine, auto_micro_batches, available_cores
from mheads.errors import UserError, named
from mheads.losses import LOSSES, Loss
from mheads.runs import RunFolder
from mheads.tree import TreeNet


@dataclass(frozen=True)
class Experiment:
    """Everything that training needs."""

    config: Config
    net: TreeNet
    loss: Loss
    data: Data
    prior: np.ndarray | None

    def engine(self) -> ThreadsEngine:
        device = resolve(self.config.device)
        workers = self.config.engine.workers
        if workers == "auto":
            workers = default_workers(device, available_cores())
        return ThreadsEngine(self.net, workers, micro_batches(self.config, self.net), self.config.seed, device)

    def batches(self, engine: ThreadsEngine) -> Batches:
        """The stream that training reads from."""
        return self.stream()

    def stream(self, inputs: range | None = None) -> BatchStream:
        optim = self.config.optim
        rows = optim.batch_size * optim.accumulate
        return BatchStream(self.data, self.config.seed, rows, self.net.num_members, self.prior, inputs)


def micro_batches(config: Config, net: TreeNet) -> int:
    """Of one batch."""
    asked = config.engine.micro_batches
    return auto_micro_batches(config.optim.batch_size, net) if asked == "auto" else asked


def build(config: Config) -> Experiment:
    """The experiment of a config. Raises UserError for whatever in it does not fit together; writes nothing."""
    resolve(config.device)
    net = build_net(config)
    refuse_beyond_memory(3 * net.num_bytes(), f"weights, gradients and momentum of {net.num_members:,} members")
    loss = build_loss(config)
    data = load_data(config)
    return assemble(config, net, loss, data)


def assemble(config: Config, net: TreeNet, loss: Loss, data: Data) -> Experiment:
    """Checks that the parts fit each other."""
    if not len(data.test):
        raise UserError(f"{data.name} has no test examples to evaluate on; give some, or data.validation=N")
    example = data.preprocess(data.train.read(np.arange(min(2, len(data.train))), None), net.dtype)
    output = values.leaves(net.probe(example))[0]
    if output.dim() != 2 or output.shape[1] != len(data.classes):
        raise UserError(
            f"{net.network_name} gives outputs of shape {tuple(output.shape[1:])}, but {data.name} has "
            f"{len(data.classes)} classes; a network gives one score a class (model_args.classes={len(data.classes)}?)"
        )
    sampling = config.sampling
    prior = datasets.priors(
        sampling.name,
        seed=config.seed,
        members=net.num_members,
        labels=data.train.labels,
        num_classes=len(data.classes),
        fraction=sampling.fraction,
        groups=sampling.groups if sampling.name == "specialists" else None,
    )
    if loss.averaged and prior is not None:
        raise UserError(f"sampling is {sampling.name}, but {loss.name} averages the members: use sampling=full")
    everybody_wins = loss.winners is not None and loss.winners >= net.num_members
    same_gradient = prior is None and not net.has_dropout() and (loss.separable or loss.averaged or everybody_wins)
    if "same" in (config.init, net.init) and net.num_members > 1 and same_gradient:
        raise UserError(
            f"init=same with {loss.name} would keep the members identical for ever: every one gets the same gradient "
            "from the same weights. Use init=random, sampling=bagging, dropout, or loss.name=mcl"
        )
    return Experiment(config, net, loss, data, prior)


def factory(config: Config) -> Callable[[], nn.Module]:
    function = models.resolve(config.model)
    try:
        inspect.signature(function).bind(**config.model_args)
    except ValueError:
        pass  # written in C: it has no signature to look at
    except TypeError as error:
        raise UserError(f"model_args = {config.model_args!r} do not fit {config.model}: {error}") from error

    def make() -> nn.Module:
        try:
            network = function(**config.model_args)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            called = f"model {config.model!r} with model_args = {config.model_args!r}"
            raise UserError(f"{called} failed with {named(error)}") from error
        if not isinstance(network, nn.Module):
            raise UserError(f"model {config.model!r} gives {network!r}, not a torch.nn.Module")
        return network

    make.__name__ = config.model
    return make


def build_net(config: Config, weights: bool = True, only: Collection[str] | None = None) -> TreeNet:
    """The tree of a config with its first weights, or `only` some stages; `weights=False` leaves another run alone."""
    if config.init in ("random", "same") or not weights:
        init = config.init if config.init == "same" else "random"
        return TreeNet(factory(config), config.members, config.split, seed=config.seed, init=init, only=only)
    donor = RunFolder(Path(config.init))
    if not donor.exists():
        raise UserError(f"init = {config.init!r}: give random, same, or the folder of a finished run")
    source = build_net(donor.read_config(), weights=False)
    if source.num_members not in (1, config.members):
        raise UserError(
            f"init = {config.init!r} has {source.num_members} members, this run {config.members}: "
            "start from as many members, or from one to be copied to all"
        )
    donor.load_weights(source)
    net = TreeNet(factory(config), config.members, config.split, seed=config.seed, only=only)
    net.copy_weights(source)
    if source.num_members == 1:
        net.init = "same"
    return net


def build_loss(config: Config) -> Loss:
    options = config.loss
    if options.name == "mcl":
        return LOSSES["mcl"](k=options.k, ce_weight=options.ce_weight)
    if options.name == "prob_averaged":
        return LOSSES["prob_averaged"](stable=options.stable)
    if options.name in LOSSES:
        return LOSSES[options.name]()
    try:
        loss = models.import_factory(options.name, "loss")(**options.args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        called = f"loss {options.name!r} with loss.args = {options.args!r}"
        raise UserError(f"{called} failed with {named(error)}") from error
    if not isinstance(loss, Loss):
        raise UserError(f"loss.name = {options.name!r} gives a {type(loss).__name__}, not an mheads.losses.Loss")
    return loss


def load_data(config: Config) -> Data:
    options = config.data.model_dump(exclude={"reader"})
    return datasets.load(options.pop("name"), **options)


def input_dtype(net: TreeNet) -> torch.dtype:
    return net.dtype
