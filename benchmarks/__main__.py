"""`python -m benchmarks step`: measures speed and memory, side by side with what people would write otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import run_suites
from benchmarks.suites import SUITES
from mheads.common.console import Console
from mheads.common.errors import UserError


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition(": ")[2])
    parser.add_argument("suite", help=f"{', '.join(SUITES)}, or all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=15, help="each side is timed once per round (default: 15)")
    parser.add_argument("--figure", type=Path, help="also draw what comm found to this .png, .svg or .pdf")
    given = parser.parse_args(args)
    try:
        run_suites(given.suite, max(1, given.rounds), given.json, Console(), given.figure)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
