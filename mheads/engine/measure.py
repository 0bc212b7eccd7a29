"""One way to measure an ensemble: examples go through an engine, and a problem measures the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mheads.common import nested_values
from mheads.common.nested_values import Value
from mheads.common.progress import Silent, Watcher
from mheads.data import Split
from mheads.data.batches import Batch, evaluation_batches
from mheads.problems import Problem, Result
from mheads.trees import member_scores

EVALUATION_ROWS = 100  # fixed: the number of rows decides the bits of a matrix product
Inputs = Callable[[Any, torch.dtype], Any]  # raw examples to what a network takes


class GivesOutputs(Protocol):
    """The part of an engine that measuring needs; of several ranks, the main rank gets the outputs."""

    is_main: bool

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]: ...


def answers(
    engine: GivesOutputs,
    examples: Split,
    inputs: Inputs,
    problem: Problem,
    watch: Watcher | None = None,
    rows: int = EVALUATION_ROWS,
) -> Iterator[tuple[Tensor, Tensor | None, Value]]:
    """Answers [M, b, ...], weights [M, b] if members have scores, and targets of each batch, in order.

    The main rank gets them.
    """
    for outputs, targets in _outputs(engine, examples, inputs, problem, watch, rows):
        yield problem.answer(outputs), member_scores.weights(outputs), targets


def _outputs(
    engine: GivesOutputs, examples: Split, inputs: Inputs, problem: Problem, watch: Watcher | None, rows: int
) -> Iterator[tuple[Value, Value]]:
    readers = evaluation_batches(examples, inputs, problem.evaluation_rows or rows)
    with (watch or Silent()).evaluating(len(examples)) as advance:
        # The engine is asked first: it has something to do after the last batch.
        for (outputs, targets), reader in zip(engine.outputs(readers), readers, strict=False):
            yield outputs, targets
            advance(len(reader))


def all_answers(
    engine: GivesOutputs, examples: Split, inputs: Inputs, problem: Problem, watch: Watcher | None = None
) -> tuple[Tensor, Tensor | None, Value]:
    """Answers [M, N, ...], weights [M, N] if members have scores, and targets of all examples, in main memory."""
    return join_answers(list(answers(engine, examples, inputs, problem, watch)))


def join_answers(parts: Sequence[tuple[Tensor, Tensor | None, Value]]) -> tuple[Tensor, Tensor | None, Value]:
    """What `answers` gave for each batch as one, in main memory."""
    outputs, weights, targets = zip(*parts, strict=True)
    together = None if weights[0] is None else torch.cat([part.cpu() for part in weights], 1)
    whole = nested_values.map_leaves(lambda *parts: torch.cat([part.cpu() for part in parts]), *targets)
    return torch.cat([part.cpu() for part in outputs], 1), together, whole


def measure(
    engine: GivesOutputs,
    examples: Split,
    inputs: Inputs,
    problem: Problem,
    watch: Watcher | None = None,
    keep: Callable[[Tensor, Tensor | None, Value], None] | None = None,
    rows: int = EVALUATION_ROWS,
) -> Result | None:
    """All metrics, which the main rank gets; `keep` is given the answers, weights and targets on the way."""
    metrics = None
    for outputs, targets in _outputs(engine, examples, inputs, problem, watch, rows):
        answer, weights = problem.answer(outputs), member_scores.weights(outputs)
        # The metrics of a problem of one's own need know neither of scores nor of variances.
        further = {"weights": weights, "log_variances": problem.log_variances(outputs)}
        metrics = metrics or problem.metrics(len(answer), **({} if weights is None else {"scored": True}))
        metrics.update(answer, targets, **{key: value for key, value in further.items() if value is not None})
        if keep is not None:
            keep(answer, weights, targets)
    return metrics.result() if metrics is not None else None


def calibrate(engine: GivesOutputs, examples: Split | None, inputs: Inputs, problem: Problem) -> Problem:
    """The problem with what held-out examples decide: for numbers, the kernels of the density of hypotheses."""
    calibrator = problem.calibrator()
    if examples is None or calibrator is None:
        return problem
    for outputs, weights, targets in answers(engine, examples, inputs, problem):
        calibrator.update(outputs, targets, weights)
    calibrated: Problem = problem.calibrated(calibrator.result()) if engine.is_main else problem
    return calibrated


class Models:
    """Any models, run one after the other; stands in for an engine."""

    is_main = True

    def __init__(self, forward: Callable[[Batch], Value]) -> None:
        self.forward = torch.no_grad()(forward)  # not inference mode, in which a tree cannot look at its network

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        for read in readers:
            batch = read()
            yield self.forward(batch), batch.targets


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the modules are in eval mode; afterwards in the mode that they were in."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
