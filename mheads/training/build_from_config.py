"""Builds the parts of an experiment from a config: network, loss, data and engine."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mheads import networks
from mheads.common import fingerprint, nested_values, safe_yaml
from mheads.common.check_precision import PRECISIONS, reason_against
from mheads.common.device import default_workers, resolve
from mheads.common.errors import UserError, describe_error, did_you_mean, warn
from mheads.common.nested_values import Value
from mheads.config.schema import Config
from mheads.data import Data
from mheads.data.catalog import load_section
from mheads.engine.engine_options import EngineOptions
from mheads.engine.micro_batches import auto_micro_batches
from mheads.engine.stacked_stages import all_small, siblings_to_stack, stack_threads
from mheads.engine.threads import ThreadsEngine, available_cores
from mheads.losses import LOSSES, Loss
from mheads.losses.distillation import mix_in_teacher
from mheads.runs.folder import RunFolder
from mheads.training.init_weights import load_init
from mheads.trees import member_scores
from mheads.trees.member_scores import with_scores
from mheads.trees.treenet import TreeNet

START_ROWS = 10_000  # examples on which the loss at the start is measured


def make_network_factory(config: Config, as_partial: bool = False) -> Callable[[], nn.Module]:
    """The function that makes the network of a config. With `as_partial` its identity is that of a partial of its
    arguments, as `fit` takes one."""
    function = networks.resolve(config.model)
    try:
        inspect.signature(function).bind(**config.model_args)
    except ValueError:
        pass  # written in C: it has no signature to look at
    except TypeError as error:
        raise UserError(
            f"model_args = {config.model_args!r} do not fit {config.model}: {_misfit(function, config, error)}",
            hint="'model_args={}' takes those of the recipe away" if config.model_args else None,
        ) from error

    def make() -> nn.Module:
        try:
            network = function(**config.model_args)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            called = f"model {config.model!r} with model_args = {config.model_args!r}"
            raise UserError(f"{called} failed with {describe_error(error)}") from error
        if not isinstance(network, nn.Module):
            raise UserError(f"model {config.model!r} gives {network!r}, not a torch.nn.Module")
        return network

    make.__name__ = config.model
    # fingerprint.py describes what is wrapped; of a run from a config, its config describes the arguments
    make.__wrapped__ = partial(function, **config.model_args) if as_partial else function  # type: ignore[attr-defined]
    make.in_config = config.model, config.model_args  # type: ignore[attr-defined]
    return with_scores(make) if config.loss.has_scores else make


def _misfit(function: Callable[..., Any], config: Config, error: TypeError) -> str:
    """Why model_args do not fit: an argument that there is not, or what Python says."""
    parameters = inspect.signature(function).parameters
    unknown = next((key for key in config.model_args if key not in parameters), None)
    if unknown is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return str(error)
    return f"it has no argument {unknown!r}{did_you_mean(unknown, [*parameters])}; it has {', '.join(parameters)}"


def make_tree(config: Config, **options: Any) -> TreeNet:
    """The tree of a config."""
    return TreeNet(make_network_factory(config), config.members, config.split, **options)


def build_net(config: Config, only: Collection[str] | None = None) -> TreeNet:
    """The tree of a config with its first weights, or `only` some stages."""
    init = config.init if config.init == "same" else "random"
    # The next seed, as in surgery.py: a new member must not start where one of the same number there did.
    seed = config.seed + (None in (config.init_members or ()))
    net = make_tree(config, seed=seed, init=init, only=only)
    if config.init not in ("random", "same"):
        net.history.origin = load_init(net, config.init, config.init_map, config.init_members)
    elif config.init_map or config.init_members is not None:
        raise UserError(f"init_map and init_members are about weights to start from, but init is {config.init}")
    net.freeze(config.freeze)
    return net


def build_net_of_run(
    folder: RunFolder,
    config: Config,
    warn: Callable[[str], None],
    network_factory: Callable[[], nn.Module] | None = None,
    trust: bool = False,
) -> TreeNet:
    """The tree of a run, without its weights. Code that only the folder names is run only if it is trusted.

    Warns if the code has changed since: that may be harmless, so it is not an error.
    """
    if network_factory is None:
        if config.model.startswith("__main__:"):
            raise UserError(
                f"{folder.path} was trained on {config.model}, which only that script knows: "
                "give its factory, mheads.load(run, factory). For the command line, put the network into a file of its "
                "own, such as my_nets.py, import it from there, and train again"
            )
        if not networks.is_ours(config.model, config.model_args):
            where = folder.read_identity().get("place")
            if not trust:
                raise UserError(
                    f"{folder.path} names code of its own: {config.model} with model_args = {config.model_args!r}, "
                    f"found in {where} when it was trained. None of it was run. If you trust it, give --trust "
                    "(trust=True in Python), or the factory itself: mheads.load(run, factory)"
                )
            _add_to_path(where, config.model)
        network_factory = make_network_factory(
            config, as_partial=fingerprint.is_partial(folder.read_identity()["network"]["code"])
        )
    elif config.loss.has_scores:
        network_factory = with_scores(network_factory)
    identity = folder.read_identity()
    drawn = identity["network"]
    try:
        net = TreeNet(network_factory, config.members, tree=config.split, seed=int(drawn["seed"]), init=drawn["init"])
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from error
    if lines := fingerprint.differences(identity, {**identity, "network": net.identity}):
        warn("\n  ".join([f"the network is not the one that {folder.path} was trained with:", *lines]))
    return net


def _add_to_path(place: str | None, name: str) -> None:
    """Puts the folder that held a run's code when it was trained on the path, unless the module is found without it."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
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
    """The loss of a config, if it fits the members and the sampling."""
    loss, base_loss = _make_loss(config), config.loss.base_loss
    if base_loss is not None and not loss.takes_base_loss:
        raise UserError(
            f"loss.base_loss = {safe_yaml.short(base_loss)}: {loss.name} has a fixed base loss; leave loss.base_loss "
            "out"
        )
    loss = loss if base_loss is None else replace(loss, base_loss=base_loss)
    loss = loss.with_scores(config.loss.scores) if config.loss.scores else loss
    loss.check(config.members, config.sampling.name)
    return loss


def adapt_loss(loss: Loss, data: Data, config: Config, outputs: Value = None) -> Loss:
    """The loss as it is on these data, with what the teacher answers if there is one.

    `outputs` [b, ...] are some of a network.
    """
    loss, teacher = loss.on(data.problem), config.teacher
    if teacher.answers is None:
        return _at_its_start(loss, data, outputs)
    if not loss.takes_base_loss:
        raise UserError(
            f"teacher: {loss.name} has a fixed base loss, which cannot learn the answers of a teacher; use "
            "independent, score_averaged, mcl, relaxed, evolving, annealed or scored"
        )
    assert loss.base_loss_function is not None  # that of the problem, if no other
    mixed = mix_in_teacher(loss.base_loss_function, teacher.weight, teacher.temperature)
    return _at_its_start(replace(loss, base_loss=mixed), data, outputs)


def _at_its_start(loss: Loss, data: Data, outputs: Value) -> Loss:
    """The loss with options in units of the loss at the start: the mean of that of outputs of 0, which depends on the
    targets alone, so that resumed runs and ranks get the same."""
    if loss.in_units_of is None:
        return loss
    rows = np.arange(min(START_ROWS, len(data.train)))
    targets = data.train.read_targets(rows, None).targets
    count = nested_values.num_rows(targets)
    zeros = nested_values.map_leaves(lambda t: t.new_zeros(1, count, *t.shape[1:]), outputs)
    base_loss = loss.base_loss_function
    assert base_loss is not None  # that of the problem, if no other
    start = base_loss(member_scores.answer_of(zeros), targets).double().mean().item()
    if not 0 < start < math.inf:
        raise UserError(
            f"loss.relative: outputs of 0 have the loss {start:g} on these data, and temperatures cannot be multiples "
            "of that; leave loss.relative out",
            key="loss.relative",
        )
    scaled = loss.in_units_of(float(f"{start:.6g}"))  # of which other CPUs have the same digits
    return replace(loss, function=scaled.function, schedule=scaled.schedule, in_units_of=None)


def _make_loss(config: Config) -> Loss:
    name, options, args = config.loss.name, config.loss.options, config.loss.args
    if name in LOSSES:
        if args:
            keys = ", ".join(f"loss.{key}" for key in options)
            raise UserError(
                f"loss.args = {args!r}: they are the arguments of a loss of your own, and {name} is not one; it takes "
                f"{keys or 'none'}"
            )
        return LOSSES[name](**options)
    function = networks.import_factory(name, "loss")
    if _is_plain_loss(function, args):
        return Loss(name, partial(function, **args), options=args)
    try:
        loss = function(**args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise UserError(f"loss {name!r} with loss.args = {args!r} failed with {describe_error(error)}") from error
    if not isinstance(loss, Loss):
        raise UserError(
            f"loss.name = {name!r} gives a {type(loss).__name__}, not an mheads.losses.Loss; name a function "
            "that makes one, or one of (outputs, y[, sample_weights, ties]) that returns the losses [M, B]"
        )
    return loss


def _is_plain_loss(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    """Whether this function is itself a loss of (outputs, y[, sample_weights[, ties]]), instead of making one."""

    def takes(count: int) -> bool:
        try:
            inspect.signature(function).bind(*[None] * count, **args)
        except TypeError:
            return False
        return True

    try:
        return not takes(0) and any(takes(count) for count in (2, 3, 4))
    except ValueError:  # not written in Python
        return False


def load_data(config: Config, only: str | None = None) -> Data:
    """The data of a config; `only` test where nothing is to be learned from them."""
    if config.data.normalize != "init":
        return load_section(config.data, only)
    source = RunFolder(Path(config.init))
    if config.init in ("random", "same") or not source.exists():
        raise UserError(
            f"data.normalize=init takes the normalisation of the source run, but init is {config.init}: give "
            "init=RUN, the folder of a run"
        )
    data = load_section(config.data.model_copy(update={"normalize": "none"}), only)
    facts = source.read_data()
    same = facts.shape == tuple(data.train.shape)
    return replace(data, preprocess=facts.preprocess if same else facts.preprocess.by_channel())


def make_engine(config: Config, net: TreeNet, loss: Loss | None = None) -> ThreadsEngine:
    """The engine of one process; to train, it is given the loss."""
    return ThreadsEngine(net, make_engine_options(config, net, resolve(config.device), available_cores(), loss))


def make_engine_options(
    config: Config, net: TreeNet, device: torch.device, cores: int, loss: Loss | None = None
) -> EngineOptions:
    """What the config says of the engine, every `auto` decided; to train, it is given the loss."""
    workers, precision = config.engine.workers, config.precision
    if loss is None and (reason := reason_against(precision, device)):
        warn(f"this run computes in {precision}, and here in float32, so that its outputs differ a little: {reason}")
        precision = "float32"
    rows, stacked = rows_of_micro_batch(config, net, loss), find_stacks(config, net, loss)
    return EngineOptions(
        workers=default_workers(device, cores) if workers == "auto" else workers,
        micro_batches=count_micro_batches(config, net, loss),
        seed=config.seed,
        accumulate=config.optim.accumulate,
        device=device,
        precision=PRECISIONS[precision],
        cores=planned_cores(config),
        stacked=stacked,
        stack_threads=stack_threads(net, stacked, rows, planned_cores(config)),
        views=tuple(config.eval.views),
        pieces=count_pieces_asked(config, net, loss),
    )


def find_stacks(config: Config, net: TreeNet, loss: Loss | None = None) -> tuple[tuple[str, ...], ...]:
    """The names of the stages that run as one; with `auto` none where some are frozen, since siblings may differ."""
    if config.freeze and config.engine.stack == "auto":
        return ()
    rows, batch_norm = rows_of_micro_batch(config, net, loss), config.engine.stack_batch_norm == "auto"
    groups = siblings_to_stack(net, rows, config.engine.stack, batch_norm)
    return tuple(tuple(leaf.name for leaf in leaves) for leaves in groups)


def rows_of_micro_batch(config: Config, net: TreeNet, loss: Loss | None = None) -> int:
    return -(-config.optim.batch_size // count_micro_batches(config, net, loss))


def needs_whole_batches(config: Config, loss: Loss | None) -> bool:
    return config.loss.whole_batch or (loss is not None and (loss.whole_batch or loss.base_loss_of_whole_batch))


def count_micro_batches(config: Config, net: TreeNet, loss: Loss | None = None) -> int:
    """How many micro-batches a batch is cut into; a loss of the user's own may need whole batches."""
    asked = config.engine.micro_batches
    whole = needs_whole_batches(config, loss)
    if asked == "auto" and (whole or (config.engine.stack != "never" and all_small(net, config.optim.batch_size))):
        return 1
    return auto_micro_batches(config.optim.batch_size, net, planned_cores(config)) if asked == "auto" else asked


def count_pieces_asked(config: Config, net: TreeNet, loss: Loss | None = None) -> int:
    """Into how many pieces the stages that members share are to cut each micro-batch."""
    asked, micro_batches = config.engine.shared_micro_batches, count_micro_batches(config, net, loss)
    if asked == "auto":
        return 1
    if asked % micro_batches:
        of = "engine.micro_batches=auto makes" if config.engine.micro_batches == "auto" else "engine.micro_batches is"
        raise UserError(
            f"engine.shared_micro_batches is {asked}, and {of} {micro_batches}: give a multiple, since shared stages "
            "cut each of these micro-batches into as many pieces",
            key="engine.shared_micro_batches",
        )
    return asked // micro_batches


def planned_cores(config: Config) -> int:
    """`engine.cores`; training decides an `auto` when it begins a run, and nothing else depends on it."""
    return 2 if config.engine.cores == "auto" else config.engine.cores
