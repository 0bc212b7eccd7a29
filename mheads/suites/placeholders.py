"""Words that the rows of a suite may hold, and what they stand for with one network: <M>, <binary>, 1..M-1, splits."""

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


class Words:
    """What words stand for with the network and the members of a config.

    `each` takes lists, ranges such as 1..M-1, `splits` (every layer that the network can be split at) and `first two
    splits`. Texts take the names of `each`, `<M>` (members), `<copies>` (member 0 for each member), `<binary>` (a
    balanced binary tree over the first splits) and, left as it is here, `<run:ROW>`, the folder of another row's run.
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

    def values(self, given: list[Any] | str) -> list[Any]:
        """What a name of `each` stands for, one after the other."""
        if isinstance(given, list):
            return given
        if given == "splits":
            return self.splits
        if given == "first two splits":
            return self.splits[:2]
        return self._range(given)

    def _range(self, text: str) -> list[int]:
        found = RANGE.match(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a list, a range such as 1..M-1, splits or first two splits")
        ends = [(self.members if found[i] == "M" else int(found[i])) + int(found[i + 1] or 0) for i in (1, 3)]
        first, last = ends
        if found[1] == "M" and found[3] != "M":  # M..1 falls, however few members there are
            return list(range(first, last - 1, -1))
        return list(range(first, last + 1))

    def names(self, text: str) -> list[str]:
        """The names that one with a range in it stands for: mcl_k<1..M>."""
        found = re.search(r"<([^<>]*\.\.[^<>]*)>", text)
        if found is None:
            return [text]
        return [text.replace(found[0], str(value)) for value in self._range(found[1])]

    def filler(self, chosen: dict[str, str]) -> Callable[[str], str]:
        """Fills words into a text, with these values for the names of `each`."""

        def word(found: re.Match[str]) -> str:
            name = found[1]
            if name in chosen:
                return chosen[name]
            if name == "M":
                return str(self.members)
            if name == "copies":
                return json.dumps([0] * self.members)
            if name == "binary":
                return self._binary()
            if name.startswith("run:") or ".." in name:
                return found[0]
            known = ", ".join(f"<{known}>" for known in (*chosen, "M", "copies", "binary", "run:ROW"))
            raise ValueError(f"{found[0]} stands for nothing; there are {known}")

        return lambda text: re.sub(r"<([^<>]+)>", word, text)

    def _binary(self) -> str:
        """A balanced binary tree over the first splits, as `split` takes it."""
        if self.members < 3 or len(self.splits) < 2:
            return LACKING
        return yaml.safe_dump(binary(self.members, self.splits), default_flow_style=True, width=float("inf")).strip()

    @staticmethod
    def lacking(tree: dict[str, Any]) -> bool:
        return LACKING in str(tree)


def binary(members: int, splits: list[str]) -> Any:
    """Splits in two, and each half again at the next layer, as far as there are members and layers."""
    if members == 1 or not splits:
        return members
    halves = [binary(half, splits[1:]) for half in (members // 2, members - members // 2)]
    return {splits[0]: 2 if halves == [1, 1] else halves}
