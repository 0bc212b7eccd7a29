"""The loss of one member on one example: each against a few lines of numpy, its gradient against finite differences."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import mheads
from mheads import UserError, losses
from mheads.config import read as configs
from mheads.losses import BASE_LOSSES, base_loss
from mheads.problems import Classification, Regression
from mheads.training.build_from_config import build_loss

M, B, C, D = 3, 5, 4, 2
RNG = np.random.default_rng(0)


def log_softmax(z, axis=-1):
    z = z - z.max(axis, keepdims=True)
    return z - np.log(np.exp(z).sum(axis, keepdims=True))


def smoothed(y, s):
    return (1 - s) * np.eye(C)[y] + s / C


SCORES, LABELS = RNG.normal(size=(M, B, C)) * 3, RNG.integers(C, size=B)
SOFT = RNG.dirichlet(np.ones(C), B)
SEVERAL = (RNG.random((B, C)) < 0.5).astype(float)
NUMBERS, WANTED = RNG.normal(size=(M, B, D)) * 2, RNG.normal(size=(B, D))
SPREADS = RNG.normal(size=(M, B, D))
PIXELS, PLACES = RNG.normal(size=(M, B, C, 3, 2)), RNG.integers(C, size=(B, 3, 2))
PLACES[1:3, 0] = -100
SOME = PLACES != -100
OF_PLACES = -np.take_along_axis(log_softmax(PIXELS, 2), np.where(SOME, PLACES, 0)[None, :, None], 2)[:, :, 0]
ERRORS = np.abs(NUMBERS - WANTED)

# What it is called with, and the losses [M, B] by hand.
CASES = {
    "cross_entropy": (SCORES, LABELS, -log_softmax(SCORES)[:, np.arange(B), LABELS]),
    "cross_entropy, soft": (SCORES, SOFT, -(SOFT * log_softmax(SCORES)).sum(-1)),
    "cross_entropy, smoothing=0.2": (SCORES, LABELS, -(smoothed(LABELS, 0.2) * log_softmax(SCORES)).sum(-1)),
    "cross_entropy, pixels": (PIXELS, PLACES, (OF_PLACES * SOME).sum((-1, -2)) / SOME.sum((-1, -2))),
    "bce": (SCORES, SEVERAL, np.log1p(np.exp(np.where(SEVERAL == 1, -SCORES, SCORES))).mean(-1)),
    "mse": (NUMBERS, WANTED, (ERRORS**2).mean(-1)),
    "mae": (NUMBERS, WANTED, ERRORS.mean(-1)),
    "smooth_l1": (NUMBERS, WANTED, np.where(ERRORS < 1, ERRORS**2 / 2, ERRORS - 0.5).mean(-1)),
    "smooth_l1, beta=0.3": (NUMBERS, WANTED, np.where(ERRORS < 0.3, ERRORS**2 / 0.6, ERRORS - 0.15).mean(-1)),
    "gaussian_nll": ((NUMBERS, SPREADS), WANTED, (SPREADS + ERRORS**2 / np.exp(SPREADS)).mean(-1) / 2),
}


def made(case):
    name, _, option = case.partition(", ")
    key, _, value = option.partition("=")
    function = base_loss.make_base_loss({"name": name, key: float(value)} if value else name)
    outputs, y, expected = CASES[case]
    given = tuple(map(torch.tensor, outputs)) if isinstance(outputs, tuple) else torch.tensor(outputs)
    return function, given, torch.tensor(y), expected


@pytest.mark.parametrize("case", CASES)
def test_each_equals_numpy_and_its_gradient_finite_differences(case):
    function, outputs, y, expected = made(case)
    np.testing.assert_allclose(function(outputs, y).numpy(), expected, rtol=1e-12)
    leaves = [t.requires_grad_() for t in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def total(*parts):
        return function(parts if len(parts) > 1 else parts[0], y).square().sum()

    assert torch.autograd.gradcheck(total, leaves)
    # Members and examples stand for themselves: each loss is that of one member on one example.
    for m, i in ((0, 0), (2, 4)):
        one = [t[m : m + 1, i : i + 1] for t in leaves]
        alone = function(tuple(one) if len(one) > 1 else one[0], y[i : i + 1])
        assert alone.item() == pytest.approx(expected[m, i], rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_every_rule_takes_it(case):
    function, outputs, y, expected = made(case)
    assert losses.independent(base_loss=function)(outputs, y).total.item() == pytest.approx(expected.sum())
    won = losses.mcl(k=1, base_loss=function)(outputs, y)
    assert won.total.item() == pytest.approx(expected.min(0).sum())
    np.testing.assert_array_equal(won.assignment.argmax(0).numpy(), expected.argmin(0))
    mean = tuple(t.mean(0, keepdim=True) for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
    together = losses.score_averaged(base_loss=function)(outputs, y).total
    torch.testing.assert_close(together, function(mean if len(mean) > 1 else mean[0], y).sum())


def test_it_is_given_by_name_with_options_or_as_a_function():
    outputs, y = torch.tensor(NUMBERS), torch.tensor(WANTED)
    for given in ("mae", {"name": "mae"}, BASE_LOSSES["mae"], "user_networks:distances"):
        np.testing.assert_allclose(losses.mcl(k=1, base_loss=given)(outputs, y).losses, ERRORS.mean(-1))
    cubed = losses.mcl(k=1, base_loss={"name": "user_networks:distances", "power": 3})
    np.testing.assert_allclose(cubed(outputs, y).losses, (ERRORS**3).mean(-1))
    assert base_loss.name_base_loss(losses.mcl(base_loss={"name": "smooth_l1", "beta": 0.5}).base_loss) == {
        "name": "smooth_l1",
        "beta": 0.5,
    }
    assert base_loss.name_base_loss(losses.mcl(base_loss="mse").base_loss) == "mse"
    assert base_loss.name_base_loss(cubed.base_loss) is None
    assert base_loss.name_base_loss(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mses", "loss.base_loss = 'mses': it is one of cross_entropy, bce, mse, .*package.module:function"),
        ({"name": "smooth_l1", "delta": 1}, "smooth_l1 has no option 'delta'; it has beta"),
        ({"name": "mse", "beta": 1}, "mse has no option 'beta'; it has none"),
        ({"name": "smooth_l1", "beta": 0}, "beta = 0: input should be greater than 0"),
        ({"beta": 1}, "give a name, or a mapping with a name"),
        (nn.MSELoss, "give a name, or a mapping with a name"),
        ("nowhere:f", "loss.base_loss 'nowhere:f': importing nowhere failed"),
    ],
)
def test_what_is_none_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        losses.mcl(k=1, base_loss=given)


@pytest.mark.parametrize("rule", ["mcl", "independent", "score_averaged"])
def test_a_value_of_another_shape_is_explained(rule):
    outputs, y = torch.tensor(NUMBERS), torch.tensor(WANTED)
    for wrong in (
        lambda outputs, y: (outputs - y).mean(),
        lambda outputs, y: (outputs - y).abs(),
        lambda outputs, y: 0.0,
    ):
        with pytest.raises(
            UserError, match=r"base_loss = .* gives a value of .*give the losses .*\[M, B\] \(here \[[13], 5\]"
        ):
            losses.LOSSES[rule](base_loss=wrong)(outputs, y)


def test_targets_of_another_shape_are_not_spread():
    for name in ("mse", "mae", "smooth_l1", "gaussian_nll", "bce"):
        outputs = torch.zeros(2, 5, 1)
        outputs = (outputs, outputs) if name == "gaussian_nll" else outputs
        with pytest.raises(
            UserError,
            match=rf"{name} compares .* of their shape.*\[5, 1\] and \[5\]: give both as \[B, D\], .* y\[:, None\]$",
        ):
            BASE_LOSSES[name](outputs, torch.zeros(5))
    with pytest.raises(UserError, match=r"\[5, 1\] and \[5, 2\]: give both as \[B, D\]$"):
        BASE_LOSSES["mse"](torch.zeros(2, 5, 1), torch.zeros(5, 2))
    with pytest.raises(
        UserError, match=r"gaussian_nll: .* shape \[4\] for an example; let it give a pair.*variance=true"
    ):
        BASE_LOSSES["gaussian_nll"](torch.zeros(2, 5, 4), torch.zeros(5, 2))


def test_a_loss_for_other_targets_is_refused():
    with pytest.raises(UserError, match=r"loss.base_loss = mse does not go with classification: use cross_entropy, or"):
        losses.mcl(base_loss="mse").on(Classification(("a", "b")))
    with pytest.raises(UserError, match="cross_entropy does not go with regression: use mse or mae or"):
        losses.independent(base_loss={"name": "cross_entropy", "smoothing": 0.1}).on(Regression(2))


# In a config, and in what a run is known by.


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["loss.base_loss=mae"], "mae"),
        (["loss.base_loss={name: smooth_l1, beta: 0.5}"], {"name": "smooth_l1", "beta": 0.5}),
        (["loss.base_loss=smooth_l1", "loss.base_loss.beta=0.5"], {"name": "smooth_l1", "beta": 0.5}),
        (["loss.of=smooth_l1", "loss.of.beta=0.5"], {"name": "smooth_l1", "beta": 0.5}),
        (["loss={name: mcl, of: mae}"], "mae"),
        ([], None),
    ],
)
def test_a_config_names_it(overrides, expected):
    config = configs.load("digits", ["loss=mcl", *overrides])
    assert config.loss.base_loss == expected
    assert base_loss.name_base_loss(build_loss(config).base_loss) == expected
    assert (config.digest() == configs.load("digits", ["loss=mcl"]).digest()) is (expected is None)
    if expected == "mae":
        assert config.digest() == "361fccf2"  # folders were named so when the key was loss.of


def test_a_config_says_what_is_wrong_with_it():
    with pytest.raises(
        UserError, match=r"loss.base_loss = 'mee': it is one of cross_entropy, .*package.module:function"
    ):
        configs.load("digits", ["loss.base_loss=mee"])
    with pytest.raises(UserError, match=r"beta = -1: input should be greater than 0"):
        configs.load("digits", ["loss.base_loss={name: smooth_l1, beta: -1}"])
    unread = configs.load("digits", ["loss.base_loss=nowhere:f"])  # reading a config runs no code
    assert unread.loss.base_loss == "nowhere:f"
    config = configs.load("digits", ["loss=prob_averaged", "loss.base_loss=cross_entropy"])
    with pytest.raises(UserError, match=r"prob_averaged has a fixed base loss; leave loss.base_loss out"):
        build_loss(config)
    own = configs.load("digits", ["loss=user_networks:squared", "loss.base_loss=cross_entropy"])
    with pytest.raises(UserError, match="user_networks:squared has a fixed base loss"):
        build_loss(own)


def test_another_loss_of_an_example_is_another_run(tmp_path):
    x = RNG.normal(size=(30, 2)).astype(np.float32)

    def fit(base_loss, folder="run"):
        net = mheads.TreeNet(partial(linear, 2, 2), members=2)
        loss = mheads.losses.mcl(k=1, base_loss=base_loss)
        return mheads.fit(net, loss, train=(x, x[:, ::-1].copy()), iterations=2, folder=tmp_path / folder)

    run = fit({"name": "smooth_l1", "beta": 0.5})
    assert run.config.loss.base_loss == {"name": "smooth_l1", "beta": 0.5}
    assert fit({"name": "smooth_l1", "beta": 0.5}).result == run.result
    for other in ({"name": "smooth_l1", "beta": 0.25}, "mae", None):
        with pytest.raises(UserError, match=r"loss\.base_loss"):
            fit(other)
    # A function of one's own is known by its code and what it is called with.
    fit({"name": "user_networks:distances", "power": 1.5}, "own")
    with pytest.raises(UserError, match=r"power in arguments of user_networks:distances: 1.5 there, 2 now"):
        fit({"name": "user_networks:distances", "power": 2}, "own")


def test_label_smoothing_gives_the_other_classes_something():
    x, y = np.eye(3, dtype=np.float32)[np.arange(60) % 3], np.arange(60) % 3
    sure, smooth = (
        mheads.fit(
            mheads.TreeNet(partial(linear, 3, 3), members=1),
            mheads.losses.independent(base_loss={"name": "cross_entropy", "smoothing": s}),
            train=(x, y), iterations=150, lr=2.0,
        )
        for s in (0.0, 0.3)
    )  # fmt: skip
    p = smooth.predict(np.eye(3, dtype=np.float32))[0].softmax(-1)
    torch.testing.assert_close(p, torch.full((3, 3), 0.1) + 0.7 * torch.eye(3), atol=0.01, rtol=0)
    assert sure.predict(np.eye(3, dtype=np.float32))[0].softmax(-1).diagonal().min() > 0.99


def test_a_network_says_how_sure_it_is_with_gaussian_nll():
    """The noise grows with x: the variance that is learned follows it, and the answer is the mean."""
    x = np.random.default_rng(1).uniform(0, 1, (2000, 1)).astype(np.float32)
    y = 2 * x + np.where(x > 0.5, 0.5, 0.05) * np.random.default_rng(2).normal(size=x.shape)
    net = mheads.TreeNet(mean_and_log_variance, members=2)
    run = mheads.fit(
        net,
        mheads.losses.independent(base_loss="gaussian_nll"),
        train=(x, y),
        iterations=300,
        optimizer="adamw",
        lr=0.02,
    )
    ends = torch.tensor([[0.1], [0.9]])
    assert run.predict(ends).shape == (2, 2, 1)
    torch.testing.assert_close(run.predict(ends), torch.tensor([[0.2], [1.8]]).expand(2, 2, 1), atol=0.25, rtol=0)
    with torch.no_grad():
        deviations = (run.net(ends)[1] / 2).exp()
    assert (deviations[:, 1] > 0.3).all()
    assert (deviations[:, 0] < 0.15).all()
    with pytest.raises(UserError, match=r"let it give as many \(for gaussian_nll a pair of them: x.chunk"):
        mheads.fit(mheads.TreeNet(partial(linear, 1, 2), members=2), losses.mcl(base_loss="gaussian_nll"), train=(x, y))
    with pytest.raises(UserError, match="let it give a pair"):
        mheads.fit(mheads.TreeNet(partial(linear, 1, 1), members=2), losses.mcl(base_loss="gaussian_nll"), train=(x, y))


def linear(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs))


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2, -1)


def mean_and_log_variance():
    return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2), Halves())
