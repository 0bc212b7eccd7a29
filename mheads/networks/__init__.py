"""The networks by name: each a plain `nn.Sequential` of named layers, examples -> outputs [B, C]."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from torch import nn

from mheads.common import safe_yaml
from mheads.common.errors import UserError, did_you_mean
from mheads.networks.airbench import airbench
from mheads.networks.caffenet import caffenet
from mheads.networks.cifar10_quick import cifar10_quick
from mheads.networks.digits import digits
from mheads.networks.fast_rcnn import fast_rcnn
from mheads.networks.mlp import mlp
from mheads.networks.nin import nin_cifar100, nin_ilsvrc
from mheads.networks.pixels import pixels
from mheads.networks.resnet import resnet18, resnet20, resnet56, wide_resnet
from mheads.networks.text import text
from mheads.networks.vit import vit

# Each network, and the shape of its inputs where the factory's defaults decide it.
_WITH_SHAPES: tuple[tuple[Callable[..., nn.Module], tuple[int, ...] | None], ...] = (
    (cifar10_quick, (3, 32, 32)),
    (nin_cifar100, (3, 32, 32)),
    (nin_ilsvrc, (3, 224, 224)),
    (caffenet, (3, 227, 227)),
    (digits, (1, 8, 8)),
    (resnet20, (3, 32, 32)),
    (resnet56, (3, 32, 32)),
    (resnet18, (3, 224, 224)),
    (wide_resnet, (3, 32, 32)),
    (airbench, (3, 32, 32)),
    (vit, (3, 32, 32)),
    (mlp, None),
    (text, (64,)),
    (pixels, (1, 16, 16)),
    (fast_rcnn, None),
)
NETWORKS = {make.__name__: make for make, _ in _WITH_SHAPES}
INPUT_SHAPES = {make.__name__: shape for make, shape in _WITH_SHAPES if shape is not None}

_PATHS = {f"{make.__module__}:{make.__qualname__}": name for name, make in NETWORKS.items()}

__all__ = ["INPUT_SHAPES", "NETWORKS", "check_name", "import_factory", "is_ours", "name_factory", "resolve"]


def is_ours(name: str, args: Mapping[str, Any]) -> bool:
    """Whether the code of a network is all ours: a run folder that names it needs no trust."""
    if name == "fast_rcnn" and "base" in args:  # which may be anybody's
        base_args = args.get("base_args")
        return is_ours(str(args["base"]), base_args if isinstance(base_args, Mapping) else {})
    return name in NETWORKS or name == "mheads.caffe.network:network"


def name_factory(factory: Any) -> tuple[str, dict[str, Any]] | None:
    """What a config calls the network that a factory makes, and its arguments; None where no name says it.

    It is a built-in network, such a one with plain arguments in a partial, or made from a config (by
    `make_network_factory`).
    """
    inner = inspect.unwrap(factory, stop=lambda outer: hasattr(outer, "in_config"))
    if hasattr(inner, "in_config"):
        name_and_args: tuple[str, dict[str, Any]] = inner.in_config
        return name_and_args
    made, args, given = (inner.func, inner.args, inner.keywords) if isinstance(inner, partial) else (inner, (), {})
    name = next((name for name, known in NETWORKS.items() if known is made), None)
    given = safe_yaml.as_plain(given)
    return (name, given) if name is not None and not args and safe_yaml.is_plain(given) else None


def check_name(name: str) -> str:
    """The name of a network as a config has it: a built-in one by its short name, whoever else's as it is."""
    name = _PATHS.get(name, name)
    if name not in NETWORKS and ":" not in name:
        raise ValueError(f"it {_unknown(name)}")
    return name


def _unknown(name: str) -> str:
    known = sorted(NETWORKS, key=lambda known: SequenceMatcher(None, name, known).ratio(), reverse=True)
    near = did_you_mean(name, known)
    return f"is not known{near}; there are {', '.join(known)}, or give one of your own as package.module:factory"


def resolve(name: str) -> Callable[..., nn.Module]:
    """The factory of a built-in network, or the user's own given as `package.module:factory`."""
    if name in NETWORKS:
        return NETWORKS[name]
    if ":" not in name:
        raise UserError(f"model {name!r} {_unknown(name)}")
    return import_factory(name, "model")


def import_factory(name: str, what: str) -> Callable[..., Any]:
    """Imports what `package.module:factory` names; `what` says in messages what that makes."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what} {name!r}: expected package.module:factory, both sides of the colon")
    if os.getcwd() not in sys.path:  # as `python -m` does: a console script would not find my_nets.py here
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            cause += f"; neither {os.getcwd()} nor the Python path has it: start in its folder, or set PYTHONPATH"
        raise UserError(f"{what} {name!r}: importing {module_name} failed with {cause}") from error
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", None) or "built in"
        raise UserError(f"{what} {name!r}: {module_name} ({file}) has no {attribute!r}")
    factory = getattr(module, attribute)
    if not callable(factory):
        kind = type(factory).__name__
        raise UserError(f"{what} {name!r}: {attribute} is of type {kind}, not a function that returns one")
    checked_factory: Callable[..., Any] = factory
    return checked_factory
