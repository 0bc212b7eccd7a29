"""Where a network can be split, in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mheads.cuts import MEMBERS, Cuts


def cuts_table(found: Cuts) -> Group:
    """A line for each cut: parameters and multiply-adds on either side, and what four members would cost."""
    title = f"{found.network}: {found.whole.parameters:,} parameters, {_short(found.whole.multiply_adds)} multiply-adds"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("split", no_wrap=True)
    for heading in ("above: parameters", "multiply-adds", "below: parameters", "multiply-adds", "goes on"):
        table.add_column(heading, justify="right")
    for heading in (f"{MEMBERS} members: parameters", "multiply-adds"):
        table.add_column(heading, justify="right", style="cyan")
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
    rest: list[RenderableType] = [Text(f"{MEMBERS} members as part of {MEMBERS} networks; multiply-adds of a forward")]
    if not found.cuts:
        rest = [Text("it cannot be split anywhere: more than one value goes past every layer")]
    if found.why is not None:
        rest.append(Text(f"only its children are layers, since torch.fx cannot follow its forward: {found.why}"))
    return Group(Text(title, style="bold"), *([table] if found.cuts else []), *rest)


def _short(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
