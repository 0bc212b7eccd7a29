"""The range of the raw examples that training saw, so that later ones are converted to it, or raise an error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mheads.common.errors import UserError, warn

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ValueRange:
    """Kind (uint8, float or tokens) and range of the raw training examples."""

    kind: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{'floats' if self.kind == 'float' else self.kind} from {self.low:g} to {self.high:g}"

    def check(self, other: ValueRange, what: str) -> None:
        """Raises an error for examples that cannot be converted to what training saw, and warns of values far from it.

        Trained on uint8: uint8, or floats that can be pixels. Trained on floats: floats, or uint8 if they were from 0
        to 1 (see `convert`). Trained on tokens: tokens of that range, since a network may not know others.
        """
        comparison = f"{what}: {other}, but training saw {self}"
        low, high = other.low, other.high
        if other.kind != self.kind and "tokens" in (other.kind, self.kind):
            raise UserError(f"{comparison}; give {'tokens, as int64' if self.kind == 'tokens' else 'uint8 or float32'}")
        if self.kind == "tokens":
            if high > self.high:
                raise UserError(f"{comparison}; the network never saw tokens above that range, so replace them")
            return
        if other.kind == "float" and self.kind == "uint8":
            if low < 0 or high > 255:
                raise UserError(f"{comparison}; give the raw pixels, 0 to 255")
            if 0 < high <= 1 < self.high:
                raise UserError(
                    f"{comparison}; give the raw pixels, such as (x * {self.high:g}).round().astype('uint8')"
                )
        elif other.kind == "uint8" and self.kind == "float":
            if not self.from_zero_to_one:
                raise UserError(f"{comparison}; bring them to that range as its training examples were, as float32")
            if other.has_only_0_and_1:
                warn(
                    f"{comparison}, and uint8 is divided by 255 here: if these are no pixels, give them as float32, "
                    "x.astype('float32')"
                )
            low, high = low / 255, high / 255
        width = max(self.high - self.low, 1e-12)
        far = low < self.low - width or high > self.high + width
        no_pixels = self.kind == "float" and self.low >= 0 and self.high >= 100 and 0 < high <= 1
        if far or no_pixels:
            warn(f"{comparison}: answers so far from it mean little; scale them as in training")

    def convert(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw examples as `Split.read` gives them; uint8 divided by 255 where training saw floats from 0 to 1."""
        if raw.is_floating_point() or self.kind != "float":
            return raw
        raw = raw.to(torch.float32) / 255
        return raw.permute(0, 3, 1, 2) if raw.ndim == 4 else raw  # uint8 images come NHWC, float images NCHW

    @property
    def has_only_0_and_1(self) -> bool:
        """Whether these are bytes that hardly are pixels: flags, masks or one-hot rows."""
        return self.kind == "uint8" and self.high == 1

    @property
    def from_zero_to_one(self) -> bool:
        return self.low >= 0 and self.high <= 1


def measure_range(examples: np.ndarray, where: str) -> ValueRange:
    """Kind and range of examples [N, ...]; raises an error for NaN, infinity and tokens below 0."""
    rows = examples.reshape(len(examples), int(np.prod(examples.shape[1:])))
    return measure_rows(rows.min(1), rows.max(1), where)


def measure_rows(lows: np.ndarray, highs: np.ndarray, where: str) -> ValueRange:
    """Like `survey`, from the lowest and highest value of each row, where NaN and infinity show."""
    if lows.dtype.kind in "iu":
        if (lows < 0).any():
            row = int(np.flatnonzero(lows < 0)[0])
            raise UserError(
                f"{where}: row {row} holds the token {lows[row]}; give tokens from 0 on, 0 for "
                "padding, or, if these are numbers, floats (x.astype('float32'))"
            )
        kind = "uint8" if lows.dtype == np.uint8 else "tokens"
        return ValueRange(kind, float(lows.min(initial=255)), float(highs.max(initial=0)))
    bad = np.flatnonzero(~(np.isfinite(lows) & np.isfinite(highs)))
    if len(bad):
        raise UserError(
            f"{where} hold NaN or infinity: {len(bad)} of {len(lows)} rows do, the first is row {bad[0]}; "
            "take these rows out, or give their values a number (numpy.nan_to_num)"
        )
    if not len(lows):
        return ValueRange("float", 0.0, 0.0)
    largest = max(float(highs.max()), -float(lows.min()))
    if largest > LARGEST:
        raise UserError(
            f"{where} hold values as large as {largest:.3g}, and training computes in float32, whose largest is "
            f"{LARGEST:.2g}: divide them by a constant before"
        )
    return ValueRange("float", float(lows.min()), float(highs.max()))
