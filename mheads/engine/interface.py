"""What the training loop asks of any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from mheads.common.nested_values import Value
from mheads.data.batches import Batch
from mheads.engine.engine_options import EngineOptions
from mheads.engine.stacked_stages import StackedStage
from mheads.engine.step_results import StepReport
from mheads.losses import Loss
from mheads.trees.treenet import TreeNet

T = TypeVar("T")


class Notes(Protocol):
    """Short texts that processes leave for each other, from any thread."""

    def post(self, key: str, text: str) -> None: ...

    def take(self, key: str) -> str:
        """Waits for the text of a key; raises if a process is lost meanwhile."""


class Engine(Protocol):
    """Runs the stages of a tree over micro-batches. Of several processes each has one, and they act together."""

    net: TreeNet  # the stages that are here
    options: EngineOptions
    is_main: bool  # keeps the run folder: of several processes, one
    rank: int  # of this process; that of the main one is 0
    notes: Notes | None  # of several processes

    @property
    def stacks(self) -> dict[str, StackedStage]:
        """By the name of the first: stages that run as one, and are updated as one."""

    def step(self, step: int, batch: Batch, loss: Loss) -> StepReport:
        """Computes the gradients of one step on all its examples; `update` then uses them."""

    def update(self, update_stage: Callable[[str, list[Tensor]], None]) -> None:
        """Applies the last step's gradients, stage by stage."""

    def outputs(self, readers: Sequence[Callable[[], Batch]]) -> Iterator[tuple[Value, Value]]:
        """Outputs [M, b, C] and targets of each batch in order, without dropout; the main rank gets them."""

    def ask_to_stop(self, signum: int) -> None:
        """Called by a signal's handler; the report of the next step that all processes agree on passes it on."""

    def agree(self, decide: Callable[[], tuple[Any, T]]) -> tuple[Any, T | None]:
        """Has the main rank decide: returns plain data to all, and something else to the main rank alone."""

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Brings the tensors of all stages, by name, to the main rank."""

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the main rank has, on all ranks."""

    @property
    def writers(self) -> dict[str, int]:
        """The rank that writes the tensors of each stage."""

    def pausing(self) -> AbstractContextManager[None]:
        """Inside, this process waits for a disk, and does not hang however long that takes."""

    def close(self) -> None: ...
