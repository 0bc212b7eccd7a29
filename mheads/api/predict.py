"""What a run answers to files: images, folders of them, .npz and .csv; few in tables, many to a .csv or .npz file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from mheads.api.raw_examples import as_raw_examples, check_raw_examples, read_side_inputs
from mheads.api.run import Run, load
from mheads.common import packed_arrays
from mheads.common.atomic_files import check_place, write_atomically
from mheads.common.errors import UserError
from mheads.common.progress import Watcher, forward_warnings
from mheads.data.arrays import Unlabelled
from mheads.data.catalog import DATASETS
from mheads.data.readers.csv_table import read_csv
from mheads.data.readers.image_crops import run_in_threads
from mheads.data.readers.image_files import SUFFIXES, UnreadableError
from mheads.data.readers.unlabelled import read_array
from mheads.data.splits import TargetRows
from mheads.engine.measure import answers, in_eval_mode
from mheads.problems import finds_objects, gives_probabilities
from mheads.training.build_from_config import make_engine

WARNED = 10  # images that cannot be read, one by one
ARRAYS = (".npz", ".csv")  # files of many examples
WRITTEN = (".csv", ".npz")


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, as a split: they are decoded batch by batch, in threads, when they are read.

    One from a folder (`optional`) that cannot be read does not stop the others: it is noted in `unread`, by its row.
    """

    run: Run
    files: Sequence[Path]
    stretch: bool
    optional: frozenset[Path] = frozenset()
    unread: dict[int, str] = field(default_factory=dict)

    @property
    def targets(self) -> np.ndarray:
        return np.zeros(len(self.files))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.run.data.shape

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Tensor:
        channels, height, width = self.shape
        out = np.zeros((len(rows), height, width, channels), np.uint8)

        def decode(i: int) -> None:
            file = self.files[rows[i]]
            try:
                out[i] = read_image(file, self.run, self.stretch).transpose(1, 2, 0)
            except UnreadableError as error:
                if file not in self.optional:
                    raise
                self.unread[int(rows[i])] = str(error)

        run_in_threads(decode, len(rows))
        good = out[[row not in self.unread for row in rows]]
        if rows[0] == 0 and len(good):  # the first batch stands for all
            check_raw_examples(torch.from_numpy(good), self.run.data, "the images")
        return torch.from_numpy(out)

    @property
    def readable(self) -> list[Path]:
        return [file for row, file in enumerate(self.files) if row not in self.unread]

    def read_targets(self, rows: np.ndarray, seeds: np.ndarray | None) -> TargetRows:
        return TargetRows(torch.zeros(len(rows)))

    def places(self, seeds: np.ndarray) -> None:
        return None


@dataclass(frozen=True)
class ExampleGroup:
    """Examples that are predicted together, the rows of a file or images, and the file and row of each."""

    examples: Unlabelled | ImageFiles
    names: Sequence[tuple[str, str]]  # an image has no row

    @property
    def unread(self) -> dict[int, str]:
        """By row, why an image could not be read; known when it was tried."""
        return self.examples.unread if isinstance(self.examples, ImageFiles) else {}


@dataclass(frozen=True)
class Predicted:
    """What the members of a run answer to examples: outputs [M, N, ...], and weights [M, N] if members have scores."""

    run: Run
    group: ExampleGroup
    outputs: Tensor
    weights: Tensor | None

    @property
    def images(self) -> list[Path] | None:
        """The image files that were read, if these are images."""
        examples = self.group.examples
        return examples.readable if isinstance(examples, ImageFiles) else None


def predict_files(
    path: Path,
    files: Sequence[Path],
    resize: bool,
    watch: Watcher,
    trust: bool = False,
    output: Path | None = None,
    left_out: list[str] | None = None,
) -> Iterator[Predicted]:
    """What every member answers; with `output` nothing is given back, and the answers are in that file.

    Images in folders that cannot be read are warned of and added to `left_out`.
    """
    if output is not None and output.suffix.lower() not in WRITTEN:
        raise UserError(f"{output}: answers are written to .csv, and outputs to .npz; give one of these")
    if output is not None and check_place(output).resolve() in [file.resolve() for file in files]:
        raise UserError(f"{output} is also what is asked about: give another file for the answers")
    run = load(path, trust=trust, warn=watch.warn)
    if finds_objects(run.data.problem):
        raise UserError(f"{path} finds objects in images: mheads detect show draws them")
    with forward_warnings(watch):
        groups = _group_examples(run, files, resize)
        if output is not None:
            _write(run, groups, output, watch)
            count = sum(len(group.examples) - len(group.unread) for group in groups)
            _warn_of_unread(groups, watch, left_out)
            watch.say(f"{output}: {count:,} example{'s' if count > 1 else ''}")
            return
        predictions = []
        for group in groups:
            _, outputs, weights = zip(*_answer(run, [group], watch), strict=True)
            scored = None if weights[0] is None else torch.cat(weights, 1)
            predictions.append(Predicted(run, group, torch.cat(outputs, 1).double(), scored))
        _warn_of_unread(groups, watch, left_out)
    yield from predictions


def _warn_of_unread(groups: Sequence[ExampleGroup], watch: Watcher, left_out: list[str] | None) -> None:
    reasons = [reason for group in groups for _, reason in sorted(group.unread.items())]
    for reason in reasons[:WARNED]:
        watch.warn(f"left out: {reason}")
    if len(reasons) > WARNED:
        watch.warn(f"left out: {len(reasons) - WARNED:,} more")
    if left_out is not None:
        left_out += reasons


def _group_examples(run: Run, files: Sequence[Path], resize: bool) -> list[ExampleGroup]:
    """The examples in the order of the files; images that follow one another go together."""
    groups: list[ExampleGroup] = []
    in_folders: set[Path] = set()
    for is_array, part in groupby(files, lambda file: file.suffix.lower() in ARRAYS and not file.is_dir()):
        if is_array:
            groups += [_read_array_file(run, file) for file in part]
            continue
        images: list[Path] = []
        for file in part:
            listed = _images_in(file) if file.is_dir() else [file]
            for image in listed:
                _check_image(image, run)
            images += listed
            in_folders |= set(listed) if file.is_dir() else set()
        examples = ImageFiles(run, tuple(images), resize, frozenset(in_folders - set(files)))
        groups.append(ExampleGroup(examples, [(str(image), "") for image in images]))
    return groups


def _read_array_file(run: Run, file: Path) -> ExampleGroup:
    raw = as_raw_examples(read_examples(file, run), run.data)
    side = read_side_inputs(read_side(file), len(raw), run.data, str(file))
    return ExampleGroup(Unlabelled(raw, side=side), [(str(file), str(row)) for row in range(len(raw))])


def _images_in(folder: Path) -> list[Path]:
    images = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not images:
        raise UserError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
    return images


def _answer(run: Run, groups: Sequence[ExampleGroup], watch: Watcher) -> Iterator[Answers]:
    """Names, answers [M, b, ...] and, if members have scores, weights [M, b] of a batch after the other.

    Images that could not be read are left out; if none could be, that is an error.
    """
    with closing(make_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
        for group in groups:
            start = 0
            for outputs, weights, _ in answers(engine, group.examples, run.data.inputs, run.data.problem, watch):
                count = outputs.shape[1]
                kept = [i for i in range(count) if start + i not in group.unread]
                names = [group.names[start + i] for i in kept]
                yield names, outputs.cpu()[:, kept], None if weights is None else weights.cpu()[:, kept]
                start += count
            if group.unread and len(group.unread) == len(group.examples):
                reason = next(iter(group.unread.values()))
                raise UserError(f"none of {len(group.unread):,} images can be read: {reason}")


def _write(run: Run, groups: Sequence[ExampleGroup], path: Path, watch: Watcher) -> None:
    def write(file: IO[bytes]) -> None:
        batches = _answer(run, groups, watch)
        write_csv(run, batches, file) if path.suffix.lower() == ".csv" else write_npz(run, batches, file)

    write_atomically(path, write)


def _check_image(path: Path, run: Run) -> None:
    if len(run.data.shape) != 3 or run.data.shape[0] not in (1, 3):
        raise UserError(
            f"{path}: {run.folder} was trained on examples of shape {run.data.shape}, not on images; give "
            f"{' or '.join(ARRAYS)}"
        )
    if not path.is_file():
        raise UserError(f"there is no image {path}")


def read_image(path: Path, run: Run, resize: bool) -> np.ndarray:
    """The image as uint8 [C, H, W] of the size that the run was trained on."""
    _check_image(path, run)
    # Arrays that Python gave to fit are like those of a file.
    entry = DATASETS.get(run.config.data.name, DATASETS["npz"])
    return entry.example(path, run.data.shape, resize=run.config.data.resize, stretch=resize, where=str(run.folder))


def read_examples(path: Path, run: Run) -> np.ndarray:
    """The examples [N, ...] of a .npz file (its array x, x_test or only one) or of a .csv file (rows of numbers)."""
    if path.suffix.lower() == ".npz":
        return read_array(path, ("x", "x_test"))
    rows = read_csv(path)
    values = int(np.prod(run.data.shape))
    if rows.shape[1] != values:
        raise UserError(
            f"{path} has {rows.shape[1]} numbers per row, but {run.folder} was trained on examples of {values}: "
            "give a row of these for each, without labels"
        )
    if run.data.seen is not None and run.data.seen.kind == "tokens" and (rows == rows.round()).all():
        return rows.astype(np.int64)
    return rows.reshape(-1, *run.data.shape)


def read_side(path: Path) -> dict[str, np.ndarray]:
    """The side inputs in a .npz file: arrays side_NAME, or side_NAME_test as in a file to train on."""
    if path.suffix.lower() != ".npz":
        return {}
    try:
        with packed_arrays.open_arrays(path) as file:
            keys = [key for key in file if key.startswith("side_") and not key.endswith("_train")]
            return {key.removeprefix("side_").removesuffix("_test"): file[key] for key in keys}
    except ValueError as error:
        raise UserError(f"{path}: its side inputs cannot be read ({error})") from error


Answers = tuple[list[tuple[str, str]], Tensor, Tensor | None]  # of a batch: names, [M, b, ...], and weights [M, b]


def write_csv(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """A line for each example, written as they come: memory does not grow with their number."""
    problem = run.data.problem
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text)
    for number, (names, members, weights) in enumerate(batches):
        members = members.double()
        answers = problem.answer_columns(members, problem.together(members, weights))
        if number == 0:
            of_members = [] if weights is None else [f"weight_{m}" for m in range(len(weights))]
            writer.writerow(map(_cell, ["file", "row", *answers.names, *of_members]))
        shares = [[] for _ in names] if weights is None else [[f"{w:.6g}" for w in row] for row in weights.t().tolist()]
        lines = zip(names, answers.lines, shares, strict=True)
        writer.writerows(map(_cell, [*name, *line, *share]) for name, line, share in lines)
    text.detach()


def _cell(text: str) -> str:
    """Text that a spreadsheet would take for a formula, behind a quote; numbers are as they are."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def write_npz(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """outputs [M, N, ...], names [N]; of classes and labels also probabilities [N, C] of the ensemble, and their names.

    Members with scores add weights [M, N], and of classes and labels mean_probabilities [N, C].
    """
    names: list[str] = []
    parts: list[Tensor] = []
    scores: list[Tensor] = []
    for places, outputs, weights in batches:
        names += [f"{name}:{row}" if row else name for name, row in places]
        parts.append(outputs)
        scores += [] if weights is None else [weights]
    arrays = {"outputs": torch.cat(parts, 1).numpy(), "names": np.array(names)}
    problem = run.data.problem
    if scores:
        arrays["weights"] = torch.cat(scores, 1).numpy()
    if gives_probabilities(problem):
        together = [problem.together(part.double(), scores[i] if scores else None) for i, part in enumerate(parts)]
        for name, found in zip(("probabilities", "mean_probabilities"), zip(*together, strict=True), strict=False):
            arrays[name] = torch.cat(found).numpy()
        arrays["classes"] = np.array(problem.classes)
    np.savez(file, **arrays)  # type: ignore[arg-type]
