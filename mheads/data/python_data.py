"""What `fit` and `evaluate` take for data: arrays, lists of pairs, torch datasets and loaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from mheads.common import seeds
from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.data.arrays import ArraySplit, as_side, as_split, to_numpy, with_augmentation
from mheads.data.assembly import assemble
from mheads.data.data_section import read_options
from mheads.data.splits import Data
from mheads.data.targets import pose_targets
from mheads.data.torch_dataset import DatasetSplit, item_of, read_dataset, same_names, stack, stack_side
from mheads.problems import Problem

FORMS = "(examples, labels), (examples, labels, {name: side input}), a list of pairs, a torch Dataset or a DataLoader"
FILE_KEYS = ("root", "path", "test_path", "table", "fold", "arrays", "resize", "crop", "grey", "regions")


def from_arrays(
    train: Any,
    test: Any,
    *,
    classes: Sequence[str] | None = None,
    hold_out: int | None = None,
    weights: Any = None,
    name: str = "arrays",
    **keys: Any,
) -> Data:
    """A dataset from (examples, labels), lists of pairs, torch Datasets or DataLoaders.

    Examples: images [N, C, H, W] or [N, H, W], uint8 or float, or vectors [N, F]; items of a list or Dataset may be
    Pillow images. Labels: integers [N], or names; or other targets, as docs/data.md says; `problem` says what they are
    where they alone do not decide. Without `test` (and without `validation`) the test split is empty,
    or with the seed `hold_out` a tenth of the training examples, of each class its share. Without `classes` they are
    the sorted names of the training labels, or numbered up to the largest label. `weights` [N] say how much each
    training example counts. The other keywords are keys of `data.` in a config.
    """
    if of_files := [key for key in keys if key in FILE_KEYS]:
        raise UserError(f"{of_files[0]}={short(keys[of_files[0]])} is for data in files: leave it out")
    options = read_options(name=name, **keys)
    splits = {"train": as_source(train, f"{name}: train")}
    if test is not None:
        splits["test"] = as_source(test, f"{name}: test")
    sources, problem = pose_targets(splits, classes, "auto" if options.problem == "examples" else options.problem)
    held_out = hold_out if test is None and not options.validation else None
    empty = sources["train"].part(slice(0))
    return assemble(
        with_augmentation(sources["train"], options), sources.get("test", empty), problem, options,
        hold_out=held_out, weights=weights,
    )  # fmt: skip


def as_source(examples: Any, where: str) -> ArraySplit | DatasetSplit:
    """A split of what the user gives for examples; labels that are names stay names."""
    if isinstance(examples, DataLoader):
        return _read_loader(examples, where)
    if isinstance(examples, TensorDataset) and len(examples.tensors) == 2:
        return as_split(examples.tensors[0], examples.tensors[1], where)
    if isinstance(examples, (list, tuple)):
        if len(examples) == 2 and (
            isinstance(examples, tuple) or not any(isinstance(part, tuple) for part in examples)
        ):
            return as_split(examples[0], examples[1], where)
        if isinstance(examples, tuple) and len(examples) == 3 and isinstance(examples[2], Mapping):
            return as_split(examples[0], examples[1], where, examples[2])
        return _stack_items(examples, where)
    readable = isinstance(examples, Dataset) or (hasattr(examples, "__getitem__") and hasattr(examples, "__len__"))
    if isinstance(examples, (np.ndarray, torch.Tensor)):
        shape = list(examples.shape)
        raise UserError(f"{where}: an array of shape {shape} holds examples, and the targets are missing: give (x, y)")
    if isinstance(examples, (dict, str)) or not (readable or isinstance(examples, Iterable)):
        raise UserError(f"{where}: not a {type(examples).__name__}; give {FORMS}")
    return (
        read_dataset(examples, where)
        if readable and not isinstance(examples, IterableDataset)
        else _stack_items(examples, where)
    )


def read_arrays(
    train: tuple[Any, ...],
    test: tuple[Any, ...],
    where: str,
    classes: Sequence[str] | None = None,
    problem: str = "auto",
) -> tuple[ArraySplit, ArraySplit, Problem]:
    """Train and test splits and the problem of two pairs (examples, targets), as readers in the catalog give them.

    Examples, targets and, after them, side inputs as `from_arrays` takes them; `where` names them in messages.
    """
    pairs = {"train": train, "test": test}
    splits = {part: as_split(x, y, f"{where}: {part}", *side) for part, (x, y, *side) in pairs.items()}
    splits, solved = pose_targets(splits, classes, problem)
    return splits["train"], splits["test"], solved


def _read_once(items: Iterable[Any], where: str) -> list[Any]:
    """All items, drawn with the same seed each time, so that a resumed run sees the same."""
    with seeds.keep_generators() as seed:
        seed(seeds.derive("stream"))
        kept = list(items)
    if not kept:
        raise UserError(f"{where}: there are no examples; give at least one")
    return kept


def _stack_items(examples: Iterable[Any], where: str) -> ArraySplit:
    kept = _read_once(examples, where)
    items = [item_of(kept, row, where) for row in range(len(kept))]
    return as_split(*stack(items, where), where, stack_side([item.side for item in items], where))


def _read_loader(loader: DataLoader[Any], where: str) -> ArraySplit | DatasetSplit:
    """The loader's dataset if the loader gives each item once; else what the loader gives in one pass."""
    dataset, sampler = loader.dataset, loader.sampler
    if loader.batch_sampler is not None:  # batches, put together by collate_fn
        sampler = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    by_row = loader.batch_sampler is None or loader.collate_fn is default_collate
    if not isinstance(dataset, IterableDataset) and by_row:
        once = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)  # type: ignore[arg-type]
        if type(sampler) is SequentialSampler or once:
            return as_source(dataset, where)
        if type(sampler) is SubsetRandomSampler:
            return as_source(Subset(dataset, sorted(sampler.indices)), where)
        raise UserError(
            f"{where}: the loader draws by a {type(sampler).__name__}, but fit draws its examples itself, by the seed;"
            " give the dataset alone, and weights=[N] if some examples should count more"
        )
    if loader.batch_sampler is None:
        return _stack_items(loader, where)
    examples, labels, sides = [], [], []
    for row, batch in enumerate(_read_once(loader, where)):
        x, y, side = item_of([batch], 0, f"{where} batch {row}")
        examples.append(to_numpy(x))
        labels.append(to_numpy(y))
        sides.append(as_side(side, len(labels[-1]), f"{where} batch {row}"))
    together = {name: np.concatenate([side[name] for side in sides]) for name in same_names(sides, where)}
    return as_split(np.concatenate(examples), np.concatenate(labels), where, together)
