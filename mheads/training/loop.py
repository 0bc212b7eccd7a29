"""The training loop."""

from __future__ import annotations

import math
import platform
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import mheads
from mheads.common import fingerprint
from mheads.common.atomic_files import NotSavedError
from mheads.common.device import peak_memory
from mheads.common.errors import UserError
from mheads.common.progress import Silent, Watcher, telling
from mheads.common.signals import handling
from mheads.config.schema import Config
from mheads.data.batches import Batches
from mheads.engine.diagnostics import clip_scale, gradient_norms, idle_warning
from mheads.engine.measure import measure
from mheads.engine.training_step import StepReport
from mheads.optim.schedules import Schedule
from mheads.optim.stage_updates import Optimizer
from mheads.problems import Result
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder, damaged
from mheads.runs.metrics_log import MetricsLog
from mheads.runs.tensorboard import Board
from mheads.training.collapse import CollapseWatch
from mheads.training.experiment import Experiment, build
from mheads.training.init_weights import donor_differences
from mheads.training.state import Standing, part
from mheads.trees.treenet import TreeNet


class Stopped(BaseException):
    """Raised when a signal has stopped training after `iteration`; everything so far is saved.

    It is no Exception: code that takes whatever a user's network may raise must not take this.
    """

    def __init__(self, signum: int, iteration: int, seconds: float) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        self.iteration = iteration
        self.seconds = seconds


def stop_at_once(signum: int) -> None:
    """For signals between runs; one inside a run finishes its step first."""
    raise Stopped(signum, 0, 0.0)


def train_config(
    config: Config, folder: RunFolder, watcher: Watcher, build: Callable[[Config], Experiment] = build
) -> dict[str, Any]:
    """Trains the run of a config; what does not fit together is refused before anything is written."""
    with telling(watcher):
        experiment = build(config)
    watcher.built(folder.path)
    return train(experiment, folder, watcher)


def train(experiment: Experiment, folder: RunFolder, watcher: Watcher | None = None) -> dict[str, Any]:
    """Trains to the end, or goes on where the folder's newest checkpoint stands; returns what result.json holds.

    Of several processes each runs this loop on its stages, and the lead alone keeps the folder, the log and the watch.
    """
    config, net, data = experiment.config, experiment.net, experiment.data
    watch = watcher or Silent()
    checkpoints = Checkpoints(folder.checkpoints, config.log.keep)
    optimizer = Optimizer(net, config.optim)
    lr = config.optim.lr
    if experiment.loss.averaged and config.loss.scale_rate and config.optim.entry.linear:
        lr *= net.num_members  # averaging divides every member's gradient by M, which does not change Adam's step
    schedule = Schedule(config.optim.schedule, lr, config.optim.iterations)
    state = Standing(net.num_members, data.problem)
    total = config.pretrain + config.optim.iterations
    log: MetricsLog | None = None
    batches: Batches | None = None
    engine = experiment.engine()  # its threads are closed below
    lead = engine.lead
    checkpoints.fits = lambda tensors: state.refuse_misfits(tensors, net, optimizer)
    try:
        batches = experiment.batches(engine)
        found, tensors = engine.agree(lambda: _open(folder, experiment, checkpoints, total, watch))
        if found["finished"]:
            return folder.read_result() if lead else {}
        if found["state"] is not None:
            state.restore(found, engine.scatter(tensors or {}), engine, optimizer, schedule)
        if lead:
            checkpoints.config, checkpoints.identity = config.to_yaml(), folder.read_identity()
            if found["resuming"]:
                checkpoints.drop_after(state.step)
                folder.write_assignments(state.history.arrays())
                folder.write_config(config)  # more iterations, say
                watch.resumed(state.step, total)
            folder.manifest.forget(folder.metrics)  # until its last line is written
            board = Board(folder.path, state.step) if config.log.tensorboard else None
            log = MetricsLog(folder.metrics, state.log, watch.warn, board)
            if log.mended:
                checkpoints.save(state.step, tensors or {}, {**found["state"], "log": log.parts}, again=True)
        collapse = CollapseWatch(engine, experiment, watch.warn)
        with handling(engine.ask_to_stop, once=True), watch.training(total, state.step):
            while state.step < total:
                began = time.perf_counter()
                pretraining = state.step < config.pretrain
                if state.step == config.pretrain:
                    optimizer.forget()  # the loss starts with a fresh schedule and no momentum
                iteration = state.step - config.pretrain
                rate = config.optim.lr if pretraining else schedule.rate(iteration)

                batch = batches.batch(state.step)
                report = engine.step(state.step, batch, experiment.loss_at(state.step))
                _refuse_nonfinite_loss(report, state.step + 1, checkpoints)
                optimizer.set_rate(rate)
                if config.optim.clip is not None:
                    optimizer.scale = clip_scale(engine, config.optim.clip)
                engine.update(optimizer.update)
                if not pretraining:
                    schedule.observe(report.loss)

                state.step += 1
                logged = state.step % config.log.every == 0 or state.step == total
                norms = gradient_norms(engine) if logged else {}
                if logged:
                    collapse.look(state.step)
                if log is not None:
                    folder.refuse_if_gone()
                    state.add(report, batch, time.perf_counter() - began)
                    watch.step(state.step, report.loss, rate, len(batch), state.diagnostics.winners())
                    if logged:
                        own = [norms[leaf.name].item() for leaf in net.tree.leaves]
                        log.write(state.line(rate, own))
                    if idle := state.diagnostics.fallen_idle(config.log.idle_after):
                        watch.warn(idle_warning(idle, config.log.idle_after, experiment.loss.options))
                due = config.log.evaluate_every
                if due and state.step % due == 0 and state.step < total:
                    result = measure(engine, data.test, data.preprocess, data.problem, watch)
                    if log is not None and result is not None:
                        state.own(result, experiment, folder, log, watch)
                        collapse.judge(state.step, total, result)
                due = config.log.checkpoint_every
                if (due and state.step % due == 0 and state.step < total) or report.stop:
                    tensors = engine.gather(state.tensors(net, optimizer))
                    if log is not None:
                        _refuse_nonfinite_weights(net, tensors, state.step, checkpoints)
                        checkpoints.save(state.step, *state.capture(tensors, optimizer, schedule, log))
                checkpoints.check()
                if report.stop:
                    checkpoints.wait()
                    raise Stopped(report.stop, state.step, state.seconds)
            tensors = engine.gather(state.tensors(net, optimizer))
            if log is not None:
                _refuse_nonfinite_weights(net, tensors, state.step, checkpoints)
                # Before the evaluation, which may fail on what training never read, such as a damaged file.
                checkpoints.save(state.step, *state.capture(tensors, optimizer, schedule, log))
            result = measure(engine, data.test, data.preprocess, data.problem, watch)
            if log is None or result is None:
                return {}
            collapse.judge(state.step, total, result)
            folder.refuse_if_gone()
            if state.step not in state.history.iterations:
                state.own(result, experiment, folder, log, watch)
                checkpoints.save(state.step, *state.capture(tensors, optimizer, schedule, log), again=True)
            checkpoints.wait()
            folder.seal_metrics()
            folder.write_model(part(tensors, "model/"))
            done = summary(result, net, experiment.evaluated_on, state.step, state.seconds)
            folder.write_result({**done, "learning": state.diagnostics.learning, "peak_memory": peak_memory()})
        return folder.read_result()  # even if a signal asked to stop meanwhile: it is finished
    except UserError as error:
        checkpoints.close()  # one may be under way
        if log is not None and isinstance(error, NotSavedError):
            folder.refuse_if_gone()  # which is then the reason
        if lead and not checkpoints.steps():
            folder.discard()
            if isinstance(error, NotSavedError):
                error.before = "Nothing was saved yet"
        raise
    finally:
        checkpoints.close()
        if batches is not None:
            batches.close()
        engine.close()
        if log is not None:
            log.close()
        folder.release()


def _open(
    folder: RunFolder, experiment: Experiment, checkpoints: Checkpoints, total: int, watch: Watcher
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the run folder holds, as plain data, and the tensors of its newest checkpoint."""
    config, data = experiment.config, experiment.data
    resuming = folder.prepare(config, DataFacts.of(data), experiment.identity(), watch.warn)
    found: dict[str, Any] = {"resuming": resuming, "finished": False, "step": 0, "state": None}
    if not resuming:
        if experiment.net.origin:
            watch.say(experiment.net.origin)
        for line in experiment.specialties():
            watch.say(line)
        if differing := donor_differences(config, data):
            watch.warn("\n  ".join([f"the weights of {config.init} were trained on other inputs:", *differing]))
        return found, {}
    steps = checkpoints.steps()
    checkpoints.run = folder.read_identity()["run"]
    found["finished"] = folder.finished(total)
    for path, problem in folder.problems().items():
        if found["finished"] and not steps:
            watch.warn(f"{path} {problem}, and there is no checkpoint to make it anew from")
        elif found["finished"] or path.exists():  # a file that a killed process had yet to write is not damaged
            watch.warn(f"{path} {problem}; made anew")
            found["finished"] = False
    if found["finished"]:
        for path, problem in checkpoints.damages().items():
            watch.warn(damaged(path, problem))
        watch.finished(folder.path)
        return found, {}
    if steps and steps[0] > total:
        watch.warn(f"iteration {total} is to be the last: checkpoints after it are removed")
    checkpoint = checkpoints.newest(watch.warn, total)
    if checkpoint is None:
        if experiment.start not in (None, fingerprint.weights(experiment.net.state_dict())):
            raise UserError(
                f"{folder.path} has no checkpoint to go on from, and this net is not what training started from: "
                "build it anew"
            )
        return found, {}
    state = {key: value for key, value in checkpoint.state.items() if key not in ("config", "identity")}
    return {**found, "step": checkpoint.step, "state": state}, checkpoint.tensors


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
    }


def _refuse_nonfinite_loss(report: StepReport, iteration: int, checkpoints: Checkpoints) -> None:
    if not math.isfinite(report.loss):
        bad = [m for m, losses in enumerate(report.losses) if not torch.isfinite(losses).all()]
        who = _members(bad) if bad else "the ensemble's mean"
        raise _diverged(f"the loss became {report.loss} at iteration {iteration}, in {who}", checkpoints)


def _refuse_nonfinite_weights(
    net: TreeNet, tensors: dict[str, torch.Tensor], iteration: int, checkpoints: Checkpoints
) -> None:
    """Refuses to save weights that are not finite: the step before a loss that is not finite may have left some."""
    for name, node in net.tree.nodes.items():
        weights = [t for key, t in part(tensors, f"model/stages.{name}.").items() if net.is_parameter(key)]
        if not all(torch.isfinite(weight).all() for weight in weights):
            raise _diverged(
                f"weights became infinite or NaN at iteration {iteration}, in {_members(node.members)}", checkpoints
            )


def _members(members: Sequence[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"


def _diverged(what: str, checkpoints: Checkpoints) -> UserError:
    checkpoints.wait()
    steps = checkpoints.steps()
    kept = f"the checkpoint of iteration {steps[0]} stays" if steps else "there was no checkpoint yet: nothing is kept"
    where = ", in a new run folder" if steps else ""
    return UserError(f"{what}; {kept}. Try a lower optim.lr, optim.schedule.warmup or data.normalize{where}")
