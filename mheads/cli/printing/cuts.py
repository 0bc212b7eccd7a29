"""Where a network can be split, in the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import CLOSE, terminal_table
from mheads.trees.splitting.list_cuts import MEMBERS, Cuts

COLUMNS = ("params\nabove", "mult-adds\nabove", "params\nbelow", "mult-adds\nbelow", "value\nthere")
SHARES = (f"params\nof {MEMBERS}", f"mult-adds\nof {MEMBERS}")


def cuts_table(cuts: Cuts) -> Group:
    """A line for each cut: parameters and multiply-adds on either side, and what four members would cost."""
    title = f"{cuts.network}: {cuts.whole.parameters:,} parameters, {_short(cuts.whole.multiply_adds)} multiply-adds"
    rows = [
        [
            cut.name,
            *(text for side in (cut.above, cut.below) for text in (f"{side.parameters:,}", _short(side.multiply_adds))),
            " + ".join("x".join(map(str, shape)) or "1" for shape in cut.crossing),
            *(f"{share:.2f}" for share in cut.share()),
        ]
        for cut in cuts.cuts
    ]
    head = [Head("split\nafter", whole=True), *(Head(text, right=True, whole=True) for text in (*COLUMNS, *SHARES))]
    parts = [terminal_table(Table(title, head, text_rows(rows)), padding=CLOSE)] if rows else []
    legend = f"of {MEMBERS}: {MEMBERS} members split there, compared with {MEMBERS} networks; mult-adds of a forward"
    if not rows:
        legend = "it cannot be split anywhere: several values, or weights used again, go past every layer"
    lines = [Text(legend)]
    if cuts.why is not None:
        lines.append(Text(f"only its children are layers, since torch.fx cannot follow its forward: {cuts.why}"))
    return Group(Text(title, style="bold"), *parts, *lines)


def _short(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
