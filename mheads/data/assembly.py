"""The last steps that all datasets share: hold out, limit, check labels, measure the mean, fingerprint."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mheads.common import seeds
from mheads.common.errors import UserError, warn
from mheads.data.arrays import refuse_masked
from mheads.data.data_section import DataOptions, as_default
from mheads.data.preprocessing import fit_preprocess
from mheads.data.splits import Data, RowSubset, Source, Split
from mheads.data.targets import warn_of_flags, warn_of_shares, warn_of_unused_numbers
from mheads.data.value_range import ValueRange
from mheads.problems import Problem, gives_numbers


def assemble(
    train: Source,
    test: Source,
    problem: Problem,
    options: DataOptions,
    *,
    auto: float = 1 / 255,
    statistics: int | None = None,
    hold_out: int | None = None,
    weights: Any = None,
) -> Data:
    """Data from its two splits, and the problem that their targets pose.

    `auto` is the scale that uint8 gets by default; `statistics` caps the number of examples that the mean is measured
    on; with the seed `hold_out` the test split is a tenth of the training examples, in proportion to the classes.
    """
    name, validation, limit, count = options.name, options.validation, options.limit, len(train)
    seen = check_examples(train, test, problem, name, validation)
    importance = None if weights is None else check_weights(weights, count, name)
    rows, out, held_out = np.arange(count), None, None
    if hold_out is not None:
        out = draw_stratified(_groups(train, problem), max(1, count // 10), hold_out)
        rows = np.setdiff1d(rows, out)
        train, test = RowSubset(train, rows), RowSubset(train, out)
        how = "stratified" if len(problem.groups) > 1 else "at random"
        held_out = f"{len(out)} of {count} examples, {how}, seed {hold_out}"
    if validation:
        check_validation(_groups(train, problem), validation, name)
        rows, out = np.split(rows, [count - validation])
        train, test = train.part(slice(count - validation)), train.part(slice(count - validation, None))
        held_out = f"{validation} of {count} examples, the last"
    if limit is not None:
        rows, out = rows[:limit], None if out is None else out[:limit]
        train, test = train.part(slice(limit)), test.part(slice(limit))
    check_for_numbers(problem, options)
    train, held_back = _hold_back(train, options.calibration, name) if options.calibration else (train, None)
    rows = rows[: len(train)]
    test = test.without_augmentation()
    side = check_same_shapes(train, test, name)
    if importance is not None:
        importance = _scale_weights(importance[rows], name)
    factor = check_scaling(train, seen, options, auto)
    preprocess = fit_preprocess(train, options.normalize, factor, statistics)
    preprocess = replace(preprocess, bgr=options.channels == "bgr")
    fingerprint = _fingerprint(train, test, importance)
    data = Data(name, train, test, problem, preprocess, fingerprint, seen, importance, held_out, out, rows, count, side)
    data = replace(data, calibration=held_back)
    data = data.with_normalized_targets() if options.normalize_targets else data
    if options.problem == "auto":
        warn_of_flags(train.targets, problem)
        warn_of_shares(train.targets, problem)
        warn_of_unused_numbers(train.targets, problem)
    return data.with_examples_as_targets() if options.problem == "examples" else data


def check_for_numbers(problem: Problem, options: DataOptions) -> None:
    """Raises for options that only targets that are numbers can have."""
    if options.problem != "examples" and gives_numbers(problem):
        return
    learned = "its examples themselves" if options.problem == "examples" else problem.name
    if given := [key for key in ("calibration", "normalize_targets") if getattr(options, key)]:
        raise UserError(
            f"data.{given[0]} = {getattr(options, given[0])} is for numbers, and {options.name} is {learned}: give "
            f"{as_default(*given)}",
            key=f"data.{given[0]}",
        )


def _hold_back(train: Source, count: int, name: str) -> tuple[Source, Source]:
    """All but the last `count` training examples, and these."""
    kept = len(train) - count
    if kept < 1:
        raise UserError(f"{name}: data.calibration is {count}; it must leave some of {len(train)} examples")
    return train.part(slice(kept)), train.part(slice(kept, None)).without_augmentation()


def check_examples(train: Source, test: Source, problem: Problem, name: str, validation: int) -> ValueRange:
    """The range of the examples. Checked before any are held out, so that messages number them as the user does."""
    if not len(train):
        raise UserError(f"{name}: there are no training examples")
    seen = train.survey(f"{name}: train examples")
    tested = test.survey(f"{name}: test examples") if len(test) else seen
    if seen.kind == "tokens" == tested.kind:
        seen = replace(seen, high=max(seen.high, tested.high))  # the network must know those of the test set as well
    elif seen.kind != tested.kind and ("tokens" in (seen.kind, tested.kind) or not validation):
        raise UserError(f"{name}: training examples are {seen} but test examples {tested}; give both in the same way")
    elif not validation:
        seen.check(tested, f"{name}: test examples")
    problem.check_targets(train.targets, f"{name}: train")
    if len(test) and not validation:
        problem.check_targets(test.targets, f"{name}: test")
    return seen


def check_same_shapes(train: Source, test: Source, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the side inputs, which both splits must have, as they must have the same shape of examples."""
    if len(test) and test.shape != train.shape:
        raise UserError(
            f"{name}: training examples have shape {train.shape} but test examples {test.shape};"
            " make them the same size"
        )
    shapes = [side_shapes(split) for split in (train, test) if len(split)]
    if shapes[0] != shapes[-1]:
        texts = [", ".join(f"{key} {list(shape)}" for key, shape in sorted(side.items())) for side in shapes]
        raise UserError(
            f"{name}: the side inputs of training are {texts[0] or 'none'}, of the test set {texts[1] or 'none'}; "
            "give all to both"
        )
    return shapes[0]


def side_shapes(split: Split) -> dict[str, tuple[int, ...]]:
    """The shape of each side input of one example; () where it has several rows."""
    first = split.read_targets(np.arange(1), None)
    return {
        key: tuple(value.shape[1:]) if first.counts is None and isinstance(value, torch.Tensor) else ()
        for key, value in first.side.items()
    }


def check_scaling(train: Source, seen: ValueRange, options: DataOptions, auto: float) -> float:
    """The number that raw values are multiplied by, if what is asked for fits the examples."""
    scale = options.scale
    if seen.kind == "tokens" and (options.normalize != "none" or scale != "auto"):
        raise UserError(
            f"{options.name}: data.normalize={options.normalize} and data.scale={scale} are for numbers, but the "
            f"examples are {seen}, which go to the network as they are; give data.normalize=none and data.scale=auto"
        )
    if options.channels == "bgr" and (len(train.shape) != 3 or train.shape[0] != 3):
        raise UserError(
            f"{options.name}: data.channels is bgr, but examples have the shape {train.shape}: it is for images of "
            f"three channels; give {as_default('channels')}"
        )
    if scale != "auto":
        return scale
    if seen.has_only_0_and_1 and options.normalize != "mean_std":  # which makes them as wide as any others
        warn(
            f"{options.name}: training examples are {seen}, and data.scale=auto divides uint8 by {1 / auto:g}, which "
            "leaves hardly any difference: give them as float32, or data.scale=1 (scale=1 in Python)"
        )
    return auto if seen.kind == "uint8" else 1.0


def _groups(split: Split, problem: Problem) -> np.ndarray:
    return problem.group(torch.as_tensor(split.targets)).numpy()


def draw_stratified(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of `count` examples, sorted: drawn by the seed, in proportion to the classes, rounded.

    A class of a single example keeps it for training; if there are only such classes, nothing can be held out.
    """
    if len(labels) == 1:
        raise UserError("1 example is too few to hold some out; give a test set")
    classes, sizes = np.unique(labels, return_counts=True)
    shares = count * sizes / len(labels)
    taken = np.minimum(np.floor(shares).astype(int), sizes - 1)
    for c in np.argsort(taken - shares, kind="stable"):  # the largest remainders first
        if taken.sum() < count and taken[c] < sizes[c] - 1:
            taken[c] += 1
    if not taken.any() and sizes.max() == 1:
        raise UserError(
            f"each of the {len(classes)} classes has one example, so none can be held out: give test=(x, y)"
        )
    if not taken.any():
        taken[np.argmax(sizes)] = 1
    mixed = seeds.numpy_generator(seed, "hold out").permutation(len(labels))
    chosen = [mixed[labels[mixed] == c][:n] for c, n in zip(classes, taken, strict=True)]
    return np.sort(np.concatenate(chosen))


def check_validation(labels: np.ndarray, validation: int, name: str) -> None:
    """Some examples must be left, and the last of a set that is sorted by class are no sample of it."""
    if not 0 < validation < len(labels):
        raise UserError(
            f"{name}: data.validation is {validation}; it must leave some of the {len(labels)} training"
            f" examples, so give 0 to {len(labels) - 1}"
        )
    last = set(labels[len(labels) - validation :].tolist())
    lacking = sorted(set(labels.tolist()) - last)
    mixed = 1 - np.sum((np.unique(labels, return_counts=True)[1] / len(labels)) ** 2)  # share of changes in any order
    if lacking and np.mean(labels[1:] != labels[:-1]) < 0.1 * mixed:
        raise UserError(
            f"{name}: the training examples are sorted by class, so the last {validation} (data.validation) hold none"
            f" of class {', '.join(map(str, lacking[:5]))}{', ...' if len(lacking) > 5 else ''}; shuffle the examples"
            " before; in Python, fit without test and validation holds out a part of each class"
        )


def check_weights(weights: Any, count: int, name: str) -> np.ndarray:
    refuse_masked(weights, f"{name}: weights")
    try:
        checked = np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: weights are not numbers ({error}); give one for each training example") from error
    if checked.shape != (count,):
        raise UserError(
            f"{name}: weights of shape {list(checked.shape)} for {count} training examples; give one to each"
        )
    bad = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if len(bad):
        raise UserError(f"{name}: weight {bad[0]} is {checked[bad[0]]}; give finite numbers, 0 or more")
    return checked


def _scale_weights(weights: np.ndarray, name: str) -> np.ndarray:
    """Weights of mean 1."""
    if not weights.any():
        raise UserError(f"{name}: all weights of the training examples are 0; give some a weight above 0")
    scaled: np.ndarray = (weights / weights.mean()).astype(np.float32)
    return scaled


def _fingerprint(train: Source, test: Source, weights: np.ndarray | None) -> str:
    with ThreadPoolExecutor(2) as pool:
        parts = [*pool.map(lambda split: split.checksum(), (train, test))]
    if weights is not None:
        parts.append(weights.tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
