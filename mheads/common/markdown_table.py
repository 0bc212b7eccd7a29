"""Tables in Markdown."""

from __future__ import annotations

from mheads.common.table import Table


def table_lines(table: Table) -> list[str]:
    """The lines of a table, and of its note below."""
    lines = [_line([head.text for head in table.heads]), f"|{' --- |' * len(table.heads)}"]
    lines += [_line([f"**{cell.text}**" if cell.strong else cell.text for cell in row]) for row in table.rows]
    return [*lines, "", table.note] if table.note else lines


def _line(texts: list[str]) -> str:
    return f"| {' | '.join(map(_cell, texts))} |"


def _cell(text: str) -> str:
    """A text as a cell of a table, which a line break or a bar would end."""
    return " ".join(text.split()).replace("|", "\\|")
