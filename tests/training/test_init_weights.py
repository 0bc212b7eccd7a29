"""Starting from weights of one's own, and copies of trees and runs."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
import user_networks
from safetensors.torch import load_file, save_file
from torch import nn

import mheads
from mheads import UserError
from mheads.training.init_weights import load_into, read_weights

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(120, 1, 8, 8)).astype(np.float32), np.arange(120) % 10
QUICK = {"train": (X, Y), "test": (X, Y), "iterations": 2, "batch_size": 40}


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(5)
    return user_networks.Plain()


def assert_all_members_are(net, model, inputs=X):
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs))
        for outputs in net(torch.from_numpy(inputs)):
            torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("split", [None, "first"])
def test_a_built_network_is_forked_into_members(trained, split):
    net = mheads.TreeNet(trained, members=3, split=split)
    assert_all_members_are(net, trained)
    run = mheads.fit(net, "mcl", lr=0.1, **QUICK)
    assert not torch.equal(*run.predict(X)[:2])  # MCL parts them
    assert_all_members_are(mheads.TreeNet(trained, members=2), trained)  # the original did not move


def test_the_hint_for_equal_members_names_what_made_them_equal(tmp_path, mheads):
    given = ["train", "digits", "optim.iterations=1", "data.limit=20", "--quiet"]
    assert mheads(*given, "members=2", "-f", tmp_path / "two").code == 0
    done = mheads(*given, "members=3", f"init={tmp_path / 'two'}", "init_members=[0, 1, 1]", "-f", tmp_path / "three")
    assert done.code == 2 and "members 1 and 2 start with the same weights" in done.err, done.err
    assert "init_members = [0, 1, 1] names member 1 for both. Give null for one" in done.err


def test_a_forked_network_whose_members_would_stay_equal_is_refused(trained):
    with pytest.raises(UserError, match="identical for ever"):
        mheads.fit(mheads.TreeNet(trained, members=3), **QUICK)


@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "wrapped", "DataParallel", "state dict"])
def test_weights_of_one_network_start_all_members(trained, kind, tmp_path):
    state = trained.state_dict()
    if kind == "DataParallel":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    init = state if kind == "state dict" else tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(state, init)
    elif kind != "state dict":
        torch.save({"state_dict": state, "epoch": 3} if kind == "wrapped" else state, init)
    net = mheads.TreeNet(user_networks.Plain, members=3, split="first")
    started = []
    loss = mheads.losses.mcl(k=1)
    run = mheads.fit(net, loss, init=init, lr=1e-12, momentum=0.0, **QUICK)
    started.append(run)
    assert_all_members_are(net, trained)
    assert run.config.init not in ("random", "same")


def test_weights_of_a_tree_of_a_run_or_of_its_folder_go_member_by_member(tmp_path):
    run = mheads.fit(mheads.TreeNet(user_networks.Plain, members=3, seed=4), folder=tmp_path / "run", **QUICK)
    expected = run.predict(X)
    still = {"lr": 1e-12, "momentum": 0.0}
    for init in (run, run.net, run.net.state_dict(), tmp_path / "run" / "model.safetensors"):
        net = mheads.TreeNet(user_networks.Plain, members=3)
        assert not torch.allclose(net(torch.from_numpy(X)), expected)
        mheads.fit(net, init=init, **still, **QUICK)
        torch.testing.assert_close(net(torch.from_numpy(X)), expected)


def test_the_command_starts_from_a_file_of_weights_too(trained, tmp_path, mheads):
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    args = [
        "train",
        "digits",
        "model=user_networks:Plain",
        "data.limit=60",
        "members=2",
        "loss=mcl",
        "optim.iterations=1",
    ]
    args += [f"init={tmp_path}/w.safetensors", "optim.lr=1e-12", "--folder", tmp_path / "run"]
    assert mheads(*args).code == 0
    found = load_file(tmp_path / "run" / "model.safetensors")
    for member in range(2):
        assert torch.allclose(found[f"stages.{member}.first.weight"], trained.first.weight)
    assert "is finished" in mheads(*args).out
    save_file({name: tensor + 1 for name, tensor in trained.state_dict().items()}, tmp_path / "w.safetensors")
    refused = mheads(*args)  # another file under the same name
    assert refused.code == 2
    assert "start" in refused.err


def test_other_weights_are_another_run(trained, tmp_path):
    def fit(init):
        net = mheads.TreeNet(user_networks.Plain, members=2)
        return mheads.fit(net, "mcl", init=init, folder=tmp_path / "run", **QUICK)

    fit(trained.state_dict())
    fit(trained.state_dict())  # finished: the same
    other = {name: tensor + 1 for name, tensor in trained.state_dict().items()}
    with pytest.raises(UserError, match="init"):
        fit(other)


def test_weights_that_find_no_place_are_told(trained, capsys):
    state = {**trained.state_dict(), "fc.weight": torch.zeros(2)}
    mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), "mcl", init=state, show=True, **QUICK)
    said = capsys.readouterr().err
    assert "found              4  first.weight, first.bias, second.weight, second.bias" in said
    assert "missing, drawn     0" in said
    assert "left over          1  fc.weight" in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if "second" not in k}, r"2 of 4 tensors are missing \(second.bias, sec"),
        (lambda s: {**s, "first.weight": torch.zeros(3, 64)}, r"first.weight is \(3, 64\) there, \(16, 64\) here"),
        (lambda s: {**s, "first.weight": 3}, "'first.weight' is a int, not a tensor"),
        (lambda s: {}, "not tensors by name"),
        (lambda s: "nowhere.pt", "there is no file .*nowhere.pt"),
        (lambda s: 7, "init=7: give a file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(trained, make, message):
    before = mheads.TreeNet(user_networks.Plain, members=2)
    net = mheads.TreeNet(user_networks.Plain, members=2)
    with pytest.raises(UserError, match=message):
        mheads.fit(net, "mcl", init=make(trained.state_dict()), **QUICK)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))


def test_a_file_that_holds_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="cannot be read as weights"):
        read_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "opened").exists()


# Copies.


def local_factory():
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(
    "factory", [user_networks.Plain, local_factory(), user_networks.Plain()], ids=["named", "local", "built"]
)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copied", "pickled"])
def test_a_tree_can_be_copied_and_pickled_and_trained_further(factory, way):
    net = mheads.TreeNet(factory, members=2)
    other = way(net)
    x = torch.from_numpy(X)
    assert torch.equal(net(x), other(x))
    mheads.fit(other, "mcl", lr=0.1, **QUICK)
    assert not torch.equal(net(x), other(x))  # they are two


def test_a_run_can_be_copied_and_pickled_and_outlives_the_first(tmp_path):
    run = mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), **QUICK)
    expected, folder = run.predict(X), run.folder
    copied, pickled = copy.deepcopy(run), pickle.dumps(run)
    del run
    gc.collect()
    assert folder.exists()  # the copy lives in it too
    assert torch.equal(copied.predict(X), expected)
    del copied
    gc.collect()
    assert not folder.exists()  # temporary runs do not fill the disk
    loaded = pickle.loads(pickled)
    assert torch.equal(loaded.predict(X), expected)
    assert len(loaded.history.evaluations) == 2
    assert loaded.plot_history().axes
    assert "2 members" in repr(loaded)


# A net, its folder, and what became of it.


@pytest.mark.filterwarnings("ignore:iteration 1. member")  # it has diverged
def test_what_fails_before_its_first_checkpoint_leaves_neither_folder_nor_a_net_to_go_on_with(tmp_path):
    net = mheads.TreeNet(user_networks.Plain, members=2)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(UserError, match="nothing is kept"):
            mheads.fit(
                mheads.TreeNet(user_networks.Plain, members=2), folder=folder, **{**QUICK, "lr": 1e30, "iterations": 9}
            )
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    mheads.fit(mheads.TreeNet(user_networks.Plain, members=2), folder=tmp_path / "empty", **QUICK)
    with pytest.raises(UserError, match="lower lr"):
        mheads.fit(net, **{**QUICK, "lr": 1e30, "iterations": 9})
    with pytest.raises(UserError, match="failed after it had changed the weights: build it anew"):
        mheads.fit(net, **QUICK)
    mheads.fit(net, "mcl", init=user_networks.Plain().state_dict(), **QUICK)


def test_a_net_is_not_started_again_from_the_weights_that_a_lost_run_left_in_it(tmp_path):
    net = mheads.TreeNet(user_networks.Plain, members=2)
    run = mheads.fit(net, folder=tmp_path / "run", **QUICK)
    for file in (run.folder / "checkpoints").rglob("tensors.safetensors"):
        file.write_bytes(b"damaged")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(UserError, match="not those that training started from"),
    ):
        mheads.fit(net, folder=tmp_path / "run", **{**QUICK, "iterations": 3})


@pytest.mark.parametrize("init", [None, user_networks.Plain().state_dict()], ids=["drawn", "given"])
def test_a_loaded_run_goes_on_in_its_folder(init, tmp_path):
    net = mheads.TreeNet(user_networks.Plain, members=2, seed=5)
    mheads.fit(net, "mcl", init=init, folder=tmp_path / "run", **QUICK)
    loaded = mheads.load(tmp_path / "run", user_networks.Plain)
    with pytest.raises(UserError, match="mirror"):  # is refused, and leaves the net as it is
        mheads.fit(loaded.net, "mcl", folder=tmp_path / "run", mirror=True, **{**QUICK, "iterations": 4})
    longer = mheads.fit(loaded.net, "mcl", folder=tmp_path / "run", **{**QUICK, "iterations": 4})
    assert longer.summary["iterations"] == 4
    with pytest.raises(UserError, match="another run folder"):
        mheads.fit(loaded.net, "independent", folder=tmp_path / "run", **{**QUICK, "iterations": 6})
    with pytest.warns(UserWarning, match="the weights that 4 iterations of an earlier fit left"):
        assert mheads.fit(loaded.net, "mcl", **QUICK).summary["iterations"] == QUICK["iterations"]


def test_a_network_with_a_child_called_stages_takes_its_own_weights():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten, self.stages = nn.Flatten(), nn.Linear(64, 10)

        def forward(self, x):
            return self.stages(self.flatten(x))

    state = Network().state_dict()
    net = mheads.TreeNet(Network, members=2)
    assert load_into(net, state).left == []
    assert torch.equal(net.member(1).stages.weight, state["stages.weight"])
