"""Datasets that fit in memory: numpy arrays or torch tensors, checked once and then only indexed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from mheads.data.assemble import assemble
from mheads.data.augment import crop_and_mirror
from mheads.data.split import Data
from mheads.errors import UserError


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class ArraySplit:
    """Examples in one array: images [N, H, W, C] or vectors [N, F], and labels int64 [N].

    `pad` and `mirror` say how images are augmented when they are read with seeds: zeros around the raw image,
    a random crop of the original size, mirrored half of the time.
    """

    examples: np.ndarray
    labels: np.ndarray
    pad: int = 0
    mirror: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        *space, channels = self.examples.shape[1:]
        return (channels, *space)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw examples [b, ...]: uint8 NHWC, float NCHW (a view of NHWC memory), or vectors [b, F]."""
        batch = self.examples[rows]
        if seeds is not None and (self.pad or self.mirror):
            batch = crop_and_mirror(batch, np.asarray(seeds), pad=self.pad, mirror=self.mirror)
        raw = torch.from_numpy(batch)
        return raw.permute(0, 3, 1, 2) if raw.ndim == 4 and raw.is_floating_point() else raw

    def part(self, rows: slice) -> Self:
        return replace(self, examples=self.examples[rows], labels=self.labels[rows])

    def fixed(self) -> Self:
        return replace(self, pad=0, mirror=False)

    def checksum(self) -> bytes:
        digest = hashlib.sha256(repr((self.examples.dtype.str, self.examples.shape)).encode())
        digest.update(np.ascontiguousarray(self.labels).data)
        digest.update(np.ascontiguousarray(self.examples).data)
        return digest.digest()


def from_arrays(
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None,
    *,
    classes: Sequence[str] | None = None,
    normalize: str = "none",
    validation: int = 0,
    scale: float = 1.0,
    pad: int = 0,
    mirror: bool = False,
    limit: int | None = None,
    name: str = "arrays",
) -> Data:
    """A dataset from (examples, labels) pairs of numpy arrays or torch tensors.

    Examples: images [N, C, H, W] or [N, H, W], uint8 or float, or vectors [N, F]. Labels: integers [N].
    Without `test` (and without `validation`) the test split is empty. Without `classes` they are numbered up
    to the largest label. The other options are those of `load`.
    """
    sources = {"train": as_split(*train, where=f"{name}: train")}
    if test is not None:
        sources["test"] = as_split(*test, where=f"{name}: test")
    largest = max((int(s.labels.max()) for s in sources.values() if len(s)), default=-1)
    known = tuple(map(str, range(largest + 1) if classes is None else classes))
    return assemble(
        name,
        with_augmentation(sources["train"], pad=pad, mirror=mirror, where=name),
        sources.get("test", sources["train"].part(slice(0))),
        known,
        normalize=normalize,
        validation=validation,
        scale=scale,
        limit=limit,
    )


def with_augmentation(split: ArraySplit, *, pad: int, mirror: bool, where: str) -> ArraySplit:
    """The split, moved and mirrored in training; refuses what has no meaning for its examples."""
    if pad < 0:
        raise UserError(f"{where}: data.pad is {pad}; it counts pixels, so give 0 or more")
    if (pad or mirror) and split.examples.ndim != 4:
        raise UserError(
            f"{where}: data.pad={pad} and data.mirror={mirror} are for images, but the examples are vectors"
            f" of {split.shape[0]} features; leave both out"
        )
    return replace(split, pad=pad, mirror=mirror)


def as_split(examples: Any, labels: Any, where: str) -> ArraySplit:
    """Checked examples and labels, images turned to NHWC; `where` names them in messages."""
    x, y = _array(examples, f"{where} examples"), _array(labels, f"{where} labels")
    if x.dtype != np.uint8 and x.dtype.newbyteorder("=") not in (np.float16, np.float32, np.float64):
        raise UserError(f"{where} examples have dtype {x.dtype}; convert them to uint8 or float32")
    if y.dtype.kind not in "iu":
        raise UserError(f"{where} labels have dtype {y.dtype}; give class numbers as integers, such as int64")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise UserError(
            f"{where} examples have shape {list(x.shape)}; give images [N, C, H, W] or [N, H, W], or vectors [N, F]"
        )
    if y.shape != x.shape[:1]:
        raise UserError(
            f"{where}: {len(x)} examples but labels of shape {list(y.shape)}; give one label per example, [N]"
        )
    if x.ndim == 4 and x.shape[1] == x.shape[2] > 4 and x.shape[3] in (1, 3, 4):
        raise UserError(
            f"{where} examples have shape {list(x.shape)}, which looks like [N, H, W, C]; give [N, C, H, W],"
            " as x.transpose(0, 3, 1, 2) does"
        )
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    return ArraySplit(np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=")), y.astype(np.int64))


def _array(values: Any, what: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"{what} are of several sizes; make them all alike before stacking them") from error
    if array.dtype == object:
        raise UserError(f"{what} are an array of objects; stack equally sized arrays into one with numpy.stack")
    return array
