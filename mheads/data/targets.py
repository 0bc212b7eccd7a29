"""What is to be learned, decided from the targets, or named by the user where they alone do not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from mheads.common.errors import UserError, warn
from mheads.common.safe_yaml import short
from mheads.problems import Classification, MultiLabel, Problem, Regression, Segmentation, SoftLabels
from mheads.problems.member_losses import IGNORED

ROUNDED = 1e-3  # of their standard deviation is the most that numbers to be learned are rounded by
SUM_TO_ONE = 1e-3  # is the most by which the sum of probabilities may be off
OFTEN = 3  # examples of a class: if there are so many of each on average, hardly one of equal classes has none
MOST_CLASSES = 1_000_000  # by number: more are numbers of something else, and their names alone would fill the memory
S = TypeVar("S", bound=Any)
Splits = dict[str, Any]
Arrays = dict[str, np.ndarray]
Classes = tuple[str, ...] | None
COLUMN = "y[:, 0] for class numbers or names, which have one axis, [N]"
WAYS = (
    "class numbers as integers, such as int64, or names, [N]; numbers to be learned as floats, [N], [N, D] or of "
    "more axes; several labels as bools or 0 and 1, [N, C]; or a class for each pixel as integers, [N, H, W]"
)


def pose_targets(splits: Splits, classes: Sequence[Any] | None, problem: str = "auto") -> tuple[Splits, Problem]:
    """The splits with targets as the problem has them, and the problem: the one that is named, or that they look like.

    Names of classes are numbered by `classes`, or in sorted order of those in training. Classes that are integers, but
    not those from 0 on, are names too: of labels that are integers.
    """
    if problem not in ("auto", *TARGET_KINDS):
        raise UserError(f"data.problem is {problem!r}; give auto, {', '.join(TARGET_KINDS)} or examples")
    if isinstance(classes, int | str):
        raise UserError(f"classes={short(classes)}: give their names in order, such as ['cat', 'dog']")
    names, integers = (None, False) if classes is None else _read_classes(classes)
    targets = {key: split.targets for key, split in splits.items() if len(split.targets)}
    kind = _look(targets) if problem == "auto" else problem
    if integers and kind == "segmentation":
        raise UserError(
            f"classes {_few(names)}: classes of pixels are numbered from 0 on; number them so, or give names as text"
        )
    if integers and kind == "classification":
        targets = {key: _spell_labels(array, names or (), key) for key, array in targets.items()}
    known, solved = TARGET_KINDS[kind](targets, names)
    if integers and isinstance(solved, Classification):
        solved = replace(solved, integer_names=True)
    empty = next(iter(known.values()), np.empty(0, np.int64))[:0]
    return {key: replace(split, targets=known.get(key, empty)) for key, split in splits.items()}, solved


def _read_classes(classes: Sequence[Any]) -> tuple[tuple[str, ...], bool]:
    """The names of classes, and whether these are integers that stand in the labels, and no places in this list."""
    listed = list(classes)
    names = tuple(map(str, listed))
    if len(set(names)) < len(names):
        raise UserError(f"classes {', '.join(names)}: a name is there twice; give each class its own")
    integers = all(isinstance(name, Integral) and not isinstance(name, bool) for name in listed)
    return names, integers and listed != list(range(len(listed)))


def _spell_labels(labels: np.ndarray, names: tuple[str, ...], where: str) -> np.ndarray:
    """Labels that are integers as the names, text, that they are; others as they are."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        return labels
    unknown = np.flatnonzero(~np.isin(labels, list(map(int, names))))
    if len(unknown):
        raise UserError(
            f"{where}: example {unknown[0]} has the label {labels[unknown[0]]}, but the classes are {_few(names)} "
            f"({len(unknown)} such labels): name all classes or, if labels are places in this list, from 0 on, give "
            "classes as text"
        )
    return labels.astype(str)


def _few(names: Classes) -> str:
    """The first names, for a message."""
    return f"{', '.join((names or ())[:10])}{', ...' if len(names or ()) > 10 else ''}"


def pose_numbers(train: S, test: S, problem: str, where: str) -> tuple[S, S, Problem]:
    """Splits and problem of examples with a number each: classes up to the largest in training, or what `problem` says.

    `where` names the test split in messages.
    """
    if problem not in ("auto", "classification"):
        splits, solved = pose_targets({"train": train, "test": test}, None, problem)
        return splits["train"], splits["test"], solved
    known = Classification(class_numbers(int(train.targets.max())))
    known.check_targets(test.targets, where)
    return train, test, known


def warn_of_flags(targets: np.ndarray, problem: Problem) -> None:
    """Warns that a single yes or no, given as 0.0 and 1.0, is learned as a number, since the user named no problem."""
    if getattr(problem, "num_values", 0) == 1 and len(targets) and _is_flags(targets):
        warn(
            "the labels are only 0 and 1, as floats, and are learned as numbers (regression): set "
            "data.problem=multilabel to learn them as no and yes (problem='multilabel' in Python), or "
            "data.problem=regression to silence this warning"
        )


def warn_of_shares(targets: np.ndarray, problem: Problem) -> None:
    """Warns that rows that may be probabilities of classes are learned as numbers, since the user named no problem."""
    if getattr(problem, "num_values", 0) < 2 or not len(targets):
        return
    sums = targets.sum(1, dtype=np.float64)
    if (targets >= 0).all() and bool((np.abs(sums - 1) <= SUM_TO_ONE).all()):
        warn(
            "the targets are rows of numbers that add to 1, and are learned as numbers (regression): set "
            "data.problem=soft_labels to learn them as probabilities of classes, or data.problem=regression to "
            "silence this warning"
        )


def warn_of_unused_numbers(targets: np.ndarray, problem: Problem) -> None:
    """Warns of class numbers that are rather names, such as 10, 20 and 30: most numbers up to the largest are unused.

    Each that occurs does so `OFTEN` times, so that the others do not lack by chance.
    """
    classes = getattr(problem, "classes", ())
    if problem.name != "classification" or classes != tuple(map(str, range(len(classes)))):
        return
    used = len(np.unique(targets))
    if 2 * used < len(classes) and len(targets) >= OFTEN * used:
        warn(
            f"only {used} of the class numbers 0 to {len(classes) - 1} occur in training: if others are no classes, "
            "give y as text, y.astype(str), or renumber it, numpy.unique(y, return_inverse=True)[1]; or set "
            "data.problem=classification to silence this warning"
        )


def _look(targets: Arrays) -> str:
    """The problem that these targets look like."""
    arrays = list(targets.values())
    kinds = {key: "floats" if array.dtype.kind == "f" else "classes" for key, array in targets.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{key} labels are {kind}" for key, kind in kinds.items())
        raise UserError(f"{listed}: give all in the same way")
    if all(array.ndim == 1 for array in arrays):
        return "classification"
    if all(array.ndim == 3 and array.dtype.kind in "iu" for array in arrays):
        return "segmentation"
    floats = "floats" in kinds.values()
    if floats and all(array.ndim == 3 and _is_flags(array) for array in arrays):
        raise _other(
            targets,
            "if these are masks, a class for each pixel, give them as integers or bools, [N, H, W]; if these are "
            "numbers to be learned, say data.problem=regression",
        )
    if floats or all(array.dtype == np.uint8 and array.ndim == 2 for array in arrays):
        flags = [array.shape[1] > 1 and _is_flags(array) for array in arrays]
        one_hot = [flag and bool((array.sum(1) == 1).all()) for flag, array in zip(flags, arrays, strict=True)]
        if all(flags) and not all(one_hot):
            return "multilabel"
        if one_hot[0]:
            raise UserError(
                f"labels are one-hot rows of shape {list(arrays[0].shape)}: they become class numbers by y.argmax(1); "
                "or say what they are, data.problem=soft_labels or multilabel"
            )
    if floats:
        return "regression"
    if all(array.ndim == 2 and array.shape[1] == 1 for array in arrays):
        raise _other(
            targets,
            f"give {COLUMN}; if these are numbers to be learned, or a single yes or no, say data.problem=regression "
            "or multilabel",
        )
    several = all(array.ndim == 2 and _is_flags(array) for array in arrays)
    raise _other(
        targets, "if these are several labels, 0 and 1, say data.problem=multilabel" if several else f"give {WAYS}"
    )


def _is_flags(array: np.ndarray) -> bool:
    return bool(np.isin(array, (0, 1)).all())


def _check_form(targets: Arrays, ndims: tuple[int, ...], kinds: str, ways: str, least: int = 0) -> None:
    """Targets must have such axes and types, and at least so many columns."""
    if any(
        array.ndim not in ndims or array.dtype.kind not in kinds or (least and array.shape[1] < least)
        for array in targets.values()
    ):
        raise _other(targets, ways)


def _check_same_size(sizes: dict[str, Any], unit: str) -> Any:
    """The size that the targets of all splits have."""
    if len(set(sizes.values())) > 1:
        listed = " and ".join(f"{size} {unit} in {key}" for key, size in sizes.items())
        raise UserError(f"labels have {listed}; make them the same size")
    return next(iter(sizes.values()), None)


def _classification(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    column = any(array.shape[1:] == (1,) and array.dtype.kind in "iu" for array in targets.values())
    ways = COLUMN if column else "class numbers as integers, or names, [N]"
    _check_form(targets, (1,), "iU", f"for classification give {ways}")
    targets, known = _number_classes(targets, classes)
    return targets, Classification(known)


def _regression(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    if classes is not None:
        labels = ", ".join(f"{key} labels are floats" for key in targets)
        raise UserError(f"{labels} and classes are named: give all in the same way")
    _check_form(targets, tuple(range(1, 9)), "iuf", "for regression give numbers, [N], [N, D] or [N, T, D]")
    numbers = {key: as_float32(array, key).reshape(len(array), -1) for key, array in targets.items()}
    size = _check_same_size({key: array.shape[1] for key, array in numbers.items()}, "numbers")
    shape = _check_same_size({key: array.shape[1:] for key, array in targets.items()}, "numbers")
    return numbers, Regression(size or 1, shape if shape is not None and len(shape) > 1 else ())


def _rows_of_classes(name: str, make: Callable[[tuple[str, ...]], Problem]) -> Any:
    """Targets [N, C], a number for each class."""
    least, form = (1, "[N, C]") if name == "multilabel" else (2, "[N, C] with two classes or more")

    def pose(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
        if least == 1:  # a single yes or no
            targets = {key: a[:, None] if a.ndim == 1 and _is_flags(a) else a for key, a in targets.items()}
        _check_form(targets, (2,), "iuf", f"for {name} give a number for each class, {form}", least)
        count = _check_same_size({key: array.shape[1] for key, array in targets.items()}, "classes") or 0
        if classes is not None and len(classes) != count:
            raise UserError(f"{len(classes)} classes are named, but labels have {count}: name each")
        return {key: as_float32(a, key) for key, a in targets.items()}, make(classes or tuple(map(str, range(count))))

    return pose


def _segmentation(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    _check_form(targets, (3,), "iu", "for segmentation give a class for each pixel as integers, [N, H, W]")
    _check_same_size({key: " x ".join(map(str, array.shape[1:])) for key, array in targets.items()}, "pixels")
    _refuse_white_masks(targets)
    pixels = {key: np.where(a == 255, IGNORED, a.astype(np.int64)) for key, a in targets.items()}
    known = classes or class_numbers(max((int(array.max()) for array in pixels.values()), default=-1))
    if len(known) > 255:
        raise UserError(f"{len(known)} classes for pixels: 255 is for pixels that do not count, so give at most 255")
    return pixels, Segmentation(known, next((array.shape[1:] for array in pixels.values()), (0, 0)))


def _refuse_white_masks(targets: Arrays) -> None:
    """Raises for masks drawn in 0 and 255: 255 is for pixels that do not count, so one class would be left."""
    train = targets.get("train")
    if train is not None and (train == 255).any() and np.isin(train, (0, 255, IGNORED)).all():
        raise UserError(
            "train labels hold only 0 and 255, and pixels with 255 are ignored, so nothing could be learned: for "
            "black and white masks give y == 255, which makes the classes 0 and 1"
        )


TARGET_KINDS: dict[str, Callable[[Arrays, Classes], tuple[Arrays, Problem]]] = {
    "classification": _classification,
    "regression": _regression,
    "multilabel": _rows_of_classes("multilabel", MultiLabel),
    "soft_labels": _rows_of_classes("soft_labels", SoftLabels),
    "segmentation": _segmentation,
}


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
    """Numbers to be learned, in the precision in which they are; an error if rounding would make them alike."""
    with np.errstate(all="ignore"):  # what is not finite is an error later, by its place
        rounded = np.ascontiguousarray(array, np.float32)
        if array.dtype.itemsize <= 4 or not array.size:
            return rounded
        error = np.abs(rounded - array.astype(np.float64)).max(0, initial=0.0)
        spread = array.astype(np.float64).std(0)
    lost = np.atleast_1d((error > ROUNDED * spread) & (spread > 0))
    if lost.any():
        column = int(lost.argmax())
        off, wide = error.ravel()[column], spread.ravel()[column]
        raise UserError(
            f"{where} labels are numbers like {array.reshape(len(array), -1)[0, column]:.17g}, learned in float32, "
            f"which rounds them by up to {off:.2g} where their standard deviation is {wide:.2g}: subtract their "
            "mean, and divide by the standard deviation, before"
        )
    return rounded


def class_numbers(largest: int) -> tuple[str, ...]:
    """The names of classes that are numbered up to the largest."""
    if largest >= MOST_CLASSES:
        raise UserError(
            f"a label is {largest}, which would make {largest + 1:,} classes: number classes from 0 on without gaps, "
            "give their names as text, or data.problem=regression if these are numbers to be learned"
        )
    return tuple(map(str, range(largest + 1)))


def _other(targets: Arrays, ways: str) -> UserError:
    listed = ", ".join(f"{key} labels have dtype {a.dtype} and shape {list(a.shape)}" for key, a in targets.items())
    return UserError(f"{listed}; {ways}")


def _number_classes(targets: Arrays, classes: Classes) -> tuple[Arrays, tuple[str, ...]]:
    """Class numbers, by the place of a name in `classes`, or in the sorted names of training."""
    by_name = {key: array.dtype.kind == "U" for key, array in targets.items()}
    if not any(by_name.values()):
        largest = max((int(array.max()) for array in targets.values()), default=-1)
        return targets, class_numbers(largest) if classes is None else classes
    if not all(by_name.values()):
        kinds = ", ".join(f"{key} labels are {'names' if named else 'numbers'}" for key, named in by_name.items())
        raise UserError(f"{kinds}; give both in the same way")
    known = classes or tuple(sorted(set(targets["train"].tolist())))
    number = {name: i for i, name in enumerate(known)}
    for key, array in targets.items():
        unknown = np.flatnonzero([name not in number for name in array.tolist()])
        if len(unknown):
            raise UserError(
                f"{key}: example {unknown[0]} has the label {str(array[unknown[0]])!r}, which is none of the classes"
                f" {_few(known)} ({len(unknown)} such labels)"
            )
    return {key: np.array([number[name] for name in a.tolist()], np.int64) for key, a in targets.items()}, known
