"""The kernels of a density of hypotheses that have no variances: their scale, chosen on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mheads.problems.densities import mixture_log_density, voronoi_log_density

KERNEL_SCALES = {"nll": "kernel_scale", "nll_voronoi": "kernel_scale_voronoi"}  # what a result calls them
GRID = 10 ** torch.linspace(-3, 1, 81, dtype=torch.float64)  # times the standard deviation of the targets


@dataclass(frozen=True)
class Kernels:
    """Gaussians with one standard deviation for all hypotheses, in units of `units` [D], or of 1; by density."""

    scales: Mapping[str, float]
    units: tuple[float, ...] = ()

    def log_variances(self, density: str) -> Tensor:
        return 2 * (math.log(self.scales[density]) + _logs(self.units))


class KernelChoice:
    """Takes in held-out examples and chooses, for each density, the scale under which they are most likely."""

    def __init__(self, units: tuple[float, ...] = ()) -> None:
        self.units = units
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        outputs = outputs.detach().cpu().double().flatten(2)
        self._batches.append((outputs, y.detach().cpu().double(), log_weights_or_equal(weights, outputs)))

    def result(self) -> dict[str, float]:
        """The scales, under the names that results have for them."""
        outputs, log_weights = (torch.cat([batch[i] for batch in self._batches], 1) for i in (0, 2))
        y, logs = torch.cat([batch[1] for batch in self._batches]), _logs(self.units)
        spread = (y / logs.exp()).std(0, correction=0).mean().item()
        scales = {}
        grid = (GRID * (spread or 1.0)).tolist()
        for name, density in densities_of(y.shape[1]).items():
            likely = [density(outputs, 2 * (math.log(h) + logs), log_weights, y).mean().item() for h in grid]
            scales[KERNEL_SCALES[name]] = grid[max(range(len(grid)), key=likely.__getitem__)]
        return scales


def densities_of(num_values: int) -> dict[str, Callable[..., Tensor]]:
    """The densities by the name of their measure; cells of several numbers are no intervals."""
    cells = {"nll_voronoi": voronoi_log_density} if num_values == 1 else {}
    return {"nll": mixture_log_density, **cells}


def log_weights_or_equal(weights: Tensor | None, outputs: Tensor) -> Tensor:
    """The logarithms of the probabilities [M, B] of hypotheses, 1 / M each where nothing is known of them."""
    if weights is None:
        return torch.full(outputs.shape[:2], -math.log(len(outputs)), dtype=torch.float64)
    return weights.detach().cpu().double().log()


def _logs(units: tuple[float, ...]) -> Tensor:
    return torch.tensor(units or (1.0,), dtype=torch.float64).log()
