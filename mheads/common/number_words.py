"""Numbers in words, as messages and tables write them."""

from __future__ import annotations


def count(number: int, what: str, plural: str = "s") -> str:
    """`1 rank`, `2,000 ranks`."""
    return f"{number:,} {what}{plural if number != 1 else ''}"


def duration(seconds: float) -> str:
    """2 h 05 min, 3 min 20 s, 12 s"""
    whole = round(max(0.0, seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
