"""Draws the networks of a tree: a factory builds each, or each is a copy of a network that is built already."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mheads import networks
from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.common.modules import avoid_overruns
from mheads.networks.member_scaling import OwnCopy

Function = Callable[[], nn.Module] | nn.Module


class NetworkFactory:
    """Only the seed and the member decide the weights of a network; `init="same"` draws member 0 for all.

    A pickle leaves out a function that cannot be pickled.
    """

    def __init__(self, function: Function, seed: int, init: str) -> None:
        self.function, self.seed, self.init = function, seed, init

    def draw(self, member: int) -> nn.Module:
        """The network that the stages of a member are made of."""
        with seeds.seed_generators(self.seed, "weights", 0 if self.init == "same" else member):
            check_factory(self.function)
            network = copy.deepcopy(self.function) if isinstance(self.function, nn.Module) else self.function()
        check_network(network)
        for module in network.modules():
            if isinstance(module, OwnCopy):
                module.assign(member)
        return avoid_overruns(network)

    def describe(self, network: nn.Module) -> tuple[str, str, dict[str, Any]]:
        """The name of the network in messages, and its name and arguments in a config.

        A lambda, a local function or a built network can only be named, not imported again: mheads.load asks for it.
        """
        name = getattr(self.function, "__name__", type(network).__name__)
        if (in_config := networks.name_factory(self.function)) is not None:
            return name, *in_config
        inner = inspect.unwrap(self.function)
        qualified = getattr(inner, "__qualname__", f"<{name}>")
        module = getattr(inner, "__module__", "__main__") if "<" not in qualified else "__main__"
        return name, f"{module}:{qualified}", {}

    @property
    def is_lost(self) -> bool:
        return self.function is _raise_lost

    def __deepcopy__(self, memo: dict[int, Any]) -> NetworkFactory:
        return self

    def __reduce__(self) -> tuple[type[NetworkFactory], tuple[Any, ...]]:
        try:
            pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return NetworkFactory, (_raise_lost, self.seed, self.init)
        return NetworkFactory, (self.function, self.seed, self.init)


def _raise_lost() -> nn.Module:
    raise UserError("this tree was pickled without its factory, which only its first process knows: build it anew")


def check_factory(function: Function) -> None:
    """Raises an error for a factory that cannot be called without arguments, such as a class with some."""
    if isinstance(function, nn.Module):
        return
    if not callable(function):
        raise UserError(
            f"a tree is made of a network or of a function that builds one, not of a {type(function).__name__}: "
            "mheads.evaluate([a, b], test) measures networks that are trained already"
        )
    try:
        inspect.signature(function, follow_wrapped=False).bind()
    except ValueError:
        pass  # written in C: it has no signature to look at
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise UserError(
            f"the factory {name} cannot be called without arguments ({error}): give lambda: {name}(...)"
        ) from error


def check_network(network: Any) -> None:
    """Raises an error for what a factory gives if it is no network of real weights whose layers are in sight."""
    if not isinstance(network, nn.Module):
        raise UserError(f"the factory gives a {type(network).__name__}, not an nn.Module: return the network")
    if isinstance(network, torch.jit.ScriptModule):
        raise UserError("the factory gives a scripted network, whose layers are hidden: return the module itself")
    for name, parameter in network.named_parameters():
        if is_lazy(parameter):
            raise UserError(f"{name} has no size yet: give the layer its number of inputs instead of a lazy one")
        if parameter.is_complex():
            raise UserError(
                f"{name} is complex, and weights are real numbers here: keep its real and imaginary parts in one "
                "real parameter [..., 2], and use torch.view_as_complex(parameter) in the forward"
            )
