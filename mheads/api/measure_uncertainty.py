"""Measures of a run that need further examples: temperatures from held-out ones, and other data to be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mheads.api.examples_of_run import load_examples_of_run
from mheads.common import nested_values
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.engine.measure import GivesOutputs, all_answers
from mheads.problems import is_single_label
from mheads.problems.uncertainty import EnsembleOutputs, measure_other_data, measure_scaled
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder


@dataclass(frozen=True)
class FurtherExamples:
    """The split that temperatures are fitted on, and data keys of other examples (`data.path=other.npz`)."""

    temperature_from: str | None = None
    other_data: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self.temperature_from is not None or bool(self.other_data)

    def check(self, folder: RunFolder, data: DataFacts, split: str) -> None:
        """Raises an error before anything is computed."""
        if not is_single_label(data.problem):
            raise UserError(
                f"{folder.path} was trained for {data.problem.name}: temperatures and other data are for runs whose "
                "examples have one class each"
            )
        if self.temperature_from == split:
            raise UserError(
                f"--temperature-from {split}: the run is measured on these examples, and would look better than it is; "
                "give --split test with --temperature-from validation"
            )

    def measure(
        self,
        folder: RunFolder,
        engine: GivesOutputs,
        data: DataFacts,
        kept: tuple[Tensor, Tensor | None, Any],
        watch: Watcher,
    ) -> dict[str, Any]:
        """The fields that a result gains; `kept` are outputs, weights and targets of what it was measured on."""
        of_scores = getattr(data.problem, "of_scores", False)
        measures: dict[str, Any] = {}

        def answer(overrides: Sequence[str], split: str | None, unlike: bool) -> tuple[EnsembleOutputs, Any]:
            _, examples, _ = load_examples_of_run(folder, overrides, split, unlike)
            outputs, weights, targets = all_answers(engine, examples, data.inputs, data.problem, watch)
            return EnsembleOutputs(outputs, weights, of_scores), targets

        outputs, y = EnsembleOutputs(kept[0], kept[1], of_scores), self._labels(data, kept[2])
        if self.temperature_from is not None:
            held_out, targets = answer((), self.temperature_from, unlike=False)
            measures |= measure_scaled(outputs, y, held_out, self._labels(data, targets))
        if self.other_data:
            measures |= measure_other_data(outputs, answer(self.other_data, "test", unlike=True)[0])
        return measures

    @staticmethod
    def _labels(data: DataFacts, targets: Any) -> Tensor:
        labels: Tensor = data.problem.group(nested_values.leaves(targets)[0])
        return labels
