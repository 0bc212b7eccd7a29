"""Annotated images in the layout of PASCAL VOC.

path/Annotations/*.xml     path/JPEGImages/*.jpg     path/ImageSets/Main/trainval.txt and test.txt
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from mheads import boxes as box
from mheads.data.images import SUFFIXES, UNREADABLE
from mheads.errors import UserError
from mheads.problems.average_precision import Truth

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
FLAGS = {"0": False, "1": True, "false": False, "true": True, "unspecified": False}  # as tools write them
SHOWN = 10  # complaints; of the others only how many there are


@dataclass(frozen=True)
class Scene:
    """An image and the objects in it."""

    name: str
    path: Path
    truth: Truth


class Complaints:
    """Takes what is wrong with files: stops at the first if `strict`, else shows some at the end; the rest goes on."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.said: list[str] = []

    def __call__(self, message: str) -> None:
        if self.strict:
            raise UserError(message)
        self.said.append(message)

    def show(self) -> None:
        if self.said:
            more = len(self.said) - SHOWN
            lines = [*self.said[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
            hint = "(data.regions.strict=true stops at the first)"
            things = f"{len(self.said)} thing{'' if len(self.said) == 1 else 's'} in the annotations"
            warnings.warn("\n  ".join([f"{things} {hint}:", *lines]), stacklevel=2)
            self.said = []


def find_devkit(path: Path) -> Path:
    """The folder with Annotations and JPEGImages: this one, or the only such one inside."""
    inside = sorted(found.parent for found in path.glob("*/Annotations")) if path.is_dir() else []
    if (path / "Annotations").is_dir():
        return path
    if len(inside) == 1:
        return inside[0]
    what = f"holds several: {', '.join(found.name for found in inside)}" if inside else "has none"
    raise UserError(
        f"{path}: data.path names a folder with Annotations, JPEGImages and ImageSets/Main, as VOCdevkit/VOC2007 is, "
        f"and this one {what}"
    )


def read_scenes(
    root: Path, part: str, classes: Sequence[str], complain: Complaints, limit: int | None = None
) -> list[Scene]:
    """The images that a list names, or the first of them; those that cannot be used are complained of and left out."""
    listing = root / "ImageSets" / "Main" / f"{part}.txt"
    try:
        lines = listing.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{listing} cannot be read ({error}): it lists the images of {part}, a name in a line"
        ) from None
    names = [line.split()[0] for line in lines if line.strip()]
    if doubles := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{listing} names {doubles[0]} twice: list each image once")
    found = [_read(root, name, classes, complain) for name in names[:limit]]
    return [scene for scene in found if scene is not None]


def _read(root: Path, name: str, classes: Sequence[str], complain: Complaints) -> Scene | None:
    path = _image(root / "JPEGImages", name)
    if path is None:
        complain(f"{root / 'JPEGImages' / name}.jpg is missing: the image is left out")
        return None
    try:
        with Image.open(path) as image:
            width, height = image.size
    except UNREADABLE as error:
        complain(f"{path} is no image that can be read ({error}): left out")
        return None
    file = root / "Annotations" / f"{name}.xml"
    try:
        tree = ElementTree.parse(file).getroot()
    except OSError:
        complain(f"{file} is missing: the image is left out")
        return None
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the latter two: an encoding it does not know
        complain(f"{file} is not XML that can be read ({error}): the image is left out")
        return None
    said = tuple((tree.findtext(f"size/{side}") or "").strip() for side in ("width", "height"))
    if said not in {(str(width), str(height)), ("0", "0"), ("", "")}:
        complain(
            f"{file} says that the image has {said[0]} x {said[1]} pixels, and it has {width} x {height}: its boxes "
            "are taken as they stand; were they drawn before the image was turned or scaled?"
        )
    found: list[tuple[np.ndarray, int, bool]] = []
    for number, node in enumerate(tree.findall("object"), 1):
        try:
            one = _object(node, classes, width, height)
        except ValueError as error:
            complain(f"{file}, object {number}: {error}")
            continue
        if one.clipped:
            complain(f"{file}, object {number}: its box reaches beyond the image of {width} x {height}; cut to it")
        found.append((one.box, one.class_number, one.difficult))
    truth = Truth(
        np.array([b for b, _, _ in found], float).reshape(-1, 4),
        np.array([c for _, c, _ in found], np.int64),
        np.array([d for _, _, d in found], bool),
        width,
        height,
    )
    return Scene(name, path, truth)


def _image(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}{suffix}" for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES)))
    return next((path for path in candidates if path.is_file()), None)


@dataclass(frozen=True)
class _Object:
    box: np.ndarray
    class_number: int
    difficult: bool
    clipped: bool


def _object(node: ElementTree.Element, classes: Sequence[str], width: int, height: int) -> _Object:
    name = (node.findtext("name") or "").strip()
    if name not in classes:
        raise ValueError(f"the class {name!r} is not known (data.regions.objects names them); left out")
    corners = []
    for key in ("xmin", "ymin", "xmax", "ymax"):
        text = node.findtext(f"bndbox/{key}")
        try:
            corners.append(float(text or "") - 1)  # VOC counts from 1
        except ValueError:
            raise ValueError(f"{key} of its box is {text!r}; left out") from None
    corner = np.array(corners)
    inside = box.clip(corner, width, height)
    outside = (corner[:2] > [width - 1, height - 1]).any() or (corner[2:] < 0).any()
    if not np.isfinite(corner).all() or (corner[2:] < corner[:2]).any() or outside:
        raise ValueError(f"its box {[x + 1 for x in corners]} is no part of an image of {width} x {height}; left out")
    flag = (node.findtext("difficult") or "0").strip().lower() or "0"
    if flag not in FLAGS:
        raise ValueError(f"difficult is {flag!r}, neither 0 nor 1; left out")
    return _Object(inside, 1 + classes.index(name), FLAGS[flag], bool((inside != corner).any()))
