"""Regions that may hold an object: by selective search, or read from files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from mheads import files, seeds
from mheads.data.cache import cache_dir
from mheads.data.contents import Shown, digests
from mheads.data.folder import cores
from mheads.data.voc import Scene
from mheads.errors import UserError

SEARCH = "selective_search"
WIDTH = 500  # that wider images are brought to before they are searched, as in VOC


def of_scenes(source: str, scenes: Sequence[Scene], part: str, most: int) -> list[np.ndarray]:
    """Boxes int32 [P, 4] for each scene, at most `most`, the first ones."""
    found = search(scenes) if source == SEARCH else from_file(Path(source.replace("{part}", part)), scenes)
    return [_clean(boxes, scene)[:most] for boxes, scene in zip(found, scenes, strict=True)]


def _clean(boxes: np.ndarray, scene: Scene) -> np.ndarray:
    """Inside of the image, each once, in their order."""
    limits = np.array([scene.truth.width, scene.truth.height] * 2) - 1
    boxes = np.clip(np.round(boxes), 0, limits).astype(np.int32)
    boxes = boxes[(boxes[:, 2:] >= boxes[:, :2]).all(1)]
    _, first = np.unique(boxes, axis=0, return_index=True)
    return boxes[np.sort(first)]


def search(scenes: Sequence[Scene]) -> list[np.ndarray]:
    """What selective search finds (Uijlings et al., 2013; OpenCV's fast mode); each image is searched once, ever."""
    folder = cache_dir() / "proposals" / f"{SEARCH}-{WIDTH}"
    targets = [folder / f"{key[:32]}.npy" for key in _digests(scenes)]
    missing = [i for i, target in enumerate(targets) if not target.is_file()]
    if missing:
        opencv()
        folder.mkdir(parents=True, exist_ok=True)
        shown = Shown(len(missing), "selective search")

        def one(i: int) -> None:
            found = _search(scenes[i])
            files.write_atomically(targets[i], lambda file: np.save(file, found))
            shown.advance()

        try:
            with ThreadPoolExecutor(cores(), thread_name_prefix="search") as pool:
                for _ in pool.map(one, missing):
                    pass  # taking the results raises
        finally:
            shown.close()
    return [np.load(target, allow_pickle=False) for target in targets]


def _digests(scenes: Sequence[Scene]) -> list[str]:
    if not scenes:
        return []
    return digests(scenes[0].path.parent, [scene.path.name for scene in scenes], cores())


def _search(scene: Scene) -> np.ndarray:
    """Boxes [P, 4] in a random order of their own: OpenCV's comes from a generator that cannot be seeded."""
    cv2 = opencv()
    # Boxes of objects are in the pixels as they are stored: the image must not be turned as its camera was held.
    image = cv2.imread(str(scene.path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise UserError(f"{scene.path} cannot be decoded by OpenCV: save it as a JPEG or PNG")
    ratio = min(1.0, WIDTH / image.shape[1])
    if round(ratio * image.shape[0]) < 1:
        raise UserError(
            f"{scene.path} is {image.shape[1]} x {image.shape[0]}, too long to be searched for regions: cut it"
        )
    if ratio < 1:
        image = cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_AREA)
    searching = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    searching.setBaseImage(image)
    searching.switchToSelectiveSearchFast()
    left, top, width, height = np.unique(searching.process(), axis=0).T / ratio
    found = np.round(np.stack([left, top, left + width - 1, top + height - 1], 1)).astype(np.int32)
    return found[seeds.numpy_generator("proposals", scene.path.name).permutation(len(found))]


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


def from_file(path: Path, scenes: Sequence[Scene]) -> list[np.ndarray]:
    """Those in an .npz file, an array [P, 4] (left, top, right, bottom; from 0) under the name of each image, or in a
    .mat file of the Fast R-CNN release."""
    try:
        if path.suffix == ".mat":
            path.open("rb").close()  # SciPy says nothing of a file that is missing
            found = _release(path, scenes)
        elif path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        else:
            raise UserError(
                f"data.regions.proposals = {path}: give {SEARCH}, an .npz file with an array of boxes for each image, "
                "or a .mat file of the Fast R-CNN release; {part} in the name stands for trainval and test"
            )
    except (OSError, ValueError, NotImplementedError, BadZipFile) as error:  # SciPy does not read MATLAB's version 7.3
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


def _release(path: Path, scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """Cells `boxes` of (top, left, bottom, right), counted from 1, and `images`, their names where they are given."""
    from scipy.io import loadmat

    content = loadmat(path)
    if "boxes" not in content:
        raise UserError(f"{path} has no cell array 'boxes'; it has {', '.join(k for k in content if k[0] != '_')}")
    boxes = content["boxes"].ravel()
    if "images" in content:
        names = [str(np.ravel(cell)[0]) for cell in content["images"].ravel()]
    elif len(boxes) == len(scenes):
        names = [scene.name for scene in scenes]
    else:
        raise UserError(f"{path} has boxes of {len(boxes)} images and no names, and there are {len(scenes)} images")
    return {name: _from_one(np.asarray(cell, float)) for name, cell in zip(names, boxes, strict=True)}


def _from_one(boxes: np.ndarray) -> np.ndarray:
    """(left, top, right, bottom), counted from 0; no boxes are 0 x 0 in MATLAB."""
    return boxes[:, [1, 0, 3, 2]] - 1 if boxes.size else np.empty((0, 4))
