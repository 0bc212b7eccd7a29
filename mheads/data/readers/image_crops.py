"""Images that are decoded when they are read, and cropped: what folders, lists and LMDBs of images share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.data.augmentation import Mirror, draw_mirrored, draw_places, uniforms
from mheads.data.splits import SplitDefaults


@dataclass(frozen=True, eq=False, kw_only=True)  # arrays have no truth value to compare by
class CroppedSplit(SplitDefaults, ABC):
    """Read with seeds, the crop is at random and, with `mirror`, mirrored half of the time; without seeds, or without
    `augment`, it is the centre."""

    mirror: Mirror = False
    augment: bool = True

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a crop."""

    @property
    def dtype(self) -> type:
        return np.uint8

    @property
    @abstractmethod
    def free(self) -> tuple[int, int]:
        """How many pixels the crop can move down and right in a whole image."""

    @abstractmethod
    def decode(self, row: int, chance: tuple[float, float] | None) -> np.ndarray:
        """The crop of an example [H, W, C]; `chance` in [0, 1) says how far down and right it lies, None the centre."""

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        """Raw images [b, H, W, C], or floats [b, C, H, W], decoded by as many threads as there are cores."""
        channels, height, width = self.shape
        out: np.ndarray = np.empty((len(rows), height, width, channels), self.dtype)
        chances, flips = None, np.zeros(len(rows), bool)
        if seeds is not None and self.augment:
            chances = uniforms(np.asarray(seeds), 3).T
            flips = draw_mirrored(seeds, chances[:, 2], self.mirror)

        def decode(i: int) -> None:
            pixels = self.decode(int(rows[i]), None if chances is None else (chances[i, 0], chances[i, 1]))
            out[i] = pixels[:, ::-1] if flips[i] else pixels

        run_in_threads(decode, len(rows))
        raw = torch.from_numpy(out)
        return raw.permute(0, 3, 1, 2).contiguous() if raw.is_floating_point() else raw

    def places(self, seeds: np.ndarray) -> torch.Tensor | None:
        """The places of the crops in the whole image, that of the mean image.

        In an image with a longer side, a crop that lies a third of the way, say, is put at a third of the square.
        """
        if not self.augment or not (self.mirror or any(self.free)):
            return None
        return torch.from_numpy(draw_places(seeds, self.free, self.mirror))

    def without_augmentation(self) -> Self:
        return replace(self, augment=False)


def choose_crop(resize: int, crop: int | None) -> int:
    """The side of the square that is cut out of images whose shorter side is `resize`."""
    if crop is not None and not 1 <= crop <= resize:
        raise UserError(f"data.crop is {crop} but images are resized to data.resize={resize}; give 1 to {resize}")
    return resize if crop is None else crop


def shuffle_examples(kind: str, names: Sequence[Any], labels: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Names and labels in an order that is always the same and mixed, since files are often sorted by class: the first
    n, or the last n, are a fair sample."""
    mixed = seeds.numpy_generator(kind, "order").permutation(len(names))
    return np.array(names, dtype=object)[mixed], np.array(labels, np.int64)[mixed]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_threads(decode: Callable[[int], None], count: int) -> None:
    """Calls it for 0 to count - 1, on as many threads as there are cores; raises the first error."""

    def share(start: int) -> None:
        # A share of the images per thread: a task for each would spend as long on handing it over.
        for i in range(start, count, cores()):
            decode(i)

    for _ in _pool().map(share, range(cores())):
        pass  # taking the results raises


@cache
def _pool() -> ThreadPoolExecutor:
    """One pool for the process; Pillow releases the interpreter while it decodes and resizes."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode")
