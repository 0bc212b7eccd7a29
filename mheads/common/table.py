"""A table as plain data. It is rendered in the terminal (`terminal_table.py`), on the HTML page (`report/page/`) and in
Markdown (`markdown_table.py`): whoever describes a table knows none of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cell:
    """A cell of a table; one with a value is a number, aligned to the right and sorted by the value."""

    text: str
    value: float | None = None
    strong: bool = False


@dataclass(frozen=True)
class Head:
    """The head of a column."""

    text: str
    right: bool = False  # whether the column is aligned to the right, as one with numbers always is
    short: str = ""  # the text where there is little room, which may be on several lines
    whole: bool = False  # whether its cells should not be broken into lines
    optional: bool = False  # whether the column is left out where there is little room


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str | Head]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = False
    note: str = ""

    @property
    def numbers(self) -> list[bool]:
        """Whether there are numbers in a column."""
        return [any(row[i].value is not None for row in self.rows) for i in range(len(self.head))]

    @property
    def heads(self) -> list[Head]:
        """The head of each column, which says of columns with numbers that they are aligned to the right."""
        heads = [Head(head) if isinstance(head, str) else head for head in self.head]
        return [replace(head, right=head.right or number) for head, number in zip(heads, self.numbers, strict=True)]


def text_rows(rows: Sequence[Sequence[str]]) -> list[list[Cell]]:
    """Rows of cells that are plain text."""
    return [[Cell(text) for text in row] for row in rows]
