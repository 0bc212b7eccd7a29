"""What the start of training says about a network, its arguments and its data."""

from pathlib import Path

import numpy as np
from PIL import Image


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


def test_arguments_that_a_recipe_leaves_to_another_network_can_be_taken_away(mheads, tmp_path):
    command = ["train", "diabetes", "model=digits", "-f", tmp_path / "run"]
    done = mheads(*command)
    assert done.code == 2 and "'model_args={}' takes those of the recipe away" in done.err
    assert "do not fit" not in mheads(*command, "model_args={}").err
