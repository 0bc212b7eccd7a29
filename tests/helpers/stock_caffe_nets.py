# ruff: noqa: E501
"""Specifications as users have them, written from the tables of the networks."""

RELU, DROP = "ReLU", "Dropout"


def layer(name, kind, bottom, top=None, body=""):
    bottoms = " ".join(f'bottom: "{b}"' for b in ([bottom] if isinstance(bottom, str) else bottom))
    tops = " ".join(f'top: "{t}"' for t in ([top or name] if isinstance(top or name, str) else top))
    return f'layer {{\n  name: "{name}"\n  type: "{kind}"\n  {bottoms} {tops}\n  {body}\n}}\n'


def data(tops="data label", phase=None, batch=100, transform=""):
    rule = f"include {{ phase: {phase} }}" if phase else ""
    tops = " ".join(f'top: "{t}"' for t in tops.split())
    source = f'source: "examples/some_{(phase or "train").lower()}_lmdb" batch_size: {batch} backend: LMDB'
    return (
        f'layer {{ name: "data" type: "Data" {tops} {rule} data_param {{ {source} }} '
        f"transform_param {{ {transform} }} }}\n"
    )


def rates(lr=(1, 2), decay=(None, None)):
    said = [f"decay_mult: {d}" if d is not None else "" for d in decay]
    return " ".join(f"param {{ lr_mult: {r} {d} }}" for r, d in zip(lr, said, strict=True))


def filler(std, bias=0):
    return f'weight_filler {{ type: "gaussian" std: {std} }} bias_filler {{ type: "constant" value: {bias} }}'


def conv(name, bottom, outputs, kernel, std=0.01, pad=0, stride=1, group=1, bias=0, extra="", how=None):
    body = f"{how if how is not None else rates()} convolution_param {{ num_output: {outputs} kernel_size: {kernel}"
    body += f" pad: {pad}" if pad else ""
    body += f" stride: {stride}" if stride != 1 else ""
    body += f" group: {group}" if group != 1 else ""
    return layer(name, "Convolution", bottom, None, f"{body} {extra or filler(std, bias)} }} ")


def ip(name, bottom, outputs, std=0.01, bias=0, how=None):
    body = f"inner_product_param {{ num_output: {outputs} {filler(std, bias)} }}"
    return layer(name, "InnerProduct", bottom, None, f"{how if how is not None else rates()} {body}")


def relu(name, blob):
    return layer(name, RELU, blob, blob)


def pool(name, bottom, kind="MAX", kernel=3, stride=2, more=""):
    return layer(
        name, "Pooling", bottom, None, f"pooling_param {{ pool: {kind} kernel_size: {kernel} stride: {stride} {more} }}"
    )


def drop(name, blob, ratio=0.5):
    return layer(name, DROP, blob, blob, f"dropout_param {{ dropout_ratio: {ratio} }}")


def ends(scores, label="label"):
    accuracy = layer("accuracy", "Accuracy", [scores, label], "accuracy", "include { phase: TEST }")
    return accuracy + layer("loss", "SoftmaxWithLoss", [scores, label], "loss")


def cifar10_quick(source=None):
    mean = 'mean_file: "examples/cifar10/mean.binaryproto"'
    lines = [data(phase="TRAIN", transform=mean), data(phase="TEST", transform=mean)]
    if source:
        lines = [line.replace("examples/some", source) for line in lines]
    lines += [
        conv("conv1", "data", 32, 5, 0.0001, pad=2), pool("pool1", "conv1"), relu("relu1", "pool1"),
        conv("conv2", "pool1", 32, 5, 0.01, pad=2), relu("relu2", "conv2"), pool("pool2", "conv2", "AVE"),
        conv("conv3", "pool2", 64, 5, 0.01, pad=2), relu("relu3", "conv3"), pool("pool3", "conv3", "AVE"),
        ip("ip1", "pool3", 64, 0.1), ip("ip2", "ip1", 10, 0.1), ends("ip2"),
    ]  # fmt: skip
    return 'name: "CIFAR10_quick"\n' + "".join(lines)


QUICK_SOLVER = """
# reduce the learning rate once
net: "examples/cifar10/cifar10_quick_train_test.prototxt"
test_iter: 100
test_interval: 500
base_lr: 0.001
momentum: 0.9
weight_decay: 0.004
lr_policy: "multistep" gamma: 0.1 stepvalue: 4000
display: 20
max_iter: 5000
snapshot: 500
snapshot_prefix: "examples/cifar10/cifar10_quick"
solver_mode: CPU
"""


def cifar10_full():
    norm = "lrn_param { local_size: 3 alpha: 5e-05 beta: 0.75 norm_region: WITHIN_CHANNEL }"
    lines = [
        data(), conv("conv1", "data", 32, 5, 0.0001, pad=2), pool("pool1", "conv1"), relu("relu1", "pool1"),
        layer("norm1", "LRN", "pool1", None, norm), conv("conv2", "norm1", 32, 5, pad=2), relu("relu2", "conv2"),
        pool("pool2", "conv2", "AVE"), layer("norm2", "LRN", "pool2", None, norm),
        conv("conv3", "norm2", 64, 5, pad=2, how=""), relu("relu3", "conv3"), pool("pool3", "conv3", "AVE"),
        ip("ip1", "pool3", 10, how=rates((1, 2), (250, 0))), ends("ip1"),
    ]  # fmt: skip
    return "".join(lines)


def lenet():
    xavier = 'weight_filler { type: "xavier" } bias_filler { type: "constant" }'
    product = "inner_product_param { num_output: %d " + xavier + " }"
    lines = [
        data(transform="scale: 0.00390625", batch=64),
        conv("conv1", "data", 20, 5, extra=xavier), pool("pool1", "conv1", kernel=2),
        conv("conv2", "pool1", 50, 5, extra=xavier), pool("pool2", "conv2", kernel=2),
        layer("ip1", "InnerProduct", "pool2", None, rates() + product % 500), relu("relu1", "ip1"),
        layer("ip2", "InnerProduct", "ip1", None, rates() + product % 10), ends("ip2"),
    ]  # fmt: skip
    return "".join(lines)


LENET_SOLVER = """
base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005
lr_policy: "inv" gamma: 0.0001 power: 0.75
display: 100 max_iter: 10000 snapshot: 5000 test_iter: 100 test_interval: 500
"""


def old_lenet():
    """The format before `layer`: types in capitals, rates and decays in lists of their own."""
    return """
    name: "LeNet"
    layers { name: "mnist" type: DATA top: "data" top: "label"
             data_param { source: "mnist-train-leveldb" scale: 0.00390625 batch_size: 64 } }
    layers { name: "conv1" type: CONVOLUTION bottom: "data" top: "conv1" blobs_lr: 1 blobs_lr: 2
             weight_decay: 1 weight_decay: 0
             convolution_param { num_output: 20 kernel_size: 5 stride: 1 weight_filler { type: "xavier" } } }
    layers { name: "pool1" type: POOLING bottom: "conv1" top: "pool1"
             pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
    layers < name: 'ip1' type: INNER_PRODUCT bottom: 'pool1' top: 'ip1' inner_product_param < num_output: 10 > >
    layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip1" bottom: "label" }
    """


def caffe_trunk():
    how = rates((1, 2), (1, 0))
    norm = "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }"
    return "".join([
        conv("conv1", "data", 96, 11, stride=4, how=how), relu("relu1", "conv1"), pool("pool1", "conv1"),
        layer("norm1", "LRN", "pool1", None, norm),
        conv("conv2", "norm1", 256, 5, pad=2, group=2, bias=1, how=how), relu("relu2", "conv2"), pool("pool2", "conv2"),
        layer("norm2", "LRN", "pool2", None, norm),
        conv("conv3", "norm2", 384, 3, pad=1, how=how), relu("relu3", "conv3"),
        conv("conv4", "conv3", 384, 3, pad=1, group=2, bias=1, how=how), relu("relu4", "conv4"),
        conv("conv5", "conv4", 256, 3, pad=1, group=2, bias=1, how=how), relu("relu5", "conv5"), pool("pool5", "conv5"),
        ip("fc6", "pool5", 4096, 0.005, 1, how), relu("relu6", "fc6"), drop("drop6", "fc6"),
        ip("fc7", "fc6", 4096, 0.005, 1, how), relu("relu7", "fc7"), drop("drop7", "fc7"),
    ])  # fmt: skip


def caffenet():
    transform = 'mirror: true crop_size: 227 mean_file: "data/ilsvrc12/imagenet_mean.binaryproto"'
    how = rates((1, 2), (1, 0))
    return data(transform=transform, batch=256) + caffe_trunk() + ip("fc8", "fc7", 1000, how=how) + ends("fc8")


def rcnn():
    """As it is deployed: an input of fixed size, no loss."""
    return (
        'name: "R-CNN-ilsvrc13"\ninput: "data"\ninput_dim: 10 input_dim: 3 input_dim: 227 input_dim: 227\n'
        + caffe_trunk()
        + layer("fc-rcnn", "InnerProduct", "fc7", None, "inner_product_param { num_output: 200 }")
    )


def nin_cifar100():
    lines, blob = [data(batch=128)], "data"
    for name, outputs, kernel, pad in (
        ("conv1", 192, 5, 2), ("cccp1", 160, 1, 0), ("cccp2", 96, 1, 0), ("pool1", "MAX", 3, 2),
        ("conv2", 192, 5, 2), ("cccp3", 192, 1, 0), ("cccp4", 192, 1, 0), ("pool2", "AVE", 3, 2),
        ("conv3", 192, 3, 1), ("cccp5", 192, 1, 0), ("cccp6", 100, 1, 0),
    ):  # fmt: skip
        if name.startswith("pool"):
            lines += [pool(name, blob, outputs), drop(name.replace("pool", "drop"), name)]
        else:
            how = rates((0.1, 0.1) if name == "cccp6" else (1, 2), (1, 0))
            lines += [conv(name, blob, outputs, kernel, 0.05, pad, how=how), relu(f"relu_{name}", name)]
        blob = name
    lines += [pool("pool3", blob, "AVE", 8, 1), ends("pool3")]
    return "".join(lines)


def googlenet(classes=1000):
    how = rates((1, 2), (1, 0))

    def unit(name, bottom, outputs, kernel, pad=0, stride=1):
        fill = 'weight_filler { type: "xavier" std: 0.03 } bias_filler { type: "constant" value: 0.2 }'
        made = conv(name, bottom, outputs, kernel, pad=pad, stride=stride, how=how, extra=fill)
        return made + relu(f"{name}/relu", name)

    def inception(name, bottom, one, before3, three, before5, five, pooled):
        parts = [f"{name}/{part}" for part in ("1x1", "3x3", "5x5", "pool_proj")]
        around = "pooling_param { pool: MAX kernel_size: 3 stride: 1 pad: 1 }"
        return "".join([
            unit(parts[0], bottom, one, 1), unit(f"{name}/3x3_reduce", bottom, before3, 1),
            unit(parts[1], f"{name}/3x3_reduce", three, 3, 1), unit(f"{name}/5x5_reduce", bottom, before5, 1),
            unit(parts[2], f"{name}/5x5_reduce", five, 5, 2), layer(f"{name}/pool", "Pooling", bottom, None, around),
            unit(parts[3], f"{name}/pool", pooled, 1), layer(f"{name}/output", "Concat", parts),
        ])  # fmt: skip

    def head(name, bottom, weight):
        aside = f"loss_weight: {weight}"
        scores = f"{name}/classifier"
        return "".join([
            pool(f"{name}/ave_pool", bottom, "AVE", 5, 3), unit(f"{name}/conv", f"{name}/ave_pool", 128, 1),
            ip(f"{name}/fc", f"{name}/conv", 1024, how=how), relu(f"{name}/relu_fc", f"{name}/fc"),
            drop(f"{name}/drop_fc", f"{name}/fc", 0.7), ip(scores, f"{name}/fc", classes, how=how),
            layer(f"{name}/loss", "SoftmaxWithLoss", [scores, "label"], f"{name}/loss1", aside),
            layer(f"{name}/top-5", "Accuracy", [scores, "label"], None, "include { phase: TEST } accuracy_param { top_k: 5 }"),
        ])  # fmt: skip

    norm = "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }"
    transform = "mirror: true crop_size: 224 mean_value: 104 mean_value: 117 mean_value: 123"
    return "".join([
        data(transform=transform, batch=32),
        unit("conv1/7x7_s2", "data", 64, 7, 3, 2), pool("pool1/3x3_s2", "conv1/7x7_s2"),
        layer("pool1/norm1", "LRN", "pool1/3x3_s2", None, norm),
        unit("conv2/3x3_reduce", "pool1/norm1", 64, 1), unit("conv2/3x3", "conv2/3x3_reduce", 192, 3, 1),
        layer("conv2/norm2", "LRN", "conv2/3x3", None, norm), pool("pool2/3x3_s2", "conv2/norm2"),
        inception("inception_3a", "pool2/3x3_s2", 64, 96, 128, 16, 32, 32),
        inception("inception_3b", "inception_3a/output", 128, 128, 192, 32, 96, 64),
        pool("pool3/3x3_s2", "inception_3b/output"),
        inception("inception_4a", "pool3/3x3_s2", 192, 96, 208, 16, 48, 64), head("loss1", "inception_4a/output", 0.3),
        inception("inception_4b", "inception_4a/output", 160, 112, 224, 24, 64, 64),
        inception("inception_4c", "inception_4b/output", 128, 128, 256, 24, 64, 64),
        inception("inception_4d", "inception_4c/output", 112, 144, 288, 32, 64, 64),
        head("loss2", "inception_4d/output", 0.3),
        inception("inception_4e", "inception_4d/output", 256, 160, 320, 32, 128, 128),
        pool("pool4/3x3_s2", "inception_4e/output"),
        inception("inception_5a", "pool4/3x3_s2", 256, 160, 320, 32, 128, 128),
        inception("inception_5b", "inception_5a/output", 384, 192, 384, 48, 128, 128),
        pool("pool5/7x7_s1", "inception_5b/output", "AVE", 7, 1), drop("pool5/drop_7x7_s1", "pool5/7x7_s1", 0.4),
        ip("loss3/classifier", "pool5/7x7_s1", classes, how=how),
        layer("loss3/loss3", "SoftmaxWithLoss", ["loss3/classifier", "label"], None, "loss_weight: 1"),
        layer("loss3/top-1", "Accuracy", ["loss3/classifier", "label"], None, "include { phase: TEST }"),
    ])  # fmt: skip


def fcn(width=64, classes=21, hidden=4096):
    """FCN-32s: VGG-16 with convolutions for its inner products, one deconvolution up to the size of the image."""
    python = 'python_param { module: "voc_layers" layer: "SBDDSegDataLayer" param_str: "{\\"seed\\": 1337}" }'
    lines = [f'layer {{ name: "data" type: "Python" top: "data" top: "label" {python} }}\n']
    blob = "data"
    for block, (count, factor) in enumerate(((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)), 1):
        for i in range(1, count + 1):
            name = f"conv{block}_{i}"
            lines += [
                conv(name, blob, width * factor, 3, pad=100 if name == "conv1_1" else 1),
                relu(f"relu{block}_{i}", name),
            ]
            blob = name
        lines.append(pool(f"pool{block}", blob, kernel=2))
        blob = f"pool{block}"
    for name, kernel in (("fc6", 7), ("fc7", 1)):
        lines += [
            conv(name, blob, hidden, kernel),
            relu(name.replace("fc", "relu"), name),
            drop(name.replace("fc", "drop"), name),
        ]
        blob = name
    up = (
        f"param {{ lr_mult: 0 }} convolution_param {{ num_output: {classes} bias_term: false kernel_size: 64 stride: 32"
    )
    lines += [
        conv("score_fr", blob, classes, 1),
        layer("upscore", "Deconvolution", "score_fr", None, up + ' weight_filler { type: "bilinear" } }'),
        layer("score", "Crop", ["upscore", "data"], None, "crop_param { axis: 2 offset: 19 }"),
        layer("loss", "SoftmaxWithLoss", ["score", "label"], None, "loss_param { ignore_label: 255 normalize: false }"),
    ]  # fmt: skip
    return "".join(lines)


def on(text, *ranks, phase=None):
    """A layer on these ranks."""
    rule = " ".join(f"mpi_rank: {rank}" for rank in ranks) + (f" phase: {phase}" if phase else "")
    return text.rstrip().removesuffix("}") + f"  include {{ {rule} }}\n}}\n"


def toy(size=8, ranks=(0, 1, 2), classes=10, coefficients=None):
    """The paper's toy example: the trunk on one rank, a branch on each, the mean and the loss where the trunk is."""
    count = len(ranks)
    tops = [f"ip2_{r}" for r in ranks]
    coefficients = coefficients or [1 / count] * count
    weights = " ".join(f"coeff: {c!r}" for c in coefficients)
    root = ranks[0]
    branch = [
        conv("conv3", "pool2_all", size, 3, 0.1, pad=1), relu("relu3", "conv3"), pool("pool3", "conv3", "AVE", 2, 2),
        ip("ip1", "pool3", 16, 0.1), ip("ip2", "ip1", classes, 0.1),
    ]  # fmt: skip
    trunk = [
        data(batch=20), conv("conv1", "data", size, 3, 0.1, pad=1), pool("pool1", "conv1", kernel=2), relu("relu1", "pool1"),
        conv("conv2", "pool1", size, 3, 0.1, pad=1), relu("relu2", "conv2"), pool("pool2", "conv2", "AVE", 2, 2),
    ]  # fmt: skip
    end = [
        layer("mean", "Eltwise", tops, "mean", f"eltwise_param {{ operation: SUM {weights} }}"),
        layer("loss", "SoftmaxWithLoss", ["mean", "label"], "loss"),
    ]
    return "".join([
        'name: "toy"\n', *(on(text, root) for text in trunk),
        on(layer("broadcast", "MPIBroadcast", "pool2", "pool2_all", f"mpi_param {{ root: {root} }}"), *ranks),
        *(on(text, *ranks) for text in branch),
        on(layer("gather", "MPIGather", "ip2", tops, f"mpi_param {{ root: {root} }}"), *ranks),
        on(end[0], root), on(end[1], root, phase="TRAIN"),
        on(layer("accuracy", "Accuracy", ["mean", "label"], "accuracy"), root, phase="TEST"),
    ])  # fmt: skip


STOCK = {  # text, shape of an example, parameters
    "CIFAR10-Quick": (cifar10_quick, (3, 32, 32), 145_578),
    "CIFAR10-Full": (cifar10_full, (3, 32, 32), 89_578),
    "LeNet": (lenet, (1, 28, 28), 431_080),
    "CaffeNet": (caffenet, (3, 227, 227), 60_965_224),
    "NiN": (nin_cifar100, (3, 32, 32), 984_356),
    "GoogLeNet": (googlenet, (3, 224, 224), 13_378_280),
    "R-CNN": (rcnn, (3, 227, 227), 57_687_624),
    "FCN": (fcn, (3, 64, 64), 136_152_917),
}


def broadcast_in_place():
    return (
        on(data(), 0)
        + on(ip("a", "data", 6, 0.5), 0)
        + on(layer("b", "MPIBroadcast", "a", "a"), 0, 1)
        + on(ip("c", "a", 4, 0.5), 0, 1)
        + on(layer("g", "MPIGather", "c", ["c0", "c1"]), 0, 1)
        + on(layer("m", "Eltwise", ["c0", "c1"], "m", "eltwise_param { coeff: 0.5 coeff: 0.5 }"), 0)
        + on(layer("l", "SoftmaxWithLoss", ["m", "label"]), 0)
    )


def nested():
    """Four ranks: all share a, ranks 0 and 1 share b, and 2 and 3 share another b; each has a loss of its own."""
    return (
        on(data(), 0)
        + on(ip("a", "data", 6, 0.5), 0)
        + on(layer("labels", "MPIBroadcast", "label", "y"), 0, 1, 2, 3)
        + on(layer("a_all", "MPIBroadcast", "a", "a2"), 0, 2)
        + on(ip("b", "a2", 6, 0.5), 0, 2)
        + on(layer("b_left", "MPIBroadcast", "b", "b_here"), 0, 1)
        + on(layer("b_right", "MPIBroadcast", "b", "b_here", "mpi_param { root: 2 }"), 2, 3)
        + ip("c", "b_here", 4, 0.5)
        + layer("l", "SoftmaxWithLoss", ["c", "y"])
    )


def different_branches():
    """Ranks with layers of their own: no tree."""
    return (
        on(data(), 0)
        + on(ip("a", "data", 6, 0.5), 0)
        + on(layer("b", "MPIBroadcast", "a", "h"), 0, 1)
        + on(ip("c0", "h", 4, 0.5), 0)
        + on(ip("c1", "h", 8, 0.5).replace('top: "c1"', 'top: "z"'), 1)
        + on(layer("r1", "ReLU", "z"), 1)
        + on(ip("d1", "r1", 4, 0.5).replace('top: "d1"', 'top: "c0"'), 1)
        + on(layer("g", "MPIGather", "c0", ["s0", "s1"]), 0, 1)
        + on(layer("m", "Eltwise", ["s0", "s1"]), 0)
        + on(layer("l", "SoftmaxWithLoss", ["m", "label"]), 0)
    )
