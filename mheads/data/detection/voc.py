"""Annotated images in the layout of PASCAL VOC.

path/Annotations/*.xml     path/JPEGImages/*.jpg     path/ImageSets/Main/trainval.txt and test.txt
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from mheads.common.atomic_files import open_file, read_text
from mheads.common.errors import UserError, warn
from mheads.data.file_digests import show_progress
from mheads.data.readers.cache import cache_dir, store
from mheads.data.readers.image_crops import run_in_threads
from mheads.data.readers.image_files import SUFFIXES, UnreadableError, eight_bits, open_image
from mheads.problems import boxes as box
from mheads.problems.average_precision import Truth

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
FLAGS = {"0": False, "1": True, "false": False, "true": True, "unspecified": False}  # as tools write them
UNKNOWN = "is not known (data.regions.objects names them); left out"
SHOWN = 10  # complaints; of the others only how many there are


@dataclass(frozen=True)
class Scene:
    """An image and the objects in it."""

    name: str
    path: Path
    truth: Truth


class Complaints:
    """Collects what is wrong with files and warns of it at the end; raises an error at the first if `strict`.

    Objects of unknown classes, of which there may be many, are counted. A file has all, where some are not shown.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.messages: list[str] = []
        self.unknown: dict[str, list[str]] = {}

    def __call__(self, message: str) -> None:
        if self.strict:
            raise UserError(message)
        self.messages.append(message)

    def add_unknown_class(self, name: str, where: str) -> None:
        if self.strict:
            raise UserError(f"{where}: the class {name!r} {UNKNOWN}")
        self.unknown.setdefault(name, []).append(where)

    def show(self) -> None:
        counted = [
            f"{where[0]}{f', and {len(where) - 1} more' if len(where) > 1 else ''}: the class {name!r} {UNKNOWN}"
            for name, where in self.unknown.items()
        ]
        lines = [*counted, *self.messages]
        if lines:
            things = f"{len(lines)} thing{'' if len(lines) == 1 else 's'} in the annotations"
            more = [f"and {len(lines) - SHOWN} more{_write_lines(lines)}"] if len(lines) > SHOWN else []
            hint = "(data.regions.strict=true stops at the first)"
            warn("\n  ".join([f"{things} {hint}:", *lines[:SHOWN], *more]))
        self.messages, self.unknown = [], {}


def _write_lines(lines: Sequence[str]) -> str:
    """Writes the lines to a file in the cache; says where that is, or nothing if there is no place for it."""
    try:
        text = "\n".join(lines) + "\n"
        target = cache_dir() / "annotations" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
        store(target, text.encode())
    except (OSError, UserError):
        return ""
    return f": all of them are in {target}"


def find_devkit(path: Path) -> Path:
    """The folder with Annotations and JPEGImages: this one, or the only such one inside."""
    if (path / "Annotations").is_dir():
        return path
    inside = sorted(folder.parent for folder in path.glob("*/Annotations")) if path.is_dir() else []
    if len(inside) == 1:
        return inside[0]
    what = f"holds several: {', '.join(folder.name for folder in inside)}" if inside else "has none"
    raise UserError(
        f"{path}: data.path names a folder with Annotations, JPEGImages and ImageSets/Main, as "
        f"VOCdevkit/VOC2007 is, and this one {what}"
    )


def read_list(root: Path, part: str, complain: Complaints) -> list[str]:
    """The names of the images of a part; lists of a class say after each name whether it shows one: -1, 0 or 1."""
    listing = root / "ImageSets" / "Main" / f"{part}.txt"
    try:
        lines = read_text(listing, "utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{listing} cannot be read ({error}): it lists the images of {part}, a name in a line"
        ) from None
    names = [re.sub(r"\s+(-1|0|1)$", "", line.strip()) for line in lines if line.strip()]
    for name in [name for name, count in Counter(names).items() if count > 1]:
        complain(f"{listing} names {name} more than once: it is taken once")
    return list(dict.fromkeys(names))


def read_scenes(root: Path, names: Sequence[str], classes: Sequence[str], complain: Complaints) -> list[Scene]:
    """These images; those that cannot be used are complained of and left out."""
    paths = [_image(root / "JPEGImages", name) for name in names]
    sizes: list[tuple[int, int] | str] = [""] * len(names)

    def look(i: int) -> None:
        path = paths[i]
        sizes[i] = "is missing" if path is None else _size(path)
        advance()

    with show_progress(len(names), "looking at the images") as advance:
        run_in_threads(look, len(names))
    scenes = []
    for name, path, size in zip(names, paths, sizes, strict=True):
        if path is None or isinstance(size, str):
            complain(f"{path or root / 'JPEGImages' / f'{name}.jpg'} {size}: the image is left out")
        elif (truth := _truth(root / "Annotations" / f"{_bare(name)}.xml", size, classes, complain)) is not None:
            scenes.append(Scene(_bare(name), path, truth))
    return scenes


def _size(path: Path) -> tuple[int, int] | str:
    """Width and height of an image that can be decoded to its end, or what is wrong with it."""
    try:
        with open_image(path) as image:
            size = image.size
            image.draft("RGB", (1, 1))  # a JPEG at an eighth, which takes as many bytes and less time
            eight_bits(image, grey=False)
            return size
    except UnreadableError as error:
        return f"cannot be decoded ({error.__cause__})"


def _truth(file: Path, size: tuple[int, int], classes: Sequence[str], complain: Complaints) -> Truth | None:
    width, height = size
    try:
        with open_file(file) as stream:
            tree = ElementTree.parse(stream).getroot()
    except OSError as error:
        missing = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        complain(f"{file} {missing}: the image is left out")
        return None
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the latter two: an encoding it does not know
        complain(f"{file} is not XML that can be read ({error}): the image is left out")
        return None
    stated = tuple((tree.findtext(f"size/{side}") or "").strip() for side in ("width", "height"))
    if tuple(text.removesuffix(".0") for text in stated) not in {(str(width), str(height)), ("0", "0"), ("", "")}:
        complain(
            f"{file} says that the image has {stated[0]} x {stated[1]} pixels, and it has {width} x {height}: its "
            "boxes are taken as they stand; were they drawn before the image was turned or scaled?"
        )
    objects: list[tuple[np.ndarray, int, bool]] = []
    for number, node in enumerate(tree.findall("object"), 1):
        where, name = f"{file}, object {number}", (node.findtext("name") or "").strip()
        if name not in classes:
            complain.add_unknown_class(name, where)
            continue
        try:
            corners, difficult = _read_object(node, width, height)
        except ValueError as error:
            complain(f"{where}: {error}; left out")
            continue
        inside = box.clip(corners, width, height)
        if (inside != corners).any():
            complain(f"{where}: its box reaches beyond the image of {width} x {height}; cut to it")
        objects.append((inside, 1 + classes.index(name), difficult))
    boxes, numbers, flags = zip(*objects, strict=True) if objects else ((), (), ())
    return Truth(
        np.array(boxes, float).reshape(-1, 4), np.array(numbers, np.int64), np.array(flags, bool), width, height
    )


def _read_object(node: ElementTree.Element, width: int, height: int) -> tuple[np.ndarray, bool]:
    """The corners of its box, counted from 0, and whether it is difficult."""
    corners = np.zeros(4)
    for i, key in enumerate(("xmin", "ymin", "xmax", "ymax")):
        text = node.findtext(f"bndbox/{key}")
        try:
            corners[i] = float(text or "") - 1  # VOC counts from 1
        except ValueError:
            raise ValueError(f"{key} of its box is {text!r}") from None
    outside = (corners[:2] > [width - 1, height - 1]).any() or (corners[2:] < 0).any()
    if not np.isfinite(corners).all() or (corners[2:] < corners[:2]).any() or outside:
        raise ValueError(f"its box {(corners + 1).tolist()} is no part of an image of {width} x {height}")
    flag = (node.findtext("difficult") or "0").strip().lower() or "0"
    if flag not in FLAGS:
        raise ValueError(f"difficult is {flag!r}, neither 0 nor 1")
    return corners, FLAGS[flag]


def _image(folder: Path, name: str) -> Path | None:
    written = [folder / name] if _bare(name) != name else []
    candidates = (folder / f"{_bare(name)}{suffix}" for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES)))
    return next((path for path in (*written, *candidates) if path.is_file()), None)


def _bare(name: str) -> str:
    """A name without the suffix of an image."""
    return name.rpartition(".")[0] if name.lower().endswith(SUFFIXES) else name
