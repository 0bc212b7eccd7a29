"""Regions that may hold an object: by selective search, or read from files."""

from __future__ import annotations

import hashlib
import io
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mheads.common import atomic_files, packed_arrays, seeds
from mheads.common.errors import DamageError, UserError, named, warn
from mheads.data.detection.voc import Scene
from mheads.data.file_digests import ProgressLine, digest_files
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
    if source == SEARCH:
        found = search(scenes, complain)
    else:
        found = from_file(Path(source.replace("{part}", part)), scenes, names)
    return [_clean(boxes, scene, complain)[:most] for boxes, scene in zip(found, scenes, strict=True)]


def _clean(boxes: np.ndarray, scene: Scene, complain: Callable[[str], None]) -> np.ndarray:
    """Inside of the image, each once, in their order."""
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
    keys = [key[:32] for key in _digests(scenes)]
    first = {key: i for i, key in reversed(list(enumerate(keys)))}  # copies of an image are searched as one
    kept: dict[str, np.ndarray] = {}
    damaged = []
    for key in first:
        try:
            kept[key] = _kept(folder / f"{key}.npy")
        except DamageError as error:
            damaged.append(error)
        except ABSENT:
            pass
    if damaged:
        warn(f"{damaged[0]} ({len(damaged):,} such files): searched again and replaced")
    if len(kept) < len(first):
        kept |= _search_all(folder, {key: scenes[i] for key, i in first.items() if key not in kept})
    found = []
    for scene, key in zip(scenes, keys, strict=True):
        boxes = np.unique(kept[key], axis=0)
        if not len(boxes):
            complain(f"{scene.path} cannot be searched for regions: OpenCV does not decode it, or it is a line")
        found.append(boxes[seeds.numpy_generator("proposals", key).permutation(len(boxes))])
    return found


def _search_all(folder: Path, missing: dict[str, Scene]) -> dict[str, np.ndarray]:
    """Boxes of images by their keys, which are kept in the folder."""
    opencv()
    shown = ProgressLine(len(missing), "selective search")
    order = list(missing)
    random.Random(os.getpid()).shuffle(order)  # ranks that begin together share the images among them

    def one(key: str, work: Path) -> np.ndarray:
        target = folder / f"{key}.npy"
        try:
            boxes = _kept(target)  # another rank may have been faster
        except (*ABSENT, DamageError):
            boxes = _search(missing[key])
            _keep(target, boxes, work)
        shown.advance()
        return boxes

    try:
        with storing(folder), scratch(folder) as work, ThreadPoolExecutor(cores(), "search") as pool:
            folder.mkdir(exist_ok=True)
            return dict(zip(order, pool.map(partial(one, work=work), order), strict=True))
    finally:
        shown.close()


def _keep(target: Path, boxes: np.ndarray, work: Path) -> None:
    """Writes a file that is whole or absent; whoever else writes it writes the same."""
    content = io.BytesIO()
    np.save(content, boxes)
    made = work / target.name
    made.write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
    made.replace(target)


def _kept(path: Path) -> np.ndarray:
    """The boxes [P, 4] in a file of the cache."""
    try:
        content = path.read_bytes()
        whole = hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
        file = io.BytesIO(content)
        boxes: np.ndarray = np.load(file, allow_pickle=False)
        # Earlier versions wrote no checksum.
        if (whole or not file.read()) and boxes.dtype.kind == "i" and boxes.shape[1:] == (4,):
            return boxes
    except ABSENT:
        raise
    except Exception as error:  # numpy may raise anything on a damaged header
        raise DamageError(path, f"is damaged ({named(error)})") from error
    raise DamageError(path, "is damaged")


def _digests(scenes: Sequence[Scene]) -> list[str]:
    if not scenes:
        return []
    return digest_files(scenes[0].path.parent, [scene.path.name for scene in scenes], cores())


def _search(scene: Scene) -> np.ndarray:
    """Boxes [P, 4]; none of an image that cannot be searched."""
    cv2 = opencv()
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


def opencv() -> Any:
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


def from_file(path: Path, scenes: Sequence[Scene], names: Sequence[str] = ()) -> list[np.ndarray]:
    """Those in an .npz file, an array [P, 4] (left, top, right, bottom; from 0) under the name of each image, or in a
    .mat file of the Fast R-CNN release."""
    try:
        if path.suffix == ".mat":
            atomic_files.open_file(path).close()  # SciPy says nothing of a file that is missing
            found = _release(path, names or [scene.name for scene in scenes])
        elif path.suffix == ".npz":
            with packed_arrays.opened(path) as arrays:
                found = dict(arrays)
        else:
            raise UserError(
                f"data.regions.proposals = {path}: give {SEARCH}, an .npz file with an array of boxes for each image, "
                "or a .mat file of the Fast R-CNN release; {part} in the name stands for trainval and test"
            )
    except (OSError, ValueError, NotImplementedError) as error:  # SciPy does not read MATLAB's version 7.3
        raise UserError(f"data.regions.proposals = {path} cannot be read: {error}") from error
    return [_boxes(found.get(scene.name), path, scene.name) for scene in scenes]


def _boxes(found: np.ndarray | None, path: Path, name: str) -> np.ndarray:
    if found is None:
        return np.empty((0, 4))  # the reader of regions says so
    if found.ndim != 2 or found.shape[1:] != (4,) or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise UserError(
            f"{path}: {name} is {found.dtype} {list(found.shape)}; give finite numbers [P, 4] for its boxes"
        )
    return found.astype(float)


def _release(path: Path, listed: Sequence[str]) -> dict[str, np.ndarray]:
    """Cells `boxes` of (top, left, bottom, right), counted from 1, and `images`, their names.

    Without names they are in the order of the list."""
    from scipy.io import loadmat

    content = loadmat(path)
    if "boxes" not in content:
        raise UserError(f"{path} has no cell array 'boxes'; it has {', '.join(k for k in content if k[0] != '_')}")
    boxes = content["boxes"].ravel()
    if "images" in content:
        names = ["".join(map(str, np.ravel(cell))) for cell in content["images"].ravel()]
    else:
        names = list(listed)
    if len(names) != len(boxes):
        named = "in its 'images'" if "images" in content else "in the list, and it has no 'images'"
        raise UserError(f"{path} has boxes of {len(boxes)} images, and there are {len(names)} {named}")
    return {name: _from_one(path, name, cell) for name, cell in zip(names, boxes, strict=True)}


def _from_one(path: Path, name: str, cell: Any) -> np.ndarray:
    """(left, top, right, bottom), counted from 0; no boxes are 0 x 0 in MATLAB."""
    boxes = np.asarray(cell, float)
    if not boxes.size:
        return np.empty((0, 4))
    if boxes.ndim != 2 or boxes.shape[1] < 4:
        raise UserError(f"{path}: the boxes of {name} are {list(boxes.shape)}; give (top, left, bottom, right) of each")
    return boxes[:, [1, 0, 3, 2]] - 1
