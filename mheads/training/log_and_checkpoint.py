"""Keeps the record of a training: the run folder, its log, evaluations and checkpoints.

Every rank has one and calls it alike, since measuring and saving bring stages together. The main rank alone writes,
except for checkpoints in a folder that all ranks see: there each rank writes the stages that it holds.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import mheads
from mheads.common.atomic_files import NotSavedError
from mheads.common.device import describe_cpu, peak_memory
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.data.batches import Batch
from mheads.engine.diagnostics import gradient_norms
from mheads.engine.interface import Engine
from mheads.engine.measure import calibrate, measure
from mheads.engine.step_results import StepReport
from mheads.problems import Result
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import MetricsLog
from mheads.runs.tensorboard import Board
from mheads.training.dead_members import CollapseWatch, idle_warning
from mheads.training.experiment import Experiment
from mheads.training.start_or_resume import load_stages, open_folder, try_shards
from mheads.training.train_state import TrainState, select_prefix, tensor_prefixes
from mheads.trees.treenet import TreeNet


class Recorder:
    """Opens the run folder, takes in every step, and writes what the config asks for."""

    def __init__(
        self, experiment: Experiment, folder: RunFolder, state: TrainState, engine: Engine, watch: Watcher
    ) -> None:
        self.experiment, self.folder, self.state = experiment, folder, state
        self.engine, self.watch, self.options = engine, watch, experiment.config.log
        self.checkpoints = Checkpoints(folder.checkpoints, self.options.keep)
        self.checkpoints.stay = (state.pretrain,)  # for other losses to go on from
        self.checkpoints.fits = state.check_tensors
        self.writers = sorted(set(engine.writers.values()))
        if engine.notes is not None:
            self.checkpoints.wanted = lambda name: name.startswith(("progress/", *tensor_prefixes(state.net.stages)))
        self.log: MetricsLog | None = None  # of the main rank

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Closes everything at the end; a run that a mistake ends before its first checkpoint leaves no folder."""
        try:
            yield
        except UserError as error:
            self.checkpoints.close()  # one may be under way
            if self.log is not None and isinstance(error, NotSavedError):
                self.folder.refuse_if_gone()  # which is then the reason
            if self.engine.is_main and not self.checkpoints.steps():
                self.folder.discard()
                if isinstance(error, NotSavedError):
                    error.before = "Nothing was saved yet"
            raise
        finally:
            self.checkpoints.close()
            self.engine.close()
            if self.log is not None:
                self.log.close()
            self.folder.release()

    def open(self) -> bool:
        """Begins the run, or resumes from its newest checkpoint; whether it is finished already."""
        state, folder, checkpoints = self.state, self.folder, self.checkpoints
        opened, tensors = self.engine.agree(
            lambda: open_folder(folder, self.experiment, checkpoints, state.total, self.watch)
        )
        if opened["finished"]:
            return True
        if len(self.writers) > 1:
            try_shards(self.engine, checkpoints, self.writers)
        if opened["state"] is not None:
            checkpoints.saved = opened["step"]
            own = load_stages(self.engine, checkpoints, self.writers, opened["step"], tensors)
            state.restore(opened["step"], opened["state"], own, self.engine.is_main)
        if self.engine.is_main:
            config = self.experiment.config
            checkpoints.config, checkpoints.identity = config.to_yaml(), folder.read_identity()
            if opened["resuming"]:
                checkpoints.drop_after(state.step)
                folder.write_assignments(state.history.arrays())
                folder.write_config(config)  # more iterations, say
                self.watch.on_resume(state.step, state.total)
            folder.manifest.forget(folder.metrics)  # until its last line is written
            board = Board(folder.path, state.step) if self.options.tensorboard else None
            self.log = MetricsLog(folder.metrics, state.log, self.watch.warn, board)
            if self.log.mended:
                checkpoints.replace_state(state.step, {**opened["state"], "log": self.log.parts})
        self.collapse = CollapseWatch(self.engine, self.experiment, self.watch.warn)
        return False

    def check_loss(self, report: StepReport) -> None:
        """Raises an error if the loss is not finite."""
        _check_finite_loss(report, self.state.step + 1, self.checkpoints)

    def log_step(self, report: StepReport, batch: Batch, lr: float, seconds: float) -> None:
        """Takes in a step that is done, and writes its line of metrics.jsonl if one is due."""
        state = self.state
        logged = state.step % self.options.every == 0 or state.step == state.total
        norms = gradient_norms(self.engine) if logged else {}
        if logged:
            self.collapse.look(state.step)
        if self.log is None:
            return
        self.folder.refuse_if_gone()
        state.add(report, batch, seconds)
        self.watch.step(state.step, report.loss, lr, len(batch), state.diagnostics.winners())
        if logged:
            by_member = [norms[leaf.name].item() for leaf in state.net.tree.leaves]
            self.log.write(state.diagnostics.line(state.step, lr, by_member))
        if idle := state.diagnostics.find_idle(self.options.idle_after):
            far = getattr(self.experiment.data.problem, "std_of_targets", None) == ()
            self.watch.warn(idle_warning(idle, self.options.idle_after, self.experiment.loss.options, far))

    def evaluate(self) -> None:
        """Evaluates and records it."""
        result = self._measure()
        if self.log is not None and result is not None:
            self._record(result, self.log)
            self.collapse.judge(self.state.step, self.state.total, result)

    def save(self, again: bool = False) -> None:
        """Saves a checkpoint, or writes that of this step `again`."""
        state, checkpoints = self.state, self.checkpoints
        tensors = self._select_written(state.tensors())
        self._check_finite_weights(tensors)
        if checkpoints.writers is None:
            tensors = self.engine.gather(tensors)
        with self.engine.pausing():
            if self.log is not None:
                checkpoints.save(state.step, *state.capture(tensors, self.log), again)
            elif checkpoints.writers is not None and self.engine.rank in self.writers:
                checkpoints.save(state.step, tensors, None, again)

    def _select_written(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the stages that this process writes: of ranks that share a stage, one does."""
        prefixes = tensor_prefixes(self._written_stages())
        return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}

    def _written_stages(self) -> list[str]:
        return [name for name, rank in self.engine.writers.items() if rank == self.engine.rank]

    def _check_finite_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises, on all ranks, before weights are saved that are not finite: the step before may have left some."""
        net = self.state.net

        def is_finite(stage: str) -> bool:
            weights = select_prefix(tensors, f"model/stages.{stage}.")
            return all(torch.isfinite(weights[key]).all() for key in weights if key in net.facts.parameters)

        finite = self.engine.gather({stage: torch.tensor(is_finite(stage)) for stage in self._written_stages()})

        def refuse() -> tuple[None, None]:
            for name, node in net.tree.nodes.items():
                if not finite[name]:
                    what = f"weights became infinite or NaN at iteration {self.state.step}, in {_members(node.members)}"
                    raise _divergence(what, self.checkpoints)
            return None, None

        self.engine.agree(refuse)

    def finish(self) -> dict[str, Any]:
        """Saves, evaluates and writes the result, which it returns; nothing on ranks that do not write it."""
        state, folder = self.state, self.folder
        self.save()  # before the evaluation, which may fail on what training never read: a damaged file
        result = self._measure()
        again, _ = self.engine.agree(lambda: (state.step not in state.history.iterations, None))
        if self.log is not None and result is not None:
            self.collapse.judge(state.step, state.total, result)
            folder.refuse_if_gone()
            if again:
                self._record(result, self.log)
        if again:
            self.save(again=True)
        weights = self.engine.gather(self._select_written(state.tensors(optimizer=False)))
        self.wait()
        if self.log is None or result is None:
            return {}
        folder.seal_metrics()
        folder.write_model(select_prefix(weights, "model/"))
        done = summary(result, state.net, self.experiment.evaluated_on, state.step, state.seconds)
        done |= {"learning": state.diagnostics.learning, "peak_memory": peak_memory()}
        folder.write_result({**done, "engine": self.engine.options.to_dict()})
        return folder.read_result()

    def wait(self) -> None:
        """Waits for the checkpoint that is being saved."""
        with self.engine.pausing():
            self.checkpoints.wait()

    def _measure(self) -> Result | None:
        data = self.experiment.data
        problem = calibrate(self.engine, data.calibration, data.preprocess, data.problem)
        return measure(self.engine, data.test, data.preprocess, problem, self.watch)

    def _record(self, result: Result, log: MetricsLog) -> None:
        self.state.add_evaluation(result)
        self.folder.write_assignments(self.state.history.arrays())
        split = self.experiment.evaluated_on
        log.write({"iteration": self.state.step, "split": split, "result": result.to_dict()})
        self.watch.on_evaluation(self.state.step, result)


def summary(result: Result, net: TreeNet, split: str, iterations: int, seconds: float) -> dict[str, Any]:
    """What result.json holds."""
    return {
        "problem": result.problem,
        **result.to_dict(),
        "split": split,
        "iterations": iterations,
        "parameters": net.num_parameters(),
        "seconds": round(seconds, 2),
        "versions": {
            "mheads": mheads.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": describe_cpu(),
    }


def _check_finite_loss(report: StepReport, iteration: int, checkpoints: Checkpoints) -> None:
    if not math.isfinite(report.loss):
        bad = [m for m, losses in enumerate(report.losses) if not torch.isfinite(losses).all()]
        who = _members(bad) if bad else "the ensemble's mean"
        raise _divergence(f"the loss became {report.loss} at iteration {iteration}, in {who}", checkpoints)


def _members(members: Sequence[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"


def _divergence(what: str, checkpoints: Checkpoints) -> UserError:
    checkpoints.wait()
    steps = checkpoints.steps()
    kept = f"the checkpoint of iteration {steps[0]} stays" if steps else "there was no checkpoint yet: nothing is kept"
    where = ", in a new run folder" if steps else ""
    return UserError(f"{what}; {kept}. Try a lower optim.lr, optim.schedule.warmup or data.normalize{where}")
