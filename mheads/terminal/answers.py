"""What the members of a run answer, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table


def numbers_of_rows(title: str, outputs: torch.Tensor, names: Sequence[str] | None = None) -> Group:
    """Outputs [M, N, D] of examples, which have these names or are numbered: a line each."""
    table = _lines("row" if names is None else "image", "Ensemble-Mean", *(f"member {m}" for m in range(len(outputs))))
    for row in range(outputs.shape[1]):
        shown = (" ".join(f"{x:.4g}" for x in given[row]) for given in (outputs.mean(0), *outputs))
        table.add_row(str(row) if names is None else escape(names[row]), *shown)
    return Group(escape(title), table)


def answers_to_image(image: Path, probabilities: torch.Tensor, classes: Sequence[str]) -> Group:
    """Probabilities [M, C] of one image."""
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


def _lines(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
