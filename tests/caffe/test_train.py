# ruff: noqa: E501
"""Nets and solvers through the commands: recipes, runs, the update of each solver, and equal bits."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import stock_caffe_nets as nets
from helpers.commands import log_lines
from helpers.stock_caffe_nets import conv, data, ip, layer, relu
from safetensors.torch import load_file
from torch import nn

from mheads import TreeNet
from mheads.caffe import weights as blobs
from mheads.caffe.convert import convert, load
from mheads.caffe.network import Blobs
from mheads.caffe.prototxt import Solver, parse
from mheads.caffe.solver import log_of, optim_of, seed_of
from mheads.common import safe_yaml
from mheads.common.errors import UserError
from mheads.common.protobuf import field
from mheads.config.schema import Config
from mheads.optim.optim_section import OptimOptions
from mheads.optim.schedules import Schedule
from mheads.optim.stage_updates import Optimizer
from mheads.training.build_from_config import build_net
from mheads.training.experiment import build_experiment

SOLVER = (
    'base_lr: 0.02 momentum: 0.9 weight_decay: 0.01 lr_policy: "step" gamma: 0.5 stepsize: 3 max_iter: 6 display: 1\n'
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a solver, data for classes, pixels, numbers and labels, and a function that writes nets."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    images, rows = rng.integers(0, 256, (60, 3, 16, 16)).astype("uint8"), rng.normal(size=(60, 6)).astype("float32")
    pixels = rng.integers(0, 4, (60, 16, 16))
    pixels[rng.random(pixels.shape) < 0.3] = 255
    targets = {"classes": (images, np.arange(60) % 5), "pixels": (images, pixels), "numbers": (rows, rows[:, :2].copy()),
               "labels": (rows, rows[:, :3] > 0)}  # fmt: skip
    for name, (x, y) in targets.items():
        np.savez(f"{name}.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    (tmp_path / "solver.prototxt").write_text(SOLVER)

    def write(text, name="net.prototxt"):
        (tmp_path / name).write_text(text)
        return name

    write.path = tmp_path
    return write


def auxiliary():
    """Two losses of different weights, at different depths."""
    return (
        data(batch=10) + conv("c1", "data", 4, 3, 0.1, pad=1) + relu("r1", "c1") + ip("aux", "c1", 5)
        + layer("l1", "SoftmaxWithLoss", ["aux", "label"], None, "loss_weight: 0.3")
        + conv("c2", "c1", 4, 3, 0.1) + ip("main", "c2", 5) + layer("l2", "SoftmaxWithLoss", ["main", "label"])
    )  # fmt: skip


NETS = {
    "two losses": (auxiliary(), "classes"),
    "hinge": (data(batch=10) + ip("i", "data", 5) + layer("l", "HingeLoss", ["i", "label"], None, "hinge_loss_param { norm: L2 }"), "classes"),
    "pixels that do not count": (
        data(batch=10) + conv("c", "data", 4, 3, 0.1, pad=1) + relu("r", "c") + conv("s", "c", 4, 1, 0.1)
        + layer("l", "SoftmaxWithLoss", ["s", "label"], None, "loss_param { ignore_label: 255 }"), "pixels"),
    "pixels, by examples": (
        data(batch=10) + conv("s", "data", 4, 3, 0.1, pad=1)
        + layer("l", "SoftmaxWithLoss", ["s", "label"], None, "loss_param { ignore_label: 255 normalize: false }"), "pixels"),
    "a sum that is not divided": (
        data(batch=10) + ip("i", "data", 5) + layer("l", "SoftmaxWithLoss", ["i", "label"], None, "loss_param { normalization: NONE }"), "classes"),
    "scores of one pixel, two losses": (
        data(batch=10) + conv("a", "data", 5, 16, 0.1) + layer("l", "SoftmaxWithLoss", ["a", "label"], None, "loss_weight: 0.5")
        + conv("b", "data", 5, 16, 0.1) + layer("m", "SoftmaxWithLoss", ["b", "label"]), "classes"),
    "numbers": (data(batch=10) + ip("i", "data", 8, 0.5) + layer("t", "TanH", "i") + ip("j", "t", 2, 0.5) + layer("l", "EuclideanLoss", ["j", "label"]), "numbers"),
    "labels": (data(batch=10) + ip("i", "data", 3, 0.5) + layer("l", "SigmoidCrossEntropyLoss", ["i", "label"], None, "loss_weight: 2"), "labels"),
    "shared weights": (
        data(batch=10) + ip("i", "data", 6, 0.5, how="param { name: 'w' }") + relu("r", "i")
        + ip("j", "i", 6, 0.5, how="param { name: 'w' }") + ip("k", "j", 2, 0.5) + layer("l", "EuclideanLoss", ["k", "label"]), "numbers"),
    "nothing goes down": (  # weights that no gradient reaches still decay
        data(batch=10) + ip("i", "data", 6, 0.5) + relu("r", "i") + ip("j", "i", 2, 0.5).replace("param", "propagate_down: false param", 1)
        + layer("l", "EuclideanLoss", ["j", "label"]), "numbers"),
    "normalised": (
        data(batch=10) + conv("c", "data", 4, 3, 0.1) + layer("n", "BatchNorm", "c") + layer("s", "Scale", "n", None, "scale_param { bias_term: true }")
        + layer("e", "Eltwise", ["s", "c"]) + ip("i", "e", 5) + layer("l", "SoftmaxWithLoss", ["i", "label"]), "classes"),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_training_is_caffes_loss_and_update_on_the_same_batches(name, files, mheads):
    """Against the net run layer by layer as it is written, and Caffe's update in numpy."""
    text, examples = NETS[name]
    overrides = ["data.name=npz", f"data.path={examples}.npz", "log.every=1"]
    overrides += ["data.scale=0.004"] if examples in ("classes", "pixels") else []
    done = mheads("train", files(text), "--solver", "solver.prototxt", *overrides, "--folder", "run")
    assert done.code == 0, done.err
    config, _ = load(files.path / "net.prototxt", files.path / "solver.prototxt", overrides)
    experiment = build_experiment(config)
    batches = experiment.stream()
    first = batches.batch(0)
    x = first.network_inputs(torch.float32)
    net = Blobs(text, {"data": x.shape, "label": first.targets.shape}).train()
    state = {key.removeprefix("stages.trunk."): value for key, value in experiment.net.state_dict().items()}
    net.load_state_dict(state)
    multipliers = {
        id(p): m.multipliers[key]
        for m in net.modules()
        if hasattr(m, "multipliers")
        for key, p in m.named_parameters(recurse=False)
    }
    momentum = [torch.zeros_like(p) for p in net.parameters()]
    losses = []
    for step in range(6):
        batch = batches.batch(step)
        net.zero_grad()
        net(data=batch.network_inputs(torch.float32), label=batch.targets.where(batch.targets != -100, 255))
        net.loss.backward()
        losses.append(net.loss.item())
        rate = 0.02 * 0.5 ** (step // 3)
        with torch.no_grad():
            for parameter, v in zip(net.parameters(), momentum, strict=True):
                lr, decay = multipliers[id(parameter)]
                gradient = 0 if parameter.grad is None else parameter.grad
                v.mul_(0.9).add_(gradient + 0.01 * decay * parameter, alpha=rate * lr)
                parameter.sub_(v)
    batches.close()
    said = [json.loads(line) for line in (files.path / "run/metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["loss"] for line in said if "loss" in line], losses, rtol=2e-4)
    found = load_file(files.path / "run/model.safetensors")
    for key, value in net.state_dict().items():
        torch.testing.assert_close(found[f"stages.trunk.{key}"], value, rtol=2e-3, atol=2e-5)


def test_cifar10_quick_trains_to_the_bits_of_our_own_recipe(files, mheads):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (60, 3, 32, 32)).astype("uint8"), np.arange(60) % 10
    np.savez("images.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    files(nets.QUICK_SOLVER.replace("stepvalue: 4000", "stepvalue: 3"), "quick_solver.prototxt")
    common = ["data.name=npz", "data.path=images.npz", "data.normalize=mean_image", "data.scale=1", "optim.batch_size=20",
              "optim.iterations=5", "log.every=1"]  # fmt: skip
    done = mheads(
        "train", files(nets.cifar10_quick()), "--solver", "quick_solver.prototxt", *common, "--folder", "theirs"
    )
    assert done.code == 0, done.err
    ours = ["members=1", "optim.schedule.at=[3]"]
    assert mheads("train", "cifar10_quick", *ours, *common, "--folder", "ours").code == 0
    theirs, own = (load_file(files.path / run / "model.safetensors") for run in ("theirs", "ours"))
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)
    assert log_lines(files.path / "theirs") == log_lines(files.path / "ours")


def test_a_recipe_of_a_net_trains_as_the_net_itself(files, mheads):
    files(nets.toy())
    keys = ["data=digits", "data.scale=0.0625", "data.limit=60"]
    done = mheads("convert", "net.prototxt", "solver.prototxt", *keys, "-o", "mine.yaml")
    assert (done.code, done.out) == (0, "")
    text = (files.path / "mine.yaml").read_text()
    assert text.startswith("# Made of net.prototxt and solver.prototxt.\n# its 3 ranks are 3 members that share a tree")
    recipe = yaml.safe_load(text)
    assert (recipe["members"], recipe["split"], recipe["loss"]) == (
        3,
        {"conv2": 3},
        {"name": "score_averaged", "scale_rate": False},
    )
    assert recipe["optim"]["schedule"] == {"name": "step", "every": 3, "gamma": 0.5}
    assert mheads("train", "mine.yaml", "--folder", "a").code == 0
    assert mheads("train", "net.prototxt", "--solver", "solver.prototxt", *keys, "--folder", "b").code == 0
    assert (files.path / "a/model.safetensors").read_bytes() == (files.path / "b/model.safetensors").read_bytes()
    printed = mheads("convert", "net.prototxt", "solver.prototxt", *keys)
    assert printed.out.rstrip() == text.rstrip()


def test_the_example_of_the_docs_trains(files, mheads):
    examples = Path(__file__).parents[2] / "examples"
    done = mheads("train", examples / "toy.prototxt", "--solver", examples / "toy_solver.prototxt", "data=digits",
                  "data.limit=100", "optim.iterations=20", "--folder", "run")  # fmt: skip
    assert done.code == 0, done.err
    assert "its 3 ranks are 3 members that share a tree: {'conv1': 3}" in done.out


def test_members_of_a_net_start_apart_though_the_solver_has_a_seed(files):
    files(nets.toy())
    files(SOLVER + "random_seed: 7", "seeded.prototxt")
    config, notes = load(files.path / "net.prototxt", files.path / "seeded.prototxt", ["data=digits", "data.limit=40"])
    assert config.seed == 7 and "3 members" in notes[0]
    net = build_experiment(config).net
    assert not torch.equal(net.stage("conv2/0").conv3.weight, net.stage("conv2/1").conv3.weight)


def test_a_net_may_be_trained_as_another_ensemble(files, mheads):
    files(nets.lenet().replace("kernel_size: 5", "kernel_size: 3 pad: 1"))
    done = mheads("train", "net.prototxt", "--solver", "solver.prototxt", "data=digits", "data.limit=60", "members=2",
                  "split=conv1", "loss=mcl", "--folder", "run")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads((files.path / "run/result.json").read_text())["parameters"] > 0
    assert mheads("eval", "run").code == 0  # without --trust: the code is ours


@pytest.mark.parametrize(
    ("name", "examples"), [("two losses", "classes"), ("hinge", "classes"), ("pixels that do not count", "pixels")]
)
def test_a_loss_of_members_is_one_over_the_loss_of_the_net(name, examples, files):
    """Each example teaches the member whose own loss, as the net says it, is lowest; against numpy on the blobs."""
    text = NETS[name][0]
    keys = ["data.name=npz", f"data.path={examples}.npz", "data.scale=0.004"]
    config, notes = load(files(text), "solver.prototxt", [*keys, "members=2", "loss=mcl"])
    assert not notes
    experiment = build_experiment(config)
    batch = experiment.stream().batch(0)
    x, y = batch.network_inputs(torch.float32), batch.targets
    labels = y.where(y != -100, 255)
    if examples == "pixels":
        cut = config.model_copy(update={"engine": config.engine.model_copy(update={"micro_batches": 2})})
        with pytest.raises(
            UserError,
            match=r"base_loss = of_batch looks at whole batches, .* cut into 2 parts: use engine\.micro_batches=1 \(it is 2\)$",
        ):
            build_experiment(cut)
    found = experiment.loss(experiment.net(x), y, None, batch.ties)
    sums = []
    for m in range(2):
        net = Blobs(text, {"data": (1, *x.shape[1:]), "label": (1, *y.shape[1:])})
        net.load_state_dict(experiment.net.member(m).state_dict())
        ones = []
        for i in range(len(x)):
            net(data=x[i : i + 1], label=labels[i : i + 1])
            # What counts in the image is what its loss was divided by, and the batch is divided by the whole.
            count = (labels[i] != 255).sum() / (labels != 255).sum() * len(x) if examples == "pixels" else 1
            ones.append((net.loss * count).item())
        sums.append(ones)
    np.testing.assert_allclose(found.losses.numpy(), sums, rtol=1e-4)
    np.testing.assert_allclose(found.total.item(), np.min(sums, 0).sum(), rtol=1e-4)


def test_what_a_loss_cannot_take_of_the_net_is_said(files):
    files(NETS["two losses"][0])
    keys = ["data.name=npz", "data.path=classes.npz", "members=2"]
    found = convert("net.prototxt", None, [*keys, "loss=confident"])
    assert found.tree["loss"] == {"name": "confident"}
    assert (
        "loss.name=confident says itself what an example costs: the net's losses (l1 of line 20, l2 of line 38) are left out"
        in found.notes
    )
    own = convert("net.prototxt", None, [*keys, "loss=mcl", "loss.base_loss=cross_entropy"])
    assert own.tree["loss"] == {"name": "mcl", "base_loss": "cross_entropy"} and not own.notes
    net = files(nets.toy())
    assert convert(net, None, ["data=digits", "loss.scale_rate=true"]).tree["loss"] == {
        "name": "score_averaged",
        "scale_rate": True,
    }
    assert convert(net, None, ["data=digits", "loss=mcl"]).tree["loss"] == {"name": "mcl"}
    with pytest.raises(UserError, match="so that batches are not cut: leave it out"):
        convert(
            files(NETS["pixels that do not count"][0]),
            None,
            ["data.name=npz", "data.path=pixels.npz", "engine.micro_batches=2"],
        )


def test_each_of_the_batches_of_a_step_is_divided_by_its_own_labels_that_count(files, mheads):
    text = NETS["pixels that do not count"][0]
    files(text)
    files(SOLVER.replace("max_iter: 6", "max_iter: 1 iter_size: 3"), "three.prototxt")
    keys = ["data.name=npz", "data.path=pixels.npz", "data.scale=0.004", "log.every=1"]
    done = mheads("train", "net.prototxt", "--solver", "three.prototxt", *keys, "--folder", "run")
    assert done.code == 0, done.err
    experiment = build_experiment(load("net.prototxt", "three.prototxt", keys)[0])
    batch = experiment.stream().batch(0)
    x, y = batch.network_inputs(torch.float32), batch.targets.where(batch.targets != -100, 255)
    net = Blobs(text, {"data": (10, *x.shape[1:]), "label": (10, *y.shape[1:])})
    net.load_state_dict(experiment.net.member(0).state_dict())
    losses = []
    for i in range(3):
        net(data=x[10 * i : 10 * i + 10], label=y[10 * i : 10 * i + 10])
        losses.append(net.loss.item())
    assert log_lines(files.path / "run")[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


STILL = "propagate_down: false "


@pytest.mark.parametrize(
    ("text", "keys", "still"),
    [
        (nets.toy().replace('bottom: "pool2_all"', 'bottom: "pool2_all" ' + STILL), [], ["conv1", "conv2"]),  # a trunk
        (data(batch=10) + ip("a", "data", 6, 0.5) + ip("b", "a", 6, 0.5) + ip("c", "a", 6, 0.5)
         + layer("s", "Eltwise", ["b", "c"], None, STILL + "propagate_down: true") + ip("d", "s", 10, 0.5) + nets.ends("d"), ["members=2", "split=c"], ["b"]),
        (data(batch=10) + ip("a", "data", 6, 0.5) + relu("r", "a") + ip("b", "a", 10, 0.5, how=STILL) + nets.ends("b"), ["members=2", "loss=mcl"], ["a"]),
    ],
    ids=["a trunk", "one of two", "members that win"],
)  # fmt: skip
def test_what_no_gradient_reaches_stays_as_it_is(text, keys, still, files, mheads):
    keys = ["data=digits", "data.limit=40", "optim.weight_decay=0", "optim.iterations=2", *keys]
    done = mheads("train", files(text), "solver.prototxt", *keys, "--folder", "run")
    assert done.code == 0, done.err
    before = build_net(load("net.prototxt", "solver.prototxt", keys)[0]).state_dict()
    after = load_file(files.path / "run/model.safetensors")
    same = {key.split(".")[2] for key in before if key.endswith("weight") and torch.equal(before[key], after[key])}
    assert same == set(still)


def test_accuracies_that_are_not_measured_are_noted(files):
    accuracy = layer("top", "Accuracy", ["i", "label"], None, "include { phase: TEST } accuracy_param { top_k: %d }")
    text, keys = data() + ip("i", "data", 5) + nets.ends("i"), ["data.name=npz", "data.path=classes.npz"]
    assert convert(files(text + accuracy % 3), None, keys).notes == []
    many = data() + ip("i", "data", 20) + nets.ends("i") + accuracy % 11
    note = "layer 'top' (Accuracy) of line 20: top_k: 11 is not measured; result.json has top_k up to 10"
    assert convert(files(many), None, keys).notes == [note]
    assert convert("net.prototxt", None, [*keys, "members=11"]).notes == []
    with pytest.raises(UserError, match=r"line 20, column 1: layer 'top' \(Accuracy\): top_k: 6 of 5 classes"):
        convert(files(text + accuracy % 6), None, keys)


def test_a_changed_net_is_noticed_on_resume(files, mheads):
    command = [
        "train",
        files(nets.toy()),
        "--solver",
        "solver.prototxt",
        "data=digits",
        "data.limit=60",
        "--folder",
        "run",
    ]
    assert mheads(*command).code == 0
    files(nets.toy().replace("std: 0.1", "std: 0.2"))
    done = mheads(*command)
    assert done.code == 2
    assert "holds a run of another config" in done.err and "std: 0.2" in done.err
    assert len(done.err) < 3000


def test_weights_of_caffe_start_a_run_and_a_run_gives_them_back(files, mheads):
    files(nets.lenet().replace("kernel_size: 5", "kernel_size: 3 pad: 1"))
    command = ["train", "net.prototxt", "--solver", "solver.prototxt", "data=digits", "data.limit=60"]
    assert mheads(*command, "--folder", "a").code == 0
    for suffix in (".caffemodel", ".h5"):
        assert mheads("export", "a", "-o", f"a{suffix}").code == 0
        done = mheads(*command, f"init=a{suffix}", "--folder", f"from{suffix}")
        assert done.code == 0, done.err
        assert "found              8" in done.out
    trained = load_file(files.path / "a/model.safetensors")
    for name, arrays in blobs.read(files.path / "a.caffemodel").items():
        np.testing.assert_array_equal(arrays[0], trained[f"stages.trunk.{name}.weight"].numpy())
    both = [(files.path / f"from{suffix}/model.safetensors").read_bytes() for suffix in (".caffemodel", ".h5")]
    assert both[0] == both[1]
    done = mheads(*command, "init=a.caffemodel", "members=2", "--folder", "two")
    assert done.code == 2 and "identical" in done.err
    assert mheads(*command, "members=2", "--folder", "pair").code == 0
    done = mheads("export", "pair", "-o", "pair.caffemodel")
    assert done.code == 2 and "--what member:0" in done.err
    assert mheads("export", "pair", "-o", "pair.caffemodel", "--what", "member:1").code == 0


def test_a_net_with_other_classes_than_the_data_is_told_to_change_its_last_layer(files, mheads):
    for number, data_file in ((4, "classes"), (4, "labels")):
        net = files(data() + ip("i", "data", number, 0.1) + nets.ends("i"))
        done = mheads("train", net, "--solver", "solver.prototxt", "data.name=npz", f"data.path={data_file}.npz")
        assert done.code == 2 and f"gives outputs of shape ({number},)" in done.err
        assert f"(num_output: {5 if data_file == 'classes' else 3} in the net's last layer?)" in done.err


@pytest.mark.parametrize("name", ["classes", "pixels"])
def test_a_net_may_have_scores_for_more_classes_than_the_labels_use(name, files, mheads):
    made = ip("i", "data", 7, 0.1) if name == "classes" else conv("i", "data", 7, 1, 0.1)
    keys = ["data.name=npz", f"data.path={name}.npz", "optim.iterations=2", "optim.batch_size=10"]
    done = mheads(
        "train", files(data() + made + nets.ends("i")), "--solver", "solver.prototxt", *keys, "--folder", "run"
    )
    assert done.code == 0, done.err
    assert len(json.loads((files.path / "run/result.json").read_text())["ownership"][0]) == 7
    again = mheads("eval", "run")
    assert again.code == 0, again.err


TARGETS = {  # of a loss, the targets that it may have, and what is learned
    "whole numbers": ("EuclideanLoss", np.arange(40) % 7, "regression"),
    "a single yes or no": ("SigmoidCrossEntropyLoss", np.arange(40) % 2, "multilabel"),
    "yes or no as floats": ("SigmoidCrossEntropyLoss", (np.arange(40) % 2).astype("float32"), "multilabel"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_loss_says_what_targets_are(name, files, mheads):
    loss, y, problem = TARGETS[name]
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    np.savez("own.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    text = data(batch=10) + ip("i", "data", 1, 0.1) + layer("l", loss, ["i", "label"])
    keys = ["data.name=npz", "data.path=own.npz", "optim.iterations=1", "log.every=1"]
    done = mheads("train", files(text), "--solver", "solver.prototxt", *keys, "--folder", "run")
    assert done.code == 0, done.err
    assert json.loads((files.path / "run/result.json").read_text())["problem"] == problem
    experiment = build_experiment(load("net.prototxt", "solver.prototxt", keys)[0])
    batch = experiment.stream().batch(0)
    net = Blobs(text, {"data": (10, 6), "label": (10, 1)})
    net.load_state_dict(experiment.net.member(0).state_dict())
    net(data=batch.network_inputs(torch.float32), label=batch.targets)
    assert log_lines(files.path / "run")[0]["loss"] == pytest.approx(net.loss.item(), rel=1e-4)


def test_a_list_of_images_may_have_numbers_to_learn_and_names_that_begin_with_a_slash(files):
    """Caffe puts root_folder before a name, whatever that begins with."""
    from PIL import Image

    (files.path / "pictures").mkdir()
    for part in ("train", "test"):
        for i in range(4):
            Image.fromarray(np.full((8, 8, 3), i, "uint8")).save(f"pictures/{part}{i}.png")
        (files.path / f"{part}.txt").write_text("".join(f"/{part}{i}.png {3 * i}\n" for i in range(4)))
    images = listed("ImageData", "image_data_param", "%s.txt", 'root_folder: "pictures" new_height: 8 new_width: 8')
    text = images + ip("i", "data", 1) + layer("l", "EuclideanLoss", ["i", "label"])
    experiment = build_experiment(load(files(text), "solver.prototxt", ["optim.batch_size=4", "data.scale=1"])[0])
    assert experiment.data.problem.name == "regression"
    batch = experiment.stream().batch(0)
    assert torch.equal(batch.targets, 3 * batch.network_inputs(torch.float32)[:, :1, 0, 0])
    with pytest.raises(UserError, match="root_folder: 'pictures/te' is no folder, but the beginning of names"):
        convert(files(text.replace('"pictures"', '"pictures/te"')))


@pytest.mark.parametrize("loss", ["EuclideanLoss", "SigmoidCrossEntropyLoss"])
def test_data_whose_targets_a_loss_cannot_take_are_refused(loss, files, mheads):
    net = files(data() + ip("i", "data", 10) + layer("l", loss, ["i", "label"]))
    done = mheads("train", net, "solver.prototxt", "data=digits")
    assert done.code == 2
    assert f"error: {loss} of the net takes 10 targets for an example, and the data give 1: take other data" in done.err


def test_layers_that_begin_at_zero_are_noted_unless_weights_are_given(files):
    net = files(
        data() + layer("a", "InnerProduct", "data", None, "inner_product_param { num_output: 5 }") + nets.ends("a")
    )
    data_of = ["data.name=npz", "data.path=classes.npz"]
    note = "layers without a weight_filler begin at zero, as in Caffe (a): give init=FILE.caffemodel, or fillers"
    assert note in convert(net, None, data_of).notes
    assert note not in convert(net, None, [*data_of, "init=a.caffemodel"]).notes
    assert not convert(files(data() + ip("a", "data", 5, 0.1) + nets.ends("a")), None, data_of).notes


def test_an_autoencoder_learns_to_give_its_input(files, mheads):
    """The targets of the data are for measuring: the loss compares with the examples themselves."""
    rows = np.random.default_rng(1).random((60, 6)).astype("float32")
    np.savez("own.npz", x_train=rows[:40], y_train=rows[:40] * 0, x_test=rows[40:], y_test=rows[40:])
    net = files(
        data("data") + ip("e", "data", 8, 0.5) + ip("d", "e", 6, 0.5) + layer("l", "EuclideanLoss", ["d", "data"])
    )
    done = mheads("train", net, "--solver", "solver.prototxt", "data.name=npz", "data.path=own.npz", "optim.iterations=200",
                  "optim.lr=0.1", "optim.schedule=constant", "optim.weight_decay=0", "--folder", "run")  # fmt: skip
    assert done.code == 0, done.err
    assert log_lines(files.path / "run")[-1]["result"]["single"] < 0.001  # the targets of training would give about 0.6


@pytest.mark.parametrize("loss", ["EuclideanLoss", "SigmoidCrossEntropyLoss"])
@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_an_autoencoder_of_examples_with_class_labels(kind, loss, files, mheads):
    """It is measured by its distance from what the network reads, cropped, mirrored and without its mean."""
    if kind == "vectors":
        body = ip("e", "data", 8, 0.5) + ip("d", "e", 64, 0.5)
    else:
        body = conv("e", "data", 4, 3, 0.5, pad=1) + conv("d", "e", 1, 3, 0.5, pad=1)
    flat = layer("f", "Flatten", "data") if kind == "vectors" else ""
    text = data("data") + flat + body + layer("l", loss, ["d", "f" if flat else "data"])
    keys = [
        "data=digits",
        "data.limit=40",
        "data.normalize=mean_image",
        "data.pad=1",
        "optim.batch_size=10",
        "optim.iterations=1",
        "log.every=1",
    ]
    done = mheads("train", files(text), "solver.prototxt", *keys, "--folder", "run")
    assert done.code == 0, done.err
    assert "what is measured is how well it gives the examples back" in done.out
    experiment = build_experiment(load("net.prototxt", "solver.prototxt", keys)[0])
    batch = experiment.stream().batch(0)
    x = batch.network_inputs(torch.float32)
    assert torch.equal(batch.targets, x.flatten(1))
    net = Blobs(text, {"data": x.shape})
    net.load_state_dict(experiment.net.member(0).state_dict())
    net(data=x)
    assert log_lines(files.path / "run")[0]["loss"] == pytest.approx(net.loss.item(), rel=1e-4)
    net.load_state_dict(
        {k.removeprefix("stages.trunk."): v for k, v in load_file(files.path / "run/model.safetensors").items()}
    )
    test = experiment.data.test
    x = experiment.data.preprocess(test.read(np.arange(40), None))
    net.eval()(data=x)
    answer = net.blobs["d"].sigmoid() if loss.startswith("Sigmoid") else net.blobs["d"]
    found = json.loads((files.path / "run/result.json").read_text())
    assert found["problem"] == "regression"
    assert found["single"] == pytest.approx((answer.flatten(1) - x.flatten(1)).square().mean().sqrt().item(), rel=1e-4)
    again = mheads("eval", "run")
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("net", "arguments", "part"),
    [
        (nets.lenet(), [], "line 1, column 1: layer 'data' (Data): it reads the LMDB 'examples/some_train_lmdb', which is not here: say which"),
        (nets.fcn(2, 3, 4), [], "layer 'data' (Python): it says nothing of where examples come from: say which data to take"),
        (nets.rcnn(), [], "layer 'input' (Input): it says nothing of where"),
        (nets.lenet(), ["data=digits"], "layer 'conv2' (Convolution): it cannot work on bottoms of shape [2, 20, 2, 2]"),
        (nets.lenet(), ["data.nome=digits"], "unknown key 'data.nome'"),
        (nets.lenet(), ["optim=3"], "optim = 3: it is a section with keys of its own"),
        (nets.lenet(), ["model_args=3"], "model_args = 3"),
        (nets.lenet(), ["data=nothing", "model_args.shape=[1,28,28]"], "there is no dataset 'nothing'"),
        (nets.lenet(), ["data=npz", "model_args.shape=3"], "model_args.shape = 3: give the shape of an example"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_asked_for(net, arguments, part, files, mheads):
    done = mheads("train", files(net), "--solver", "solver.prototxt", *arguments, "--folder", "run")
    assert (done.code, done.out) == (2, "")
    assert part in done.err and "Traceback" not in done.err
    assert not (files.path / "run").exists()


def listed(kind, parameter, source, more=""):
    return "".join(
        f'layer {{ name: "data" type: "{kind}" top: "data" top: "label" include {{ phase: {phase} }} '
        f'{parameter} {{ source: "{source.replace("%s", part)}" batch_size: 10 {more} }} }}\n'
        for phase, part in (("TRAIN", "train"), ("TEST", "test"))
    )


def test_lists_of_images_are_read(files, mheads):
    from PIL import Image

    rng = np.random.default_rng(0)
    (files.path / "pictures").mkdir()
    for part, count in (("train", 30), ("test", 10)):
        lines = []
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (12, 14, 3)).astype("uint8")).save(f"pictures/{part} {i}.png")
            lines.append(f"{part} {i}.png {i % 3}")
        (files.path / f"{part}.txt").write_text("\n".join(lines))
    images = listed("ImageData", "image_data_param", "%s.txt", 'root_folder: "pictures/" new_height: 10 new_width: 10')
    text = images + conv("c", "data", 4, 3) + ip("i", "c", 3) + nets.ends("i")
    done = mheads("train", files(text), "--solver", "solver.prototxt", "data.scale=0.004", "--folder", "run")
    assert done.code == 0, done.err
    assert "images are not warped to 10 x 10" in done.out
    result = json.loads((files.path / "run/result.json").read_text())
    assert result["examples"] == 10
    assert mheads("eval", "run").code == 0
    (files.path / "train.txt").write_text("no label here\n")
    done = mheads("train", "net.prototxt", "--solver", "solver.prototxt", "--folder", "other")
    assert done.code == 2 and "train.txt, line 1: 'no label here' is not the name of an image" in done.err


def test_a_solver_alone_names_its_net(files, mheads):
    net = data(batch=10) + conv("c", "data", 4, 3) + ip("i", "c", 5) + nets.ends("i")
    folder = files.path / "deep/er"
    folder.mkdir(parents=True)
    (folder / "net.prototxt").write_text(net)
    solver = folder / "solver.prototxt"
    solver.write_text('net: "examples/some/net.prototxt" weights: "w.caffemodel"\n' + SOLVER)  # from Caffe's own folder
    found = convert(solver, None, ["data.name=npz", "data.path=classes.npz"]).tree
    assert found["model_args"]["net"] == net and found["init"] == "w.caffemodel"
    assert found["optim"]["lr"] == pytest.approx(0.02) and found["optim"]["batch_size"] == 10
    plain = {key: value for key, value in found.items() if key != "init"}
    assert plain == convert(folder / "net.prototxt", files.path / "solver.prototxt",
                            ["data.name=npz", "data.path=classes.npz"]).tree  # fmt: skip
    solver.write_text(SOLVER + 'train_net: "net.prototxt"')
    done = mheads("train", "deep/er/solver.prototxt", "data.name=npz", "data.path=classes.npz", "--folder", "run")
    assert done.code == 0, done.err
    solver.write_text(SOLVER + 'net: "gone.prototxt"')
    done = mheads("train", "deep/er/solver.prototxt", "--folder", "other")
    assert done.code == 2
    assert "deep/er/solver.prototxt, line 2, column 1: net: there is no gone.prototxt, here or beside" in done.err


def test_a_net_may_be_followed_by_its_solver_and_have_another_suffix(files, mheads):
    net = data(batch=10) + ip("i", "data", 5) + nets.ends("i")
    keys = ["data.name=npz", "data.path=classes.npz", "optim.iterations=1"]
    for name in ("net.prototxt.txt", "NET.PROTOTXT"):
        done = mheads("train", files(net, name), "solver.prototxt", *keys, "--folder", name.replace(".", "_"))
        assert done.code == 0, done.err
        config = yaml.safe_load((files.path / name.replace(".", "_") / "config.yaml").read_text())
        assert config["optim"]["lr"] == pytest.approx(0.02)
    done = mheads("train", "NET.PROTOTXT", "solver.prototxt", "--solver", "solver.prototxt", *keys)
    assert done.code == 2 and "solver.prototxt, solver.prototxt: give one solver" in done.err


def test_the_net_that_is_tested_may_be_another_file(files):
    for part in ("train", "test"):
        (files.path / f"{part}.txt").write_text("a.png 0\nb.png 1\n")
    rest = conv("c", "data", 4, 3) + ip("i", "c", 2) + nets.ends("i")
    train, test = listed("ImageData", "image_data_param", "%s.txt", "new_height: 8 new_width: 8").splitlines()
    (files.path / "train.prototxt").write_text(train + rest)
    (files.path / "test.prototxt").write_text(test + rest)
    (files.path / "s.prototxt").write_text(
        SOLVER + 'train_net: "train.prototxt" test_net: "test.prototxt" test_iter: 2'
    )
    found = convert(files.path / "s.prototxt").tree["data"]
    assert (found["path"], found["test_path"], found["channels"]) == ("train.txt", "test.txt", "bgr")


def test_lmdbs_are_read(files, mheads):
    """The stock form of a net: Data layers of two phases. What is stored in three channels is BGR, but for CIFAR's."""
    lmdb = pytest.importorskip("lmdb")
    rng = np.random.default_rng(0)
    for name in ("train", "test", "cifar10_train", "cifar10_test"):
        with lmdb.open(name, map_size=2**22) as opened, opened.begin(write=True) as transaction:
            for i in range(20):
                pixels = rng.integers(0, 256, (3, 10, 12)).astype("uint8").tobytes()
                sides = field(1, 3) + field(2, 10) + field(3, 12)
                transaction.put(b"%08d" % i, sides + field(4, pixels) + field(5, i % 3))
    for prefix, order in (("", "bgr"), ("cifar10_", "rgb")):
        stored = listed("Data", "data_param", f"{prefix}%s", "backend: LMDB")
        text = stored + conv("c", "data", 4, 3) + ip("i", "c", 3) + nets.ends("i")
        text = text.replace("data_param {", "transform_param { crop_size: 8 mirror: true scale: 0.004 } data_param {")
        done = mheads("train", files(text), "--solver", "solver.prototxt", "--folder", f"run{prefix}")
        assert done.code == 0, done.err
        config = yaml.safe_load((files.path / f"run{prefix}/config.yaml").read_text())["data"]
        assert (config["name"], config["crop"], config["mirror"]) == ("lmdb", 8, True)
        assert config.get("channels", "rgb") == order
        assert json.loads((files.path / f"run{prefix}/result.json").read_text())["examples"] == 20


@pytest.mark.parametrize("loss", ["SoftmaxWithLoss", "EuclideanLoss", "SigmoidCrossEntropyLoss"])
def test_hdf5_files_are_read(loss, files, mheads):
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        names = [f"{part}{i}.h5" for i in range(2)]
        for name in names:
            x = rng.normal(size=(20, 6)).astype("float32")
            y = {"S": (x[:, 0] > 0).astype("float32"), "E": x[:, :2], "Si": (x[:, :2] > 0).astype("float32")}
            with h5py.File(name, "w") as file:
                file["data"], file["label"] = x, y["Si" if loss.startswith("Si") else loss[0]]
        (files.path / f"{part}.txt").write_text("\n".join(names))
    text = listed("HDF5Data", "hdf5_data_param", "%s.txt") + ip("i", "data", 2, 0.5) + layer("l", loss, ["i", "label"])
    done = mheads("train", files(text), "--solver", "solver.prototxt", "--folder", "run")
    assert done.code == 0, done.err
    found = json.loads((files.path / "run/result.json").read_text())
    kinds = {
        "SoftmaxWithLoss": "classification",
        "EuclideanLoss": "regression",
        "SigmoidCrossEntropyLoss": "multilabel",
    }
    assert (found["problem"], found["examples"]) == (kinds[loss], 40)
    (files.path / "train1.h5").write_bytes(b"no")
    done = mheads("train", "net.prototxt", "--solver", "solver.prototxt", "--folder", "other")
    assert done.code == 2 and "train1.h5 cannot be read as an HDF5 file" in done.err


def test_arrays_of_hdf5_files_are_found_by_the_names_of_tops(files):
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    x, age = rng.normal(size=(20, 6)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")
    for part in ("train", "test"):
        with h5py.File(f"{part}.h5", "w") as file:
            file["data"], file["label"], file["pixels"], file["age"] = x[:, :2], np.arange(20) % 3, x, age
        (files.path / f"{part}.txt").write_text(f"{part}.h5")
    given = (
        listed("HDF5Data", "hdf5_data_param", "%s.txt")
        .replace('"label"', '"age"')
        .replace('top: "data"', 'top: "pixels"')
    )
    text = given + ip("i", "pixels", 1, 0.5) + layer("l", "EuclideanLoss", ["i", "age"])
    config, _ = load(files(text), files.path / "solver.prototxt")
    assert config.data.arrays == ("pixels", "age")
    experiment = build_experiment(config)
    batch = experiment.stream().batch(0)
    rows = [np.flatnonzero((x == row).all(1))[0] for row in batch.network_inputs(torch.float32).numpy()]
    np.testing.assert_array_equal(batch.targets.numpy(), age[rows])
    with pytest.raises(UserError, match=r"train.h5 has no array length; it has age, data, label, pixels: data.arrays"):
        build_experiment(load("net.prototxt", None, ["data.arrays=[pixels, length]"])[0])
    for other in (["data=npz", "data.path=numbers.npz"], ["data={name: npz, path: numbers.npz}"]):
        found = load("net.prototxt", None, other)[0].data
        assert (found.name, found.path.name, found.test_path, found.arrays) == ("npz", "numbers.npz", None, None)
    with h5py.File("empty.h5", "w") as file:
        file["pixels"], file["age"] = x[:0], age[:0]
    with pytest.raises(UserError, match="there are no training examples"):
        build_experiment(load("net.prototxt", None, ["data.path=empty.h5"])[0])
    with pytest.raises(UserError, match=r"data\.arrays is .*, but 'npz' is not read from HDF5 files.*use hdf5"):
        build_experiment(
            load("net.prototxt", None, ["data.name=npz", "data.path=numbers.npz", "data.arrays=[a, b]"])[0]
        )


def test_the_shape_of_an_example_is_that_of_the_data_that_are_named(files):
    table = files.path / "tables/boat"
    table.mkdir(parents=True)
    for name, content in (("data.txt", "1 2 3 4"), ("index_features.txt", "0 1 2"), ("index_target.txt", "3")):
        (table / name).write_text(content)
    files(data() + ip("i", "data", 1) + layer("l", "EuclideanLoss", ["i", "label"]))
    voc = load("net.prototxt", None, ["data.name=voc", "data.path=x", "data.regions.short_side=40"])[0]
    assert voc.model_args["shape"] == [3, 40, 1000]
    uci = load("net.prototxt", None, ["data.name=uci", "data.root=tables", "data.table=boat"])[0]
    assert uci.model_args["shape"] == [3]


def test_hdf5_files_may_hold_examples_alone(files):
    h5py = pytest.importorskip("h5py")
    x = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
    for part in ("train", "test"):
        with h5py.File(f"{part}.h5", "w") as file:
            file["pixels"] = x
        (files.path / f"{part}.txt").write_text(f"{part}.h5")
    given = listed("HDF5Data", "hdf5_data_param", "%s.txt").replace('top: "data" top: "label"', 'top: "pixels"')
    experiment = build_experiment(
        load(files(given + ip("i", "pixels", 6, 0.5) + layer("l", "EuclideanLoss", ["i", "pixels"])))[0]
    )
    batch = experiment.stream().batch(0)
    assert torch.equal(batch.targets, batch.network_inputs(torch.float32))


def test_the_data_layer_is_that_of_the_solvers_states(files):
    for name in ("a", "b"):
        (files.path / f"{name}.txt").write_text("a.png 0\nb.png 1\n")

    def images(source, rule):
        return f'layer {{ name: "{source}" type: "ImageData" top: "data" top: "label" include {{ {rule} }} image_data_param {{ source: "{source}.txt" batch_size: {ord(source)} new_height: 8 new_width: 8 }} }}\n'

    text = "".join(images(*of) for of in (("a", 'phase: TRAIN not_stage: "big"'), ("b", 'phase: TRAIN stage: "big"'),
                                          ("b", 'phase: TEST not_stage: "small"'), ("a", 'phase: TEST stage: "small"')))  # fmt: skip
    files(text + ip("i", "data", 2) + nets.ends("i"))
    files(SOLVER + 'train_state { stage: "big" } test_state { stage: "small" }', "staged.prototxt")
    plain, staged = (convert("net.prototxt", solver).tree for solver in ("solver.prototxt", "staged.prototxt"))
    assert [(t["data"]["path"], t["data"]["test_path"], t["optim"]["batch_size"]) for t in (plain, staged)] == [
        ("a.txt", "b.txt", ord("a")),
        ("b.txt", "a.txt", ord("b")),
    ]


def test_the_data_layer_is_the_one_that_the_network_reads(files):
    """Not one of labels alone, though it stands first; and not several."""
    for name in ("images", "others", "labels"):
        (files.path / f"{name}.txt").write_text("a.png 0\nb.png 1\n")

    def images(name, tops, rule=""):
        return f'layer {{ name: "{name}" type: "ImageData" {tops} {rule} image_data_param {{ source: "{name}.txt" batch_size: 5 new_height: 8 new_width: 8 }} }}\n'

    rest = ip("i", "data", 2) + nets.ends("i")
    apart = images("labels", 'top: "label"') + images("images", 'top: "data"') + rest
    found = convert(files(apart))
    assert found.tree["data"]["path"] == "images.txt"
    assert (
        "line 1, column 1: layer 'labels' (ImageData): it gives the labels, and layer 'images' (ImageData) of line 2 the examples"
        in found.asks
    )
    both = 'top: "data" top: "label"'
    ranks = images("images", both, "include { mpi_rank: 0 }") + images("others", both, "include { mpi_rank: 1 }") + rest
    found = convert(files(ranks))
    assert (
        "line 2, column 1: layer 'others' (ImageData): rank 1 reads 'others.txt' by it, and rank 0 'images.txt'"
        in found.asks
    )
    found = convert("net.prototxt", None, ["data.name=npz", "data.path=classes.npz"])
    assert found.asks is None and any("of line 1: those of npz are taken instead" in note for note in found.notes)


def test_a_layer_whose_name_looks_like_a_number_keeps_it_in_a_recipe(files, mheads):
    files(nets.toy().replace('"conv2"', '"1e5"'))
    done = mheads("convert", "net.prototxt", "solver.prototxt", "data=digits")
    assert safe_yaml.from_yaml(done.out)["split"] == {"1e5": 3}


def test_a_recipe_without_data_says_what_is_to_do(files, mheads):
    done = mheads("convert", files(nets.lenet()), "solver.prototxt")
    assert done.code == 0
    assert "# to do: net.prototxt, line 1, column 1: layer 'data' (Data): it reads the LMDB" in done.out
    assert "model_args" in done.out and "shape" not in yaml.safe_load(done.out)["model_args"]
    assert "convert again with it, since shapes and losses follow" in done.out


def test_a_recipe_that_was_converted_without_data_is_not_trained_with_another_loss(files, mheads):
    files(nets.toy())
    done = mheads("convert", "net.prototxt", "solver.prototxt", "-o", "mine.yaml")
    assert done.code == 0 and "to do: net.prototxt" in done.out and "convert again" in done.out
    done = mheads("train", "mine.yaml", "data.name=digits", "optim.iterations=1", "-f", "run")
    assert done.code == 2 and "convert the net again with data=..." in done.err
    assert "to do" not in mheads("convert", "net.prototxt", "solver.prototxt", "data=digits", "-o", "mine.yaml").out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "digits", "--solver", "solver.prototxt"], "goes with a Caffe net"),
        (["train", "none.prototxt"], "there is no file none.prototxt"),
        (["convert", "solver.prototxt"], "solver.prototxt: net: it names no net: give the net's file too"),
        (["convert", "net.prototxt", "net.prototxt"], "It is one of a net"),
        (["convert", "net.prototxt", "a", "b"], "give one solver"),
    ],
)
def test_commands_refuse_the_wrong_files(arguments, part, files, mheads):
    files(nets.lenet())
    done = mheads(*arguments)
    assert done.code == 2 and part in done.err


# Solvers.


def solver_of(text):
    return Solver(*parse(text, "SolverParameter", "solver.prototxt"), "solver.prototxt")


FIXED = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 10 '


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ('"fixed"', lambda i: 1),
        ('"step" gamma: 0.5 stepsize: 3', lambda i: 0.5 ** (i // 3)),
        ('"exp" gamma: 0.9', lambda i: 0.9**i),
        ('"inv" gamma: 0.3 power: 0.75', lambda i: (1 + 0.3 * i) ** -0.75),
        ('"multistep" gamma: 0.1 stepvalue: 2 stepvalue: 5', lambda i: 0.1 ** ((i >= 2) + (i >= 5))),
        ('"poly" power: 0.5', lambda i: (1 - i / 10) ** 0.5),
        ('"sigmoid" gamma: -0.4 stepsize: 4', lambda i: 1 / (1 + math.exp(0.4 * (i - 4)))),
    ],
)  # fmt: skip
def test_every_policy_gives_caffes_rates(policy, expected):
    found = optim_of(solver_of(f"base_lr: 0.1 lr_policy: {policy} max_iter: 10"))
    options = Config.model_validate({"optim": found}).optim
    schedule = Schedule(options.schedule, options.lr, options.iterations)
    assert [schedule.rate(i) for i in range(10)] == pytest.approx([0.1 * expected(i) for i in range(10)])


def test_rates_beyond_all_numbers_are_no_traceback(files, mheads):
    files(nets.toy())
    for gamma, expected in ((1e30, 2), (1e-30, 0)):
        files(f'base_lr: 0.1 momentum: 0.9 lr_policy: "exp" gamma: {gamma} max_iter: 30', "odd.prototxt")
        done = mheads(
            "train", "net.prototxt", "--solver", "odd.prototxt", "data=digits", "data.limit=40", "--folder", f"{gamma}"
        )
        assert done.code == expected, done.err
        assert "Traceback" not in done.err and (expected == 0 or "Try a lower optim.lr" in done.err)


def updates(kind, g, state, t, mu=0.9, mu2=0.99, rms=0.95, delta=1e-3):
    """Caffe's step for a gradient, without the rate but for momentum, which holds it."""
    if kind == "Adam":
        state["m"] = mu * state["m"] + (1 - mu) * g
        state["v"] = mu2 * state["v"] + (1 - mu2) * g**2
        return math.sqrt(1 - mu2**t) / (1 - mu**t) * state["m"] / (np.sqrt(state["v"]) + delta)
    if kind == "AdaGrad":
        state["v"] = state["v"] + g**2
        return g / (np.sqrt(state["v"]) + delta)
    if kind == "RMSProp":
        state["v"] = rms * state["v"] + (1 - rms) * g**2
        return g / (np.sqrt(state["v"]) + delta)
    state["v"] = mu * state["v"] + (1 - mu) * g**2
    step = g * np.sqrt((state["m"] + delta) / (state["v"] + delta))
    state["m"] = mu * state["m"] + (1 - mu) * step**2
    return step


@pytest.mark.parametrize("regularization", ["L2", "L1"])
@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "Adam", "AdaGrad", "RMSProp", "AdaDelta"])
def test_every_solver_updates_as_caffe_does(kind, regularization):
    momentum = "momentum: 0.9" if kind not in ("AdaGrad", "RMSProp") else ""
    said = f'type: "{kind}" {momentum} momentum2: 0.99 rms_decay: 0.95 delta: 1e-3 weight_decay: 0.1 '
    found = optim_of(solver_of(f'{FIXED} {said} regularization_type: "{regularization}"'))
    options = Config.model_validate({"optim": found}).optim

    def one_layer():
        layer = nn.Linear(3, 2)
        layer.multipliers = {"weight": (1.0, 1.0), "bias": (2.0, 0.0)}
        return nn.Sequential(layer)

    net = TreeNet(one_layer, members=1).double()
    optimizer = Optimizer(net, options)
    weights = [p.detach().numpy().copy() for p in net.parameters()]
    states = [{"m": np.zeros_like(w), "v": np.zeros_like(w)} for w in weights]
    rng = np.random.default_rng(0)
    for t, rate in enumerate((0.1, 0.1, 0.02, 0.02, 0.05), 1):
        gradients = [rng.normal(size=w.shape) for w in weights]
        for i, (lr, decay) in enumerate(((1, 1), (2, 0))):
            by = np.sign(weights[i]) if regularization == "L1" else weights[i]
            g, state, local = gradients[i] + 0.1 * decay * by, states[i], rate * lr
            if kind in ("SGD", "Nesterov"):
                before = state["m"]
                state["m"] = 0.9 * before + local * g
                weights[i] = weights[i] - (1.9 * state["m"] - 0.9 * before if kind == "Nesterov" else state["m"])
            else:
                weights[i] = weights[i] - local * updates(kind, g, state, t)
        optimizer.set_rate(rate)
        optimizer.update("trunk", [torch.from_numpy(g) for g in gradients])
    for parameter, expected in zip(net.parameters(), weights, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["adam", "adadelta"])
def test_adaptive_solvers_resume_to_the_same_bits(name, files, mheads):
    files(nets.toy())
    command = ["train", "net.prototxt", "--solver", "solver.prototxt", "data=digits", "data.limit=60", f"optim.name={name}",
               "data.scale=0.0625", "optim.lr=0.01", "optim.clip=0.5"]  # fmt: skip
    assert mheads(*command, "--folder", "whole").code == 0
    assert mheads(*command, "optim.iterations=3", "--folder", "parts").code == 0
    assert mheads(*command, "--folder", "parts").code == 0
    assert (files.path / "whole/model.safetensors").read_bytes() == (
        files.path / "parts/model.safetensors"
    ).read_bytes()


def test_gradients_are_clipped_to_the_norm_of_all_weights_together(files, mheads):
    files(nets.toy())
    files('base_lr: 1 lr_policy: "fixed" max_iter: 1 iter_size: 2 clip_gradients: 0.05 display: 1', "clip.prototxt")
    assert optim_of(solver_of((files.path / "clip.prototxt").read_text()))["clip"] == 0.025  # of a mean of two batches
    done = mheads(
        "train", "net.prototxt", "--solver", "clip.prototxt", "data=digits", "data.limit=60", "--folder", "run"
    )
    assert done.code == 0, done.err
    config, _ = load(files.path / "net.prototxt", files.path / "clip.prototxt", ["data=digits", "data.limit=60"])
    before, after = build_experiment(config).net.state_dict(), load_file(files.path / "run/model.safetensors")
    # Biases have twice the rate.
    moved = {key: (after[key] - before[key]).double() / (2 if key.endswith("bias") else 1) for key in before}
    assert sum(step.square().sum() for step in moved.values()).sqrt().item() == pytest.approx(0.025, rel=1e-4)


def test_what_else_a_solver_says():
    solver = solver_of(
        FIXED + "test_iter: 100 test_interval: 500 display: 20 snapshot: 1000 random_seed: 3 iter_size: 4"
    )
    assert log_of(solver) == {"every": 20, "evaluate_every": 500, "checkpoint_every": 1000}
    assert (seed_of(solver), optim_of(solver)["accumulate"]) == (3, 4)
    assert seed_of(solver_of(FIXED)) is None
    old = optim_of(solver_of(FIXED + "solver_type: ADAGRAD"))
    assert old["name"] == "adagrad"
    assert optim_of(solver_of(FIXED + "solver_type: NESTEROV momentum: 0.5"))["nesterov"] is True


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('lr_policy: "fixed" max_iter: 1', "base_lr: it is missing: give a learning rate above 0"),
        ('base_lr: 0.1\nmax_iter: 1', "lr_policy: it is missing: give one of fixed, step"),
        ('base_lr: 0.1\nlr_policy: "cosine" max_iter: 1', "line 2, column 1: lr_policy: there is no policy 'cosine'"),
        ('base_lr: 0.1 lr_policy: "step" gamma: 0.1 max_iter: 1', "stepsize: it is missing: lr_policy step takes one"),
        ('base_lr: 0.1 lr_policy: "multistep" gamma: 0.1 max_iter: 1', "stepvalue: it is missing"),
        ('base_lr: 0.1 lr_policy: "multistep" gamma: 0.1 max_iter: 1 stepvalue: 5 stepvalue: 2', "[5, 2] must rise"),
        ('base_lr: 0.1 lr_policy: "exp" max_iter: 1', "gamma: it is missing"),
        ('base_lr: 0.1 lr_policy: "poly" max_iter: 1', "power: it is missing"),
        ('base_lr: 0.1 lr_policy: "fixed"', "max_iter: it is missing"),
        (FIXED + "momentum: 1", "momentum: 1.0: give 0 or more, below 1"),
        (FIXED + "base_lr: 2", 'multiple "base_lr" fields'),
        (FIXED + "weight_decay: -1", "weight_decay: -1.0: give 0 or more"),
        (FIXED + "weight_decay: inf", "weight_decay: inf"),
        (FIXED + 'type: "LBFGS"', "there is no solver 'LBFGS': it is one of SGD, Nesterov"),
        (FIXED + 'type: "SGD" solver_type: ADAM', "type is given too"),
        (FIXED + 'type: "AdaGrad" momentum: 0.9', "AdaGrad has none"),
        (FIXED + 'regularization_type: "L3"', "it is L1 or L2"),
        (FIXED + "iter_size: 0", "iter_size: 0: give 1 or more"),
        (FIXED + "clip_gradients: 0", "clip_gradients: 0.0"),
        (FIXED + "snapshot: -1", "snapshot: -1: give 0 or more"),
    ],
)  # fmt: skip
def test_a_solver_that_cannot_be_is_refused(text, part):
    with pytest.raises(UserError) as caught:
        solver = solver_of(text)
        optim_of(solver)
        log_of(solver)
    assert str(caught.value).startswith("solver.prototxt")
    assert part in str(caught.value)


def test_defaults_of_new_keys_change_no_digest():
    keys = {"momentum2", "rms_decay", "delta", "regularization", "clip"}
    assert keys <= set(OptimOptions.model_fields)
    # As it was before there were such keys.
    assert Config(model="cifar10_quick", members=2).digest() == "738ecd74"


def test_a_solver_says_the_stages_of_training(files):
    wide = ip("i", "data", 5).replace("inner_product_param", 'include { stage: "wide" } inner_product_param')
    narrow = ip("i", "data", 2).replace("inner_product_param", 'exclude { stage: "wide" } inner_product_param')
    files(data() + wide + narrow + nets.ends("i"))
    files(SOLVER + 'train_state { stage: "wide" level: 1 }', "staged.prototxt")
    staged, _ = load(files.path / "net.prototxt", files.path / "staged.prototxt", ["data=digits"])
    assert (staged.model_args["stages"], staged.model_args["level"]) == (["wide"], 1)
    assert build_net(staged).num_parameters() == 64 * 5 + 5
    plain, _ = load(files.path / "net.prototxt", files.path / "solver.prototxt", ["data=digits"])
    assert build_net(plain).num_parameters() == 64 * 2 + 2


def test_convert_notes_what_it_cannot_keep(files):
    files(nets.caffenet())
    found = convert(files.path / "net.prototxt", None, ["data.name=folder", "data.path=pictures", "data.crop=227"])
    assert found.tree["data"]["mirror"] is True and found.tree["data"]["normalize"] == "mean_image"
    assert found.tree["model_args"]["shape"] == [3, 227, 227]
    assert any("is measured on the training examples" in note for note in found.notes)
    other = convert(
        files.path / "net.prototxt", None, ["data.name=npz", "data.path=classes.npz", "model_args.shape=[3,227,227]"]
    )
    assert "crop" not in other.tree["data"]
    assert "crop_size: 227 is for images in folders and lists: npz keeps its size" in other.notes


def test_other_data_than_those_of_the_net_leave_nothing_of_these_behind(files):
    (files.path / "train.txt").write_text("a.png 0\n")
    images = listed("ImageData", "image_data_param", "train.txt", 'root_folder: "pictures/"')
    files(images + ip("i", "data", 10) + nets.ends("i"))
    own = convert(files.path / "net.prototxt").tree["data"]
    assert (own["name"], own["path"], own["root"]) == ("list", "train.txt", "pictures/")
    assert convert(files.path / "net.prototxt", None, ["data=digits"]).tree["data"] == {"name": "digits", "scale": 1.0}
