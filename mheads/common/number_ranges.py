"""Ranges of numbers cut into parts."""

from __future__ import annotations


def cuts(num_rows: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive slices whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(num_rows, parts)
    stops = [(i + 1) * size + min(i + 1, extra) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))
