"""Pictures of classes and examples, as images and as data URIs."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
import torch
from PIL import Image

from mheads.common.errors import UserError
from mheads.data.catalog import names_examples
from mheads.problems import is_single_label
from mheads.report.figures.figure import PALETTE
from mheads.runs.read_run import Record
from mheads.training.build_from_config import load_data

EXAMPLES = 20_000  # that are looked at, of all classes together
VALUES = 2**24  # that the examples of a class have at most
LEAST = 20  # examples of each class all the same


def picture_classes(record: Record, kind: str) -> np.ndarray:
    """A picture of each class, uint8 [C, H, W, 3], from its training examples.

    mean: the mean image; typical: the example nearest to it.
    """
    problem = record.data.problem
    if not is_single_label(problem) or len(record.data.shape) != 3 or not names_examples(record.config.data):
        raise UserError("no images of them are at hand")
    train = load_data(record.config).train
    labels, num_classes = problem.group(torch.from_numpy(np.array(train.targets))).numpy(), len(problem.groups)
    most = max(LEAST, min(EXAMPLES // num_classes, VALUES // math.prod(train.shape)))
    pictures = np.full((num_classes, *train.shape[1:], 3), 90, np.uint8)  # grey, of a class without examples
    for label in range(num_classes):
        rows = np.flatnonzero(labels == label)[:most]
        if len(rows):
            images = as_images(raw := train.read(rows, None))
            mean = images.mean(0)
            chosen = mean if kind == "mean" else images[np.square(images - mean).sum((1, 2, 3)).argmin()]
            pictures[label] = brighten(chosen, images, raw.is_floating_point())
    return pictures


def as_images(raw: torch.Tensor) -> np.ndarray:
    """Raw examples as float32 [N, H, W, channels]."""
    return (raw.permute(0, 2, 3, 1) if raw.is_floating_point() else raw).numpy().astype(np.float32)


def brighten(chosen: np.ndarray, images: np.ndarray, floats: bool) -> np.ndarray:
    """Images [..., H, W, channels] as uint8 [..., H, W, 3], as bright as the largest value in `images` allows."""
    low, high = (0.0, 255.0) if not floats else (float(images.min()), float(images.max()))
    if not floats and images.max() <= 32:  # such as the digits, which go to 16
        high = float(images.max())
    bright = (255 * (chosen - low) / max(high - low, 1e-12)).clip(0, 255).astype(np.uint8)
    return bright[..., :3] if bright.shape[-1] >= 3 else np.repeat(bright[..., :1], 3, axis=-1)


def plain_colours(count: int) -> np.ndarray:
    """A colour for each class that has no picture."""
    colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTE[:7]]
    return np.array([np.full((16, 16, 3), colours[c % len(colours)], np.uint8) for c in range(count)])


def encode_image(image: np.ndarray, most: int = 64) -> str:
    """An image uint8 [H, W, 3] as a PNG in a data URI, at most so many pixels wide and high."""
    small = Image.fromarray(image)
    small.thumbnail((most, most))
    content = io.BytesIO()
    small.save(content, "PNG", optimize=True)
    return encode_png(content.getvalue())


def encode_png(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
