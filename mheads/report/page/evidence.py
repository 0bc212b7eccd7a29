"""What only the network and the data of a run can show: which classes are confused, and which examples are hard."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from mheads import networks
from mheads.api.evaluate import load_examples_of_run
from mheads.api.run import open_run
from mheads.common.errors import UserError
from mheads.common.progress import Watcher, telling
from mheads.data.catalog import DATASETS
from mheads.data.splits import Split
from mheads.engine.measure import answers, in_eval_mode
from mheads.problems import is_single_label
from mheads.problems.metrics import add_counts
from mheads.report.page.html import Gallery, picture
from mheads.report.saliency.command import said
from mheads.report.saliency.members import explain
from mheads.report.video import class_pictures, shown
from mheads.runs.record import Record
from mheads.training.build_from_config import build_net_of_run, make_engine
from mheads.trees.treenet import TreeNet

HARDEST = 24
MOST_KEPT = 50_000_000  # outputs
IMAGES = 6  # that members are shown to look at


@dataclass(frozen=True)
class Answer:
    """What somebody said of an example, and how sure they were, in percent."""

    who: str
    said: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Hard:
    """An example, and the probability of its true class in the ensemble's answer; `image` is a data URI, if it is an
    image."""

    number: int
    image: str | None
    truth: str
    probability: float  # in percent
    answers: list[Answer]


@dataclass(frozen=True)
class Evidence:
    """confusion: counts [M + 1, C, C] by true class and answer, of the mean first; reliability: see `Metrics`."""

    together: list[str]  # the answers of the whole ensemble, the one that it gives first
    confusion: np.ndarray  # [answers of the ensemble and then members, C, C]
    reliability: dict[str, dict[str, list[float]]]
    hardest: list[Hard]
    iteration: int
    split: str
    outputs: torch.Tensor | None  # [M, N, C], if they are not too many to be kept


def network(record: Record, watch: Watcher, trust: bool) -> TreeNet:
    """The tree of a run with fresh weights; refuses code that only the folder names, unless it is trusted."""
    if not networks.is_ours(record.config.model, record.config.model_args) and not trust:
        raise UserError(
            f"the network is code of the run's own, {record.config.model}, and none of it was run: if you trust it, "
            "give --trust"
        )
    return build_net_of_run(record.folder, record.config, watch.warn, trust=trust)


def examine(record: Record, net: TreeNet, watch: Watcher) -> Evidence:
    """Runs the newest weights over the examples that training evaluates on."""
    problem = record.data.problem
    if not is_single_label(problem):
        raise UserError(f"this is about classes, and the run is {problem.name}")
    weights = record.folder.load_weights(net, lambda message: None)  # the page itself says how far the run is
    with telling(watch):
        facts, examples, split = load_examples_of_run(record.folder)
    names, members = problem.groups, net.num_members
    together, metrics, confusion = ["Ensemble-Mean"], None, torch.empty(0)
    answered, sure, true, of_truth, kept = [], [], [], [], []
    few = members * len(examples) * len(names) <= MOST_KEPT
    with closing(make_engine(record.config, net)) as engine, in_eval_mode([net]):
        for outputs, scores, targets in answers(engine, examples, facts.inputs, problem, watch):
            if metrics is None:  # the first of them says whether members have scores
                together = ["Ensemble-Scored", *together] if scores is not None else together
                metrics = problem.metrics(members, scored=scores is not None)
                confusion = torch.zeros(len(together) + members, len(names), len(names), dtype=torch.long)
            metrics.update(outputs, targets, scores)
            labels = problem.group(targets)
            if few:
                kept.append(outputs.cpu())
            each = outputs.cpu().double()  # [M, b, C]
            mean = [problem.mean(each, of) for of in ((scores, None) if scores is not None else (None,))]
            probabilities = torch.cat([torch.stack(mean), each.softmax(-1)])
            confidence, answer = probabilities.max(-1)
            for counts, found in zip(confusion, answer, strict=True):
                add_counts(counts, labels, found)
            answered.append(answer)
            sure.append(confidence)
            true.append(labels)
            of_truth.append(probabilities[0].gather(-1, labels[:, None])[:, 0])
    everything = torch.cat(answered, 1).numpy(), torch.cat(sure, 1).numpy(), torch.cat(true).numpy()
    hardest = _hardest(examples, names, together, *everything, torch.cat(of_truth).numpy())
    outputs_kept = torch.cat(kept, 1) if kept else None
    assert metrics is not None  # there are examples
    reliability = metrics.reliability()
    return Evidence(together, confusion.numpy(), reliability, hardest, weights.iteration, split, outputs_kept)


def looked_at(record: Record, net: TreeNet, evidence: Evidence, watch: Watcher) -> Gallery:
    """What members respond to in some images, by guided backprop, and how much more their owners do."""
    run = open_run(record.folder, record.config, net, lambda message: None)
    found = explain(run, count=IMAGES, outputs=evidence.outputs, watch=watch)
    content = io.BytesIO()
    found.figure().savefig(content, format="png", dpi=110)
    source = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    text = f"Maps of {len(found.columns)} networks on {len(found.classes)} images: {', '.join(found.classes)}."
    note = "" if found.sample is None else f"{said(found.sample, f'{found.sample.examples:,} images').capitalize()}."
    return Gallery([("Guided backprop of the score of the true class", source, text)], note)


def _hardest(
    examples: Split,
    names: Sequence[str],
    together: list[str],
    said: np.ndarray,
    sure: np.ndarray,
    true: np.ndarray,
    of_truth: np.ndarray,
) -> list[Hard]:
    """The examples that the ensemble gets wrong, then those that some members do, each by the probability of the truth.

    Answers and confidences [., N]; the truth, and its probability in the ensemble's answer [N].
    """
    chances, wrong = np.nan_to_num(of_truth), said != true
    rows = np.lexsort((chances, ~wrong[0]))
    rows = rows[wrong[:, rows].any(0)][:HARDEST]
    images = _images(examples, rows)
    members = range(len(said) - len(together))
    who = [*(name.removeprefix("Ensemble-").lower() for name in together), *(f"member {m}" for m in members)]
    return [
        Hard(
            int(row),
            image,
            names[true[row]],
            100 * float(chances[row]),
            [
                Answer(name, names[a], 100 * float(p), bool(a == true[row]))
                for name, a, p in zip(who, said[:, row], sure[:, row], strict=True)
            ],
        )
        for row, image in zip(rows, images, strict=True)
    ]


def _images(examples: Split, rows: np.ndarray) -> list[str] | list[None]:
    if len(examples.shape) != 3 or not len(rows):
        return [None] * len(rows)
    raw = examples.read(rows, None)
    images = (raw.permute(0, 2, 3, 1) if raw.is_floating_point() else raw).numpy().astype(np.float32)
    return [picture(image) for image in shown(images, images, raw.is_floating_point())]


def pictures(record: Record, watch: Watcher) -> list[str]:
    """A small picture of each class as a data URI, or none where no images are at hand."""
    if record.config.data.name not in DATASETS or len(record.data.shape) != 3:
        return []
    if not is_single_label(record.data.problem):
        return []
    try:
        return [picture(found, 40) for found in class_pictures(record, "typical", watch)]
    except UserError:  # the section of the hardest examples says what is missing
        return []
