"""Turns raw examples into what the network takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from mheads.common.errors import UserError
from mheads.common.nested_values import Value

if TYPE_CHECKING:
    from mheads.data.splits import Source, Split

CHUNK = 500  # examples read at a time for the statistics


@dataclass(frozen=True, eq=False)  # tensors have no truth value to compare by
class Preprocess:
    """(raw * scale - mean) / std, in the memory layout that makes results reproducible.

    Raw images, mean and std are RGB; with `bgr` the network gets the channels of the result in the opposite order.

    mean, std: (C, H, W), (C, 1, 1) or (F,), in the units of the scaled values; None leaves them out. float32, or
    float64 for raw examples in float64, whose small differences would be lost otherwise. A mean image covers the
    whole images, before the crop: it is subtracted at the crop's place and mirrored with it, as Caffe does.
    """

    mean: torch.Tensor | None = None
    std: torch.Tensor | None = None
    scale: float = 1.0
    bgr: bool = False

    def __call__(self, raw: Value, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Images, uint8 NHWC or float NCHW -> `dtype` [b, C, H, W]; vectors -> `dtype` [b, F] contiguous; tokens [b, T]
        stay what they are.

        `raw` may be a pair of examples and their places (see `Split.places`); without places crops are the centre. Or
        it is a pair of images and their sizes int64 [b, 2]: then all but the largest are zero right of and below it.
        Images always come with the strides (H*W*C, 1, W*C, C). For a single channel torch calls other strides
        contiguous as well, yet picks another convolution by them, with other bits.
        """
        raw, places = raw if isinstance(raw, tuple) else (raw, None)
        if raw.dtype == torch.int64:
            tokens: torch.Tensor = raw.contiguous()
            return tokens
        raw, sizes = pixels_last(raw), None
        if places is not None and places.shape[1] == 2:
            sizes, places = places, None
            raw = raw[:, : sizes[:, 0].max(), : sizes[:, 1].max()]
        exact = dtype if dtype.itemsize >= 4 else torch.float32  # half precision is rounded once, at the end
        if self.mean is not None and self.mean.dtype == torch.float64:
            exact = torch.float64
        # A fresh tensor, because conversions such as `.to` would keep odd strides of `raw`.
        out = torch.empty(raw.shape, dtype=exact, device=raw.device).copy_(raw)
        flat = out.view(len(out), -1)
        if self.scale != 1.0:
            flat.mul_(self.scale)
        if self.mean is not None and places is not None and self.has_mean_image:
            out.sub_(_at_places(self.mean, places, out))
        elif self.mean is not None:
            flat.sub_(_flatten_like(centre(self.mean, out), out))
        if self.std is not None:
            flat.div_(_flatten_like(self.std, out))
        for i, (height, width) in enumerate(() if sizes is None else sizes.tolist()):
            out[i, height:] = 0
            out[i, :, width:] = 0
        out = out.to(dtype)
        if self.bgr:
            out = out.flip(-1)
        return out.permute(0, 3, 1, 2) if out.ndim == 4 else out

    def by_channel(self) -> Preprocess:
        """The same for images of any size: a mean image becomes its mean over the places."""
        if self.mean is None or not self.has_mean_image:
            return self
        return replace(self, mean=self.mean.double().mean((1, 2), keepdim=True).to(self.mean.dtype))

    @property
    def has_mean_image(self) -> bool:
        """Whether what is subtracted depends on the place of a pixel."""
        return self.mean is not None and self.mean.ndim == 3 and self.mean.shape[1:] != (1, 1)

    def __str__(self) -> str:
        """What the preprocessing does, in words; empty if it does nothing."""
        mean = "" if self.mean is None else "a mean image subtracted" if self.has_mean_image else "the mean subtracted"
        parts = (
            f"scaled by {self.scale:g}" if self.scale != 1 else "",
            mean,
            "divided by the standard deviation" if self.std is not None else "",
            "channels turned to BGR" if self.bgr else "",
        )
        return ", ".join(part for part in parts if part)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a run folder stores besides `scale` and `bgr`; `from_tensors` reads it back."""
        tensors = {"mean": self.mean, "std": self.std}
        return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scale: float, bgr: bool = False) -> Self:
        """The inverse of `tensors`; other names in the mapping are ignored."""
        return cls(mean=tensors.get("mean"), std=tensors.get("std"), scale=scale, bgr=bgr)


def pixels_last(raw: torch.Tensor) -> torch.Tensor:
    """Raw examples with the channels last: [b, H, W, C] or [b, F]; a view."""
    return raw.permute(0, 2, 3, 1) if raw.ndim == 4 and raw.is_floating_point() else raw


def centre(mean: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The part of a mean image under a centre crop [b, H, W, C]; other means as they are."""
    if mean.ndim < 3 or mean.shape[1:] == (1, 1):
        return mean
    (height, width), (h, w) = mean.shape[1:], out.shape[1:3]
    down, right = (height - h) // 2, (width - w) // 2
    return mean[:, down : down + h, right : right + w]


def _at_places(mean: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The mean image under each crop of `out` [b, H, W, C], mirrored where the crop is."""
    down, right, mirrored = places.to(out.device).unbind(1)
    windows = mean.to(out.device, out.dtype).unfold(1, out.shape[1], 1).unfold(2, out.shape[2], 1)  # [C, y, x, H, W]
    under = windows.permute(1, 2, 3, 4, 0)[down, right]
    return torch.where(mirrored.bool()[:, None, None, None], under.flip(2), under)


def _flatten_like(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(C, H, W), (C, 1, 1) or (F,) -> one flat row in the order of `out`, so that inner loops are long."""
    values = values.to(out.device, out.dtype)
    if values.ndim == 3:
        values = values.permute(1, 2, 0)
    return values.expand(out.shape[1:]).reshape(-1)


def fit_preprocess(train: Source, normalize: str, scale: float, limit: int | None) -> Preprocess:
    """The preprocessing that `normalize` asks for, measured on (at most `limit`, evenly spaced) examples.

    none: scaling alone. mean_image: the mean of every pixel of the whole images, as Caffe does. mean_std: mean and
    standard deviation of every channel (of every feature, for vectors).
    """
    if normalize == "none":
        return Preprocess(scale=scale)
    if normalize == "init":  # which is measured on no examples
        raise UserError(
            "data.normalize='init' is only for a config, which names the run to start from; give none, mean_image or "
            "mean_std"
        )
    count = len(train) if limit is None else min(limit, len(train))
    rows = np.arange(count) * len(train) // count
    if isinstance(train.read(rows[:1], None), tuple):  # images of several sizes
        if normalize == "mean_image":
            raise UserError("data.normalize=mean_image is for images of one size; mean_std is the mean of each channel")
        train = train.whole()
    dtype = np.float64 if train.read(rows[:1], None).dtype == torch.float64 else np.float32
    if normalize == "mean_image":
        mean = train.pad_mean(_average(train.whole(), rows) * scale)
        return Preprocess(mean=_tensor(mean.astype(dtype)), scale=scale)
    mean = _average_per_channel(train, rows)
    std = np.sqrt(_per_channel(_average(train, rows, centre=mean)))
    std[std == 0] = 1 / scale  # a constant channel becomes 0, not a division by zero
    return Preprocess(_tensor((mean * scale).astype(dtype)), _tensor((std * scale).astype(dtype)), scale)


def _average(split: Split, rows: np.ndarray, centre: np.ndarray | None = None) -> np.ndarray:
    """Mean over the examples, float64 of one example's (H, W, C) or (F,); of squares about `centre` if given."""
    total = np.zeros(())
    for raw in _chunks(split, rows):
        if centre is not None:
            raw = (raw - centre) ** 2
        total = total + raw.sum(axis=0, dtype=np.float64)
    return total / len(rows)


def _average_per_channel(split: Split, rows: np.ndarray) -> np.ndarray:
    """The mean of every channel or feature, float64; that of a constant is the constant itself.

    The sum of a constant over many examples is rounded, and a mean that is off by its last bit would leave a standard
    deviation of about 1e-15 in the place of 0.
    """
    total, low, high = np.zeros(()), np.full((), np.inf), np.full((), -np.inf)
    for raw in _chunks(split, rows):
        total = total + raw.sum(axis=0, dtype=np.float64)
        low, high = np.minimum(low, raw.min(axis=0)), np.maximum(high, raw.max(axis=0))
    low, high = _per_channel(low, np.min), _per_channel(high, np.max)
    return np.where(low == high, low, _per_channel(total / len(rows)))


def _chunks(split: Split, rows: np.ndarray) -> Iterator[np.ndarray]:
    """The raw examples, channels last, a few at a time."""
    for start in range(0, len(rows), CHUNK):
        yield pixels_last(split.read(rows[start : start + CHUNK], None)).numpy()


def _per_channel(values: np.ndarray, reduce: Callable[..., np.ndarray] = np.mean) -> np.ndarray:
    return reduce(values, axis=(0, 1), keepdims=True) if values.ndim == 3 else values


def _tensor(values: np.ndarray) -> torch.Tensor:
    """(H, W, C) -> (C, H, W) whose memory stays channels-last, as `_flatten_like` wants it."""
    tensor = torch.from_numpy(values)
    return tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor
