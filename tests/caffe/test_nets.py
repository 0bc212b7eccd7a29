# ruff: noqa: E501
"""Whole nets as users have them: sizes, a step of training, OpenCV's own Caffe reader, and files of weights."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers import stock_caffe_nets as nets
from helpers.stock_caffe_nets import conv, ip, layer, pool, relu
from torch import nn

from mheads import TreeNet
from mheads.caffe import weights
from mheads.caffe.build_modules import EXAMPLES, build
from mheads.caffe.member_trees import plan_of
from mheads.caffe.network import Blobs, network
from mheads.caffe.objective import of_example
from mheads.caffe.prototxt import parse_net
from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.optim.optim_section import OptimOptions
from mheads.optim.stage_updates import Optimizer
from mheads.training.init_weights import load_init


@pytest.mark.parametrize("name", nets.STOCK)
def test_stock_nets_have_the_right_number_of_parameters(name):
    make, shape, count = nets.STOCK[name]
    plan = plan_of(parse_net(make()))
    built = build(plan.steps, dict.fromkeys(plan.inputs, (EXAMPLES, *shape)))
    assert sum(p.numel() for m in built.modules.values() for p in m.parameters()) == count


SMALL = {  # as wide as a test can train; the numbers of parameters above are those of the real ones
    "CIFAR10-Quick": (nets.cifar10_quick(), (3, 32, 32)),
    "CIFAR10-Full": (nets.cifar10_full(), (3, 32, 32)),
    "LeNet": (nets.lenet(), (1, 28, 28)),
    "LeNet, old": (nets.old_lenet(), (1, 28, 28)),
    "CaffeNet": (re.sub(r"num_output: (\d+)", lambda m: f"num_output: {int(m[1]) // 8}", nets.caffenet()), (3, 227, 227)),
    "NiN": (nets.nin_cifar100(), (3, 32, 32)),
    "GoogLeNet": (nets.googlenet(), (3, 224, 224)),
    "R-CNN": (re.sub(r"num_output: (\d+)", lambda m: f"num_output: {int(m[1]) // 8}", nets.rcnn()), (3, 227, 227)),
    "FCN": (nets.fcn(4, 5, 16), (3, 40, 33)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "GoogLeNet" else name for name in SMALL]
)
def test_stock_nets_train_a_step(name):
    text, shape = SMALL[name]
    plan = plan_of(parse_net(text))
    net = TreeNet(lambda: network(text, shape), members=1)
    optimizer = Optimizer(net, OptimOptions(lr=1e-4, caffe_momentum=True))
    if name in ("R-CNN", "FCN"):  # which start from trained weights, their own fillers being zeros
        with torch.no_grad(), seeds.seed_generators(0, "trained"):
            for parameter in net.parameters():
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
    outputs = net(torch.randn(2, *shape))
    scores = outputs[0] if isinstance(outputs, tuple) else outputs
    pixels = scores.shape[3:] if scores.dim() > 3 else ()
    y = torch.randint(scores.shape[2], (2, *pixels))
    terms = plan.describe_terms([tuple(t.shape[1:]) for t in (outputs if isinstance(outputs, tuple) else [outputs])])
    if not terms:  # a net that is deployed has no loss
        terms = [{"type": "HingeLoss", "squared": False, "weight": 1, "inputs": [0, "label"]}]
    loss = of_example(outputs, y, terms, 2).mean()
    assert torch.isfinite(loss)
    loss.backward()
    learning = [p for p in net.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learning]
    optimizer.set_rate(1e-4)
    optimizer.update("trunk", [p.grad for p in learning])
    assert sum(not torch.equal(a, b) for a, b in zip(before, learning, strict=True)) >= len(learning) - 2
    if name == "FCN":
        assert not net.stage("trunk").upscore.weight.requires_grad  # lr_mult: 0


def test_the_weights_of_a_stock_net_begin_as_our_own_network_of_that_name():
    from mheads.networks import NETWORKS

    with seeds.seed_generators(3, "weights", 0):
        ours = NETWORKS["cifar10_quick"]()
    with seeds.seed_generators(3, "weights", 0):
        read = network(nets.cifar10_quick(), (3, 32, 32))
    assert list(read.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), ours.parameters(), strict=True))
    assert read.ip1.multipliers == ours.ip1.multipliers


# OpenCV's reader.


def deployed(text, shape):
    """A net as it is deployed: an input instead of data, no losses and accuracies."""
    body = re.sub(r'^layer \{ name: "data".*\n', "", text, flags=re.MULTILINE)
    blocks = re.split(r"(?=^layer \{)", body, flags=re.MULTILINE)
    body = "".join(block for block in blocks if "Loss" not in block and '"Accuracy"' not in block)
    dims = " ".join(f"dim: {size}" for size in (2, *shape))
    return f'layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ {dims} }} }} }}\n{body}'


def residual():
    """What the stock nets leave out: normalisation, sums, products, slices, deconvolution, other activations."""
    body = "scale_param { bias_term: true }"
    up = 'convolution_param { num_output: 8 kernel_size: 4 stride: 2 pad: 1 group: 8 weight_filler { type: "bilinear" } }'
    return "".join([
        nets.data(), conv("c1", "data", 8, 3, 0.3, pad=1, stride=2),
        layer("n1", "BatchNorm", "c1"), layer("s1", "Scale", "n1", None, body + ' param { lr_mult: 1 }'),
        layer("p1", "PReLU", "s1"), conv("c2", "p1", 8, 3, 0.3, pad=2).replace("pad: 2", "pad: 2 dilation: 2"),
        layer("e1", "ELU", "c2"), layer("sum", "Eltwise", ["p1", "e1"], None, "eltwise_param { coeff: 0.5 coeff: 2 }"),
        layer("prod", "Eltwise", ["p1", "e1"], None, "eltwise_param { operation: PROD }"),
        layer("max", "Eltwise", ["sum", "prod"], None, "eltwise_param { operation: MAX }"),
        layer("parts", "Slice", "max", ["left", "right"], "slice_param { slice_point: 3 }"),
        layer("t", "TanH", "left"), layer("g", "Sigmoid", "right"), layer("a", "AbsVal", "t"),
        layer("w", "Power", "g", None, "power_param { power: 2 scale: 0.5 shift: 1 }"),
        layer("cat", "Concat", ["a", "w"]), layer("up", "Deconvolution", "cat", None, up),
        pool("q1", "up", "AVE", 3, 2, "pad: 1"), pool("q2", "q1", "MAX", 2, 2), relu("r", "q2"),
        layer("f", "Flatten", "q2"), ip("ip", "f", 7, 0.3), layer("prob", "Softmax", "ip"),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (nets.cifar10_quick, (3, 32, 32)),
        (nets.cifar10_full, (3, 31, 29)),
        (nets.lenet, (1, 29, 27)),
        (nets.nin_cifar100, (3, 32, 32)),
        (lambda: nets.googlenet(10), (3, 224, 224)),
        (lambda: SMALL["CaffeNet"][0], (3, 227, 227)),
        (lambda: nets.fcn(4, 5, 16).replace("std: 0.01", "std: 0.2"), (3, 17, 20)),
        (residual, (3, 23, 18)),
    ],
    ids=["quick", "full", "lenet", "nin", "googlenet", "caffenet", "fcn", "residual"],
)
def test_opencv_reads_our_weights_and_gives_the_same_outputs(make, shape, tmp_path):
    cv2 = pytest.importorskip("cv2")
    text = deployed(make(), shape)
    with seeds.seed_generators(0, "weights"):
        net = Blobs(text, {"data": (2, *shape)}, "TEST")
        for buffer in net.buffers():
            buffer.uniform_(0.5, 1.5)
    (tmp_path / "net.prototxt").write_text(text)
    weights.write(tmp_path / "net.caffemodel", net)
    theirs = cv2.dnn.readNetFromCaffe(str(tmp_path / "net.prototxt"), str(tmp_path / "net.caffemodel"))
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    theirs.setInput(x)
    names = theirs.getUnconnectedOutLayersNames()
    expected = dict(zip(names, theirs.forward(names), strict=True))
    with torch.no_grad():
        found = net(data=torch.from_numpy(x))
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-3, atol=1e-5 * np.abs(value).max())


# Weights.


@pytest.mark.parametrize("suffix", [".caffemodel", ".h5"])
def test_weights_survive_writing_and_reading(suffix, tmp_path):
    text = deployed(residual(), (3, 23, 18))
    net = Blobs(text, {"data": (2, 3, 23, 18)})
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.normal_()
    weights.write(tmp_path / f"w{suffix}", net)
    found = weights.read(tmp_path / f"w{suffix}")
    assert [len(found[name]) for name in ("c1", "n1", "s1", "p1", "ip")] == [2, 3, 2, 1, 2]
    state = net.state_dict()
    named = weights.by_name(found, {name: tuple(t.shape) for name, t in state.items()})
    assert named.keys() == state.keys()
    assert all(torch.equal(named[name], state[name]) for name in state)


@pytest.mark.parametrize("suffix", [".caffemodel", ".h5"])
def test_weights_of_layers_inside_layers_are_found_again(suffix, tmp_path):
    block = nn.Sequential(OrderedDict(fc=nn.Linear(6, 8), bn=nn.BatchNorm1d(8)))
    net = nn.Sequential(OrderedDict(block=block, out=nn.Linear(8, 3)))
    weights.write(tmp_path / f"w{suffix}", net)
    wanted = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    found = weights.by_name(weights.read(tmp_path / f"w{suffix}"), wanted)
    for name in ("block.fc.weight", "block.fc.bias", "out.weight", "out.bias"):
        assert torch.equal(found[name], net.state_dict()[name])


def test_a_file_as_protobuf_writes_it_is_read_in_both_forms(tmp_path):
    """By protobuf's own runtime, with the older four sides, doubles, and numbers that are not packed."""
    from mheads.caffe.message_schema import message

    made = message("NetParameter")(name="x")
    new, old = made.layer.add(name="a", type="InnerProduct"), made.layers.add(name="b")
    new.convolution_param.num_output = 3
    blob = new.blobs.add(data=[1, 2, 3, 4, 5, 6])
    blob.shape.dim.extend([2, 3])
    old.blobs.add(double_data=[1.5, 2.5], num=1, channels=1, height=1, width=2)
    (tmp_path / "w.caffemodel").write_bytes(made.SerializeToString())
    found = weights.read(tmp_path / "w.caffemodel")
    np.testing.assert_array_equal(found["a"][0], [[1, 2, 3], [4, 5, 6]])
    assert found["b"][0].shape == (1, 1, 1, 2) and found["b"][0].ravel().tolist() == [1.5, 2.5]
    for shape, fits in (((2,), True), ((1, 2), True), ((2, 1), False)):  # but for ones at the beginning
        named = weights.by_name({"b": found["b"]}, {"b.weight": shape})["b.weight"]
        assert named.shape == (shape if fits else (1, 1, 1, 2))
    loose = bytes([0xA2, 0x06, 14, 0x0A, 1, ord("c"), 0x3A, 9]) + bytes([0x2D, 0, 0, 128, 63, 0x20, 1, 0x3A, 0])
    (tmp_path / "w.caffemodel").write_bytes(loose)  # one number by itself, and a shape of no axes
    assert weights.read(tmp_path / "w.caffemodel")["c"][0].tolist() == 1.0


def test_files_of_weights_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "w.caffemodel"
    net = Blobs(deployed(nets.lenet(), (1, 28, 28)), {"data": (2, 1, 28, 28)})
    weights.write(file, net)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for cut in rng.integers(1, len(whole) - 1, size=20):
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="cannot be read as Caffe's weights"):
            weights.read(file)
    for number in range(200):  # damage anywhere is a message, or other weights
        damaged = bytearray(whole[:3000])
        for at in rng.integers(0, len(damaged), size=1 + number % 7):
            damaged[at] = rng.integers(256)
        file.write_bytes(damaged)
        with pytest.raises(UserError):
            weights.read(file)
    file.write_bytes(b"")
    with pytest.raises(UserError, match="holds no weights"):
        weights.read(file)
    (tmp_path / "w.h5").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read as Caffe's weights"):
        weights.read(tmp_path / "w.h5")
    with pytest.raises(UserError, match="there is no file"):
        weights.read(tmp_path / "none.caffemodel")


def two_layers(wide, deep, name="j"):
    return TreeNet(lambda: nn.Sequential(OrderedDict([("i", nn.Linear(wide, deep)), (name, nn.Linear(deep, 2))])))


def test_a_blob_of_another_shape_is_refused_and_may_be_left_out(tmp_path):
    """As many values are not enough."""
    file = tmp_path / "w.caffemodel"
    weights.write(file, two_layers(4, 6).member(0))
    with pytest.raises(
        UserError, match=r"i\.weight is \(6, 4\) there, \(4, 6\) here; init_map=\{i: null\} leaves it out"
    ):
        load_init(two_layers(6, 4), str(file))
    said = load_init(two_layers(4, 6, "k"), str(file))  # the last layer under another name, as users of Caffe do
    assert "found              2  i.weight, i.bias" in said and "missing, drawn     2  k.bias, k.weight" in said
    assert "left over          2  j.0, j.1" in said
    with pytest.raises(UserError, match="4 of 4 tensors are missing"):
        load_init(TreeNet(lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.Linear(6, 2)))), str(file))
    weights.write(file, nn.Sequential(OrderedDict(i=nn.Linear(4, 6, bias=False), j=nn.Linear(6, 2))))
    with pytest.raises(UserError, match=r"it has no i\.bias, but other weights of that layer"):
        load_init(two_layers(4, 6), str(file))


def test_layers_of_several_ranks_keep_their_weights_apart(tmp_path):
    text = (
        nets.on(nets.data(), 0)
        + nets.on(ip("a", "data", 4, 0.5), 0)
        + nets.on(layer("s", "MPIBroadcast", "a", "h"), 0, 1)
    )
    text += ip("b", "h", 4, 0.5) + nets.on(layer("c", "TanH", "b"), 1) + nets.on(layer("d", "Sigmoid", "b", "c"), 0)
    text += layer("g", "MPIGather", "c", ["c0", "c1"]) + nets.on(layer("m", "Eltwise", ["c0", "c1"]), 0)
    text += nets.on(layer("l", "SoftmaxWithLoss", ["m", "label"]), 0)
    assert plan_of(parse_net(text)).members == 1
    nets_ = [TreeNet(lambda: network(text, (5,)), members=1, seed=seed) for seed in (0, 1)]
    file = tmp_path / "w.caffemodel"
    weights.write(file, nets_[0].member(0))
    assert list(weights.read(file)) == ["a", "b@0", "b@1"]
    assert "found              6" in load_init(nets_[1], str(file))
    one, other = (net.state_dict() for net in nets_)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("shared", "shape"), [("true", ()), ("false", (3,))])
def test_a_slope_for_all_channels_is_a_blob_without_axes(shared, shape, tmp_path):
    text = f'input: "x"\n{layer("p", "PReLU", "x", "y", f"prelu_param {{ channel_shared: {shared} }}")}'
    net = Blobs(text, {"x": (2, 3, 4, 4)})
    for suffix in (".caffemodel", ".h5"):
        weights.write(tmp_path / f"w{suffix}", net)
        assert weights.read(tmp_path / f"w{suffix}")["p"][0].shape == shape
    assert (
        weights.by_name({"p": [np.ones(shape)]}, {"p.weight": (1,) if shared == "true" else (3,)})["p.weight"].dim()
        == 1
    )
