"""The losses of a net as losses of mheads: sums of terms, each of one example, so that batches may be cut.

A term is plain data: {type, weight, inputs: [0, label], ...}; a number among the inputs is an output of the network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mheads.caffe.layers.losses import BATCH_SIZE, FULL, NONE, VALID, places_and_sums
from mheads.caffe.net_plan import LABEL
from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.losses import Loss
from mheads.losses.ensemble_loss import LossValue

Terms = list[dict[str, Any]]


def is_plain(terms: Terms, dims: int) -> bool:
    """Whether this is the cross-entropy of one score per class, which is what mheads takes without a word."""
    if len(terms) != 1 or dims != 2:
        return False
    (term,) = terms
    kind = (term["type"], term["weight"], term["inputs"], term.get("axis"), term.get("ignore"))
    return kind == ("SoftmaxWithLoss", 1, [0, LABEL], 1, None) and term["normalization"] != NONE and "fixed" not in term


def needs_whole_batch(terms: Terms) -> bool:
    """Whether a loss is divided by how many labels of the batch count."""
    return any(term.get("normalization") == VALID and term.get("ignore") is not None for term in terms)


def of_example(outputs: Value, y: Value, terms: Terms, batch: int = 1) -> Tensor:
    """The losses [M, B] of the members on each example; their mean over a batch is Caffe's loss."""
    return sum(_term(term, outputs, y, batch) for term in terms)  # type: ignore[return-value]


def of_batch(outputs: Value, y: Value, terms: Terms, batch: int = 1) -> Tensor:
    """The same, of a whole batch: terms are divided by how many of its labels count."""
    return of_example(outputs, y, terms, batch)


of_batch.whole_batch = True  # type: ignore[attr-defined]  # `Loss` asks for it


def whole(terms: Terms, batch: int = 1) -> Loss:
    """Each member by itself, with terms that are divided by how many labels of the batch count."""
    return Loss(
        "whole",
        partial(_independent, terms=terms, batch=batch),
        separable=True,
        whole_batch=True,
        each_batch=True,
        masks=True,
    )


def combined(coefficients: list[float], terms: Terms, batch: int = 1) -> Loss:
    """The loss of the sum of the members' outputs, each times its coefficient."""
    function = partial(_combine, coefficients=coefficients, terms=terms, batch=batch)
    return Loss(
        "combined",
        function,
        averaged=True,
        whole_batch=needs_whole_batch(terms),
        each_batch=True,
        masks=True,
        check_members=partial(_check_members, count=len(coefficients)),
    )


def _check_members(members: int, count: int) -> None:
    if members != count:
        raise UserError(f"the loss has {count} coefficients for {members} members: give one each")


def _independent(outputs: Value, y: Value, terms: Terms, batch: int) -> Tensor:
    return of_example(outputs, y, terms, batch)


def _combine(outputs: Value, y: Value, coefficients: list[float], terms: Terms, batch: int) -> LossValue:
    def total(t: Tensor) -> Tensor:
        weights = t.new_tensor(coefficients).view(-1, *(1,) * (t.dim() - 1))
        return (t * weights).sum(0, keepdim=True)

    loss = of_example(nested_values.map_leaves(total, outputs), y, terms, batch).sum()
    with torch.no_grad():
        losses = of_example(outputs, y, terms, batch)
    return LossValue(loss, torch.ones_like(losses), losses)


def _check_targets(term: dict[str, Any], x: Tensor, y: Tensor) -> None:
    """Refuses other numbers of targets than a loss looks at."""
    per_example = {"HingeLoss": 1, "MultinomialLogisticLoss": 1}
    if term["type"] == "SoftmaxWithLoss":
        per_example = {term["type"]: x.shape[1:].numel() // x.shape[term["axis"]]}
    wanted, given = per_example.get(term["type"], x.shape[1:].numel()), y.shape[1:].numel()
    if given != wanted:
        raise UserError(
            f"{term['type']} of the net takes {wanted} target{'s' if wanted != 1 else ''} for an example, and the data "
            f"give {given}: take other data, or another num_output in the net's last layer"
        )


def _term(term: dict[str, Any], outputs: Value, y: Value, batch: int) -> Tensor:
    leaves = nested_values.leaves(outputs)
    members, rows = leaves[0].shape[:2]
    label = nested_values.leaves(y)[0]
    inputs = [
        label.repeat(members, *(1,) * (label.dim() - 1)) if i == LABEL else leaves[i].flatten(0, 1)
        for i in term["inputs"]
    ]
    inputs = [t.detach() if i in term.get("fixed", ()) else t for i, t in enumerate(inputs)]
    _check_targets(term, *inputs)
    if inputs[0].shape[1:] != inputs[1].shape[1:] and term["type"] == "EuclideanLoss":
        inputs = [t.flatten(1) for t in inputs]
    sums, counts, places = places_and_sums(term, inputs)
    mode = term.get("normalization", BATCH_SIZE)
    losses = sums.view(members, rows)
    if mode == VALID and term.get("ignore") is not None:
        losses = losses * (rows / counts.view(members, rows).sum(1, keepdim=True).clamp_min(1))
    elif mode in (FULL, VALID):
        losses = losses / places
    elif mode == BATCH_SIZE and term.get("outer", 1) > 1:
        losses = losses / term["outer"]
    elif mode == NONE:
        losses = losses * batch
    return losses if term["weight"] == 1 else losses * term["weight"]
