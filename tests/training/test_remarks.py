"""What the start of training says about a network, its arguments and its data."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from torch import nn

from mheads import TreeNet, fit


def test_a_batch_larger_than_the_data_is_remarked(mheads, tmp_path):
    command = ["train", "digits", "data.limit=40", "members=1", "optim.iterations=1", "-f"]
    done = mheads(*command, tmp_path / "large", "optim.batch_size=100")
    words = " ".join((done.out + done.err).split())
    assert "a batch of 100 holds each of the 40 training examples 2.5 times: with optim.batch_size=40 it would" in words
    done = mheads(*command, tmp_path / "all", "optim.batch_size=40")
    assert "training examples" not in done.out + done.err


def test_a_network_for_other_examples_is_told_their_shape(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train/a", "train/b", "val/a", "val/b"):
        Path("colours", name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((16, 16, 3), 90 * i, np.uint8)).save(Path("colours", name, f"{i}.png"))
    data = ["data.name=folder", "data.path=colours", "data.resize=16", "data.crop=16", "-f", "run"]
    done = mheads("train", "digits", *data)
    assert done.code == 2 and "an example of folder has the shape (3, 16, 16): is the network made" in done.err
    assert "model_args.channels=3, or data.grey=true?" in done.err
    done = mheads("train", "cifar10_quick", *data)
    assert done.code == 2 and "(3, 16, 16): is the network made for it?)" in done.err  # its linear layer is too large


def test_a_class_that_one_side_lacks_is_named(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train/ant", "train/bee", "train/cat", "val/ant", "val/bee"):
        Path("animals", name).mkdir(parents=True)
        for i in range(5):
            Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)).save(Path("animals", name, f"{i}.png"))
    data = ["data.name=folder", "data.path=animals", "data.resize=8", "data.crop=8", "data.grey=true"]
    done = mheads("train", "digits", "model_args.classes=3", *data, "optim.iterations=1", "-f", "run")
    words = " ".join((done.out + done.err).split())
    assert done.code == 0 and "folder: the test set has no example of class cat: are labels or files missing?" in words


def test_classes_of_the_test_set_alone_and_those_that_chance_explains():
    x, classes = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), np.arange(30) % 3

    def train(train_labels, test_labels):
        net = TreeNet(lambda: nn.Linear(4, 3), members=2)
        return fit(net, train=(x, train_labels), test=(x[: len(test_labels)], test_labels), iterations=1)

    with pytest.warns(UserWarning, match=r"^arrays: no training example has class 2, which the test set has: are "):
        train(classes % 2, classes)
    with pytest.warns(UserWarning, match=r"^arrays: the test set has no example of class 1, 2: are labels or files"):
        train(classes, np.zeros(9, int))
    # Without a warning: 8 / 3 of class 1 are expected, fewer than three.
    assert train(classes, np.zeros(8, int)).result.examples == 8


def test_targets_far_from_one_are_told_the_key_that_normalises_them(mheads, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    signs = np.where(np.arange(40) % 2 == 0, 1.0, -1.0)  # of root mean square 1

    def train(y, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(TreeNet(lambda: nn.Linear(4, 1), members=2), train=(x, y), iterations=1, lr=1e-12, **options)
        return [text for each in caught if "root mean square" in (text := str(each.message))]

    for size, shown in ((301, "301"), (5000, "5e+03"), (1 / 301, "0.00332")):
        (text,) = train(signs * size)
        assert text.startswith(f"arrays: the targets have a root mean square of {shown}, and networks begin")
        assert "near 1 or below: normalize_targets=True learns them" in text
        assert not train(signs * size, normalize_targets=True)
    assert not train(signs * 299) and not train(signs / 299) and not train(signs * 0)
    assert not train(signs * 5000, loss=lambda outputs, y: (outputs - y).abs().mean(-1))  # a loss of the user's own
    np.savez(tmp_path / "x.npz", x_train=x, y_train=signs * 5000, x_test=x, y_test=signs * 5000)
    options = ["model_args.features=4", "data.name=npz", f"data.path={tmp_path / 'x.npz'}", "optim.iterations=1"]
    done = mheads("train", "diabetes", *options, "-f", tmp_path / "run")
    assert "data.normalize_targets=true learns them" in " ".join((done.out + done.err).split())


def test_a_run_in_bf16_on_one_core_is_made_for_one_core(mheads, tmp_path, monkeypatch):
    monkeypatch.setattr("mheads.training.loop.available_cores", lambda: 1)
    given = ["train", "digits", "optim.iterations=1", "data.limit=20", "members=1", "log.evaluate_every=0"]

    def cores(name, *more):
        done = mheads(*given, *more, "-f", tmp_path / name)
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        return config["engine"]["cores"], done.out

    chosen, out = cores("bf16", "precision=bf16")
    assert chosen == 1 and "engine.cores = 1: the run is made for this number of cores" in out
    assert "slow on fewer" not in out
    chosen, out = cores("float32")
    assert chosen == 2 and "engine.cores" not in out
    chosen, out = cores("from two cores", "precision=bf16", "engine.cores=2")
    assert chosen == 2 and "engine.cores = 2, and 1 is here" in out and "with engine.cores=1" in out


def test_arguments_that_a_recipe_leaves_to_another_network_can_be_taken_away(mheads, tmp_path):
    command = ["train", "diabetes", "model=digits", "-f", tmp_path / "run"]
    done = mheads(*command)
    assert done.code == 2 and "'model_args={}' takes those of the recipe away" in done.err
    assert "do not fit" not in mheads(*command, "model_args={}").err


def any_options(width, **options):
    return nn.Linear(64, width, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["cifar10_quick", "model_args.clases=3"],
            "it has no argument 'clases' (did you mean classes?); it has classes,",
        ),
        (
            ["digits", "model=mlp", "model_args={wdth: 3}"],
            "it has no argument 'wdth'; it has features, outputs, hidden,",
        ),
        (["digits", "model=mlp"], "model_args = {} do not fit mlp: missing a required argument: 'features'"),
        (
            ["digits", "model=tests.training.test_remarks:any_options", "model_args={deep: 3}"],
            "missing a required argument: 'width'",
        ),
    ],
)
def test_arguments_that_a_network_has_not_are_named_with_those_that_it_has(mheads, given, said):
    done = mheads("tree", *given)
    assert done.code == 2 and said in done.err
    assert ("takes those of the recipe away" in done.err) == ("model_args = {}" not in done.err)
