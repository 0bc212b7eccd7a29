"""Trees made of trained trees, and weights of others by name."""

import numpy as np
import pytest
import torch
import user_networks
from safetensors.torch import load_file, save_file
from torch import nn

import mheads as package
from mheads import TreeNet, UserError
from mheads.training.init_weights import load_into

X = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = np.arange(10)
SPEC = {"conv": [{"hidden": 2}, 1, {"hidden": 2}]}


def outputs(net):
    with torch.no_grad():
        return net.eval()(X)


@pytest.fixture
def net():
    """Five members on three levels, every weight its own."""
    return TreeNet(user_networks.with_dropout, tree=SPEC, seed=3)


@pytest.mark.parametrize(
    ("members", "stages"),
    [
        ([0, 1], ["trunk", "hidden/0", "hidden/1"]),  # conv and hidden are one stage now
        ([0, 2], ["trunk", "conv/0", "conv/1"]),
        ([2], ["trunk"]),
        ([1, 3, 4], ["trunk", "conv/0", "conv/1", "conv/1/hidden/0", "conv/1/hidden/1"]),
        ([4, 1], ["trunk", "conv/0", "conv/1"]),  # in this order, the best first, say
        (np.array([4, 3, 0]), ["trunk", "conv/0", "conv/0/hidden/0", "conv/0/hidden/1", "conv/1"]),
    ],
)
def test_members_that_are_kept_give_what_they_gave(net, members, stages):
    kept = net.keep(members)
    assert list(kept.tree.nodes) == stages
    assert torch.equal(outputs(kept), outputs(net)[members])
    rest = [m for m in range(5) if m not in members]
    assert torch.equal(outputs(net.without(rest)), outputs(net)[sorted(members)])
    with torch.no_grad():
        next(kept.parameters()).add_(1)
    assert not torch.equal(outputs(kept), outputs(net)[members])  # weights of its own
    assert torch.equal(outputs(net), outputs(TreeNet(user_networks.with_dropout, tree=SPEC, seed=3)))


class Projected(nn.Module):
    """A projection that is not in the state dict: the same in every network, or drawn for each."""

    def __init__(self, draw):
        super().__init__()
        self.register_buffer("projection", draw(64, 8), persistent=False)
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.flatten(1) @ self.projection)))


def test_a_drawn_buffer_that_no_file_holds_is_not_lost_without_a_word():
    net = TreeNet(lambda: Projected(torch.eye), members=3, split="a")
    assert torch.equal(outputs(net.keep([2])), outputs(net)[2:])
    net = TreeNet(lambda: Projected(torch.randn), members=3)
    other = TreeNet(lambda: Projected(torch.randn), members=3, seed=1)
    for made in (lambda: net.keep([2]), lambda: net.with_members(1), lambda: other.copy_weights(net)):
        with pytest.raises(UserError, match=r"buffer projection differs in each .* persistent=True"):
            made()
    assert torch.equal(outputs(net.keep([0])), outputs(net)[:1])  # drawn by the same seed


def test_a_forest_is_pruned_too():
    net = TreeNet(user_networks.with_dropout, tree=[{"conv": 2}, 2, {"hidden": 2}])
    assert list(net.keep([1, 3, 4, 5]).tree.nodes) == ["0", "1", "2", "2/hidden/0", "2/hidden/1"]
    assert torch.equal(outputs(net.keep([1, 3, 4, 5])), outputs(net)[[1, 3, 4, 5]])


@pytest.mark.parametrize(
    ("at", "old", "new"),
    [
        ("conv", [0, 1, 2, 3, 4], [5, 6]),
        ("trunk", [0, 1, 2, 3, 4], [5, 6]),
        ("conv/0", [0, 1, 4, 5, 6], [2, 3]),
        (None, [0, 1, 2, 3, 4], [5, 6]),
    ],
)
def test_new_members_stand_beside_the_old_ones(net, at, old, new):
    grown = net.with_members(2, at=at)
    assert grown.num_members == 7
    assert torch.equal(outputs(grown)[old], outputs(net))
    drawn = outputs(grown)[new]
    assert not any(torch.equal(a, b) for a in drawn for b in outputs(net))
    assert not torch.equal(*drawn)
    again = outputs(net.with_members(2, at=at))
    assert torch.equal(again, outputs(grown))
    assert not torch.equal(outputs(net.with_members(2, at=at, seed=8))[new[0]], drawn[0])
    shared = grown.tree.path(new[0])[0]
    assert (shared.name == "trunk") == (at is not None)
    like = net.with_members(1, at="conv", like=2)
    assert torch.equal(outputs(like)[5], outputs(net)[2])


def test_a_new_member_does_not_start_where_one_that_is_there_did():
    net = TreeNet(user_networks.Plain, members=3)
    grown = net.keep([0, 2]).with_members(1)
    assert not any(torch.equal(outputs(grown)[2], other) for other in outputs(net))


def test_one_network_is_forked_and_split_anywhere():
    one = TreeNet(user_networks.with_dropout).double()
    forked = one.fork(3, split="conv")
    assert forked.dtype == torch.float64
    given = X.double()
    with torch.no_grad():
        assert all(torch.equal(found, one.eval()(given)[0]) for found in forked.eval()(given))
    assert list(one.with_members(2, at="hidden").tree.nodes) == ["trunk", "hidden/0", "hidden/1", "hidden/2"]
    with pytest.raises(UserError, match="identical for ever"):
        package.fit(TreeNet(user_networks.Plain).fork(2), train=(X, Y), test=(X, Y), iterations=1)


def test_what_was_cut_and_grown_trains_on_and_is_loaded_again(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 10
    quick = {"train": (x, y), "test": (x, y), "batch_size": 20}
    run = package.fit(TreeNet(user_networks.Plain, members=3, split="first"), iterations=3, **quick)
    grown = run.net.without([1]).with_members(1, at="first")
    assert grown.history.iterations == 3
    further = package.fit(grown, freeze=["trunk"], iterations=2, folder=tmp_path / "run", **quick)
    loaded = package.load(tmp_path / "run", user_networks.Plain)
    assert torch.equal(loaded.predict(x), further.predict(x))
    assert torch.equal(loaded.net.stage("trunk").first.weight, run.net.stage("trunk").first.weight)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda net: net.keep([]), "a tree needs at least one member: keep some of the 5"),
        (lambda net: net.keep(0), r"members 0: give a list of their numbers, such as \[0\]"),
        (lambda net: net.keep([4, 0, 4]), r"member 4 is there twice; net.with_members\(1, like=4\) copies one"),
        (lambda net: net.keep([3, 0, 4]), r"\[3, 0, 4\]\): members that share layers stand .* as in \[3, 4, 0\]"),
        (lambda net: net.without(range(5)), "a tree needs at least one member"),
        (lambda net: net.keep([5]), "member 5 of 5: they are counted from 0 to 4"),
        (lambda net: net.without([-1]), "member -1 of 5"),
        (lambda net: net.with_members(0), r"with_members\(0\): give how many, at least 1"),
        (lambda net: net.with_members(10**12), r"with_members\(1000000000000\): .* at least 1 and at most 10,000"),
        (lambda net: net.with_members(1, at="out"), "at='out': members of this tree part at conv, hidden; None adds"),
        (lambda net: net.with_members(1, at="hidden"), "is where 2 stages end: name one of them, conv/0, conv/2"),
        (lambda net: net.with_members(1, like=9), "member 9 of 5"),
        (
            lambda net: net.with_members(1, at="conv/0", like=3),
            r"members 0, 1, 2 share \w+ here, but each has its own there",
        ),
        (lambda net: net.fork(3), r"fork copies one network, and this tree has 5: net.keep\(\[0\]\).fork\(3\)"),
        (lambda net: net.keep([0]).with_members(1, at="flatten"), "split 'flatten' has no parameters"),
    ],
)
def test_surgery_that_cannot_be_done_is_refused(net, call, words):
    with pytest.raises(UserError, match=words):
        call(net)


def test_a_stage_is_found_by_its_name_where_a_layer_has_it_too():
    """The stage 0 of this forest ends after layer 2, the stage 1 after layer 0."""

    def sequential():
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    forest = TreeNet(sequential, members=4, split=[{"2": 2}, {"0": 2}])
    assert [len(root.members) for root in forest.with_members(1, at="0").tree.roots] == [3, 2]
    assert [len(root.members) for root in forest.with_members(1, at="1").tree.roots] == [2, 3]
    assert [len(root.members) for root in forest.with_members(1, at="2").tree.roots] == [3, 2]


# The same in a config.

RECIPE = ["train", "digits", "model=user_networks:Plain", "data.limit=60", "optim.iterations=1", "optim.lr=1e-12"]


@pytest.fixture
def donor(tmp_path, mheads):
    done = mheads(*RECIPE, "members=3", "split=first", "-f", tmp_path / "donor")
    assert done.code == 0, done.err
    return tmp_path / "donor"


def test_a_recipe_says_which_members_of_a_run_it_starts_from(donor, tmp_path, mheads):
    there = load_file(donor / "model.safetensors")
    args = [f"init={donor}", "members=4", "split=first", "init_members=[2, null, 0, 2]", "sampling=bagging"]
    done = mheads(*RECIPE, *args, "-f", tmp_path / "run")
    assert done.code == 0, done.err
    here = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.allclose(here["stages.trunk.first.weight"], there["stages.trunk.first.weight"])
    for member, source in ((0, 2), (2, 0), (3, 2)):
        found, expected = here[f"stages.first/{member}.second.weight"], there[f"stages.first/{source}.second.weight"]
        assert torch.allclose(found, expected)
    new = here["stages.first/1.second.weight"]
    assert not any(torch.allclose(new, there[f"stages.first/{m}.second.weight"]) for m in range(3))
    assert "is finished" in mheads(*RECIPE, *args, "-f", tmp_path / "run").out
    args[3] = "init_members=[2, null, 0, 1]"
    assert "init_members" in mheads(*RECIPE, *args, "-f", tmp_path / "run").err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["members=2"], "has 3 members, this run 2: start from as many members, from one to be copied to all, or say"),
        (["members=2", "init_members=[0, 1, 2]"], "init_members names 3 for 2 members: give one each"),
        (["members=2", "init_members=[0, 3]"], "init_members names member 3, but init ="),
        (["members=2", "init_members=[0, -1]"], "init_members"),
        (["members=3", "init_map={a: b}"], "init_map renames what is in a file of weights"),
        (["members=2", "init=random", "init_members=[0, 1]"], "but init is random"),
        (["members=2", "init=random", "init_map={a: b}"], "but init is random"),
        (["members=2", "init=w.pt", "init_members=[0, 1]"], "is a file of weights"),
    ],
)
def test_members_that_a_run_does_not_have_are_refused(donor, tmp_path, mheads, args, words):
    done = mheads(*RECIPE, "split=first", f"init={donor}", *args, "-f", tmp_path / "run")
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "run").exists()


# Weights of a network that calls its layers otherwise.


class Elsewhere(nn.Module):
    """The layers of Plain under other names, and a head for other classes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"fc": nn.Linear(64, 16)})
        self.head = nn.Linear(16, 4)
        self.aux = nn.Linear(16, 10)


@pytest.fixture(scope="module")
def elsewhere():
    torch.manual_seed(4)
    return Elsewhere().state_dict()


def test_names_are_mapped_and_what_was_found_missing_and_left_over_is_told(elsewhere, tmp_path, mheads):
    save_file(elsewhere, tmp_path / "w.safetensors")
    args = [f"init={tmp_path}/w.safetensors", "init_map={backbone.fc: first, head: null}", "members=2"]
    done = mheads(*RECIPE, *args, "-f", tmp_path / "run")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert ["found", "2", "first.weight,", "first.bias"] in lines
    assert ["missing,", "drawn", "2", "second.bias,", "second.weight"] in lines
    assert ["left", "over", "4", "aux.bias,", "aux.weight,", "head.bias,", "head.weight"] in lines
    found = load_file(tmp_path / "run" / "model.safetensors")
    drawn = TreeNet(user_networks.Plain, members=2).state_dict()
    for m in range(2):
        assert torch.allclose(found[f"stages.{m}.first.weight"], elsewhere["backbone.fc.weight"])
        assert torch.allclose(found[f"stages.{m}.second.weight"], drawn[f"stages.{m}.second.weight"])


def test_the_longest_beginning_counts_and_prefixes_come_and_go(elsewhere):
    net = TreeNet(user_networks.Plain, members=2, split="first")
    taken = load_into(net, elsewhere, renamed={"backbone": None, "backbone.fc": "first", "aux": "second"})
    assert (taken.missing, taken.left) == ([], ["head.bias", "head.weight"])
    assert torch.equal(net.member(1).second.weight, elsewhere["aux.weight"])
    state = {f"model.{name}": tensor for name, tensor in user_networks.Plain().state_dict().items()}
    assert load_into(net, state, renamed={"model": ""}).missing == []
    inner = TreeNet(lambda: nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), nn.Linear(16, 10)), members=1)
    assert load_into(inner, {"1.weight": torch.ones(16, 64)}, renamed={"": "0"}).found == ["0.1.weight"]
    assert inner.member(0)[0][1].weight.eq(1).all()


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        ({}, r"4 of 4 tensors are missing .*init_map renames what begins otherwise there"),
        ({"backbone.fc": "first", "head": "second"}, r"head.weight is \(4, 16\) there, .* here; init_map={head: null}"),
        ({"backbone.fc": "first", "haed": None}, "init_map: nothing in the weights begins with 'haed'; there are back"),
        ({"aux": "first", "backbone.fc": "first"}, "the same name, first.weight"),
        ({"head": None}, "4 of 4 tensors are missing"),
    ],
)
def test_maps_that_do_not_fit_are_refused_and_nothing_is_changed(elsewhere, renamed, words):
    net = TreeNet(user_networks.Plain, members=2)
    before = outputs(net)
    with pytest.raises(UserError, match=words):
        load_into(net, elsewhere, renamed=renamed)
    assert torch.equal(outputs(net), before)


def test_fit_maps_names_too(elsewhere):
    data = {"train": (X, Y), "test": (X, Y), "iterations": 1, "lr": 1e-12}
    net = TreeNet(user_networks.Plain, members=2)
    run = package.fit(net, init=elsewhere, init_map={"backbone.fc": "first", "aux": "second"}, loss="mcl", **data)
    assert torch.allclose(net.member(1).first.weight, elsewhere["backbone.fc.weight"])
    assert run.config.init_map == {"backbone.fc": "first", "aux": "second"}
    with pytest.raises(UserError, match="init_map renames what is in a file of weights or a state dict"):
        package.fit(net, init=run, init_map={"a": "b"}, **data)
