"""Brier score, temperature scaling, AUROC, FPR95 and DEE, against scikit-learn, scipy and numpy."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, roc_curve

from mheads.problems.metrics import ClassificationMetrics, compute, subsets
from mheads.problems.uncertainty import (
    EnsembleOutputs,
    auroc,
    deep_ensemble_equivalent,
    fit_temperature,
    fpr_at,
    measure_other_data,
    measure_scaled,
    measure_shifted,
)

M, N, C = 4, 400, 5
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, C, 2 * N)
LOGITS = 3 * RANDOM.normal(size=(M, 2 * N, C)) + 2 * np.eye(C)[LABELS]  # far too sure of themselves
HELD_OUT, Y_HELD_OUT, OUTPUTS, Y = LOGITS[:, :N], LABELS[:N], LOGITS[:, N:], LABELS[N:]
WEIGHTS = RANDOM.dirichlet(np.ones(M), 2 * N).T


def torches(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def ece(p, y):
    """The expected calibration error over 15 bins, in percent."""
    confidence, right = p.max(1), p.argmax(1) == y
    bins = np.ceil(15 * confidence).astype(int)
    return 100 * sum(abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(1, 16)) / len(y)


def best_temperature(scores, y):
    found = minimize_scalar(
        lambda t: log_loss(y, softmax(scores / np.exp(t), 1)), bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}
    )
    return np.exp(found.x)


def test_the_brier_score_is_that_of_scikit_learn():
    result, p = compute(OUTPUTS, Y), softmax(OUTPUTS, -1)
    brier = [brier_score_loss(Y, each, scale_by_half=False) for each in (*p, p.mean(0))]
    assert result.brier == pytest.approx({"single": np.mean(brier[:M]), "ensemble_mean": brier[M]}, abs=1e-9)
    cut = ClassificationMetrics(M, C, scored=True)
    for rows in (slice(0, 7), slice(7, N)):
        cut.update(*torches(OUTPUTS[:, rows], Y[rows], WEIGHTS[:, N:][:, rows]))
    scored = brier_score_loss(Y, (p * WEIGHTS[:, N:, None]).sum(0), scale_by_half=False)
    assert cut.result().brier == pytest.approx(result.brier | {"ensemble_scored": scored}, abs=1e-9)


def test_likelihoods_of_fewer_members_are_means_over_all_subsets():
    p = softmax(OUTPUTS, -1)
    expected = [
        np.mean([log_loss(Y, p[[*chosen]].mean(0)) for chosen in combinations(range(M), size)])
        for size in range(1, M + 1)
    ]
    result = compute(OUTPUTS, Y)
    assert result.nll_by_members == pytest.approx(expected, abs=1e-9)
    assert result.nll_by_members[-1] == pytest.approx(result.nll["ensemble_mean"], abs=1e-12)
    assert len(subsets(6, 3)) == 20 and len(set(subsets(6, 3))) == 20
    assert subsets(9, 3)[7:] == [(7, 8, 0), (8, 0, 1)] and len(subsets(50, 2)) == 20
    assert len(compute(np.zeros((40, 3, 2)), [0, 1, 1]).nll_by_members) == 16


def test_a_temperature_has_the_highest_likelihood_on_the_held_out_examples():
    for scores in (*HELD_OUT, 0.01 * HELD_OUT[0]):
        found = fit_temperature(scores, Y_HELD_OUT)
        ours, best = (
            log_loss(Y_HELD_OUT, softmax(scores / t, 1)) for t in (found, best_temperature(scores, Y_HELD_OUT))
        )
        assert ours <= best + 1e-12
    assert fit_temperature(HELD_OUT[0], Y_HELD_OUT) > 1.5
    assert fit_temperature(np.eye(C)[Y], Y) == pytest.approx(0.001)  # always right: as sure as can be
    assert fit_temperature(-np.eye(C)[Y], Y) == pytest.approx(1000)  # always wrong: as unsure
    assert math.isnan(fit_temperature(np.full((2, 2), np.nan), [0, 1]))


@pytest.mark.parametrize("of_scores", [False, True])
def test_scaled_measures_are_those_of_scaled_probabilities(of_scores):
    logits = torches(OUTPUTS, HELD_OUT)
    inputs = [
        EnsembleOutputs(each, torch.from_numpy(weights), of_scores)
        for each, weights in zip(logits, (WEIGHTS[:, N:], WEIGHTS[:, :N]), strict=True)
    ]
    found = measure_scaled(inputs[0], torch.from_numpy(Y), inputs[1], torch.from_numpy(Y_HELD_OUT))

    def together(outputs, weights):
        mean = outputs.mean(0) if of_scores else logsumexp(log_softmax(outputs, -1), 0)
        return [*outputs, mean, np.log((softmax(outputs, -1) * weights[..., None]).sum(0))]

    fitted, measured = together(HELD_OUT, WEIGHTS[:, :N]), together(OUTPUTS, WEIGHTS[:, N:])
    t = [best_temperature(scores, Y_HELD_OUT) for scores in fitted]
    p = [softmax(scores / each, 1) for scores, each in zip(measured, t, strict=True)]
    for key, tolerance, values in (
        ("temperature", 1e-5, t),
        ("nll_scaled", 1e-6, [log_loss(Y, each) for each in p]),
        ("brier_scaled", 1e-6, [brier_score_loss(Y, each, scale_by_half=False) for each in p]),
        ("calibration_error_scaled", 1e-3, [ece(each, Y) for each in p]),  # in percent
    ):
        names = {"single": np.mean(values[:M]), "ensemble_mean": values[M], "ensemble_scored": values[M + 1]}
        assert found[key] == pytest.approx(names, abs=tolerance), key
    by_members = found["nll_by_members_scaled"]
    assert by_members[0] == pytest.approx(found["nll_scaled"]["single"], abs=1e-12)
    if not of_scores:
        assert by_members[-1] == pytest.approx(found["nll_scaled"]["ensemble_mean"], abs=1e-12)
        assert found["nll_scaled"]["ensemble_mean"] < compute(OUTPUTS, Y).nll["ensemble_mean"]


def test_auroc_and_fpr95_are_those_of_scikit_learn_also_with_ties():
    inside, outside = RANDOM.normal(1, 1, 500).round(1), RANDOM.normal(0, 1, 300).round(1)
    is_inside, scores = np.r_[np.ones(500), np.zeros(300)], np.r_[inside, outside]
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(is_inside, scores), abs=1e-12)
    for recall in (0.95, 0.5, 1.0):
        fpr, tpr, _ = roc_curve(is_inside, scores, drop_intermediate=False)
        assert fpr_at(inside, outside, recall) == pytest.approx(fpr[tpr >= recall - 1e-12][0], abs=1e-12)
    assert math.isnan(auroc(np.array([np.nan]), outside)) and math.isnan(fpr_at(inside, np.array([np.nan])))

    other = 2 * RANDOM.normal(size=(M, 300, C))
    found = measure_other_data(*(EnsembleOutputs(torch.from_numpy(each)) for each in (OUTPUTS, other)))
    is_inside = np.r_[np.ones(N), np.zeros(300)]
    p = [np.r_[a, b] for a, b in zip(softmax(OUTPUTS, -1), softmax(other, -1), strict=True)]
    areas = [100 * roc_auc_score(is_inside, each.max(1)) for each in (*p, np.mean(p, 0))]
    assert found["auroc"] == pytest.approx({"single": np.mean(areas[:M]), "ensemble_mean": areas[M]}, abs=1e-9)
    fpr, tpr, _ = roc_curve(is_inside, np.mean(p, 0).max(1), drop_intermediate=False)
    assert found["fpr95"]["ensemble_mean"] == pytest.approx(100 * fpr[tpr >= 0.95][0], abs=1e-9)


@pytest.mark.parametrize(
    ("nll", "members"),
    [(0.9, 1.0), (0.8, 1.0), (0.7, 1.5), (0.6, 2.0), (0.55, 3.0), (0.5375, 3.5), (0.525, 4.0), (0.52, math.inf)],
)
def test_the_deep_ensemble_equivalent_is_linear_between_numbers_of_members(nll, members):
    assert deep_ensemble_equivalent(nll, [0.8, 0.6, 0.55, 0.525]) == pytest.approx(members)
    assert math.isnan(deep_ensemble_equivalent(math.nan, [0.8, 0.6]))


def test_the_deep_ensemble_equivalent_of_members_that_are_infinitely_unlikely_alone():
    """As where they are masked, or never right: from infinity on there is no line, so the next number counts."""
    assert deep_ensemble_equivalent(0.5, [math.inf, 0.4]) == 2
    assert deep_ensemble_equivalent(0.5, [math.inf, math.inf, 0.6, 0.4]) == 3.5
    assert deep_ensemble_equivalent(math.inf, [math.inf, 0.4]) == 1


def test_scored_members_that_are_nearly_certain_have_finite_likelihoods():
    """exp(-2000) is 0 as a float, but the logarithm of the weighted mean is a number, and the same everywhere."""
    logits = torch.tensor([[[0.0, 2000.0, 3.0], [5.0, 0.0, 0.0]], [[0.0, 2500.0, 0.0], [0.0, 1.0, 0.0]]]).double()
    weights, y = torch.tensor([[0.25, 0.5], [0.75, 0.5]]), torch.tensor([0, 0])
    metrics = ClassificationMetrics(2, 3, scored=True)
    metrics.update(logits, y, weights)
    outputs = EnsembleOutputs(logits, weights)
    expected = metrics.result().nll
    assert expected["ensemble_scored"] > 900
    assert measure_shifted(outputs, y)["nll_shifted"] == pytest.approx(expected, abs=1e-9)
    scaled = measure_scaled(outputs, y, outputs, y)
    assert all(map(math.isfinite, [*scaled["temperature"].values(), *scaled["nll_scaled"].values()]))


def test_a_masked_class_has_no_part_in_a_temperature():
    """A network that gives it -inf, so that its probability is 0."""
    masked = np.concatenate([HELD_OUT[0], np.full((N, 1), -np.inf)], 1)
    assert fit_temperature(masked, Y_HELD_OUT) == pytest.approx(fit_temperature(HELD_OUT[0], Y_HELD_OUT), abs=1e-9)
    assert math.isnan(fit_temperature(masked, np.full(N, C)))  # no temperature makes it possible
