"""Tables of what the members of a run answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.text import Text
from torch import Tensor

from mheads.api.predict import Predicted
from mheads.common.progress import Watcher
from mheads.common.table import Cell, Head, Table, text_rows
from mheads.common.terminal_table import terminal_table
from mheads.problems import Problem, gives_probabilities
from mheads.problems.answer_text import AnswerDetail, AnswerText
from mheads.problems.base import ANSWERS

FEW = 10  # images that get a table each
SHOWN = 100  # lines of a table; the rest is for a file


def tables(predicted: Predicted, watch: Watcher) -> Iterator[Group]:
    """A table for each of a few images, else one with a line for each example."""
    outputs, weights, problem = predicted.outputs, predicted.weights, predicted.run.data.problem
    images, count = predicted.images, outputs.shape[1]

    def part(rows: slice) -> tuple[Tensor, Tensor | None]:
        return outputs[:, rows], None if weights is None else weights[:, rows]

    if images is not None and count <= FEW:
        for i, image in enumerate(images):
            answer, scores = part(slice(i, i + 1))
            detail = _text(answer, problem, scores).detail
            title = str(image)
            yield answers(title, answer, problem, None, scores) if detail is None else details(title, detail(0))
        return
    title = predicted.group.names[0][0] if images is None else f"{count:,} images"
    names = None if images is None else [str(image) for image in images[:SHOWN]]
    first, scores = part(slice(SHOWN))
    yield answers(title, first, problem, names, scores)
    if count > SHOWN:
        watch.say(f"these are {SHOWN} of {count:,}: -o answers.csv, or .npz, writes all")


def _text(outputs: Tensor, problem: Problem, weights: Tensor | None) -> AnswerText:
    return problem.answer_text(outputs, problem.together(outputs, weights))


def _ensemble_names(count: int) -> list[str]:
    """The names of what `Problem.together` gives."""
    return list(ANSWERS.values())[:count][::-1]


def answers(
    title: str,
    outputs: Tensor,
    problem: Problem,
    names: Sequence[str] | None = None,
    weights: Tensor | None = None,
) -> Group:
    """A table of outputs [M, N, ...], with a line for each example; these have names, or are numbered.

    Weights [M, N] are those of the ensemble's answer, where members have scores. They are the probabilities of the
    members' answers, and shown in brackets unless answers are classes, which have probabilities of their own.
    """
    text = _text(outputs, problem, weights)
    ensemble = _ensemble_names(1 if weights is None else 2)
    members = [f"member {m}" for m in range(len(outputs))]
    columns = ("row" if names is None else "image", *ensemble, *["agree"] * text.agreement, *members)
    rows = []
    for row, line in enumerate(text.lines):
        cells = line[-len(members) :]
        if weights is not None and not gives_probabilities(problem):
            cells = [
                f"{cell} ({100 * weight:.0f}%)" for cell, weight in zip(cells, weights[:, row].tolist(), strict=True)
            ]
        rows.append([str(row) if names is None else names[row], *line[: -len(members)], *cells])
    table = Table(title, [Head(column, whole=not text.long) for column in columns], text_rows(rows))
    return Group(title, terminal_table(table, edge=True))


def details(title: str, detail: AnswerDetail) -> Group:
    """A table of the answers to one example."""
    heading = Text.assemble(f"{title}: ", (detail.answer, "bold"), f" {detail.about}")
    rows = text_rows([[f"member {m}", *cells] for m, cells in enumerate(detail.members)])
    for who, cells in zip(_ensemble_names(len(detail.ensemble)), detail.ensemble, strict=True):
        rows.append([Cell(who, strong=True), *map(Cell, cells)])
    table = Table(title, [Head("", whole=True), *detail.columns], rows)
    return Group(heading, terminal_table(table, edge=True))  # a title of rich's would be wrapped to the table's width
