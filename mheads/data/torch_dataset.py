"""Torch datasets, read by row: anything with a length whose items are an example, its label and maybe side inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image

from mheads.common import seeds as keyed
from mheads.common.errors import UserError
from mheads.data.arrays import (
    PaddedSplit,
    as_examples,
    as_side,
    as_targets,
    digest_side,
    is_token,
    refuse_masked,
    to_numpy,
)
from mheads.data.augmentation import augment
from mheads.data.readers.image_files import UNREADABLE, pixels_of
from mheads.data.splits import RowSubset
from mheads.data.value_range import ValueRange, measure_rows


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class DatasetSplit(PaddedSplit):
    """Rows of a dataset, each made when it is read. Targets and side inputs, which are small, are kept.

    What the dataset draws from the generators of torch, numpy and random while it makes an item follows from the
    seed of that example, or from its row where there is none: random transforms are as repeatable as our own.
    """

    dataset: Any
    where: str
    targets: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    lows: np.ndarray
    highs: np.ndarray
    digest: bytes
    augment: bool = True

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        seeds = seeds if self.augment else None
        keys = [keyed.derive("row", int(row)) for row in rows] if seeds is None else [int(seed) for seed in seeds]
        items = []
        with keyed.keep_generators() as seed:
            for row, key in zip(np.asarray(rows).tolist(), keys, strict=True):
                items.append(_read_example(self.dataset, row, seed, key, self.where))
                check_alike(items[-1], self.shape, self.dtype, f"{self.where} item {row}")
        return augment(_join(items), seeds, pad=self.pad, mirror=self.mirror, padding=self.padding)

    def part(self, rows: slice) -> RowSubset:
        return RowSubset(self, np.arange(len(self))[rows])

    def without_augmentation(self) -> Self:
        return replace(self, augment=False, pad=0, mirror=False)

    def survey(self, where: str) -> ValueRange:
        return measure_rows(self.lows, self.highs, where)

    def checksum(self) -> bytes:
        return hashlib.sha256(self.digest + np.ascontiguousarray(self.targets).tobytes()).digest()


def read_dataset(dataset: Any, where: str) -> DatasetSplit:
    """The split of a dataset; looks at all items once, for labels, range and checksum."""
    if not len(dataset):
        raise UserError(f"{where}: the dataset is empty; give one with at least one example")
    labels, sides, lows, highs, digest = [], [], [], [], hashlib.sha256()
    first = np.empty(0)
    with keyed.keep_generators() as seed:
        for row in range(len(dataset)):
            key = keyed.derive("row", row)
            seed(key)
            x, y, side = item_of(dataset, row, where)
            array, label = as_array(x, f"{where} item {row}"), as_label(y, f"{where} item {row}")
            if row == 0:
                first = array
                check_repeatable(dataset, seed, key, array, label, where)
            check_alike(array, _full_shape(first), first.dtype, f"{where} item {row}")
            labels.append(label)
            sides.append(side)
            lows.append(array.min())
            highs.append(array.max())
            digest.update(np.ascontiguousarray(array).data)
    as_examples(first[None], where)  # raises an error for what is no example
    digest.update(repr((first.shape, first.dtype.str)).encode())
    targets, side = as_targets(labels, where), stack_side(sides, where)
    digest_side(digest, side)
    ranges = np.array(lows, first.dtype), np.array(highs, first.dtype)
    return DatasetSplit(dataset, where, targets, _full_shape(first), first.dtype, *ranges, digest.digest(), side=side)


def stack(items: Sequence[Item], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Examples [N, ...] and labels [N] of items."""
    examples = [as_array(item.example, f"{where} item {row}") for row, item in enumerate(items)]
    for row, example in enumerate(examples):
        check_alike(example, _full_shape(examples[0]), examples[0].dtype, f"{where} item {row}")
    labels = [as_label(item.label, f"{where} item {row}") for row, item in enumerate(items)]
    return np.stack(examples), as_targets(labels, where)


def stack_side(sides: Sequence[Any], where: str) -> dict[str, np.ndarray]:
    """Side inputs [N, ...] by name, stacked from those of single examples."""
    rows = [as_side(side, None, f"{where} item {row}") for row, side in enumerate(sides)]
    together = {name: [side[name] for side in rows] for name in same_names(rows, where)}
    return as_side(together, len(rows), where)


def same_names(sides: Sequence[dict[str, np.ndarray]], where: str) -> list[str]:
    """The names of the side inputs, which must be the same for all examples."""
    for row, side in enumerate(sides):
        if side.keys() != sides[0].keys():
            raise UserError(
                f"{where} item {row} has the side inputs {', '.join(side) or 'none'}, the first "
                f"{', '.join(sides[0]) or 'none'}; give all the same"
            )
    return list(sides[0])


class Item(NamedTuple):
    """What a dataset gives for one row."""

    example: Any
    label: Any
    side: Any = None


def item_of(dataset: Any, row: int, where: str) -> Item:
    item = dataset[row]
    if isinstance(item, (tuple, list)) and len(item) == 3 and isinstance(item[2], Mapping):
        return Item(*item)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        kind = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, (tuple, list, dict)) else "")
        raise UserError(f"{where} item {row} is {kind}; an item is a pair: an example and its label")
    return Item(*item)


def as_array(x: Any, where: str) -> np.ndarray:
    """One example: an array or tensor as it is, a Pillow image as uint8 [C, H, W]."""
    if isinstance(x, Image.Image):
        try:
            return pixels_of(x)
        except UNREADABLE as error:
            raise UserError(f"{where} cannot be read as an image ({error})") from error
    refuse_masked(x, where)
    array = to_numpy(x)
    if array.ndim not in (1, 2, 3) or array.dtype == object:
        raise UserError(
            f"{where} is {type(x).__name__} of shape {list(array.shape)}; give an image [C, H, W] or [H, W],"
            " a vector [F], or a Pillow image"
        )
    return array


def as_label(y: Any, where: str) -> int | str | np.ndarray:
    if isinstance(y, str):
        return y
    refuse_masked(y, f"{where}: its label")
    array = to_numpy(y)
    if array.dtype.kind == "f" and array.ndim < 2:
        return array.reshape(-1)
    if array.dtype.kind in "biu" and (
        array.ndim == 2 or (array.ndim == 1 < array.size and np.isin(array, (0, 1)).all())
    ):
        return array
    if array.size != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{where} has the label {y!r}; give a class number or a name, numbers to be learned, several labels as "
            "bools or 0 and 1, or a class for each pixel"
        )
    return int(array.reshape(()))


def _read_example(dataset: Any, row: int, seed: Any, key: int, where: str) -> np.ndarray:
    seed(key)
    return as_array(item_of(dataset, row, where).example, f"{where} item {row}")


def _join(items: list[np.ndarray]) -> np.ndarray:
    """[b, H, W, C], [b, F] or int64 [b, T], in memory of its own."""
    batch = np.stack([item[None] if item.ndim == 2 else item for item in items])
    if is_token(batch.dtype):
        return batch.astype(np.int64, copy=False)
    return np.ascontiguousarray(batch.transpose(0, 2, 3, 1)) if batch.ndim == 4 else batch


def _full_shape(example: np.ndarray) -> tuple[int, ...]:
    """The shape with channels, which grey images may come without."""
    return (1, *example.shape) if example.ndim == 2 else example.shape


def check_alike(example: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    if _full_shape(example) != shape or example.dtype != dtype:
        raise UserError(
            f"{where} is {example.dtype} of shape {list(example.shape)}, the first is {dtype} of {list(shape)};"
            " make them all alike, with a transform that resizes or converts"
        )


def check_repeatable(dataset: Any, seed: Any, key: int, example: np.ndarray, label: Any, where: str) -> None:
    """The same key must give the same example, or runs could not be resumed; and labels, which are read once, must not
    change with random transforms."""
    if not np.array_equal(_read_example(dataset, 0, seed, key, where), example, equal_nan=example.dtype.kind == "f"):
        raise UserError(
            f"{where} item 0 differs each time it is read, and the seed has no effect on it: let its transforms draw "
            "from the generators of torch, numpy or random, or give list(dataset) to fix the items"
        )
    for attempt in range(8 if isinstance(label, np.ndarray) else 0):
        seed(keyed.derive("moved", attempt))
        if not np.array_equal(as_label(item_of(dataset, 0, where).label, f"{where} item 0"), label):
            raise UserError(
                f"{where} item 0 has another label each time it is read, by random transforms: labels are read once, "
                "so leave out of the dataset what changes them"
            )
