"""Placeholders in the rows and claims of a suite, filled in for one network: <M>, <binary>, 1..M-1, splits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import yaml

from mheads.config.schema import Config

RANGE = re.compile(r"^(M|\d+)(-\d+)?\.\.(M|\d+)(-\d+)?$")
LACKING = "<lacking>"  # stands where this network has nothing to fill in


class Placeholders:
    """What placeholders stand for with the network and the members of a config.

    `each` takes lists, ranges such as 1..M-1, `splits` (every layer that the network can be split at) and `first two
    splits`. Texts take the names of `each`, `<M>` (members), `<copies>` (member 0 for each member), `<binary>` (a
    balanced binary tree over the first splits) and, left as they are here, `<seed>` and `<run:ROW>`, the folder of
    another row's run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.members = config.members

    @cached_property
    def splits(self) -> list[str]:
        """The layers that the network can be split at, in order: with parameters, and others with some below."""
        from mheads.training.build_from_config import make_network_factory
        from mheads.trees.treenet import TreeNet

        layers = TreeNet(make_network_factory(self._config), 1, only=()).layers
        return [layer.name for layer in layers if layer.has_parameters or layer.ends][:-1]

    def values(self, each: list[Any] | str) -> list[Any]:
        """What a name of `each` stands for, one after the other."""
        if isinstance(each, list):
            return each
        if each in ("splits", "first two splits"):
            return self.splits if each == "splits" else self.splits[:2]
        return self._range(each)

    def _range(self, text: str) -> list[int]:
        match = RANGE.match(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list, a range such as 1..M-1, splits or first two splits")
        first, last = ((self.members if match[i] == "M" else int(match[i])) + int(match[i + 1] or 0) for i in (1, 3))
        falls = match[1] == "M" and match[3] != "M"  # M..1 falls, however few members there are
        return list(range(first, last - 1, -1) if falls else range(first, last + 1))

    def names(self, text: str) -> list[str]:
        """The names that one with a range in it stands for: mcl_k<1..M>."""
        match = re.search(r"<([^<>]*\.\.[^<>]*)>", text)
        return [text] if match is None else [text.replace(match[0], str(value)) for value in self._range(match[1])]

    def filler(self, chosen: dict[str, str]) -> Callable[[str], str]:
        """Fills placeholders into a text, with these values for the names of `each`."""
        known = {**chosen, "M": str(self.members), "copies": json.dumps([0] * self.members)}

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name in known:
                return known[name]
            if name == "binary":
                return self._binary()
            if name.startswith("run:") or name == "seed" or ".." in name:
                return match[0]
            names = ", ".join(f"<{name}>" for name in (*known, "binary", "seed", "run:ROW"))
            raise ValueError(f"{match[0]} stands for nothing; there are {names}")

        return lambda text: re.sub(r"<([^<>]+)>", fill, text)

    def _binary(self) -> str:
        """A balanced binary tree over the first splits, as `split` takes it."""
        if self.members < 3 or len(self.splits) < 2:
            return LACKING
        tree = binary_tree(self.members, self.splits)
        return yaml.safe_dump(tree, default_flow_style=True, width=float("inf")).strip()


def binary_tree(members: int, splits: list[str]) -> Any:
    """Splits in two, and each half again at the next layer, as far as there are members and layers."""
    if members == 1 or not splits:
        return members
    halves = [binary_tree(half, splits[1:]) for half in (members // 2, members - members // 2)]
    return {splits[0]: 2 if halves == [1, 1] else halves}
