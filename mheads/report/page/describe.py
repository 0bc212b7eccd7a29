"""What a run is, in words and in the terms of its config."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from mheads.common.errors import UserError
from mheads.common.number_words import count, duration
from mheads.config import read as configs
from mheads.config import schema
from mheads.config.schema import Config
from mheads.data.catalog import names_examples
from mheads.losses import LOSSES
from mheads.runs.read_run import Record

NUMBERS = ("", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def sentence(record: Record) -> str:
    """What was trained, how and on what, in one sentence."""
    config = record.config
    if config.members == 1:
        who = f"One network, {config.model}"
    else:
        number = NUMBERS[config.members] if config.members < len(NUMBERS) else f"{config.members:,}"
        who = f"{number} {config.model} networks {describe_sharing(config)}"
    alone = config.members == 1 and config.loss.name == "independent"
    return f"{who}, trained on {record.data.name}{'' if alone else f' {describe_loss(config)}'}."


def describe_sharing(config: Config) -> str:
    if not config.is_split:
        return "with nothing in common"
    named = isinstance(config.split, str)
    return f"that share their layers up to {config.split}" if named else "in a tree of shared layers"


def describe_loss(config: Config) -> str:
    loss = config.loss
    described = LOSSES[loss.name](**loss.options).description if loss.name in LOSSES else ""
    return described or f"with the loss {loss.name}"


def loss_text(config: Config) -> str:
    """The loss, its options, and what its module says of it."""
    loss = config.loss
    options = ", ".join(f"{key}={as_override(value)}" for key, value in loss.told.items())
    about = (sys.modules[LOSSES[loss.name].__module__].__doc__ or "").split("\n")[0] if loss.name in LOSSES else ""
    return f"{loss.name}{f' ({options})' if options else ''}{f'. {about}' if about else ''}"


def facts(record: Record) -> list[tuple[str, str]]:
    """The settings that people ask for first."""
    config, optim, data = record.config, record.config.optim, record.data
    shape = " × ".join(map(str, data.shape))
    schedule = " ".join([optim.schedule.name, *(f"{k}={as_override(v)}" for k, v in optim.schedule.options.items())])
    classes = getattr(data.problem, "classes", ())
    of_classes = f" of {count(len(classes), 'class', 'es')}" if classes else ""
    placement = [("Placement", as_override(config.placement))] if config.placement != "default" else []
    return [
        ("Network", config.model + (f" {as_override(config.model_args)}" if config.model_args else "")),
        ("Members", f"{config.members}" + (f", split {as_override(config.split)}" if config.is_split else "")),
        ("Loss", loss_text(config)),
        ("Data", f"{data.name}, {shape}, {data.problem.name}{of_classes}"),
        ("Sampling", f"{config.sampling.name}; initial weights: {config.init}"),
        (
            "Training",
            f"{count(optim.iterations, 'iteration')} of {count(optim.batch_size * optim.accumulate, 'example')}"
            + (f", after {config.pretrain:,} of the independent loss" if config.pretrain else "")
            + f"; {optim.name}, learning rate {optim.lr:g} ({schedule}), weight decay {optim.weight_decay:g}",
        ),
        ("Seed", str(config.seed)),
        *placement,
    ]


def command(config: Config) -> str:
    """The command that trains this again: the nearest recipe and what is different, else the config as a file."""
    if not names_examples(config.data):
        return "mheads.fit(...) in Python, on the same arrays: config.yaml holds the settings"
    best: list[str] | None = None
    for recipe in configs.recipes():
        try:
            keys = schema.differing(configs.load(recipe), config)
            values = schema.flatten(config)
            words = [recipe, *(f"{key}={as_override(values[key])}" for key in keys)]
            if (best is None or len(words) < len(best)) and configs.load(words[0], words[1:]) == config:
                best = words
        except UserError:  # these keys cannot be given so
            continue
    return shlex.join(["mheads", "train", *(best or ["config.yaml"])])


def as_override(value: Any) -> str:
    """A value as it is given on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def state(record: Record) -> str:
    """How far an unfinished run is; nothing for one that is finished."""
    total = record.config.pretrain + record.config.optim.iterations
    return "" if record.finished else f"Not finished: iteration {record.iteration:,} of {total:,}{record.evaluated}"


def versions(record: Record) -> str:
    """The versions that a finished run was trained with."""
    known = (record.result or {}).get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in known.items())


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else duration(value)


def megabytes(size: float) -> str:
    """Bytes in MB, with two digits at least."""
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2g} MB"
