"""One or several numbers for each example."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.schemas import Count, Measures, Number
from mheads.problems.base import ProblemDefaults, further_row, mean_or_weighted
from mheads.problems.member_losses import absolute_errors, squared_errors
from mheads.problems.metrics import by_predictor, weighted_mean
from mheads.problems.plain_result import PlainResult


@dataclass(frozen=True)
class RegressionResult(PlainResult):
    """Root mean square errors, in the units of the targets; `mae` and `r2` hold the same of other measures."""

    problem: ClassVar[str] = "regression"

    members: list[Number]  # of each
    single: Number  # the mean of these
    ensemble_mean: Number  # of the mean of the members' outputs
    oracle: Number  # of the member that comes closest on each example
    spread: Number  # how far members are from their mean, root mean square
    ownership: list[list[Count]]  # [M][1] examples on which each member comes closest
    examples: Count
    mae: Measures = field(default_factory=dict)  # mean absolute errors
    r2: Measures = field(default_factory=dict)  # the share of the targets' variance that is explained
    spread_correlation: Number = math.nan  # over examples, of the members' spread with the error of their mean
    ensemble_scored: Number | None = None  # of the mean weighted by the members' scores

    def headline(self) -> dict[str, str]:
        scored = {} if self.ensemble_scored is None else {"Ensemble-Scored": f"{self.ensemble_scored:.4g}"}
        return {
            "Ensemble-Mean": f"{self.ensemble_mean:.4g}",
            **scored,
            "Oracle": f"{self.oracle:.4g}",
            "members": " ".join(f"{error:.4g}" for error in self.members),
        }

    @classmethod
    def unknown(cls, members: int) -> RegressionResult:
        nan, each = math.nan, by_predictor([math.nan] * (members + 2))
        return cls([nan] * members, nan, nan, nan, nan, [[0]] * members, 0, each, each)


class RegressionMetrics:
    """Sums over a stream of outputs [M, b, D], in float64.

    The members, their mean, if they are `scored` their mean weighted by the scores, and the Oracle are the predictors
    of the arrays below. What a variance is made of is
    counted from the first example on, so that large values cancel nothing.
    """

    def __init__(self, members: int, num_values: int, scored: bool = False) -> None:
        self.members, self.num_values, self.scored = members, num_values, scored
        self.examples = 0
        self._squares = torch.zeros(members + 2 + scored, dtype=torch.float64)
        self._distances = torch.zeros(members + 2 + scored, dtype=torch.float64)
        self._ownership = torch.zeros(members, dtype=torch.long)
        self._spread = 0.0
        self._first: tuple[Tensor, Tensor] | None = None
        self._targets = torch.zeros(2, num_values, dtype=torch.float64)  # sums of the values and of their squares
        self._pairs = torch.zeros(5, dtype=torch.float64)  # sums of spread s, error e, ss, ee, se

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        outputs, y = outputs.detach().cpu().double(), y.detach().cpu().double()
        if outputs.shape[1:] != y.shape:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, targets {tuple(y.shape)}")
        if not len(y):
            return
        mean = outputs.mean(0)
        together = [mean] if weights is None else [mean, weighted_mean(outputs, weights.detach().cpu())]
        predictors, m = torch.cat([outputs, torch.stack(together)]), self.members
        squares, distances = squared_errors(predictors, y), absolute_errors(predictors, y)  # [predictors, b]
        spreads = squared_errors(outputs, mean).mean(0)
        self.examples += len(y)
        best, owner = squares[:m].nan_to_num(nan=math.inf).min(0)
        nearest = distances[:m].nan_to_num(nan=math.inf).amin(0)
        self._squares += torch.cat([squares, best[None]]).sum(1)
        self._distances += torch.cat([distances, nearest[None]]).sum(1)
        self._spread += spreads.sum().item()
        owned = owner[~squares[:m].isnan().all(0)]
        self._ownership += torch.bincount(owned, minlength=len(self._ownership))

        pair = torch.stack([spreads, squares[m]]).sqrt()
        self._first = self._first or (y[0], pair[:, :1])
        values, (s, e) = y - self._first[0], pair - self._first[1]
        self._targets += torch.stack([values, values.square()]).sum(1)
        self._pairs += torch.stack([s, e, s * s, e * e, s * e]).sum(1)

    def result(self) -> RegressionResult:
        if self.examples == 0:
            raise ValueError("no examples to measure")
        errors = by_predictor((self._squares / self.examples).sqrt().tolist(), self.scored)
        sums, squares = self._targets / self.examples
        variance = (squares - sums.square()).mean().item()  # of all values together, about the mean of each
        explained = 1 - self._squares / self.examples / (variance if variance > 0 else math.nan)
        s, e, ss, ee, se = (self._pairs / self.examples).tolist()
        deviations = math.sqrt(max(0.0, ss - s * s) * max(0.0, ee - e * e))
        return RegressionResult(
            **{**errors, "single": float(np.mean(errors["members"]))},
            spread=math.sqrt(self._spread / self.examples),
            ownership=[[count] for count in self._ownership.tolist()],
            examples=self.examples,
            mae=by_predictor((self._distances / self.examples).tolist(), self.scored),
            r2=by_predictor(explained.tolist(), self.scored),
            spread_correlation=(se - s * e) / deviations if deviations > 0 else math.nan,
        )


@dataclass(frozen=True)
class Regression(ProblemDefaults):
    """Targets are numbers [B, D], answers are [M, B, D]; the loss is the squared error unless another is named."""

    num_values: int
    name: ClassVar[str] = "regression"
    unit: ClassVar[str] = ""
    answer_kind: ClassVar[str] = "numbers"
    measure: ClassVar[str] = "root mean square error"
    result_type: ClassVar[Any] = RegressionResult
    base_losses: ClassVar[tuple[str, ...]] = ("mse", "mae", "smooth_l1", "gaussian_nll")

    answer_dims: ClassVar[int] = 2

    @property
    def output_form(self) -> str:
        return f"numbers [B, {self.num_values}], as y.reshape(len(y), -1) gives them"

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        return mean_or_weighted(answers, weights)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return squared_errors(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        answers = nested_values.leaves(output)[0]
        if answers.dim() != 2 or answers.shape[1] != self.num_values:
            pair = (
                " (for gaussian_nll a pair of them: x.chunk(2, -1))" if answers.shape[-1] == 2 * self.num_values else ""
            )
            if answers[0].numel() == self.num_values:
                raise UserError(
                    f"{network} gives outputs of shape {tuple(answers.shape[1:])}, and the targets of {data} are rows "
                    f"of {self.num_values} numbers: end it with nn.Flatten()"
                )
            raise UserError(
                f"{network} gives outputs of shape {tuple(answers.shape[1:])}, but the targets of {data} are "
                f"{self.num_values} number{'s' if self.num_values > 1 else ''} per example: let it give as many{pair}. "
                "Are they classes? Then give class numbers as integers"
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        if targets.shape[1:] != (self.num_values,):
            shape = list(targets.shape)
            raise UserError(f"{where}: targets of shape {shape}, but the network learns {self.num_values} per example")
        bad = np.flatnonzero(~np.isfinite(targets).all(1))
        if len(bad):
            raise UserError(f"{where}: the target of example {bad[0]} is not finite ({len(bad)} such); take them out")

    def metrics(self, members: int, scored: bool = False) -> RegressionMetrics:
        return RegressionMetrics(members, self.num_values, scored)

    def unknown(self, members: int) -> RegressionResult:
        return RegressionResult.unknown(members)

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        result = RegressionResult.from_dict(summary)
        shown = result.headline()
        rows = [("RMSE of members", shown["members"])]
        if len(result.members) > 1:
            rows += [
                ("mean member", f"{result.single:.4g}"),
                *((who, text) for who, text in shown.items() if who != "members"),
                ("spread", f"{result.spread:.4g}, its correlation with the error {result.spread_correlation:.2f}"),
            ]
        if "mae" in summary:  # runs of older versions have none
            rows += [("MAE", further_row(summary["mae"], ".4g", "")), ("R²", further_row(summary["r2"], ".4f", ""))]
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "num_values": self.num_values}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Regression:
        return cls(int(facts["num_values"]))
