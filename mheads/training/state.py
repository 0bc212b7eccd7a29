"""Where training stands, from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mheads.common.progress import Watcher
from mheads.common.schemas import check_arrays, check_history
from mheads.data.batches import Batch
from mheads.engine.diagnostics import Diagnostics
from mheads.engine.interface import Engine
from mheads.engine.training_step import StepReport
from mheads.optim.schedules import Schedule
from mheads.optim.stage_updates import Optimizer
from mheads.problems import Problem, Result
from mheads.runs.checkpoint import refuse_misfits
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import History, MetricsLog
from mheads.training.experiment import Experiment
from mheads.trees.treenet import TreeNet


class Standing:
    """Where training stands, besides the weights: all of it is in the checkpoint."""

    def __init__(self, members: int, problem: Problem) -> None:
        self.problem = problem
        groups = len(problem.groups)
        self.step = 0
        self.seconds = 0.0
        self.log: list[list[Any]] = []  # the parts of metrics.jsonl
        self.history = History(members, groups)
        self.owned = np.zeros((members, groups))  # assignment since the last evaluation
        self.diagnostics = Diagnostics(members)

    def add(self, report: StepReport, batch: Batch, seconds: float) -> None:
        owned = torch.zeros(self.owned.shape, dtype=torch.float64)
        owned.index_add_(1, self.problem.group(batch.targets).cpu(), report.assignment.double().cpu())
        self.owned += owned.numpy()
        self.history.note(self.step, owned.numpy())
        self.diagnostics.add(report, batch, seconds)
        self.seconds += seconds

    def line(self, rate: float, norms: Sequence[float]) -> dict[str, Any]:
        return self.diagnostics.line(self.step, rate, norms)

    def own(self, result: Result, experiment: Experiment, folder: RunFolder, log: MetricsLog, watch: Watcher) -> None:
        """Records an evaluation."""
        self.history.append(self.step, np.asarray(result.ownership, float), self.owned)
        self.owned = np.zeros_like(self.owned)
        folder.write_assignments(self.history.arrays())
        log.write({"iteration": self.step, "split": experiment.evaluated_on, "result": result.to_dict()})
        watch.evaluated(self.step, result)

    def tensors(self, net: TreeNet, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of the stages that are here."""
        tensors = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
        return tensors | {f"optim/{name}": tensor for name, tensor in optimizer.state().items()}

    def capture(
        self, tensors: dict[str, torch.Tensor], optimizer: Optimizer, schedule: Schedule, log: MetricsLog
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All that a checkpoint holds: the tensors of all stages and what the lead remembers."""
        arrays = {**self.history.state(), "owned": self.owned, **self.diagnostics.arrays()}
        state = {
            "rate": optimizer.rate,
            "schedule": schedule.state(),
            "log": log.mark(),
            "seconds": self.seconds,
            **self.diagnostics.state(),
        }
        return tensors | {f"progress/{name}": torch.from_numpy(array) for name, array in arrays.items()}, state

    def refuse_misfits(self, tensors: dict[str, torch.Tensor], net: TreeNet, optimizer: Optimizer) -> None:
        """Raises ValueError unless a checkpoint of these tensors can be gone on from."""
        weights = part(tensors, "model/")
        refuse_misfits(net.state_dict(), weights)
        if bad := [name for name, _ in net.named_parameters() if not torch.isfinite(weights[name]).all()]:
            raise ValueError(f"model/{bad[0]} is not finite, and no training saves that")
        optimizer.refuse_misfits(part(tensors, "optim/"))
        arrays = {name: tensor.numpy() for name, tensor in part(tensors, "progress/").items()}
        members, groups = self.owned.shape
        check_history(arrays, members, groups)
        cells = {name: (members, groups) for name in ("owned", "lately") if name in {"owned", *arrays}}
        check_arrays(arrays, cells | {name: (members,) for name in self.diagnostics.arrays() if name in arrays})

    def restore(
        self,
        found: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        engine: Engine,
        optimizer: Optimizer,
        schedule: Schedule,
    ) -> None:
        state = found["state"]
        engine.net.load_state_dict(part(tensors, "model/"))
        optimizer.load_state(part(tensors, "optim/"), state["rate"])
        schedule.load_state(state["schedule"])
        self.step = found["step"]
        self.seconds = state["seconds"]
        self.log = state["log"]
        if engine.lead:
            arrays = {name: tensor.numpy() for name, tensor in part(tensors, "progress/").items()}
            self.history.load(arrays)
            self.owned = arrays["owned"].copy()
            self.diagnostics.load(arrays, state)


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with the prefix, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
