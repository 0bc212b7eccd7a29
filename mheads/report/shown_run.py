"""A run that figures and pages show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mheads.api.run import Run, open_run
from mheads.common.errors import UserError
from mheads.common.progress import Silent, Watcher
from mheads.config.schema import Config
from mheads.data.catalog import names_examples
from mheads.data.splits import Split
from mheads.report.answered_numbers import AnsweredNumbers, answer_numbers
from mheads.report.class_pictures import encode_image, picture_classes
from mheads.report.evidence import Evidence, examine
from mheads.runs.read_run import Record
from mheads.training.build_from_config import build_net_of_run
from mheads.trees.treenet import TreeNet

# What the paper reports of a config: the name of its row, and the figure of each metric; None where it has none.
PaperFigures = Callable[[Config], tuple[str, dict[str, dict[str, Any]]] | None]


class ShownRun:
    """What the folder of a run holds, and what its network answers, which is computed when it is first asked for.

    Where something cannot be had, asking for it raises a UserError, and does so again without another attempt.
    """

    def __init__(
        self,
        record: Record,
        watch: Watcher | None = None,
        trust: bool = False,
        look: bool = True,
        paper: PaperFigures | None = None,
        run: Run | None = None,
        examples: Split | None = None,
    ) -> None:
        """`trust` allows to run code that only the folder names; without `look`, the network answers nothing.

        `run` is the one that a program has at hand, whose net is asked as it is, and `examples` are those to ask about;
        by default both are those of the folder.
        """
        self._run, self.examples = run, examples
        self.record, self.watch, self.trust, self.look, self.paper = record, watch or Silent(), trust, look, paper
        self._made: dict[Callable[[], Any], Any] = {}

    def once(self, make: Callable[[], Any]) -> Any:
        if make not in self._made:
            try:
                self._made[make] = make()
            except UserError as error:
                self._made[make] = error
        if isinstance(self._made[make], UserError):
            raise self._made[make]
        return self._made[make]

    @property
    def net(self) -> TreeNet:
        """The tree with fresh weights, or those of `evidence`."""
        net: TreeNet = self.once(self._build_net)
        return net

    @property
    def evidence(self) -> Evidence:
        evidence: Evidence = self.once(self._examine)
        return evidence

    @property
    def numbers(self) -> AnsweredNumbers:
        numbers: AnsweredNumbers = self.once(self._answer_numbers)
        return numbers

    @property
    def reliability(self) -> dict[str, dict[str, list[float]]]:
        """The bins of confidence of each predictor; one network is its own mean."""
        bins = self.evidence.reliability
        return bins if self.record.config.members > 1 else {"the network": bins["Ensemble-Mean"]}

    @property
    def class_pictures(self) -> list[str]:
        """A small picture of each class as a data URI; none where no images are at hand."""
        pictures: list[str] = self.once(self._picture_classes)
        return pictures

    def _picture_classes(self) -> list[str]:
        try:
            return [encode_image(image, 40) for image in picture_classes(self.record, "typical")] if self.look else []
        except UserError:  # the panel of the hardest examples shows what is missing
            return []

    def open(self) -> Run:
        """The run, with its weights in its net."""
        return self._run or open_run(self.record.folder, self.record.config, self.net, lambda message: None)

    def _build_net(self) -> TreeNet:
        if self._run is not None:
            return self._run.net
        return build_net_of_run(self.record.folder, self.record.config, self.watch.warn, trust=self.trust)

    def _examine(self) -> Evidence:
        return examine(self.record, self._load_net(), self.watch, self.examples)

    def _answer_numbers(self) -> AnsweredNumbers:
        return answer_numbers(self.record, self._load_net(), self.watch, self.examples)

    def _load_net(self) -> TreeNet:
        """The net with the weights to ask; raises where there are no examples to ask it about."""
        net = self.net
        if not self.look:
            raise UserError("This is computed when the run is finished")
        if self._run is None:
            self.record.folder.load_weights(net, lambda message: None)  # whoever shows the run reports how far it is
        elif self.examples is None and not names_examples(self.record.config.data):
            raise UserError("a run does not keep the arrays of its examples: give run.plot or run.report x and y")
        return net
