"""The networks against the published tables: sizes, fillers, multipliers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mheads.networks import INPUT_SHAPES, NETWORKS

PARAMETERS = {
    "cifar10_quick": 145_578,
    "nin_cifar100": 984_356,
    "nin_ilsvrc": 7_595_176,
    "caffenet": 60_965_224,
    "digits": 13_706,
}

MAP_SIZES = {
    "cifar10_quick": {"conv1": 32, "pool1": 16, "conv2": 16, "pool2": 8, "conv3": 8, "pool3": 4},
    "nin_cifar100": {"cccp2": 32, "pool1": 16, "cccp4": 16, "pool2": 8, "cccp6": 8, "pool3": 1},
    "nin_ilsvrc": {
        "conv1": 54,
        "pool0": 27,
        "conv2": 27,
        "pool2": 13,
        "conv3": 13,
        "pool3": 6,
        "cccp8": 6,
        "pool4": 1,
    },
    "caffenet": {"conv1": 55, "norm1": 27, "conv2": 27, "norm2": 13, "conv5": 13, "pool5": 6},
    "digits": {"conv1": 8, "pool1": 4, "conv2": 4, "pool2": 2},
}

# layer: (standard deviation of the weights, bias)
CIFAR10_QUICK = {"conv1": (1e-4, 0), "conv2": (0.01, 0), "conv3": (0.01, 0), "ip1": (0.1, 0), "ip2": (0.1, 0)}
NIN_CIFAR100 = dict.fromkeys(
    ["conv1", "cccp1", "cccp2", "conv2", "cccp3", "cccp4", "conv3", "cccp5", "cccp6"], (0.05, 0)
)
NIN_ILSVRC = {
    **dict.fromkeys(["cccp1", "cccp2", "conv2", "cccp3", "cccp4"], (0.05, 0)),
    **dict.fromkeys(["cccp5", "cccp6", "conv4", "cccp7"], (0.05, 0)),
    **dict.fromkeys(["conv1", "conv3", "cccp8"], (0.01, 0)),
}
CAFFENET = {
    "conv1": (0.01, 0),
    "conv2": (0.01, 1),
    "conv3": (0.01, 0),
    "conv4": (0.01, 1),
    "conv5": (0.01, 1),
    "fc6": (0.005, 1),
    "fc7": (0.005, 1),
    "fc8": (0.01, 0),
}
DIGITS = {  # He's, the first for pixels that vary by 4
    "conv1": ((2 / 9) ** 0.5 / 4, 0),
    "conv2": ((2 / 144) ** 0.5, 0),
    "ip1": ((2 / 128) ** 0.5, 0),
    "ip2": (0.01, 0),
}
FILLERS = {
    "cifar10_quick": CIFAR10_QUICK,
    "nin_cifar100": NIN_CIFAR100,
    "nin_ilsvrc": NIN_ILSVRC,
    "caffenet": CAFFENET,
    "digits": DIGITS,
}


@pytest.fixture(scope="module", params=PARAMETERS)
def named_net(request: pytest.FixtureRequest) -> tuple[str, nn.Sequential]:
    torch.manual_seed(0)
    return request.param, NETWORKS[request.param]()


def layers_with_parameters(net: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in net.named_children() if list(layer.parameters())}


def test_number_of_parameters(named_net):
    name, net = named_net
    assert sum(p.numel() for p in net.parameters()) == PARAMETERS[name]


def test_map_sizes_and_logits(named_net):
    name, net = named_net
    x = torch.empty(2, *INPUT_SHAPES[name], device="meta")
    sizes = {}
    with torch.device("meta"):
        for layer_name, layer in NETWORKS[name]().eval().named_children():
            x = layer(x)
            sizes[layer_name] = tuple(x.shape[2:])
    assert x.shape == (2, list(net.parameters())[-1].numel())
    assert {key: sizes[key] for key in MAP_SIZES[name]} == {k: (v, v) for k, v in MAP_SIZES[name].items()}


@pytest.mark.parametrize("name", ["cifar10_quick", "nin_cifar100", "digits"])
def test_other_classes_and_channels(name):
    net = NETWORKS[name](classes=7, channels=2).eval()
    logits = net(torch.randn(3, 2, *INPUT_SHAPES[name][1:]))
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()


def test_fillers(named_net):
    name, net = named_net
    layers = layers_with_parameters(net)
    assert set(layers) == set(FILLERS[name])
    for layer_name, (std, bias) in FILLERS[name].items():
        weight = layers[layer_name].weight.detach()
        spread = 5 / (2 * weight.numel()) ** 0.5  # five standard errors of a measured std
        assert weight.std().item() == pytest.approx(std, rel=spread), layer_name
        assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5, layer_name
        assert (layers[layer_name].bias == bias).all(), layer_name


def test_multipliers(named_net):
    name, net = named_net
    default = {"weight": (1, 1), "bias": (2, 0)}
    special = {
        ("nin_cifar100", "cccp6"): {"weight": (0.1, 1), "bias": (0.1, 0)},
        **{("cifar10_quick", layer): {"weight": (1, 1), "bias": (2, 1)} for layer in CIFAR10_QUICK},
        **{("digits", layer): {"weight": (1, 1), "bias": (1, 0)} for layer in DIGITS},
    }
    for layer_name, layer in layers_with_parameters(net).items():
        assert layer.multipliers == special.get((name, layer_name), default), layer_name


def test_caffenet_groups():
    with torch.device("meta"):
        net = NETWORKS["caffenet"]()
    assert [net.get_submodule(f"conv{i}").groups for i in range(1, 6)] == [1, 2, 1, 2, 2]


@pytest.mark.parametrize(("image", "side"), [(63, 1), (67, 1), (115, 3), (127, 3), (160, 4), (224, 6), (227, 6)])
def test_caffenet_takes_images_of_other_sizes(image, side):
    with torch.device("meta"):
        net = NETWORKS["caffenet"](classes=10, image=image).eval()
        assert net(torch.empty(2, 3, image, image)).shape == (2, 10)
    assert net.get_submodule("fc6").in_features == 256 * side**2


def test_caffenet_takes_the_biases_of_caffes_alexnet():
    net = NETWORKS["caffenet"](classes=10, image=67, bias=0.1)
    biases = {name: layer.bias.unique().tolist() for name, layer in layers_with_parameters(net).items()}
    assert biases == {name: [pytest.approx(0.1 * bias)] for name, (_, bias) in CAFFENET.items()}


def test_a_last_bias_of_nin_shifts_all_logits_alike_until_the_relu_cuts():
    """Softmax sees no constant that all logits share, so only what the last ReLU lets through differs."""
    images = 70 * torch.randn(2, 3, 80, 80)
    logits = {}
    for last_bias in (0.0, 1.0):
        torch.manual_seed(0)
        net = NETWORKS["nin_ilsvrc"](classes=10, last_bias=last_bias).eval()
        before_relu = net[: list(dict(net.named_children())).index("relu_cccp8")](images)
        logits[last_bias] = net(images)
    assert (before_relu > 0).all()
    torch.testing.assert_close(logits[1.0], before_relu.mean((2, 3)))
    assert (logits[0.0] >= logits[1.0] - 1 - 1e-5).all()
    assert not torch.allclose(logits[0.0], logits[1.0] - 1, atol=1e-3)


def test_weights_follow_the_global_seed():
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(NETWORKS["cifar10_quick"]().parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_digits_learns_in_a_few_hundred_iterations():
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))  # in the file's own order, the last 500 are of other writers
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    x = x - x[:1297].mean(0)
    net = NETWORKS["digits"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    for _ in range(200):
        rows = torch.randint(1297, (100,))
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = net(x[1297:]).argmax(1) == y[1297:]
    assert right.float().mean() > 0.96
