"""Images that text files list, a name and a class number per line: one list to train on, one to test on.

Caffe's ImageData layer reads the same lists.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.data.readers.image_crops import choose_crop, shuffle_examples
from mheads.data.readers.image_folder import FolderSplit
from mheads.data.targets import pose_numbers
from mheads.problems import Problem


def read_list(
    path: Path,
    test_path: Path | None,
    root: Path | None,
    *,
    resize: int,
    crop: int | None,
    mirror: bool,
    grey: bool,
    problem: str = "auto",
    need_test: bool,
) -> tuple[FolderSplit, FolderSplit, Problem]:
    """Train and test splits of images that are listed with their class numbers; names begin at `root`.

    Numbers may be something else to learn than classes, if `problem` says so.
    """
    check_test_path(path, test_path, need_test, "a list")
    split = partial(FolderSplit, resize=resize, crop=choose_crop(resize, crop), grey=grey)
    train = split(*_list_images(path, root), mirror=mirror)
    test = train.part(slice(0)) if test_path is None else split(*_list_images(test_path, root))
    return pose_numbers(train, test, problem, str(test_path))


def _list_images(path: Path, root: Path | None) -> tuple[Path, np.ndarray, np.ndarray]:
    """The folder where names begin, names and class numbers."""
    names, labels = [], []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        if not name.strip() or not label.isdecimal() or len(label) > 9:
            raise UserError(
                f"{path}, line {number}: {line[:80]!r} is not the name of an image and its class number: number the "
                "classes from 0 on, or use data.name=folder, where folders have their names"
            )
        names.append(name.strip() if root is None else name.strip().lstrip("/"))  # Caffe puts the root before any name
        labels.append(int(label))
    if not names:
        raise UserError(f"{path} lists no image: write a name and a class number on each line")
    return path.parent if root is None else root, *shuffle_examples("list", names, labels)


def read_lines(path: Path) -> list[str]:
    try:
        return atomic_files.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a list of files: {error}") from error


def check_test_path(path: Path, test_path: Path | None, need_test: bool, kind: str) -> None:
    if need_test and test_path is None:
        raise UserError(
            f"{path} holds the training examples, and there is no test set: give data.test_path, {kind} of test "
            "examples, or data.validation=n"
        )
