"""An experiment: a config turned into the network, the loss and the data that it names."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mheads import data as datasets
from mheads import files, identity, models, values
from mheads.config import Config
from mheads.data import Data
from mheads.data.batch import Batches, BatchStream
from mheads.device import default_workers, resolve
from mheads.engine.threads import ThreadsEngine, auto_micro_batches, available_cores
from mheads.errors import UserError
from mheads.losses import LOSSES, Loss
from mheads.runs import DataFacts, RunFolder
from mheads.tree import TreeNet, parse, whole_spec


@dataclass(frozen=True)
class Experiment:
    """Everything that training needs."""

    config: Config
    net: TreeNet
    loss: Loss
    data: Data
    prior: np.ndarray | None
    start: str | None = field(default=None, kw_only=True)  # a digest of the first weights, if the config decides others

    def engine(self) -> ThreadsEngine:
        return threads_engine(self.config, self.net)

    def identity(self) -> dict[str, Any]:
        """What decides the result beside the config, as plain data: see `identity.py`."""
        given = self.config.init not in ("random", "same")
        return {
            "data": self.data.fingerprint,
            "network": self.net.identity,
            "loss": {"name": self.loss.name, "code": identity.code(self.loss.function)},
            "start": files.digest(donor_of(self.config).model) if given else self.start,
            "place": identity.place(self.config.model),  # where its code was: not compared, but looked in again
        }

    @property
    def evaluated_on(self) -> str:
        """Which split `data.test` is."""
        return "validation" if self.config.data.validation else "test"

    def batches(self, engine: ThreadsEngine) -> Batches:
        """The stream that training reads from."""
        return self.stream()

    def stream(self, inputs: range | None = None) -> BatchStream:
        optim = self.config.optim
        rows = optim.batch_size * optim.accumulate
        return BatchStream(self.data, self.config.seed, rows, self.net.num_members, self.prior, inputs)


def threads_engine(config: Config, net: TreeNet) -> ThreadsEngine:
    """The engine of one process."""
    device = resolve(config.device)
    workers = config.engine.workers
    if workers == "auto":
        workers = default_workers(device, available_cores())
    return ThreadsEngine(net, workers, micro_batches(config, net), config.seed, device)


def micro_batches(config: Config, net: TreeNet) -> int:
    """Of one batch."""
    asked = config.engine.micro_batches
    return auto_micro_batches(config.optim.batch_size, net) if asked == "auto" else asked


def build(config: Config) -> Experiment:
    """The experiment of a config. Raises UserError for whatever in it does not fit together; writes nothing."""
    resolve(config.device)
    net = build_net(config)
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
    except TypeError as error:
        raise UserError(f"model_args = {config.model_args!r} do not fit {config.model}: {error}") from error

    def make() -> nn.Module:
        try:
            network = function(**config.model_args)
        except (ValueError, TypeError, RuntimeError) as error:
            called = f"model {config.model!r} with model_args = {config.model_args!r}"
            raise UserError(f"{called} failed with {type(error).__name__}: {error}") from error
        if not isinstance(network, nn.Module):
            raise UserError(f"model {config.model!r} gives {network!r}, not a torch.nn.Module")
        return network

    make.__name__ = config.model
    make.__wrapped__ = function  # type: ignore[attr-defined]  # what the network is: see identity.py
    return make


def build_net(config: Config, only: Collection[str] | None = None) -> TreeNet:
    """The tree of a config with its first weights, or `only` some stages."""
    if config.init in ("random", "same"):
        return TreeNet(factory(config), config.members, config.split, seed=config.seed, init=config.init, only=only)
    donor = donor_of(config)
    there = donor.read_config()
    if there.members not in (1, config.members):
        raise UserError(
            f"init = {config.init!r} has {there.members} members, this run {config.members}: "
            "start from as many members, or from one to be copied to all"
        )
    weights = donor.final_weights().tensors
    net = TreeNet(factory(config), config.members, config.split, seed=config.seed, only=only)
    try:
        # The donor's tree over the layers of this network: nothing that the donor names is built.
        tree = parse(whole_spec(there.members, there.split), net.layers, there.members, net.network_name)
        net.take_weights(tree, weights)
    except UserError as error:
        raise UserError(f"init = {config.init!r}: {error}") from error
    if there.members == 1:
        net.init = "same"
    return net


def donor_of(config: Config) -> RunFolder:
    """The run that `init` names."""
    donor = RunFolder(Path(config.init))
    if not donor.exists():
        raise UserError(f"init = {config.init!r}: give random, same, or the folder of a finished run")
    return donor


def donor_differences(config: Config, data: Data) -> list[str]:
    """How the inputs and classes of the run that `init` names differ from those here."""
    if config.init in ("random", "same"):
        return []
    there, here = donor_of(config).read_data(), DataFacts.of(data)
    pairs = {
        "the shape of an example": (there.shape, here.shape),
        "the number of classes": (len(there.classes), len(here.classes)),
        **{f"class {c}": names for c, names in enumerate(zip(there.classes, here.classes, strict=False))},
        "data.scale": (there.preprocess.scale, here.preprocess.scale),
        "the mean that is subtracted": (_said(there.preprocess.mean), _said(here.preprocess.mean)),
        "the deviation that is divided by": (_said(there.preprocess.std), _said(here.preprocess.std)),
    }
    lines = [f"{what}: {old} there, {new} here" for what, (old, new) in pairs.items() if old != new]
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"]


def _said(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.double().mean():.4g} on average ({identity.weights({'': tensor})})"


def net_of_run(
    folder: RunFolder, config: Config, network_factory: Callable[[], nn.Module] | None = None, trust: bool = False
) -> TreeNet:
    """The tree of a run, without its weights. Code that only the folder names is run if it is trusted."""
    if network_factory is None:
        if config.model.startswith("__main__:"):
            raise UserError(
                f"{folder.path} was trained on {config.model}, which only that script knows: "
                "give its factory, mheads.load(run, factory)"
            )
        if config.model not in models.MODELS:
            where = folder.read_identity().get("place")
            if not trust:
                raise UserError(
                    f"{folder.path} names code of its own: {config.model} with model_args = {config.model_args!r}, "
                    f"found in {where} when it was trained. None of it was run. If you trust it, give --trust "
                    "(trust=True in Python), or the factory itself: mheads.load(run, factory)"
                )
            _look_in(where, config.model)
        network_factory = factory(config)
    return TreeNet(network_factory, config.members, config.split)


def _look_in(place: str | None, name: str) -> None:
    """Where the code of a run was when it was trained is on the path, unless its module is found without."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    package = name.partition(":")[0].partition(".")[0]
    if package in sys.modules or importlib.util.find_spec(package) is not None or place is None:
        return
    if not Path(place).is_dir():
        raise UserError(
            f"model {name!r}: there is no module {package} here, and {place}, where it was found when the run was "
            "trained, is gone: set PYTHONPATH to the folder that it is in now"
        )
    sys.path.append(place)


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
    except (ValueError, TypeError) as error:
        raise UserError(f"loss {options.name!r} with loss.args = {options.args!r} failed: {error}") from error
    if not isinstance(loss, Loss):
        raise UserError(f"loss.name = {options.name!r} gives a {type(loss).__name__}, not an mheads.losses.Loss")
    return loss


def load_data(config: Config) -> Data:
    options = config.data.model_dump(exclude={"reader"})
    return datasets.load(options.pop("name"), **options)


def input_dtype(net: TreeNet) -> torch.dtype:
    return net.dtype
