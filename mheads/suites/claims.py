"""Claims of a suite: an order of rows by a metric, or a relation of two terms. `verdicts.py` tests them on runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

UNSIGNED = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
TERM = re.compile(
    rf"^(?:(?P<factor>{UNSIGNED}) *\* *)?(?P<row>[^ *]+)\.(?P<metric>\w+)"
    rf"(?: - (?P<other_row>[^ *]+)\.(?P<other_metric>[^\W\d]\w*))?(?: *(?P<offset>[+-] *{UNSIGNED}))?$"
)
NUMBER = re.compile(rf"^[+-]?{UNSIGNED}$")

Relation = Literal["better", "no worse", "worse", "no better", "above", "below", "about"]
Each = dict[str, list[Any] | str]  # a name in <> -> its values, see `expand.py`
# Of all parts of a suite's file.
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class MetricTerm(NamedTuple):
    """factor * row.metric - row.metric + offset, or the offset alone."""

    factor: float
    parts: tuple[tuple[str, str], ...]  # row and metric: of none, one or two
    offset: float

    @property
    def metric(self) -> str:
        return self.parts[0][1] if self.parts else ""

    def value(self, values: Sequence[float]) -> float:
        """The term where its parts have these values."""
        return self.factor * sum(values[:1]) - sum(values[1:]) + self.offset

    @staticmethod
    def parse(text: str) -> MetricTerm:
        if NUMBER.match(text):
            return MetricTerm(0.0, (), float(text))
        match = TERM.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not row.metric, for example 2 * bagging.oracle + 1")
        parts = [(match["row"], match["metric"]), (match["other_row"], match["other_metric"])]
        offset = float((match["offset"] or "0").replace(" ", ""))
        return MetricTerm(float(match["factor"] or 1), tuple(part for part in parts if part[0]), offset)


def _number_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Claim(BaseModel):
    """An order of rows from best to worst by a metric, or a relation of two terms."""

    model_config = STRICT
    say: str = ""
    order: list[str] | None = Field(None, min_length=1)
    by: str | None = None
    left: str | None = None
    is_: Relation | None = Field(None, alias="is")
    right: Annotated[str | None, BeforeValidator(_number_to_text)] = None
    within: float = Field(0.25, gt=0)  # about: this part of the right side
    recipes: list[str] | None = None
    except_: list[str] = Field([], alias="except")  # recipes that it is not made for
    each: Each = {}

    @model_validator(mode="after")
    def _check_complete(self) -> Claim:
        order, relation = (self.order, self.by), (self.left, self.is_, self.right)
        whole, other = (order, relation) if self.order is not None else (relation, order)
        if None in whole or other != (None,) * len(other):
            raise ValueError("give `order` and `by`, or `left`, `is` and `right`")
        sides = [MetricTerm.parse(text) for text in (self.left, self.right) if text is not None]
        if sides and not sides[0].parts:
            raise ValueError(f"left is {self.left}: give row.metric there, and the number on the right")
        return self

    def places(self) -> Iterator[tuple[str, str, str]]:
        """(key, row, metric) of everything that it names."""
        for row in self.order or ():
            yield "order", row, str(self.by)
        for key, text in (("left", self.left), ("right", self.right)):
            for row, metric in MetricTerm.parse(text).parts if text is not None else ():
                yield key, row, metric

    def is_about(self, recipe: str) -> bool:
        return recipe not in self.except_ and (self.recipes is None or recipe in self.recipes)
