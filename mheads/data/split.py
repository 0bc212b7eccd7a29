"""What the rest of the package knows of data: splits of labelled examples, and a named pair of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch

from mheads.data.preprocess import Preprocess


class Split(Protocol):
    """N labelled examples that can be read by row, in any order, from several threads at once."""

    @property
    def labels(self) -> np.ndarray:
        """Class of each example, int64 [N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example as the network sees it: (C, H, W), or (F,) for vectors."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw examples [b, ...]: uint8 NHWC images, float NCHW images, or vectors [b, F].

        `seeds` [b], one integer per drawn example, drive the random crop and mirror of training: the same
        (row, seed) always gives the same pixels. None reads without chance: centre crop, no mirror.
        """


class Source(Split, Protocol):
    """A split as a dataset gives it, before parts of it are held out or left away."""

    def part(self, rows: slice) -> Self:
        """The examples of this range, without copying them."""

    def fixed(self) -> Self:
        """The same examples, never augmented: what evaluation reads."""

    def checksum(self) -> bytes:
        """A digest of labels and contents."""


@dataclass(frozen=True)
class Data:
    """A dataset as a run uses it; `fingerprint` tells whether two runs saw the same examples."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    preprocess: Preprocess
    fingerprint: str
