"""The last steps that all datasets share: hold out, limit, check labels, measure the mean, fingerprint."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from mheads.data.preprocess import fit_preprocess
from mheads.data.split import Data, Source, Split
from mheads.errors import UserError

S = TypeVar("S", bound=Source)


def assemble(
    name: str,
    train: S,
    test: S,
    classes: tuple[str, ...],
    *,
    normalize: str = "none",
    validation: int = 0,
    scale: float = 1.0,
    limit: int | None = None,
    statistics: int | None = None,
) -> Data:
    """Data from its two splits; `statistics` caps the number of examples that the mean is measured on."""
    if not scale > 0:
        raise UserError(f"{name}: data.scale is {scale}; raw values are multiplied by it, so give a number above 0")
    if validation:
        if not 0 < validation < len(train):
            raise UserError(
                f"{name}: data.validation is {validation}; it must leave some of the {len(train)} training"
                f" examples, so give 0 to {len(train) - 1}"
            )
        kept = len(train) - validation
        train, test = train.part(slice(kept)), train.part(slice(kept, None))
    if limit is not None:
        if limit < 1:
            raise UserError(f"{name}: data.limit is {limit}; give the number of examples to keep, 1 or more")
        train, test = train.part(slice(limit)), test.part(slice(limit))
    test = test.fixed()
    if not len(train):
        raise UserError(f"{name}: there are no training examples")
    if len(test) and test.shape != train.shape:
        raise UserError(
            f"{name}: training examples have shape {train.shape} but test examples {test.shape};"
            " make them the same size"
        )
    check_labels(train, len(classes), f"{name}: train")
    check_labels(test, len(classes), f"{name}: test")
    preprocess = fit_preprocess(train, normalize, scale, statistics)
    return Data(name, train, test, classes, preprocess, _fingerprint(train, test))


def check_labels(split: Split, num_classes: int, where: str) -> None:
    """Refuse labels that are not the number of a class."""
    bad = np.flatnonzero((split.labels < 0) | (split.labels >= num_classes))
    if len(bad):
        raise UserError(
            f"{where}: example {bad[0]} has label {split.labels[bad[0]]}, but the {num_classes} classes are"
            f" numbered 0 to {num_classes - 1} ({len(bad)} such labels); correct the labels or name all classes"
        )


def _fingerprint(*splits: Source) -> str:
    with ThreadPoolExecutor(len(splits)) as pool:
        return hashlib.sha256(b"".join(pool.map(lambda split: split.checksum(), splits))).hexdigest()[:16]
