"""Hypotheses as a density: a mixture of Gaussians, and kernels that end at the borders of Voronoi cells.

M hypotheses for each of B examples, with means [M, B, D], logarithms of variances of the same shape (or one number for
all) and logarithms of probabilities [M, B]. Kernels of hypotheses without variances have a scale that is chosen on
held-out examples.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def gaussian_log_densities(mean: Tensor, log_variance: Tensor, y: Tensor) -> Tensor:
    """log N(y; mean, variance) = -1/2 sum_d (log 2 pi + s_d + (mean_d - y_d)^2 exp(-s_d)) -> [M, B]."""
    return -(math.log(2 * math.pi) + log_variance + (mean - y).square() * (-log_variance).exp()).sum(-1) / 2


@functools.cache
def points_of_normal(count: int) -> Tensor:
    """The points [count], from low to high, of which the closest one is nearest to a draw from the standard normal
    distribution: the least mean squared distance (Max 1960; found by Lloyd's iteration)."""
    # Starts where many points lie: they are as dense as a normal distribution of variance 3.
    points: Tensor = 3**0.5 * torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    end = points.new_tensor([math.inf])
    for _ in range(200):
        borders = torch.cat([-end, (points[:-1] + points[1:]) / 2, end])
        heights, shares = (-borders.square() / 2).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(borders)
        points = -heights.diff() / shares.diff()  # the mean of each cell
    return points


def mixture_log_density(mean: Tensor, log_variance: Tensor, log_weights: Tensor, y: Tensor) -> Tensor:
    """log sum_m pi_m N(y; mean_m, variance_m) -> [B]."""
    return torch.logsumexp(log_weights + gaussian_log_densities(mean, log_variance, y), 0)


def voronoi_log_density(mean: Tensor, log_variance: Tensor, log_weights: Tensor, y: Tensor) -> Tensor:
    """log (pi_m N(y; mean_m, variance_m) / V_m), m the hypothesis nearest to y, for targets of one number -> [B].

    V_m is the probability that the kernel of m gives its own Voronoi cell, which is the interval up to halfway to the
    hypotheses below and above. So the cell of m has the probability pi_m exactly (Letzelter et al. 2024). Hypotheses at
    the same place share a cell: their probabilities are added, and the kernel is that of the first.
    """
    if mean.shape[-1] != 1:
        raise ValueError(f"cells of {mean.shape[-1]} numbers are not intervals: targets have one")
    centre, scale = mean[..., 0], (log_variance / 2).expand_as(mean)[..., 0]
    nearest = (centre - y[:, 0]).abs().argmin(0, keepdim=True)  # [1, B], the first of equal ones
    here = centre.gather(0, nearest)
    same = centre == here
    below = centre.masked_fill(centre >= here, -math.inf).amax(0, keepdim=True)
    above = centre.masked_fill(centre <= here, math.inf).amin(0, keepdim=True)
    log_scale = scale.gather(0, nearest)
    low, high = ((border + here) / 2 - here for border in (below, above))
    volume = _log_interval(low / log_scale.exp(), high / log_scale.exp())
    probability = log_weights.masked_fill(~same, -math.inf).logsumexp(0)
    kernel = gaussian_log_densities(here[..., None], 2 * log_scale[..., None], y)
    return (probability + kernel - volume)[0]


def _log_interval(low: Tensor, high: Tensor) -> Tensor:
    """log (Phi(high) - Phi(low)) of the standard normal distribution, for low <= 0 <= high: nothing cancels."""
    return torch.log((torch.erf(high / math.sqrt(2)) + torch.erf(-low / math.sqrt(2))) / 2)


KERNEL_SCALES = {"nll": "kernel_scale", "nll_voronoi": "kernel_scale_voronoi"}  # what a result calls them
GRID = 10 ** torch.linspace(-3, 1, 81, dtype=torch.float64)  # times the standard deviation of the targets


@dataclass(frozen=True)
class Kernels:
    """Gaussians with one standard deviation for all hypotheses, in units of `units` [D], or of 1; by density."""

    scales: Mapping[str, float]
    units: tuple[float, ...] = ()

    def in_units_of_targets(self) -> Kernels:
        """The same, with units whose geometric mean is 1: a scale is then that of the targets."""
        mean = statistics.geometric_mean(self.units or (1.0,))
        scales = {name: scale * mean for name, scale in self.scales.items()}
        return Kernels(scales, tuple(unit / mean for unit in self.units))

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
        """The scales, as multiples of `units`, under the names that results have for them."""
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
