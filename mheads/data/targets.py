"""What is to be learned, decided from the targets, or said by name where they alone do not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mheads.common.errors import UserError, warn
from mheads.problems import Classification, MultiLabel, Problem, Regression, Segmentation, SoftLabels
from mheads.problems.member_losses import IGNORED

ROUNDED = 1e-3  # of their standard deviation is the most that numbers to be learned are rounded by
MOST_CLASSES = 1_000_000  # by number: more are numbers of something else, and their names alone would fill the memory
S = TypeVar("S", bound=Any)
Splits = dict[str, Any]
Arrays = dict[str, np.ndarray]
Classes = tuple[str, ...] | None
WAYS = (
    "class numbers as integers, such as int64, or names, [N]; numbers to be learned as floats, [N] or [N, D]; several "
    "labels as bools or 0 and 1, [N, C]; or a class for each pixel as integers, [N, H, W]"
)


def pose_targets(splits: Splits, classes: Sequence[str] | None, problem: str = "auto") -> tuple[Splits, Problem]:
    """The splits with targets as the problem has them, and the problem: the one that is named, or that they look like.

    Names of classes are numbered by `classes`, or in sorted order of those in training.
    """
    if problem not in ("auto", *TARGET_KINDS):
        raise UserError(f"data.problem is {problem!r}; give auto, {', '.join(TARGET_KINDS)} or examples")
    if isinstance(classes, int):
        raise UserError(f"classes={classes}: give their names in order, such as ['cat', 'dog']")
    names = None if classes is None else tuple(map(str, classes))
    if names is not None and len(set(names)) < len(names):
        raise UserError(f"classes {', '.join(names)}: a name is there twice; give each class its own")
    targets = {key: split.targets for key, split in splits.items()}
    found = {key: array for key, array in targets.items() if len(array)}
    name = _look(found) if problem == "auto" else problem
    known, solved = TARGET_KINDS[name](found, names)
    empty = next(iter(known.values()), np.empty(0, np.int64))[:0]
    return {key: replace(split, targets=known.get(key, empty)) for key, split in splits.items()}, solved


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
    """Says that a single yes or no, given as 0.0 and 1.0, is learned as a number, since nobody said what it is."""
    single = getattr(problem, "num_values", 0) == 1
    if single and len(targets) and bool(np.isin(targets, (0, 1)).all()):
        warn(
            "the labels are only 0 and 1, as floats, and are taken as numbers, with squared errors: "
            "data.problem=multilabel takes them as no and yes (problem='multilabel' in Python), "
            "data.problem=regression says that numbers are meant"
        )


def _look(targets: Arrays) -> str:
    """The problem that these targets look like."""
    kinds = {key: "floats" if array.dtype.kind == "f" else "classes" for key, array in targets.items()}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{key} labels are {kind}" for key, kind in kinds.items())
        raise UserError(f"{said}: give all in the same way")
    if all(array.ndim == 1 for array in targets.values()):
        return "classification"
    if all(array.ndim == 3 and array.dtype.kind in "iu" for array in targets.values()):
        return "segmentation"
    floats = "floats" in kinds.values()
    if floats or all(array.dtype == np.uint8 and array.ndim == 2 for array in targets.values()):
        flags = [array.shape[1] > 1 and bool(np.isin(array, (0, 1)).all()) for array in targets.values()]
        single = [flag and bool((a.sum(1) == 1).all()) for flag, a in zip(flags, targets.values(), strict=True)]
        if all(flags) and not all(single):
            return "multilabel"
        if single[0]:
            raise UserError(
                f"labels are one-hot rows of shape {list(next(iter(targets.values())).shape)}: they become class "
                "numbers by y.argmax(1); or say what they are, data.problem=soft_labels or multilabel"
            )
    if floats:
        return "regression"
    if all(array.ndim == 2 and bool(np.isin(array, (0, 1)).all()) for array in targets.values()):
        raise _other(targets, "if these are several labels, 0 and 1, say data.problem=multilabel")
    raise _other(targets, f"give {WAYS}")


def _classification(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    if any(array.ndim != 1 or array.dtype.kind not in "iU" for array in targets.values()):
        raise _other(targets, "for classification give class numbers as integers, or names, [N]")
    targets, known = _numbered(targets, classes)
    return targets, Classification(known)


def _regression(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    if classes is not None:
        raise UserError(f"{', '.join(f'{key} labels are floats' for key in targets)} and classes are named: give all"
                        " in the same way")  # fmt: skip
    if any(array.ndim > 2 or array.dtype.kind not in "iuf" for array in targets.values()):
        raise _other(targets, "for regression give numbers, [N] or [N, D]")
    sizes = {key: array.reshape(len(array), -1).shape[1] for key, array in targets.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"targets have {' and '.join(f'{n} numbers in {key}' for key, n in sizes.items())}")
    found = {key: as_float32(array, key).reshape(len(array), -1) for key, array in targets.items()}
    return found, Regression(next(iter(sizes.values()), 1))


def _rows_of_classes(name: str, make: Callable[[tuple[str, ...]], Problem]) -> Any:
    """Targets [N, C], a number for each class."""

    least, said = (1, "[N, C]") if name == "multilabel" else (2, "[N, C] with two classes or more")

    def pose(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
        if least == 1:  # a single yes or no
            single = {key: a.ndim == 1 and bool(np.isin(a, (0, 1)).all()) for key, a in targets.items()}
            targets = {key: array[:, None] if single[key] else array for key, array in targets.items()}
        if any(
            array.ndim != 2 or array.shape[1] < least or array.dtype.kind not in "iuf" for array in targets.values()
        ):
            raise _other(targets, f"for {name} give a number for each class, {said}")
        sizes = {key: array.shape[1] for key, array in targets.items()}
        count = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) > 1:
            raise UserError(f"labels have {' and '.join(f'{n} classes in {key}' for key, n in sizes.items())}")
        if classes is not None and len(classes) != count:
            raise UserError(f"{len(classes)} classes are named, but labels have {count}: name each")
        return {key: as_float32(a, key) for key, a in targets.items()}, make(classes or tuple(map(str, range(count))))

    return pose


def _segmentation(targets: Arrays, classes: Classes) -> tuple[Arrays, Problem]:
    if any(array.ndim != 3 or array.dtype.kind not in "iu" for array in targets.values()):
        raise _other(targets, "for segmentation give a class for each pixel as integers, [N, H, W]")
    sizes = {key: array.shape[1:] for key, array in targets.items()}
    if len(set(sizes.values())) > 1:
        said = " and ".join(f"{h} x {w} pixels in {key}" for key, (h, w) in sizes.items())
        raise UserError(f"targets have {said}; make them the same size")
    found = {key: np.where(a == 255, IGNORED, a.astype(np.int64)) for key, a in targets.items()}
    largest = max((int(array.max()) for array in found.values()), default=-1)
    known = classes or class_numbers(largest)
    if len(known) > 255:
        raise UserError(f"{len(known)} classes for pixels: 255 is for pixels that do not count, so give at most 255")
    return found, Segmentation(known, next(iter(sizes.values()), (0, 0)))


TARGET_KINDS: dict[str, Callable[[Arrays, Classes], tuple[Arrays, Problem]]] = {
    "classification": _classification,
    "regression": _regression,
    "multilabel": _rows_of_classes("multilabel", MultiLabel),
    "soft_labels": _rows_of_classes("soft_labels", SoftLabels),
    "segmentation": _segmentation,
}


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
    """Numbers to be learned, in the precision in which they are; refuses to round away what tells them apart."""
    with np.errstate(all="ignore"):  # what is not finite is refused later, by its place
        rounded = np.ascontiguousarray(array, np.float32)
        if array.dtype.itemsize <= 4 or not array.size:
            return rounded
        error = np.abs(rounded - array.astype(np.float64)).max(0, initial=0.0)
        spread = array.astype(np.float64).std(0)
    lost = np.atleast_1d((error > ROUNDED * spread) & (spread > 0))
    if lost.any():
        column = int(lost.argmax())
        off, wide = np.atleast_1d(error)[column], np.atleast_1d(spread)[column]
        raise UserError(
            f"{where} labels are numbers like {array.reshape(len(array), -1)[0, column]:.17g}, learned in float32, "
            f"which rounds them by up to {off:.2g} where their standard deviation is {wide:.2g}: subtract their "
            "mean, and divide by the deviation, before"
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
    said = ", ".join(f"{key} labels have dtype {a.dtype} and shape {list(a.shape)}" for key, a in targets.items())
    return UserError(f"{said}; {ways}")


def _numbered(targets: Arrays, classes: Classes) -> tuple[Arrays, tuple[str, ...]]:
    by_name = {key: array.dtype.kind == "U" for key, array in targets.items()}
    if not any(by_name.values()):
        largest = max((int(array.max()) for array in targets.values()), default=-1)
        return targets, class_numbers(largest) if classes is None else tuple(map(str, classes))
    if not all(by_name.values()):
        kinds = ", ".join(f"{key} labels are {'names' if named else 'numbers'}" for key, named in by_name.items())
        raise UserError(f"{kinds}; give both in the same way")
    known = classes or tuple(sorted(set(targets["train"].tolist())))
    number = {name: i for i, name in enumerate(known)}
    found = {}
    for key, array in targets.items():
        names = array.tolist()
        unknown = [row for row, name in enumerate(names) if name not in number]
        if unknown:
            raise UserError(
                f"{key}: example {unknown[0]} has the label {names[unknown[0]]!r}, which is none of the classes"
                f" {', '.join(known[:10])}{', ...' if len(known) > 10 else ''} ({len(unknown)} such labels)"
            )
        found[key] = np.array([number[name] for name in names], np.int64)
    return found, known
