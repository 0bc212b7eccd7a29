"""Regression, the second problem: the same engine, loop, folders and ranks on numbers instead of classes."""

import json
import signal
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.commands import assert_same_run, process, ranks
from torch import nn

import mheads
from mheads import UserError
from mheads.losses import independent, mcl, prob_averaged, score_averaged
from mheads.problems import Classification, Regression, squared_errors

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(240, 3)).astype(np.float32)
Y = np.stack([X[:, 0] ** 2, X[:, 1] * X[:, 2]], 1).astype(np.float64)


def small(values=2):
    layers = OrderedDict(first=nn.Linear(3, 16), tanh=nn.Tanh(), drop=mheads.Dropout(0.1), out=nn.Linear(16, values))
    return nn.Sequential(layers)


def fit(loss=None, members=3, **options):
    net = mheads.TreeNet(small, members=members, split=None if members == 1 else "first")
    common = {"train": (X[:200], Y[:200]), "test": (X[200:], Y[200:]), "iterations": 40, "lr": 0.1, "batch_size": 50}
    return mheads.fit(net, loss, **{**common, **options})


@pytest.mark.parametrize("loss", [independent(), mcl(k=1), score_averaged()], ids=lambda loss: loss.name)
def test_errors_are_those_of_numpy(loss):
    run = fit(loss)
    outputs = run.predict(X[200:]).double().numpy()  # [M, N, D]
    errors = np.mean((outputs - Y[200:].astype(np.float32)) ** 2, -1)
    result = run.result
    assert result.members == pytest.approx(np.sqrt(errors.mean(1)).tolist(), rel=1e-5)
    assert result.single == pytest.approx(np.mean(result.members), rel=1e-5)
    mean = np.sqrt(np.mean((outputs.mean(0) - Y[200:].astype(np.float32)) ** 2))
    assert result.ensemble_mean == pytest.approx(mean, rel=1e-5)
    assert result.oracle == pytest.approx(np.sqrt(errors.min(0).mean()), rel=1e-5)
    assert result.spread == pytest.approx(np.sqrt(np.mean((outputs - outputs.mean(0)) ** 2)), rel=1e-5)
    assert np.array(result.ownership)[:, 0].tolist() == np.bincount(errors.argmin(0), minlength=3).tolist()
    assert result.examples == 40
    assert result.oracle <= result.ensemble_mean + 1e-9
    assert result.ensemble_mean < Y[200:].std()  # it has learned something


def test_the_loss_of_an_example_is_its_squared_error():
    torch.manual_seed(0)
    outputs, y = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, 2, dtype=torch.float64)
    problem = Regression(2)
    value = independent().on(problem)(outputs, y)
    expected = ((outputs - y) ** 2).mean(-1)
    torch.testing.assert_close(value.losses, expected.detach())
    torch.testing.assert_close(value.total, expected.sum())
    won = mcl(k=1).on(problem)(outputs, y)
    torch.testing.assert_close(won.total, expected.min(0).values.sum())
    mean = score_averaged().on(problem)(outputs, y)
    torch.testing.assert_close(mean.total, ((outputs.mean(0) - y) ** 2).mean(-1).sum())
    for loss in (independent(), mcl(k=2), score_averaged()):
        ties = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
        assert torch.autograd.gradcheck(lambda o, loss=loss, t=ties: loss.on(problem)(o, y, None, t).total, outputs)


def test_a_loss_of_ones_own_on_each_example_is_taken_by_every_rule():
    def absolute(outputs, y):
        return (outputs - y).abs().mean(-1)

    run = fit(mcl(k=1, base_loss=absolute), iterations=20)
    assert run.history.steps[-1]["iteration"] == 20 and run.result.oracle > 0
    value = mcl(k=1, base_loss=absolute).on(Regression(2))(torch.ones(2, 4, 2), torch.zeros(4, 2))
    assert value.total.item() == 4.0
    assert torch.equal(squared_errors(torch.full((1, 1, 2), 3.0), torch.zeros(1, 2)), torch.tensor([[9.0]]))


def test_two_hypotheses_are_nearer_than_one():
    """y is +1 or -1 at random: one network can only say 0, two under MCL say both."""
    x = RNG.uniform(size=(300, 3)).astype(np.float32)
    y = np.where(RNG.uniform(size=300) < 0.5, 1.0, -1.0)
    data = {"train": (x[:240], y[:240]), "test": (x[240:], y[240:]), "iterations": 150, "lr": 0.2}
    one = mheads.fit(mheads.TreeNet(lambda: small(1), members=1), **data)
    two = mheads.fit(mheads.TreeNet(lambda: small(1), members=2), mcl(k=1), **data)
    assert one.result.oracle > 0.9
    assert two.result.oracle < 0.1 * one.result.oracle


def test_a_run_says_what_it_is_and_comes_back(tmp_path):
    run = fit(folder=tmp_path / "run")
    assert "RMSE of 40 examples" in repr(run)
    loaded = mheads.load(tmp_path / "run", small)
    assert loaded.result == run.result
    assert torch.equal(loaded.predict(X), run.predict(X))
    assert loaded.evaluate(X[200:], Y[200:]) == mheads.evaluate(run.net, (X[200:], Y[200:]))
    assert [axis.get_ylabel() for axis in loaded.plot_history().axes][
        -1
    ] == "root mean square error, units of the targets"
    assert loaded.plot_ownership().axes


def test_without_a_test_set_a_tenth_is_held_out_at_random():
    order = np.argsort(Y[:, 0])
    run = fit(train=(X[order], Y[order]), test=None, iterations=2)
    assert run.data.held_out == "24 of 240 examples, at random, seed 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train": (X, Y[:, :1]), "test": None},
            r"outputs of shape \(2,\), but the targets of arrays are 1 number per example",
        ),
        ({"train": (X, np.where(Y > 0.1, np.nan, Y))}, "target of example .* is not finite"),
        ({"train": (X, Y), "test": (X, np.arange(240) % 2)}, "train labels are floats, test labels are classes"),
        ({"train": (X, np.eye(2)[np.arange(240) % 2])}, "one-hot"),
        ({"train": (X, Y), "test": (X, Y[:, :1])}, "2 numbers in train and 1 numbers in test"),
        ({"loss": "prob_averaged"}, "prob_averaged averages probabilities"),
        ({"sampling": "specialists"}, "deals out examples by their class, and regression has none"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        fit(**options)


def test_targets_of_another_number_are_refused_and_not_spread(tmp_path):
    run = fit(folder=tmp_path / "run", iterations=2)
    for wrong in (Y[200:, :1], np.repeat(Y[200:], 2, 1)):
        with pytest.raises(UserError, match="learns 2 per example"):
            run.evaluate(X[200:], wrong)


def test_another_loss_of_an_example_is_another_run(tmp_path):
    def absolute(outputs, y):
        return (outputs - y).abs().mean(-1)

    def cubed(outputs, y):
        return (outputs - y).abs().pow(3).mean(-1)

    fit(mcl(k=1, base_loss=absolute), folder=tmp_path / "run", iterations=4)
    fit(mcl(k=1, base_loss=absolute), folder=tmp_path / "run", iterations=6)
    with pytest.raises(UserError, match="cubed is used now, and was not"):
        fit(mcl(k=1, base_loss=cubed), folder=tmp_path / "run", iterations=8)


@pytest.mark.filterwarnings("ignore:.* gives 2 values")
def test_a_network_that_gives_more_than_an_answer_predicts_the_answer():
    class Two(nn.Module):
        def forward(self, x):
            return x[:, :2], x[:, 2:]

    def network():
        return nn.Sequential(nn.Linear(3, 4), Two())

    def loss(outputs, y):
        return squared_errors(outputs[0], y) + outputs[1].square().mean(-1)

    data = {"train": (X[:200], Y[:200]), "test": (X[200:], Y[200:]), "iterations": 3}
    run = mheads.fit(mheads.TreeNet(network, members=2), loss, **data)
    assert run.predict(X[:5]).shape == (2, 5, 2)
    assert run.evaluate(X[200:], Y[200:]).members == pytest.approx(run.result.members, rel=1e-4)
    members = [run.net.member(m) for m in range(2)]
    assert mheads.evaluate(members, (X[200:], Y[200:])).members == pytest.approx(run.result.members, rel=1e-4)

    # Pretraining, and the losses that come with the package, teach the answer; other outputs stay as they are.
    def second(net):
        return torch.cat([net.member(m)[0].weight[2:].flatten() for m in range(2)])

    for given in (loss, independent(), mcl(k=1), score_averaged(), mcl(k=1, base_loss=loss)):
        net = mheads.TreeNet(network, members=2)
        drawn = second(net).clone()
        run = mheads.fit(net, given, pretrain=3, **data)
        assert run.summary["iterations"] == 6
        own = given is loss or given.base_loss is loss
        assert torch.equal(drawn, second(net)) is not own
    with pytest.raises(UserError, match=r"prob_averaged\(stable=False\) takes scores, not a tuple"):
        prob_averaged(stable=False).on(Classification(("a", "b")))((torch.ones(2, 3, 2),), torch.zeros(3, dtype=int))


# From a recipe on an .npz file.

RECIPE = """
model: user_networks:numbers
members: 3
split: first
loss: {name: mcl, k: 1}
data: {name: npz, path: numbers.npz, normalize: mean_std}
optim: {iterations: 12, batch_size: 40, lr: 0.05}
engine: {micro_batches: 4}
log: {every: 1, evaluate_every: 4, checkpoint_every: 4}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("numbers.npz", x_train=X[:200], y_train=Y[:200], x_test=X[200:], y_test=Y[200:])
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_a_recipe_trains_alike_in_one_process_on_ranks_and_after_a_kill(recipe, tmp_path):
    one = process("train", recipe, "--folder", tmp_path / "one")
    assert one.code == 0, one.err
    assert "RMSE of members" in one.out
    spread = ranks(3, "train", recipe, "--folder", tmp_path / "ranks")
    assert [done.code for done in spread] == [0, 0, 0], spread[0].err
    assert_same_run(tmp_path / "ranks", tmp_path / "one")
    killed = process(
        "train", recipe, "--folder", tmp_path / "killed", stop=(signal.SIGKILL, "os.rename", "step-00000008")
    )
    assert killed.code == -signal.SIGKILL
    assert process("train", recipe, "--folder", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "killed", tmp_path / "one")
    found = json.loads((tmp_path / "one/result.json").read_text())
    assert found["problem"] == "regression"
    assert found["oracle"] <= min(found["members"])


def test_a_regression_run_is_evaluated_and_asked_by_commands(recipe, tmp_path, mheads):
    assert mheads("train", recipe, "--folder", "run").code == 0
    before = json.loads((tmp_path / "run/result.json").read_text())
    done = mheads("eval", "run", "--trust", "--outputs", "outputs.npz")
    assert done.code == 0
    assert f"{before['oracle']:.4g}" in done.out
    with np.load("outputs.npz") as file:
        errors = np.mean((file["outputs"].astype(np.float64) - file["labels"]) ** 2, -1)
    assert np.sqrt(errors.min(0).mean()) == pytest.approx(before["oracle"], rel=1e-4)
    np.savez("new.npz", x=X[:2])
    answers = mheads("predict", "run", "--trust", "new.npz")
    assert answers.code == 0
    assert "member 2" in answers.out
    assert len([line for line in answers.out.splitlines() if line.strip()[:1] in ("0", "1")]) == 2


class Exponential(nn.Module):
    def forward(self, x):
        return x.abs().exp()


@pytest.mark.filterwarnings("ignore")  # of inputs and answers that are this large
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["numbers", "trajectories"])
def test_an_example_on_which_all_members_are_infinite_leaves_a_result_that_can_be_read(shape):
    def network():
        return nn.Sequential(nn.Linear(3, 4), Exponential())

    x, y = X.copy(), np.tile(Y, 2).reshape(-1, *shape)
    x[-1] = 1e6
    run = mheads.fit(
        mheads.TreeNet(network, members=2),
        train=(x[:200], y[:200]),
        test=(x[200:], y[200:]),
        iterations=3,
        lr=0.001,
        show=False,
    )
    result = json.loads((run.folder / "result.json").read_text())
    infinite = [result["oracle"], result["mae"]["oracle"], result["r2"]["oracle"], result["distortion"]]
    assert infinite == [None] * 4
    assert [result.get("min_ade"), result.get("min_fde")] == [None] * 2
    assert sum(map(sum, result["ownership"])) == 40  # as an infinite error is one
