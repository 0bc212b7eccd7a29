"""An experiment: a config turned into the network, the loss and the data that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads import data as datasets
from mheads import models, seeds, values
from mheads.config import Config
from mheads.data import Data
from mheads.data.batch import Batches, BatchStream
from mheads.device import default_workers, resolve
from mheads.engine.threads import ThreadsEngine, auto_micro_batches, available_cores
from mheads.errors import UserError
from mheads.losses import LOSSES, Loss
from mheads.runs import RunFolder
from mheads.tree import TreeNet
from mheads.values import Value


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
    loss = build_loss(config)
    data = load_data(config)
    return assemble(config, net, loss, data)


def assemble(config: Config, net: TreeNet, loss: Loss, data: Data) -> Experiment:
    """Checks that the parts fit each other."""
    if not len(data.test):
        raise UserError(f"{data.name} has no test examples to evaluate on; give some, or data.validation=N")
    few = np.arange(min(2, len(data.train)))
    outputs = net.probe(data.preprocess(data.train.read(few, None), net.dtype))
    output = values.leaves(outputs)[0]
    if loss.name in LOSSES and not isinstance(outputs, Tensor):
        raise UserError(
            f"{net.network_name} gives a {type(outputs).__name__}, but loss {loss.name} takes scores [B, C] alone: "
            "let the network return these, or give a loss of your own"
        )
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
    targets = torch.as_tensor(data.train.labels[few])
    gradients = _teach(loss, outputs, targets, net.num_members)
    if all(torch.allclose(g, g[:1], rtol=1e-5) for g in gradients):  # the loss does not tell members apart
        for a, b in net.identical_members():
            same_prior = prior is None or np.array_equal(prior[a], prior[b])
            if same_prior and not net.parted_by_dropout(a, b):
                raise _identical(net, loss, a, b)
    return Experiment(config, net, loss, data, prior)


def _teach(loss: Loss, outputs: Value, targets: Tensor, members: int) -> list[Tensor]:
    """What members that give the same outputs are taught, each with its own keys to break ties: gradients [M, ...].

    This is also the first time that a loss of the user's own is called: what is wrong with it is said before a run.
    """
    rows = torch.arange(32) % len(targets)
    same = values.map_leaves(lambda t: torch.stack([t.detach()[rows]] * members), outputs)
    leaves = [t.requires_grad_() for t in values.leaves(same) if t.is_floating_point()]
    ties = torch.rand(members, len(rows), generator=seeds.generator("ties"))
    parts = [slice(m, m + 1) for m in range(members)] if loss.separable else [slice(None)]
    try:
        totals = [loss(values.map_leaves(lambda t, p=p: t[p], same), targets[rows], None, ties[p]).total for p in parts]
        found = torch.autograd.grad(sum(totals), leaves, allow_unused=True)  # type: ignore[arg-type]
    except UserError:
        raise
    except Exception as error:  # the user's function may raise anything
        shapes = [list(t.shape) for t in leaves]
        raise UserError(
            f"loss {loss.name!r} fails on outputs {shapes[0] if len(shapes) == 1 else shapes} with "
            f"{type(error).__name__}: {error}"
        ) from error
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


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
    function = models.import_factory(options.name, "loss")
    if _is_plain_loss(function, options.args):
        return Loss(options.name, partial(function, **options.args), options=options.args)
    try:
        loss = function(**options.args)
    except (ValueError, TypeError) as error:
        raise UserError(f"loss {options.name!r} with loss.args = {options.args!r} failed: {error}") from error
    if not isinstance(loss, Loss):
        raise UserError(
            f"loss.name = {options.name!r} gives a {type(loss).__name__}, not an mheads.losses.Loss; name a function "
            "that makes one, or one of (outputs, y) that returns the losses [M, B]"
        )
    return loss


def _is_plain_loss(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    """Whether this is a loss itself, a function of (outputs, y), and not one that makes it."""
    try:
        inspect.signature(function).bind(**args)
    except TypeError:
        try:
            inspect.signature(function).bind(None, None, **args)
        except TypeError:
            return False
        return True
    except ValueError:  # not written in Python
        return False
    return False


def load_data(config: Config) -> Data:
    options = config.data.model_dump(exclude={"reader"})
    return datasets.load(options.pop("name"), **options)


def input_dtype(net: TreeNet) -> torch.dtype:
    return net.dtype
