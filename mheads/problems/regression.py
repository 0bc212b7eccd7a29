"""One or several numbers for each example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mheads import values
from mheads.errors import UserError
from mheads.metrics import PlainResult
from mheads.problems.member_losses import squared_errors
from mheads.values import Value


@dataclass(frozen=True)
class RegressionResult(PlainResult):
    """Root mean square errors, in the units of the targets."""

    problem: ClassVar[str] = "regression"

    members: list[float]  # of each
    single: float  # the mean of these
    ensemble_mean: float  # of the mean of the members' outputs
    oracle: float  # of the member that comes closest on each example
    spread: float  # how far members are from their mean, root mean square
    ownership: list[list[int]]  # [M][1] examples on which each member comes closest
    examples: int

    def headline(self) -> dict[str, str]:
        return {
            "Ensemble-Mean": f"{self.ensemble_mean:.4g}",
            "Oracle": f"{self.oracle:.4g}",
            "members": " ".join(f"{error:.4g}" for error in self.members),
        }

    @classmethod
    def unknown(cls, members: int) -> RegressionResult:
        nan = math.nan
        return cls([nan] * members, nan, nan, nan, nan, [[0]] * members, 0)


class RegressionMetrics:
    """Sums of squares over a stream of outputs [M, b, D], in float64."""

    def __init__(self, members: int, num_values: int) -> None:
        self.num_values = num_values
        self.examples = 0
        self._squares = torch.zeros(members, dtype=torch.float64)
        self._ownership = torch.zeros(members, dtype=torch.long)
        self._mean = self._best = self._spread = 0.0

    def update(self, outputs: Tensor, y: Tensor) -> None:
        outputs, y = outputs.detach().cpu().double(), y.detach().cpu().double()
        if outputs.shape[1:] != y.shape:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, targets {tuple(y.shape)}")
        errors = squared_errors(outputs, y)  # [M, b]
        mean = outputs.mean(0)
        self.examples += len(y)
        self._squares += errors.sum(1)
        self._mean += squared_errors(mean[None], y).sum().item()
        self._spread += squared_errors(outputs, mean).mean(0).sum().item()
        best, owner = errors.nan_to_num(nan=math.inf).min(0)
        self._best += best.sum().item()
        self._ownership += torch.bincount(owner[~errors.isnan().all(0)], minlength=len(self._ownership))

    def result(self) -> RegressionResult:
        if self.examples == 0:
            raise ValueError("no examples to measure")
        members = (self._squares / self.examples).sqrt().tolist()
        mean, best, spread = (math.sqrt(x / self.examples) for x in (self._mean, self._best, self._spread))
        ownership = [[count] for count in self._ownership.tolist()]
        return RegressionResult(members, float(np.mean(members)), mean, best, spread, ownership, self.examples)


@dataclass(frozen=True)
class Regression:
    """Targets are numbers [B, D], answers are [M, B, D]; the loss is the squared error unless another is named."""

    num_values: int
    name: ClassVar[str] = "regression"
    unit: ClassVar[str] = ""
    measure: ClassVar[str] = "root mean square error"
    member_losses: ClassVar[tuple[str, ...]] = ("mse", "mae", "smooth_l1", "gaussian_nll")

    @property
    def groups(self) -> tuple[str, ...]:
        return ("all",)

    def group(self, targets: Tensor) -> Tensor:
        return torch.zeros(len(targets), dtype=torch.long, device=targets.device)

    def answer(self, outputs: Value) -> Tensor:
        return values.leaves(outputs)[0]

    def mean(self, answers: Tensor) -> Tensor:
        return answers.mean(0)

    def losses(self, outputs: Value, targets: Tensor) -> Tensor:
        return squared_errors(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        found = values.leaves(output)[0]
        if found.dim() != 2 or found.shape[1] != self.num_values:
            raise UserError(
                f"{network} gives outputs of shape {tuple(found.shape[1:])}, but the targets of {data} are "
                f"{self.num_values} number{'s' if self.num_values > 1 else ''} per example: let it give as many. "
                "Are they classes? Then give class numbers as integers"
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        if targets.shape[1:] != (self.num_values,):
            shape = list(targets.shape)
            raise UserError(f"{where}: targets of shape {shape}, but the network learns {self.num_values} per example")
        bad = np.flatnonzero(~np.isfinite(targets).all(1))
        if len(bad):
            raise UserError(f"{where}: the target of example {bad[0]} is not finite ({len(bad)} such); take them out")

    def metrics(self, members: int) -> RegressionMetrics:
        return RegressionMetrics(members, self.num_values)

    def read_result(self, values: dict[str, Any]) -> RegressionResult:
        return RegressionResult.from_dict(values)

    def unknown(self, members: int) -> RegressionResult:
        return RegressionResult.unknown(members)

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        result = RegressionResult.from_dict(summary)
        shown = result.headline()
        found = [("RMSE of members", shown["members"])]
        if len(result.members) > 1:
            found += [
                ("mean member", f"{result.single:.4g}"),
                ("Ensemble-Mean", f"[bold]{shown['Ensemble-Mean']}[/]"),
                ("Oracle", f"[bold]{shown['Oracle']}[/]"),
                ("spread", f"{result.spread:.4g}"),
            ]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "num_values": self.num_values}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Regression:
        return cls(int(facts["num_values"]))
