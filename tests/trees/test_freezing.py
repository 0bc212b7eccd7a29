"""Frozen stages and layers: no backward for them, no change of a bit of them, and the same bits everywhere."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.commands import TINY, assert_same_run, ranks
from safetensors.torch import load_file
from torch import nn

import mheads as package
from mheads import TreeNet, UserError, losses
from mheads.engine import row_backward

X = np.random.default_rng(0).normal(size=(60, 2, 6, 6)).astype(np.float32)
Y = np.arange(60) % 3
QUICK = {"train": (X, Y), "test": (X, Y), "iterations": 4, "batch_size": 20, "lr": 0.1, "weight_decay": 0.1}


def network(norm=True, activation=nn.ReLU):
    layers = OrderedDict(conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4), act=activation())
    if not norm:
        del layers["norm"]
    rest = OrderedDict(conv2=nn.Conv2d(4, 5, 2), relu=nn.ReLU(), flatten=nn.Flatten(), out=nn.Linear(45, 3))
    return nn.Sequential(OrderedDict(**layers, **rest))


def changed(net, run):
    """The names of the tensors that training changed."""
    before = before_of(net)
    run(net)
    return {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}


def before_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("freeze", [["trunk"], ["conv", "norm"], ["..norm"], ["conv2/0", "out"], ["conv2/1"]])
def test_what_is_frozen_keeps_every_bit_and_the_rest_learns(freeze, optimizer):
    net = TreeNet(network, tree={"norm": [{"conv2": 2}, 1]} if freeze[0] == "trunk" else {"conv2": 3})
    found = changed(net, lambda net: package.fit(net, freeze=freeze, optimizer=optimizer, **QUICK))
    freeze = ["conv", "norm"] if freeze == ["..norm"] else freeze
    frozen = {n for n in net.state_dict() if any(f"stages.{f}." in n or f".{f}." in n for f in freeze)}
    assert frozen
    assert found == net.state_dict().keys() - frozen
    assert all(p.requires_grad for p in net.parameters())  # for this fit alone


def test_a_net_may_be_frozen_itself_until_it_is_told_otherwise():
    net = TreeNet(network, members=2, split="norm")
    net.freeze(["trunk"])
    assert not any("trunk" in name for name in changed(net, lambda net: package.fit(net, **QUICK)))
    assert net.frozen == ("trunk",)
    net.freeze([])
    assert net.state_dict().keys() == changed(net, lambda net: package.fit(net, **QUICK))


def test_weights_that_the_network_itself_fixes_stay_fixed():
    def fixed():
        made = network()
        made.conv.weight.requires_grad_(False)
        return made

    net = TreeNet(fixed, members=2, split="norm")
    net.freeze(["trunk"])
    net.freeze([])
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["stages.trunk.conv.weight"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("loss", [losses.independent(), losses.mcl(k=1), losses.prob_averaged()])
def test_gradients_above_a_frozen_trunk_are_those_of_autograd(norm, loss):
    """A step of gradient descent in float64, against a loop over members by torch alone."""
    net = TreeNet(lambda: network(norm), members=2, split="norm" if norm else "conv").double()
    net.stage("trunk")(torch.from_numpy(X).double())  # statistics that are not those of the start
    members = [torch.nn.Sequential(OrderedDict(net.member(m).named_children())) for m in range(2)]

    copies = copy.deepcopy(members)
    x, y = torch.from_numpy(X[:20]).double(), torch.from_numpy(Y[:20])
    for member in copies:
        member.train()
        if norm:
            member.norm.eval()
    outputs = torch.stack([member(x) for member in copies])
    (loss(outputs, y).total / 20).backward()
    options = {**QUICK, "train": (X[:20], Y[:20]), "iterations": 1, "weight_decay": 0, "momentum": 0}
    package.fit(net, loss, freeze=["trunk"], scale_rate=False, micro_batches=1, **options)
    for member, reference in zip(members, copies, strict=True):
        for name in ("conv2", "out"):
            step = getattr(reference, name).weight - 0.1 * getattr(reference, name).weight.grad
            assert (getattr(member, name).weight - step).abs().max() < 1e-12


class Counted(nn.Module):
    """Counts how often autograd takes it back."""

    backwards = 0

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.count)
        return x.tanh()

    @staticmethod
    def count(_):
        Counted.backwards += 1


def backwards(freeze, tree):
    Counted.backwards = 0
    net = TreeNet(lambda: network(activation=Counted), tree=tree)
    package.fit(net, freeze=freeze, **{**QUICK, "iterations": 1})
    return Counted.backwards


def test_autograd_is_not_asked_about_a_frozen_trunk():
    assert backwards([], {"conv2": 3}) == 1
    assert backwards(["conv"], {"conv2": 3}) == 1  # norm is before it, and learns
    assert backwards(["trunk"], {"conv2": 3}) == 0
    assert backwards(["conv", "norm"], {"conv2": 3}) == 0  # conv2 after it still learns
    assert backwards([], 2) == 2
    assert backwards(["0"], 2) == 1  # one member of two


def multiply_adds(monkeypatch, freeze, tree):
    """Multiply-adds of the convolutions' backward, per example: (of the weights, of the inputs)."""
    counts = {"weights": 0, "inputs": 0}
    plain = row_backward.aten.convolution_backward

    def counting(d_y, x, weight, *rest):
        each = d_y[0, 0].numel() * weight.numel() * len(d_y) / 20
        counts["inputs"] += each * rest[-1][0]
        counts["weights"] += each * rest[-1][1]
        return plain(d_y, x, weight, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(row_backward, "aten", Ops(row_backward.aten, counting))
        net = TreeNet(lambda: network(norm=False), tree=tree)
        package.fit(net, freeze=freeze, micro_batches=1, **{**QUICK, "iterations": 1})
    return counts


class Ops:
    def __init__(self, ops, convolution_backward):
        self.ops, self.convolution_backward = ops, convolution_backward

    def __getattr__(self, name):
        return getattr(self.ops, name)


def test_the_backward_of_known_layers_costs_nothing_below_what_learns(monkeypatch):
    conv, conv2 = 16 * 4 * 2 * 9, 9 * 5 * 4 * 4
    tree = {"conv": 3}
    assert multiply_adds(monkeypatch, [], tree) == {"weights": conv + 3 * conv2, "inputs": 3 * conv2}
    assert multiply_adds(monkeypatch, ["trunk"], tree) == {"weights": 3 * conv2, "inputs": 0}
    assert multiply_adds(monkeypatch, ["conv2"], tree) == {"weights": conv, "inputs": 3 * conv2}
    assert multiply_adds(monkeypatch, ["conv", "conv2"], tree) == {"weights": 0, "inputs": 0}
    assert multiply_adds(monkeypatch, ["conv/0"], tree) == {"weights": conv + 2 * conv2, "inputs": 3 * conv2}
    assert multiply_adds(monkeypatch, ["conv"], 2) == {"weights": 2 * conv2, "inputs": 0}


def test_frozen_batch_normalisation_lets_the_batch_be_cut():
    net = TreeNet(network, members=2, split="norm")
    with pytest.raises(UserError, match=r"micro_batches is 4, but trunk\.norm needs the statistics of the whole batch"):
        package.fit(net, micro_batches=4, **QUICK)
    package.fit(net, freeze=["trunk"], micro_batches=4, **QUICK)
    inner = TreeNet(lambda: nn.Sequential(OrderedDict(block=network(), last=nn.Linear(3, 3))), members=2)
    found = changed(inner, lambda net: package.fit(net, freeze=["block.norm", "block.conv"], **QUICK))
    assert not any("block.norm" in name or "block.conv." in name for name in found)
    assert any("block.conv2" in name for name in found)


class Rounded(nn.Module):
    """A skip connection makes one layer of norm and block: 'block' by name."""

    def __init__(self):
        super().__init__()
        self.pre, self.norm, self.block, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.pre(x)
        return self.out(torch.relu(self.block(self.norm(h))) + h)


def test_freezing_what_a_layer_is_called_by_does_not_freeze_the_normalisation_beside_it():
    net = TreeNet(Rounded, members=2, split="pre")
    net.freeze(["block"])
    assert net.batch_statistics_layers() == ["pre/0.block", "pre/1.block"]
    net.freeze(["norm"])
    assert net.batch_statistics_layers() == []


TREE = ["split={conv: [{hidden: 2}, 1]}"]


@pytest.mark.parametrize(("freeze", "size"), [("[trunk]", 3), ("[conv/1, hidden]", 2)])
def test_frozen_stages_have_the_same_bits_on_workers_ranks_and_after_a_stop(mheads, tmp_path, freeze, size):
    command = ["train", "digits", *TINY, *TREE, f"freeze={freeze}", "optim.iterations=8"]
    assert mheads(*command, "engine.workers=1", "--run", tmp_path / "one").code == 0
    for done in ranks(size, *command, "--run", tmp_path / "ranks"):
        assert done.code == 0, done.err
    assert_same_run(tmp_path / "one", tmp_path / "ranks")
    first = [part for part in command if "iterations" not in part]
    assert mheads(*first, "optim.iterations=6", "--run", tmp_path / "two").code == 0
    assert mheads(*command, "--run", tmp_path / "two").code == 0
    assert load_file(tmp_path / "one/model.safetensors").keys() == load_file(tmp_path / "two/model.safetensors").keys()
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    done = mheads(*command, "freeze=[conv]", "--run", tmp_path / "one")
    assert done.code == 2
    assert "freeze:" in done.err


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (["trunks"], "no stage and no layer 'trunks'; the stages are trunk, conv/0, conv/1, the layers"),
        ("trunk", r"freeze='trunk': give a list of names, freeze=\['trunk'\]"),
        (["trunk", "conv/0", "conv/1"], r"freeze = \[trunk, conv/0, conv/1\] leaves nothing to learn"),
        (["conv.kernel"], r"there is no stage and no layer 'conv\.kernel'"),
    ],
)
def test_what_cannot_be_frozen_is_refused_and_changes_nothing(freeze, words):
    net = TreeNet(network, members=2, split="conv")
    with pytest.raises(UserError, match=words):
        package.fit(net, freeze=freeze, **QUICK)
    assert net.frozen == ()
    assert all(p.requires_grad for p in net.parameters())


def test_a_recipe_names_what_is_frozen(mheads, tmp_path):
    done = mheads("train", "digits", "split=conv1", "freeze=[conv9]", "--run", tmp_path / "run")
    assert done.code == 2
    assert "freeze: there is no stage and no layer 'conv9'" in done.err
    assert not (tmp_path / "run").exists()


def test_frozen_normalisation_stays_in_eval_mode_and_frozen_dropout_drops():
    def dropping():
        block = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(72, 8), nn.BatchNorm1d(8))
        return nn.Sequential(OrderedDict(block=block, out=nn.Linear(8, 3)))

    net = TreeNet(dropping, members=2, split="block")
    net.freeze(["trunk"])
    for module in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net.member(0)):
        modes = {type(m).__name__: m.training for m in module.train().modules()}
        assert (modes["Dropout"], modes["BatchNorm1d"], modes["Linear"]) == (True, False, True)
    net.freeze([])
    assert all(module.training for module in net.train().modules())


def test_a_weight_that_two_layers_share_is_frozen_by_either():
    def tied():
        made = nn.Sequential(
            OrderedDict(flat=nn.Flatten(), a=nn.Linear(72, 72), b=nn.Linear(72, 72), c=nn.Linear(72, 3))
        )
        made.b.weight = made.a.weight
        return made

    net = TreeNet(tied, members=2)
    found = changed(net, lambda net: package.fit(net, freeze=["b"], **QUICK))
    assert {name.removeprefix("stages.0.") for name in found if "stages.0" in name} == {"a.bias", "c.weight", "c.bias"}
    assert all(p.requires_grad for p in net.parameters())


def test_equal_members_of_which_one_is_frozen_are_parted():
    net = TreeNet(lambda: network(norm=False)).fork(2)
    found = changed(net, lambda net: package.fit(net, freeze=["0"], **QUICK))
    assert found == {name for name in net.state_dict() if name.startswith("stages.1.")}


# Layers of an nn.Sequential and independent members are both called 0, 1, 2, ...


def numbered():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


NUMBERED = QUICK | {"train": (X[:, 0, 0, :5], Y), "test": (X[:, 0, 0, :5], Y)}


@pytest.mark.parametrize(
    ("freeze", "learned"),
    [
        (["..2"], {f"stages.{m}.4.{kind}" for m in range(3) for kind in ("weight", "bias")}),
        (["layer:4", "..0"], {f"stages.{m}.2.{kind}" for m in range(3) for kind in ("weight", "bias")}),
        (["stage:0", "stage:2"], {f"stages.1.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}),
        (["stage:0", "4"], {f"stages.{m}.{k}.{kind}" for m in (1, 2) for k in (0, 2) for kind in ("weight", "bias")}),
    ],
    ids=["up_to", "layers", "stages", "both"],
)
@pytest.mark.parametrize("stack", ["auto", "never"])
def test_a_name_of_a_stage_and_a_layer_freezes_what_its_prefix_says(freeze, learned, stack):
    net = TreeNet(numbered, members=3)
    assert changed(net, lambda net: package.fit(net, freeze=freeze, stack=stack, **NUMBERED)) == learned
    net.freeze(freeze)
    one = net.keep([1])  # one member, whose stage is trunk: none of its layers is called like a stage
    learns = {name.replace("stages.1", "stages.trunk") for name in learned if name.startswith("stages.1")}
    assert {name for name, p in one.named_parameters() if p.requires_grad} == learns


def test_a_name_that_may_mean_two_things_is_an_error():
    net = TreeNet(numbered, members=3)
    with pytest.raises(UserError, match=r"freeze = \[0\]: 0 is a stage and also a layer .* stage:0 .* or layer:0 "):
        net.freeze(["0"])
    with pytest.raises(UserError, match=r"freeze = \[stage:4\]: there is no stage '4'; give 4"):
        net.freeze(["stage:4"])
    with pytest.raises(UserError, match=r"there is no stage and no layer '7'"):
        net.freeze(["layer:7"])
    assert net.frozen == ()
    net.freeze(["layer:4"])  # which no stage is called
    assert net.frozen == ("4",)


@pytest.mark.parametrize("tree", [None, {"0": 3}], ids=["independent", "branches"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_weights_that_are_frozen_by_hand_do_not_learn_where_siblings_are_stacked(tree, frozen):
    net = TreeNet(numbered, tree=tree) if tree else TreeNet(numbered, members=3)
    leaves = [leaf.name for leaf in net.tree.leaves]
    for parameter in net.stage(leaves[frozen]).parameters():
        parameter.requires_grad_(False)
    found = changed(net, lambda net: package.fit(net, **NUMBERED))
    assert found == {name for name in net.state_dict() if not name.startswith(f"stages.{leaves[frozen]}.")}
