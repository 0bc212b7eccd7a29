# ruff: noqa: E501
"""Each of Caffe's layers, forward and backward, against a numpy version written from its definition."""

import math

import numpy as np
import pytest
import torch
from helpers.stock_caffe_nets import layer

from mheads.caffe.fillers import check_filler, fill
from mheads.caffe.message_schema import message
from mheads.caffe.network import Blobs
from mheads.caffe.objective import of_example
from mheads.caffe.prototxt import CaffeLayer
from mheads.common import seeds
from mheads.common.errors import UserError

RNG = np.random.default_rng


def padded(x, pad, value=0.0):
    return np.pad(x, ((0, 0), (0, 0), (pad[0],) * 2, (pad[1],) * 2), constant_values=value)


def convolve(x, w, b, stride=(1, 1), pad=(0, 0), dilation=(1, 1), group=1):
    x = padded(x, pad)
    n, _, h, v = x.shape
    o, per, kh, kw = w.shape
    rows = (h - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (v - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, o, rows, columns))
    for i in range(rows):
        for j in range(columns):
            top, left = i * stride[0], j * stride[1]
            part = x[
                :,
                :,
                top : top + dilation[0] * (kh - 1) + 1 : dilation[0],
                left : left + dilation[1] * (kw - 1) + 1 : dilation[1],
            ]
            for g in range(group):
                out, into = slice(g * o // group, (g + 1) * o // group), slice(g * per, (g + 1) * per)
                y[:, out, i, j] = np.einsum("nchw,ochw->no", part[:, into], w[out])
    return y + (0 if b is None else b[None, :, None, None])


def deconvolve(x, w, b, stride, pad):
    n, _, h, v = x.shape
    _, o, kh, kw = w.shape
    y = np.zeros((n, o, stride * (h - 1) + kh, stride * (v - 1) + kw))
    for i in range(h):
        for j in range(v):
            y[:, :, i * stride : i * stride + kh, j * stride : j * stride + kw] += np.einsum(
                "nc,cohw->nohw", x[:, :, i, j], w
            )
    y = y[:, :, pad : y.shape[2] - pad, pad : y.shape[3] - pad]
    return y + (0 if b is None else b[None, :, None, None])


def pooled(x, kind, kernel, stride, pad=(0, 0)):
    """Window by window, as Caffe's loops go: sizes round up, means divide by what the pad leaves of a window."""
    n, c, h, w = x.shape
    sizes = []
    for length, k, s, p in zip((h, w), kernel, stride, pad, strict=True):
        size = math.ceil((length + 2 * p - k) / s) + 1
        if any(pad) and (size - 1) * s >= length + p:
            size -= 1
        sizes.append(size)
    y = np.zeros((n, c, *sizes))
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            starts = [i * stride[0] - pad[0], j * stride[1] - pad[1]]
            ends = [min(starts[0] + kernel[0], h + pad[0]), min(starts[1] + kernel[1], w + pad[1])]
            count = (ends[0] - starts[0]) * (ends[1] - starts[1])
            part = x[:, :, max(starts[0], 0) : min(ends[0], h), max(starts[1], 0) : min(ends[1], w)]
            y[:, :, i, j] = part.max((2, 3)) if kind == "MAX" else part.sum((2, 3)) / count
    return y


def across(x, size, alpha, beta, k):
    s = np.stack([(x[:, max(0, c - size // 2) : c + size // 2 + 1] ** 2).sum(1) for c in range(x.shape[1])], 1)
    return x * (k + alpha / size * s) ** -beta


def within(x, size, alpha, beta):
    around = padded(x**2, (size // 2,) * 2)
    s = sum(around[:, :, i : i + x.shape[2], j : j + x.shape[3]] for i in range(size) for j in range(size))
    return x * (1 + alpha / size**2 * s) ** -beta


def softmax(x, axis=1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def cross_entropy(x, y, axis=1, ignore=None, mode="VALID"):
    p = np.moveaxis(softmax(x, axis), axis, -1).reshape(-1, x.shape[axis])
    y = y.reshape(-1).astype(int)
    counts = np.ones(len(y), bool) if ignore is None else y != ignore
    total = -np.log(p[np.flatnonzero(counts), y[counts]]).sum()
    return total / {"FULL": len(y), "VALID": max(1, counts.sum()), "BATCH_SIZE": len(x), "NONE": 1}[mode]


def sigmoid_loss(x, y):
    return (np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0) - x * y).sum() / len(x)


def hinge(x, y, squared):
    t = -np.ones_like(x)
    t[np.arange(len(x)), y.astype(int)] = 1
    m = np.maximum(0, 1 - t * x)
    return (m**2 if squared else m).sum() / len(x)


def normalised(x):
    mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5)


IMAGE, ODD = (2, 4, 7, 6), (2, 3, 9, 8)
# type, parameters, shapes of the bottoms, function of bottoms and weights.
CASES = {
    "convolution": ("Convolution", "convolution_param { num_output: 5 kernel_size: 3 }", [IMAGE], convolve),
    "convolution, groups, stride, pad": (
        "Convolution",
        "convolution_param { num_output: 6 kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0 group: 2 }",
        [IMAGE],
        lambda x, w, b: convolve(x, w, b, (2, 1), (1, 0), group=2),
    ),
    "convolution, dilation, no bias": (
        "Convolution",
        "convolution_param { num_output: 3 kernel_size: 2 kernel_size: 3 dilation: 2 pad: 2 bias_term: false }",
        [IMAGE],
        lambda x, w: convolve(x, w, None, pad=(2, 2), dilation=(2, 2)),
    ),
    "deconvolution": (
        "Deconvolution",
        "convolution_param { num_output: 3 kernel_size: 4 stride: 2 pad: 1 }",
        [(2, 4, 3, 5)],
        lambda x, w, b: deconvolve(x, w, b, 2, 1),
    ),
    "inner product": (
        "InnerProduct",
        "inner_product_param { num_output: 5 }",
        [IMAGE],
        lambda x, w, b: x.reshape(2, -1) @ w.T + b,
    ),
    "inner product, transposed, axis": (
        "InnerProduct",
        "inner_product_param { num_output: 5 transpose: true axis: 2 bias_term: false }",
        [(2, 3, 4)],
        lambda x, w: x @ w,
    ),
    "relu": ("ReLU", "", [IMAGE], lambda x: np.maximum(x, 0)),
    "relu, slope": ("ReLU", "relu_param { negative_slope: 0.1 }", [IMAGE], lambda x: np.where(x > 0, x, 0.1 * x)),
    "prelu": ("PReLU", "", [IMAGE], lambda x, a: np.where(x > 0, x, a[:, None, None] * x)),
    "prelu, shared": ("PReLU", "prelu_param { channel_shared: true }", [IMAGE], lambda x, a: np.where(x > 0, x, a * x)),
    "elu": ("ELU", "elu_param { alpha: 0.7 }", [IMAGE], lambda x: np.where(x > 0, x, 0.7 * (np.exp(x) - 1))),
    "sigmoid": ("Sigmoid", "", [IMAGE], lambda x: 1 / (1 + np.exp(-x))),
    "tanh": ("TanH", "", [IMAGE], np.tanh),
    "absolute value": ("AbsVal", "", [IMAGE], np.abs),
    "bnll": ("BNLL", "", [IMAGE], lambda x: np.log1p(np.exp(x))),
    "power": ("Power", "power_param { power: 3 scale: 0.5 shift: 2 }", [IMAGE], lambda x: (2 + 0.5 * x) ** 3),
    "exp": ("Exp", "exp_param { base: 2 scale: 0.5 shift: 1 }", [IMAGE], lambda x: 2 ** (1 + 0.5 * x)),
    "exp, e": ("Exp", "", [IMAGE], np.exp),
    "log": ("Log", "log_param { base: 10 scale: 0.5 shift: 9 }", [IMAGE], lambda x: np.log10(9 + 0.5 * x)),
    "lrn": ("LRN", "lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 k: 2 }", [IMAGE], lambda x: across(x, 3, 0.5, 0.6, 2)),
    "lrn within": (
        "LRN",
        "lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 norm_region: WITHIN_CHANNEL }",
        [IMAGE],
        lambda x: within(x, 3, 0.5, 0.6),
    ),
    "dropout, testing": ("Dropout", "", [IMAGE], lambda x: x),
    "dropout that scales when testing": (
        "Dropout",
        "dropout_param { dropout_ratio: 0.25 scale_train: false }",
        [IMAGE],
        lambda x: 0.75 * x,
    ),
    "batch norm": ("BatchNorm", "batch_norm_param { use_global_stats: false }", [IMAGE], normalised),
    "scale": (
        "Scale",
        "scale_param { bias_term: true }",
        [IMAGE],
        lambda x, w, b: x * w[:, None, None] + b[:, None, None],
    ),
    "scale, two axes": (
        "Scale",
        "scale_param { axis: -2 num_axes: -1 }",
        [IMAGE],
        lambda x, w: x * w,
    ),
    "scale by a bottom": ("Scale", "scale_param { axis: 0 }", [IMAGE, (2, 4)], lambda x, s: x * s[:, :, None, None]),
    "bias": ("Bias", "", [IMAGE], lambda x, b: x + b[:, None, None]),
    "bias by a bottom": ("Bias", "bias_param { axis: 0 }", [IMAGE, (2, 4)], lambda x, s: x + s[:, :, None, None]),
    "sum": ("Eltwise", "", [IMAGE, IMAGE, IMAGE], lambda a, b, c: a + b + c),
    "sum with coefficients": (
        "Eltwise",
        "eltwise_param { coeff: 0.5 coeff: -2 }",
        [IMAGE, IMAGE],
        lambda a, b: 0.5 * a - 2 * b,
    ),
    "product": ("Eltwise", "eltwise_param { operation: PROD }", [IMAGE] * 3, lambda a, b, c: a * b * c),
    "maximum": ("Eltwise", "eltwise_param { operation: MAX }", [IMAGE] * 3, lambda *xs: np.max(xs, 0)),
    "concat": ("Concat", "", [IMAGE, (2, 2, 7, 6)], lambda a, b: np.concatenate([a, b], 1)),
    "concat, axis": (
        "Concat",
        "concat_param { axis: -1 }",
        [IMAGE, (2, 4, 7, 1)],
        lambda a, b: np.concatenate([a, b], 3),
    ),
    "flatten": ("Flatten", "", [IMAGE], lambda x: x.reshape(2, -1)),
    "flatten, axes": ("Flatten", "flatten_param { axis: 1 end_axis: 2 }", [IMAGE], lambda x: x.reshape(2, 28, 6)),
    "reshape": (
        "Reshape",
        "reshape_param { shape { dim: 0 dim: 2 dim: -1 dim: 3 } }",
        [IMAGE],
        lambda x: x.reshape(2, 2, -1, 3),
    ),
    "reshape, axis": (
        "Reshape",
        "reshape_param { shape { dim: 2 dim: 2 } axis: 1 num_axes: 1 }",
        [IMAGE],
        lambda x: x.reshape(2, 2, 2, 7, 6),
    ),
    "softmax": ("Softmax", "", [IMAGE], softmax),
    "softmax, axis": ("Softmax", "softmax_param { axis: 3 }", [IMAGE], lambda x: softmax(x, 3)),
    "crop": (
        "Crop",
        "crop_param { axis: 2 offset: 1 offset: 2 }",
        [IMAGE, (2, 9, 5, 3)],
        lambda x, like: x[:, :, 1:6, 2:5],
    ),
    "euclidean loss": ("EuclideanLoss", "", [(3, 4), (3, 4)], lambda a, b: ((a - b) ** 2).sum() / 6),
    "max pooling": ("Pooling", "pooling_param { kernel_size: 3 stride: 2 }", [ODD], lambda x: pooled(x, "MAX", (3, 3), (2, 2))),
    "global average": (
        "Pooling",
        "pooling_param { pool: AVE global_pooling: true }",
        [IMAGE],
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    "global maximum": ("Pooling", "pooling_param { global_pooling: true }", [IMAGE], lambda x: x.max((2, 3), keepdims=True)),
}  # fmt: skip


def net_of(kind, body, shapes, phase="TEST", label=None):
    bottoms = [f"x{i}" for i in range(len(shapes))]
    inputs = "".join(f'input: "{name}"\n' for name in bottoms)
    tops = ["y"]
    return Blobs(
        inputs + layer("it", kind, bottoms, tops, body), dict(zip(bottoms, shapes, strict=True)), phase
    ).double()


def differences(function, arrays, which, at, weight, step=1e-6):
    """The slope of sum(weight * function) along single numbers of one array."""
    found = []
    for place in at:
        values = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[which][place] += sign * step
            values.append((weight * function(*moved)).sum())
        found.append((values[0] - values[1]) / (2 * step))
    return np.array(found)


def assert_is_numpys(net, function, arrays, fixed=()):
    """Forward, and the slopes along some numbers of each bottom and each weight."""
    rng = RNG(1)
    weights = [p.detach().numpy() for p in net.parameters()]
    inputs = [torch.from_numpy(a).requires_grad_(i not in fixed) for i, a in enumerate(arrays)]
    (y,) = net(**{f"x{i}": t for i, t in enumerate(inputs)}).values()
    expected = np.asarray(function(*arrays, *weights))
    assert tuple(y.shape) == expected.shape
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-9, atol=1e-11)
    weight = rng.normal(size=expected.shape)
    (y * torch.from_numpy(weight)).sum().backward()
    everything = [*arrays, *weights]
    for which, (value, tensor) in enumerate(zip(everything, [*inputs, *net.parameters()], strict=True)):
        if which in fixed:
            continue
        at = [np.unravel_index(i, value.shape) for i in rng.integers(value.size, size=6)]
        slopes = differences(function, everything, which, at, weight)
        gradient = np.zeros_like(value) if tensor.grad is None else tensor.grad.numpy()
        np.testing.assert_allclose([gradient[place] for place in at], slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_numpy_says_forward_and_backward(name):
    kind, body, shapes, function = CASES[name]
    net = net_of(kind, body, shapes)
    rng = RNG(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
    assert_is_numpys(net, function, [rng.normal(size=shape) for shape in shapes])


@pytest.mark.parametrize("kind", ["MAX", "AVE"])
@pytest.mark.parametrize("size", [(6, 7), (8, 8), (13, 10), (5, 32)])
@pytest.mark.parametrize(
    ("kernel", "stride", "pad"),
    [((3, 3), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((2, 3), (2, 1), (1, 0)), ((3, 3), (3, 3), (2, 2)),
     ((4, 4), (1, 3), (3, 1)), ((5, 5), (3, 3), (0, 0)), ((2, 2), (2, 2), (1, 1))],
)  # fmt: skip
def test_pooling_has_caffes_sizes_and_divides_as_it_does(kind, size, kernel, stride, pad):
    body = f"pool: {kind} kernel_h: {kernel[0]} kernel_w: {kernel[1]} stride_h: {stride[0]} stride_w: {stride[1]}"
    net = net_of("Pooling", f"pooling_param {{ {body} pad_h: {pad[0]} pad_w: {pad[1]} }}", [(2, 3, *size)])
    assert_is_numpys(net, lambda x: pooled(x, kind, kernel, stride, pad), [RNG(0).normal(size=(2, 3, *size))])


def test_pooling_that_rounds_up_gives_more_than_torch_would_by_itself():
    x = RNG(0).normal(size=(1, 1, 6, 6))
    net = net_of("Pooling", "pooling_param { kernel_size: 3 stride: 2 }", [x.shape])
    assert net(x0=torch.from_numpy(x))["y"].shape[2:] == (3, 3)
    assert torch.nn.MaxPool2d(3, 2)(torch.from_numpy(x)).shape[2:] == (2, 2)
    floor = net_of("Pooling", "pooling_param { kernel_size: 3 stride: 2 round_mode: FLOOR }", [x.shape])
    assert floor(x0=torch.from_numpy(x))["y"].shape[2:] == (2, 2)


def test_a_window_beyond_the_image_is_refused_and_not_garbage():
    with pytest.raises(UserError, match=r"line 2, column 1: layer 'it' \(Pooling\): its last window begins at 6"):
        net_of("Pooling", "pooling_param { kernel_size: 1 stride: 3 }", [(1, 1, 5, 5)])


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("", cross_entropy),
        ("softmax_param { axis: -1 }", lambda x, y: cross_entropy(x, y, 3)),
        ("loss_param { ignore_label: 1 }", lambda x, y: cross_entropy(x, y, ignore=1)),
        *((f"loss_param {{ ignore_label: 2 normalization: {mode} }}",
           lambda x, y, mode=mode: cross_entropy(x, y, ignore=2, mode=mode)) for mode in ("FULL", "VALID", "BATCH_SIZE", "NONE")),
        ("loss_param { normalize: false }", lambda x, y: cross_entropy(x, y, mode="BATCH_SIZE")),
    ],
)  # fmt: skip
def test_softmax_loss_on_pixels(body, function):
    shape = (2, 3, 4, 5)
    places = (2, 3, 4) if "axis" in body else (2, 4, 5)
    classes = 5 if "axis" in body else 3
    y = RNG(3).integers(classes, size=places).astype(float)
    net = net_of("SoftmaxWithLoss", body, [shape, places])
    assert_is_numpys(net, function, [RNG(0).normal(size=shape), y], fixed=(1,))


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_the_size_of_a_batch_counts_the_places_before_the_classes(axis):
    """Caffe's outer_num, by which BATCH_SIZE divides."""
    shape = (2, 3, 4, 5)
    places = tuple(size for i, size in enumerate(shape) if i != axis)
    x, y = RNG(0).normal(size=shape), RNG(3).integers(shape[axis], size=places)
    body = f"softmax_param {{ axis: {axis} }} loss_param {{ normalization: BATCH_SIZE }}"
    net = net_of("SoftmaxWithLoss", body, [shape, places])
    p = softmax(np.moveaxis(x, axis, -1).reshape(-1, shape[axis]))
    expected = -np.log(p[np.arange(len(p)), y.reshape(-1)]).sum() / np.prod(shape[:axis])
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    assert net(x0=x, x1=y)["y"].item() == pytest.approx(expected)
    term = {**net.it.term, "weight": 1, "inputs": [0, "label"]}
    assert of_example(x[None], y, [term]).mean().item() == pytest.approx(expected)


def test_three_rates_of_statistics_are_taken_for_none():
    net = net_of("BatchNorm", "param { lr_mult: 1 decay_mult: 0 } " * 3, [IMAGE])
    assert not list(net.parameters())


@pytest.mark.parametrize(
    ("kind", "body", "function"),
    [
        ("HingeLoss", "", lambda x, y: hinge(x, y, False)),
        ("HingeLoss", "hinge_loss_param { norm: L2 }", lambda x, y: hinge(x, y, True)),
        ("SoftmaxWithLoss", "", cross_entropy),
    ],
)
def test_losses_of_classes(kind, body, function):
    y = RNG(3).integers(4, size=6).astype(float)
    assert_is_numpys(net_of(kind, body, [(6, 4), (6,)]), function, [RNG(0).normal(size=(6, 4)), y], fixed=(1,))


def test_multinomial_loss_of_probabilities():
    p = softmax(RNG(0).normal(size=(6, 4)))
    y = RNG(3).integers(4, size=6).astype(float)

    def function(p, y):
        return -np.log(p[np.arange(6), y.astype(int)]).mean()

    assert_is_numpys(net_of("MultinomialLogisticLoss", "", [(6, 4), (6,)]), function, [p, y], fixed=(1,))


def test_sigmoid_loss_of_several_labels():
    y = RNG(3).integers(2, size=(6, 4)).astype(float)
    net = net_of("SigmoidCrossEntropyLoss", "", [(6, 4), (6, 4)])
    assert_is_numpys(net, sigmoid_loss, [RNG(0).normal(size=(6, 4)), y], fixed=(1,))


def test_argmax_and_accuracy_by_hand():
    x = torch.tensor([[1.0, 5.0, 3.0], [9.0, 2.0, 4.0]])
    body = "argmax_param { top_k: 2 out_max_val: true }"
    found = net_of("ArgMax", body, [(2, 3)])(x0=x.double())["y"]
    assert found.tolist() == [[[1, 2], [5, 3]], [[0, 2], [9, 4]]]
    assert net_of("ArgMax", "argmax_param { axis: 1 }", [(2, 3)])(x0=x.double())["y"].tolist() == [[1], [0]]
    y = torch.tensor([2.0, 0.0])
    for k, expected in ((1, 0.5), (2, 1.0)):
        net = net_of("Accuracy", f"accuracy_param {{ top_k: {k} }}", [(2, 3), (2,)])
        assert net(x0=x.double(), x1=y)["y"] == expected
    ignoring = net_of("Accuracy", "accuracy_param { ignore_label: 2 }", [(2, 3), (2,)])
    assert ignoring(x0=x.double(), x1=y)["y"] == 1.0


def test_slices_and_splits_hand_on_their_parts():
    text = 'input: "x"\n' + layer("s", "Slice", "x", ["a", "b", "c"], "slice_param { slice_point: 1 slice_point: 3 }")
    x = torch.arange(10.0).view(2, 5)
    found = Blobs(text + layer("t", "Split", "c", ["d", "e"]), {"x": (2, 5)})(x=x)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [[0.0], [5.0]],
        "b": [[1.0, 2.0], [6.0, 7.0]],
        "d": [[3.0, 4.0], [8.0, 9.0]],
        "e": [[3.0, 4.0], [8.0, 9.0]],
    }
    silent = Blobs(text + layer("q", "Silence", ["a", "b"], []), {"x": (2, 5)})
    assert list(silent(x=x)) == ["c"]


def test_batch_norm_gathers_statistics_as_caffe_does_and_uses_them_in_testing():
    rng, fraction = RNG(0), 0.9
    text = 'input: "x"\n' + layer(
        "n", "BatchNorm", "x", "y", f"batch_norm_param {{ moving_average_fraction: {fraction} }}"
    )
    net = Blobs(text, {"x": (4, 3, 2, 2)}).double()
    mean, variance, factor = np.zeros(3), np.zeros(3), 0.0
    for _ in range(3):
        x = rng.normal(2, 3, size=(4, 3, 2, 2))
        np.testing.assert_allclose(net(x=torch.from_numpy(x))["y"].numpy(), normalised(x))
        mean = fraction * mean + x.mean((0, 2, 3))
        variance = fraction * variance + x.var((0, 2, 3), ddof=1)
        factor = fraction * factor + 1
    net.eval()
    expected = (x - (mean / factor)[:, None, None]) / np.sqrt((variance / factor)[:, None, None] + 1e-5)
    np.testing.assert_allclose(net(x=torch.from_numpy(x))["y"].numpy(), expected, rtol=1e-9)


def test_dropout_drops_its_part_and_scales_the_rest():
    text = 'input: "x"\n' + layer("d", "Dropout", "x", "y", "dropout_param { dropout_ratio: 0.3 }")
    with seeds.seed_generators(0, "dropout"):
        y = Blobs(text, {"x": (100, 100)})(x=torch.ones(100, 100))["y"]
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert 0.28 < (y == 0).float().mean() < 0.32


def filled(text, shape):
    from google.protobuf import text_format

    from mheads.caffe import message_schema

    made = message("FillerParameter")()
    text_format.Parse(text, made, descriptor_pool=message_schema.pool())
    tensor = torch.empty(shape)
    check_filler(made, shape, CaffeLayer(message("LayerParameter")(name="it", type="Convolution"), "net", 1, 1))
    with seeds.seed_generators(0, "filler"):
        fill(tensor, made)
    return tensor.double().numpy()


def test_fillers_have_caffes_moments_and_bounds():
    shape = (200, 10, 5, 4)  # fan-in 200, fan-out 4,000
    assert (filled('type: "constant" value: 3', shape) == 3).all()
    assert (filled("", shape) == 0).all()
    uniform = filled('type: "uniform" min: -2 max: 1', shape)
    assert -2 <= uniform.min() < -1.99 and 0.99 < uniform.max() <= 1 and abs(uniform.mean() + 0.5) < 0.02
    gaussian = filled('type: "gaussian" mean: 1 std: 0.5', shape)
    assert abs(gaussian.mean() - 1) < 0.01 and abs(gaussian.std() - 0.5) < 0.01
    sparse = filled('type: "gaussian" sparse: 20', shape)
    assert abs((sparse != 0).mean() - 20 / 200) < 0.01
    ball = filled('type: "positive_unitball"', shape)
    np.testing.assert_allclose(ball.reshape(200, -1).sum(1), 1, rtol=1e-5)
    assert ball.min() >= 0
    for norm, fan in (("FAN_IN", 200), ("FAN_OUT", 4000), ("AVERAGE", 2100)):
        xavier = filled(f'type: "xavier" variance_norm: {norm}', shape)
        assert np.abs(xavier).max() == pytest.approx(math.sqrt(3 / fan), rel=1e-3)
        assert abs(xavier.var() * fan - 1) < 0.03
        assert abs(filled(f'type: "msra" variance_norm: {norm}', shape).var() * fan - 2) < 0.06
    for size in (3, 4):
        f = math.ceil(size / 2)
        centre = (size - 1) / (2 * f)
        row = np.array([1 - abs(i / f - centre) for i in range(size)])
        np.testing.assert_allclose(filled('type: "bilinear"', (2, 1, size, size))[1, 0], np.outer(row, row), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "shape", "part"),
    [
        ('type: "gauss"', (3,), "there is no filler 'gauss': it is one of constant"),
        ('type: "gaussian" std: -1', (3,), "std: -1: give 0 or more"),
        ('type: "uniform" min: 2', (3,), "from 2 to 1"),
        ('type: "gaussian" mean: inf', (3,), "mean: inf of its filler"),
        ('type: "bilinear"', (3, 2), "square kernels"),
    ],
)
def test_a_filler_that_cannot_be_is_refused(text, shape, part):
    with pytest.raises(UserError, match=part):
        filled(text, shape)


@pytest.mark.parametrize(
    ("kind", "body", "shapes", "part"),
    [
        ("Convolution", "", [IMAGE], "it has no kernel_size"),
        ("Convolution", "convolution_param { kernel_size: 3 }", [IMAGE], "num_output is missing or 0"),
        ("Convolution", "convolution_param { num_output: 3 kernel_h: 3 }", [IMAGE], "kernel_h without kernel_w"),
        ("Convolution", "convolution_param { num_output: 3 kernel_size: 3 kernel_h: 3 }", [IMAGE], "kernel_size as well as"),
        ("Convolution", "convolution_param { num_output: 3 kernel_size: 3 stride: 0 }", [IMAGE], "stride: 0: give 1 or more"),
        ("Convolution", "convolution_param { num_output: 3 kernel_size: 3 group: 2 }", [IMAGE], "group: 2 does not divide"),
        ("Convolution", "convolution_param { num_output: 3 kernel_size: 9 }", [IMAGE], "it cannot work on bottoms of shape"),
        ("Convolution", "convolution_param { num_output: 3 kernel_size: 3 }", [(2, 4)], "1 to 3 spatial axes"),
        ("InnerProduct", "inner_product_param { num_output: 3 axis: 4 }", [IMAGE], "axis: 4: its bottom has 4 axes"),
        ("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 2 }", [IMAGE], "STOCHASTIC is not supported"),
        ("Pooling", "pooling_param { kernel_size: 2 pad: 2 }", [IMAGE], "not below the kernel"),
        ("Pooling", "pooling_param { kernel_size: 2 global_pooling: true }", [IMAGE], "leave one out"),
        ("Pooling", "pooling_param { kernel_size: 9 }", [IMAGE], "a kernel of 9 does not fit an image of 7"),
        ("LRN", "lrn_param { local_size: 4 }", [IMAGE], "give an odd number"),
        ("Dropout", "dropout_param { dropout_ratio: 1 }", [IMAGE], "from 0 to below 1"),
        ("Eltwise", "eltwise_param { coeff: 1 }", [IMAGE, IMAGE], "1 coeff for 2 bottoms"),
        ("Eltwise", "", [IMAGE, ODD], "they must be equal"),
        ("Eltwise", "", [IMAGE], "it has 1 bottoms: a Eltwise takes at least 2"),
        ("Concat", "", [IMAGE, ODD], "only axis 1 may differ"),
        ("Concat", "concat_param { axis: 0 }", [IMAGE, IMAGE], "holds the examples of a batch"),
        ("Slice", "slice_param { slice_point: 4 }", [IMAGE], "1 slice_point for 1 tops"),
        ("Reshape", "reshape_param { shape { dim: 0 dim: 5 } }", [IMAGE], "other numbers of values"),
        ("Reshape", "reshape_param { shape { dim: -1 dim: 4 } }", [IMAGE], "the first axis holds the examples"),
        ("Exp", "exp_param { base: -2 }", [IMAGE], "base: -2: give a number above 0"),
        ("Crop", "crop_param { offset: 3 }", [IMAGE, IMAGE], "more than the 7 that are there"),
        ("SoftmaxWithLoss", "", [IMAGE, (2,)], "a label for each place"),
        ("BatchNorm", "param { lr_mult: 1 }", [IMAGE], "statistics, which no learning rate applies to"),
        ("Convolucion", "", [IMAGE], "there is no layer of type 'Convolucion' here; did you mean 'Convolution'?"),
        ("LSTM", "", [IMAGE], "there is no layer of type 'LSTM' here: there are Convolution"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_is_refused_with_its_line(kind, body, shapes, part):
    with pytest.raises(UserError) as caught:
        net_of(kind, body, shapes)
    line = len(shapes) + 1
    assert str(caught.value).startswith(f"the net, line {line}, column 1: layer 'it' ({kind}): ")
    assert part in str(caught.value)
