"""Trees: parsing, building, taking members out, and refusing networks that would silently go wrong."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from mheads import TreeNet, UserError
from mheads.common.memory_layout import canonical
from mheads.networks import NETWORKS
from mheads.networks.dropout import Dropout
from mheads.trees.splitting.cut_sequential import ChainLayer
from mheads.trees.tree_spec import parse

LAYERS = [
    ChainLayer("conv1", True, False),
    ChainLayer("relu1", False, False),
    ChainLayer("conv2", True, False),
    ChainLayer("pool2", False, False),
    ChainLayer("drop2", False, True),
    ChainLayer("relu2", False, False),
    ChainLayer("fc", True, False),
]


def small_net() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(2, 4, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(4, 4, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(36, 5),
        )
    )


def test_split_name_shares_the_parameterless_layers_that_follow():
    tree = parse({"conv1": 3}, LAYERS)
    assert tree.nodes["trunk"].layers == ("conv1", "relu1")
    assert [node.name for node in tree.leaves] == ["conv1/0", "conv1/1", "conv1/2"]
    assert tree.nodes["conv1/0"].layers == ("conv2", "pool2", "drop2", "relu2", "fc")


def test_dropout_after_a_split_belongs_to_the_branches():
    tree = parse({"conv2": 2}, LAYERS)
    assert tree.nodes["trunk"].layers == ("conv1", "relu1", "conv2", "pool2")
    assert tree.nodes["conv2/0"].layers == ("drop2", "relu2", "fc")


def test_number_alone_is_independent_members_and_one_is_a_single_model():
    assert [n.name for n in parse(3, LAYERS).roots] == ["0", "1", "2"]
    assert [n.name for n in parse(1, LAYERS).roots] == ["trunk"]


def test_nested_and_uneven_trees():
    tree = parse({"conv1": [{"conv2": 2}, 3]}, LAYERS)
    assert tree.nodes["trunk"].members == (0, 1, 2, 3, 4)
    assert tree.nodes["conv1/0"].children == ("conv1/0/conv2/0", "conv1/0/conv2/1")
    assert [n.name for n in tree.path(1)] == ["trunk", "conv1/0", "conv1/0/conv2/1"]
    assert tree.nodes["conv1/3"].members == (4,)


def test_keys_side_by_side_are_children_side_by_side():
    wide = [*LAYERS[:-1], ChainLayer("fc1", True, False), ChainLayer("fc2", True, False)]
    tree = parse({"conv1": {"conv2": 2, "fc1": 2}}, wide)
    assert [len(tree.path(m)) for m in range(4)] == [3, 3, 3, 3]
    assert tree.nodes["conv1/1"].layers[-1] == "fc1"


def test_stage_with_one_child_is_one_longer_stage():
    assert parse({"conv1": {"conv2": 2}}, LAYERS).nodes["trunk"].layers == ("conv1", "relu1", "conv2", "pool2")
    assert parse({"conv1": 1}, LAYERS).nodes.keys() == {"trunk"}


@pytest.mark.parametrize(
    ("spec", "members", "words"),
    [
        ({"conv9": 2}, None, ["conv9", "conv1, conv2, fc"]),
        ({"relu1": 2}, None, ["relu1", "no parameters", "can be split at conv1, conv2"]),
        ({"fc": 2}, None, ["fc", "conv1, conv2"]),
        ({"conv1": 3}, 4, ["3 leaves", "members is 4"]),
        ({"conv2": {"conv1": 2}}, None, ["conv1", "before its parent's split 'conv2'"]),
        ({"conv2": [{"conv1": 2}, 1]}, None, ["conv1", "before"]),
        (0, None, ["at least one"]),
        ({"conv1": []}, None, ["empty"]),
        ({"conv1": "two"}, None, ["'two'"]),
        (True, None, ["True"]),
        ({"conv1": 999999999999}, None, ["a tree has 999,999,999,999 members at a split: give at most 10,000"]),
        ([1, {"conv1": [2, 10_001]}], None, ["10,001 members at a split", "at most 10,000"]),
    ],
)
def test_bad_trees_are_explained(spec, members, words):
    with pytest.raises(UserError) as error:
        parse(spec, LAYERS, members, "net")
    assert all(word in str(error.value) for word in words), str(error.value)


def specs(depth: int = 0):
    leaf = st.integers(1, 3)
    if depth == 2:
        return leaf
    below = st.lists(specs(depth + 1), min_size=1, max_size=3)
    return st.one_of(leaf, st.builds(lambda spec: {["conv1", "conv2"][depth]: spec}, below))


@given(specs())
@settings(max_examples=60, deadline=None)
def test_every_tree_covers_every_member_with_all_layers_once(spec):
    tree = parse(spec, LAYERS)
    for member in range(tree.num_members):
        names = [name for node in tree.path(member) for name in node.layers]
        assert names == [layer.name for layer in LAYERS]
    for node in tree.nodes.values():
        assert sorted(node.members) == sorted(m for m in range(tree.num_members) if node in tree.path(m))
        assert len(node.children) != 1


@pytest.mark.parametrize("tree", [1, 3, {"conv1": 3}, {"conv1": [{"conv2": 2}, 2]}, [{"conv1": 2}, {"conv2": 2}, 1]])
def test_outputs_equal_those_of_the_extracted_members(tree):
    net = TreeNet(small_net, tree=tree).double().eval()
    x = torch.randn(7, 2, 6, 6, dtype=torch.float64)
    outputs = net(x)
    assert outputs.shape == (net.num_members, 7, 5)
    for m in range(net.num_members):
        torch.testing.assert_close(outputs[m], net.member(m)(x), rtol=1e-12, atol=1e-12)


def test_member_is_an_ordinary_network_that_shares_the_weights():
    net = TreeNet(small_net, members=2, split="conv1")
    member = net.member(1)
    assert list(member.state_dict()) == list(small_net().state_dict())
    assert member.conv1.weight is net.member(0).conv1.weight
    assert member.fc.weight is not net.member(0).fc.weight
    parted = copy.deepcopy(member)
    parted.conv1.weight.data.zero_()
    assert net.member(1).conv1.weight.abs().sum() > 0


def test_a_tree_can_be_copied_and_pickled():
    net = TreeNet(small_net, members=2, split="conv1", seed=4)
    x = torch.randn(2, 2, 6, 6)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        assert other.member(0).fc.weight is not net.member(0).fc.weight
        assert other.probe(x).shape == (2, 5)  # draws networks again where it needs them


def test_state_dict_names_stages():
    net = TreeNet(small_net, members=2, split="conv1")
    assert list(net.state_dict())[:2] == ["stages.trunk.conv1.weight", "stages.trunk.conv1.bias"]
    assert "stages.conv1/1.fc.bias" in net.state_dict()


def test_members_start_apart_and_do_not_depend_on_the_tree():
    independent = TreeNet(small_net, members=3, seed=5)
    tree = TreeNet(small_net, members=3, split="conv1", seed=5)
    assert not torch.equal(independent.member(0).fc.weight, independent.member(1).fc.weight)
    for m in range(3):
        assert torch.equal(independent.member(m).fc.weight, tree.member(m).fc.weight)
    assert torch.equal(tree.member(2).conv1.weight, independent.member(0).conv1.weight)
    assert not torch.equal(TreeNet(small_net, members=1, seed=6).member(0).fc.weight, tree.member(0).fc.weight)


def test_init_same_gives_every_member_the_same_weights():
    net = TreeNet(small_net, members=3, init="same")
    assert torch.equal(net.member(0).fc.weight, net.member(2).fc.weight)


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    TreeNet(small_net, members=2)
    assert torch.equal(before, torch.get_rng_state())


def test_copy_weights_between_trees_and_from_one_model():
    ensemble, tree = TreeNet(small_net, members=3, seed=1), TreeNet(small_net, members=3, split="conv1", seed=2)
    before = [p.clone() for p in tree.parameters()]
    with pytest.raises(UserError, match="members 0, 1, 2 share conv1 here"):
        tree.copy_weights(ensemble)  # member 0's trunk under the others' branches
    assert all(torch.equal(a, b) for a, b in zip(tree.parameters(), before, strict=True))
    ensemble.copy_weights(tree)
    assert all(torch.equal(ensemble.member(m).conv1.weight, tree.member(0).conv1.weight) for m in range(3))
    assert torch.equal(ensemble.member(2).fc.weight, tree.member(2).fc.weight)
    single = TreeNet(small_net, members=1, seed=3)
    tree.copy_weights(single)
    assert all(torch.equal(tree.member(m).fc.weight, single.member(0).fc.weight) for m in range(3))


def test_parameters_are_counted_against_the_independent_ensemble():
    net = TreeNet(small_net, members=4, split="conv1")
    one = sum(p.numel() for p in small_net().parameters())
    conv1 = sum(p.numel() for p in small_net().conv1.parameters())
    assert net.num_independent_parameters() == 4 * one
    assert net.num_parameters() == 4 * one - 3 * conv1


def test_one_relu_used_twice_is_two_layers():
    relu = nn.ReLU()
    x = torch.randn(3, 4)
    net = TreeNet(lambda: nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2)), members=2)
    assert len(net.member(0)) == 5
    expected = net.member(0)
    assert torch.equal(net(x)[0], expected[4](relu(expected[2](relu(expected[0](x))))))


def test_torch_dropout_is_replaced_by_the_keyed_one_at_any_depth():
    net = TreeNet(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.3), nn.ReLU()), nn.Linear(4, 2)), members=1
    )
    assert isinstance(net.member(0)[1][0], Dropout)
    assert net.member(0)[1][0].p == 0.3


def test_global_randomness_inside_a_network_is_refused_with_the_layer_named():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    net = TreeNet(lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 4), noise=Noisy(), b=nn.Linear(4, 2))), members=2)
    with pytest.raises(UserError, match=r"'noise'.*global generator"):
        net.probe(torch.randn(2, 4))


def test_a_forward_that_does_more_than_its_children_is_followed():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    class Plain(Hidden):
        def forward(self, x):
            return self.b(self.a(x))

    assert TreeNet(Plain, members=2, split="a").probe(torch.randn(2, 4)).shape == (2, 2)
    net, x = TreeNet(Hidden, members=2, split="a"), torch.randn(2, 4)
    assert net.probe(x).shape == (2, 2)
    member = net.member(1)
    torch.testing.assert_close(net(x)[1], member.b(torch.relu(member.a(x))))
    assert list(member.state_dict()) == list(Hidden().state_dict())


def test_probe_leaves_batch_statistics_and_modes_alone():
    net = TreeNet(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), members=1).eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net.probe(torch.randn(8, 4))
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert not any(module.training for module in net.modules())


def test_probe_names_the_layer_that_does_not_fit():
    with pytest.raises(UserError, match=r"'fc'.*\(2, 16\)"):
        TreeNet(small_net, members=1).probe(torch.randn(2, 2, 4, 4))


def test_a_parameter_on_both_sides_of_a_split_is_refused():
    tied = nn.Linear(4, 4)
    with pytest.raises(UserError, match="share a parameter"):
        TreeNet(lambda: nn.Sequential(OrderedDict(a=tied, b=tied, c=nn.Linear(4, 2))), members=2, split="a")


def test_layers_take_side_inputs_by_name():
    class Scale(nn.Module):
        takes = "factor"

        def forward(self, x, factor):
            return x * factor

    net = TreeNet(lambda: nn.Sequential(nn.Linear(3, 2), Scale()), members=2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(net(x, {"factor": torch.tensor(2.0)}), 2 * net(x, {"factor": torch.tensor(1.0)}))


def test_strides_are_canonical_also_for_one_channel():
    plain = torch.randn(4, 1, 8, 8)
    last = torch.empty_strided(plain.shape, (64, 1, 8, 1)).copy_(plain)
    assert plain.is_contiguous(memory_format=torch.channels_last)
    assert last.is_contiguous()
    assert canonical(plain).stride() == canonical(last).stride() == (64, 1, 8, 1)
    assert torch.equal(canonical(plain), plain)
    assert canonical(torch.randn(6, 5).T).stride() == (6, 1)


@pytest.mark.parametrize("name", ["cifar10_quick", "nin_cifar100", "digits"])
def test_the_papers_networks_can_be_split_at_every_layer_with_parameters(name):
    factory = NETWORKS[name]
    with torch.device("meta"):
        layers = [n for n, layer in factory().named_children() if list(layer.parameters())]
        for layer in layers[:-1]:
            assert TreeNet(factory, members=3, split=layer).num_members == 3


def test_a_layer_that_changes_its_own_buffers_must_say_so():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            if self.training:
                self.seen += len(x)
            return x

    class Honest(Counter):
        batch_statistics = True

    def factory(kind):
        return lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 4), counter=kind(), b=nn.Linear(4, 2)))

    with pytest.raises(UserError, match=r"'counter'.*'counter\.seen'.*batch_statistics"):
        TreeNet(factory(Counter), members=2).probe(torch.randn(2, 4))
    net = TreeNet(factory(Honest), members=2)
    net.probe(torch.randn(2, 4))
    assert net.batch_statistics_layers() == ["0.counter", "1.counter"]
    assert net.state_dict()["stages.0.counter.seen"] == 0


def test_a_factory_that_gives_no_network_is_refused():
    with pytest.raises(UserError, match="gives a int"):
        TreeNet(lambda: 3, members=2)


def small(width=4):
    return nn.Sequential(OrderedDict(a=nn.Linear(4, width), b=nn.Linear(width, 2)))


class Sum(nn.Module):
    def forward(self, x):
        return x + x.relu()


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (Sum, {"members": 2}, "Sum has no layer with parameters"),
        (nn.ReLU, {"members": 2}, "ReLU has no layer with parameters"),
        (lambda: nn.Sequential(nn.ReLU()), {"members": 2}, "has no layer with parameters"),
        (nn.Sequential, {"members": 2}, "Sequential has no children to make a tree of; return an nn.Sequential"),
        (Decides, {"members": 2}, "Decides has no children .*cannot follow its forward: .*test_treenet.py, line"),
        (small, {"members": 0}, "members must be a whole number, at least 1, not 0"),
        (small, {"split": "a"}, "split='a' needs the number of members"),
        (small, {"split": "a", "tree": {"a": 2}}, "give either split or tree, not both"),
        (small, {"members": 2, "init": "alike"}, "init is 'random' or 'same', not 'alike'"),
    ],
)
def test_trees_that_cannot_be_made_are_refused(factory, options, message):
    with pytest.raises(UserError, match=message):
        TreeNet(factory, **options)


def test_members_and_weights_that_are_not_there_are_named():
    net = TreeNet(lambda: small(), members=2)
    with pytest.raises(UserError, match="member 2 of 2: they are counted from 0 to 1"):
        net.member(2)
    with pytest.raises(UserError, match=r"a.weight is \(4, 4\) here, \(5, 4\) there"):
        net.copy_weights(TreeNet(lambda: small(5), members=2))
    with pytest.raises(UserError, match="pickled without its factory"):
        pickle.loads(pickle.dumps(net)).network()


def test_a_missing_space_in_yaml_is_pointed_out():
    with pytest.raises(UserError, match="space"):
        parse({"conv1": [{"conv2:2": 1}, 1]}, LAYERS)


def test_a_sequential_with_a_forward_of_its_own_is_followed():
    class Shifted(nn.Sequential):
        def forward(self, x):
            return super().forward(x * 100 - 7)

    net, x = TreeNet(lambda: Shifted(nn.Linear(4, 4), nn.Linear(4, 2)), members=2, split="0"), torch.randn(2, 4)
    net.probe(x)
    reference = Shifted(nn.Linear(4, 4), nn.Linear(4, 2))
    reference.load_state_dict(net.member(1).state_dict())
    torch.testing.assert_close(net(x)[1], reference(x))


def test_a_layer_that_changes_its_input_is_refused():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    net = TreeNet(lambda: nn.Sequential(OrderedDict(twice=InPlace(), a=nn.Linear(4, 2))), members=2)
    with pytest.raises(UserError, match=r"'twice'.*in place"):
        net.probe(torch.randn(2, 4))


def test_layers_rewritten_before_each_call_are_refused():
    def factory():
        layer = nn.Linear(4, 2)
        prune.random_unstructured(layer, "weight", 0.5)
        return nn.Sequential(OrderedDict(pruned=layer))

    with pytest.raises(UserError, match=r"'pruned'.*parametrizations"):
        TreeNet(factory, members=2).probe(torch.randn(2, 4))


def test_running_statistics_on_both_sides_of_a_split_are_refused():
    def network():
        norm = nn.BatchNorm1d(4, affine=False)
        return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), n1=norm, b=nn.Linear(4, 4), n2=norm, c=nn.Linear(4, 3)))

    with pytest.raises(UserError, match="on both sides of a split share running statistics"):
        TreeNet(network, members=2, split="a")
    whole = TreeNet(network, members=2, split="b")
    assert whole(torch.randn(5, 4)).shape == (2, 5, 3)
    assert TreeNet(network, members=2)(torch.randn(5, 4)).shape == (2, 5, 3)
