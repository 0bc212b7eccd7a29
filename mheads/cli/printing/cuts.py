"""Where a network can be split, in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mheads.trees.splitting.find_cuts import MEMBERS, Cuts


def cuts_table(found: Cuts) -> Group:
    """A line for each cut: parameters and multiply-adds on either side, and what four members would cost."""
    title = f"{found.network}: {found.whole.parameters:,} parameters, {_short(found.whole.multiply_adds)} multiply-adds"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("split\nafter", no_wrap=True)
    for heading in ("params\nabove", "mult-adds\nabove", "params\nbelow", "mult-adds\nbelow", "value\nthere"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("params", "mult-adds"):
        table.add_column(f"{heading}\nof {MEMBERS}", justify="right", style="cyan", no_wrap=True)
    for cut in found.cuts:
        parameters, multiply_adds = cut.share()
        table.add_row(
            cut.name,
            f"{cut.above.parameters:,}",
            _short(cut.above.multiply_adds),
            f"{cut.below.parameters:,}",
            _short(cut.below.multiply_adds),
            " + ".join("x".join(map(str, shape)) or "1" for shape in cut.crossing),
            f"{parameters:.2f}",
            f"{multiply_adds:.2f}",
        )
    legend = f"of {MEMBERS}: {MEMBERS} members split there, compared with {MEMBERS} networks; mult-adds of a forward"
    rest: list[RenderableType] = [Text(legend)]
    if not found.cuts:
        rest = [Text("it cannot be split anywhere: several values, or weights used again, go past every layer")]
    if found.why is not None:
        rest.append(Text(f"only its children are layers, since torch.fx cannot follow its forward: {found.why}"))
    return Group(Text(title, style="bold"), *([table] if found.cuts else []), *rest)


def _short(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
