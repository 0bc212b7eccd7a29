"""Learning from a teacher: beside the label of an example, what an ensemble or another network answers to it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.problems import BaseLoss


def mix_in_teacher(base_loss: BaseLoss, weight: float, temperature: float) -> BaseLoss:
    """The base loss (1 - weight) l + weight T^2 KL(q || p), where l is the base loss on the label: see `losses`."""
    return partial(losses, base_loss=base_loss, weight=weight, temperature=temperature)


def losses(outputs: Value, y: tuple[Value, Tensor], base_loss: BaseLoss, weight: float, temperature: float) -> Tensor:
    """Outputs [M, B, C]; labels, and the teacher's probabilities [B, C] -> [M, B].

    q = softmax(log answers / T) and p = softmax(scores / T) are softened by the temperature T, so that small
    probabilities count as well (Hinton, Vinyals and Dean 2015). T^2 makes up for the gradients, which T divides twice.
    """
    labels, answers = y
    scores = nested_values.leaves(outputs)[0]
    wide = torch.promote_types(scores.dtype, torch.float32)  # in which small answers are not 0
    q = (answers.to(wide).log() / temperature).softmax(-1).to(scores.dtype)
    log_p = (scores / temperature).log_softmax(-1)
    apart = (torch.xlogy(q, q) - q * log_p).sum(-1)
    return (1 - weight) * base_loss(outputs, labels) + weight * temperature**2 * apart
