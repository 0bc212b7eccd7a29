"""Fast R-CNN made of networks that tell images apart."""

import pytest
import torch
from torch import nn

from mheads import UserError, networks
from mheads.networks.fast_rcnn import _centre, fast_rcnn
from mheads.networks.roi_pooling import RegionPool

REGIONS = torch.tensor([[0.0, 0, 60, 80], [10, 20, 90, 90], [5, 5, 8, 8]])


@pytest.mark.parametrize(
    ("base", "args", "layer", "grid", "stride", "features"),
    [
        ("cifar10_quick", {}, "pool3", 4, 4, 64),
        ("nin_cifar100", {}, "pool2", 6, 2, 192),
        ("resnet20", {}, None, 6, 4, 64),
        ("resnet18", {}, None, 6, 32, 512),
        ("digits", {}, None, 2, 2, None),
    ],
)
def test_every_network_with_convolutions_becomes_a_detector(base, args, layer, grid, stride, features):
    net = fast_rcnn(base, classes=7, base_args=args).eval()
    pool = net.regions
    assert isinstance(pool, RegionPool) and pool.size == grid and pool.scale == 1 / stride
    assert layer is None or not hasattr(net, layer)
    channels = next(m.in_channels for m in net.modules() if isinstance(m, nn.Conv2d))
    x, counts = torch.randn(2, channels, 128, 96), torch.tensor([1, 2])
    for _, child in net.named_children():
        x = child(x, REGIONS, counts) if hasattr(child, "takes") else child(x)
    scores, boxes = x
    assert scores.shape == (3, 8) and boxes.shape == (3, 32)
    assert features is None or net.detect.scores.in_features == features
    original = networks.NETWORKS[base](**args)
    kept = {name for name, _ in original.named_parameters()} & {name for name, _ in net.named_parameters()}
    assert len(kept) >= 4  # weights keep their names


def test_caffenet_is_that_of_the_release():
    with torch.device("meta"):
        net = fast_rcnn()
    assert net.regions.size == 6 and net.regions.scale == 1 / 16
    whole = sum(p.numel() for p in networks.NETWORKS["caffenet"]().parameters())
    assert sum(p.numel() for p in net.parameters()) == whole - 4097 * 1000 + 4097 * (21 + 84)
    assert net.detect.scores.multipliers == {"weight": (1, 1), "bias": (2, 0)}


@pytest.mark.parametrize("base", ["caffenet", "nin_ilsvrc", "nin_cifar100", "cifar10_quick", "resnet20"])
def test_a_place_of_the_map_is_that_of_its_pixel(base):
    """What place i of the map sees has its middle at pixel i times the stride, as pooling over regions takes it."""
    torch.manual_seed(0)
    net = fast_rcnn(base)
    x = torch.rand(1, 3, 321, 321, requires_grad=True)
    found = x
    for name, child in net.eval().named_children():
        if name == "regions":
            break
        found = child(found)
    i = found.shape[2] // 2
    seen = torch.autograd.grad(found[0, :, i, i].sum(), x)[0].abs().sum((0, 1))
    for axis in (0, 1):
        places = seen.sum(axis).nonzero()[:, 0]
        assert abs((places.min() + places.max()) / 2 - i / net.regions.scale) < 1


def test_layers_that_are_padded_keep_their_padding():
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, (5, 3), padding=(4, 0), dilation=(1, 2)),
        nn.Sequential(nn.AvgPool2d(3, 2)), nn.MaxPool2d(2, 2),
    )  # fmt: skip
    _centre(layers)
    assert [layers[0].padding, layers[1].padding, layers[3].padding] == ["same", (4, 2), 0]
    assert layers[2][0].padding == (1, 1) and not layers[2][0].count_include_pad


def test_first_weights_are_those_of_the_release():
    torch.manual_seed(0)
    net = fast_rcnn("cifar10_quick")
    assert net.detect.scores.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert net.detect.boxes.weight.std().item() == pytest.approx(0.001, rel=0.1)
    assert not net.detect.scores.bias.any() and not net.detect.boxes.bias.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fast_rcnn("mlp", base_args={"features": 4}), r"mlp has no pooling .*model_args\.at .*\(fc1, relu1"),
        (
            lambda: fast_rcnn("cifar10_quick", at="conv9"),
            r"'conv9' is not a layer of cifar10_quick .*: there are c",
        ),
        (lambda: fast_rcnn("vit"), "vit has no pooling whose place"),
        (lambda: fast_rcnn("cifar10_quick", pool=7), r"\[64, 7, 7\] do not go through .*model_args\.pool"),
        (lambda: fast_rcnn("no_such_net"), "is not known"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_regions_may_be_pooled_after_a_layer_of_choice():
    net = fast_rcnn("cifar10_quick", at="relu3", pool=8)
    names = [name for name, _ in net.named_children()]
    assert names[names.index("regions") - 1] == "relu3" and names[names.index("regions") + 1] == "pool3"
