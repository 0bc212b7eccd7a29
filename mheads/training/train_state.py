"""The state of training that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from mheads.common.schemas import check_arrays, check_history
from mheads.data.batches import Batch
from mheads.engine.diagnostics import Diagnostics
from mheads.engine.stacked_stages import StackedStage
from mheads.engine.step_results import StepReport
from mheads.optim.schedules import Schedule
from mheads.optim.stage_updates import Optimizer
from mheads.problems import Result
from mheads.runs.checkpoint import refuse_misfits
from mheads.runs.metrics_log import History, MetricsLog
from mheads.training.experiment import Experiment


class TrainState:
    """Where training stands: the weights, the optimizer, the schedule, and what the main rank remembers for the log.

    All of it is in a checkpoint.
    """

    def __init__(self, experiment: Experiment, stacks: Mapping[str, StackedStage] | None = None) -> None:
        config, net = experiment.config, experiment.net
        self.net, self.problem = net, experiment.data.problem
        self.optimizer = Optimizer(net, config.optim, stacks)
        lr = config.optim.lr
        if experiment.loss.averaged and config.loss.scale_rate and config.optim.entry.linear:
            lr *= net.num_members  # averaging divides every member's gradient by M, which does not change Adam's step
        self.schedule = Schedule(config.optim.schedule, lr, config.optim.iterations)
        self.pretrain, self.pretrain_lr = config.pretrain, config.optim.lr
        self.total = config.pretrain + config.optim.iterations
        members, groups = net.num_members, len(self.problem.groups)
        self.step = 0
        self.seconds = 0.0
        self.log: list[list[Any]] = []  # the parts of metrics.jsonl
        self.history = History(members, groups)
        self.owned = np.zeros((members, groups))  # assignment since the last evaluation
        self.diagnostics = Diagnostics(members)

    @property
    def pretraining(self) -> bool:
        return self.step < self.pretrain

    @property
    def ends_pretraining(self) -> bool:
        return 0 < self.step == self.pretrain

    def begin_step(self) -> float:
        """The learning rate of the step that follows; the loss starts with a fresh schedule and no momentum."""
        if self.step == self.pretrain:
            self.optimizer.forget()
        return self.pretrain_lr if self.pretraining else self.schedule.rate(self.step - self.pretrain)

    def set_rate(self, lr: float) -> None:
        """Gives the optimizer the learning rate of this step."""
        rate_until = None if self.pretraining else partial(self.schedule.rate, self.step - self.pretrain)
        self.optimizer.set_rate(lr, rate_until)

    def is_due(self, every: int) -> bool:
        """Whether something that happens every n iterations happens now; the end is for itself."""
        return bool(every) and self.step % every == 0 and self.step < self.total

    def add(self, report: StepReport, batch: Batch, seconds: float) -> None:
        owned = torch.zeros(self.owned.shape, dtype=torch.float64)
        owned.index_add_(1, self.problem.group(batch.targets).cpu(), report.assignment.cpu().double())
        self.owned += owned.numpy()
        self.history.note(self.step, owned.numpy())
        self.diagnostics.add(report, batch, seconds)
        self.seconds += seconds

    def add_evaluation(self, result: Result) -> None:
        """Remembers who owned what when the ensemble was evaluated."""
        self.history.append(self.step, np.asarray(result.ownership, float), self.owned)
        self.owned = np.zeros_like(self.owned)

    def tensors(self, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Weights of the stages that are here, and the state of their optimizer."""
        tensors = {f"model/{name}": tensor for name, tensor in self.net.state_dict().items()}
        held = self.optimizer.state() if optimizer else {}
        return tensors | {f"optim/{name}": tensor for name, tensor in held.items()}

    def capture(
        self, tensors: dict[str, torch.Tensor], log: MetricsLog
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that a checkpoint holds: the tensors of all stages and what the main rank remembers."""
        arrays = {**self.history.state(), "owned": self.owned, **self.diagnostics.arrays()}
        state = {
            "rate": self.optimizer.rate,
            "schedule": self.schedule.state(),
            "log": log.mark(),
            "seconds": self.seconds,
            **self.diagnostics.state(),
        }
        return tensors | {f"progress/{name}": torch.from_numpy(array) for name, array in arrays.items()}, state

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises ValueError unless training can resume from a checkpoint of these tensors."""
        weights = select_prefix(tensors, "model/")
        refuse_misfits(self.net.state_dict(), weights)
        if bad := [name for name, _ in self.net.named_parameters() if not torch.isfinite(weights[name]).all()]:
            raise ValueError(f"model/{bad[0]} is not finite, and no training saves that")
        self.optimizer.refuse_misfits(select_prefix(tensors, "optim/"))
        arrays = {name: tensor.numpy() for name, tensor in select_prefix(tensors, "progress/").items()}
        members, groups = self.owned.shape
        check_history(arrays, members, groups)
        cells = {name: (members, groups) for name in ("owned", "lately") if name in {"owned", *arrays}}
        check_arrays(arrays, cells | {name: (members,) for name in self.diagnostics.arrays() if name in arrays})

    def restore(self, step: int, state: dict[str, Any], tensors: dict[str, torch.Tensor], main_rank: bool) -> None:
        """Goes back to the checkpoint of a step: its plain data, and the tensors of the stages of this process."""
        self.net.load_state_dict(select_prefix(tensors, "model/"))
        self.optimizer.load_state(select_prefix(tensors, "optim/"), state["rate"])
        self.schedule.load_state(state["schedule"])
        self.step = step
        self.seconds = state["seconds"]
        self.log = state["log"]
        if main_rank:
            arrays = {name: tensor.numpy() for name, tensor in select_prefix(tensors, "progress/").items()}
            self.history.load(arrays)
            self.owned = arrays["owned"].copy()
            self.diagnostics.load(arrays, state)


def tensor_prefixes(stages: Iterable[str]) -> tuple[str, ...]:
    """How the names of the tensors of these stages begin in a checkpoint."""
    return tuple(f"{kind}/stages.{stage}." for stage in stages for kind in ("model", "optim"))


def select_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with the prefix, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
