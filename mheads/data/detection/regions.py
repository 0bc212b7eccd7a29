"""Regions of annotated images: what a detector learns from, as Fast R-CNN draws them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from mheads.common.errors import UserError
from mheads.data.augmentation import Mirror, draw_mirrored, uniforms
from mheads.data.data_section import RegionOptions
from mheads.data.detection import proposals
from mheads.data.detection.voc import CLASSES, Complaints, Scene, find_devkit, read_list, read_scenes
from mheads.data.file_digests import digest_files
from mheads.data.readers.image_crops import cores, run_in_threads
from mheads.data.readers.image_files import eight_bits, open_image
from mheads.data.splits import SplitDefaults, TargetRows
from mheads.problems import Detection, Problem
from mheads.problems import boxes as box
from mheads.problems.detection import BACKGROUND

WHOLE = 256  # side of the squares that the pixels' mean is measured on
COMMON = np.array([0.1, 0.1, 0.2, 0.2])  # deviations of box targets where too few are there to measure


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare by
class RegionSplit(SplitDefaults):
    """Images with regions. In training, some regions of each, drawn by the seed, which also mirrors half of them; else
    all that are proposed. `numbers` are those of the images among all that the problem knows."""

    scenes: Sequence[Scene]
    proposed: Sequence[np.ndarray]
    numbers: np.ndarray
    drawing: RegionOptions
    means: np.ndarray  # [1 + C, 4] of what turns regions into boxes, for each class
    deviations: np.ndarray
    mirror: Mirror = False
    training: bool = True

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self.drawing.short_side, self.drawing.long_side)

    @property
    def targets(self) -> np.ndarray:
        """The class of most objects of each image, 0 where there is none."""
        counts = [np.bincount(scene.truth.classes, minlength=1) for scene in self.scenes]
        return np.array([count.argmax() for count in counts], np.int64)

    def _flips(self, seeds: np.ndarray | None, count: int) -> list[bool]:
        """Which of the examples are mirrored."""
        if seeds is None or not self.training or not self.mirror:
            return [False] * count
        return list(draw_mirrored(seeds, uniforms(np.asarray(seeds), 1)[0], self.mirror))

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Any:
        """Pixels uint8 [b, H, W, 3], zeros right of and below the smaller ones, and the sizes [b, 2] of the images."""
        images: list[Any] = [None] * len(rows)
        flips = self._flips(seeds, len(rows))

        def decode(i: int) -> None:
            scene = self.scenes[rows[i]]
            scale = self.drawing.scale(scene.truth.width, scene.truth.height)
            width, height = (max(1, round(side * scale)) for side in (scene.truth.width, scene.truth.height))
            pixels = decode_image(scene.path, (width, height))
            images[i] = pixels[:, ::-1] if flips[i] else pixels

        run_in_threads(decode, len(rows))
        sizes = np.array([pixels.shape[:2] for pixels in images]).reshape(-1, 2)
        out = np.zeros((len(rows), *sizes.max(0, initial=1), 3), np.uint8)
        for i, pixels in enumerate(images):
            out[i, : pixels.shape[0], : pixels.shape[1]] = pixels
        return torch.from_numpy(out), torch.from_numpy(sizes)

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        keys = [0] * len(rows) if seeds is None else [int(seed) for seed in seeds]
        parts = [self._regions(*each) for each in zip(rows, keys, self._flips(seeds, len(rows)), strict=True)]
        regions, classes, deltas, boxes = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
        counts = torch.tensor([len(part[1]) for part in parts])
        numbers = torch.from_numpy(self.numbers[rows]).repeat_interleave(counts)
        return TargetRows((classes, deltas, boxes, numbers), {"regions": regions}, counts)

    def _regions(self, row: int, seed: int, flip: bool) -> tuple[np.ndarray, ...]:
        """Regions in pixels of the network's input, their classes, box targets, and regions in pixels of the image."""
        scene, drawing = self.scenes[row], self.drawing
        with_truth, proposed = self.training or drawing.with_objects, self.proposed[row]
        if not self.training and not len(proposed):  # an image that is measured has a region: the whole of it
            proposed = np.array([[0, 0, scene.truth.width - 1, scene.truth.height - 1]], np.int32)
        boxes, classes, deltas = label_regions(scene, proposed, drawing, with_truth)
        if self.training:
            chosen = _draw(classes, drawing, np.random.default_rng(seed))
            boxes, classes, deltas = boxes[chosen], classes[chosen], deltas[chosen]
        classes = np.maximum(classes, 0)  # in evaluation, what is neither an object nor clearly background
        if flip:
            boxes, deltas = box.mirror(boxes, scene.truth.width), deltas * [-1, 1, 1, 1]
        deltas = np.where(classes[:, None] > 0, (deltas - self.means[classes]) / self.deviations[classes], 0)
        regions = boxes * drawing.scale(scene.truth.width, scene.truth.height)
        return regions.astype(np.float32), classes, deltas.astype(np.float32), boxes.astype(np.float32)

    def part(self, rows: slice) -> Self:
        return replace(self, scenes=self.scenes[rows], proposed=self.proposed[rows], numbers=self.numbers[rows])

    def without_augmentation(self) -> Self:
        return replace(self, training=False)

    def with_statistics_of(self, problem: Detection) -> Self:
        """With box targets in the units of a problem: those of its training."""
        return replace(self, means=np.array(problem.means), deviations=np.array(problem.deviations))

    def whole(self) -> Any:
        return Squares(self)  # to be read, and no more

    def checksum(self) -> bytes:
        """A digest of images, objects and proposals."""
        if not self.scenes:
            return b""
        contents = digest_files(self.scenes[0].path.parent, [scene.path.name for scene in self.scenes], cores())
        digest = hashlib.sha256(repr(contents).encode())
        for scene, boxes in zip(self.scenes, self.proposed, strict=True):
            for array in (scene.truth.boxes, scene.truth.classes, scene.truth.difficult, boxes):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Squares:
    """The images, each brought to one size: what the mean of the pixels is measured on."""

    split: RegionSplit

    def __len__(self) -> int:
        return len(self.split)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> torch.Tensor:
        out = np.empty((len(rows), WHOLE, WHOLE, 3), np.uint8)

        def decode(i: int) -> None:
            out[i] = decode_image(self.split.scenes[rows[i]].path, (WHOLE, WHOLE))

        run_in_threads(decode, len(rows))
        return torch.from_numpy(out)


def decode_image(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """The pixels of an image, uint8 [H, W, 3], brought to (width, height)."""
    with open_image(path) as image:
        pixels = eight_bits(image, grey=False)
        return np.asarray(pixels if size is None else pixels.resize(size, Image.Resampling.BILINEAR))


def label_regions(
    scene: Scene, proposed: np.ndarray, drawing: RegionOptions, with_truth: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes [P, 4], first the objects if `with_truth`, with their classes [P] and what turns each into its object.

    The class is that of the object which a box overlaps most, if by enough, 0 for background, and -1 for what is
    neither: too far from any object to be hard, or on one that is difficult.
    """
    truth = scene.truth
    easy = ~truth.difficult
    boxes = np.concatenate([truth.boxes[easy], proposed]) if with_truth else proposed.astype(float)
    low, high = drawing.background_overlap
    if not len(truth.boxes) or not len(boxes):
        empty = np.full(len(boxes), 0 if low <= 0 else -1)
        return boxes, empty, np.zeros((len(boxes), 4))
    shared = box.overlaps(boxes, truth.boxes)
    best, most = shared.argmax(1), shared.max(1)
    background = (most >= low) & (most < high)
    foreground = most >= drawing.foreground_overlap
    classes = np.where(foreground, truth.classes[best], np.where(background, 0, -1))
    classes[(most > 0) & truth.difficult[best]] = -1
    return boxes, classes, box.encode(boxes, truth.boxes[best])


def _draw(classes: np.ndarray, drawing: RegionOptions, chance: np.random.Generator) -> np.ndarray:
    """Rows of the regions that an image gives: at most a part of objects, the rest background."""
    objects, background = np.flatnonzero(classes > 0), np.flatnonzero(classes == 0)
    count = min(len(objects), round(drawing.foreground * drawing.per_image))
    rest = min(len(background), drawing.per_image - count)
    return np.concatenate(
        [chance.choice(objects, count, replace=False), chance.choice(background, rest, replace=False)]
    ).astype(np.int64)


def box_statistics(
    scenes: Sequence[Scene], proposed: Sequence[np.ndarray], drawing: RegionOptions, classes: int, mirror: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [1 + C, 4] of what turns the regions of a class into its objects, in training.

    A class with too few has those of all, and all those that are common.
    """
    by_class: list[list[np.ndarray]] = [[] for _ in range(classes + 1)]
    for scene, boxes in zip(scenes, proposed, strict=True):
        _, numbers, deltas = label_regions(scene, boxes, drawing, with_truth=True)
        for c in np.unique(numbers[numbers > 0]):
            own = deltas[numbers == c]
            by_class[c] += [own, own * [-1, 1, 1, 1]] if mirror else [own]
    overall = _deviation([part for own in by_class for part in own], COMMON)
    means, deviations = np.zeros((classes + 1, 4)), np.tile(overall, (classes + 1, 1))
    for c, own in enumerate(by_class):
        if own:
            means[c] = np.concatenate(own).mean(0)
            deviations[c] = _deviation(own, overall)
    return means, deviations


def _deviation(parts: list[np.ndarray], otherwise: np.ndarray) -> np.ndarray:
    deviation = np.concatenate(parts).std(0) if parts else np.zeros(4)
    return deviation if (deviation > 0.01).all() else otherwise


def read_voc(
    path: Path,
    *,
    mirror: bool,
    regions: RegionOptions,
    need_test: bool,
    limit: int | None = None,
    only: str | None = None,
) -> tuple[RegionSplit, RegionSplit, Problem]:
    """Images to learn from and to test on, and the problem; with `only` test, those to test on, twice."""
    drawing, complain = regions, Complaints(regions.strict)
    classes = CLASSES if regions.objects == "voc" else tuple(regions.objects)
    check_regions(classes, drawing)
    root = find_devkit(path)
    parts: dict[str, tuple[list[Scene], list[np.ndarray]]] = {}
    for part in ("test",) if only == "test" else ("trainval", "test"):
        if part == "test" and not need_test and not (root / "ImageSets/Main/test.txt").is_file():
            parts[part] = [], []
            continue
        names = read_list(root, part, complain)
        scenes = read_scenes(root, names[:limit], classes, complain)
        boxes = proposals.propose_regions(drawing.proposals, scenes, part, drawing.most, complain, names)
        parts[part] = scenes, boxes
        if (need_test or part != "test") and scenes and not any(map(len, boxes)):
            raise UserError(
                f"data.regions.proposals = {drawing.proposals} has no region of any image of {part}; the first is "
                f"called {scenes[0].name}: are boxes given under such names?"
            )
    test = parts["test"]
    train = test if only == "test" else _select_useful(*parts["trainval"], drawing, complain)
    for scene, own in zip(*test, strict=True):
        if not len(own):
            complain(f"{scene.path} has no proposal: it is tested with the whole image as one")
    complain.show()
    if not train[0]:
        raise UserError(
            f"{root}: no image of trainval has a region to learn from; are its objects those of the classes?"
        )
    statistics = box_statistics(*train, drawing, len(classes), mirror)
    means, deviations = (tuple(tuple(map(float, row)) for row in values) for values in statistics)
    problem = Detection(classes, means, deviations, [scene.truth for scene in (*train[0], *test[0])])
    numbers = np.split(np.arange(len(problem.truths)), [len(train[0])])
    splits = [
        RegionSplit(*part, own, drawing, *statistics, mirror) for part, own in zip((train, test), numbers, strict=True)
    ]
    return splits[0], splits[1].without_augmentation(), problem


def check_regions(classes: Sequence[str], drawing: RegionOptions) -> None:
    """Raises an error for options that would teach nothing, or not what they say."""
    doubles = [name for i, name in enumerate(classes) if name in classes[:i] or name == BACKGROUND]
    if doubles or not classes:
        what = f"{doubles[0]!r} is there twice or is what regions without an object are" if doubles else "there is none"
        raise UserError(f"data.regions.objects = {list(classes)}: name each class of objects once; {what}")
    low, high = drawing.background_overlap
    if not 0 <= low < high <= 1:
        raise UserError(
            f"data.regions.background_overlap = [{low:g}, {high:g}]: give two overlaps from 0 to 1, the lower one first"
        )
    if round(drawing.foreground * drawing.per_image) < 1:
        raise UserError(
            f"data.regions.foreground = {drawing.foreground:g} of data.regions.per_image = {drawing.per_image} is less "
            "than a region: no object would be learned; raise one of them"
        )


def _select_useful(
    scenes: list[Scene], proposed: list[np.ndarray], drawing: RegionOptions, complain: Complaints
) -> tuple[list[Scene], list[np.ndarray]]:
    """The images that have a region to learn from."""
    useful = []
    for i, (scene, boxes) in enumerate(zip(scenes, proposed, strict=True)):
        if not len(scene.truth.boxes):
            complain(f"{scene.path} has no object to learn: left out of training")
        elif not (label_regions(scene, boxes, drawing, with_truth=True)[1] >= 0).any():
            complain(f"{scene.path} has no region to learn from: left out of training")
        else:
            if not len(boxes):
                complain(f"{scene.path} has no proposal: it is learned from its objects alone")
            useful.append(i)
    return [scenes[i] for i in useful], [proposed[i] for i in useful]


def region_shape(regions: RegionOptions) -> tuple[int, ...]:
    """The shape that the largest images have."""
    return (3, regions.short_side, regions.long_side)
