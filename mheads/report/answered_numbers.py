"""What the members of a run answer to examples whose targets are numbers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np

from mheads.api.examples_of_run import load_examples_of_run
from mheads.common.errors import UserError
from mheads.common.progress import Watcher, forward_warnings
from mheads.data.splits import RowSubset, Source, Split
from mheads.engine.measure import all_answers, in_eval_mode
from mheads.problems import gives_numbers
from mheads.runs.read_run import Record
from mheads.training.build_from_config import make_engine
from mheads.trees.treenet import TreeNet

MOST_EXAMPLES = 400


@dataclass(frozen=True)
class AnsweredNumbers:
    """The hypotheses of M members for N examples, in the units of the targets."""

    rows: list[int]  # the numbers of the examples
    inputs: np.ndarray  # raw examples [N, ...]
    targets: np.ndarray  # [N, D], or trajectories [N, T, d]
    hypotheses: np.ndarray  # [M, N, D] or [M, N, T, d]
    probabilities: np.ndarray | None  # [M, N], by the members' scores if they have some


def answer_numbers(record: Record, net: TreeNet, watch: Watcher, examples: Split | None = None) -> AnsweredNumbers:
    """Runs the weights of a net over examples, by default those that training evaluates on; over some if there are
    many, evenly spaced."""
    facts, problem = record.data, record.data.problem
    if not gives_numbers(problem):
        raise UserError(f"this figure is only for regression, but {record.place} is {problem.name}")
    if examples is None:
        with forward_warnings(watch):
            facts, examples, _ = load_examples_of_run(record.folder)
    rows = np.unique(np.linspace(0, len(examples) - 1, min(len(examples), MOST_EXAMPLES)).round().astype(int))
    shown = RowSubset(cast(Source, examples), rows)
    with closing(make_engine(record.config, net)) as engine, in_eval_mode([net]):
        answers, weights, targets = all_answers(engine, shown, facts.inputs, problem, watch)
    hypotheses = answers.double().numpy()
    return AnsweredNumbers(
        rows.tolist(),
        shown.read(np.arange(len(rows)), None).numpy(),
        targets.double().numpy().reshape(hypotheses.shape[1:]),
        hypotheses,
        None if weights is None else weights.double().numpy(),
    )
