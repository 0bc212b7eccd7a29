"""Answers as text, for tables of predictions: each problem writes its own, and whoever shows them knows no problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnswerDetail:
    """The answers to one example in several columns: a row for each member, and for each answer of the ensemble."""

    answer: str  # of the ensemble
    about: str  # how sure it is, and how many members agree
    columns: Sequence[str]
    members: Sequence[Sequence[str]]
    ensemble: Sequence[Sequence[str]]


@dataclass(frozen=True)
class AnswerText:
    """The answers to several examples, as a line of cells for each.

    The cells are the ensemble's answers (Ensemble-Mean; where members have scores, Ensemble-Scored before it), if
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
            yield [_shorten([f"{x:.4g}" for x in answers[row]]) for answers in (*ensemble, *outputs)]

    return AnswerText(lines(), agreement=False)


def _shorten(numbers: Sequence[str]) -> str:
    """The first and the last of many numbers, such as the points of a trajectory: a file has all of them."""
    return " ".join(numbers if len(numbers) <= 6 else [*numbers[:2], "...", *numbers[-2:]])


@dataclass(frozen=True)
class AnswerColumns:
    """The answers to several examples for a file: names of columns, and a line of cells for each example."""

    names: list[str]
    lines: list[list[str]]


def number_columns(
    outputs: Tensor, ensemble: Sequence[Tensor], labels: Sequence[object] | None = None
) -> AnswerColumns:
    """Numbers [M, B, D], and [B, D] of the ensemble, in full precision: a column for each answer and value."""
    labels = range(outputs.shape[2]) if labels is None else labels
    who = [*["answer", "mean"][-len(ensemble) :], *(f"member_{m}" for m in range(len(outputs)))]
    names = [f"{one}_{label}" if len(labels) > 1 else one for one in who for label in labels]
    numbers = torch.cat([torch.stack(list(ensemble)), outputs]).permute(1, 0, 2).flatten(1)  # [B, answers x D]
    return AnswerColumns(names, [[f"{x:.9g}" for x in row] for row in numbers])
