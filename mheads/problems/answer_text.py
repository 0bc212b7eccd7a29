"""Answers as text, for tables of predictions: each problem writes its own, and whoever shows them knows no problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AnswerDetail:
    """The answers to one example in several columns: a row for each member, and for each answer of the ensemble."""

    answer: str  # of Ensemble-Mean
    about: str  # how sure it is, and how many members agree
    columns: Sequence[str]
    members: Sequence[Sequence[str]]
    ensemble: Sequence[Sequence[str]]


@dataclass(frozen=True)
class AnswerText:
    """The answers to several examples, as a line of cells for each.

    The cells are the ensemble's answers (Ensemble-Mean, then Ensemble-Scored where members have scores), if
    `agreement` how far members agree with the first, and the answer of each member.
    """

    lines: Iterable[list[str]]
    agreement: bool = True
    long: bool = False  # whether a cell may be wider than a terminal and should be wrapped
    detail: Callable[[int], AnswerDetail] | None = None  # of one example, where there is more to say than in a line


def number_text(outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
    """Numbers [M, B, D], and [B, D] of the ensemble; whether members agree is for the reader to see."""

    def lines() -> Iterator[list[str]]:
        for row in range(outputs.shape[1]):
            yield [" ".join(f"{x:.4g}" for x in answers[row]) for answers in (*ensemble, *outputs)]

    return AnswerText(lines(), agreement=False)
