"""A suite for one recipe: placeholders (<M>, <binary>, 1..M-1, splits) are filled in, and rows and claims that the
network lacks are left out."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml
from pydantic import ValidationError

from mheads.common import safe_yaml
from mheads.common.errors import UserError, did_you_mean
from mheads.common.number_words import count
from mheads.config.schema import Config
from mheads.suites.claims import Claim
from mheads.suites.metric_names import check_metric
from mheads.suites.suite import Suite, SuiteError, SuiteRow, explain_value

RANGE = re.compile(r"^(M|\d+)(-\d+)?\.\.(M|\d+)(-\d+)?$")
LACKING = "<lacking>"  # stands where this network has nothing to fill in


@dataclass(frozen=True)
class ExpandedSuite:
    """The rows, claims and figures of the paper of a suite for one recipe."""

    suite: Suite
    rows: list[SuiteRow]
    claims: list[Claim]
    paper: dict[str, dict[str, Any]]

    @cached_property
    def names(self) -> list[str]:
        return [row.name for row in self.rows]

    def row(self, name: str) -> SuiteRow:
        if name not in self.names:
            hint = did_you_mean(name, self.names)
            raise UserError(f"{self.suite.name} has no row {name!r}{hint}; it has {', '.join(self.names)}")
        return self.rows[self.names.index(name)]


def expand(suite: Suite, recipe: str, config: Config) -> ExpandedSuite:
    """A suite for a recipe by its short name, whose config (with the suite's keys) is this."""
    placeholders = Placeholders(config)
    rows = list(_fill(suite, suite.rows, placeholders))
    _check_rows(suite, rows, f"{recipe} with {count(placeholders.members, 'member')}")
    names = [row.name for row in rows]
    claims = []
    for claim in _fill(suite, suite.claims, placeholders):
        _check_claim(suite, claim, names)
        if claim.is_about(recipe) and (kept := _without_lacking(suite, claim, names)):
            claims.append(kept)
    return ExpandedSuite(suite, rows, claims, suite.paper.get(recipe, {}))


def _fill(suite: Suite, parts: list[Any], placeholders: Placeholders) -> Iterator[Any]:
    """Rows or claims, each as often as `each` says, with placeholders filled in; without those that a network lacks."""
    for part in parts:
        try:
            for chosen in itertools.product(*map(placeholders.values, part.each.values())):
                fill = placeholders.filler(dict(zip(part.each, map(_as_yaml, chosen), strict=True)))
                tree = _map_text(part.model_dump(by_alias=True, exclude={"each"}), fill)
                if tree.get("order") is not None:
                    tree["order"] = [name for item in tree["order"] for name in placeholders.names(item)]
                    if len(tree["order"]) < 2:  # with so few members there is nothing to put in order
                        continue
                filled = type(part).model_validate(tree)
                if LACKING not in str(tree):
                    yield filled
        except ValueError as error:
            place = f"row {part.name!r}" if isinstance(part, SuiteRow) else "a claim"
            message = str(error)
            if isinstance(error, ValidationError):
                message = "; ".join(map(explain_value, error.errors()))
            raise SuiteError(suite.source, f"{place}: {message}") from error


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(part, change) for part in value]
    return {key: _map_text(part, change) for key, part in value.items()} if isinstance(value, dict) else value


def _check_rows(suite: Suite, rows: list[SuiteRow], where: str) -> None:
    if not rows:
        raise SuiteError(
            suite.source,
            f"no row is left on {where}, since `each` gives no value: give another recipe, or more members",
        )
    names = [row.name for row in rows]
    if suite.independent is not None and suite.independent not in names:
        raise SuiteError(
            suite.source, f"independent: there is no row {suite.independent!r}; there are {', '.join(names)}"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise SuiteError(suite.source, f"there are two rows {twice[0]!r}; give each a name of its own")
    choosing = {row.name: row.best_of for row in rows if row.best_of}
    for row in rows:
        if nested := [name for name in row.best_of if name in choosing]:
            others = ", ".join(choosing[nested[0]])
            text = f"row {row.name!r}: best_of: {nested[0]!r} is the best of several runs itself; name these: {others}"
            raise SuiteError(suite.source, text)
        if unknown := [name for name in row.best_of if name not in names]:
            hint = did_you_mean(unknown[0], names)
            raise SuiteError(suite.source, f"row {row.name!r}: best_of: there is no row {unknown[0]!r}{hint}")
        for metric in (*row.metrics, *row.metrics.values()):
            check_metric(metric, f"{suite.source}: row {row.name!r}: metrics")


def _check_claim(suite: Suite, claim: Claim, names: list[str]) -> None:
    """Raises an error for a claim of a row that no network has, or of a metric that nothing has."""
    where = f"claim {safe_yaml.short(claim.say)}" if claim.say else "a claim"
    for key, row, metric in claim.places():
        if row not in names and not _may_have(suite, row):
            hint = did_you_mean(row, names)
            raise SuiteError(
                suite.source,
                f"{where}: {key} names {row!r}{hint}, and there is no such row; there are {', '.join(names)}",
            )
        check_metric(metric, f"{suite.source}: {where}: {'by' if key == 'order' else key}")


def _without_lacking(suite: Suite, claim: Claim, names: list[str]) -> Claim | None:
    """What a claim says without rows that need more members. Those of other layers stay: they may be misspelt."""
    lacking = [row for _, row, _ in claim.places() if row not in names and _may_have(suite, row, layers=False)]
    if claim.order is None:
        return None if lacking else claim
    kept = [row for row in claim.order if row not in lacking]
    return claim.model_copy(update={"order": kept}) if len(kept) > 1 else None


def _may_have(suite: Suite, name: str, layers: bool = True) -> bool:
    """Whether a network with more members, or with `layers` one with other layers, has a row of this name."""

    def pattern(each: list[Any] | str) -> str:
        if isinstance(each, list):
            return "|".join(re.escape(str(value)) for value in each)
        return r"\d+" if ".." in each else ".+" if layers else "(?!)"

    def row_pattern(row: SuiteRow) -> str:
        parts = re.split(r"<([^<>]+)>", row.name)  # text and placeholders in turn
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = [f"(?:{pattern(row.each.get(part, '..'))})" for part in parts[1::2]]
        return "".join(parts)

    return any(re.fullmatch(row_pattern(row), name) for row in suite.rows)


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
