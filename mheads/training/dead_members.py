"""Warns of dead members: outputs that do not depend on the input, an Oracle at chance, members that win nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.data.batches import evaluation_batches
from mheads.engine.interface import Engine
from mheads.problems import Result
from mheads.problems.baselines import near_chance
from mheads.training.experiment import Experiment

EXAMPLES = 16  # that outputs are compared on
EARLY = 100  # iterations in which any ensemble may be at chance
ROUNDING = 4 * torch.finfo(torch.float32).eps  # by which equal rows of one batch may differ, as a part of the largest
HARDLY = 0.02  # a difference in probability that changes no answer


class CollapseWatch:
    """Looks with each line of the log and at each evaluation; warns of each member, and of the Oracle, once."""

    def __init__(self, engine: Engine, experiment: Experiment, warn: Callable[[str], None]) -> None:
        data, sampling = experiment.data, experiment.config.sampling.entry
        self._engine, self._problem, self._loss, self._warn = engine, data.problem, experiment.loss, warn
        # A specialist may give one class to everything: that is all it was shown.
        self._generalists = experiment.loss.separable and sampling.even
        # Of training: what only an evaluation reads may be damaged, and training should not end before that.
        examples = data.train.without_augmentation()  # type: ignore[attr-defined]  # it is a source
        rows = data.problem.evaluation_rows or EXAMPLES
        self._readers = evaluation_batches(examples, data.preprocess, rows)[:1]
        self._constant: set[int] = set()
        self._at_chance = False

    def look(self, iteration: int) -> None:
        """Compares the outputs on a few examples; of several processes all take part, and the main rank warns."""
        for outputs, _ in self._engine.outputs(self._readers):
            answers = self._problem.answer(outputs).detach()
            constant = constant_members(answers)
            if self._generalists and iteration >= EARLY and self._problem.unit == "%":
                with suppress(UserError):  # detections have no mean
                    probabilities = torch.stack([self._problem.mean(answer[None]) for answer in answers])
                    constant = sorted({*constant, *constant_members(probabilities, HARDLY, relative=False)})
            new = [m for m in constant if m not in self._constant]
            if new and self._inputs_differ():
                self._constant.update(new)
                self._warn(_constant_warning(new, iteration))

    def judge(self, iteration: int, total: int, result: Result) -> None:
        """Compares the Oracle of an evaluation in the second half of training with that of constant members."""
        early = iteration < max(total / 2, EARLY)
        figures = result.to_dict()
        if early or self._at_chance or "top_k" not in figures or not near_chance(figures):
            return
        if figures["oracle_chance"] == 100:
            return
        self._at_chance = True
        self._warn(
            f"iteration {iteration:,}: the Oracle is {figures['oracle']:.2f} %, and members that always give one class "
            f"each have {figures['oracle_chance']:.2f} %: have they collapsed? What helps: {self._remedy()}"
        )

    def _remedy(self) -> str:
        lower = "a lower optim.lr, optim.schedule.warmup or optim.clip"
        weight = self._loss.options.get("ce_weight", 0)
        if weight:
            return f"{lower} (loss.ce_weight={weight:g} makes steps up to {1 + weight:g} times as large)"
        if self._loss.separable:  # all members learn from everything
            return lower
        return (
            f"{lower}, or a loss from which all members learn at first (loss={{name: annealed, relative: true}}) or "
            "always a little (loss.ce_weight=0.1 of mcl)"
        )

    def _inputs_differ(self) -> bool:
        inputs = [torch.as_tensor(t) for t in nested_values.leaves(self._readers[0]().inputs)]
        return any(not bool((t == t[:1]).all()) for t in inputs)


def constant_members(answers: Tensor, tolerance: float = ROUNDING, relative: bool = True) -> list[int]:
    """The members whose answers [M, b, ...] are finite and the same for all examples, up to a tolerance."""
    answers = answers.flatten(2) if answers.dim() > 2 else answers[..., None]
    apart = (answers.amax(1) - answers.amin(1)).amax(1)  # [M]
    scale = answers.abs().amax((1, 2)) if relative else torch.ones_like(apart)
    same = apart <= tolerance * scale
    return same.nonzero().flatten().tolist() if answers.shape[1] > 1 else []


def _constant_warning(members: list[int], iteration: int) -> str:
    who = f"member {members[0]} gives" if len(members) == 1 else f"members {', '.join(map(str, members))} give"
    return (
        f"iteration {iteration:,}: {who} the same answer to every input. Where this lasts, start anew with a lower "
        "optim.lr, optim.schedule.warmup, optim.clip or data.normalize"
    )


def idle_warning(members: Sequence[int], iterations: int, options: Collection[str], far: bool = False) -> str:
    """What to do about members that win nothing, under a loss that has these options; `far`: targets are numbers that
    are not normalised. `examples/dead_members.py` has measured what helps."""
    who = f"member {members[0]} has" if len(members) == 1 else f"members {', '.join(map(str, members))} have"
    soft = "loss=annealed loss.relative=true loss.temperature=0.5 loss.floor=0.001 (all learn first)"
    helps = ["data.normalize_targets=true"] if far else []
    helps += ["a higher loss.temperature" if "temperature" in options else soft, "or fewer members"]
    return (
        f"{who} won no example in the last {iterations:,} iterations, and so little or nothing to learn from. What "
        f"helps: {', '.join(helps)}"
    )
