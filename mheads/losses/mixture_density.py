"""A mixture density network whose components are the members: each gives a mean, a variance and a score."""

from __future__ import annotations

import torch
from torch import Tensor

from mheads.common.nested_values import Value
from mheads.losses.ensemble_loss import Loss, LossValue, ones_or
from mheads.problems.densities import gaussian_log_densities
from mheads.problems.member_losses import mean_and_log_variance
from mheads.trees import member_scores


def mixture_density() -> Loss:
    """-log sum_m pi_m N(y; mean_m, variance_m) of every example (Bishop 1994), for numbers.

    A member gives the mean and the logarithm of the variance, each [B, D], as for `gaussian_nll`, and a score; pi_m is
    its weight by the scores, sigmoid(s_m) / sum_j sigmoid(s_j), or 1 / M without scores. Members that share all layers
    but the last are the usual network. The assignment is the responsibilities. All members learn from an example
    together, so it counts by the mean of its sample weights, and a sampling that gives members weights of their own is
    refused.
    """
    return Loss("mixture_density", _mixture_density, together=True, teaches_scores=True, gives_variances=True)


def _mixture_density(outputs: Value, y: Tensor, sample_weights: Tensor | None, ties: Tensor | None) -> LossValue:
    mean, log_variance, y = mean_and_log_variance("mixture_density", member_scores.answer_of(outputs), y)
    log_densities = gaussian_log_densities(mean, log_variance, y)  # [M, B]
    joint = member_scores.log_weights(outputs, like=log_densities) + log_densities
    nlls = -torch.logsumexp(joint, 0)
    weights = ones_or(sample_weights, log_densities.detach()).mean(0)
    responsibilities = joint.detach().softmax(0) * weights
    return LossValue((weights * nlls).sum(), responsibilities, -log_densities.detach())
