"""Datasets that fit in memory: numpy arrays or torch tensors, checked once and then only indexed."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.data.augmentation import PADDINGS, Mirror, augment, draw_places
from mheads.data.data_section import DataOptions, as_default
from mheads.data.readers.image_files import pixels_of
from mheads.data.splits import SplitDefaults, TargetRows
from mheads.data.targets import COLUMN, WAYS, as_float32
from mheads.data.value_range import ValueRange, measure_range


@dataclass(frozen=True, eq=False, kw_only=True)  # arrays have no truth value to compare by
class PaddedSplit(SplitDefaults):
    """Examples with side inputs by name. `pad`, `padding` and `mirror` say how images are augmented when they are read
    with seeds: zeros or its reflection around the raw image, a random crop of the original size, mirrored half of the
    time."""

    pad: int = 0
    padding: str = "zeros"
    mirror: Mirror = False
    side: dict[str, np.ndarray] = field(default_factory=dict)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        side = {name: torch.from_numpy(array[rows]) for name, array in self.side.items()}
        return TargetRows(torch.from_numpy(self.targets[rows]), side)

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        free = (2 * self.pad, 2 * self.pad)
        return torch.from_numpy(draw_places(seeds, free, self.mirror)) if self.pad or self.mirror else None

    def pad_mean(self, mean: np.ndarray) -> np.ndarray:
        return np.pad(mean, ((self.pad,) * 2, (self.pad,) * 2, (0, 0)), PADDINGS[self.padding]) if self.pad else mean

    def without_augmentation(self) -> Self:
        return replace(self, pad=0, mirror=False)


@dataclass(frozen=True, eq=False)
class ArraySplit(PaddedSplit):
    """Examples in one array, images [N, H, W, C], vectors [N, F] or tokens [N, T], and their targets."""

    examples: np.ndarray
    targets: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        *space, channels = self.examples.shape[1:]
        return (channels, *space)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw examples [b, ...]: uint8 NHWC, float NCHW (a view of NHWC memory), vectors [b, F], or tokens [b, T]."""
        return augment(self.examples[rows], seeds, pad=self.pad, mirror=self.mirror, padding=self.padding)

    def part(self, rows: slice) -> Self:
        side = {name: array[rows] for name, array in self.side.items()}
        return replace(self, examples=self.examples[rows], targets=self.targets[rows], side=side)

    def survey(self, where: str) -> ValueRange:
        return measure_range(self.examples, where)

    def checksum(self) -> bytes:
        digest = hashlib.sha256(repr((self.examples.dtype.str, self.examples.shape)).encode())
        digest.update(np.ascontiguousarray(self.targets).data)
        digest.update(np.ascontiguousarray(self.examples).data)
        digest_side(digest, self.side)
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Unlabelled(PaddedSplit):
    """Raw examples without targets, as `Split.read` gives them: what a run predicts."""

    raw: torch.Tensor

    @property
    def targets(self) -> np.ndarray:
        return np.zeros(len(self.raw), np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.shape[1:])

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        return self.raw[rows]


def with_augmentation(split: Any, options: DataOptions) -> Any:
    """The split with images moved and mirrored in training."""
    where, pad, mirror, padding = options.name, options.pad, options.mirror, options.padding
    reason = ""
    if len(split.shape) != 3:
        reason = f"are for images, but an example is {split.shape[0]} numbers or tokens"
    elif split.targets.ndim == 3:
        reason = "would move the images and not the classes of their pixels"
    if (pad or mirror) and reason:
        raise UserError(
            f"{where}: data.pad={pad} and data.mirror={mirror} {reason}; give {as_default('pad', 'mirror')}"
        )
    if padding == "reflect" and len(split.shape) == 3 and pad >= min(split.shape[1:]):
        raise UserError(
            f"{where}: data.pad is {pad}, but images of {split.shape[1]} x {split.shape[2]} pixels can be reflected "
            f"by less than {min(split.shape[1:])}; give a smaller one, or data.padding=zeros"
        )
    return replace(split, pad=pad, mirror=mirror, padding=padding)


def as_split(examples: Any, labels: Any, where: str, side: Any = None) -> ArraySplit:
    """Checked examples, labels and side inputs, images turned to NHWC; `where` names them in messages.

    Labels stay what they are, names too: `targets.pose_targets` decides what is to be learned of them.
    """
    x, y = as_examples(examples, where), as_targets(labels, where)
    if y.shape[:1] != x.shape[:1]:
        raise UserError(f"{where}: {len(x)} examples but labels of shape {list(y.shape)}; give one label per example")
    return ArraySplit(x, y, side=as_side(side, len(x), where))


def as_side(side: Any, count: int | None, where: str) -> dict[str, np.ndarray]:
    """Side inputs by name, each with one row per example; with `count` None, those of a single example."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        raise UserError(f"{where}: side inputs are a {type(side).__name__}; give a dict of arrays by name")
    if "counts" in side:
        raise UserError(f"{where}: side input 'counts': that name is taken; give it another")
    arrays = {}
    for name, values in side.items():
        what = f"{where}: side input {name!r}"
        array = stack_arrays(values, what)
        if array.dtype.kind not in "biuf":
            raise UserError(f"{what} has dtype {array.dtype}; give numbers")
        if count is not None and array.shape[:1] != (count,):
            raise UserError(f"{what} has shape {list(array.shape)} for {count} examples; give each one row")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"{what} holds NaN or infinity; take these rows out")
        dtype = np.dtype(np.float32) if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
        arrays[name] = np.ascontiguousarray(array, dtype)
    return arrays


def digest_side(digest: Any, side: Mapping[str, np.ndarray]) -> None:
    for name, array in sorted(side.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)


def as_examples(examples: Any, where: str) -> np.ndarray:
    """Images [N, H, W, C], vectors [N, F] or tokens [N, T], checked; copied only if the memory layout must change.

    Integers of 32 or 64 bits are tokens, int64 from here on; uint8 and floats are pixels and numbers.
    """
    x = stack_arrays(examples, f"{where} examples")
    if x.ndim == 2 and is_token(x.dtype) and x.shape[1]:
        return np.ascontiguousarray(x, np.int64)
    if x.dtype != np.uint8 and x.dtype.newbyteorder("=") not in (np.float16, np.float32, np.float64):
        raise UserError(
            f"{where} examples have dtype {x.dtype} and shape {list(x.shape)}; convert them to uint8 or float32, or "
            "give tokens, int64 [N, T]"
        )
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        volumes = (
            "; volumes go as vectors, x.reshape(len(x), -1), to a network that begins with "
            f"nn.Unflatten(1, {tuple(x.shape[1:])})"
        )
        raise UserError(
            f"{where} examples have shape {list(x.shape)}; give images [N, C, H, W] or [N, H, W], vectors [N, F], or "
            f"tokens, int64 [N, T]{volumes if x.ndim == 5 else ''}"
        )
    sides_alike = x.ndim == 4 and (x.shape[1] == x.shape[2] or x.dtype == np.uint8)
    if sides_alike and min(x.shape[1:3]) > 4 and x.shape[3] in (1, 3, 4):
        raise UserError(
            f"{where} examples have shape {list(x.shape)}, which looks like [N, H, W, C]; give [N, C, H, W],"
            " as x.transpose(0, 3, 1, 2) does"
        )
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("="))


def is_token(dtype: np.dtype) -> bool:
    return dtype.kind == "i" and dtype.itemsize >= 4


def as_targets(labels: Any, where: str) -> np.ndarray:
    """Class numbers, int64 [N], or names, str [N]; numbers to be learned, float32 [N, ...]; or several for each
    example: uint8 where they are bools or bytes, int64 where they are larger."""
    y = stack_arrays(labels, f"{where} labels")
    if y.dtype.kind in "US" and y.ndim == 1:
        return y.astype(str, copy=False)
    if y.dtype.kind in "iu" and y.ndim <= 1:
        return y.astype(np.int64, copy=False)
    if y.dtype.kind in "biu" and y.ndim in (2, 3) and 0 not in y.shape[1:]:
        return y.astype(np.uint8 if y.dtype.itemsize == 1 and y.dtype.kind != "i" else np.int64, copy=False)
    if y.dtype.kind == "f" and 1 <= y.ndim <= 8 and 0 not in y.shape[1:]:
        return as_float32(y[:, None] if y.ndim == 1 else y, where)
    ways = COLUMN if y.dtype.kind in "US" and y.shape[1:] == (1,) else WAYS
    if y.dtype.kind == "b" and y.ndim == 1:
        ways = "y.astype(int) for two classes, or y[:, None] for a single yes or no (multilabel)"
    if y.dtype.kind in "biu" and y.ndim == 4 and 1 in (y.shape[1], y.shape[3]):
        plain = "y[:, 0]" if y.shape[1] == 1 else "y[..., 0]"
        ways = f"{plain}: a class for each pixel has no axis of channels, [N, H, W]"
    raise UserError(f"{where} labels have dtype {y.dtype} and shape {list(y.shape)}; give {ways}")


def stack_arrays(values: Any, what: str) -> np.ndarray:
    """One array from an array, a tensor, or a list of numbers, names, arrays, tensors or Pillow images."""
    if isinstance(values, torch.Tensor):
        return to_numpy(values)
    refuse_masked(values, what)
    try:
        if isinstance(values, (list, tuple)) and values and isinstance(values[0], Image.Image):
            array = np.stack([pixels_of(image) for image in values])
        elif isinstance(values, (list, tuple)) and values and isinstance(values[0], torch.Tensor):
            array = to_numpy(torch.stack(list(values)))
        else:
            array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"{what} are of several sizes, or not arrays ({error}); make them all alike, so that they can be stacked"
        ) from error
    if array.dtype == object:
        return _read_objects(array, what)
    if not array.dtype.isnative or any(step < 0 for step in array.strides):  # which torch does not take
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return array


def to_numpy(values: Any) -> np.ndarray:
    """An array or a tensor as an array: bfloat16, which numpy lacks, as float32, sparse tensors as dense ones."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().to_dense() if values.layout != torch.strided else values.detach()
    array: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
    return array


def refuse_masked(values: Any, what: str) -> None:
    """Raises for masked values, whose numbers mean nothing: numpy.asarray would take the numbers and drop the mask."""
    for part in values if isinstance(values, list | tuple) else (values,):
        if isinstance(part, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(part).sum())):
            raise UserError(
                f"{what}: {count} of {part.size} values of a masked array are masked; fill them, as x.filled(0) does, "
                "or leave their rows out"
            )


def _read_objects(array: np.ndarray, what: str) -> np.ndarray:
    """The names or numbers of an array of objects, as tables of mixed columns are read."""
    if array.ndim == 0:
        raise UserError(f"{what} are {short(array.item())}: give an array, a tensor, or a list of such")
    kinds = {type(value) for value in array.flat}
    for kind, dtype in ((str, str), (numbers.Integral, np.int64), (numbers.Real, np.float64)):
        if kinds and bool not in kinds and all(issubclass(each, kind) for each in kinds):
            return array.astype(dtype)
    if any(issubclass(each, np.ndarray | torch.Tensor | list | tuple) for each in kinds):
        raise UserError(f"{what} are an array of objects; stack equally sized arrays into one with numpy.stack")
    others = ((i, value) for i, value in np.ndenumerate(array) if value is True or not isinstance(value, numbers.Real))
    place, value = next(others, ((), None))
    raise UserError(
        f"{what} are objects, not numbers: at {list(place)} there is {short(value)}; encode names as numbers, one-hot "
        "for example, and fill what is missing"
    )
