"""Averaged views: whatever a run answers is the weighted mean over views of the example."""

import json

import numpy as np
import pytest
import torch
import user_networks
from helpers.commands import result

import mheads
from mheads import UserError
from mheads.data.views import View

VIEWS = [{"weight": 3}, {"mirror": True, "down": 1, "right": -2}, {"weight": 0.5, "down": -1}]
X = np.random.default_rng(0).integers(0, 17, (40, 1, 8, 8)).astype(np.uint8)
Y = np.arange(40) % 10


def by_hand(net, x):
    """The weighted mean of what a network gives for the three views of inputs [B, C, H, W]."""
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), "reflect")
    moved = padded[:, :, 1:9, 4:12][..., ::-1]  # one down and two to the left, then mirrored
    up = padded[:, :, 3:11, 2:10]
    with torch.no_grad():
        parts = [net(torch.from_numpy(np.ascontiguousarray(view))).double() for view in (x.numpy(), moved, up)]
    return (3 * parts[0] + parts[1] + 0.5 * parts[2]) / 4.5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    net = mheads.TreeNet(user_networks.with_dropout, members=3, split="conv")
    folder = tmp_path_factory.mktemp("views") / "run"
    keys = {"iterations": 3, "batch_size": 10, "lr": 0.05, "normalize": "mean_image", "scale": 1}
    return mheads.fit(net, train=(X, Y), test=(X, Y), views=VIEWS, folder=folder, **keys)


def test_all_answers_are_means_over_the_views(run, tmp_path):
    inputs = run.data.inputs(torch.from_numpy(X.transpose(0, 2, 3, 1)), torch.float32)
    expected = by_hand(run.net.eval(), inputs)
    assert not torch.allclose(run.net(inputs).double(), expected, atol=1e-3)  # views matter
    torch.testing.assert_close(run.predict(X).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.member(1)(X).double(), expected[1], rtol=1e-4, atol=1e-5)
    accuracy = 100 * (expected.argmax(-1) == torch.from_numpy(Y)).double().mean(1)
    assert run.result.members == pytest.approx(accuracy.tolist())
    assert run.evaluate(X, Y).members == pytest.approx(accuracy.tolist())
    for what, outputs in (("members", expected), ("member:2", expected[2]), ("mean", expected.softmax(-1).mean(0))):
        file = run.export(tmp_path / "run.pt2", what)
        answers = torch.export.load(file).module()(torch.from_numpy(X))
        torch.testing.assert_close(answers.double(), outputs, rtol=1e-4, atol=1e-5)


def test_a_member_that_is_trained_on_sees_its_examples_as_they_are(run):
    member = run.member(0).train()
    member.network.eval()  # without dropout
    inputs = run.data.inputs(torch.from_numpy(X.transpose(0, 2, 3, 1)), torch.float32)
    torch.testing.assert_close(member(X), member.network(inputs))


def test_a_run_can_be_measured_with_other_views(mheads, tmp_path):
    few = ["train", "digits", "members=1", "data.limit=60", "optim.iterations=5"]
    assert mheads(*few, f"eval.views={json.dumps(VIEWS)}", "--folder", tmp_path / "some").code == 0
    assert mheads(*few, "--folder", tmp_path / "none").code == 0
    some, none = (result(tmp_path / name)["nll"]["single"] for name in ("some", "none"))
    assert some != none
    for run, views, nll in (("some", [], none), ("none", VIEWS, some)):
        done = mheads("eval", tmp_path / run, f"eval.views={json.dumps(views)}")
        assert f"{nll:.4f}" in done.out, done.err


def test_views_that_make_no_sense_are_errors():
    vectors = mheads.TreeNet(lambda: torch.nn.Sequential(torch.nn.Linear(64, 10)), members=1)
    with pytest.raises(UserError, match=r"views are for images, and an example has the shape \(64,\)"):
        mheads.fit(vectors, train=(X.reshape(40, 64), Y), views=VIEWS, iterations=1)
    net = mheads.TreeNet(user_networks.with_dropout, members=1)
    with pytest.raises(UserError, match="by up to 8 pixels, and it has 8 x 8"):
        mheads.fit(net, train=(X, Y), views=[{"down": -8}], iterations=1)
    with pytest.raises(UserError, match="averaged pixel by pixel"):
        mheads.fit(
            mheads.TreeNet(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64)), members=1),
            train=(X, Y), problem="examples", views=[{"mirror": True}], iterations=1,
        )  # fmt: skip


def test_a_view_moves_first_and_mirrors_then():
    image = torch.arange(12.0).reshape(1, 1, 3, 4)
    moved = View(down=1, right=1, mirror=True)(image)[0, 0]
    assert moved.tolist() == [[6, 5, 4, 5], [2, 1, 0, 1], [6, 5, 4, 5]]
