"""What an ensemble knows, measured from its outputs: streamed, and exact however the stream is cut.

Legend: M members, b examples of one update, C classes. All arithmetic is in float64, so that the numbers can
be recomputed from saved outputs to the last digit shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mheads.common.schemas import Answers, Number, Ranks
from mheads.problems.baselines import chance_of_oracle, tell_chance, top
from mheads.problems.result import TOGETHER, PercentResult

BINS = 15  # of the expected calibration error
LEAST_K = 10  # top_k goes at least so far, so that one network can be compared with an Oracle of several
MOST_SUBSETS = 20  # of equal size, over which `nll_by_members` is a mean: all of 6 members
MOST_TOGETHER = 16  # members that it goes up to
CHUNK = 1000  # examples that `compute` looks at together, to bound its memory


@dataclass(frozen=True)
class ClassificationResult(PercentResult):
    """Accuracies, in percent, as calibration errors are; groups are classes.

    `ensemble_mean` is of the mean of the members' probabilities (of members trained on the mean of their scores, that
    mean). `oracle`: at least one member is right.
    """

    problem: ClassVar[str] = "classification"

    ensemble_mean_scores: Number  # of the mean of the logits
    oracle_by_loss: Number  # the owner, the member with the lowest loss on the example, is right
    top_k: Ranks  # single, ensemble_mean: the true class is among the best 1, 2, .. of max(M, 10)
    nll: Answers  # single, ensemble_mean: mean of -log p(true class)
    calibration_error: Answers  # single, ensemble_mean: mean |accuracy - confidence| over 15 bins
    disagreement: Number  # answers that differ, mean over pairs of members
    disagreement_pairs: list[list[Number]]  # [M][M]
    oracle_chance: Number | None = None  # the Oracle of members that always give one class each, see `chance_of_oracle`
    brier: Answers | None = None  # single, ensemble_mean: mean of sum_c (p_c - y_c)^2
    nll_by_members: list[Number] | None = None  # of the mean of 1, 2, .. members, mean over `subsets` of them
    # What other examples are needed for, see `uncertainty.py`: single, ensemble_mean.
    temperature: Answers | None = None
    nll_scaled: Answers | None = None
    calibration_error_scaled: Answers | None = None
    brier_scaled: Answers | None = None
    nll_by_members_scaled: list[Number] | None = None
    accuracy_shifted: Answers | None = None
    nll_shifted: Answers | None = None
    calibration_error_shifted: Answers | None = None
    auroc: Answers | None = None
    fpr95: Answers | None = None

    def round_number(self, name: str, x: float) -> float:
        exact = name.startswith(("nll", "brier", "temperature"))
        return round(x, 6) if exact else super().round_number(name, x)

    def headline(self) -> dict[str, str]:
        shown = super().headline()
        shown["Oracle"] += tell_chance(vars(self))
        if (beside := top(vars(self), len(self.members))) is None or len(self.members) == 1:
            return shown
        members = shown.pop("members")
        return {**shown, f"top-{len(self.members)}": f"{beside:.2f}", "members": members}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict(({"top_k": values["top_m"]} if "top_m" in values else {}) | values)  # as it was called

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> Self:
        nan, pair = math.nan, {"single": math.nan, "ensemble_mean": math.nan}
        further |= dict.fromkeys(("ensemble_mean_scores", "oracle_by_loss", "oracle_chance", "disagreement"), nan)
        further |= {"top_k": {name: [nan] * min(max(members, LEAST_K), groups) for name in pair}}
        further |= dict.fromkeys(("nll", "calibration_error", "brier"), pair)
        further |= {"disagreement_pairs": [[nan] * members] * members}
        return super().unknown(members, groups, nll_by_members=[nan] * min(members, MOST_TOGETHER), **further)


class ClassificationMetrics:
    """Counts and sums over a stream of outputs.

    The members and, as row M, the mean of their probabilities are the M + 1 predictors of the arrays below; with
    `of_scores` that mean is the softmax of the mean of logits. If members are `scored`, their mean weighted by the
    scores is another.
    """

    result_type: ClassVar[type[ClassificationResult]] = ClassificationResult

    def __init__(self, members: int, classes: int, scored: bool = False, of_scores: bool = False) -> None:
        self.members, self.classes, self.of_scores = members, classes, of_scores
        self.examples = 0
        predictors = members + 1 + scored
        self._ranks = torch.zeros(predictors, classes + 1, dtype=torch.long)  # how often which rank
        self._losses = torch.zeros(predictors, dtype=torch.float64)
        self._brier = torch.zeros(predictors, dtype=torch.float64)
        self._by_members = torch.zeros(min(members, MOST_TOGETHER), dtype=torch.float64)
        self._confidence = torch.zeros(predictors, BINS, dtype=torch.float64)  # summed, by bin
        self._right = torch.zeros(predictors, BINS, dtype=torch.float64)
        self._binned = torch.zeros(predictors, BINS, dtype=torch.float64)
        self._ownership = torch.zeros(members, classes, dtype=torch.long)
        self._differ = torch.zeros(members, members, dtype=torch.long)
        self._labels = torch.zeros(classes, dtype=torch.long)
        self._scores_right = self._oracle_right = self._owner_right = 0

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Takes in the logits [M, b, C] and labels [b] of further examples; if scored, also weights [M, b]."""
        expected = (self.members, len(y), self.classes)
        if tuple(outputs.shape) != expected:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, expected (M, b, C) = {expected}")
        logits, y = outputs.detach().cpu().double().contiguous(), y.detach().cpu().long()  # strides decide bits of sums
        if ((y < 0) | (y >= self.classes)).any():
            raise ValueError(f"labels run from {y.min()} to {y.max()}, outputs have {self.classes} classes")

        shifted = logits - logits.amax(-1, keepdim=True)
        exps = shifted.exp()
        totals = exps.sum(-1, keepdim=True)
        probabilities = exps / totals  # [M, b, C]
        losses = totals[..., 0].log() - _of_class(shifted, y)  # [M, b]
        score = mean_members(logits)  # [b, C]
        if self.of_scores:
            together, their_losses = [score.softmax(-1)], [-_of_class(score.log_softmax(-1), y)]
        else:
            together = [mean_members(probabilities)]
            their_losses = [-log_mean(-losses)]
        if weights is not None:
            weights = weights.detach().cpu()
            together.append(weighted_mean(probabilities, weights))
            their_losses.append(-log_mean(-losses, weights))

        member_ranks = _rank(logits, y)
        ranks = torch.cat([member_ranks, *(_rank(p, y)[None] for p in together)])
        confidence = torch.cat([probabilities.amax(-1), *(p.amax(-1)[None] for p in together)])
        right = member_ranks == 0  # [M, b]
        answers = logits.argmax(-1)  # [M, b]
        owner, owned = owner_of(losses)

        self.examples += len(y)
        self._labels += torch.bincount(y, minlength=self.classes)
        add_counts(self._ranks, torch.arange(len(ranks))[:, None], ranks)
        self._losses += torch.cat([losses, *(loss[None] for loss in their_losses)]).sum(1)
        self._brier += torch.cat([_brier(probabilities, y), *(_brier(p, y)[None] for p in together)]).sum(1)
        self._by_members += torch.stack([loss.sum() for loss in losses_by_members(losses)])
        self._bin(confidence, ranks == 0)
        self._differ += (answers[:, None] != answers).sum(-1)
        add_counts(self._ownership, owner[owned], y[owned])
        self._scores_right += int((_rank(score, y) == 0).sum())
        self._oracle_right += int(right.any(0).sum())
        self._owner_right += int((right.gather(0, owner[None])[0] & owned).sum())

    def _bin(self, confidence: Tensor, right: Tensor) -> None:
        """Adds [predictors, b] to the bins (0, 1/15], (1/15, 2/15], ...; a NaN stays in the first bin's sum."""
        bins = ((confidence.nan_to_num(0) * BINS).ceil().long() - 1).clamp(0, BINS - 1)
        self._confidence.scatter_add_(1, bins, confidence)
        self._right.scatter_add_(1, bins, right.double())
        self._binned.scatter_add_(1, bins, torch.ones_like(confidence))

    def result(self) -> ClassificationResult:
        """The metrics of all examples so far."""
        if self.examples == 0:
            raise ValueError("no examples to measure")
        top = self._percent(self._ranks.cumsum(1)[:, : min(max(self.members, LEAST_K), self.classes)].double())
        pairs = self._percent(self._differ.double())
        num_pairs = max(self.members * (self.members - 1), 1)
        m = self.members
        scored = {"ensemble_scored": top[m + 1].tolist()} if len(top) > m + 1 else {}
        return self.result_type(
            members=top[:m, 0].tolist(),
            single=top[:m, 0].mean().item(),
            ensemble_mean=top[m, 0].item(),
            ensemble_mean_scores=self._percent(self._scores_right),
            oracle=self._percent(self._oracle_right),
            oracle_by_loss=self._percent(self._owner_right),
            top_k={"single": top[:m].mean(0).tolist(), "ensemble_mean": top[m].tolist(), **scored},
            nll=self._by_answer(self._losses / self.examples),
            calibration_error=self._by_answer(self._percent((self._right - self._confidence).abs().sum(1))),
            disagreement=pairs.sum().item() / num_pairs,
            disagreement_pairs=pairs.tolist(),
            ownership=self._ownership.tolist(),
            examples=self.examples,
            ensemble_scored=scored["ensemble_scored"][0] if scored else None,
            oracle_chance=chance_of_oracle(self._labels, self.members),
            brier=self._by_answer(self._brier / self.examples),
            nll_by_members=(self._by_members / self.examples).tolist(),
        )

    def reliability(self) -> dict[str, dict[str, list[float]]]:
        """Mean confidence, accuracy (in percent) and number of examples of each of the 15 bins of confidence: of all
        answers of single members, of the Ensemble-Mean and, with scores, of the Ensemble-Scored. An empty bin has NaN
        for its means."""

        def of(rows: slice) -> dict[str, list[float]]:
            examples = self._binned[rows].sum(0)
            means = {"confidence": self._confidence, "accuracy": self._right}
            shares = {name: (100 * sums[rows].sum(0) / examples).tolist() for name, sums in means.items()}
            return shares | {"examples": examples.tolist()}

        m = self.members
        bins = {"members": of(slice(0, m)), "Ensemble-Mean": of(slice(m, m + 1))}
        return bins if len(self._binned) == m + 1 else bins | {"Ensemble-Scored": of(slice(m + 1, m + 2))}

    def _by_answer(self, values: Tensor) -> dict[str, float]:
        """[predictors] -> the mean over the members, and the value of each answer of the ensemble."""
        single, together = values[: self.members].mean().item(), values[self.members :].tolist()
        return {"single": single, **dict(zip(TOGETHER, together, strict=False))}

    def _percent(self, count: Any) -> Any:
        return 100 * count / self.examples


def compute(outputs: Tensor | np.ndarray, y: Tensor | np.ndarray) -> ClassificationResult:
    """The metrics of logits [M, N, C] and labels [N]."""
    outputs, y = torch.as_tensor(outputs), torch.as_tensor(y)
    if outputs.dim() != 3 or y.shape != outputs.shape[1:2]:
        shapes = f"{tuple(outputs.shape)} and {tuple(y.shape)}"
        raise ValueError(f"outputs and labels are {shapes}, expected (M, N, C) and (N,)")
    metrics = ClassificationMetrics(outputs.shape[0], outputs.shape[2])
    for rows, labels in zip(outputs.split(CHUNK, 1), y.split(CHUNK), strict=True):
        metrics.update(rows, labels)
    return metrics.result()


def _rank(scores: Tensor, y: Tensor) -> Tensor:
    """How many classes come before the true one: scores [..., b, C], labels [b] -> [..., b].

    Of equal scores the lower index comes first. A true class whose score is NaN comes after everything, at
    rank C, so that it is never right.
    """
    true = _of_class(scores, y)[..., None]
    not_before = torch.arange(scores.shape[-1]) >= y[:, None]  # [b, C]
    behind = (scores < true) | ((scores == true) & not_before)  # with itself, unless NaN
    return scores.shape[-1] - behind.sum(-1)


def owner_of(losses: Tensor) -> tuple[Tensor, Tensor]:
    """The first member with the lowest loss, and whether there is one: [M, b] -> [b], [b].

    NaN never owns; an infinite loss does when nobody has a finite one.
    """
    owner = losses.nan_to_num(nan=math.inf).argmin(0)  # which also makes an infinite loss the largest finite one
    return owner, ~losses.isnan().all(0)


def _of_class(scores: Tensor, y: Tensor) -> Tensor:
    """The score of the labelled class: [..., b, C], [b] -> [..., b]."""
    return scores[..., torch.arange(len(y)), y]


def _brier(probabilities: Tensor, y: Tensor) -> Tensor:
    """sum_c (p_c - y_c)^2 with y as one of C: [..., b, C], [b] -> [..., b]."""
    return (probabilities**2).sum(-1) - 2 * _of_class(probabilities, y) + 1


def subsets(members: int, size: int) -> list[tuple[int, ...]]:
    """Subsets of so many members: all if they are few, else one that begins at each of the first members, in a ring."""
    if math.comb(members, size) <= MOST_SUBSETS:
        return list(combinations(range(members), size))
    return [tuple((first + i) % members for i in range(size)) for first in range(min(members, MOST_SUBSETS))]


def losses_by_members(losses: Tensor) -> list[Tensor]:
    """-log of the mean probability of 1, 2, .. members, mean over subsets: losses [M, b] -> [b] for each number."""
    return [
        torch.stack([-log_mean(-losses[[*chosen]]) for chosen in chosen_of_size]).mean(0)
        for size in range(1, min(len(losses), MOST_TOGETHER) + 1)
        for chosen_of_size in [subsets(len(losses), size)]
    ]


def mean_members(values: Tensor) -> Tensor:
    """[M, ...] -> [...], added in member order: the same rounding, hence the same ties, for any shape."""
    return _sum_members(values) / len(values)


def _sum_members(values: Tensor) -> Tensor:
    total = values[0].clone()
    for m in range(1, len(values)):  # one by one: torch.export cannot load the rest of one member, which is empty
        total += values[m]
    return total


def log_mean(logs: Tensor, weights: Tensor | None = None) -> Tensor:
    """The logarithm of the mean of members' probabilities, from their logarithms: [M, b, ...] -> [b, ...], where no
    probability underflows to 0; of the mean by weights [M, b], if there are some."""
    if weights is None:
        return torch.logsumexp(logs, 0) - math.log(len(logs))
    log_weights = weights.to(logs.dtype).log()
    return torch.logsumexp(logs + log_weights.reshape(*weights.shape, *[1] * (logs.dim() - 2)), 0)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """[M, b, ...], [M, b] that add to 1 over the members -> [b, ...], added in member order."""
    return _sum_members(values * weights.to(values.dtype).reshape(*weights.shape, *[1] * (values.dim() - 2)))


def add_counts(table: Tensor, rows: Tensor, columns: Tensor) -> None:
    """table[row, column] += 1 for each pair of the broadcast rows and columns."""
    cells = (rows * table.shape[1] + columns).flatten()
    table += torch.bincount(cells, minlength=table.numel()).view_as(table)
