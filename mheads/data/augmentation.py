"""Random crops and mirrors of whole batches, each example by its own seed.

They depend neither on the batch that an example is in nor on the thread that reads it, so cutting batches in another
way changes no pixel.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

Mirror = bool | Literal["alternating"]
PADDINGS: dict[str, Literal["constant", "reflect"]] = {"zeros": "constant", "reflect": "reflect"}  # in numpy's words


def uniforms(seeds: np.ndarray, count: int) -> np.ndarray:
    """Numbers in [0, 1), float64 [count, b]: column j depends on seeds[j] alone.

    SplitMix64: a counter through a bijective mixer, which numpy runs over all seeds at once where a generator
    per example would cost more than the image.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        steps = np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(_mix(seeds.astype(np.uint64))[None, :] + steps)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = bits ^ (bits >> np.uint64(31))
    return mixed


def augment(
    batch: np.ndarray, seeds: np.ndarray | None, *, pad: int, mirror: Mirror, padding: str = "zeros"
) -> torch.Tensor:
    """Raw examples as `Split.read` gives them, from vectors [b, F] or images [b, H, W, C], which may be overwritten."""
    if seeds is not None and (pad or mirror):
        batch = crop_and_mirror(batch, np.asarray(seeds), pad=pad, mirror=mirror, padding=padding)
    raw = torch.from_numpy(batch)
    return raw.permute(0, 3, 1, 2) if raw.ndim == 4 and raw.is_floating_point() else raw


def crop_and_mirror(
    images: np.ndarray, seeds: np.ndarray, *, pad: int, mirror: Mirror, padding: str = "zeros"
) -> np.ndarray:
    """Each image moved by up to `pad` pixels, zeros or its reflection coming in at the edges, and mirrored half of the
    time.

    images: [b, H, W, C] of any dtype, owned by the caller and possibly overwritten; returns the same shape.
    """
    down, right, flip = draw_places(seeds, (2 * pad, 2 * pad), mirror).T
    if pad:
        images = _shift(images, down, right, pad, padding)
    if mirror:
        chosen = np.flatnonzero(flip)
        images[chosen] = images[chosen, :, ::-1]
    return images


def draw_places(seeds: np.ndarray, free: tuple[int, int], mirror: Mirror) -> np.ndarray:
    """How far down and right each crop lies, from 0 to `free`, and whether it is mirrored: int64 [b, 3]."""
    *chances, flip = uniforms(np.asarray(seeds), 3)
    moved = [(chance * (most + 1)).astype(int) for chance, most in zip(chances, free, strict=True)]
    return np.stack([*moved, draw_mirrored(seeds, flip, mirror)], axis=1)


def draw_mirrored(seeds: np.ndarray, chances: np.ndarray, mirror: Mirror) -> np.ndarray:
    """Which examples are mirrored, bool [b]: by chance, or, alternating, by the last bit of their seeds."""
    alternating = mirror == "alternating"
    mirrored: np.ndarray = np.asarray(seeds) % 2 == 1 if alternating else (chances < 0.5) & bool(mirror)
    return mirrored


def alternate(seeds: np.ndarray, rows: np.ndarray, epochs: np.ndarray, key: int) -> np.ndarray:
    """Seeds [b] whose last bit is drawn once for each row, and is the other one in every other epoch."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        first = uniforms(rows.astype(np.uint64) + np.uint64(key), 1)[0] < 0.5
    alternated: np.ndarray = seeds - seeds % 2 + (first + epochs) % 2
    return alternated


def _shift(images: np.ndarray, down: np.ndarray, right: np.ndarray, pad: int, padding: str) -> np.ndarray:
    """The H x W windows at (down, right), each in 0..2*pad, of the padded images."""
    b, h, w, _ = images.shape
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), PADDINGS[padding])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (h, w), axis=(1, 2))
    windows = windows.transpose(0, 1, 2, 4, 5, 3)  # [b, 2*pad+1, 2*pad+1, H, W, C]
    return np.ascontiguousarray(windows[np.arange(b), down, right])
