"""Random crops and mirrors of whole batches, each example by its own seed.

They depend neither on the batch that an example is in nor on the thread that reads it, so cutting batches in another
way changes no pixel.
"""

from __future__ import annotations

import numpy as np
import torch


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


def augment(batch: np.ndarray, seeds: np.ndarray | None, *, pad: int, mirror: bool) -> torch.Tensor:
    """Raw examples as `Split.read` gives them, from vectors [b, F] or images [b, H, W, C], which may be overwritten."""
    if seeds is not None and (pad or mirror):
        batch = crop_and_mirror(batch, np.asarray(seeds), pad=pad, mirror=mirror)
    raw = torch.from_numpy(batch)
    return raw.permute(0, 3, 1, 2) if raw.ndim == 4 and raw.is_floating_point() else raw


def crop_and_mirror(images: np.ndarray, seeds: np.ndarray, *, pad: int, mirror: bool) -> np.ndarray:
    """Each image moved by up to `pad` pixels, zeros coming in at the edges, and mirrored half of the time.

    images: [b, H, W, C] of any dtype, owned by the caller and possibly overwritten; returns the same shape.
    """
    down, right, flip = draw_places(seeds, (2 * pad, 2 * pad), mirror).T
    if pad:
        images = _shift(images, down, right, pad)
    if mirror:
        chosen = np.flatnonzero(flip)
        images[chosen] = images[chosen, :, ::-1]
    return images


def draw_places(seeds: np.ndarray, free: tuple[int, int], mirror: bool) -> np.ndarray:
    """How far down and right each crop lies, from 0 to `free`, and whether it is mirrored: int64 [b, 3]."""
    *chances, flip = uniforms(np.asarray(seeds), 3)
    moved = [(chance * (most + 1)).astype(int) for chance, most in zip(chances, free, strict=True)]
    return np.stack([*moved, (flip < 0.5) & mirror], axis=1)


def _shift(images: np.ndarray, down: np.ndarray, right: np.ndarray, pad: int) -> np.ndarray:
    """The H x W windows at (down, right), each in 0..2*pad, of the zero-padded images."""
    b, h, w, c = images.shape
    padded = np.zeros((b, h + 2 * pad, w + 2 * pad, c), images.dtype)
    padded[:, pad : pad + h, pad : pad + w] = images
    windows = np.lib.stride_tricks.sliding_window_view(padded, (h, w), axis=(1, 2))
    windows = windows.transpose(0, 1, 2, 4, 5, 3)  # [b, 2*pad+1, 2*pad+1, H, W, C]
    return np.ascontiguousarray(windows[np.arange(b), down, right])
