"""Tables of what the members of a run answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mheads.problems import Classification, MultiLabel, Problem, Segmentation


def answers(title: str, outputs: torch.Tensor, problem: Problem, names: Sequence[str] | None = None) -> Group:
    """A table of outputs [M, N, ...], with a line for each example; these have names, or are numbered."""
    if isinstance(problem, Segmentation):
        return classes_of_pixels(title, outputs.softmax(2), problem.classes, names)
    if isinstance(problem, MultiLabel):
        return labels_of_rows(title, outputs.sigmoid(), problem.classes, names)
    if isinstance(problem, Classification):
        return answers_to_rows(title, outputs.softmax(-1), problem.classes, names)
    return numbers_of_rows(title, outputs, names)


def numbers_of_rows(title: str, outputs: torch.Tensor, names: Sequence[str] | None = None) -> Group:
    """Outputs [M, N, D] of examples, which have these names or are numbered: a line each."""
    table = _lines("row" if names is None else "image", "Ensemble-Mean", *(f"member {m}" for m in range(len(outputs))))
    for row in range(outputs.shape[1]):
        shown = (" ".join(f"{x:.4g}" for x in given[row]) for given in (outputs.mean(0), *outputs))
        table.add_row(str(row) if names is None else escape(names[row]), *shown)
    return Group(escape(title), table)


def labels_of_rows(
    title: str, probabilities: torch.Tensor, classes: Sequence[str], names: Sequence[str] | None = None
) -> Group:
    """Probabilities [M, N, C] of several labels: those above 0.5, a line for each example."""
    members = (f"member {m}" for m in range(len(probabilities)))
    table = _lines("row" if names is None else "image", "Ensemble-Mean", "agree", *members, no_wrap=False)
    given, mean = probabilities > 0.5, probabilities.mean(0)
    for row, p in enumerate(mean):
        said = ", ".join(f"{escape(classes[c])} {100 * p[c]:.1f}%" for c in (p > 0.5).nonzero()[:, 0]) or "none"
        agree = f"{int((given[:, row] == (p > 0.5)).all(-1).sum())} of {len(given)}"
        labels = (", ".join(escape(classes[c]) for c in one.nonzero()[:, 0]) or "none" for one in given[:, row])
        table.add_row(str(row) if names is None else escape(names[row]), said, agree, *labels)
    return Group(escape(title), table)


def classes_of_pixels(
    title: str, probabilities: torch.Tensor, classes: Sequence[str], names: Sequence[str] | None = None
) -> Group:
    """Probabilities [M, N, C, H, W]: which part of the pixels has which class, a line for each image."""
    members = (f"member {m}" for m in range(len(probabilities)))
    table = _lines("row" if names is None else "image", "Ensemble-Mean", "agree", *members, no_wrap=False)
    votes, answer = probabilities.argmax(2), probabilities.mean(0).argmax(1)

    def parts(pixels: torch.Tensor) -> str:
        shares = pixels.flatten().bincount(minlength=len(classes)) / pixels.numel()
        best = shares.topk(min(3, len(classes)))
        pairs = zip(best.values, best.indices, strict=True)
        return ", ".join(f"{escape(classes[c])} {100 * share:.1f}%" for share, c in pairs if share)

    for row, pixels in enumerate(answer):
        same = 100 * (votes[:, row] == pixels).all(0).double().mean()
        name = str(row) if names is None else escape(names[row])
        table.add_row(name, parts(pixels), f"on {same:.1f}%", *(parts(one) for one in votes[:, row]))
    return Group(escape(title), table)


def answers_to_image(image: Path, probabilities: torch.Tensor, classes: Sequence[str]) -> Group:
    """A table of the probabilities [M, C] of one image."""
    votes = probabilities.argmax(-1)
    mean = probabilities.mean(0)
    answer = int(mean.argmax())
    agree = int((votes == answer).sum())
    said = f"[bold]{escape(classes[answer])}[/] ({100 * mean[answer]:.1f}%)"
    title = f"{escape(str(image))}: {said}, {agree} of {len(votes)} members agree"
    table = Table(box=box.SIMPLE_HEAD)
    best = min(3, len(classes))
    for name in ("", *(["answer", "second", "third"][:best])):
        table.add_column(name, no_wrap=not name)
    rows = [(f"member {m}", p) for m, p in enumerate(probabilities)]
    for name, p in [*rows, ("[bold]Ensemble-Mean[/]", mean)]:
        top = p.topk(best)
        pairs = zip(top.values, top.indices, strict=True)
        table.add_row(name, *(f"{escape(classes[c])} {100 * v:.1f}%" for v, c in pairs))
    return Group(title, table)  # a title of the table's own would be wrapped to its width


def answers_to_rows(
    title: str, probabilities: torch.Tensor, classes: Sequence[str], names: Sequence[str] | None = None
) -> Group:
    """Probabilities [M, N, C] of examples, which have these names or are numbered: a line each."""
    votes, mean = probabilities.argmax(-1), probabilities.mean(0)
    members = (f"member {m}" for m in range(len(votes)))
    table = _lines("row" if names is None else "image", "Ensemble-Mean", "agree", *members)
    for row, p in enumerate(mean):
        answer = int(p.argmax())
        said = f"{escape(classes[answer])} {100 * p[answer]:.1f}%"
        agree = f"{int((votes[:, row] == answer).sum())} of {len(votes)}"
        name = str(row) if names is None else escape(names[row])
        table.add_row(name, said, agree, *(escape(classes[c]) for c in votes[:, row]))
    return Group(escape(title), table)


def _lines(*columns: str, no_wrap: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, no_wrap=no_wrap)
    return table
