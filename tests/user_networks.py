"""Networks of a user's own, given to the commands as `user_networks:name`."""

import os
import threading
import time
import traceback
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

import mheads
from mheads.data import catalog
from mheads.data.splits import TargetRows
from mheads.data.value_range import ValueRange
from mheads.problems import Classification


def with_dropout() -> nn.Sequential:
    """Digits [B, 1, 8, 8] -> logits [B, 10]."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 6, 3),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            drop=mheads.Dropout(0.2),
            hidden=nn.Linear(54, 16),
            relu2=nn.ReLU(),
            out=nn.Linear(16, 10),
        )
    )


def unnamed() -> nn.Sequential:
    """Its layers are called 0 to 3."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def twice_as_many() -> nn.Sequential:
    """Two rows of outputs for each digit."""

    class Twice(nn.Module):
        def forward(self, x):
            return torch.cat([x, x])

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Twice())


class Plain(nn.Module):
    """A module whose children form a sequence, written as people write them."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first = nn.Linear(64, hidden)
        self.relu = nn.ReLU()
        self.second = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.second(self.relu(self.first(self.flatten(x))))


def normalised() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 4, 3), norm=nn.BatchNorm2d(4), flatten=nn.Flatten(), out=nn.Linear(144, 10))
    )


def normalised_rows() -> nn.Sequential:
    """Ten numbers -> one."""
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(10, 16),
            norm1=nn.BatchNorm1d(16),
            relu1=nn.ReLU(),
            fc2=nn.Linear(16, 8),
            norm2=nn.BatchNorm1d(8, momentum=None),
            relu2=nn.ReLU(),
            out=nn.Linear(8, 1),
        )
    )


def squared(outputs, y, power=2):
    """A loss: the losses [M, B] of outputs [M, B, C]."""
    targets = nn.functional.one_hot(y, outputs.shape[-1])
    return (outputs.softmax(-1) - targets).abs().pow(power).sum(-1)


def weighted_squares(outputs, y, sample_weights, ties):
    """A loss that asks for everything there is."""
    return squared(outputs, y)


def distances(outputs, y, power=1):
    """A loss of one member on one example: [M, B, D], [B, D] -> [M, B]."""
    return (outputs - y).abs().pow(power).mean(-1)


def half() -> float:
    """No network at all."""
    return 0.5


class Slow(nn.Module):
    """Takes a tenth of a second."""

    def forward(self, x):
        time.sleep(0.1)
        return x


class Hangs(nn.Module):
    """Never comes back from a task of the rank that the environment names."""

    def forward(self, x):
        here = os.environ.get("HANGING_RANK", "none") == os.environ.get("OMPI_COMM_WORLD_RANK")
        if here and any(frame.name == "_take" for frame in traceback.extract_stack()):  # not while the net is checked
            threading.Event().wait()
        return x


def slow() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(), hidden=nn.Linear(64, 8), middle=nn.Linear(8, 8), slow=Slow(), out=nn.Linear(8, 10)
        )
    )


def hangs() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(), hidden=nn.Linear(64, 8), middle=nn.Linear(8, 8), hang=Hangs(), out=nn.Linear(8, 10)
        )
    )


def numbers() -> nn.Sequential:
    """Three numbers -> two."""
    return nn.Sequential(
        OrderedDict(first=nn.Linear(3, 8), tanh=nn.Tanh(), drop=mheads.Dropout(0.1), out=nn.Linear(8, 2))
    )


def flags() -> nn.Sequential:
    """Three numbers -> a score for each of three classes."""
    return nn.Sequential(
        OrderedDict(first=nn.Linear(3, 8), tanh=nn.Tanh(), drop=mheads.Dropout(0.1), out=nn.Linear(8, 3))
    )


def pixels() -> nn.Sequential:
    """Images [B, 2, 6, 5] -> scores of three classes for each pixel."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(2, 6, 3, padding=1), relu=nn.ReLU(), drop=mheads.Dropout(0.1), out=nn.Conv2d(6, 3, 1)
        )
    )


class Shift(nn.Module):
    """Adds a side input."""

    takes = "shift"

    def forward(self, x, shift):
        return x + shift


def shifted():
    layers = OrderedDict(a=nn.Linear(6, 5), s=Shift(), tanh=nn.Tanh(), drop=nn.Dropout(0.1), b=nn.Linear(5, 2))
    return nn.Sequential(layers)


class Regions(nn.Module):
    """Turns images and places in them into a row for each place, as a detector does."""

    takes = ("where", "counts")

    def forward(self, x, where, counts):
        image = torch.arange(len(counts)).repeat_interleave(counts)
        return x[image, :, where[:, 0], where[:, 1]]


def detector() -> nn.Sequential:
    layers = {"conv": nn.Conv2d(2, 4, 3), "regions": Regions(), "hidden": nn.Linear(4, 6), "tanh": nn.Tanh()}
    return nn.Sequential(OrderedDict(**layers, drop=mheads.Dropout(0.3), head=nn.Linear(6, 3)))


class Scenes:
    """Images with some regions each (one has none), which are drawn anew whenever an image is seen in training."""

    shape, margin = (2, 8, 8), 0

    def __init__(self, length, seed, training=True):
        self.images = np.random.default_rng(seed).normal(size=(length, 2, 8, 8)).astype(np.float32)
        self.targets = np.arange(length) % 3
        self.training = training

    def __len__(self):
        return len(self.images)

    def read(self, rows, seeds):
        return torch.from_numpy(self.images[rows])

    def read_targets(self, rows, seeds):
        keys = rows if seeds is None or not self.training else seeds
        drawn = [np.random.default_rng(int(key)).integers(6, size=(int(key) % 5, 2)) for key in keys]
        where = torch.from_numpy(np.concatenate(drawn))
        counts = torch.tensor([len(found) for found in drawn])
        image = torch.from_numpy(rows).repeat_interleave(counts)
        values = torch.from_numpy(self.images)[image, 0, where[:, 0], where[:, 1]]
        return TargetRows((values > 0).long() + (values > 1).long(), {"where": where}, counts)

    def places(self, seeds):
        return None

    def without_augmentation(self):
        return Scenes.part(self, slice(None), training=False)

    def part(self, rows, training=None):
        found = object.__new__(Scenes)
        found.images, found.targets = self.images[rows], self.targets[rows]
        found.training = self.training if training is None else training
        return found

    def whole(self):
        return self

    def survey(self, where):
        return ValueRange("float", float(self.images.min()), float(self.images.max()))

    def checksum(self):
        return self.images.tobytes()


def register_scenes() -> None:
    """Adds a dataset of the tests' own, in this process."""

    def read(mirror=False):
        return Scenes(40, 0), Scenes(20, 1), Classification(("low", "middle", "high"))

    catalog.DATASETS["scenes"] = catalog.Dataset("scenes", "images with regions", read, (2, 8, 8))


def to_three() -> nn.Sequential:
    """Vectors [B, 8] -> logits [B, 3]."""
    return nn.Sequential(OrderedDict(hidden=nn.Linear(8, 6), relu=nn.ReLU(), out=nn.Linear(6, 3)))


def little40(classes: int = 3) -> nn.Sequential:
    """The same for photos of 40 x 40, whose pixels it sees in 5 x 5 places."""
    made = little(classes)
    made.fc = nn.Linear(16 * 5 * 5, 32)
    return made


def little(classes: int = 3) -> nn.Sequential:
    """Photos of any size -> logits, by way of 4 x 4 places; a fast R-CNN can be made of it."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 5, stride=2, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, 2, ceil_mode=True),
            conv2=nn.Conv2d(8, 16, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(3, 2, ceil_mode=True),
            flatten=nn.Flatten(),
            fc=nn.Linear(16 * 4 * 4, 32),
            relu3=nn.ReLU(),
            drop=mheads.Dropout(0.1),
            out=nn.Linear(32, classes),
        )
    )


def seen() -> nn.Sequential:
    """For 3 x 9 x 11 images."""
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), flat=nn.Flatten(), ip=nn.Linear(252, 4)))
