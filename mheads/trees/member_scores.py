"""Scores: a number with which each member says whether an example is its own, beside its answer.

A network with a score gives {"answer": ..., "score": [B]}. `with_scores` has a network give one: a linear layer on what
its last layer takes. So an ensemble of specialists can give one answer: see `weights`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mheads.common.errors import UserError
from mheads.common.modules import children
from mheads.common.nested_values import Value
from mheads.trees.splitting.trace import CannotFollowError, trace

OWN = (
    'let the network give its own: return {"answer": answer, "score": score} with a score [B] from its forward, and '
    "set gives_score = True on it"
)


def answer_of(outputs: Value) -> Value:
    """The outputs without scores."""
    return outputs["answer"] if _is_scored(outputs) else outputs


def check_order(outputs: Value, network: str) -> None:
    """Refuses a score before the answer: the first value of an output is what everybody takes for the answer."""
    if _is_scored(outputs) and next(iter(outputs)) == "score":
        raise UserError(f'{network} gives {{"score": ..., "answer": ...}}: put the answer first')


def score_of(outputs: Value) -> Tensor | None:
    """The scores [M, B] of outputs, if there are some."""
    if not _is_scored(outputs):
        return None
    score, shape = outputs["score"], _first(outputs["answer"]).shape[:2]
    if score.shape not in (shape, (*shape, 1)):
        raise UserError(f"scores of shape {list(score.shape)}, not one number for each example, {list(shape)}: {OWN}")
    scores: Tensor = score.reshape(shape)
    return scores


def weights(outputs: Value) -> Tensor | None:
    """How much each member counts in the scored answer, [M, B] in float64, if there are scores.

    The sigmoid of a score is the probability that the member is the one to ask; they are divided by their sum. In log
    space: all of them may be next to nothing.
    """
    score = score_of(outputs)
    return None if score is None else F.logsigmoid(score.double()).softmax(0)


def log_weights(outputs: Value, like: Tensor) -> Tensor:
    """The logarithms of `weights`, with a gradient and in the precision of `like` [M, B]; equal without scores."""
    score = score_of(outputs)
    return (torch.zeros_like(like) if score is None else F.logsigmoid(score)).log_softmax(0)


def _is_scored(outputs: Value) -> bool:
    return isinstance(outputs, dict) and outputs.keys() == {"answer", "score"}


def _first(value: Value) -> Tensor:
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


class Score(nn.Linear):
    """Gives 0 at first: no member is preferred before it has learned anything."""

    fresh = True  # weights to start from may have none

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ScoredLinear(nn.Linear):
    """A last layer with a score beside it, under its own names."""

    gives_score = True
    score: Score

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features = x if x.dim() == 2 else x.flatten(1, -2).mean(1)
        return {"answer": super().forward(x), "score": self.score(features)[:, 0]}


class ScoredConv2d(nn.Conv2d):
    """A last layer of maps with a score beside it, of the mean over its pixels."""

    gives_score = True
    score: Score

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"answer": super().forward(x), "score": self.score(x.flatten(2).mean(2))[:, 0]}


class OnAnswer(nn.Module):
    """A layer after the last one with weights: it takes the answer, and leaves the score alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**outputs, "answer": self.layer(outputs["answer"])}


_SCORED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ScoredLinear, nn.Conv2d: ScoredConv2d}


def with_scores(network: Callable[[], nn.Module] | nn.Module, layer: str | None = None) -> Any:
    """A factory of networks, or a copy of a network, with a score beside the answer; one that gives it stays as it is.

    All that the network has keeps its name; `score` is the layer that gives it, a part of the last layer: the one that
    `layer` names, the one that gives the output where the forward can be followed, or the last with weights.
    """
    if isinstance(network, nn.Module):
        return _ensure_score(copy.deepcopy(network), layer or _find_answer_layer(network))
    answer_layers: list[str | None] = []  # the same in all networks that it makes

    def make() -> nn.Module:
        made = network()
        if not isinstance(made, nn.Module):
            return made  # a tree refuses it
        if not answer_layers:
            answer_layers.append(layer or _find_answer_layer(made))
        return _ensure_score(made, answer_layers[0])

    make.__name__ = getattr(network, "__name__", type(network).__name__)
    make.__wrapped__ = network  # type: ignore[attr-defined]  # fingerprint.py describes it
    return make


def _gives_score(network: nn.Module) -> bool:
    return any(getattr(module, "gives_score", False) for module in network.modules())


def _ensure_score(network: nn.Module, layer: str | None) -> nn.Module:
    if _gives_score(network):
        return network
    if layer is None:
        _add(network, type(network).__name__)
        return network
    last = dict(network.named_modules()).get(layer)
    if type(last) not in _SCORED:
        kind = "no layer of it" if last is None else f"a {type(last).__name__}, not a Linear or Conv2d"
        raise UserError(f"layer = {layer!r} is to give the answer of {type(network).__name__}, and is {kind}: {OWN}")
    _put_score_beside(last)
    return network


def _find_answer_layer(network: nn.Module) -> str | None:
    """The path of the Linear or Conv2d whose output is that of the network; None where the forward does not tell."""
    if _gives_score(network) or _is_in_a_row(network):
        return None
    try:
        (output,) = next(node for node in trace(network).graph.nodes if node.op == "output").args
    except CannotFollowError:
        return None
    if isinstance(output, tuple | list | dict):
        raise UserError(f"{type(network).__name__} gives several values, and a score goes beside one answer: {OWN}")
    if output.op != "call_module" or type(network.get_submodule(output.target)) not in _SCORED:
        return None
    return str(output.target)


def _is_in_a_row(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _put_score_beside(layer: Any) -> None:
    where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    size = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    layer.__class__ = _SCORED[type(layer)]
    layer.score = Score(size, 1, **where)


def _add(module: nn.Module, network: str) -> None:
    """Gives the last layer with weights in a module a score."""
    after = []
    for name, layer in reversed(children(module)):
        if next(layer.parameters(), None) is None:
            after.append(name)
            continue
        if type(layer) in _SCORED:
            _put_score_beside(layer)
        elif not children(layer):
            raise UserError(f"the last layer of {network} is a {type(layer).__name__}, not a Linear or Conv2d: {OWN}")
        else:
            _add(layer, network)
        if _is_in_a_row(module):
            for other in after:
                module._modules[other] = OnAnswer(module._modules[other])  # type: ignore[arg-type]
        return
    raise UserError(f"{network} has no last layer to put a score beside: {OWN}")
