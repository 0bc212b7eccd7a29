"""One or several numbers for each example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.schemas import Measures, Number
from mheads.problems.answer_text import AnswerColumns, AnswerText
from mheads.problems.base import Problem, format_number, further_row, mean_or_weighted
from mheads.problems.densities import (
    KERNEL_SCALES,
    KernelChoice,
    Kernels,
    densities_of,
    log_weights_or_equal,
    points_of_normal,
)
from mheads.problems.member_losses import absolute_errors, squared_errors
from mheads.problems.metrics import owner_of, weighted_mean
from mheads.problems.result import Result, by_predictor

MOST_POINTS = 10  # in `distortion_by_points`


@dataclass(frozen=True)
class RegressionResult(Result):
    """Root mean square errors, in the units of the targets; `mae` and `r2` hold the same of other measures.

    `oracle` is of the member that comes closest on each example, which owns it.
    """

    problem: ClassVar[str] = "regression"

    spread: Number  # how far members are from their mean, root mean square
    mae: Measures = field(default_factory=dict)  # mean absolute errors
    r2: Measures = field(default_factory=dict)  # the share of the targets' variance that is explained
    spread_correlation: Number = math.nan  # over examples, of the members' spread with the error of their mean
    distortion: Number = math.nan  # mean squared distance of the hypothesis that comes closest
    distortion_by_points: list[Number] | None = None  # of 1, 2, .. points of a member's own density, the mean member
    min_ade: Number | None = None  # of trajectories: mean distance of the closest one, mean over its points
    min_fde: Number | None = None  # of trajectories: distance of the closest last point
    nll: Number | None = None  # mean of -log density, that of a mixture with a Gaussian for each member
    nll_voronoi: Number | None = None  # the same, of Gaussians that end at the borders of Voronoi cells
    kernel_scale: Number | None = None  # standard deviation of the Gaussians, if held-out examples decided it
    kernel_scale_voronoi: Number | None = None
    kernel_units: list[Number] | None = None  # [D], of normalised targets: number d has kernel_scale * kernel_units[d]

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> RegressionResult:
        measures = by_predictor([math.nan] * (members + 2))
        return super().unknown(members, groups, spread=math.nan, mae=measures, r2=measures)


class RegressionMetrics:
    """Sums over a stream of outputs [M, b, D], in float64.

    The members, their mean, if they are `scored` their mean weighted by the scores, and the Oracle are the predictors
    of the arrays below. What a variance is made of is counted from the first example on, so that large values cancel
    nothing. `shape` is that of a target; of two axes it is a trajectory, points [T, d]. `kernels` makes the density of
    hypotheses without variances.
    """

    def __init__(
        self,
        members: int,
        num_values: int,
        scored: bool = False,
        shape: tuple[int, ...] = (),
        kernels: Kernels | None = None,
    ) -> None:
        self.members, self.num_values, self.scored = members, num_values, scored
        self.trajectory = shape if len(shape) == 2 else None
        self.kernels = kernels
        self.examples = 0
        self._displacements = torch.zeros(2, dtype=torch.float64)  # sums of the closest mean and last ones
        self._nlls: dict[str, float] = {}
        self._by_points = torch.zeros(MOST_POINTS, dtype=torch.float64)
        self._squares = torch.zeros(members + 2 + scored, dtype=torch.float64)
        self._distances = torch.zeros(members + 2 + scored, dtype=torch.float64)
        self._ownership = torch.zeros(members, dtype=torch.long)
        self._spread = 0.0
        self._first: tuple[Tensor, Tensor] | None = None
        self._targets = torch.zeros(2, num_values, dtype=torch.float64)  # sums of the values and of their squares
        self._pairs = torch.zeros(5, dtype=torch.float64)  # sums of spread s, error e, ss, ee, se

    def update(
        self, outputs: Tensor, y: Tensor, weights: Tensor | None = None, log_variances: Tensor | None = None
    ) -> None:
        outputs, y = outputs.detach().cpu().double(), y.detach().cpu().double()
        outputs = outputs.flatten(2) if outputs.dim() > 3 else outputs
        if outputs.shape[1:] != y.shape:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, targets {tuple(y.shape)}")
        if not len(y):
            return
        self._add_densities(outputs, y, weights, log_variances)
        if self.trajectory is not None:
            self._displacements += closest_displacements(outputs, y, self.trajectory).sum(1)
        mean = outputs.mean(0)
        together = [mean] if weights is None else [mean, weighted_mean(outputs, weights.detach().cpu())]
        predictors, m = torch.cat([outputs, torch.stack(together)]), self.members
        squares, distances = squared_errors(predictors, y), absolute_errors(predictors, y)  # [predictors, b]
        spreads = squared_errors(outputs, mean).mean(0)
        self.examples += len(y)
        owner, owned = owner_of(squares[:m])
        best, nearest = (_nan_to_inf(errors[:m]).amin(0) for errors in (squares, distances))
        self._squares += torch.cat([squares, best[None]]).sum(1)
        self._distances += torch.cat([distances, nearest[None]]).sum(1)
        self._spread += spreads.sum().item()
        self._ownership += torch.bincount(owner[owned], minlength=len(self._ownership))

        pair = torch.stack([spreads, squares[m]]).sqrt()
        self._first = self._first or (y[0], pair[:, :1])
        values, (s, e) = y - self._first[0], pair - self._first[1]
        self._targets += torch.stack([values, values.square()]).sum(1)
        self._pairs += torch.stack([s, e, s * s, e * e, s * e]).sum(1)

    def _add_densities(self, outputs: Tensor, y: Tensor, weights: Tensor | None, log_variances: Tensor | None) -> None:
        if log_variances is None and self.kernels is None:
            return
        log_weights = log_weights_or_equal(weights, outputs)
        for name, density in densities_of(self.num_values).items():
            if log_variances is None:
                assert self.kernels is not None
                variances = self.kernels.log_variances(name)
            else:
                variances = log_variances.detach().cpu().double().reshape(outputs.shape)
            nll = -density(outputs, variances, log_weights, y).sum().item()
            self._nlls[name] = self._nlls.get(name, 0.0) + nll
            if name == "nll" and self.num_values == 1:
                self._by_points += distances_by_points(outputs, variances, y)

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
            distortion=self.num_values * self._squares[-1].item() / self.examples,
            **self._further(),
        )

    def _further(self) -> dict[str, Any]:
        """What not every regression has."""
        further: dict[str, Any] = {name: total / self.examples for name, total in self._nlls.items()}
        if self._nlls and self.num_values == 1:
            further["distortion_by_points"] = (self._by_points / self.examples).tolist()
        if self.trajectory is not None:
            means = (self._displacements / self.examples).tolist()
            further |= dict(zip(("min_ade", "min_fde"), means, strict=True))
        if self.kernels is not None:
            further |= {KERNEL_SCALES[name]: self.kernels.scales[name] for name in self._nlls}
            further |= {"kernel_units": [*self.kernels.units]} if self.kernels.units else {}
        return further


@dataclass(frozen=True)
class Regression(Problem):
    """Targets are numbers [B, D], answers are [M, B, D]; the loss is the squared error unless another is named.

    Targets that had a `shape` of more axes, such as [T, 2], are flat, and answers have that shape, [M, B, T, 2].
    Members that learn targets less `mean_of_targets`, divided by `std_of_targets` [D], answer in the old units.
    `variances`: a member gives the logarithm of the variance beside its answer. `kernels`: see `calibrated`.
    """

    gives_numbers: ClassVar[bool] = True

    num_values: int
    shape: tuple[int, ...] = ()
    mean_of_targets: tuple[float, ...] = ()
    std_of_targets: tuple[float, ...] = ()
    variances: bool = False
    kernels: Kernels | None = field(default=None, compare=False)
    name: ClassVar[str] = "regression"
    unit: ClassVar[str] = ""
    answer_kind: ClassVar[str] = "numbers"
    measure: ClassVar[str] = "root mean square error, units of the targets"
    result_type: ClassVar[Any] = RegressionResult
    base_losses: ClassVar[tuple[str, ...]] = ("mse", "mae", "smooth_l1", "gaussian_nll")

    @property
    def answer_dims(self) -> int:
        return 1 + max(1, len(self.shape))

    @property
    def output_form(self) -> str:
        return f"numbers [B, {self.num_values}], as y.reshape(len(y), -1) gives them"

    def in_original_units(self, outputs: Value) -> Value:
        if not self.std_of_targets:
            return outputs
        answers, *others = nested_values.leaves(outputs)
        mean, std = self._scale_of_targets(answers, answers.shape[1:])
        if self.variances:
            others[0] = others[0] + 2 * std.log()
        return nested_values.rebuild(outputs, [answers * std + mean, *others])

    def answer(self, outputs: Value) -> Tensor:
        answers = self._in_shape(nested_values.leaves(outputs)[0])
        if self.std_of_targets:
            mean, std = self._scale_of_targets(answers, self.shape)
            answers = answers * std + mean
        return answers

    def taught_by(self, mean_of_scores: bool, variances: bool) -> Self:
        return replace(self, variances=variances)

    def log_variances(self, outputs: Value) -> Tensor | None:
        if not self.variances:
            return None
        log_variances = self._in_shape(nested_values.leaves(outputs)[1])
        if self.std_of_targets:
            log_variances = log_variances + 2 * self._scale_of_targets(log_variances, self.shape)[1].log()
        return log_variances

    def _scale_of_targets(self, like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the targets, in the shape of an answer."""
        mean, std = (like.new_tensor(values) for values in (self.mean_of_targets, self.std_of_targets))
        return mean.reshape(shape or (-1,)), std.reshape(shape or (-1,))

    def _in_shape(self, values: Tensor) -> Tensor:
        """[M, B, D] or [M, B, *shape] -> [M, B, *shape]."""
        return values.flatten(2).unflatten(2, self.shape) if self.shape else values

    def calibrator(self) -> KernelChoice | None:
        """Chooses the kernels of a density on held-out examples; None where members give variances."""
        return None if self.variances else KernelChoice(self.std_of_targets)

    def calibrated(self, summary: Mapping[str, Any]) -> Regression:
        """With the kernels that a result, as JSON has it, names; without `kernel_units`, as in those of older versions,
        the scales are multiples of the standard deviations of the targets."""
        scales = {name: summary.get(key) for name, key in KERNEL_SCALES.items()}
        known = {name: float(scale) for name, scale in scales.items() if scale is not None}
        units = tuple(summary.get("kernel_units") or self.std_of_targets)
        return replace(self, kernels=Kernels(known, units).in_units_of_targets()) if known else self

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        return mean_or_weighted(answers, weights)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return squared_errors(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        answers = nested_values.leaves(output)[0]
        if tuple(answers.shape[1:]) not in {(self.num_values,), self.shape or (self.num_values,)}:
            pair = (
                " (for gaussian_nll a pair of them: x.chunk(2, -1))" if answers.shape[-1] == 2 * self.num_values else ""
            )
            if answers.dim() == 1 and self.num_values == 1:
                raise UserError(
                    f"{network} gives one number for each example, outputs of shape [B]: give rows of one, [B, 1] "
                    "(leave out squeeze, or end with unsqueeze(-1))"
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
        return RegressionMetrics(members, self.num_values, scored, self.shape, self.kernels)

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
            rows += [("MAE", further_row(summary["mae"], ".4g", "")), ("R²", further_row(summary["r2"], ".4g", ""))]
        names = {"distortion": "distortion", "min_ade": "minADE", "min_fde": "minFDE"}
        names |= {"nll": "NLL", "nll_voronoi": "NLL, Voronoi"}
        return rows + [(text, format_number(summary[key], ".4g")) for key, text in names.items() if key in summary]

    def answer_text(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerText:
        return super().answer_text(outputs.flatten(2), [answer.flatten(1) for answer in ensemble])

    def answer_columns(self, outputs: Tensor, ensemble: Sequence[Tensor]) -> AnswerColumns:
        return super().answer_columns(outputs.flatten(2), [answer.flatten(1) for answer in ensemble])


def distances_by_points(outputs: Tensor, log_variances: Tensor, y: Tensor) -> Tensor:
    """What one network reaches with a list of answers: the squared distance from y [b, 1] to the closest of 1, 2, ..
    points of the Gaussian that a member [M, b, 1] gives, summed over examples, mean over members -> [MOST_POINTS]."""
    scale = (log_variances / 2).exp().expand_as(outputs)
    closest = [(outputs + scale * points_of_normal(k) - y).square().amin(-1) for k in range(1, MOST_POINTS + 1)]
    return torch.stack(closest).sum(-1).mean(-1)


def closest_displacements(outputs: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """How far the closest of M trajectories [T, d] is, by the mean over its points and by its last one -> [2, b]."""
    distances = _nan_to_inf((outputs - y).unflatten(-1, shape).norm(dim=-1))  # [M, b, T]
    return torch.stack([distances.mean(-1), distances[..., -1]]).amin(1)


def _nan_to_inf(errors: Tensor) -> Tensor:
    return errors.nan_to_num(nan=math.inf, posinf=math.inf)  # which would else be the largest finite number
