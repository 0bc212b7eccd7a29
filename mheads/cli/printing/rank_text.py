"""Writes ranks, stages and counts in few words."""

from __future__ import annotations

from collections.abc import Iterable

from mheads.common.number_words import count
from mheads.distributed.planning.placement import Placement


def mesh_text(placement: Placement, ranks: int) -> str:
    """The mesh in words, and how many ranks are left over."""
    where = count(placement.slots, "rank")
    text = f"one tree on {where}" if placement.replicas == 1 else f"{placement.replicas} replicas of {where} each"
    if placement.ranks < ranks:
        text += f"; {count(ranks - placement.ranks, 'rank')} of {ranks} with nothing to do"
    return text


def ranks_of(placement: Placement, slots: Iterable[int]) -> str:
    """The ranks of these slots in every replica: `rank 0`, `ranks 1-3, 5-7`."""
    ranks = [replica * placement.slots + slot for slot in slots for replica in range(placement.replicas)]
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}"


def numbers(values: Iterable[int]) -> str:
    """Numbers in short: `0, 2-5`."""
    return names(map(str, sorted(set(values))))


def names(stages: Iterable[str]) -> str:
    """Stages in short: `trunk, conv2/0-3`."""
    spans: list[tuple[str, int, int] | str] = []
    for stage in stages:
        head, slash, tail = stage.rpartition("/")
        last = spans[-1] if spans else ""
        if not tail.isdigit():
            spans.append(stage)
        elif isinstance(last, tuple) and last[0] == head + slash and last[2] + 1 == int(tail):
            spans[-1] = (last[0], last[1], int(tail))
        else:
            spans.append((head + slash, int(tail), int(tail)))
    return join_some([s if isinstance(s, str) else f"{s[0]}{format_range(s[1], s[2])}" for s in spans])


def join_some(texts: list[str]) -> str:
    """Joins all texts if they are few, else the first two and the last."""
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-3 or not value else f"{1e6 * value:.0f} µs"
