"""Saliency of the members of a run: on which images, and who responds how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mheads.api.examples_of_run import load_examples_of_run
from mheads.api.predict import read_image
from mheads.api.raw_examples import PreprocessingNetwork
from mheads.api.run import Run
from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.progress import Silent, Watcher
from mheads.data import ArraySplit
from mheads.data.catalog import names_examples
from mheads.data.splits import Split
from mheads.data.torch_dataset import DatasetSplit
from mheads.engine.measure import all_answers, in_eval_mode
from mheads.problems import is_single_label
from mheads.problems.metrics import owner_of
from mheads.report.charts.chart import shorten
from mheads.report.figures import Figure
from mheads.report.figures.saliency_maps import SHORT, saliency_figure
from mheads.report.saliency.guided import backprop, find_layer
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import make_engine

BY = ("ensemble", "member")
SAMPLE = 500  # examples that energies are measured on
MOST_VALUES = 2**19  # in the inputs of a batch: what a network keeps for its backward is some hundred times as much
MOST_MEMBERS = 8  # that a figure shows


@dataclass(frozen=True)
class Energy:
    """Mean absolute gradient of the owner, the member with the lowest loss on an example, and of the other members."""

    owner: float
    others: float
    examples: int

    @staticmethod
    def of(energies: np.ndarray, owners: np.ndarray) -> Energy:
        """Of energies [M, N] and owners [N], -1 where nobody is; needs two members."""
        owned = np.flatnonzero(owners >= 0)
        energies, owners = energies[:, owned], owners[owned]
        if not len(owned):
            return Energy(float("nan"), float("nan"), 0)
        of_owners = energies[owners, np.arange(len(owned))]
        others = (energies.sum(0) - of_owners) / (len(energies) - 1)
        return Energy(float(of_owners.mean()), float(others.mean()), len(owned))

    @property
    def ratio(self) -> float:
        """How many times the energy of the others the owner has; infinite if they have none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.float64(self.owner) / self.others)


@dataclass(frozen=True)
class Saliency:
    """Maps of members on chosen images: [K, N, C, H, W] in K columns, of which the first may be of another run."""

    images: np.ndarray  # 0..1 [N, H, W, 1 or 3]
    classes: list[str]  # [N]: the true one, or what the ensemble answers
    maps: np.ndarray
    columns: list[str]  # [K]
    probabilities: np.ndarray  # [K, N] of the class
    owners: np.ndarray  # [N] columns, -1 for none
    energy: Energy | None  # on these images; None of one member
    sample: Energy | None  # on many
    guided: bool  # whether there was a ReLU in all networks
    caption: str = ""

    def figure(self) -> Figure:
        count = 3 if self.maps.shape[2] >= 3 else 1
        maps = self.maps[:, :, :count].transpose(0, 1, 3, 4, 2)
        shown = _choose_columns(self.columns, self.owners)
        owners = np.array([shown.index(k) if k in shown else -1 for k in self.owners])
        note = [self.caption] if self.caption else []
        if len(shown) < len(self.columns):
            note.append(f"{len(shown)} of {len(self.columns)} networks are shown.")
        titles = [self.columns[k] for k in shown]
        return saliency_figure(
            self.images, self.classes, maps[shown], titles, self.probabilities[shown], owners, " ".join(note)
        )


def _choose_columns(columns: Sequence[str], owners: np.ndarray) -> list[int]:
    """The first column, and those that own most of the images."""
    owned = Counter(owners.tolist())
    order = sorted(range(1, len(columns)), key=lambda k: -owned[k])
    return sorted([0, *order[:MOST_MEMBERS]])


def explain(
    run: Run,
    examples: Any = None,
    count: int = 6,
    by: str = "ensemble",
    layer: str | None = None,
    beside: Run | None = None,
    sample: int = SAMPLE,
    watch: Watcher | None = None,
    outputs: Tensor | None = None,
) -> Saliency:
    """Maps of the images with the highest correct response of the ensemble, or of any one member (`by="member"`).

    The response is the probability of the true class. The images are among those that training evaluated on, or
    `examples`: a split, or raw ones and their labels, as `run.evaluate` takes them. At most an even share is of one
    class, and at most an even share chosen by one member. Energies are also measured on `sample` examples, evenly
    spread. `outputs` [M, N, C] of the examples, as `outputs_of` gives them, are not computed again if they are known.
    """
    if by not in BY:
        raise UserError(f"--by {by}: there are {' and '.join(BY)}")
    check_runs(run, beside, layer)
    watch = watch or Silent()
    split, where = _split(run, examples)
    targets = torch.from_numpy(np.array(split.targets))
    labels = run.data.problem.group(targets)
    if outputs is None:
        with closing(make_engine(run.config, run.net)) as engine, in_eval_mode([run.net]):
            outputs, _, _ = all_answers(engine, split, run.data.inputs, run.data.problem, watch)
    outputs = outputs.double()
    owners = _owners(run, outputs, targets)
    own = outputs.log_softmax(-1)[:, torch.arange(len(labels)), labels]  # [M, N]; not rounded to 1, as p would be
    together = run.data.problem.mean(outputs)[torch.arange(len(labels)), labels]
    responses = together if by == "ensemble" else own.amax(0)
    groups = [labels.numpy()] if by == "ensemble" else [labels.numpy(), own.argmax(0).numpy()]
    rows = choose(responses.numpy(), groups, count)
    wide = None
    if sample and run.net.num_members > 1:
        some = np.unique(np.linspace(0, len(targets) - 1, min(sample, len(targets))).astype(np.int64))
        wide = energy_of(run, split, some, owners[some], layer, watch)
    raw, side = split.read(rows, None), split.read_targets(rows, None).side
    caption = f"Below each map: the probability of the true class.{where}"
    return _make_saliency(run, raw, labels[rows], outputs[:, rows], owners[rows], layer, beside, wide, caption, side)


def explain_files(
    run: Run, files: Sequence[Path], layer: str | None = None, beside: Run | None = None, resize: bool = False
) -> Saliency:
    """Of images in files; the class is the one that the ensemble answers."""
    check_runs(run, beside, layer)
    pixels = np.stack([read_image(file, run, resize) for file in files])
    outputs = run.predict(pixels).double()
    targets = run.data.problem.mean(outputs).argmax(-1)
    raw = torch.from_numpy(pixels).permute(0, 2, 3, 1)
    caption = "Below each map: the probability of the class that the ensemble answers."
    return _make_saliency(run, raw, targets, outputs, _owners(run, outputs, targets), layer, beside, None, caption)


def _split(run: Run, examples: Any) -> tuple[Split, str]:
    """The examples to choose from, and a sentence that says which these are."""
    if isinstance(examples, ArraySplit | DatasetSplit):
        return examples, ""
    if examples is not None:
        return run.split_of(examples), ""
    if not names_examples(run.config.data):
        raise UserError(
            f"{run.record().place} was trained from Python on arrays, which it does not keep: give images, or in "
            "Python mheads.report.saliency.explain(run, (x, y))"
        )
    _, split, name = load_examples_of_run(RunFolder(run.folder), [], None)
    return split, f" Images of the {name} set."


def choose(responses: np.ndarray, groups: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Rows of the highest responses [N], of each group as many: a group of each kind has an even share of `count`.

    If that leaves too few, the highest of the others are added.
    """
    order = np.argsort(-responses, kind="stable")
    most = [ceil(count / len(np.unique(kind))) for kind in groups]
    taken: list[Counter[int]] = [Counter() for _ in groups]
    chosen = np.zeros(len(order), bool)
    for row in order:
        own = [int(kind[row]) for kind in groups]
        if all(n[g] < limit for n, g, limit in zip(taken, own, most, strict=True)):
            chosen[row] = True
            for n, g in zip(taken, own, strict=True):
                n[g] += 1
        if chosen.sum() == count:
            break
    chosen[order[~chosen[order]][: max(0, count - chosen.sum())]] = True
    return order[chosen[order]]


def maps_of(
    run: Run,
    raw: Tensor,
    targets: Tensor,
    layer: str | None = None,
    members: Sequence[int] | None = None,
    side: dict[str, Value] | None = None,
) -> tuple[np.ndarray, bool]:
    """Maps float32 [M, N, ...] of these members, or of all, in RGB, and whether all are guided.

    raw: examples as a split reads them; targets: [N], the classes whose scores are explained.
    """
    x = run.data.inputs(raw, run.net.dtype)
    rows = rows_of(x.shape[1:])
    parts = [slice(start, start + rows) for start in range(0, len(x), rows)]
    gradients, guided = [], True
    for m in range(run.net.num_members) if members is None else members:
        network = run.net.member(m)
        for part in parts:
            cut = nested_values.map_leaves(lambda value, part=part: value[part], side) if side else None
            gradient, relus = backprop(network, x[part], targets[part] if layer is None else None, layer, cut)
            gradients.append(gradient.float().cpu().numpy())
            guided = guided and relus
    maps = np.concatenate(gradients).reshape(-1, *x.shape)
    return maps[:, :, ::-1] if run.data.preprocess.bgr else maps, guided


def rows_of(shape: Sequence[int]) -> int:
    return max(1, min(100, MOST_VALUES // prod(shape)))


def energy_of(
    run: Run,
    examples: Split,
    rows: np.ndarray,
    owners: np.ndarray,
    layer: str | None = None,
    watch: Watcher | None = None,
) -> Energy:
    """The energy of owners [N] and others on these rows of a split."""
    batch = rows_of(examples.shape)
    batches = []
    with (watch or Silent()).evaluating(len(rows)) as advance:
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            targets = run.data.problem.group(torch.from_numpy(examples.targets[some]))
            side = examples.read_targets(some, None).side
            maps, _ = maps_of(run, examples.read(some, None), targets, layer, side=side)
            batches.append(energies(maps))
            advance(len(some))
    return Energy.of(np.concatenate(batches, 1), owners)


def energies(maps: np.ndarray) -> np.ndarray:
    """Mean absolute value of each map: [M, N, ...] -> [M, N]."""
    means: np.ndarray = np.abs(maps).reshape(*maps.shape[:2], -1).mean(-1, dtype=np.float64)
    return means


def _make_saliency(
    run: Run,
    raw: Tensor,
    targets: Tensor,
    outputs: Tensor,
    owners: np.ndarray,
    layer: str | None,
    beside: Run | None,
    sample: Energy | None,
    caption: str,
    side: dict[str, Value] | None = None,
) -> Saliency:
    maps, guided = maps_of(run, raw, targets, layer, side=side)
    energy = Energy.of(energies(maps), owners) if len(maps) > 1 else None
    if len(maps) == 1:
        owners = np.full(len(owners), -1)  # one member has nobody to own an image before
    probabilities = outputs.softmax(-1)
    columns = [f"member {m}" for m in range(len(maps))]
    if beside is not None:
        other, also = maps_of(beside, raw, targets, layer, [0], side)
        with torch.inference_mode(), in_eval_mode([beside.net]):
            output = PreprocessingNetwork(beside.net.member(0), beside.data).run(raw, side or None)
        answer = beside.data.problem.answer(output).double().cpu()
        maps, guided = np.concatenate([other, maps]), guided and also
        probabilities = torch.cat([answer.softmax(-1)[None], probabilities])
        columns = [f"{shorten(beside.folder.resolve().name, SHORT)}\nmember 0", *columns]
        owners = np.where(owners < 0, -1, owners + 1)
    classes = [run.data.problem.groups[int(target)] for target in targets]
    of_class = probabilities[:, torch.arange(len(targets)), targets].numpy()
    if layer is not None:
        caption = f"The strongest unit of {layer}. {caption}"
    if not guided:
        caption = f"Plain gradients, since there is no ReLU{f' before {layer}' if layer else ''}. {caption}"
    return Saliency(_pictures(run, raw), classes, maps, columns, of_class, owners, energy, sample, guided, caption)


def _owners(run: Run, outputs: Tensor, targets: Tensor) -> np.ndarray:
    """Who has the lowest loss, [N]; -1 where nobody has any."""
    owners, owned = owner_of(run.data.problem.losses(outputs, targets))
    return torch.where(owned, owners, -1).numpy()


def _pictures(run: Run, raw: Tensor) -> np.ndarray:
    """Raw images as 0..1 [N, H, W, 1 or 3]."""
    seen = run.data.seen
    raw = raw if seen is None else seen.convert(raw)
    pixels = (raw.permute(0, 2, 3, 1) if raw.is_floating_point() else raw).numpy().astype(np.float64)
    pixels = pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]
    low, high = (seen.low, seen.high) if seen is not None else (pixels.min(), pixels.max())
    if not raw.is_floating_point() and high > 32:  # not so the digits, which go to 16
        low, high = 0, 255
    return np.clip((pixels - low) / max(high - low, 1e-12), 0, 1)


def check_runs(run: Run, beside: Run | None, layer: str | None) -> None:
    """Raises for runs without images, classes or such a layer, and for runs that do not go together."""
    for each in (run,) if beside is None else (run, beside):
        data = each.data
        if not is_single_label(data.problem):
            raise UserError(f"saliency is only for classification, but {each.record().place} is {data.problem.name}")
        if len(data.shape) != 3:
            raise UserError(f"{each.record().place} was trained on examples of shape {data.shape}, not on images")
        if data.shape != run.data.shape:
            raise UserError(
                f"{each.folder} was trained on images of shape {data.shape}, {run.folder} on {run.data.shape}: "
                "give a run on the same images beside it"
            )
        if data.problem.groups != run.data.problem.groups:
            raise UserError(
                f"{each.folder} and {run.folder} have different classes: the run beside needs the same classes"
            )
        if layer is not None:
            find_layer(each.net.member(0), layer)
