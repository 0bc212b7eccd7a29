"""Tables in the terminal, by rich."""

from __future__ import annotations

import rich.table
from rich import box
from rich.text import Text

from mheads.common.table import Table

CLOSE = (0, 1, 0, 0)  # one space between columns


def terminal_table(
    table: Table, padding: int | tuple[int, int] | tuple[int, int, int, int] = (0, 1), edge: bool = False
) -> rich.table.Table:
    """The heads and rows of a table, with columns so far apart; caption and note are for whoever has room for them.

    Heads are the short ones, and optional columns are left out.
    """
    drawn = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=edge, padding=padding)
    heads = table.heads
    for head in heads:
        if not head.optional:
            drawn.add_column(head.short or head.text, justify="right" if head.right else "left", no_wrap=head.whole)
    for row in table.rows:
        cells = (cell for head, cell in zip(heads, row, strict=True) if not head.optional)
        drawn.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in cells))
    return drawn


def terminal_facts(table: Table) -> rich.table.Table:
    """A table of names and texts, without its heads."""
    drawn = rich.table.Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    drawn.add_column(style="dim")
    drawn.add_column(justify="left")
    for name, text in table.rows:
        drawn.add_row(name.text, Text(text.text, style="bold" if text.strong else ""))
    return drawn
