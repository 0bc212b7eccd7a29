"""Networks of the cases, by plain torch alone: both versions of the package import this file."""

from collections import OrderedDict

import torch
from torch import nn


def with_dropout() -> nn.Sequential:
    """Digits [B, 1, 8, 8] -> scores [B, 10]."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 6, 3), relu=nn.ReLU(), pool=nn.MaxPool2d(2), flatten=nn.Flatten(), drop=nn.Dropout(0.2),
            hidden=nn.Linear(54, 16), relu2=nn.ReLU(), out=nn.Linear(16, 10),
        )
    )  # fmt: skip


def with_batchnorm() -> nn.Sequential:
    """Digits [B, 1, 8, 8] -> scores [B, 10], with batch statistics in trunk and branches."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 6, 3), norm=nn.BatchNorm2d(6), relu=nn.ReLU(), conv2=nn.Conv2d(6, 8, 3),
            norm2=nn.BatchNorm2d(8), relu2=nn.ReLU(), flatten=nn.Flatten(), out=nn.Linear(128, 10),
        )
    )  # fmt: skip


class Residual(nn.Module):
    """Digits [B, 1, 8, 8] -> scores [B, 10]: a forward of its own, which has to be traced to be cut."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm([width, 8, 8])
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = torch.nn.functional.gelu(self.stem(x))
        x = x + self.first(x).relu()
        x = self.norm(x + self.second(x).relu())
        return self.out(x.mean((2, 3)))


def pixels() -> nn.Sequential:
    """Digits [B, 1, 8, 8] -> scores of three classes for every pixel [B, 3, 8, 8]."""
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 6, 3, padding=1), relu=nn.ReLU(), out=nn.Conv2d(6, 3, 1))
    )  # fmt: skip


def labels() -> nn.Sequential:
    """Digits [B, 1, 8, 8] -> scores of three labels [B, 3]."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), hidden=nn.Linear(64, 12), relu=nn.ReLU(), out=nn.Linear(12, 3))
    )  # fmt: skip


def little(classes: int = 3) -> nn.Sequential:
    """Images [B, 3, H, W] of any size -> scores; Fast R-CNN replaces its last pooling."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 5, stride=2, padding=2), relu1=nn.ReLU(), pool1=nn.MaxPool2d(3, 2, ceil_mode=True),
            conv2=nn.Conv2d(8, 16, 3, padding=1), relu2=nn.ReLU(), pool2=nn.MaxPool2d(3, 2, ceil_mode=True),
            flatten=nn.Flatten(), fc=nn.Linear(256, 32), relu3=nn.ReLU(), out=nn.Linear(32, classes),
        )
    )  # fmt: skip


def bounded(bound: float = 2.0):
    """A loss of a user's own: no example costs more than the bound. The package that runs it makes it."""
    from mheads.losses import Loss

    def losses(outputs, targets):
        each = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.repeat(len(outputs)), reduction="none")
        return each.view(outputs.shape[:2]).clamp(max=bound)

    return Loss("bounded", losses)
