"""What a run answers to files: images, folders of them, .npz and .csv; few in tables, many to a .csv or .npz file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from rich.console import Group
from torch import Tensor

from mheads import api
from mheads.data.arrays import Unlabelled
from mheads.data.catalog import DATASETS
from mheads.data.folder import in_threads
from mheads.data.images import SUFFIXES
from mheads.data.split import Beside
from mheads.data.tables import ARRAYS, read_array, read_csv
from mheads.errors import UserError
from mheads.files import check_place, write_atomically
from mheads.measuring import answers, in_eval_mode
from mheads.parts import threads_engine
from mheads.prepared import beside, check, raw_examples
from mheads.problems import Classification, MultiLabel
from mheads.progress import Watcher, telling
from mheads.run import Run
from mheads.terminal.answers import answers as shown
from mheads.terminal.answers import answers_to_image

FEW = 10  # images that get a table each
SHOWN = 100  # lines of a table; the rest is for a file
WRITTEN = (".csv", ".npz")


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, as a split: they are decoded batch by batch, in threads, when they are read."""

    run: Run
    files: Sequence[Path]
    stretch: bool

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
        out = np.empty((len(rows), height, width, channels), np.uint8)

        def decode(i: int) -> None:
            out[i] = read_image(self.files[rows[i]], self.run, self.stretch).transpose(1, 2, 0)

        in_threads(decode, len(rows))
        if rows[0] == 0:  # the first batch stands for all
            check(torch.from_numpy(out), self.run.data, "the images")
        return torch.from_numpy(out)

    def beside(self, rows: np.ndarray, seeds: np.ndarray | None) -> Beside:
        return Beside(torch.zeros(len(rows)))

    def places(self, seeds: np.ndarray) -> None:
        return None


@dataclass(frozen=True)
class Asked:
    """Examples that are asked about together: the rows of a file, or images."""

    file: Path | None  # of rows
    examples: Unlabelled | ImageFiles

    def name(self, i: int) -> tuple[str, str]:
        """File and row of an example; an image has no row."""
        if isinstance(self.examples, ImageFiles):
            return str(self.examples.files[i]), ""
        return str(self.file), str(i)


def predict_files(
    path: Path,
    files: Sequence[Path],
    resize: bool,
    watch: Watcher,
    trust: bool = False,
    output: Path | None = None,
) -> Iterator[Group]:
    """Tables of what every member and the ensemble answer; with `output` none, but the answers in that file."""
    if output is not None and output.suffix.lower() not in WRITTEN:
        raise UserError(f"{output}: answers are written to .csv, and outputs to .npz; give one of these")
    if output is not None and check_place(output).resolve() in [file.resolve() for file in files]:
        raise UserError(f"{output} is also what is asked about: give another file for the answers")
    run = api.load(path, trust=trust, warn=watch.warn)
    if run.data.problem.name == "detection":
        raise UserError(f"{path} finds objects in images: mheads detect show draws them")
    with telling(watch):
        asked = _asked(run, files, resize)
        if output is not None:
            _write(run, asked, output, watch)
            count = sum(len(part.examples) for part in asked)
            watch.say(f"{output}: {count:,} example{'s' if count > 1 else ''}")
            return
        found_for = []
        for part in asked:
            _, found, weights = zip(*_answers(run, [part], watch), strict=True)
            found_for.append((part, torch.cat(found, 1), None if weights[0] is None else torch.cat(weights, 1)))
    for part, whole, counted in found_for:
        yield from _tables(run, part, whole.double(), counted, watch)


def _asked(run: Run, files: Sequence[Path], resize: bool) -> list[Asked]:
    """What there is to ask, in the order of the files; images that follow one another go together."""
    asked: list[Asked] = []
    images: list[Path] = []

    def flush() -> None:
        if images:
            asked.append(Asked(None, ImageFiles(run, tuple(images), resize)))
            images.clear()

    for file in files:
        if file.suffix.lower() in ARRAYS and not file.is_dir():
            flush()
            raw = raw_examples(read_examples(file, run), run.data)
            check(raw, run.data)
            asked.append(Asked(file, Unlabelled(raw, beside(read_side(file), len(raw), run.data, str(file)))))
            continue
        found = _images_in(file) if file.is_dir() else [file]
        for image in found:
            _refuse_no_image(image, run)
        images += found
    flush()
    return asked


def _images_in(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
    return found


Answers = tuple[list[tuple[str, str]], Tensor, Tensor | None]


def _answers(run: Run, asked: Sequence[Asked], watch: Watcher) -> Iterator[Answers]:
    """Names, answers [M, b, ...] and, if members have scores, weights [M, b] of a batch after the other."""
    with closing(threads_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
        for part in asked:
            start = 0
            for found, weights, _ in answers(engine, part.examples, run.data.inputs, run.data.problem, watch):
                count = found.shape[1]
                names = [part.name(i) for i in range(start, start + count)]
                yield names, found.cpu(), None if weights is None else weights.cpu()
                start += count


def _write(run: Run, asked: Sequence[Asked], path: Path, watch: Watcher) -> None:
    def write(file: IO[bytes]) -> None:
        batches = _answers(run, asked, watch)
        _write_csv(run, batches, file) if path.suffix.lower() == ".csv" else _write_npz(run, batches, file)

    write_atomically(path, write)


def _write_csv(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """A line for each example, written as they come: memory does not grow with their number."""
    problem = run.data.problem
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text)
    for number, (names, found, weights) in enumerate(batches):
        found = found.double()
        if found.dim() != 3:
            raise UserError(
                f"a row of a .csv has no room for outputs of shape {tuple(found.shape[2:])} per example: write an .npz"
            )
        mean = problem.mean(found)
        together = [mean] if weights is None else [mean, problem.mean(found, weights)]
        members = [f"member_{m}" for m in range(len(found))]
        if isinstance(problem, Classification):
            votes, best = found.argmax(-1), [p.max(-1) for p in together]
            scored = [] if weights is None else ["scored_answer", "scored_probability"]
            columns = ["answer", "probability", *scored, "agreement", *members]
            agreement = (votes == best[0].indices).double().mean(0)
            lines = [
                [text for b in best for text in (problem.classes[b.indices[i]], f"{b.values[i]:.6g}")]
                + [f"{agreement[i]:.6g}"]
                + [problem.classes[vote] for vote in votes[:, i]]
                for i in range(len(names))
            ]
        else:
            labels = problem.classes if isinstance(problem, MultiLabel) else range(found.shape[2])
            several, who = len(labels) > 1, ["mean", "scored"][: len(together)] + members
            columns = [f"{one}_{label}" if several else one for one in who for label in labels]
            said = found.sigmoid() if isinstance(problem, MultiLabel) else found  # probabilities, as their mean is
            numbers = torch.cat([torch.stack(together), said]).permute(1, 0, 2).flatten(1)  # [b, answers x D]
            lines = [[f"{x:.9g}" for x in row] for row in numbers]
        if number == 0:
            writer.writerow(["file", "row", *columns])
        writer.writerows([*name, *line] for name, line in zip(names, lines, strict=True))
    text.detach()


def _write_npz(run: Run, batches: Iterator[Answers], file: IO[bytes]) -> None:
    """outputs [M, N, ...], names [N]; of classes and labels also probabilities [N, C] of the ensemble, and their names.

    Members with scores add weights [M, N], and of classes and labels scored_probabilities [N, C].
    """
    names: list[str] = []
    parts: list[Tensor] = []
    counted: list[Tensor] = []
    for found_names, found, weights in batches:
        names += [f"{name}:{row}" if row else name for name, row in found_names]
        parts.append(found)
        counted += [] if weights is None else [weights]
    outputs = torch.cat(parts, 1)
    arrays = {"outputs": outputs.numpy(), "names": np.array(names)}
    problem = run.data.problem
    if counted:
        arrays["weights"] = torch.cat(counted, 1).numpy()
    if isinstance(problem, Classification | MultiLabel):
        means = torch.cat([problem.mean(part.double()) for part in parts])
        arrays |= {"probabilities": means.numpy(), "classes": np.array(problem.classes)}
        if counted:
            scored = [problem.mean(part.double(), weights) for part, weights in zip(parts, counted, strict=True)]
            arrays["scored_probabilities"] = torch.cat(scored).numpy()
    np.savez(file, **arrays)  # type: ignore[arg-type]


def _tables(run: Run, part: Asked, found: Tensor, weights: Tensor | None, watch: Watcher) -> Iterator[Group]:
    """Of answers [M, N, ...] and weights [M, N]: a table for each of a few images, else one with a line for each."""
    problem, count = run.data.problem, found.shape[1]
    images = part.examples.files if isinstance(part.examples, ImageFiles) else None
    if images is not None and count <= FEW:
        for i, image in enumerate(images):
            outputs, count_of = found[:, i : i + 1], None if weights is None else weights[:, i : i + 1]
            if isinstance(problem, Classification):
                together = [problem.mean(outputs)[0]]
                together += [] if count_of is None else [problem.mean(outputs, count_of)[0]]
                yield answers_to_image(image, outputs[:, 0].softmax(-1), problem.classes, together)
            else:
                yield shown(str(image), outputs, problem, weights=count_of)
        return
    title = str(part.file) if images is None else f"{count:,} images"
    names = None if images is None else [str(image) for image in images[:SHOWN]]
    yield shown(title, found[:, :SHOWN], problem, names, None if weights is None else weights[:, :SHOWN])
    if count > SHOWN:
        watch.say(f"these are {SHOWN} of {count:,}: -o answers.csv, or .npz, writes all")


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
    with np.load(path, allow_pickle=False) as file:
        keys = [key for key in file if key.startswith("side_") and not key.endswith("_train")]
        return {key.removeprefix("side_").removesuffix("_test"): file[key] for key in keys}
