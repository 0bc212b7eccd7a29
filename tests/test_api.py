"""mheads from Python: fit, evaluate, load, and the example."""

import runpy
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import mheads

X, Y = load_digits(return_X_y=True)
X = X.reshape(-1, 1, 8, 8).astype(np.float32) / 16
TRAIN, TEST = (X[:400], Y[:400]), (X[400:600], Y[400:600])
QUICK = {"train": TRAIN, "test": TEST, "lr": 0.05, "batch_size": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    net = mheads.TreeNet(networks.Plain, members=3, split="first")
    run = tmp_path_factory.mktemp("trained") / "run"
    return mheads.fit(net, mheads.losses.mcl(k=1), iterations=30, run=run, **QUICK)


def test_fit_trains_a_network_of_ones_own(trained):
    assert len(trained.result.members) == 3
    assert trained.result.oracle > 50
    assert trained.result.oracle >= max(trained.result.members)
    assert trained.summary["parameters"] == trained.net.num_parameters()
    assert trained.folder.joinpath("model.safetensors").exists()


def test_what_fit_reports_is_what_its_net_gives(trained):
    again = mheads.evaluate(trained.net, TEST)
    assert again.to_dict()["members"] == trained.result.to_dict()["members"]
    outputs = trained.predict(TEST[0]).numpy()
    assert outputs.shape == (3, 200, 10)
    assert 100 * np.mean((outputs.argmax(-1) == TEST[1]).any(0)) == pytest.approx(trained.result.oracle)


def test_fit_shows_who_owns_what(trained):
    assert np.sum(trained.result.ownership) == 200
    assert trained.plot_ownership().axes


def test_the_same_call_on_the_same_folder_resumes_and_then_finds_it_finished(trained, tmp_path):
    def fit(iterations):
        net = mheads.TreeNet(networks.Plain, members=3, split="first")
        return mheads.fit(net, mheads.losses.mcl(k=1), iterations=iterations, run=tmp_path / "run", **QUICK)

    def states(run):
        return run.net.state_dict().items()

    assert fit(12).summary["iterations"] == 12
    longer = fit(30)
    assert longer.summary["iterations"] == 30
    assert all(torch.equal(tensor, trained.net.state_dict()[name]) for name, tensor in states(longer))
    again = fit(30)  # its weights come from the folder: nothing is trained
    assert again.summary == longer.summary
    assert all(torch.equal(tensor, trained.net.state_dict()[name]) for name, tensor in states(again))


def test_another_call_on_the_same_folder_is_refused(trained):
    net = mheads.TreeNet(networks.Plain, members=3, split="first")
    with pytest.raises(mheads.UserError, match=r"loss.k: 1 in the folder, 2 now"):
        mheads.fit(net, mheads.losses.mcl(k=2), iterations=30, run=trained.folder, **QUICK)


def test_a_run_is_loaded_by_the_factory_it_names(trained):
    loaded = mheads.load(trained.folder, trust=True)
    assert loaded.config.model == "networks:Plain"
    assert torch.equal(loaded.predict(TEST[0]), trained.predict(TEST[0]))
    assert loaded.result.oracle == trained.result.oracle


def test_a_run_of_a_local_factory_is_loaded_with_the_factory_given(tmp_path):
    def factory():
        return networks.Plain(hidden=8)

    run = mheads.fit(mheads.TreeNet(factory, members=2), iterations=2, run=tmp_path / "run", **QUICK)
    with pytest.raises(mheads.UserError, match=r"mheads.load\(run, factory\)"):
        mheads.load(tmp_path / "run")
    loaded = mheads.load(tmp_path / "run", factory)
    assert torch.equal(loaded.predict(TEST[0]), run.predict(TEST[0]))
    with pytest.raises(mheads.UserError, match="does not fit the network"):
        mheads.load(tmp_path / "run", networks.Plain)


def test_a_loss_of_ones_own_can_be_fitted(tmp_path):
    def function(outputs, y, prior, ties):
        losses = mheads.losses.cross_entropies(outputs, y)
        return mheads.losses.LossValue(losses.sum(), torch.ones_like(losses), losses.detach())

    own = mheads.losses.Loss("mine", function, options={"anything": 1})
    common = {"iterations": 3, **QUICK}
    one = mheads.fit(mheads.TreeNet(networks.Plain, members=2), own, run=tmp_path / "run", **common)
    other = mheads.fit(mheads.TreeNet(networks.Plain, members=2), **common)
    for mine, theirs in zip(one.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_without_a_test_set_the_last_tenth_is_held_out():
    run = mheads.fit(mheads.TreeNet(networks.Plain, members=2), train=TRAIN, iterations=1)
    assert run.result.examples == 40


def plain_models(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(count)]


def test_models_trained_elsewhere_are_measured_as_numpy_does():
    models = plain_models(3)
    result = mheads.evaluate(models, TEST, batch_size=64)
    with torch.no_grad():
        logits = torch.stack([model(torch.from_numpy(TEST[0])) for model in models]).numpy().astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = logits.argmax(-1) == TEST[1]
    assert result.members == pytest.approx((100 * right.mean(1)).tolist())
    assert result.oracle == pytest.approx(100 * right.any(0).mean())
    assert result.ensemble_mean == pytest.approx(100 * np.mean(probabilities.mean(0).argmax(-1) == TEST[1]))
    assert result.nll["single"] == pytest.approx(-np.log(probabilities[:, np.arange(200), TEST[1]]).mean())


def test_evaluating_leaves_models_in_the_mode_they_were_in():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    first = mheads.evaluate([model], TEST)
    assert model.training
    assert model[1].training
    assert first == mheads.evaluate([model.eval()], TEST)  # no dropout in either


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mheads.evaluate([], TEST), "at least one model"),
        (lambda: mheads.evaluate(plain_models(1), (TEST[0], TEST[1] + 5)), "label 14.*10 scores"),
        (lambda: mheads.evaluate([lambda x: x], TEST), "logits"),
        (lambda: mheads.fit(networks.Plain(), **QUICK), "TreeNet.*Plain"),
        (lambda: mheads.fit(mheads.TreeNet(networks.Plain, 2), lrr=0.1, **QUICK), "'optim.lrr'.*'optim.lr'"),
        (lambda: mheads.fit(mheads.TreeNet(networks.Plain, 2), mheads.losses.mcl(k=3), **QUICK), "k is 3.*2 members"),
        (lambda: mheads.fit(mheads.TreeNet(networks.Plain, 2), device="tpu", **QUICK), "device = 'tpu'"),
        (lambda: mheads.fit(mheads.TreeNet(networks.Plain, 2), train=(X, Y[:-1])), "1797 examples.*1796"),
        (lambda: mheads.fit(mheads.TreeNet(networks.Plain, 2), train=(X[:, :, :7], Y)), "first.*shape"),
        (lambda: mheads.load("nowhere"), "nowhere is not a run folder"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(mheads.UserError, match=message):
        call()


def test_predict_refuses_examples_of_another_shape(trained):
    with pytest.raises(mheads.UserError, match=r"\(1, 7, 8\).*\(1, 8, 8\)"):
        trained.predict(X[:2, :, :7])


def test_the_example_runs_and_shows_what_it_promises(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = runpy.run_path(str(Path(__file__).parents[1] / "examples/quickstart.py"), run_name="quickstart")
    shown = capsys.readouterr().out
    assert f"Oracle         {names['run'].result.oracle:.1f} %" in shown
    assert names["run"].result.oracle > 90
    assert names["elsewhere"].ensemble_mean > 70
    assert names["picture"].read_bytes().startswith(b"\x89PNG")


def test_tied_weights_and_infinite_masks_are_saved_and_loaded(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

        def forward(self, x):
            return torch.where(torch.isinf(self.mask), x, x + self.mask)

    def factory():
        a, b = nn.Linear(6, 6), nn.Linear(6, 6)
        b.weight = a.weight
        return nn.Sequential(a, nn.Tanh(), b, nn.Linear(6, 3), Masked())

    x, y = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
    net = mheads.TreeNet(factory, members=2)
    run = mheads.fit(net, train=(x, y), test=(x, y), iterations=4, batch_size=20, run=tmp_path / "run")
    loaded = mheads.load(tmp_path / "run", factory)
    assert loaded.net.member(0)[0].weight is loaded.net.member(0)[2].weight
    assert torch.equal(loaded.predict(x), run.predict(x))


def test_one_model_forked_into_members_that_would_stay_identical_is_refused(tmp_path, mheads):
    single = tmp_path / "single"
    assert mheads("train", "digits", "members=1", "optim.iterations=2", "--run", single).code == 0
    refused = mheads("train", "digits", "members=3", f"init={single}", "optim.iterations=2", "--run", tmp_path / "fork")
    assert refused.code == 2
    assert "identical for ever" in refused.err
    assert (
        mheads(
            "train",
            "digits",
            "members=3",
            f"init={single}",
            "loss=mcl",
            "optim.iterations=2",
            "--run",
            tmp_path / "fork",
        ).code
        == 0
    )
