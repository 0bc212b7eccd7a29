"""What `mheads classical` shows: a bar for each round, and a table of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich.table

from mheads.common.progress import Terminal
from mheads.common.table import Head, Table, text_rows
from mheads.common.terminal_table import CLOSE, terminal_table
from mheads.problems import PROBLEMS
from mheads.problems.base import format_number


class RoundTerminal(Terminal):
    """Shows the training of a round; one that is finished has a line of its own already."""

    def on_finished(self, folder: Path) -> None:
        pass


def rounds_table(summary: dict[str, Any]) -> rich.table.Table:
    """A row for each round: how good its members are on the test set, and how the training examples are shared out."""
    names = ("round", "members", "Ens.-\nMean", "Oracle", "top-M", "share of\neach, %", "objective", "changed")
    head = [Head(name, right=name not in ("members", "share of\neach, %"), whole=True) for name in names]
    rows = []
    for entry in summary["rounds"]:
        form = ".2f" if PROBLEMS[entry["problem"]].unit else ".4g"
        rows.append(
            [
                str(entry["round"]),
                " ".join(format_number(value, ".1f" if form == ".2f" else form) for value in entry["members"]),
                *(format_number(entry[key], form) for key in ("ensemble_mean", "oracle")),
                "" if entry.get("top_m") is None else format_number(entry["top_m"]),
                " ".join(f"{100 * count / sum(entry['examples']):.0f}" for count in entry["examples"]),
                format_number(entry["objective"], ",.0f" if (entry["objective"] or 0) >= 10_000 else ".4g"),
                f"{entry['changed']:,}",
            ]
        )
    return terminal_table(Table("Rounds", head, text_rows(rows)), padding=CLOSE)
