"""Results as plain data: what every problem's result has in common, and how it is written to JSON and read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from mheads.common.schemas import Count, Number, check

TOGETHER = ("ensemble_mean", "ensemble_scored")  # what the members answer together


def by_predictor(values: Sequence[float], scored: bool = False) -> dict[str, Any]:
    """Values of the members, of the ensemble mean, if `scored` of the scored answer, and of the Oracle, by name."""
    *first, oracle = map(float, values)
    members, together = first[: -1 - scored], first[-1 - scored :]
    single = sum(members) / len(members)
    return {"members": members, "single": single, **dict(zip(TOGETHER, together, strict=False)), "oracle": oracle}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measures of an ensemble: numbers in lists and dicts that go to JSON and back.

    Problems say what is measured, and add fields. `oracle` is that of the best member on each example. A member owns
    the examples on which it has the lowest loss. What is not finite is NaN here and null in JSON.
    """

    problem: ClassVar[str]  # its name
    forms: ClassVar[tuple[str, str]] = (".4g", ".4g")  # of measures of the ensemble, and of those of single members
    unit: ClassVar[str] = ""  # of these measures, before the number of examples
    members: list[Number]  # of each
    single: Number  # the mean of these
    ensemble_mean: Number  # of the mean of the members' answers
    oracle: Number
    ownership: list[list[Count]]  # [M][groups] examples of each group that each member owns
    examples: Count
    ensemble_scored: Number | None = None  # of the mean weighted by the members' scores, if they have some

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> Self:
        """The result where nothing was evaluated; `further` are the fields that only this problem has."""
        measures = by_predictor([math.nan] * (members + 2))
        return cls(**measures, ownership=[[0] * groups] * members, examples=0, **further)

    def to_dict(self) -> dict[str, Any]:
        """The fields ready for JSON; numbers that are not finite become null."""

        def plain(name: str) -> Any:
            if isinstance(value := getattr(self, name), str):
                return value
            # + 0 turns -0.0 to 0.0
            return _map_numbers(lambda x: self.round_number(name, x) + 0 if math.isfinite(x) else None, value)

        names = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return {name: plain(name) for name in names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`, up to its rounding; other keys are ignored, and an older file may lack some.

        Raises ValueError if they are not such values.
        """
        known = {name: values[name] for name in (f.name for f in fields(cls)) if name in values}
        known = _map_numbers(lambda x: math.nan if x is None else x, known)
        check(cls, known)
        return cls(**known)

    def check_sizes(self, members: int, groups: int) -> None:
        """Raises ValueError unless all measures are of so many members, and ownership of so many groups."""

        def each(value: Any, name: str) -> None:
            for key, part in value.items():
                if isinstance(part, dict):
                    each(part, f"{name}{key}.")
                elif key in ("members", "ownership", "disagreement_pairs") and len(part) != members:
                    raise ValueError(f"{name}{key} has {len(part)} rows, and the run {members} members")

        each(vars(self), "")
        for name, width in (("ownership", groups), ("disagreement_pairs", members)):
            for row in getattr(self, name, ()):
                if len(row) != width:
                    raise ValueError(f"{name} has a row of {len(row)} numbers, where {width} should be")

    def round_number(self, name: str, x: float) -> float:
        """A number of a field, rounded for JSON to six digits."""
        return x if isinstance(x, int) else float(f"{x:.6g}")

    def headline(self) -> dict[str, str]:
        """The few measures that a line of progress shows, by name."""
        form, of_members = self.forms
        together = {"Ensemble-Mean": self.ensemble_mean, "Ensemble-Scored": self.ensemble_scored, "Oracle": self.oracle}
        texts = {name: format(value, form) for name, value in together.items() if value is not None}
        return {**texts, "members": " ".join(format(value, of_members) for value in self.members)}

    def __str__(self) -> str:
        """The headline; the fields have all measures."""
        if not self.examples:
            return "not evaluated"
        measured = ", ".join(f"{name} {text}" for name, text in self.headline().items())
        return f"{measured} ({self.unit}{self.examples:,} examples)"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows."""
        printer.text(str(self))


class PercentResult(Result):
    """A result whose measures are in percent."""

    forms, unit = (".2f", ".1f"), "% of "

    def round_number(self, name: str, x: float) -> float:
        return round(x, 4)


def _map_numbers(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to every number in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _map_numbers(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_numbers(function, item) for item in value]
    return function(value)
