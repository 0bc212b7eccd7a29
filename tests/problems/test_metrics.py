"""Each metric against a few lines of plain numpy, hand-made cases, and the stream cut anywhere."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mheads.problems import Classification
from mheads.problems.baselines import near_chance, top
from mheads.problems.metrics import ClassificationMetrics, ClassificationResult, compute


def log_softmax(x):
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


def rank(scores, label):
    """How many classes come before the label, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda c: (-scores[c], c)).index(label)


def calibration(confidences, rights):
    error = 0.0
    for i in range(15):
        inside = [j for j, c in enumerate(confidences) if i / 15 < c <= (i + 1) / 15]
        error += abs(sum(rights[j] for j in inside) - sum(confidences[j] for j in inside))
    return 100 * error / len(confidences)


def reference(outputs: np.ndarray, y: np.ndarray) -> dict:
    """All metrics of outputs [M, N, C], one example and one member at a time."""
    num_members, n, num_classes = outputs.shape
    member_range = range(num_members)
    logp = np.array([[log_softmax(row) for row in member] for member in outputs])
    mean_p = np.exp(logp).mean(0)
    mean_scores = outputs.astype(np.float64).mean(0)
    ranks = np.array([[rank(outputs[m, i], y[i]) for i in range(n)] for m in member_range])
    mean_ranks = np.array([rank(mean_p[i], y[i]) for i in range(n)])
    loss = np.array([[-logp[m, i, y[i]] for i in range(n)] for m in member_range])
    owner = loss.argmin(0)
    ownership = np.zeros((num_members, num_classes), int)
    for i in range(n):
        ownership[owner[i], y[i]] += 1
    answers = outputs.argmax(-1)
    pairs = [[100 * float((answers[a] != answers[b]).mean()) for b in member_range] for a in member_range]
    distinct = [pairs[a][b] for a in member_range for b in member_range if a < b]
    best = range(1, min(max(num_members, 10), num_classes) + 1)
    return {
        "members": [100 * float((ranks[m] == 0).mean()) for m in member_range],
        "single": 100 * float((ranks == 0).mean()),
        "ensemble_mean": 100 * float((mean_ranks == 0).mean()),
        "ensemble_mean_scores": 100 * float(np.mean([rank(mean_scores[i], y[i]) == 0 for i in range(n)])),
        "oracle": 100 * float((ranks == 0).any(0).mean()),
        "oracle_by_loss": 100 * float(np.mean([ranks[owner[i], i] == 0 for i in range(n)])),
        "top_k": {
            "single": [100 * float((ranks < j).mean()) for j in best],
            "ensemble_mean": [100 * float((mean_ranks < j).mean()) for j in best],
        },
        "nll": {
            "single": float(loss.mean()),
            "ensemble_mean": float(np.mean([-np.log(mean_p[i, y[i]]) for i in range(n)])),
        },
        "calibration_error": {
            "single": float(np.mean([calibration(np.exp(logp[m].max(-1)), ranks[m] == 0) for m in member_range])),
            "ensemble_mean": calibration(mean_p.max(-1), mean_ranks == 0),
        },
        "disagreement": float(np.mean(distinct)) if distinct else 0.0,
        "disagreement_pairs": pairs,
        "ownership": ownership.tolist(),
        "examples": n,
        "oracle_chance": 100 * float(np.sort(np.bincount(y))[::-1][:num_members].sum()) / n,
    }


def random_case(members, examples, classes, scale=3.0, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=examples)
    outputs = rng.normal(size=(members, examples, classes)) * scale
    outputs[:, np.arange(examples), y] += scale * rng.random((members, examples))
    return outputs.astype(np.float32), y


def approximately(value):
    """pytest.approx through nested dicts and lists."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    "members, examples, classes", [(4, 90, 10), (1, 50, 10), (3, 60, 2), (6, 60, 3), (5, 40, 100), (2, 1, 4)]
)
@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_agrees_with_plain_numpy(members, examples, classes, scale):
    outputs, y = random_case(members, examples, classes, scale)
    result = compute(outputs, y)
    expected = reference(outputs, y)
    further = {"brier", "nll_by_members"}  # which test_uncertainty.py has
    assert {k: v for k, v in vars(result).items() if v is not None and k not in further} == approximately(expected)
    for name in ("single", "ensemble_mean", "oracle", "disagreement"):
        assert result.to_dict()[name] == round(expected[name], 4)
    assert result.to_dict()["nll"] == {k: round(v, 6) for k, v in expected["nll"].items()}


def test_hand_made_case():
    log = math.log
    outputs = torch.tensor(
        [
            [[log(0.6), log(0.3), log(0.1)], [log(0.1), log(0.75), log(0.15)]],  # answers 0, 1
            [[log(0.3), log(0.5), log(0.2)], [log(0.3), log(0.6), log(0.1)]],  # answers 1, 1
        ]
    )
    result = compute(outputs, torch.tensor([1, 2])).to_dict()
    assert result["members"] == [0, 50]
    assert result["single"] == 25
    assert result["ensemble_mean"] == 0  # (0.45, 0.4, 0.15) and (0.2, 0.675, 0.125)
    assert result["oracle"] == 50
    assert result["oracle_by_loss"] == 50
    assert result["ownership"] == [[0, 0, 1], [0, 1, 0]]  # 0.5 against 0.3, 0.15 against 0.1
    assert result["top_k"] == {"single": [25, 75, 100], "ensemble_mean": [0, 50, 100]}
    assert result["disagreement"] == 50
    assert result["disagreement_pairs"] == [[0, 50], [50, 0]]
    assert result["nll"]["ensemble_mean"] == pytest.approx(-(log(0.4) + log(0.125)) / 2, abs=1e-6)
    assert result["calibration_error"]["ensemble_mean"] == pytest.approx(100 * (0.45 + 0.675) / 2, abs=1e-4)


def test_means_of_probabilities_and_of_scores_differ():
    outputs = torch.tensor([[[0.0, 20.0]], [[0.5, 0.0]], [[0.5, 0.0]]])  # p(1): 1, 0.38, 0.38
    assert compute(outputs, torch.tensor([1])).ensemble_mean == 100
    outputs = torch.tensor([[[0.0, 20.0]], [[5.0, 0.0]], [[5.0, 0.0]]])  # p(1): 1, 0.01, 0.01
    result = compute(outputs, torch.tensor([1]))
    assert (result.ensemble_mean, result.ensemble_mean_scores) == (0, 100)


def test_the_oracle_by_loss_may_choose_a_wrong_member():
    # The first member is right with 0.4 of three; the second is wrong, but gives the true class 0.45.
    p = torch.tensor([[[0.4, 0.3, 0.3]], [[0.45, 0.55, 0.0]]])
    result = compute(p.log(), torch.tensor([0]))
    assert (result.oracle, result.oracle_by_loss) == (100, 0)


def test_of_equal_scores_the_lower_index_answers():
    outputs = torch.zeros(2, 3, 3)
    result = compute(outputs, torch.tensor([0, 1, 2]))
    assert result.top_k["single"] == pytest.approx([100 / 3, 200 / 3, 100])
    assert result.ensemble_mean == pytest.approx(100 / 3)
    assert result.ownership == [[1, 1, 1], [0, 0, 0]]
    assert result.disagreement == 0


def test_nan_is_never_right_and_never_owns():
    nan = math.nan
    outputs = torch.tensor([[[nan, 0.0], [nan, nan]], [[-1.0, 1.0], [-5.0, 1.0]], [[nan, nan], [nan, nan]]])
    result = compute(outputs, torch.tensor([0, 0]))
    assert result.members == [0, 0, 0]
    assert result.top_k["single"] == pytest.approx([0, 100 / 3])  # even among the best 2 of 2
    assert result.top_k["ensemble_mean"] == [0, 0]
    assert result.oracle == 0
    assert result.ownership == [[0, 0], [2, 0], [0, 0]]
    assert math.isnan(result.nll["single"])
    assert math.isnan(result.calibration_error["ensemble_mean"])


def test_nobody_owns_what_all_answer_with_nan():
    result = compute(torch.full((2, 1, 3), math.nan), torch.tensor([0]))
    assert result.ownership == [[0, 0, 0], [0, 0, 0]]
    assert result.oracle_by_loss == 0


def test_an_infinite_loss_owns_before_nan():
    impossible, broken = [-math.inf, 0.0], [math.nan, 0.0]
    result = compute(torch.tensor([[broken], [impossible]]), torch.tensor([0]))
    assert result.ownership == [[0, 0], [1, 0]]


def test_a_true_class_that_all_find_nearly_impossible_has_a_finite_likelihood():
    outputs = torch.tensor([[[0.0, 2000.0]], [[0.0, 3000.0]]])
    assert compute(outputs, torch.tensor([0])).nll["ensemble_mean"] == pytest.approx(2000 + math.log(2))


def test_confident_and_right_is_calibrated():
    outputs = torch.tensor([[[50.0, 0.0]] * 4])
    result = compute(outputs, torch.tensor([0, 0, 0, 1]))
    assert result.calibration_error["single"] == pytest.approx(25)
    assert compute(outputs[:, :3], torch.tensor([0, 0, 0])).calibration_error["single"] == pytest.approx(0)


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 15])
def test_a_confidence_at_the_edge_of_two_bins_is_in_the_lower_one(classes):
    """Of equal scores each class has 1 / C: at the upper edge of bin 15 / C, for 3, 5 and 15; 1 is in the last bin."""
    outputs = torch.zeros(1, 4, classes)
    outputs[0, 2:, 0] = 1000.0
    metrics = ClassificationMetrics(1, classes)
    metrics.update(outputs, torch.tensor([0, 1, 0, 1]))
    found = metrics.reliability()["members"]
    expected = [0.0] * 15
    expected[math.ceil(15 / classes) - 1] += 2
    expected[14] += 2
    assert found["examples"] == expected


def test_confidences_on_both_sides_of_an_edge_are_not_averaged():
    # 1/5 = 3/15 and right; 1/4, in the bin above, and wrong: one too unsure, the other too sure.
    quarter = [math.log(3 / 16), math.log(1 / 4), *[math.log(3 / 16)] * 3]
    outputs = torch.tensor([[[0.0] * 5, quarter]], dtype=torch.float64)
    result = compute(outputs, torch.tensor([0, 0]))
    assert result.calibration_error["single"] == pytest.approx(100 * (0.8 + 0.25) / 2)


def test_a_single_member_is_its_own_ensemble():
    result = compute(*random_case(1, 40, 5)).to_dict()
    for name in ("nll", "calibration_error", "top_k"):
        assert result[name]["single"] == result[name]["ensemble_mean"]
    assert result["single"] == result["ensemble_mean"] == result["oracle"] == result["oracle_by_loss"]
    assert (result["disagreement"], result["disagreement_pairs"]) == (0, [[0]])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_cut_of_the_stream_does_not_matter(data):
    members, examples, classes = (data.draw(st.integers(1, high)) for high in (5, 40, 6))
    outputs, y = random_case(members, examples, classes, seed=data.draw(st.integers(0, 10**6)))
    if data.draw(st.booleans()):
        outputs = outputs.round()  # many ties
    cuts = data.draw(st.lists(st.integers(0, examples), max_size=8).map(sorted))  # empty pieces too
    metrics = ClassificationMetrics(members, classes)
    for start, stop in zip([0, *cuts], [*cuts, examples], strict=True):
        metrics.update(torch.from_numpy(outputs[:, start:stop]), torch.from_numpy(y[start:stop]))
    assert metrics.result().to_dict() == compute(outputs, y).to_dict()


def test_strides_and_a_graph_do_not_matter():
    outputs, y = random_case(3, 20, 7)
    strided = torch.from_numpy(outputs).permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert compute(strided, torch.from_numpy(y)) == compute(outputs, y)


def test_a_printed_result_is_its_headline():
    """Two members, of which the second is always right and the first on one of two examples."""
    outputs = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[9.0, 0.0], [0.0, 9.0]]])
    result = compute(outputs, torch.tensor([0, 1]))
    assert str(result) == "Ensemble-Mean 100.00, Oracle 100.00 (by chance 100.00), members 50.0 100.0 (% of 2 examples)"
    assert str(ClassificationResult.unknown(2, 2)) == "not evaluated"


def test_json_round_trip():
    result = compute(*random_case(3, 70, 4))
    values = json.loads(json.dumps({**result.to_dict(), "seconds": 3}, allow_nan=False))
    assert ClassificationResult.from_dict(values).to_dict() == result.to_dict()
    assert ClassificationResult.from_dict(values).oracle == round(result.oracle, 4)


def test_json_has_null_for_nan():
    result = compute(torch.full((2, 1, 3), math.nan), torch.tensor([0]))
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["nll"]["single"] is None
    assert math.isnan(ClassificationResult.from_dict(values).nll["single"])


@pytest.mark.parametrize(
    "outputs, y, message",
    [
        (torch.zeros(2, 3, 4), torch.zeros(5, dtype=torch.long), r"\(2, 3, 4\) and \(5,\)"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), r"expected \(M, N, C\)"),
        (torch.zeros(2, 3, 4), torch.tensor([0, 1, 4]), "labels run from 0 to 4, outputs have 4 classes"),
        (torch.zeros(2, 3, 4), torch.tensor([0, 1, -1]), "labels run from -1 to 1"),
        (torch.zeros(2, 0, 4), torch.zeros(0, dtype=torch.long), "no examples"),
    ],
)
def test_mistakes_are_explained(outputs, y, message):
    with pytest.raises(ValueError, match=message):
        compute(outputs, y)


def test_update_refuses_another_shape():
    with pytest.raises(ValueError, match=r"outputs are \(2, 3, 5\), expected \(M, b, C\) = \(2, 3, 4\)"):
        ClassificationMetrics(2, 4).update(torch.zeros(2, 3, 5), torch.zeros(3, dtype=torch.long))


def test_one_network_is_measured_with_as_many_guesses_as_an_ensemble_has_members():
    outputs, y = random_case(1, 60, 12)
    found = compute(outputs, y).to_dict()
    best = np.argsort(-outputs[0], -1)
    assert top(found, 12) is None  # all classes
    for k in (1, 4, 10):
        right = (best[:, :k] == y[:, None]).any(1)
        assert top(found, k) == top(found, k, "single") == pytest.approx(100 * right.mean(), abs=1e-4)
    assert top(found, 11) is None  # which no ensemble of fewer members compares with
    few = compute(*random_case(1, 60, 3)).to_dict()
    assert top(few, 3) is top(few, 8) is None  # there are three classes: it would be 100
    assert [name for name, _ in Classification.rows(few) if "top" in name] == ["top-2"]


def test_results_of_earlier_versions_have_their_top_m():
    found = compute(*random_case(4, 60, 12)).to_dict()
    kept = {who: values[:4] for who, values in found.pop("top_k").items()}
    old = {**{key: value for key, value in found.items() if key != "oracle_chance"}, "top_m": kept}
    assert top(old, 4) == kept["ensemble_mean"][3]
    assert top(old, 5) is None
    assert not near_chance(old)
    assert ClassificationResult.from_dict(old).top_k == kept
    assert "top-4" in ClassificationResult.from_dict(old).headline()


def test_constant_members_have_the_oracle_of_the_most_frequent_classes():
    y = torch.tensor([0] * 5 + [1] * 4 + [2] * 1)
    outputs = torch.full((2, 10, 3), -5.0)
    outputs[0, :, 0] = outputs[1, :, 1] = 5.0  # member 0 always says 0, member 1 always 1
    found = compute(outputs, y).to_dict()
    assert found["oracle"] == found["oracle_chance"] == 90
    assert near_chance(found)
    assert compute(outputs, y).headline()["Oracle"] == "90.00 (by chance 90.00)"
    assert ("chance", "2 members that always give one class each have an Oracle of 90.00 %") in Classification.rows(
        {**found, "problem": "classification"}
    )
    outputs[0] = outputs[1] = torch.nn.functional.one_hot(y).float() * 9
    right = compute(outputs, y).to_dict()
    assert (right["oracle"], right["oracle_chance"]) == (100, 90)
    assert not near_chance(right) and compute(outputs, y).headline()["Oracle"] == "100.00"
    all_classes = compute(*random_case(3, 60, 3))
    assert all_classes.headline()["Oracle"].endswith(" (by chance 100.00)")
    assert not any(
        "top-" in name for name in (*all_classes.headline(), *dict(Classification.rows(all_classes.to_dict())))
    )
    assert "chance" not in dict(Classification.rows({**right, "problem": "classification"}))


def test_a_table_shows_what_an_oracle_compares_with():
    several = dict(Classification.rows(compute(*random_case(4, 60, 12)).to_dict()))
    assert re.fullmatch(r"mean member \d+\.\d\d %, Ensemble-Mean \d+\.\d\d %", several["top-4"])
    one = compute(*random_case(1, 60, 12)).to_dict()
    shown = dict(Classification.rows(one))["top-2 to top-5"]
    assert shown == "  ".join(f"{value:.2f}" for value in one["top_k"]["single"][1:5]) + " %"
