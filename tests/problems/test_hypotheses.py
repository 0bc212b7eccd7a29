"""Members as hypotheses about numbers: targets of any shape, distances, densities, and answers in the old units."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import mheads
from mheads import TreeNet, UserError, fit, losses, with_scores
from mheads.networks.mlp import mlp
from mheads.problems import Regression
from mheads.problems.densities import GRID, KernelChoice, Kernels, points_of_normal

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3)).astype(np.float32)
PATHS = np.cumsum(RNG.normal(size=(120, 4, 2)), 1).astype(np.float32)  # trajectories [N, T, 2]
NUMBERS = (50 + 20 * X[:, :1] + 5 * RNG.normal(size=(120, 1))).astype(np.float32)


def paths(flat=False):
    return nn.Sequential(nn.Linear(3, 8), nn.Identity() if flat else nn.Unflatten(1, (4, 2)))


@pytest.mark.parametrize("flat", [False, True])
def test_trajectories_are_learned_in_their_shape_and_measured_as_numpy_does(flat, tmp_path):
    net = TreeNet(partial(paths, flat), members=3, seed=0)
    run = fit(
        net,
        losses.mcl(k=1),
        train=(X[:90], PATHS[:90]),
        test=(X[90:], PATHS[90:]),
        iterations=20,
        folder=tmp_path / "run",
    )
    outputs = run.predict(X[90:]).double().numpy()
    assert outputs.shape == (3, 30, 4, 2)
    errors = outputs - PATHS[90:].astype(np.float64)
    distances = np.linalg.norm(errors, axis=-1)  # [M, N, T]
    result = mheads.load(tmp_path / "run", partial(paths, flat)).result
    assert result.min_ade == pytest.approx(distances.mean(-1).min(0).mean(), rel=1e-5)
    assert result.min_fde == pytest.approx(distances[..., -1].min(0).mean(), rel=1e-5)
    assert result.distortion == pytest.approx((errors**2).sum((-1, -2)).min(0).mean(), rel=1e-5)
    assert result.oracle == pytest.approx(np.sqrt((errors**2).mean((-1, -2)).min(0).mean()), rel=1e-5)
    assert result.nll is None and result.nll_voronoi is None
    again = run.evaluate(X[90:], PATHS[90:])
    assert again.min_fde == pytest.approx(result.min_fde, rel=1e-5)
    assert run.answer(X[:2]).shape == (2, 4, 2)


@pytest.mark.parametrize("what", ["mean", "members", "member:1"])
def test_trajectories_are_exported_for_any_number_of_examples(what, tmp_path):
    net = TreeNet(partial(paths, True), members=2, seed=0)
    run = fit(net, train=(X, PATHS), iterations=3, normalize_targets=True)
    run.export(tmp_path / "paths.pt2", what)
    answers = torch.export.load(tmp_path / "paths.pt2").module()
    outputs = run.predict(X[:5])
    expected = {"mean": outputs.mean(0), "members": outputs, "member:1": outputs[1]}[what]
    torch.testing.assert_close(answers(torch.from_numpy(X[:5])), expected)


def test_one_trajectory_of_one_point_keeps_its_shape():
    problem = Regression(2, (1, 2))
    assert problem.answer(torch.zeros(3, 1, 2)).shape == problem.answer(torch.zeros(3, 1, 1, 2)).shape == (3, 1, 1, 2)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"calibration": 10}, "calibration=0"),
        ({"normalize_targets": True}, "normalize_targets=False"),
        ({"calibration": 10, "normalize_targets": True}, "calibration=0 and normalize_targets=False"),
    ],
)
@pytest.mark.parametrize(
    ("y", "problem", "learned"),
    [((X[:, 0] > 0).astype(np.int64), "auto", "classification"), (NUMBERS, "examples", "its examples themselves")],
)
def test_options_of_numbers_are_an_error_where_none_are_learned(y, problem, learned, option, remedy):
    with pytest.raises(
        UserError, match=f"{next(iter(option))} = .* is for numbers, and arrays is {learned}: give {remedy}$"
    ):
        fit(TreeNet(lambda: nn.Linear(3, 3), members=2), train=(X, y), problem=problem, iterations=1, **option)


def test_outputs_of_another_shape_are_an_error():
    with pytest.raises(UserError, match=r"gives outputs of shape \(2, 4\)"):
        fit(
            TreeNet(lambda: nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4))), members=2),
            train=(X, PATHS), iterations=1,
        )  # fmt: skip


def test_hypotheses_are_what_each_member_answers_with_its_probability():
    net = TreeNet(with_scores(lambda: nn.Sequential(nn.Linear(3, 1))), members=3, seed=0)
    run = fit(net, losses.relaxed().with_scores(), train=(X, NUMBERS), iterations=15, normalize_targets=True)
    values, probabilities = run.hypotheses(X[:7])
    outputs, weights = run.outputs(X[:7])
    np.testing.assert_array_equal(values, outputs.double().transpose(0, 1))
    np.testing.assert_array_equal(probabilities, weights.T)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    torch.testing.assert_close((probabilities[..., None] * values).sum(1), run.answer(X[:7]))
    labels = (X[:, 0] > 0).astype(np.int64)
    classes = fit(TreeNet(lambda: nn.Linear(3, 2), members=2), train=(X, labels), iterations=2)
    values, probabilities = classes.hypotheses(X[:4])
    torch.testing.assert_close(values, classes.predict(X[:4]).double().softmax(-1).transpose(0, 1))
    assert (probabilities == 0.5).all()


def linear():
    return nn.Linear(3, 1)


def test_targets_are_normalised_on_the_training_part_and_answers_are_in_old_units(tmp_path):
    common = {"test": (X[90:], NUMBERS[90:]), "iterations": 30, "lr": 0.1, "seed": 3}
    run = fit(
        TreeNet(linear, members=2, seed=1),
        train=(X[:90], NUMBERS[:90]),
        normalize_targets=True,
        folder=tmp_path / "run",
        **common,
    )
    mean, std = NUMBERS[:90].mean(dtype=np.float64), NUMBERS[:90].std(dtype=np.float64)
    common["test"] = (X[90:], (NUMBERS[90:] - mean) / std)
    by_hand = fit(TreeNet(linear, members=2, seed=1), train=(X[:90], (NUMBERS[:90] - mean) / std), **common)
    np.testing.assert_allclose(run.predict(X), by_hand.predict(X).double() * std + mean, rtol=1e-4)
    assert run.result.oracle == pytest.approx(by_hand.result.oracle * std, rel=1e-3)
    assert run.result.r2["ensemble_mean"] == pytest.approx(by_hand.result.r2["ensemble_mean"], rel=1e-3)
    loaded = mheads.load(tmp_path / "run", linear)
    np.testing.assert_array_equal(loaded.predict(X), run.predict(X))
    assert loaded.evaluate(X[90:], NUMBERS[90:]).oracle == pytest.approx(run.result.oracle, rel=1e-5)
    exported = run.export(tmp_path / "mean.pt2")
    found = torch.export.load(exported).module()(torch.from_numpy(X[:5]))
    torch.testing.assert_close(found.double(), run.answer(X[:5]), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="normalize_targets = True is for numbers, and arrays is classification"):
        fit(TreeNet(lambda: nn.Linear(3, 2), members=2), train=(X, np.arange(120) % 2), normalize_targets=True)


@pytest.mark.parametrize("flat", [False, True])
def test_a_member_alone_answers_in_the_units_of_the_targets(flat):
    net = TreeNet(with_scores(partial(paths, flat)), members=2, split=None, seed=0)
    run = fit(net, losses.scored(), train=(X, 500 + 100 * PATHS), iterations=3, normalize_targets=True)
    member = run.member(1)(X[:7])
    torch.testing.assert_close(member["answer"].reshape(7, 4, 2), run.predict(X[:7])[1])
    assert member["score"].shape == (7,)
    answers = [lambda x, m=m: run.member(m)(x)["answer"].reshape(-1, 4, 2) for m in range(2)]
    alone = mheads.evaluate(answers, (X, 500 + 100 * PATHS))
    assert alone.members == pytest.approx(run.evaluate(X, 500 + 100 * PATHS).members, rel=1e-4)
    with pytest.warns(UserWarning, match=r"trained on preprocessed data \(targets normalised\), but these are raw"):
        mheads.evaluate(run.net, (X, 500 + 100 * PATHS))


def test_weights_that_learned_normalised_targets_are_compared_with_what_they_learn_next():
    run = fit(TreeNet(linear, members=2), train=(X, NUMBERS), iterations=3, normalize_targets=True)
    other = r"normalize_targets: true \(mean \[51.58\], standard deviation \[22.73\]\) there, false here"
    with pytest.warns(UserWarning, match=other):
        fit(TreeNet(linear, members=2), train=(X, NUMBERS), iterations=1, init=run)
    with pytest.warns(UserWarning, match=other):
        fit(run.net.keep([0]), train=(X, NUMBERS), iterations=1)
    same = fit(run.net.keep([1]), train=(X, NUMBERS), iterations=1, normalize_targets=True)  # without a warning
    assert same.data.problem.std_of_targets == run.data.problem.std_of_targets


def test_a_second_fit_of_a_net_warns_that_it_continues():
    net, common = TreeNet(linear, members=2), {"train": (X, NUMBERS), "iterations": 2}
    fit(net, **common)
    with pytest.warns(
        UserWarning, match="the weights that 2 iterations of an earlier fit left .*: build a new TreeNet"
    ):
        fit(net, **common)
    fit(net, init=net, **common)
    net.load_state_dict(TreeNet(linear, members=2, seed=3).state_dict())  # weights that no fit has left
    fit(net, **common)
    with pytest.raises(UserError, match="nowhere"):
        fit(net, init="nowhere", **common)
    with pytest.warns(UserWarning, match="the weights that 2 iterations of an earlier fit left"):
        fit(net, **common)


def test_variances_make_a_mixture_in_the_units_of_the_targets():
    net = TreeNet(lambda: mlp(3, hidden=(8,), variance=True), members=2, seed=0)
    run = fit(
        net, losses.independent(base_loss="gaussian_nll"), train=(X[:90], NUMBERS[:90]),
        test=(X[90:], NUMBERS[90:]), iterations=30, normalize_targets=True,
    )  # fmt: skip
    mean, std = NUMBERS[:90].mean(dtype=np.float64), NUMBERS[:90].std(dtype=np.float64)
    with torch.no_grad():
        parts = [[t.numpy() for t in run.net.member(m)(torch.from_numpy(X[90:]))] for m in range(2)]
    answer, log_variance = (t.detach().numpy() for t in run.member(1)(X[90:]))
    np.testing.assert_allclose(answer, parts[1][0] * std + mean, rtol=1e-5)
    np.testing.assert_allclose(log_variance, parts[1][1] + 2 * np.log(std), rtol=1e-5)
    pdf = [stats.norm.pdf(NUMBERS[90:], mu * std + mean, np.exp(s / 2) * std) for mu, s in parts]
    assert run.result.nll == pytest.approx(-np.log(np.mean(pdf, 0)).mean(), rel=1e-4)
    assert run.result.nll_voronoi is not None and run.result.kernel_scale is None
    assert run.evaluate(X[90:], NUMBERS[90:]).nll == pytest.approx(run.result.nll, rel=1e-5)


def test_kernels_are_chosen_on_examples_that_nothing_is_learned_from(tmp_path):
    def train(**options):
        return fit(
            TreeNet(linear, members=3, seed=1), losses.mcl(k=1), train=(X[:100], NUMBERS[:100]),
            test=(X[100:], NUMBERS[100:]), iterations=20, normalize_targets=True, **options,
        )  # fmt: skip

    run = train(calibration=30, folder=tmp_path / "run")
    outputs, y = run.predict(X).double().numpy(), NUMBERS.astype(np.float64)

    def nll(h, rows):
        return -np.logaddexp.reduce(stats.norm.logpdf(y[rows], outputs[:, rows], h) - np.log(3), 0).mean()

    std = NUMBERS[:70].std(dtype=np.float64)  # of what was learned from
    scales = GRID.numpy() * (NUMBERS[70:100].astype(np.float64) / std).std()
    best = min(scales, key=lambda h: nll(h * std, slice(70, 100)))
    assert run.result.kernel_scale == pytest.approx(best * std, rel=1e-5)  # in the units of the targets
    assert run.result.nll == pytest.approx(nll(best * std, slice(100, None)), rel=1e-5)
    assert run.evaluate(X[100:], NUMBERS[100:]).nll == pytest.approx(run.result.nll, rel=1e-5)
    summary = json.loads((tmp_path / "run/result.json").read_text())
    assert summary["nll_voronoi"] == run.result.nll_voronoi
    old = {"kernel_scale": best, "kernel_scale_voronoi": best}  # older versions: multiples of std
    for known in (summary, old):
        again = measure_nll(run.data.problem.calibrated(known), outputs[:, 100:], y[100:])
        assert (again.nll, again.kernel_scale) == pytest.approx((run.result.nll, best * std), rel=1e-5)
    assert train().result.nll is None
    with pytest.raises(UserError, match="it must leave some of 100 examples"):
        train(calibration=100)


def measure_nll(problem, outputs, y):
    metrics = problem.metrics(len(outputs))
    metrics.update(torch.from_numpy(outputs), torch.from_numpy(y))
    return metrics.result()


@pytest.mark.parametrize("std", [(), (4.0, 0.5, 1.0, 9.0)])
def test_the_density_follows_from_what_a_result_says_of_its_kernels(std):
    rng = np.random.default_rng(0)
    mean, y = rng.normal(0, 3, (2, 20, 4)), rng.normal(0, 3, (20, 4))
    problem = Regression(4, (2, 2), (0.0,) * len(std), std).calibrated({"kernel_scale": 0.7})
    for _ in range(2):  # chosen on held-out examples, and read back from a result
        result = measure_nll(problem, mean, y)
        units = np.array(result.kernel_units or [1.0])
        assert result.kernel_scale == pytest.approx(0.7 * np.prod(std or [1]) ** 0.25)
        np.testing.assert_allclose(result.kernel_scale * units, 0.7 * np.array(std or [1.0]))
        logs = stats.norm.logpdf(y, mean, result.kernel_scale * units).sum(-1)
        assert result.nll == pytest.approx(-np.logaddexp.reduce(logs - np.log(2), 0).mean())
        problem = replace(problem, kernels=None).calibrated(vars(result))


def test_kernels_of_each_density_are_the_most_likely_of_the_grid():
    outputs, y = torch.tensor([[[0.0], [0.0]], [[4.0], [4.0]]]), torch.tensor([[0.5], [3.5]])
    choice = KernelChoice()
    choice.update(outputs[:, :1], y[:1])
    choice.update(outputs[:, 1:], y[1:], torch.tensor([[0.5], [0.5]]))
    scales = choice.result()
    assert scales["kernel_scale"] == pytest.approx(0.5, rel=0.1)  # the distance of both targets
    assert scales["kernel_scale_voronoi"] == pytest.approx(0.5, rel=0.1)
    problem = Regression(1).calibrated(scales)
    assert problem.kernels == Kernels({"nll": scales["kernel_scale"], "nll_voronoi": scales["kernel_scale_voronoi"]})
    assert Regression(1).calibrated({}).kernels is None


def test_facts_of_numbers_go_to_disk_and_back():
    problem = Regression(8, (4, 2), tuple(range(8)), tuple(range(1, 9)), True)
    assert Regression.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
    assert Regression(3).to_dict() == {"name": "regression", "num_values": 3}  # as older versions wrote it


# J. Max, Quantizing for minimum distortion, 1960: the points above 0, and the mean squared distance.
MAX = {
    1: ([], 1.0),
    2: ([0.7980], 0.3634),
    3: ([1.224], 0.1902),
    5: ([0.7646, 1.724], 0.07994),
    8: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
}


@pytest.mark.parametrize("count", MAX)
def test_points_stand_for_a_normal_distribution_as_in_the_table_of_max(count):
    above, distortion = MAX[count]
    expected = [-x for x in above[::-1]] + [0.0] * (count % 2) + above
    assert points_of_normal(count).numpy() == pytest.approx(expected, abs=1e-3)
    draws = stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    distances = (draws[:, None] - points_of_normal(count).numpy()) ** 2
    assert distances.min(1).mean() == pytest.approx(distortion, rel=2e-3)


@pytest.mark.parametrize("learned", [True, False])
def test_points_of_the_density_of_a_member_are_measured_as_numpy_does(learned):
    outputs, y = RNG.normal(size=(3, 50, 1)), RNG.normal(size=(50, 1))
    scales = np.exp(RNG.normal(size=(3, 50, 1))) if learned else np.full((3, 50, 1), 0.4)
    problem = Regression(1, kernels=None if learned else Kernels({"nll": 0.4, "nll_voronoi": 7.0}))
    metrics = problem.metrics(3)
    for part in (slice(0, 20), slice(20, 50)):
        variances = torch.tensor(2 * np.log(scales[:, part])) if learned else None
        metrics.update(torch.tensor(outputs[:, part]), torch.tensor(y[part]), None, variances)
    by_points = metrics.result().distortion_by_points
    assert len(by_points) == 10
    for k in (1, 2, 5, 10):
        points = outputs + scales * points_of_normal(k).numpy()  # [M, N, k]
        assert by_points[k - 1] == pytest.approx(((points - y) ** 2).min(-1).mean(), rel=1e-9)
    again = json.loads(json.dumps(metrics.result().to_dict()))
    assert again["distortion_by_points"] == pytest.approx(by_points, rel=1e-5)


def test_points_are_of_one_number_and_of_a_density():
    outputs = torch.zeros(2, 4, 3)
    for metrics, width in ((Regression(3, kernels=Kernels({"nll": 1.0})).metrics(2), 3), (Regression(1).metrics(2), 1)):
        metrics.update(outputs[..., :width], torch.zeros(4, width))
        assert metrics.result().distortion_by_points is None
