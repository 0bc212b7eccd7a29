"""What the rest of the package knows of data: splits of labelled examples, and a dataset's two splits."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

from mheads.common.nested_values import Value
from mheads.data.preprocessing import Preprocess
from mheads.data.value_range import ValueRange
from mheads.problems import Problem, Regression, gives_numbers


@dataclass(frozen=True)
class TargetRows:
    """What goes with the inputs of b examples.

    `targets` have a row for each example, or `counts[i]` rows for example i (the regions of an image, say). `side`
    holds the side inputs of layers that ask for them by name; they have the rows of the targets.
    """

    targets: Value
    side: dict[str, Value] = field(default_factory=dict)
    counts: torch.Tensor | None = None


class Split(Protocol):
    """N labelled examples that can be read by row, in any order, from several threads at once."""

    @property
    def targets(self) -> np.ndarray:
        """What is to be learned of each example: class numbers int64 [N] or [N, H, W], or numbers float32 [N, D]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example as the network sees it: (C, H, W), (F,) for vectors, or (T,) for tokens."""

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw examples [b, ...]: uint8 NHWC images, float NCHW images, vectors [b, F], or tokens int64 [b, T].

        `seeds` [b], one integer per drawn example, drive the random crop and mirror of training: the same
        (row, seed) always gives the same pixels. None reads without chance: centre crop, no mirror.
        """

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        """Targets and side inputs of the same examples, read with the same seeds."""

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        """Where `read` cuts with these seeds: int64 [b, 3] of down, right and mirrored, in the whole image.

        None where it neither crops nor mirrors.
        """


class Source(Split, Protocol):
    """A split as a dataset gives it, before parts of it are held out or left out."""

    def part(self, rows: slice) -> Source:
        """The examples of this range, without copying them."""

    def without_augmentation(self) -> Source:
        """The same examples, never augmented: what evaluation reads."""

    def whole(self) -> Source:
        """The same examples before any crop: what the mean image is measured on."""

    def pad_mean(self, mean: np.ndarray) -> np.ndarray:
        """The mean [H, W, C] of whole images, padded as these are before they are cropped."""

    def survey(self, where: str) -> ValueRange:
        """Kind and range of the examples; raises a UserError for NaN and infinity."""

    def checksum(self) -> bytes:
        """A digest of labels and contents."""


class SplitDefaults:
    """What most splits answer: one row of targets per example, no side inputs, no crop, pixels of eight bits."""

    if TYPE_CHECKING:

        @property
        def targets(self) -> np.ndarray: ...

    def pad_mean(self, mean: np.ndarray) -> np.ndarray:
        return mean

    def __len__(self) -> int:
        return len(self.targets)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return TargetRows(torch.from_numpy(self.targets[rows]))

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        return None

    def whole(self) -> Any:
        return self

    def survey(self, where: str) -> ValueRange:
        return ValueRange("uint8", 0, 255)


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class WrappedSplit:
    """Answers as the source does; subclasses change the rows or the targets."""

    source: Source

    @property
    def targets(self) -> np.ndarray:
        return self.source.targets

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        return self.source.read(rows, seeds)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return self.source.read_targets(rows, seeds)

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        return self.source.places(seeds)

    def without_augmentation(self) -> Self:
        return replace(self, source=self.source.without_augmentation())


@dataclass(frozen=True, eq=False)
class RowSubset(WrappedSplit):
    """Some rows of a split, in this order, without copying them."""

    rows: np.ndarray

    @cached_property
    def targets(self) -> np.ndarray:
        targets: np.ndarray = self.source.targets[self.rows]
        return targets

    def pad_mean(self, mean: np.ndarray) -> np.ndarray:
        return self.source.pad_mean(mean)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        return self.source.read(self.rows[rows], seeds)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return super().read_targets(self.rows[rows], seeds)

    def part(self, rows: slice) -> Self:
        return replace(self, rows=self.rows[rows])

    def whole(self) -> Self:
        return replace(self, source=self.source.whole())

    def survey(self, where: str) -> ValueRange:
        return self.source.survey(where)

    def checksum(self) -> bytes:
        return hashlib.sha256(self.source.checksum() + self.rows.astype(np.int64).tobytes()).digest()


@dataclass(frozen=True, eq=False)
class SelfTargetSplit(WrappedSplit):
    """Examples whose targets are they themselves, as the network takes them: numbers [N, D]."""

    preprocess: Preprocess

    @property
    def targets(self) -> np.ndarray:
        """Zeros of the right shape that take no memory; `read_targets` reads the real ones."""
        return np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (len(self), math.prod(self.shape)), (0, 0))

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        raw: Value = self.read(rows, seeds)
        places = None if seeds is None else self.places(seeds)
        inputs = self.preprocess(raw if places is None else (raw, places), torch.float32)
        return replace(super().read_targets(rows, seeds), targets=inputs.flatten(1).contiguous())


@dataclass(frozen=True, eq=False)
class NormalizedTargets(WrappedSplit):
    """Examples whose targets, numbers [N, D], are learned less a mean [D] and divided by a standard deviation [D]."""

    mean: np.ndarray
    std: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        targets: np.ndarray = ((self.source.targets - self.mean) / self.std).astype(np.float32)
        return targets

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        read = self.source.read_targets(rows, seeds)
        numbers = (read.targets.double() - torch.from_numpy(self.mean)) / torch.from_numpy(self.std)
        return replace(read, targets=numbers.float())


@dataclass(frozen=True, eq=False)
class TaughtSplit(WrappedSplit):
    """Examples with what a teacher answers, probabilities [N, C]: their targets are pairs of label and answer."""

    answers: np.ndarray

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        labels = super().read_targets(rows, seeds)
        return replace(labels, targets=(labels.targets, torch.from_numpy(self.answers[rows])))


@dataclass(frozen=True)
class Data:
    """A dataset as a run uses it; `fingerprint` tells whether two runs saw the same examples.

    `weights` [N] of mean 1 say how much each training example counts, None meaning all alike; `held_out` says which
    training examples the test split was made of, where it was, and `held_out_rows` their numbers; `rows` are those of
    the training split, of `num_given` examples. `side` has the shapes of the side inputs of one example. `calibration`
    are training examples that nothing is learned from and that `engine.measure.calibrate` takes.
    """

    name: str
    train: Split
    test: Split
    problem: Problem
    preprocess: Preprocess
    fingerprint: str
    seen: ValueRange | None = None
    weights: np.ndarray | None = None
    held_out: str | None = None
    held_out_rows: np.ndarray | None = None
    rows: np.ndarray | None = None
    num_given: int = 0
    side: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calibration: Split | None = None

    def with_normalized_targets(self) -> Data:
        """Targets of training have mean 0 and standard deviation 1 in each value; members answer in the old units."""
        assert gives_numbers(self.problem)
        targets = self.train.targets.astype(np.float64)
        mean, std = targets.mean(0), targets.std(0)
        std = np.where(std > 0, std, 1.0)
        units = {"mean_of_targets": tuple(mean.tolist()), "std_of_targets": tuple(std.tolist())}
        train = NormalizedTargets(self.train, mean, std)  # type: ignore[arg-type]  # it is a source
        return replace(self, train=train, problem=replace(self.problem, **units))  # type: ignore[arg-type]

    def with_examples_as_targets(self) -> Data:
        """The same examples, to be learned themselves, whatever targets they have."""
        train, test = (SelfTargetSplit(split, self.preprocess) for split in (self.train, self.test))  # type: ignore[arg-type]
        return replace(self, train=train, test=test, problem=Regression(math.prod(train.shape)))
