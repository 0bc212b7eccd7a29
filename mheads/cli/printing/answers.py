"""Tables of what the members of a run answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from mheads.api.predict import Predicted
from mheads.common.progress import Watcher
from mheads.problems import Problem
from mheads.problems.answer_text import AnswerDetail, AnswerText
from mheads.problems.base import ANSWERS

FEW = 10  # images that get a table each
SHOWN = 100  # lines of a table; the rest is for a file


def tables(predicted: Predicted, watch: Watcher) -> Iterator[Group]:
    """A table for each of a few images, else one with a line for each example."""
    outputs, weights, problem = predicted.outputs, predicted.weights, predicted.run.data.problem
    images, count = predicted.images, outputs.shape[1]
    members, scored = len(outputs), weights is not None

    def text(rows: slice) -> AnswerText:
        return _text(problem, outputs[:, rows], None if weights is None else weights[:, rows])

    if images is not None and count <= FEW:
        for i, image in enumerate(images):
            answers = text(slice(i, i + 1))
            if answers.detail is not None:
                yield detail_table(str(image), answers.detail(0))
            else:
                yield lines_table(str(image), answers, members, scored)
        return
    title = str(predicted.asked.file) if images is None else f"{count:,} images"
    names = None if images is None else [str(image) for image in images[:SHOWN]]
    yield lines_table(title, text(slice(SHOWN)), members, scored, names)
    if count > SHOWN:
        watch.say(f"these are {SHOWN} of {count:,}: -o answers.csv, or .npz, writes all")


def _text(problem: Problem, outputs: Tensor, weights: Tensor | None) -> AnswerText:
    """Outputs [M, N, ...] as text; weights [M, N] are those of the scored answer, where members have scores."""
    ensemble = [problem.mean(outputs), *([] if weights is None else [problem.mean(outputs, weights)])]
    return problem.answer_text(outputs, ensemble)


def lines_table(
    title: str, answers: AnswerText, members: int, scored: bool, names: Sequence[str] | None = None
) -> Group:
    """A table with a line for each example; these have names, or are numbered."""
    table = Table(box=box.SIMPLE_HEAD)
    ensemble, agree = list(ANSWERS.values())[: 1 + scored], ["agree"] * answers.agreement
    who = [*ensemble, *agree, *(f"member {m}" for m in range(members))]
    for column in ("row" if names is None else "image", *who):
        table.add_column(column, no_wrap=not answers.long)
    for row, line in enumerate(answers.lines):
        table.add_row(str(row) if names is None else names[row], *line)
    return Group(title, table)


def detail_table(title: str, detail: AnswerDetail) -> Group:
    """A table of the answers to one example."""
    heading = Text.assemble(f"{title}: ", (detail.answer, "bold"), f" {detail.about}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", *detail.columns):
        table.add_column(name, no_wrap=not name)
    for m, cells in enumerate(detail.members):
        table.add_row(Text(f"member {m}"), *cells)
    for who, cells in zip(ANSWERS.values(), detail.ensemble, strict=False):
        table.add_row(Text(who, style="bold"), *cells)
    return Group(heading, table)  # a title of the table's own would be wrapped to its width
