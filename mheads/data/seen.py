"""The range of the raw examples that training saw, so that later ones are brought to it, or refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from mheads.errors import UserError


@dataclass(frozen=True)
class Seen:
    """Kind (uint8 or float) and range of the raw training examples."""

    kind: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{'uint8' if self.kind == 'uint8' else 'floats'} from {self.low:g} to {self.high:g}"

    def check(self, given: Seen, what: str) -> None:
        """Refuses examples that cannot be brought to what training saw, and warns of values far from it.

        Trained on uint8: uint8, or floats that can be pixels. Trained on floats: floats, or uint8 if they were from 0
        to 1 (see `convert`).
        """
        said = f"{what}: {given}, but the run was trained on {self}"
        low, high = given.low, given.high
        if given.kind == "float" and self.kind == "uint8":
            if low < 0 or high > 255:
                raise UserError(f"{said}; give the raw pixels, 0 to 255")
            if 0 < high <= 1 < self.high:
                raise UserError(f"{said}; give the raw pixels, such as (x * {self.high:g}).round().astype('uint8')")
        elif given.kind == "uint8" and self.kind == "float":
            if not self.from_zero_to_one:
                raise UserError(f"{said}; bring them to that range as its training examples were, as float32")
            low, high = low / 255, high / 255
        width = max(self.high - self.low, 1e-12)
        far = low < self.low - width or high > self.high + width
        no_pixels = self.kind == "float" and self.low >= 0 and self.high >= 100 and 0 < high <= 1
        if far or no_pixels:
            warnings.warn(f"{said}: answers so far from it mean little; scale them as in training", stacklevel=4)

    def convert(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw examples as `Split.read` gives them; uint8 divided by 255 where training saw floats from 0 to 1."""
        if raw.is_floating_point() or self.kind == "uint8":
            return raw
        raw = raw.to(torch.float32) / 255
        return raw.permute(0, 3, 1, 2) if raw.ndim == 4 else raw  # uint8 images come NHWC, float images NCHW

    @property
    def from_zero_to_one(self) -> bool:
        return self.low >= 0 and self.high <= 1


def survey(examples: np.ndarray, where: str) -> Seen:
    """Kind and range of examples [N, ...]; refuses NaN and infinity."""
    if examples.dtype == np.uint8:
        return Seen("uint8", *(float(f(examples, initial=i)) for f, i in ((np.min, 255), (np.max, 0))))
    rows = examples.reshape(len(examples), int(np.prod(examples.shape[1:])))
    return of_rows(rows.min(1), rows.max(1), where)


def of_rows(lows: np.ndarray, highs: np.ndarray, where: str) -> Seen:
    """Like `survey`, from the lowest and highest value of each row, where NaN and infinity show."""
    bad = np.flatnonzero(~(np.isfinite(lows) & np.isfinite(highs)))
    if len(bad):
        raise UserError(
            f"{where} hold NaN or infinity: {len(bad)} of {len(lows)} rows do, the first is row {bad[0]}; "
            "take these rows out, or give their values a number (numpy.nan_to_num)"
        )
    if not len(lows):
        return Seen("float", 0.0, 0.0)
    return Seen("float", float(lows.min()), float(highs.max()))
