"""One class for each example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values, number_words
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.problems.answer_text import AnswerColumns, AnswerDetail, AnswerText
from mheads.problems.base import ANSWERS, ClassScores, format_number, more_classes, percent_rows
from mheads.problems.baselines import near_chance, top
from mheads.problems.member_losses import cross_entropies
from mheads.problems.metrics import ClassificationMetrics, ClassificationResult
from mheads.problems.uncertainty import LARGEST_TEMPERATURE

SHOWN_K = 5  # the last top-k that a table shows of one network
RANKS = ("answer", "second", "third")  # the classes that are shown of the answer to one example


@dataclass(frozen=True)
class Classification(ClassScores):
    """Targets are class numbers [B], answers are scores [M, B, C].

    `integer_names`: the names of the classes are integers, and labels that a user gives are these names.
    """

    integer_names: bool = field(default=False, kw_only=True)
    name: ClassVar[str] = "classification"
    answer_kind: ClassVar[str] = "one class"
    measure: ClassVar[str] = "accuracy, %"
    result_type: ClassVar[Any] = ClassificationResult
    metrics_type: ClassVar[Any] = ClassificationMetrics
    base_losses: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    single_label: ClassVar[bool] = True
    gives_probabilities: ClassVar[bool] = True
    output_form: ClassVar[str] = "logits [B, C]"
    answer_dims: ClassVar[int] = 2

    @property
    def groups(self) -> tuple[str, ...]:
        return self.classes

    def __post_init__(self) -> None:
        if self.integer_names:
            tuple(map(int, self.classes))  # of a folder, these may be anything

    @property
    def names(self) -> tuple[str, ...] | tuple[int, ...]:
        """The names of the classes as labels have them."""
        return tuple(map(int, self.classes)) if self.integer_names else self.classes

    def group(self, targets: Value) -> Tensor:
        return nested_values.leaves(targets)[0]  # labels come first, a teacher's answers serve the loss

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.average(answers, partial(torch.softmax, dim=-1), weights)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return cross_entropies(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        scores = nested_values.leaves(output)[0]
        count = len(self.classes)
        if scores.dim() != 2 or scores.shape[1] != count:
            several = len(nested_values.leaves(output)) > 1
            fewer = (
                not several
                and scores.dim() == 2
                and scores.shape[1] < count
                and self.classes == tuple(map(str, range(count)))
            )
            classes = number_words.count(count, "class", "es")
            doubt = f", and classes are numbered from 0 to {count - 1}"
            if scores.shape[1:] == (1,):
                doubt = "; if the targets are numbers and no classes, give data.problem=regression"
            raise UserError(
                f"{network} gives outputs of shape {tuple(scores.shape[1:])}, but {data} has {classes}; "
                f"a network gives one score per class ({more_classes(network, count)})"
                + "; of several values that it gives, the first is the answer" * several
                + doubt * fewer
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        count = len(self.classes)
        bad = np.flatnonzero((targets < 0) | (targets >= count))
        if len(bad):
            raise UserError(
                f"{where}: example {bad[0]} has label {targets[bad[0]]}, but the {count} classes are numbered 0 to "
                f"{count - 1} ({len(bad)} such labels); correct the labels or name all classes, or, if they are "
                "numbers and no classes, give data.problem=regression"
            )

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        rows = percent_rows(summary, "members") + _fair_rows(summary)
        if len(summary["members"]) > 1:
            rows.append(("disagreement", f"{format_number(summary['disagreement'])} %"))
        for key, name, form, unit in (
            ("nll", "negative log-likelihood", ".4f", ""),
            ("calibration_error", "calibration error", ".2f", " %"),
            ("brier", "Brier score", ".4f", ""),
            ("temperature", "temperature", ".3f", ""),
            ("nll_scaled", "negative log-likelihood, scaled", ".4f", ""),
            ("calibration_error_scaled", "calibration error, scaled", ".2f", " %"),
            ("brier_scaled", "Brier score, scaled", ".4f", ""),
            ("accuracy_shifted", "accuracy on shifted data", ".2f", " %"),
            ("nll_shifted", "negative log-likelihood, shifted", ".4f", ""),
            ("calibration_error_shifted", "calibration error, shifted", ".2f", " %"),
            ("auroc", "AUROC to other data", ".2f", " %"),
            ("fpr95", "FPR95 to other data", ".2f", " %"),
        ):
            if key not in summary:  # an older result, or one without further examples
                continue
            texts = {who: format_number(summary[key][who], form) + unit for who in ANSWERS if who in summary[key]}
            scored = f", scored {texts['ensemble_scored']}" if "ensemble_scored" in texts else ""
            rows.append(
                (name, texts["ensemble_mean"] + scored + _temperature_remark(key, summary[key]["ensemble_mean"]))
            )
        return rows

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        probabilities = outputs.softmax(-1)
        lines = self._answer_lines(probabilities.argmax(-1), ensemble)
        return AnswerText(lines, detail=partial(self._answer_detail, probabilities, ensemble))

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        votes, best = outputs.argmax(-1), [p.max(-1) for p in ensemble]
        names = ["answer", "probability", "mean_answer", "mean_probability"][: 2 * len(best)]
        agreement = (votes == best[0].indices).double().mean(0)
        lines = [
            [text for b in best for text in (self.classes[b.indices[i]], f"{b.values[i]:.6g}")]
            + [f"{agreement[i]:.6g}"]
            + [self.classes[vote] for vote in votes[:, i]]
            for i in range(outputs.shape[1])
        ]
        return AnswerColumns([*names, "agreement", *(f"member_{m}" for m in range(len(votes)))], lines)

    def for_scores(self, count: int) -> Classification:
        return self.with_classes(count)

    def _answer_lines(self, votes: Tensor, ensemble: Sequence[Tensor]) -> Iterator[list[str]]:
        """From the classes [M, B] that members vote for, and probabilities [B, C] of the ensemble."""
        for row, best in enumerate(ensemble[0].argmax(-1)):
            answers = [f"{self.classes[int(p[row].argmax())]} {100 * p[row].max():.1f}%" for p in ensemble]
            agree = f"{int((votes[:, row] == best).sum())} of {len(votes)}"
            yield [*answers, agree, *(self.classes[c] for c in votes[:, row])]

    def _answer_detail(self, probabilities: Tensor, ensemble: Sequence[Tensor], row: int) -> AnswerDetail:
        """The best classes of one example."""
        columns = RANKS[: len(self.classes)]

        def best(p: Tensor) -> list[str]:
            top = p[row].topk(len(columns))
            return [f"{self.classes[c]} {100 * v:.1f}%" for v, c in zip(top.values, top.indices, strict=True)]

        answer = int(ensemble[0][row].argmax())
        agree = int((probabilities[:, row].argmax(-1) == answer).sum())
        about = f"({100 * ensemble[0][row, answer]:.1f}%), {agree} of {len(probabilities)} members agree"
        members = [best(p) for p in probabilities]
        return AnswerDetail(self.classes[answer], about, columns, members, [best(p) for p in ensemble])


def _fair_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What an Oracle of M answers compares with: the M best classes of one answer, and members that are constant."""
    m = len(summary["members"])
    if m == 1:
        ks = range(2, 1 + min(SHOWN_K, len(summary["ownership"][0])))
        known = [value for k in ks if (value := top(summary, k)) is not None]
        name = f"top-2 to top-{1 + len(known)}" if len(known) > 1 else "top-2"
        return [(name, "  ".join(map(format_number, known)) + " %")] if known else []
    who = {"single": "mean member", **ANSWERS}
    named = {name: value for key, name in who.items() if (value := top(summary, m, key)) is not None}
    texts = [f"{name} {format_number(value)} %" for name, value in named.items()]
    rows = [(f"top-{m}", ", ".join(texts))] if texts else []
    if near_chance(summary):
        chance = format_number(summary["oracle_chance"])
        rows.append(("chance", f"{m} members that always give one class each have an Oracle of {chance} %"))
    return rows


PROBABILITIES = (
    "probabilities, and they are taken for logits, of which the softmax is applied once more: give the scores before "
    "the softmax, or the logarithm of the probabilities"
)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether outputs [..., C] look like probabilities: none below 0, and each row adds to 1."""
    sums = outputs.detach().double().sum(-1)
    return outputs.shape[-1] > 1 and bool((outputs >= 0).all() and ((sums - 1).abs() < 1e-3).all())


def _temperature_remark(key: str, value: float | None) -> str:
    """What a temperature at its bound tells."""
    if key != "temperature" or value not in (LARGEST_TEMPERATURE, 1 / LARGEST_TEMPERATURE):
        return ""
    why = "the scores say nothing" if value == LARGEST_TEMPERATURE else "the answers are all right"
    return f", its bound: on the held-out examples {why}"
