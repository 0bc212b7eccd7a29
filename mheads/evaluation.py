"""What is done with finished runs: evaluate them on their test set, and ask them about images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mheads import api, experiment, values
from mheads.checkpoint import write_atomically
from mheads.data.batch import evaluation_batches
from mheads.data.catalog import DATASETS
from mheads.data.folder import read_crop
from mheads.errors import UserError
from mheads.metrics import Metrics
from mheads.progress import Watcher
from mheads.runs import RunFolder
from mheads.train import EVALUATION_ROWS, summary


def evaluate_run(path: Path, outputs_file: Path | None, watch: Watcher) -> dict[str, Any]:
    """The metrics of a run computed anew; optionally the outputs [M, N, C] and labels [N] they follow from."""
    folder = RunFolder(path)
    config = folder.read_config()
    if outputs_file is not None and not outputs_file.parent.is_dir():
        raise UserError(f"cannot write {outputs_file}: there is no folder {outputs_file.parent}")
    if config.data.name not in DATASETS:
        raise UserError(f"{path} was trained from Python on arrays: evaluate it there, mheads.evaluate(net, (x, y))")
    net = experiment.build_net(config, weights=False)
    folder.load_weights(net)
    data = experiment.load_data(config)
    if data.fingerprint != folder.read_data().fingerprint:
        raise UserError(
            f"{path} was trained on other data than {data.name} is now: checksum "
            f"{folder.read_data().fingerprint} there, {data.fingerprint} now; bring back the data it was trained on"
        )
    built = experiment.Experiment(config, net, experiment.build_loss(config), data, None)
    engine = built.engine()
    metrics = Metrics(net.num_members, len(data.classes))
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        readers = evaluation_batches(data.test, data.preprocess, EVALUATION_ROWS)
        with watch.evaluating(len(data.test)) as advance:
            for outputs, targets in engine.outputs(readers):
                outputs = values.leaves(outputs)[0]  # scores come first
                metrics.update(outputs, targets)
                if outputs_file is not None:
                    kept.append((outputs.cpu().numpy(), targets.cpu().numpy()))
                advance(len(targets))
    finally:
        engine.close()
    if outputs_file is not None:
        arrays = {
            "outputs": np.concatenate([o for o, _ in kept], 1),
            "labels": np.concatenate([t for _, t in kept]),
            "classes": np.array(data.classes),
        }

        def write(file: Path) -> None:
            with file.open("wb") as stream:
                np.savez(stream, **arrays)  # type: ignore[arg-type]

        write_atomically(outputs_file, write)
    before = folder.read_result()
    return summary(metrics.result(), built, before["iterations"], before["seconds"])


def predict_images(path: Path, images: Sequence[Path], resize: bool) -> Iterator[Group]:
    """A table for each image: the best answers of every member and of the ensemble."""
    run = api.load(path)
    pixels = np.stack([read_image(image, run, resize) for image in images])
    outputs = run.predict(pixels)
    probabilities = outputs.double().softmax(-1)
    for i, image in enumerate(images):
        yield _answers(image, probabilities[:, i], run.data.classes)


def _answers(image: Path, probabilities: torch.Tensor, classes: Sequence[str]) -> Group:
    """Probabilities [M, C] of one image."""
    votes = probabilities.argmax(-1)
    mean = probabilities.mean(0)
    answer = int(mean.argmax())
    agree = int((votes == answer).sum())
    said = f"[bold]{escape(classes[answer])}[/] ({100 * mean[answer]:.1f}%)"
    title = f"{escape(str(image))}: {said}, {agree} of {len(votes)} members agree"
    table = Table(box=box.SIMPLE_HEAD)
    best = min(3, len(classes))
    for name in ("", *(["answer", "second", "third"][:best])):
        table.add_column(name, no_wrap=not name)
    rows = [(f"member {m}", p) for m, p in enumerate(probabilities)]
    for name, p in [*rows, ("[bold]Ensemble-Mean[/]", mean)]:
        top = p.topk(best)
        pairs = zip(top.values, top.indices, strict=True)
        table.add_row(name, *(f"{escape(classes[c])} {100 * v:.1f}%" for v, c in pairs))
    return Group(title, table)  # a title of the table's own would be wrapped to its width


def read_image(path: Path, run: api.Run, resize: bool) -> np.ndarray:
    """The image as uint8 [C, H, W] of the size that the run was trained on."""
    channels, height, width = run.data.shape if len(run.data.shape) == 3 else (0, 0, 0)
    if channels not in (1, 3):
        raise UserError(f"{run.folder} was trained on examples of shape {run.data.shape}, not on images")
    if not path.is_file():
        raise UserError(f"there is no image {path}")
    if run.config.data.name == "folder":
        crop = read_crop(path, run.config.data.resize, height, 0.5, 0.5)
        return crop.transpose(2, 0, 1)
    try:
        with Image.open(path) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
    if picture.size != (width, height):
        if not resize:
            raise UserError(
                f"{path} is {picture.width} x {picture.height}, but {run.folder} was trained on {width} x {height}: "
                "give --resize to scale it"
            )
        picture = picture.resize((width, height), Image.Resampling.BOX)
    pixels = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)
    if run.config.data.name == "digits":
        pixels = (pixels.astype(np.uint16) * 16 // 255).astype(np.uint8)  # the digits have 17 levels of grey
    return pixels


def dataset_table() -> Table:
    """`mheads data list`."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("name", "what", "here"):
        table.add_column(name, no_wrap=name != "what")
    for entry in DATASETS.values():
        if entry.needs_path:
            here = "data.path=..."
        elif entry.available:
            here = "yes"
        else:
            here = f"mheads data get {entry.name}"
        table.add_row(entry.name, entry.description, here)
    return table
