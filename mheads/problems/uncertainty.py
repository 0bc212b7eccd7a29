"""The uncertainty of an ensemble: temperature scaling, other data, and how many independent members it equals.

Legend: M members, N examples, C classes; scores are logits, or logarithms of probabilities. All arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mheads.problems.metrics import MOST_TOGETHER, compute, log_mean, subsets
from mheads.problems.result import TOGETHER

LARGEST_TEMPERATURE = 1000.0  # and its inverse the smallest: scores that are always right ask for 0


def fit_temperature(scores: Tensor | np.ndarray, y: Tensor | np.ndarray) -> float:
    """The temperature T > 0 for which softmax(scores / T) gives labels the highest likelihood: [N, C], [N].

    The mean of -log softmax(b * scores)[y] is convex in b = 1 / T; its slope, mean(sum_c p_c z_c - z_y), has one zero.
    """
    from scipy.optimize import brentq

    z = torch.as_tensor(scores).double()
    true = z[torch.arange(len(z)), torch.as_tensor(y)]
    finite = z.clamp(min=torch.finfo(z.dtype).min)  # 0 * -inf, of a class that is masked, would be NaN

    def slope(b: float) -> float:
        return float(((b * z).softmax(-1) * finite).sum(-1).sub(true).mean())

    low, high = 1 / LARGEST_TEMPERATURE, LARGEST_TEMPERATURE
    if not math.isfinite(slope(1.0)):
        return math.nan
    if slope(low) >= 0:
        return LARGEST_TEMPERATURE
    return 1 / high if slope(high) <= 0 else 1 / float(brentq(slope, low, high, xtol=1e-12, rtol=1e-12))


class EnsembleOutputs(NamedTuple):
    """Logits [M, N, C], and weights [M, N] if members have scores; `of_scores`: the ensemble answers with the mean of
    logits, not of probabilities."""

    logits: Tensor
    weights: Tensor | None = None
    of_scores: bool = False

    def scores(self) -> dict[str, list[Tensor]]:
        """Scores [N, C] of each predictor: of every member (`single`), and of what members answer together."""
        logits = self.logits.double()
        logs = logits.log_softmax(-1)
        together = [logits.mean(0) if self.of_scores else log_mean(logs)]
        if self.weights is not None:
            together.append(log_mean(logs, self.weights))
        return {"single": [*logits], **{name: [scores] for name, scores in zip(TOGETHER, together, strict=False)}}


def fit_temperatures(held_out: EnsembleOutputs, y: Tensor) -> dict[str, list[float]]:
    """A temperature for each predictor of `EnsembleOutputs.scores`."""
    return {name: [fit_temperature(each, y) for each in scores] for name, scores in held_out.scores().items()}


def measure_scaled(
    outputs: EnsembleOutputs, y: Tensor, held_out: EnsembleOutputs, held_out_y: Tensor
) -> dict[str, Any]:
    """Temperatures fitted on held-out examples, and likelihood, calibration and Brier score with them on others.

    Each member has a temperature of its own (`single` are means over members), and so has what members answer together,
    of which the mean is taken first. `nll_by_members_scaled` is for the mean of the probabilities of 1, 2, .. members.
    """
    measures: dict[str, Any] = {}
    fitted = fit_temperatures(held_out, held_out_y)
    for name, scores in outputs.scores().items():
        result = _compute_scaled(scores, fitted[name], y)
        measures.setdefault("temperature", {})[name] = sum(fitted[name]) / len(fitted[name])
        for key in ("nll", "calibration_error", "brier"):
            measures.setdefault(f"{key}_scaled", {})[name] = getattr(result, key)["single"]

    def scaled_nll(members: tuple[int, ...]) -> float:
        some, held = (
            EnsembleOutputs(part.logits[[*members]]).scores()["ensemble_mean"][0] for part in (outputs, held_out)
        )
        logs = (some / fit_temperature(held, held_out_y)).log_softmax(-1)
        return float(-logs[torch.arange(len(y)), y].mean())

    num_members = len(outputs.logits)
    measures["nll_by_members_scaled"] = [
        float(np.mean([scaled_nll(chosen) for chosen in subsets(num_members, size)]))
        for size in range(1, min(num_members, MOST_TOGETHER) + 1)
    ]
    return measures


def measure_shifted(
    outputs: EnsembleOutputs, y: Tensor, temperatures: dict[str, list[float]] | None = None
) -> dict[str, dict[str, float]]:
    """Accuracy in percent, likelihood and calibration on examples of the same classes from another source, such as
    corrupted images; with the temperatures that were fitted on the run's own examples, if there are some."""
    measures: dict[str, dict[str, float]] = {"accuracy_shifted": {}, "nll_shifted": {}, "calibration_error_shifted": {}}
    for name, scores in outputs.scores().items():
        result = _compute_scaled(scores, temperatures[name] if temperatures else [1.0] * len(scores), y)
        measures["accuracy_shifted"][name] = result.single
        measures["nll_shifted"][name] = result.nll["single"]
        measures["calibration_error_shifted"][name] = result.calibration_error["single"]
    return measures


def _compute_scaled(scores: Sequence[Tensor], temperatures: Sequence[float], y: Tensor) -> Any:
    return compute(torch.stack([each / t for each, t in zip(scores, temperatures, strict=True)]), y)


def measure_other_data(outputs: EnsembleOutputs, other: EnsembleOutputs) -> dict[str, dict[str, float]]:
    """How well confidence, the largest probability, tells the run's examples from others, in percent.

    `auroc`: how often one of the run's has more confidence than one of the others, ties count half. `fpr95`: how many
    of the others reach the confidence that 95 % of the run's reach.
    """
    measures: dict[str, dict[str, float]] = {"auroc": {}, "fpr95": {}}
    others = other.scores()
    for name, scores in outputs.scores().items():
        pairs = [(_confidence(own), _confidence(far)) for own, far in zip(scores, others[name], strict=True)]
        measures["auroc"][name] = 100 * float(np.mean([auroc(*pair) for pair in pairs]))
        measures["fpr95"][name] = 100 * float(np.mean([fpr_at(*pair) for pair in pairs]))
    return measures


def _confidence(scores: Tensor) -> np.ndarray:
    return scores.softmax(-1).amax(-1).numpy()


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """The area under the ROC curve of scores that should be higher inside: the share of pairs in this order."""
    if np.isnan(inside).any() or np.isnan(outside).any():
        return math.nan
    ordered = np.sort(outside)
    below, up_to = (np.searchsorted(ordered, inside, side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(ordered))


def fpr_at(inside: np.ndarray, outside: np.ndarray, recall: float = 0.95) -> float:
    """The share of scores outside that are not below the highest threshold which `recall` of those inside reach."""
    if np.isnan(inside).any() or np.isnan(outside).any():
        return math.nan
    threshold = np.sort(inside)[::-1][math.ceil(recall * len(inside) - 1e-9) - 1]
    return float((outside >= threshold).mean())


def deep_ensemble_equivalent(nll: float, independent: Sequence[float]) -> float:
    """How many independent members have this negative log-likelihood: DEE, Ashukha et al. 2020.

    `independent` is that of the mean of 1, 2, .. independent members (`nll_by_members` of a result), linear between. 1
    for what is no better than one member, and infinity for what is better than all of them. Ashukha et al. compare
    likelihoods after temperature scaling: `nll_scaled` with `nll_by_members_scaled`.
    """
    if math.isnan(nll) or any(map(math.isnan, independent)):
        return math.nan
    if nll >= independent[0]:
        return 1.0
    for count, (before, after) in enumerate(pairwise(independent), 1):
        if after <= nll:  # nothing is linear from infinity on
            return count + (1.0 if math.isinf(before) else (before - nll) / (before - after))
    return math.inf
