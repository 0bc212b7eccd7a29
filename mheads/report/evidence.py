"""What only the network and the data of a run can show: which classes are confused, and which examples are hard."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from mheads.api.examples_of_run import load_examples_of_run
from mheads.common.errors import UserError
from mheads.common.progress import Watcher, forward_warnings
from mheads.data.splits import Split
from mheads.engine.measure import answers, in_eval_mode
from mheads.problems import is_single_label
from mheads.problems.metrics import add_counts
from mheads.report.class_pictures import as_images, brighten, encode_image
from mheads.runs.read_run import Record
from mheads.training.build_from_config import make_engine
from mheads.trees.treenet import TreeNet

HARDEST = 24
MOST_KEPT = 50_000_000  # outputs


@dataclass(frozen=True)
class Answer:
    """The answer of a member, or of the ensemble, to an example, and its confidence, in percent."""

    who: str
    said: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class HardExample:
    """An example, and the probability of its true class in the ensemble's answer; `image` is a data URI, if any."""

    number: int
    image: str | None
    truth: str
    probability: float  # in percent
    answers: list[Answer]


@dataclass(frozen=True)
class Evidence:
    """What the newest weights answer to the examples that training evaluates on."""

    together: list[str]  # the answers of the whole ensemble, the one that it gives first
    confusion: np.ndarray  # counts [answers of the ensemble and then members, C, C] by true class and answer
    reliability: dict[str, dict[str, list[float]]]  # see `Metrics`
    hardest: list[HardExample]
    outputs: torch.Tensor | None  # [M, N, C], if they are not too many to be kept


def examine(record: Record, net: TreeNet, watch: Watcher, examples: Split | None = None) -> Evidence:
    """Runs the weights of a net over examples, by default those that training evaluates on."""
    problem = record.data.problem
    if not is_single_label(problem):
        raise UserError(f"this is only for classification, but {record.place} is {problem.name}")
    facts = record.data
    if examples is None:
        with forward_warnings(watch):
            facts, examples, _ = load_examples_of_run(record.folder)
    names, members = problem.groups, net.num_members
    together, metrics, confusion = ["Ensemble-Mean"], None, torch.empty(0)
    batches, kept = [], []
    few = members * len(examples) * len(names) <= MOST_KEPT
    with closing(make_engine(record.config, net)) as engine, in_eval_mode([net]):
        for outputs, scores, targets in answers(engine, examples, facts.inputs, problem, watch):
            if metrics is None:  # the first batch tells whether members have scores
                together = ["Ensemble-Scored", *together] if scores is not None else together
                metrics = problem.metrics(members, scored=scores is not None)
                confusion = torch.zeros(len(together) + members, len(names), len(names), dtype=torch.long)
            metrics.update(outputs, targets, scores)
            labels = problem.group(targets)
            if few:
                kept.append(outputs.cpu())
            each = outputs.cpu().double()  # [M, b, C]
            probabilities = torch.cat([torch.stack(problem.together(each, scores)), each.softmax(-1)])
            confidences, classes = probabilities.max(-1)
            for counts, answer in zip(confusion, classes, strict=True):
                add_counts(counts, labels, answer)
            batches.append((classes, confidences, labels, probabilities[0].gather(-1, labels[:, None])[:, 0]))
    whole = [torch.cat(parts, -1).numpy() for parts in zip(*batches, strict=True)]
    assert metrics is not None  # there are examples
    hardest = choose_hardest(examples, names, together, *whole)
    return Evidence(together, confusion.numpy(), metrics.reliability(), hardest, torch.cat(kept, 1) if kept else None)


def choose_hardest(
    examples: Split,
    names: Sequence[str],
    together: list[str],
    answered: np.ndarray,
    confidences: np.ndarray,
    true: np.ndarray,
    of_truth: np.ndarray,
) -> list[HardExample]:
    """The examples that the ensemble gets wrong, then those that some members do, each by the probability of the truth.

    Answers and confidences [., N]; the truth, and its probability in the ensemble's answer [N].
    """
    chances, wrong = np.nan_to_num(of_truth), answered != true
    rows = np.lexsort((chances, ~wrong[0]))
    rows = rows[wrong[:, rows].any(0)][:HARDEST]
    members = range(len(answered) - len(together))
    who = [*(name.removeprefix("Ensemble-").lower() for name in together), *(f"member {m}" for m in members)]

    def answers_to(row: int) -> list[Answer]:
        each = zip(who, answered[:, row], confidences[:, row], strict=True)
        return [Answer(name, names[a], 100 * float(p), bool(a == true[row])) for name, a, p in each]

    return [
        HardExample(int(row), image, names[true[row]], 100 * float(chances[row]), answers_to(row))
        for row, image in zip(rows, _encode_images(examples, rows), strict=True)
    ]


def _encode_images(examples: Split, rows: np.ndarray) -> list[str] | list[None]:
    if len(examples.shape) != 3 or not len(rows):
        return [None] * len(rows)
    images = as_images(raw := examples.read(rows, None))
    return [encode_image(image) for image in brighten(images, images, raw.is_floating_point())]
