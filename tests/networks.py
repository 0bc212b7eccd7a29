"""Networks of a user's own, given to the commands as `networks:name`."""

from collections import OrderedDict

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


def half() -> float:
    """No network at all."""
    return 0.5
