"""Members that would stay equal for ever are refused, whatever made them equal; weights follow the seed."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import mheads
from mheads import TreeNet, UserError, losses
from mheads.trees.identical_members import find_identical_members

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
DATA = {"train": (X, Y), "test": (X, Y), "iterations": 1, "batch_size": 20}


def network(drop=0.0):
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 5), act=nn.Tanh(), drop=nn.Dropout(drop), b=nn.Linear(5, 3)))


def seeds_torch(drop=0.0):
    torch.manual_seed(7)
    return network(drop)


KEPT = network().state_dict()


def loads_weights():
    net = network()
    net.load_state_dict(KEPT)
    return net


def fills_in_constants():
    net = network()
    for p in net.parameters():
        nn.init.constant_(p, 0.1)
    return net


def loads_the_last_layer():
    net = network()
    net.b.load_state_dict({"weight": KEPT["b.weight"], "bias": KEPT["b.bias"]})
    return net


def with_a_buffer_of_its_own():
    net = loads_weights()
    net.a.register_buffer("mask", torch.rand(5))
    return net


@pytest.mark.parametrize(
    ("factory", "tree"),
    [(loads_weights, 3), (fills_in_constants, 3), *((seeds_torch, tree) for tree in (3, {"a": 3}, [{"a": 2}, 1]))],
)
def test_members_that_start_equal_and_are_taught_the_same_are_refused(factory, tree):
    same = (losses.independent(), losses.score_averaged(), losses.prob_averaged(), losses.mcl(k=3))
    for loss in (*same, losses.mcl(k=3, ce_weight=0.5), losses.Loss("mine", losses.cross_entropies)):
        with pytest.raises(UserError, match=r"members \d and \d start with the same weights.*identical for ever"):
            mheads.fit(TreeNet(factory, tree=tree), loss, **DATA)


def test_the_last_layer_alone_is_what_members_of_a_deep_split_have_for_themselves():
    mheads.fit(TreeNet(loads_the_last_layer, members=2), **DATA)
    with pytest.raises(UserError, match="members 0 and 1 start with the same weights"):
        mheads.fit(TreeNet(loads_the_last_layer, members=2, split="a"), **DATA)


def test_members_that_anything_parts_are_trained():
    def dropping():
        return seeds_torch(0.5)

    def takes_the_first(outputs, y):
        return losses.cross_entropies(outputs, y) * torch.arange(1, 3)[:, None]

    parted = [
        mheads.fit(TreeNet(seeds_torch, members=2), losses.mcl(k=1), **DATA),
        mheads.fit(TreeNet(seeds_torch, members=2), sampling="bagging", **DATA),
        mheads.fit(TreeNet(dropping, members=2), **DATA),
        mheads.fit(TreeNet(with_a_buffer_of_its_own, members=2), **DATA),
        mheads.fit(TreeNet(seeds_torch, members=2), losses.Loss("uneven", takes_the_first), **DATA),
    ]
    assert all(list(find_identical_members(run.net)) == [] for run in parted)
    assert mheads.fit(TreeNet(seeds_torch, members=1), **DATA).net.num_members == 1


@pytest.mark.parametrize(
    "sampling", [{"name": "subset", "fraction": 1.0}, {"name": "specialists", "groups": [[0], [0]]}]
)
def test_sampling_that_gives_members_the_same_examples_does_not_part_them(sampling):
    with pytest.raises(UserError, match="identical for ever"):
        mheads.fit(TreeNet(seeds_torch, members=2), sampling=sampling, **DATA)


@pytest.mark.parametrize("loss", [losses.mcl(k=2, ce_weight=0.5), losses.mcl(k=2), losses.independent()])
def test_init_same_is_refused_where_the_loss_gives_all_members_the_same(loss):
    with pytest.raises(UserError, match=r"init=same with .* identical for ever"):
        mheads.fit(TreeNet(network, members=2, init="same"), loss, **DATA)


def test_members_in_other_processes_are_drawn_to_compare():
    assert list(find_identical_members(TreeNet(seeds_torch, members=3, only=["2"]))) == [(0, 1)]
    assert list(find_identical_members(TreeNet(network, members=3, only=["2"]))) == []
    assert list(find_identical_members(TreeNet(network, members=3, split="a", only=["trunk"], init="same"))) == [(0, 1)]


@pytest.mark.parametrize(
    "draw", [np.random.randn, lambda *shape: [[random.gauss(0, 1) for _ in range(4)] for _ in "abc"]]
)
def test_weights_from_other_global_generators_follow_the_seed(draw):
    def factory():
        net = nn.Sequential(nn.Linear(4, 3))
        net[0].weight.data.copy_(torch.as_tensor(draw(3, 4)))
        return net

    np.random.seed(5), random.seed(5)
    one, again, other = (TreeNet(factory, members=2, seed=seed) for seed in (0, 0, 1))
    assert np.random.rand() == np.random.RandomState(5).rand()
    assert random.random() == random.Random(5).random()
    weights = [net.member(m)[0].weight for net in (one, again, other) for m in range(2)]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[4])


def test_a_loss_of_ones_own_that_fails_is_said_before_a_run_is_made(tmp_path):
    def fails(outputs, y):
        return outputs.gather(2, y)

    for function, words in ((fails, "'mine' fails on outputs .* RuntimeError"), (lambda z, y: z.mean(), r"\[M, B\]")):
        with pytest.raises(UserError, match=words):
            mheads.fit(TreeNet(network, members=2), losses.Loss("mine", function), folder=tmp_path / "run", **DATA)
        assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.* gives 2 values")
def test_outputs_that_are_no_tensor_are_taught_by_their_answer():
    class Named(nn.Module):
        def forward(self, x):
            return {"scores": x, "more": x.square()}

    def factory():
        return nn.Sequential(OrderedDict(a=nn.Linear(4, 3), named=Named()))

    def plain():
        return nn.Sequential(OrderedDict(a=nn.Linear(4, 3)))

    nets = [TreeNet(made, members=2) for made in (factory, plain)]
    runs = [mheads.fit(net, losses.mcl(k=1), **DATA) for net in nets]
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert runs[0].result == runs[1].result
