"""Whether what a suite claims is so in our runs: a direction of one seed, a test of several.

Runs with the same seed have the same data order and, where rows allow it, the same first weights. So rows are compared
seed by seed, over the seeds that all rows of a claim have. A claim says that some margins are above 0: that of an order
is the distance from each row to the next, that of a relation the difference of its sides, and "about" has two, the
distances to both ends of what it allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mheads.problems.metric_text import label, number
from mheads.suites.findings import by_seed, higher_is_better, in_percent, why_missing
from mheads.suites.suite import Term

Document = dict[str, Any]
LEVEL = 0.05
TEST = (
    f"Claims are tested by a paired t-test over the seeds that their rows share, two-sided at {100 * LEVEL:g} %: the "
    "differences seed by seed against 0. A claim holds or does not hold where they are told from 0, and is within "
    "noise where they are not; neighbours of an order are tested one by one, and what is about equal against both ends "
    "of its tolerance. Differences that are the same in every seed have no variance, and a sign test takes its place. "
    "One seed shows where the first figure lies from the second, and proves nothing."
)
SAID = {relation: f"{relation} than" for relation in ("better", "worse", "no better", "no worse")}
MOST_OPEN = 5  # claims that have a line each
EXACT = ("parameters", "iterations")  # which no seed changes
DECIMALS = 9  # that margins are rounded to: what is beyond is the arithmetic's, not the runs'


@dataclass(frozen=True)
class Verdict:
    """What our runs say of a claim. `agrees`: whether their means are as claimed, None where some are missing."""

    claim: str
    word: str
    figures: str
    agrees: bool | None = None
    num_seeds: int = 0


@dataclass(frozen=True)
class _Margins:
    """What a claim says to be above 0, or with `strict` off not below, for each seed: [., seeds]."""

    values: np.ndarray
    strict: bool = True
    exact: bool = False  # there is no noise in them

    @property
    def agree(self) -> bool:
        means = self.values.mean(1)
        return bool((means > 0).all() if self.strict else (means >= 0).all())

    def p_values(self) -> list[float]:
        return [p_value(margin) for margin in self.values]

    def word(self) -> str:
        if self.exact:
            return "holds" if self.agree else "does not hold"
        found = [self._sign(margin, p) for margin, p in zip(self.values, self.p_values(), strict=True)]
        return "does not hold" if -1 in found else "within noise" if 0 in found else "holds"

    def _sign(self, margin: np.ndarray, p: float) -> int:
        """1 or -1 for a margin that is above or below 0, 0 for one that cannot be told from it."""
        if not margin.any():  # the same figures in every seed
            return 0 if self.strict else 1
        return int(np.sign(margin.mean())) if p < LEVEL else 0


def p_value(margin: np.ndarray) -> float:
    """How probable such differences [seeds], or larger ones either way, are if there is none."""
    from scipy.stats import ttest_1samp

    if np.ptp(margin) > 0:
        return float(ttest_1samp(margin, 0).pvalue)
    return 2.0 ** (1 - len(margin)) if margin.any() else 1.0


def verdicts(document: Document) -> list[Verdict]:
    """What is found of each claim; many that nothing is known of are one."""
    found = [_verdict(document, claim) for claim in document["claims"]]
    unknown = [verdict for verdict in found if verdict.agrees is None]
    if len(unknown) <= MOST_OPEN:
        return found
    missing = dict.fromkeys(part for verdict in unknown for part in verdict.figures.split(", "))
    together = Verdict(f"{len(unknown)} claims of which nothing is known yet", "open", ", ".join(missing))
    return [*(verdict for verdict in found if verdict.agrees is not None), together]


def how_tested(found: Sequence[Verdict]) -> str:
    """By what test, of how many seeds, the verdicts of a table are; empty if it has none."""
    counts = sorted({verdict.num_seeds for verdict in found if verdict.num_seeds})
    if not counts:
        return ""
    if counts == [1]:
        return "One seed each: where the first figure lies from the second, and no verdict; `--trials` trains more."
    several = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"By a paired t-test over seeds (n = {several}), two-sided at {100 * LEVEL:g} %."


def _verdict(document: Document, claim: dict[str, Any]) -> Verdict:
    return _relation(document, claim) if claim.get("order") is None else _order(document, claim)


def _order(document: Document, claim: dict[str, Any]) -> Verdict:
    """From best to worst; rows that have not been run are left out of it, and named."""
    rows, metric = claim["order"], claim["by"]
    higher = higher_is_better(document, metric)
    said = claim.get("say") or f"{label(metric)}: {(' > ' if higher else ' < ').join(rows)}"
    trials = {row: found for row in rows if (found := by_seed(document, row, metric))}
    missing = [f"{row} {why_missing(document, row, metric)}" for row in rows if row not in trials]
    seeds = _shared(trials)
    if len(trials) > 1 and not seeds:
        return Verdict(said, "open", _apart(trials))
    values = np.array([[found[seed] for seed in seeds] for found in trials.values()])
    shown = [number(found.mean(), metric, in_percent(document)) for found in values]
    figures = ", ".join([*map(" ".join, zip(trials, shown, strict=True)), *missing])
    if len(trials) < 2:
        return Verdict(said, "open", figures)
    margins = _Margins(_rounded((-1 if higher else 1) * np.diff(values, axis=0)), exact=metric in EXACT)
    so_far, tested = " so far" if missing else "", _tested(margins, len(seeds), trials)
    if len(seeds) == 1 and not margins.exact:
        signs = [0 if a == b else np.sign(m) for m, (a, b) in zip(margins.values[:, 0], pairwise(shown), strict=True)]
        ties = " but for ties" if 0 in signs else ""
        word = "in another order" if -1 in signs else f"in this order{ties}{so_far}"
        return Verdict(said, f"{word}, one seed", figures + tested, margins.agree, 1)
    word = margins.word()
    return Verdict(said, word + so_far * (word == "holds"), figures + tested, margins.agree, len(seeds))


def _relation(document: Document, claim: dict[str, Any]) -> Verdict:
    relation, within = claim["is"], claim.get("within", 0.25)
    terms = {side: Term.of(claim[side]) for side in ("left", "right")}
    said = claim.get("say") or f"{claim['left']} is {SAID.get(relation, relation)} {claim['right']}"
    trials = {part: by_seed(document, *part) for term in terms.values() for part in term.parts}
    if missing := [f"{part[0]} {why_missing(document, *part)}" for part, found in trials.items() if not found]:
        return Verdict(said, "open", ", ".join(dict.fromkeys(missing)))
    if not (seeds := _shared(trials)):
        return Verdict(said, "open", _apart(row for row, _ in trials))
    left, right = (
        np.array([term.value([trials[part][seed] for part in term.parts]) for seed in seeds]) for term in terms.values()
    )
    margins = _margins(document, terms, left, right, relation, within)
    percent, metric = in_percent(document), terms["left"].metric
    shown = [number(left.mean(), metric, percent), number(right.mean(), terms["right"].metric or metric, percent)]
    sides = zip(terms.items(), shown, strict=True)
    figures = ", ".join(f"{claim[side]} {text}" for (side, term), text in sides if term.row)
    tested = _tested(margins, len(seeds), trials)
    if len(seeds) == 1 and not margins.exact:
        if relation == "about":
            word = f"{'within' if margins.agree else 'not within'} {100 * within:g} %"
        else:
            word = "equal" if shown[0] == shown[1] else "higher" if left[0] > right[0] else "lower"
        return Verdict(said, f"{word}, one seed", figures + tested, margins.agree, 1)
    return Verdict(said, margins.word(), figures + tested, margins.agree, len(seeds))


def _margins(
    document: Document, terms: Mapping[str, Term], left: np.ndarray, right: np.ndarray, relation: str, within: float
) -> _Margins:
    exact = all(metric in EXACT for term in terms.values() for _, metric in term.parts)
    if relation == "about":
        allowed = within * np.abs(right)
        return _Margins(_rounded([right + allowed - left, left - right + allowed]), strict=False, exact=exact)
    better = 1 if higher_is_better(document, terms["left"].metric) else -1
    sign = {"above": 1, "below": -1, "better": better, "no worse": better}.get(relation, -better)
    return _Margins(_rounded([sign * (left - right)]), not relation.startswith("no "), exact)


def _rounded(margins: Any) -> np.ndarray:
    return np.round(np.asarray(margins, float), DECIMALS)


def _shared(trials: Mapping[Any, Mapping[int, float]]) -> list[int]:
    """The seeds that all have."""
    return sorted(set.intersection(*map(set, trials.values()))) if trials else []


def _apart(rows: Iterable[str]) -> str:
    return f"no seed is in all of {' and '.join(dict.fromkeys(rows))}"


def _tested(margins: _Margins, num_seeds: int, trials: Mapping[Any, Mapping[int, float]]) -> str:
    """How many seeds, and what the test gives, after the figures."""
    if margins.exact:
        return ""
    fewer = any(len(found) > num_seeds for found in trials.values())
    if num_seeds == 1:
        return "; 1 seed in common" if fewer else ""
    said = " and ".join("p < 0.001" if p < 0.001 else f"p = {p:.2g}" for p in margins.p_values())
    return f"; {num_seeds} seeds{' in common' if fewer else ''}, {said}"
