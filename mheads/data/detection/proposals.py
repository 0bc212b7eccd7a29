"""Regions that may hold an object: by selective search, or read from files."""

from __future__ import annotations

import hashlib
import io
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mheads.common import atomic_files, packed_arrays, seeds
from mheads.common.errors import DamageError, UserError, warn
from mheads.data.detection.voc import Scene
from mheads.data.file_digests import digest_files, show_progress
from mheads.data.readers.cache import cache_dir, recover, scratch, storing
from mheads.data.readers.image_crops import cores

SEARCH = "selective_search"
DIGEST = hashlib.sha256().digest_size  # of the bytes before, at the end of a file that is kept
ABSENT = (FileNotFoundError, NotADirectoryError)
WIDTH = 500  # that wider images are brought to before they are searched, as in VOC


def propose_regions(
    source: str,
    scenes: Sequence[Scene],
    part: str,
    most: int,
    complain: Callable[[str], None],
    names: Sequence[str] = (),
) -> list[np.ndarray]:
    """Boxes int32 [P, 4] for each scene, at most `most`, the first ones. `names`: of all images of the part."""
    searched = source == SEARCH
    boxes = (
        search(scenes, complain) if searched else read_proposals(Path(source.replace("{part}", part)), scenes, names)
    )
    return [_clean(own, scene, complain)[:most] for own, scene in zip(boxes, scenes, strict=True)]


def _clean(boxes: np.ndarray, scene: Scene, complain: Callable[[str], None]) -> np.ndarray:
    """The boxes inside of the image, each once, in their order."""
    width, height = scene.truth.width, scene.truth.height
    limits = np.array([width, height] * 2) - 1
    outside = (boxes[:, :2] > limits[:2]).any(1) | (boxes[:, 2:] < 0).any(1)
    if outside.any():
        complain(
            f"{scene.path}: {outside.sum()} of its {len(boxes)} proposals lie outside of its {width} x {height} pixels "
            "and are left out; were they made for another size?"
        )
    boxes = np.clip(np.round(boxes[~outside]), 0, limits).astype(np.int32)
    boxes = boxes[(boxes[:, 2:] >= boxes[:, :2]).all(1)]
    _, first = np.unique(boxes, axis=0, return_index=True)
    return boxes[np.sort(first)]


def search(scenes: Sequence[Scene], complain: Callable[[str], None]) -> list[np.ndarray]:
    """What selective search finds (Uijlings et al., 2013; OpenCV's fast mode); each image is searched once, ever.

    In a random order that the image alone decides: OpenCV's comes from a generator that cannot be seeded.
    """
    folder = cache_dir() / "proposals" / f"{SEARCH}-{WIDTH}"
    recover(folder)
    names = [scene.path.name for scene in scenes]
    keys = [digest[:32] for digest in digest_files(scenes[0].path.parent, names, cores())] if scenes else []
    boxes: dict[str, np.ndarray] = {}
    damaged = []
    for key in set(keys):
        try:
            boxes[key] = _read_boxes(folder / f"{key}.npy")
        except DamageError as error:
            damaged.append(error)
        except ABSENT:
            pass
    if damaged:
        warn(f"{damaged[0]} ({len(damaged):,} such files): searched again and replaced")
    missing = {key: scene for key, scene in zip(keys, scenes, strict=True) if key not in boxes}  # copies count as one
    if missing:
        boxes |= _search_all(folder, missing)
    ordered = []
    for scene, key in zip(scenes, keys, strict=True):
        different = np.unique(boxes[key], axis=0)
        if not len(different):
            complain(f"{scene.path} cannot be searched for regions: OpenCV does not decode it, or it is a line")
        ordered.append(different[seeds.numpy_generator("proposals", key).permutation(len(different))])
    return ordered


def _search_all(folder: Path, missing: dict[str, Scene]) -> dict[str, np.ndarray]:
    """Boxes of images by their keys, which are kept in the folder."""
    import_opencv()
    order = list(missing)
    random.Random(os.getpid()).shuffle(order)  # ranks that begin together share the images among them

    def search_one(key: str) -> np.ndarray:
        target = folder / f"{key}.npy"
        try:
            boxes = _read_boxes(target)  # another rank may have been faster
        except (*ABSENT, DamageError):
            boxes = _search(missing[key])
            content = io.BytesIO()
            np.save(content, boxes)
            (work / target.name).write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
            (work / target.name).replace(target)  # whoever else writes it writes the same
        advance()
        return boxes

    with (
        storing(folder),
        scratch(folder) as work,
        show_progress(len(missing), "selective search") as advance,
        ThreadPoolExecutor(cores(), "search") as pool,
    ):
        folder.mkdir(exist_ok=True)
        return dict(zip(order, pool.map(search_one, order), strict=True))


def _read_boxes(path: Path) -> np.ndarray:
    """The boxes [P, 4] in a file of the cache, which ends with a checksum."""
    content = path.read_bytes()
    if hashlib.sha256(content[:-DIGEST]).digest() != content[-DIGEST:]:
        raise DamageError(path, "is damaged")
    boxes: np.ndarray = np.load(io.BytesIO(content[:-DIGEST]), allow_pickle=False)
    return boxes


def _search(scene: Scene) -> np.ndarray:
    """Boxes [P, 4]; none of an image that cannot be searched."""
    cv2 = import_opencv()
    # Boxes of objects are in the pixels as they are stored: the image must not be turned as its camera was held.
    image = cv2.imread(str(scene.path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    ratio = 1.0 if image is None else min(1.0, WIDTH / image.shape[1])
    if image is None or round(ratio * image.shape[0]) < 1:
        return np.empty((0, 4), np.int32)
    if ratio < 1:
        image = cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_AREA)
    searching = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    searching.setBaseImage(image)
    searching.switchToSelectiveSearchFast()
    left, top, width, height = np.unique(searching.process(), axis=0).T / ratio
    return np.round(np.stack([left, top, left + width - 1, top + height - 1], 1)).astype(np.int32)


def import_opencv() -> Any:
    """OpenCV with its contributed modules."""
    try:
        import cv2

        cv2.ximgproc.segmentation  # noqa: B018  # the plain package lacks it
    except (ImportError, AttributeError) as error:
        raise UserError(
            "selective search needs OpenCV with its contributed modules: pip install 'mheads[detect]', or give "
            "proposals of your own, data.regions.proposals=FILE.npz"
        ) from error
    return cv2


def read_proposals(path: Path, scenes: Sequence[Scene], names: Sequence[str] = ()) -> list[np.ndarray]:
    """Those in an .npz file, an array [P, 4] (left, top, right, bottom; from 0) under the name of each image, or in a
    .mat file of the Fast R-CNN release."""
    if path.suffix not in (".mat", ".npz"):
        raise UserError(
            f"data.regions.proposals = {path}: give {SEARCH}, an .npz file with an array of boxes for each image, "
            "or a .mat file of the Fast R-CNN release; {part} in the name stands for trainval and test"
        )
    try:
        if path.suffix == ".mat":
            boxes = _read_release(path, names or [scene.name for scene in scenes])
        else:
            with packed_arrays.open_arrays(path) as arrays:
                boxes = dict(arrays)
    except (OSError, ValueError, NotImplementedError) as error:  # SciPy does not read MATLAB's version 7.3
        raise UserError(f"data.regions.proposals = {path} cannot be read: {error}") from error
    # The reader of regions reports images without boxes.
    return [_check_boxes(boxes.get(scene.name, np.empty((0, 4))), path, scene.name) for scene in scenes]


def _check_boxes(boxes: np.ndarray, path: Path, name: str) -> np.ndarray:
    if boxes.ndim != 2 or boxes.shape[1:] != (4,) or boxes.dtype.kind not in "iuf" or not np.isfinite(boxes).all():
        raise UserError(
            f"{path}: {name} is {boxes.dtype} {list(boxes.shape)}; give finite numbers [P, 4] for its boxes"
        )
    return boxes.astype(float)


def _read_release(path: Path, listed: Sequence[str]) -> dict[str, np.ndarray]:
    """Cells `boxes` of (top, left, bottom, right), counted from 1, and `images`, their names.

    Without names they are in the order of the list."""
    from scipy.io import loadmat

    atomic_files.open_file(path).close()  # SciPy says nothing of a file that is missing
    content = loadmat(path)
    if "boxes" not in content:
        raise UserError(f"{path} has no cell array 'boxes'; it has {', '.join(k for k in content if k[0] != '_')}")
    cells, where, names = content["boxes"].ravel(), "in the list, and it has no 'images'", list(listed)
    if "images" in content:
        where = "in its 'images'"
        names = ["".join(map(str, np.ravel(cell))) for cell in content["images"].ravel()]
    if len(names) != len(cells):
        raise UserError(f"{path} has boxes of {len(cells)} images, and there are {len(names)} {where}")
    boxes = {}
    for name, cell in zip(names, cells, strict=True):
        corners = np.asarray(cell, float)
        if corners.size and (corners.ndim != 2 or corners.shape[1] < 4):
            raise UserError(
                f"{path}: the boxes of {name} are {list(corners.shape)}; give (top, left, bottom, right) of each"
            )
        boxes[name] = corners[:, [1, 0, 3, 2]] - 1 if corners.size else np.empty((0, 4))  # MATLAB's empty is 0 x 0
    return boxes
