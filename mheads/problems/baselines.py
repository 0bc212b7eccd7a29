"""What an Oracle compares with: as many guesses of one answer as there are members, and members that are constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

NEAR_CHANCE = 0.1  # of the way from chance to 100 %


def top(result: Mapping[str, Any], k: int, who: str = "ensemble_mean") -> float | None:
    """How often the truth is among the k best classes of an answer, from a result as JSON has it.

    With k = M that is what an Oracle of M answers compares with. None where it says nothing, since k are all classes,
    and where it is not known: there are no classes, or an earlier version kept fewer.
    """
    known = (result.get("top_k") or result.get("top_m") or {}).get(who)
    if not known or k >= len(result["ownership"][0]):
        return None
    return known[k - 1] if k <= len(known) else None


def chance_of_oracle(labels: Tensor, members: int) -> float:
    """The Oracle, in percent, of members that always give one class each, the M most frequent ones: [C] counts."""
    return 100 * labels.sort(descending=True).values[:members].sum().item() / labels.sum().item()


def near_chance(result: Mapping[str, Any]) -> bool:
    """Whether the Oracle of several members is hardly above that of constant ones."""
    oracle, chance = result.get("oracle"), result.get("oracle_chance")
    if oracle is None or chance is None or len(result["members"]) == 1:
        return False
    near: bool = oracle <= chance + NEAR_CHANCE * (100 - chance)
    return near


def tell_chance(result: Mapping[str, Any]) -> str:
    """What stands beside an Oracle that is hardly above that of constant members."""
    return f" (by chance {result['oracle_chance']:.2f})" if near_chance(result) else ""


def tell_collapse(result: Mapping[str, Any]) -> str:
    """What a reader of such an ensemble's figures must know; nothing where constant members would always be right."""
    if not near_chance(result) or result["oracle_chance"] == 100:
        return ""
    return (
        f"The Oracle, {result['oracle']:.2f} %, is about that of members that always give one class each, "
        f"{result['oracle_chance']:.2f} %. If members have collapsed to such answers, owning a class means only that "
        "one of these answers fits it"
    )
