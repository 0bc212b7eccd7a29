"""Networks of a user's own, given to the commands as `networks:name`."""

import os
import threading
import time
from collections import OrderedDict

import torch
from torch import nn

import mheads


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


def squared(outputs, y, power=2):
    """A loss: the losses [M, B] of outputs [M, B, C]."""
    targets = nn.functional.one_hot(y, outputs.shape[-1])
    return (outputs.softmax(-1) - targets).abs().pow(power).sum(-1)


def half() -> float:
    """No network at all."""
    return 0.5


class Slow(nn.Module):
    """Takes a tenth of a second."""

    def forward(self, x):
        time.sleep(0.1)
        return x


class Hangs(nn.Module):
    """Never comes back from a worker of the rank that the environment names."""

    def forward(self, x):
        here = os.environ.get("HANGING_RANK", "none") == os.environ.get("OMPI_COMM_WORLD_RANK")
        if here and threading.current_thread() is not threading.main_thread():
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


class Shift(nn.Module):
    """Adds a side input."""

    takes = "shift"

    def forward(self, x, shift):
        return x + shift


def shifted():
    layers = OrderedDict(a=nn.Linear(6, 5), s=Shift(), tanh=nn.Tanh(), drop=nn.Dropout(0.1), b=nn.Linear(5, 2))
    return nn.Sequential(layers)


class Regions(nn.Module):
    """Images and places in them to a row for each place: what a detector does."""

    takes = ("where", "counts")

    def forward(self, x, where, counts):
        image = torch.arange(len(counts)).repeat_interleave(counts)
        return x[image, :, where[:, 0], where[:, 1]]
