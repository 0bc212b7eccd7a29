"""Whether what a suite claims is so in our runs: a direction of one seed, a test of several.

Runs with the same seed have the same data order and, where rows allow it, the same first weights. So rows are compared
seed by seed, over the seeds that all rows of a claim have. A claim says that some margins are above 0: that of an order
is the distance from each row to the next, that of a relation the difference of its sides, and "about" has two, the
distances to both ends of what it allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mheads.problems.metric_text import format_metric, label
from mheads.suites.claims import MetricTerm
from mheads.suites.findings import Document, by_seed, higher_is_better, in_percent, why_missing

LEVEL = 0.05
TEST = (
    f"Claims are tested by a paired t-test over the seeds that their rows share, two-sided at {100 * LEVEL:g} %: the "
    "differences seed by seed against 0. A claim holds or does not hold where they differ significantly from 0, and is "
    "within noise where they do not; the confidence interval (CI) of a difference says which differences remain "
    "possible. Neighbours of an order are tested one by one, and what is about equal against both ends of its "
    "tolerance. Trials that are splits of one data set share training examples; the variance is then "
    "larger, as Nadeau and Bengio (2003) correct it. Differences that are the same in every seed have no variance, and "
    "a sign test takes its place. Each verdict is that of its own test; behind p stands what Holm's correction (1979) "
    "for all comparisons of the table makes of it. One seed shows where the first figure lies from the second, and "
    "proves nothing."
)
TEXTS = {relation: f"{relation} than" for relation in ("better", "worse", "no better", "no worse")}
MOST_OPEN = 1  # claims that have a line each
EXACT = ("parameters", "iterations")  # which no seed changes
DECIDED = ("holds", "holds so far", "does not hold")
DIGITS = 11  # of the compared values that margins keep: what is beyond is the arithmetic's, not the runs'


@dataclass(frozen=True)
class _Margins:
    """What a claim says to be above 0, or with `strict` off not below, for each seed: [., seeds]."""

    values: np.ndarray
    strict: bool = True
    exact: bool = False  # there is no noise in them
    test_share: float = 0.0  # of the examples, where trials are splits: see `p_value`

    @classmethod
    def from_values(
        cls, document: Document, margins: Any, compared: np.ndarray, strict: bool = True, exact: bool = False
    ) -> _Margins:
        return cls(round_off(np.asarray(margins, float), compared), strict, exact, document.get("test_share", 0.0))

    @property
    def agree(self) -> bool:
        means = self.values.mean(1)
        return bool((means > 0).all() if self.strict else (means >= 0).all())

    def p_values(self) -> list[float]:
        return [p_value(margin, self.test_share) for margin in self.values]

    def word(self, p_values: Sequence[float] | None = None) -> str:
        """The verdict by the p-values of these tests, or of corrected ones."""
        if self.exact:
            return "holds" if self.agree else "does not hold"
        signs = [self._sign(*both) for both in zip(self.values, p_values or self.p_values(), strict=True)]
        return "does not hold" if -1 in signs else "within noise" if 0 in signs else "holds"

    def _sign(self, margin: np.ndarray, p: float) -> int:
        """1 or -1 for a margin that is above or below 0, 0 for one that cannot be told from it."""
        if not margin.any():  # the same figures in every seed
            return 0 if self.strict else 1
        return int(np.sign(margin.mean())) if p < LEVEL else 0


@dataclass(frozen=True)
class Verdict:
    """What our runs say of a claim. `agrees`: whether their means are as claimed, None where some are missing.

    `margins` are what was tested, and `corrected` the p-values after Holm's correction; None where there was no test.
    """

    claim: str
    word: str
    figures: str
    agrees: bool | None = None
    num_seeds: int = 0
    margins: _Margins | None = field(default=None, repr=False, compare=False)
    corrected: Sequence[float] | None = None
    missing: Sequence[str] = ()  # what an open claim lacks, if its figures say more

    @property
    def is_beyond_noise(self) -> bool:
        """Whether a test has decided the claim; figures that are the same in every seed may do so without."""
        return self.margins is not None and self.word in DECIDED and min(self.margins.p_values()) < LEVEL

    @property
    def stays(self) -> bool:
        """Whether a claim that holds or does not hold does so after the correction too."""
        assert self.margins is not None
        return self.word.startswith(self.margins.word(self.corrected))


def round_off(differences: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """Differences of the compared values without what rounding adds to them, whatever their unit."""
    largest = np.abs(compared).max()
    if not 0 < largest < np.inf:
        return differences
    return np.round(differences, DIGITS - 1 - math.floor(math.log10(largest)))


def p_value(margin: np.ndarray, test_share: float = 0.0) -> float:
    """How probable such differences [seeds], or larger ones either way, are if there is none: a paired t-test.

    Trials that are random splits of one data set, each tested on `test_share` of it, share training examples. The
    variance of their mean is then not s^2 / n but s^2 (1 / n + n_test / n_train) (Nadeau and Bengio 2003).
    """
    from scipy.stats import t

    if np.ptp(margin) > 0:
        return float(2 * t.sf(abs(margin.mean()) / _standard_error(margin, test_share), len(margin) - 1))
    return 2.0 ** (1 - len(margin)) if margin.any() else 1.0


def confidence_interval(margin: np.ndarray, test_share: float = 0.0) -> tuple[float, float]:
    """The mean differences that the test of `p_value` does not reject at LEVEL: from where to where they lie."""
    from scipy.stats import t

    reach = t.ppf(1 - LEVEL / 2, len(margin) - 1) * _standard_error(margin, test_share)
    return float(margin.mean() - reach), float(margin.mean() + reach)


def _standard_error(margin: np.ndarray, test_share: float) -> float:
    return float(np.sqrt(margin.var(ddof=1) * (1 / len(margin) + test_share / (1 - test_share))))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction: the chance that any of these tests wrongly falls below LEVEL is LEVEL."""
    corrected, largest = list(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def verdicts(document: Document) -> list[Verdict]:
    """What our runs say of each claim; many claims that nothing is known of are one."""
    all_verdicts = _correct(
        [(_relation if claim.get("order") is None else _order)(document, claim) for claim in document["claims"]]
    )
    unknown = [verdict for verdict in all_verdicts if verdict.agrees is None]
    if len(unknown) <= MOST_OPEN:
        return all_verdicts
    missing = dict.fromkeys(part for verdict in unknown for part in verdict.missing or verdict.figures.split(", "))
    together = Verdict(f"{len(unknown)} claims of which nothing is known yet", "open", ", ".join(missing))
    return [*(verdict for verdict in all_verdicts if verdict.agrees is not None), together]


def _correct(claims: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with the p-values of all their tests together, if these are several."""
    p_values = [p for claim in claims if claim.margins for p in claim.margins.p_values()]
    if len(p_values) < 2:
        return list(claims)
    left, done = correct_p_values(p_values), []
    for claim in claims:
        if claim.margins is not None:
            own, left = left[: len(claim.margins.values)], left[len(claim.margins.values) :]
            figures = f"{claim.figures} (Holm: {' and '.join(map(_show_p, own))})"
            claim = replace(claim, figures=figures, corrected=own)
        done.append(claim)
    return done


def describe_test(document: Document, claims: Sequence[Verdict]) -> str:
    """By what test, of how many seeds, the verdicts of a table are; empty if it has none."""
    counts = sorted({verdict.num_seeds for verdict in claims if verdict.margins is not None})
    if not counts:
        if not any(verdict.num_seeds == 1 for verdict in claims):
            return ""
        return "One seed each: where the first figure lies from the second, and no verdict; `--trials` trains more."
    several = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    trials = "splits, corrected for their overlap" if document.get("test_share") else "seeds"
    text = f"By a paired t-test over {trials} (n = {several}), two-sided at {100 * LEVEL:g} %."
    num_tests = sum(len(verdict.corrected or ()) for verdict in claims)
    decided = [verdict for verdict in claims if verdict.corrected and verdict.is_beyond_noise]
    if not decided:
        return text
    stay = sum(verdict.stays for verdict in decided)
    return (
        f"{text} Verdicts beyond noise: {len(decided)}, and {stay or 'none'} after Holm's correction for the table's "
        f"{num_tests} comparisons."
    )


def _order(document: Document, claim: dict[str, Any]) -> Verdict:
    """From best to worst; rows that have not been run are left out of it, and named."""
    rows, metric = claim["order"], claim["by"]
    higher = higher_is_better(document, metric)
    text = claim.get("say") or f"{label(metric)}: {(' > ' if higher else ' < ').join(rows)}"
    trials = {row: by_row for row in rows if (by_row := by_seed(document, row, metric))}
    missing = [f"{row} {why_missing(document, row, metric)}" for row in rows if row not in trials]
    seeds = _common_seeds(trials)
    if len(trials) > 1 and not seeds:
        return Verdict(text, "open", _no_common_seed(trials))
    values = np.array([[by_row[seed] for seed in seeds] for by_row in trials.values()])
    means = [format_metric(row.mean(), metric, in_percent(document)) for row in values]
    shown = [_show(row, metric, in_percent(document)) for row in values]
    figures = ", ".join([*map(" ".join, zip(trials, shown, strict=True)), *missing])
    if len(trials) < 2:
        return Verdict(text, "open", figures, missing=missing)
    margins = _Margins.from_values(
        document, (-1 if higher else 1) * np.diff(values, axis=0), values, exact=metric in EXACT
    )
    signs = [0 if a == b else np.sign(m) for m, (a, b) in zip(margins.values[:, 0], pairwise(means), strict=True)]
    so_far = " so far" if missing else ""
    in_order = f"in this order{' but for ties' if 0 in signs else ''}{so_far}"
    return _judge(text, figures, margins, trials, "in another order" if -1 in signs else in_order, so_far)


def _relation(document: Document, claim: dict[str, Any]) -> Verdict:
    relation, within = claim["is"], claim.get("within", 0.25)
    terms = {side: MetricTerm.parse(claim[side]) for side in ("left", "right")}
    text = claim.get("say") or f"{claim['left']} is {TEXTS.get(relation, relation)} {claim['right']}"
    trials = {part: by_seed(document, *part) for term in terms.values() for part in term.parts}
    if missing := [f"{part[0]} {why_missing(document, *part)}" for part, values in trials.items() if not values]:
        return Verdict(text, "open", ", ".join(dict.fromkeys(missing)))
    if not (seeds := _common_seeds(trials)):
        return Verdict(text, "open", _no_common_seed(row for row, _ in trials))
    left, right = (
        np.array([term.value([trials[part][seed] for part in term.parts]) for seed in seeds]) for term in terms.values()
    )
    margins = _relation_margins(document, terms, left, right, relation, within)
    percent, metric = in_percent(document), terms["left"].metric
    named = [(values, term.metric or metric) for values, term in zip((left, right), terms.values(), strict=True)]
    means = [format_metric(values.mean(), name, percent) for values, name in named]
    shown = [_show(values, name, percent) for values, name in named]
    sides = zip(terms.items(), shown, strict=True)
    figures = ", ".join(f"{claim[side]} {figure}" for (side, term), figure in sides if term.parts)
    if len(seeds) > 1 and not margins.exact:
        difference = round_off(left - right, np.stack([left, right]))
        figures += f", difference {_show_difference(difference, metric, percent, document)}"
    if relation == "about":
        direction = f"{'within' if margins.agree else 'not within'} {100 * within:g} %"
    else:
        direction = "equal" if means[0] == means[1] else "higher" if left[0] > right[0] else "lower"
    return _judge(text, figures, margins, trials, direction)


def _show(values: np.ndarray, metric: str, percent: bool, sign: bool = False) -> str:
    """The mean over seeds [n] and, of several, their standard deviation (n - 1); what no seed changes has none."""
    mean = values.mean()
    text = ("+" if sign and mean >= 0 else "") + format_metric(mean, metric, percent)
    return text + (
        f" ± {format_metric(values.std(ddof=1), metric, percent)}" if len(values) > 1 and metric not in EXACT else ""
    )


def _show_difference(values: np.ndarray, metric: str, percent: bool, document: Document) -> str:
    """The mean over seeds, its standard deviation and, unless it is the same in every seed, its confidence interval."""
    text = _show(values, metric, percent, sign=True)
    if np.ptp(values) == 0:
        return text
    ends = confidence_interval(values, document.get("test_share", 0.0))
    low, high = ("+" * (end >= 0) + format_metric(end, metric, percent) for end in ends)
    return f"{text} ({100 * (1 - LEVEL):g} % CI {low} to {high})"


def _relation_margins(
    document: Document,
    terms: Mapping[str, MetricTerm],
    left: np.ndarray,
    right: np.ndarray,
    relation: str,
    within: float,
) -> _Margins:
    sides = np.stack([left, right])
    exact = all(metric in EXACT for term in terms.values() for _, metric in term.parts)
    if relation == "about":
        allowed = within * np.abs(right)
        return _Margins.from_values(
            document, [right + allowed - left, left - right + allowed], sides, strict=False, exact=exact
        )
    better = 1 if higher_is_better(document, terms["left"].metric) else -1
    sign = {"above": 1, "below": -1, "better": better, "no worse": better}.get(relation, -better)
    return _Margins.from_values(document, [sign * (left - right)], sides, not relation.startswith("no "), exact)


def _judge(
    claim: str,
    figures: str,
    margins: _Margins,
    trials: Mapping[Any, Mapping[int, float]],
    direction: str,
    so_far: str = "",
) -> Verdict:
    """The verdict of a test, or of one seed the direction. How many seeds, and p, follow the figures."""
    num_seeds = margins.values.shape[1]
    fewer = any(len(values) > num_seeds for values in trials.values())
    if margins.exact:
        details = ""
    elif num_seeds == 1:
        details = "; 1 seed in common" if fewer else ""
    else:
        p_values = " and ".join(map(_show_p, margins.p_values()))
        details = f"; {num_seeds} seeds{' in common' if fewer else ''}, {p_values}"
    if num_seeds == 1 and not margins.exact:
        return Verdict(claim, f"{direction}, one seed", figures + details, margins.agree, 1)
    word = margins.word()
    word += so_far * (word == "holds")
    if margins.exact:
        return Verdict(claim, word, figures, margins.agree)
    return Verdict(claim, word, figures + details, margins.agree, num_seeds, margins)


def _show_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _common_seeds(trials: Mapping[Any, Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*map(set, trials.values()))) if trials else []


def _no_common_seed(rows: Iterable[str]) -> str:
    return f"no seed is in all of {' and '.join(dict.fromkeys(rows))}"
