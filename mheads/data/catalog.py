"""The datasets by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mheads.data.arrays import with_augmentation
from mheads.data.assemble import assemble
from mheads.data.cache import cache_dir
from mheads.data.cifar import CIFAR10, CIFAR100, find_cifar, read_cifar
from mheads.data.digits import read_digits
from mheads.data.folder import STATISTICS, read_folder
from mheads.data.npz import read_npz
from mheads.data.split import Data
from mheads.errors import UserError
from mheads.problems import Classification, Problem

_CIFAR = {layout.name: layout for layout in (CIFAR10, CIFAR100)}


@dataclass(frozen=True)
class Dataset:
    """An entry of `mheads data list`."""

    name: str
    description: str
    needs_get: bool = False
    needs_path: bool = False

    @property
    def cached_at(self) -> Path | None:
        """Where `mheads data get` puts it; None for sets that are not fetched."""
        return cache_dir() / self.name if self.needs_get else None

    @property
    def available(self) -> bool:
        """Whether it can be loaded now (given a path, where it needs one)."""
        if not self.needs_get:
            return True
        try:
            find_cifar(_CIFAR[self.name], None)
        except UserError:
            return False
        return True


DATASETS = {
    entry.name: entry
    for entry in (
        Dataset("digits", "8 x 8 handwritten digits, 10 classes, 1,437 train / 360 test; built in"),
        Dataset("cifar10", "32 x 32 photos, 10 classes, 50,000 train / 10,000 test", needs_get=True),
        Dataset("cifar100", "32 x 32 photos, 100 classes, 50,000 train / 10,000 test", needs_get=True),
        Dataset("folder", "your images in path/train/<class>/ and path/val/<class>/", needs_path=True),
        Dataset("npz", "your arrays x_train, y_train, x_test, y_test in one .npz file", needs_path=True),
    )
}


def load(
    name: str,
    *,
    root: Path | None = None,
    path: Path | None = None,
    validation: int = 0,
    normalize: str = "none",
    scale: float | str = "auto",
    pad: int = 0,
    mirror: bool = False,
    resize: int = 256,
    crop: int | None = None,
    grey: bool = False,
    limit: int | None = None,
) -> Data:
    """A dataset by name, ready to train on.

    root: where cifar10 and cifar100 are, instead of the cache. path: the user's folder or npz file.
    validation: hold out the last n training examples as the test split, and leave the real test set alone.
    normalize: none, mean_image (of every pixel) or mean_std (of every channel), measured on all training
    examples that are left; for folders on up to 2,000 evenly spaced ones, mean_image on their centre squares
    of `resize` pixels and mean_std on their centre crops.
    scale: multiplies the raw values first; auto brings uint8 pixels to 0..1 and leaves floats alone. pad, mirror:
    random crops of the zero-padded image and random mirrors, in training. resize, crop, grey: for folders, the
    shorter side, the square cut out of it, and whether images are read in one channel.
    limit: keep only the first n training and the first n test examples, for quick trials.
    """
    if name not in DATASETS:
        raise UserError(f"there is no dataset {name!r}; there are {', '.join(DATASETS)}")
    if DATASETS[name].needs_path and path is None:
        raise UserError(f"dataset {name!r} reads your own files; say where they are with data.path")
    if not DATASETS[name].needs_path and path is not None:
        raise UserError(
            f"data.path is {path}, but {name!r} is not read from a path; leave it out, or use folder or npz"
        )
    if root is not None and name not in _CIFAR:
        raise UserError(f"root is {root}, but {name!r} has none; it is for {', '.join(_CIFAR)}")

    if name == "folder":
        assert path is not None  # needs_path
        if pad:
            raise UserError(f"data.pad is {pad}, but folder crops at random by data.resize and data.crop; use these")
        images, held_out, classes = read_folder(
            Path(path).expanduser(), resize=resize, crop=crop, mirror=mirror, grey=grey, need_test=validation == 0
        )
        return assemble(
            name,
            images,
            held_out,
            Classification(classes),
            normalize=normalize,
            validation=validation,
            scale=scale,
            limit=limit,
            statistics=STATISTICS,
        )
    if crop is not None:
        raise UserError(f"data.crop is {crop}, but {name!r} keeps its size; use data.pad for random crops")
    if grey:
        raise UserError(f"data.grey is for image folders, but {name!r} is not one; leave it out")
    auto = 1 / 255
    if name == "digits":
        auto = 1 / 16  # they have 17 levels of grey
        train, test = read_digits()
        problem: Problem = Classification(tuple(map(str, range(10))))
    elif name == "npz":
        assert path is not None  # needs_path
        train, test, problem = read_npz(Path(path).expanduser())
    else:
        layout = _CIFAR[name]
        train, test, classes = read_cifar(layout, find_cifar(layout, None if root is None else Path(root)))
        problem = Classification(classes)
    train = with_augmentation(train, pad=pad, mirror=mirror, where=name)
    return assemble(
        name, train, test, problem, normalize=normalize, validation=validation, scale=scale, auto=auto, limit=limit
    )
