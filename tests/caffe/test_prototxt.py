# ruff: noqa: E501
"""Reading Caffe's text format, the graph that it says, and every message that a mistake in it gives."""

import random
import re

import pytest
import torch
from helpers import stock_caffe_nets as nets
from helpers.stock_caffe_nets import broadcast_in_place, conv, data, different_branches, ip, layer, nested, on, toy

from mheads.caffe.layer_graph import TEST, TRAIN, NetState, graph_of
from mheads.caffe.member_trees import plan_of
from mheads.caffe.network import Blobs
from mheads.caffe.objective import of_example
from mheads.caffe.prototxt import parse_net, places_of, read_net
from mheads.common.errors import UserError


def refused(text, file="net.prototxt", shape=(3, 12, 12)):
    with pytest.raises(UserError) as caught:
        plan_of(parse_net(text, file)).network(shape)
    return str(caught.value)


def test_comments_quotes_brackets_lists_and_nesting_read_as_protobuf_reads_them():
    text = """
    # a comment with { braces and "quotes
    name: 'a "net"'
    layer <
      name: "conv1" type: 'Convo' "lution"  # strings that stand side by side are one
      bottom: ["data"], top: "conv1";
      convolution_param < num_output: 0x4, kernel_size: [3, 2] weight_filler { type: "gaussian" std: 1e-2 } >
    >
    layer: { name: "p\\x6f\\157l" type: "Pooling" bottom: "conv1" top: "pool" pooling_param { pool: AVE kernel_size: 2 } }
    """
    net = parse_net(text)
    assert net.name == 'a "net"'
    assert [(one.name, one.type, one.line) for one in net.layers] == [
        ("conv1", "Convolution", 4),
        ("pool", "Pooling", 9),
    ]
    p = net.layers[0].message.convolution_param
    assert (p.num_output, list(p.kernel_size), p.weight_filler.std) == (4, [3, 2], 0.01)


def test_places_of_fields_in_lists_and_messages():
    places = places_of('a: 1\nlayer {\n  name: "x" pool: MAX\n}\nlayer: [{ name: "y" },\n { name: "z" }]\nlayer { }')
    assert [(p.line, p.column) for p in places.fields["layer"]] == [(2, 1), (5, 9), (6, 2), (7, 1)]
    assert places.fields["layer"][0].fields["pool"][0].column == 13
    assert set(places.fields["layer"][0].fields) == {"name", "pool"}


def test_the_older_layers_are_the_same_net():
    old = parse_net(nets.old_lenet())
    kinds = ["Data", "Convolution", "Pooling", "InnerProduct", "SoftmaxWithLoss"]
    assert [one.type for one in old.layers] == kinds
    assert [(p.lr_mult, p.decay_mult) for p in old.layers[1].message.param] == [(1, 1), (2, 0)]
    assert old.layers[0].message.transform_param.scale == 0.00390625
    network = plan_of(old).network((1, 28, 28))
    assert [tuple(p.shape) for p in network.parameters()] == [(20, 1, 5, 5), (20,), (10, 2880), (10,)]
    assert network.conv1.multipliers == {"weight": (1.0, 1.0), "bias": (2.0, 0.0)}


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("layer {\n  nome: 'a'\n}", "line 2, column 3", '"LayerParameter" has no field named "nome". Did you mean name?'),
        ("layer {", "line 1, column 7", 'Expected "}"'),
        ("layer { name: 'a\n }", "line 1, column 15", "missing ending quote"),
        ("name: 'a'\nname: 'b'", "line 2, column 7", 'multiple "name" fields'),
        ("layer { type: Convolution }", "line 1, column 15", "Expected string but found: 'Convolution'"),
        ("layers { type: CONVOLUTIN }", "line 1, column 16", "no value named CONVOLUTIN"),
        ("layer { pooling_param {\n  pool: MEAN } }", "line 2, column 9", "no value named MEAN"),
        ("layer { convolution_param { num_output: -1 } }", "line 1, column 41", "Value out of range: -1"),
        ("layers { layer { name: 'x' } }", "line 1, column 10", "upgrade_net_proto_text"),
        ("base_lr: 0.1", "line 1, column 1", "It is one of a solver: give the files in their order"),
        ("layer { name: 'a' type: 'ReLU' }\nlayers { }", "", "both `layer` and the older `layers`"),
        ("name: 'empty'", "", "has no layers"),
        ("x" * 600_000, "", "600,000 characters: at most 500,000"),
        ("layer { name: 'a\0' }", "", "NUL character"),
        ("input: 'a' input_dim: 3", "", "1 input_dim for 1 input: give four for each"),
        ("layer { name: 'a' }", "line 1, column 1", "it has no type"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_with_line_and_column(text, where, part):
    said = refused(text)
    assert said.startswith(f"net.prototxt, {where}: " if where else "net.prototxt")
    assert part in said
    assert len(said) < 900


def test_files_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        read_net(tmp_path / "none.prototxt")
    (tmp_path / "binary.prototxt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"cannot be read as a \.prototxt"):
        read_net(tmp_path / "binary.prototxt")


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", b""), ("utf-8", b"\xef\xbb\xbf"), ("latin-1", b"")])
def test_files_are_read_in_the_encodings_that_users_have(encoding, mark, tmp_path):
    text = "# Größe\n" + data() + ip("i", "data", 3) + nets.ends("i")
    (tmp_path / "net.prototxt").write_bytes(mark + text.encode(encoding))
    net = read_net(tmp_path / "net.prototxt")
    assert net.text == text and net.layers[0].line == 2


BASE = conv("conv1", "data", 4, 3)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (data() + layer("r", "ReLU", "conv2"), "line 2, column 1: layer 'r' (ReLU): its bottom 'conv2' is not there: there are data, label"),
        (data() + layer("r", "ReLU", "conv1") + BASE, "the layer of line 8 makes it later"),
        (data() + BASE + conv("conv1", "data", 4, 3), "line 2 has a layer of this name too"),
        (data() + BASE + layer("conv1", "ReLU", "conv1", "r"), "line 2 has a layer of this name too"),
        (data() + BASE + layer("b", "ReLU", "data", "conv1"), "its top 'conv1' is made by the layer of line 2 too"),
        (data() + layer("s", "Split", "data", ["a", "a"]), "its top 'a' is there twice"),
        (data() + BASE.replace("top:", "include { phase: TRAIN } exclude { phase: TEST } top:"), "both include and exclude"),
        (data() + layer("n", "BatchNorm", "data", None, "param { name: 'mean' lr_mult: 0 }"), "it shares 'mean': statistics cannot be shared here"),
        (data() + layer("n", "BatchNorm", "data", None, "param { lr_mult: 1 }"), "which no learning rate applies to"),
        (data() + layer("c", "convolution", "data"), "there is no layer of type 'convolution' here; did you mean 'Convolution'?"),
        (data() + layer("c", "INNER_PRODUCT", "data"), "did you mean 'InnerProduct'?"),
        (data() + layer("c", "Convolutional", "data"), "did you mean 'Convolution'?"),
        (data() + layer("c", "Normalize", "data"), "there is no layer of type 'Normalize' here: there are Convolution, "),
        (data() + layer("m", "MVN", "data"), "line 2, column 1: layer 'm' (MVN): there is no layer of type 'MVN' here"),
        (data() + ip("i", "data", 3) + layer("o", "HDF5Output", "i", []) + nets.ends("i"), "layer 'o' (HDF5Output): there is no layer of type 'HDF5Output' here"),
        (data() + ip("i", "data", 3) + layer("l", "SoftmaxWithLoss", ["i", "i"]), "its labels 'i' are made by layer 'i' (InnerProduct) of line 2"),
        (data() + layer("l", "EuclideanLoss", ["data", "label"]), "nothing before it has weights"),
        (data() + ip("i", "data", 3) + layer("r", "ReLU", "i", "r", "loss_weight: 1"), "loss_weight is for losses here"),
        (data("a b label") + ip("i", "a", 3) + ip("j", "b", 3) + layer("s", "Eltwise", ["i", "j"]) + nets.ends("s"),
         "read a, b from data layers; here a network reads one blob"),
        (data() + layer("r", "ReLU", "data", None, "propagate_down: true propagate_down: false"), "it has 2 propagate_down for 1 bottoms"),
        (data() + layer("r", "Split", "data", ["a", "b"], "propagate_down: false") + ip("i", "a", 3) + nets.ends("i"), "propagate_down: false is for layers that compute"),
        (data() + BASE.replace("lr_mult: 1", "lr_mult: -1"), "lr_mult: -1: give 0 or more"),
        (data() + layer("r", "ReLU", "data", None, "param { lr_mult: 1 }"), "it has 1 param for 0 blobs"),
        (data() + conv("c", "data", 4, 3, how="param { name: 'w' }") + conv("d", "c", 4, 3, how="param { name: 'w' }"),
         "shares the weight 'w' with layer 'c' of line 2, but the shapes are [4, 4, 3, 3] and [4, 3, 3, 3]: share weights of equal shape (share_mode: PERMISSIVE is not"),
        ("layer { name: 'a' type: 'ReLU' include { phase: TEST } }", "no layer in phase TRAIN"),
        (data() + ip("i", "data", 3) + nets.ends("i").replace('top: "loss"', 'top: "loss" loss_weight: nan'), "loss_weight: nan"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_be_is_refused_with_its_layer_and_line(text, part):
    assert part in refused(text)


def dummy(top, dims=(4,)):
    return layer(
        f"made {top}", "DummyData", [], top, f"dummy_data_param {{ shape {{ {' '.join(f'dim: {d}' for d in dims)} }} }}"
    )


LABELS = {  # of two losses, on blobs p and q
    "two targets": (data("x age gender"), "age", "gender", "layer 'm' (HingeLoss): it learns 'gender' of line 1, and layer 'l' (SoftmaxWithLoss) of line "),
    "made up": (data("x label") + dummy("ones"), "ones", "ones", "layer 'l' (SoftmaxWithLoss): its labels 'ones' are made up by layer 'made ones' (DummyData) of line 2"),
    "one target": (data("x label"), "label", "label", None),
    "all made up": (dummy("x", (4, 5)) + dummy("y"), "y", "y", None),  # where the net says nothing of its data
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_the_one_target_of_the_examples_or_are_refused(name):
    given, one, other, part = LABELS[name]
    text = given + ip("p", "x", 3) + ip("q", "x", 3)
    text += layer("l", "SoftmaxWithLoss", ["p", one]) + layer("m", "HingeLoss", ["q", other])
    if part is not None:
        assert part in refused(text)
    else:
        assert [term.label.name for term in plan_of(parse_net(text)).terms] == [one, other]


def test_rules_by_phase_stage_and_level():
    text = data() + "".join(
        layer(name, "ReLU", "data", name, rule)
        for name, rule in {
            "always": "",
            "training": "include { phase: TRAIN }",
            "not training": "exclude { phase: TRAIN }",
            "staged": 'include { stage: "a" not_stage: "b" }',
            "either": 'include { stage: "b" } include { min_level: 2 }',
            "low": "include { max_level: 1 }",
        }.items()
    )

    def there(phase, level=0, *stages):
        graph = graph_of(parse_net(text), NetState(phase, frozenset(stages), level))
        return {step.layer.name for step in graph.steps} - {"data"}

    assert there(TRAIN) == {"always", "training", "low"}
    assert there(TEST, 2) == {"always", "not training", "either"}
    assert there(TRAIN, 0, "a") == {"always", "training", "staged", "low"}
    assert there(TRAIN, 0, "a", "b") == {"always", "training", "either", "low"}


def test_layers_in_place_and_several_uses_of_a_blob():
    text = (
        'input: "x"\n'
        + layer("a", "Power", "x", "x", "power_param { shift: 1 }")
        + layer("b", "Power", "x", "y", "power_param { scale: 2 }")
        + layer("c", "Power", "x", "x", "power_param { scale: 3 }")
        + layer("d", "Eltwise", ["x", "y"], "z")
    )
    assert Blobs(text, {"x": (2, 3)})(x=torch.ones(2, 3))["z"].tolist() == [[10.0] * 3] * 2


def test_shared_weights_are_one_weight_and_learn_from_both_places():
    shared = "param { name: 'w' } param { name: 'b' lr_mult: 2 }"
    text = data() + ip("a", "data", 12, how=shared) + ip("b", "a", 12, how=shared) + nets.ends("b")
    network = plan_of(parse_net(text)).network((12,))
    assert network.a.weight is network.b.weight and network.a.bias is network.b.bias
    assert sum(p.numel() for p in network.parameters()) == 12 * 12 + 12
    x = torch.randn(5, 12)
    network(x).square().sum().backward()
    twin = network.a.weight.detach().clone().requires_grad_()
    bias = network.a.bias.detach().clone().requires_grad_()
    hidden = x @ twin.T + bias
    (hidden @ twin.T + bias).square().sum().backward()
    torch.testing.assert_close(network.a.weight.grad, twin.grad)
    torch.testing.assert_close(network.a.bias.grad, bias.grad)


STOP = "propagate_down: false"


@pytest.mark.parametrize(
    ("text", "still"),
    [
        (ip("a", "data", 4, 0.5) + ip("b", "a", 4, 0.5, how=STOP) + layer("l", "SoftmaxWithLoss", ["b", "label"]), ["a"]),
        (ip("a", "data", 4, 0.5) + ip("b", "data", 4, 0.5) + layer("s", "Eltwise", ["a", "b"], None, "propagate_down: true " + STOP)
         + layer("l", "SoftmaxWithLoss", ["s", "label"]), ["b"]),
        (ip("a", "data", 4, 0.5) + ip("b", "data", 4, 0.5) + layer("l", "EuclideanLoss", ["a", "b"], None, STOP + " propagate_down: true"), ["a"]),
        (ip("a", "data", 4, 0.5) + layer("l", "SoftmaxWithLoss", ["a", "label"], None, "propagate_down: true " + STOP), []),
    ],
)  # fmt: skip
def test_no_gradient_goes_down_where_it_is_said(text, still):
    text, x, y = data() + text, torch.randn(3, 5), torch.tensor([0, 3, 1])
    plan = plan_of(parse_net(text))
    network, net = plan.network((5,)), Blobs(text, {"data": (3, 5), "label": (3,)})
    network.load_state_dict(net.state_dict())
    net(data=x, label=y)
    net.loss.backward()
    outputs = network(x)
    outputs = tuple(t[None] for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
    terms = plan.describe_terms([tuple(t.shape[1:]) for t in outputs])
    of_example(outputs if len(outputs) > 1 else outputs[0], y, terms).mean().backward()
    for name, one in net.named_parameters():
        other = network.get_parameter(name)
        assert (other.grad is None) == (one.grad is None) == (name.split(".")[0] in still)
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (("lr_mult: 3", ""), (3.0, 1.0)),
        (("", "lr_mult: 3 decay_mult: 0"), (3.0, 0.0)),  # said by the one that shares alone
        (("decay_mult: 0", "lr_mult: 2"), (2.0, 0.0)),
        (("lr_mult: 0", "lr_mult: 0"), (0.0, 1.0)),
        (("", "lr_mult: 0"), (0.0, 1.0)),
        (("lr_mult: 1", "lr_mult: 2"), "shares the weight 'w' with layer 'a' of line 2, but lr_mult is 2 here and 1 there: say it once"),
    ],
)  # fmt: skip
def test_rates_of_shared_weights_are_said_by_any_layer_that_has_them(specs, expected):
    one, other = (f"param {{ name: 'w' {said} }}" for said in specs)
    text = data() + ip("a", "data", 12, how=one) + ip("b", "a", 12, how=other) + nets.ends("b")
    if isinstance(expected, str):
        assert expected in refused(text, shape=(12,))
        return
    network = plan_of(parse_net(text)).network((12,))
    assert network.a.multipliers["weight"] == network.b.multipliers["weight"] == expected
    assert network.a.weight is network.b.weight and network.a.weight.requires_grad == (expected[0] > 0)


def test_several_losses_add_up_by_their_weights():
    text = (
        data("x label")
        + ip("i", "x", 3, 0.5)
        + ip("j", "i", 3, 0.5)
        + layer("l", "SoftmaxWithLoss", ["i", "label"], "l", "loss_weight: 0.3")
        + layer("m", "HingeLoss", ["j", "label"])
    )
    net = Blobs(text, {"x": (4, 5), "label": (4,)})
    found = net(x=torch.randn(4, 5), label=torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(net.loss, 0.3 * found["l"] + found["m"])


def test_layers_without_weights_may_have_the_same_name():
    """As the two losses of Caffe's own autoencoder have."""
    text = (
        data("x label")
        + ip("i", "x", 3, 0.5)
        + layer("same", "ReLU", "i", "r")
        + layer("same", "SoftmaxWithLoss", ["r", "label"], "l")
        + layer("same", "HingeLoss", ["i", "label"], "m")
    )
    found = Blobs(text, {"x": (4, 5), "label": (4,)})(x=torch.randn(4, 5), label=torch.tensor([0, 1, 2, 0]))
    assert sorted(found) == ["l", "m"]
    assert sum(p.numel() for p in plan_of(parse_net(text)).network((5,)).parameters()) == 18


# Ranks.


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("top: \"ip2_2\"", ""), ["line 88", "'gather' (MPIGather)", "2 tops for ranks 0, 1, 2", "one for each rank"]),
        (("mpi_param { root: 0 }", "mpi_param { root: 3 }"), ["'broadcast' (MPIBroadcast)", "root is rank 3", "ranks 0, 1, 2 do", "mpi_param { root: 0 }"]),
        (("include { mpi_rank: 0 mpi_rank: 1 mpi_rank: 2 }", "include { mpi_rank: 0 mpi_rank: 1 }", -2),
         ["'gather' (MPIGather)", "its bottom 'ip2' is not there on rank 2", "as ranks 0, 1, 2 do", "put the layer that makes it"]),
        (("include { mpi_rank: 0 }", "include { mpi_rank: 0 } exclude { mpi_rank: 1 }"), ["line 2", "both include and exclude"]),
        (('bottom: "pool2" top: "pool2_all"', 'bottom: "nothing" top: "pool2_all"'), ["its bottom 'nothing' is not there on rank 0"]),
        (('bottom: "pool2_all"', 'bottom: "pool2"'), ["'conv3'", "its bottom 'pool2' is not there on rank 1", "it is on rank 0: bring it there with MPIBroadcast"]),
        (("mpi_rank: 2", "mpi_rank: -1"), ["mpi_rank: -1: ranks are counted from 0"]),
    ],
)  # fmt: skip
def test_mistakes_of_ranks_name_layer_line_ranks_and_remedy(change, parts):
    old, new, *which = change
    text = toy()
    assert old in text
    if which:  # that occurrence alone
        pieces = text.split(old)
        at = len(pieces) - 1 + which[0]
        text = old.join(pieces[: at + 1]) + new + old.join(pieces[at + 1 :])
    else:
        text = text.replace(old, new, 1)
    said = refused(text)
    assert re.match(r"net\.prototxt, line \d+, column 1: layer '", said)
    for part in parts:
        assert part in said, said


def test_the_same_ranks_in_a_rule_of_each_phase():
    rules = "include { mpi_rank: 0 mpi_rank: 1 phase: TRAIN } include { mpi_rank: 0 mpi_rank: 1 phase: TEST }"
    text = on(data(), 0, 1) + layer("r", "ReLU", "data", "r", rules)
    for phase in (TRAIN, TEST):
        graph = graph_of(parse_net(text), NetState(phase))
        assert [step.rank for step in graph.steps if step.layer.name == "r"] == [0, 1]


def test_tops_of_a_gather_follow_the_order_in_which_ranks_are_listed():
    text = "".join(on(layer(f"x{r}", "Power", "data", "x", f"power_param {{ shift: {r} }}"), r) for r in (0, 1, 2))
    text = (
        "input: 'data'\n" + text + on(layer("g", "MPIGather", "x", ["a", "b", "c"], "mpi_param { root: 1 }"), 2, 0, 1)
    )
    found = Blobs(text, {"data": (1, 1)})(data=torch.zeros(1, 1))
    assert {name: value.item() for name, value in found.items()} == {"a@1": 2, "b@1": 0, "c@1": 1}


def test_a_broadcast_in_place_has_the_right_gradient():
    net = Blobs(broadcast_in_place(), {"data": (3, 5), "label": (3,)}).double()
    x, y = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 1, 3])
    net(data=x, label=y)
    net.loss.backward()
    a, c0, c1 = net.a, getattr(net, "c@0"), getattr(net, "c@1")
    w = a.weight.detach().clone().requires_grad_()
    h = x @ w.T + a.bias.detach()
    mean = (h @ c0.weight.T + c0.bias + h @ c1.weight.T + c1.bias) / 2
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(mean, y), w)
    torch.testing.assert_close(a.weight.grad, gradient)


def test_trees_are_recognised():
    plan = plan_of(parse_net(toy()))
    assert (plan.members, plan.split, plan.combine) == (3, {"conv2": 3}, "mean")
    assert (plan_of(parse_net(toy(ranks=(2, 0)))).split, plan_of(parse_net(toy(ranks=(2, 0)))).members) == (
        {"conv2": 2},
        2,
    )
    assert plan_of(parse_net(toy(coefficients=[0.5, 0.25, 0.25]))).combine == (0.5, 0.25, 0.25)
    for third, combine in ((0.333333, "mean"), (0.33, (0.33, 0.33, 0.33))):  # written with a few digits, or another sum
        assert plan_of(parse_net(toy(coefficients=[third] * 3))).combine == combine
    assert plan_of(parse_net(broadcast_in_place())).split == {"a": 2}


def test_a_tree_of_trees_with_a_loss_on_each_rank():
    plan = plan_of(parse_net(nested()))
    assert (plan.members, plan.split, plan.combine) == (4, {"a": [{"b": 2}, {"b": 2}]}, None)
    assert [name for name, _ in plan.network((5,)).named_children()] == ["a", "b", "c"]


def test_members_with_nothing_in_common_are_a_forest():
    text = data() + ip("a", "data", 4) + layer("l", "SoftmaxWithLoss", ["a", "label"])
    text += on(layer("r", "ReLU", "a", "r"), 0, 1, 2)
    plan = plan_of(parse_net(text))
    assert (plan.members, plan.split) == (3, None)


def test_averaged_probabilities_are_recognised():
    text = toy().replace('"SoftmaxWithLoss"', '"MultinomialLogisticLoss"')
    text = text.replace('"MPIGather"\n  bottom: "ip2"', '"MPIGather"\n  bottom: "prob"')
    gather = text.index('layer {\n  name: "gather"')
    text = text[:gather] + on(layer("prob", "Softmax", "ip2"), 0, 1, 2) + text[gather:]
    plan = plan_of(parse_net(text))
    assert (plan.combine, plan.outputs[0].name, plan.members) == ("probabilities", "ip2", 3)


def test_a_weight_that_trunk_and_branch_share_makes_no_tree():
    """Rank 0 shares it, rank 1 has one of its own: no member is like another."""
    text = broadcast_in_place().replace("num_output: 4", "num_output: 6")
    shared = text.replace("param { lr_mult: 1  }", "param { name: 'w' }")
    assert text != shared
    plan = plan_of(parse_net(shared))
    assert (plan.members, plan_of(parse_net(text)).members) == (1, 2)
    network, net = plan.network((6,)), Blobs(shared, {"data": (3, 6), "label": (3,)})
    assert network.a.weight is getattr(network, "c@0").weight and network.a.weight is not getattr(network, "c@1").weight
    network.load_state_dict(net.state_dict())
    x = torch.randn(3, 6)
    net(data=x, label=torch.tensor([0, 1, 3]))
    torch.testing.assert_close(network(x), net.blobs["m@0"])


def test_ranks_that_make_no_tree_are_one_network():
    plan = plan_of(parse_net(different_branches()))
    assert plan.members == 1
    network = plan.network((5,))
    assert [name for name, _ in network.named_children()] == ["a", "c0", "c1", "r1", "d1", "m"]
    x = torch.randn(2, 5)
    h = network.a(x)
    torch.testing.assert_close(network(x), network.c0(h) + network.d1(network.c1(h).relu()))


# Mutations.

NUMBERS = ["0", "-1", "1", "2", "3", "7", "0.5", "1e30", "99999999", "4294967295", "inf", "nan", "-inf"]
NAMES = ['""', '"data"', '"x/y.z"', '"conv1"', '"label"', '"pool1"', '"ip2"', '"forward"', '"Softmax"', '"Pooling"', '"Slice"',
         '"InnerProduct"', '"BatchNorm"', '"Eltwise"', '"Concat"', '"Reshape"', '"Scale"', '"HingeLoss"', '"EuclideanLoss"']  # fmt: skip
ODD = [
    *NUMBERS,
    *NAMES,
    "true",
    "MAX",
    "AVE",
    "TRAIN",
    "TEST",
    "{",
    "}",
    "<",
    ">",
    "[",
    "]",
    ":",
    '"',
    "'",
    "#",
    "\\",
    "é",
    "layer",
]
MAKERS = [nets.cifar10_quick, toy, nets.lenet, nets.old_lenet, nested, different_branches, broadcast_in_place]


def mutated(number):
    """A valid net, changed: tokens for any others, numbers for numbers, names for names, layers lost, moved or doubled.

    The same number gives the same text.
    """
    rng = random.Random(number)
    text = rng.choice(MAKERS)()
    for _ in range(rng.choice([1, 1, 2, 4])):
        how = rng.randrange(6)
        if how < 2:
            blocks = re.split(r"(?m)^(?=\s*layers? [{<])", text)
            at, other = rng.randrange(len(blocks)), rng.randrange(len(blocks))
            if how == 0:
                blocks[at] = rng.choice(["", blocks[at] * 2])
            else:
                blocks[at], blocks[other] = blocks[other], blocks[at]
            text = "".join(blocks)
            continue
        tokens = re.findall(r'"[^"]*"|[\w.+-]+|\s+|.', text)
        forms = {2: r"[\d.+-]+$", 3: r'"', 4: r"[A-Z_]+$|true$", 5: r"\S"}
        fitting = [i for i, token in enumerate(tokens) if re.match(forms[how], token)]
        if fitting:
            at, other = rng.choice(fitting), rng.choice(fitting)
            choices = {2: NUMBERS, 3: NAMES, 4: ["MAX", "TEST", "false"], 5: ODD}[how]
            tokens[at] = rng.choice([tokens[other], rng.choice(choices), "" if how == 5 else tokens[other]])
        text = "".join(tokens)
    return text


@pytest.mark.parametrize(
    ("count", "working", "kinds"), [(300, 45, 40), pytest.param(1000, 150, 60, marks=pytest.mark.full)]
)
def test_each_mutated_net_works_or_gives_a_message(count, working, kinds):
    shapes = {"cifar": (3, 32, 32), "other": (1, 28, 28)}
    worked, messages = 0, set()
    for number in range(count):
        text = mutated(number)
        shape = shapes["cifar" if "CIFAR10" in text else "other"]
        try:
            plan = plan_of(parse_net(text, "net"))
            built, outputs = plan.build(shape)
            plan.describe_terms([built.shapes[blob] for blob in outputs])
            weights = sum(p.numel() for m in built.modules.values() for p in m.parameters())
            if weights < 300_000 and number % 4 == 0:
                y = plan.network(shape).train()(torch.zeros(2, *shape))
                assert all(len(t) == 2 for t in (y if isinstance(y, tuple) else (y,)))
            worked += 1
        except UserError as error:
            said = str(error)
            assert said.startswith("net") and len(said) < 1500, said
            messages.add(re.sub(r"line \d+, column \d+|'[^']*'|\d+", "", said))
        except Exception as error:
            raise AssertionError(f"mutated({number}):\n{text}") from error
    assert worked > working
    assert len(messages) > kinds
