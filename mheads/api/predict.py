"""What a run answers to files: images, folders of them, .npz and .csv; few in tables, many to a .csv or .npz file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from mheads.api.load import load
from mheads.api.raw_examples import as_raw_examples, check_raw_examples, read_side_inputs
from mheads.api.run import Run
from mheads.api.write_predictions import Answers, write_csv, write_npz
from mheads.common import packed_arrays
from mheads.common.atomic_files import check_place, write_atomically
from mheads.common.errors import UserError
from mheads.common.progress import Watcher, telling
from mheads.data.arrays import Unlabelled
from mheads.data.catalog import DATASETS
from mheads.data.readers.image_crops import run_in_threads
from mheads.data.readers.image_files import SUFFIXES, UnreadableError
from mheads.data.readers.unlabelled import ARRAYS, read_array, read_csv
from mheads.data.splits import TargetRows
from mheads.engine.measure import answers, in_eval_mode
from mheads.problems import finds_objects
from mheads.training.build_from_config import make_engine

WARNED = 10  # images that cannot be read, one by one
WRITTEN = (".csv", ".npz")


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, as a split: they are decoded batch by batch, in threads, when they are read.

    One that was `found` in a folder and cannot be read does not stop the others: it is noted in `unread`, by its row.
    """

    run: Run
    files: Sequence[Path]
    stretch: bool
    found: frozenset[Path] = frozenset()
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
                if file not in self.found:
                    raise
                self.unread[int(rows[i])] = str(error)

        run_in_threads(decode, len(rows))
        if rows[0] == 0 and len(
            good := out[[row not in self.unread for row in rows]]
        ):  # the first batch stands for all
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
class Asked:
    """Examples that are asked about together: the rows of a file, or images."""

    file: Path | None  # of rows
    examples: Unlabelled | ImageFiles

    @property
    def unread(self) -> dict[int, str]:
        """By row, why an image could not be read; known when it was tried."""
        return self.examples.unread if isinstance(self.examples, ImageFiles) else {}

    def name(self, i: int) -> tuple[str, str]:
        """File and row of an example; an image has no row."""
        if isinstance(self.examples, ImageFiles):
            return str(self.examples.files[i]), ""
        return str(self.file), str(i)


@dataclass(frozen=True)
class Predicted:
    """What the members of a run answer to examples: outputs [M, N, ...], and weights [M, N] if members have scores."""

    run: Run
    asked: Asked
    outputs: Tensor
    weights: Tensor | None

    @property
    def images(self) -> list[Path] | None:
        """The image files that were read, if these are images."""
        examples = self.asked.examples
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
    with telling(watch):
        asked = _asked(run, files, resize)
        if output is not None:
            _write(run, asked, output, watch)
            count = sum(len(part.examples) - len(part.unread) for part in asked)
            _warn_of_unread(asked, watch, left_out)
            watch.say(f"{output}: {count:,} example{'s' if count > 1 else ''}")
            return
        found_for = []
        for part in asked:
            _, found, weights = zip(*_answers(run, [part], watch), strict=True)
            found_for.append((part, torch.cat(found, 1), None if weights[0] is None else torch.cat(weights, 1)))
        _warn_of_unread(asked, watch, left_out)
    for part, whole, counted in found_for:
        yield Predicted(run, part, whole.double(), counted)


def _warn_of_unread(asked: Sequence[Asked], watch: Watcher, left_out: list[str] | None) -> None:
    why = [said for part in asked for _, said in sorted(part.unread.items())]
    for said in why[:WARNED]:
        watch.warn(f"left out: {said}")
    if len(why) > WARNED:
        watch.warn(f"left out: {len(why) - WARNED:,} more")
    if left_out is not None:
        left_out += why


def _asked(run: Run, files: Sequence[Path], resize: bool) -> list[Asked]:
    """What there is to ask, in the order of the files; images that follow one another go together."""
    asked: list[Asked] = []
    images: list[Path] = []
    in_folders: set[Path] = set()

    def flush() -> None:
        if images:
            asked.append(Asked(None, ImageFiles(run, tuple(images), resize, frozenset(in_folders - set(files)))))
            images.clear()

    for file in files:
        if file.suffix.lower() in ARRAYS and not file.is_dir():
            flush()
            raw = as_raw_examples(read_examples(file, run), run.data)
            asked.append(
                Asked(file, Unlabelled(raw, side=read_side_inputs(read_side(file), len(raw), run.data, str(file))))
            )
            continue
        found = _images_in(file) if file.is_dir() else [file]
        for image in found:
            _refuse_no_image(image, run)
        images += found
        in_folders |= set(found) if file.is_dir() else set()
    flush()
    return asked


def _images_in(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
    return found


def _answers(run: Run, asked: Sequence[Asked], watch: Watcher) -> Iterator[Answers]:
    """Names, answers [M, b, ...] and, if members have scores, weights [M, b] of a batch after the other.

    Images that could not be read are left out; if none could be, that is an error.
    """
    with closing(make_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
        for part in asked:
            start = 0
            for found, weights, _ in answers(engine, part.examples, run.data.inputs, run.data.problem, watch):
                count = found.shape[1]
                kept = [i for i in range(count) if start + i not in part.unread]
                names = [part.name(start + i) for i in kept]
                yield names, found.cpu()[:, kept], None if weights is None else weights.cpu()[:, kept]
                start += count
            if part.unread and len(part.unread) == len(part.examples):
                raise UserError(f"none of {len(part.unread):,} images can be read: {next(iter(part.unread.values()))}")


def _write(run: Run, asked: Sequence[Asked], path: Path, watch: Watcher) -> None:
    def write(file: IO[bytes]) -> None:
        batches = _answers(run, asked, watch)
        write_csv(run, batches, file) if path.suffix.lower() == ".csv" else write_npz(run, batches, file)

    write_atomically(path, write)


def _refuse_no_image(path: Path, run: Run) -> None:
    if len(run.data.shape) != 3 or run.data.shape[0] not in (1, 3):
        raise UserError(f"{run.folder} was trained on examples of shape {run.data.shape}, not on images")
    if not path.is_file():
        raise UserError(f"there is no image {path}")


def read_image(path: Path, run: Run, resize: bool) -> np.ndarray:
    """The image as uint8 [C, H, W] of the size that the run was trained on."""
    _refuse_no_image(path, run)
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
        with packed_arrays.opened(path) as file:
            keys = [key for key in file if key.startswith("side_") and not key.endswith("_train")]
            return {key.removeprefix("side_").removesuffix("_test"): file[key] for key in keys}
    except ValueError as error:
        raise UserError(f"{path}: its side inputs cannot be read ({error})") from error
