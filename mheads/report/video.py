"""`mheads video`: how the members of a run came to own their classes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.data.catalog import DATASETS
from mheads.data.splits import Split
from mheads.problems import is_single_label
from mheads.report.figures.figures import PALETTE
from mheads.report.figures.video import RATE, check_file, ownership_frames, write_video
from mheads.runs.record import Record
from mheads.training.build_from_config import load_data

PICTURES = ("typical", "mean")
EXAMPLES = 20_000  # that are looked at, of all classes together
VALUES = 2**24  # that the examples of a class have at most
LEAST = 20  # examples of each class all the same


def video(path: Path, output: Path | None, pictures: str, seconds: float, watch: Watcher) -> Path:
    """Writes the video of a run, by default ownership.mp4 in its folder; returns where it is."""
    if pictures not in PICTURES:
        raise UserError(f"--pictures {pictures}: there are {' and '.join(PICTURES)}")
    record = Record.read(path)
    output = output or path / "ownership.mp4"
    check_file(output)
    if not record.finished:
        watch.warn(f"{path} is not finished: this shows it up to iteration {record.iteration:,}")
    moments, counts = record.learned()
    count = max(2, round(seconds * RATE))
    if not len(moments):
        raise UserError(f"{path} has recorded nothing of its classes yet: let it train on")
    try:
        shown = class_pictures(record, pictures, watch)
    except UserError as error:  # who owned which class is known without the data
        watch.warn(f"the classes of {path} are shown as colours: {error}")
        shown = plain_colours(len(groups(record)))
    frames = ownership_frames(moments, counts, shown, groups(record), count)
    with watch.evaluating(count) as advance:
        write_video(output, frames, count, advance)
    return output


def groups(record: Record) -> tuple[str, ...]:
    return record.data.problem.groups


def class_pictures(record: Record, kind: str, watch: Watcher) -> np.ndarray:
    """A picture of each class, uint8 [C, H, W, 3], from its training examples; plain colours where there are none.

    mean: the mean image; typical: the example nearest to it.
    """
    names = groups(record)
    problem, shape = record.data.problem, record.data.shape
    if not is_single_label(problem) or len(shape) != 3 or record.config.data.name not in DATASETS:
        watch.warn(f"{record.folder.path}: no images of its classes are at hand, so they are shown as colours")
        return plain_colours(len(names))
    train = load_data(record.config).train
    labels = problem.group(torch.from_numpy(np.array(train.targets))).numpy()
    grey = np.full((*train.shape[1:], 3), 90, np.uint8)
    most = max(LEAST, min(EXAMPLES // len(names), VALUES // math.prod(train.shape)))
    rows = [np.flatnonzero(labels == label)[:most] for label in range(len(names))]
    return np.stack([_picture(train, own, kind, grey) for own in rows])


def plain_colours(count: int) -> np.ndarray:
    colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTE[:7]]
    return np.array([np.full((16, 16, 3), colours[c % len(colours)], np.uint8) for c in range(count)])


def _picture(split: Split, rows: np.ndarray, kind: str, absent: np.ndarray) -> np.ndarray:
    if not len(rows):
        return absent
    raw = split.read(rows, None)
    images = (raw.permute(0, 2, 3, 1) if raw.is_floating_point() else raw).numpy().astype(np.float32)
    mean = images.mean(0)
    chosen = mean if kind == "mean" else images[np.square(images - mean).sum((1, 2, 3)).argmin()]
    return shown(chosen, images, raw.is_floating_point())


def shown(chosen: np.ndarray, images: np.ndarray, floats: bool) -> np.ndarray:
    """Images [..., H, W, channels] as uint8 [..., H, W, 3], brightened as `images` allow."""
    low, high = (0.0, 255.0) if not floats else (float(images.min()), float(images.max()))
    if not floats and images.max() <= 32:  # such as the digits, which go to 16
        high = float(images.max())
    grey = (255 * (chosen - low) / max(high - low, 1e-12)).clip(0, 255).astype(np.uint8)
    return grey[..., :3] if grey.shape[-1] >= 3 else np.repeat(grey[..., :1], 3, axis=-1)
