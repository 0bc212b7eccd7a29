"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from mheads.common.progress import Silent, Watcher, forward_warnings
from mheads.common.signals import handling
from mheads.config import schema
from mheads.config.schema import Config
from mheads.engine.diagnostics import clip_scale
from mheads.engine.threads import available_cores
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import planned_cores
from mheads.training.experiment import Experiment, build_experiment
from mheads.training.log_and_checkpoint import Recorder
from mheads.training.train_state import TrainState


class Stopped(BaseException):
    """Raised when a signal has stopped training after `iteration`; everything so far is saved.

    Derives from BaseException so that `except Exception` around user code does not swallow it.
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
    config: Config,
    folder: RunFolder,
    watcher: Watcher,
    build: Callable[[Config], Experiment] = build_experiment,
    cores: int | None = None,
) -> dict[str, Any]:
    """Trains the run of a config; parts that do not fit each other raise before anything is written.

    `cores` are those that a new run is made for if its config leaves that open; by default all.
    """
    config = decide_cores(config, folder, watcher, available_cores() if cores is None else cores)
    with forward_warnings(watcher):
        experiment = build(config)
    watcher.on_build(folder.path)
    if (rows := config.optim.batch_size) > (count := len(experiment.data.train)):
        watcher.say(
            f"a batch of {rows:,} holds each of the {count:,} training examples {rows / count:.3g} times: with "
            f"optim.batch_size={count} it would hold each once"
        )
    return train(experiment, folder, watcher)


def decide_cores(config: Config, folder: RunFolder, watcher: Watcher, cores: int) -> Config:
    """The config with `engine.cores` as a number: it decides the last bits, so a run keeps it on any machine."""
    if folder.exists() and (begun := folder.begun_config()) is not None:
        config = schema.adopt_choices(config, begun)
    elif config.engine.cores == "auto":
        if (chosen := choose_cores(config, cores)) != 2:
            watcher.say(
                f"engine.cores = {chosen}: the run is made for this number of cores, here and wherever it is resumed"
            )
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"cores": chosen})})
    planned, here = planned_cores(config), available_cores()
    fitting = choose_cores(config, here)
    if planned > 2 * fitting or planned > fitting == 1:
        watcher.warn(
            f"engine.cores = {planned}, and {here} {'is' if here == 1 else 'are'} here: steps are cut for {planned}, "
            f"which is slow on fewer. This run keeps the number; a new one is made for this machine with "
            f"engine.cores={fitting}"
        )
    return config


def choose_cores(config: Config, here: int) -> int:
    """The `engine.cores` of a new run where that many are. One core counts as two, so that the bits are those of a
    machine with two; but in bf16, two threads on one core wait for each other inside PyTorch's convolutions, and a
    step takes twenty times as long or more."""
    if here == 1 and config.precision == "bf16":
        return 1
    return 2 if here < 4 else 2 ** int(math.log2(here))


def train(experiment: Experiment, folder: RunFolder, watcher: Watcher | None = None) -> dict[str, Any]:
    """Trains to the end, or resumes from the folder's newest checkpoint; returns what result.json holds.

    Of several processes each runs this loop on its stages, and the main rank alone keeps the folder and the log.
    """
    options, log, watch = experiment.config.optim, experiment.config.log, watcher or Silent()
    engine = experiment.make_engine()
    state = TrainState(experiment, engine.stacks)
    record = Recorder(experiment, folder, state, engine, watch)
    with record.closing(), closing(experiment.batches(engine)) as batches:
        if record.open():
            return folder.read_result() if engine.is_main else {}
        with handling(engine.ask_to_stop, once=True), watch.training(state.total, state.step):
            while state.step < state.total:
                began, lr = time.perf_counter(), state.begin_step()
                batch = batches.batch(state.step)
                report = engine.step(state.step, batch, experiment.loss_at(state.step))
                record.check_loss(report)

                state.set_rate(lr)
                if options.clip is not None:
                    state.optimizer.scale = clip_scale(engine, options.clip, state.optimizer.share)
                engine.update(state.optimizer.update)
                if not state.pretraining:
                    state.schedule.observe(report.loss)
                state.step += 1

                record.log_step(report, batch, lr, time.perf_counter() - began)
                if state.is_due(log.evaluate_every):
                    record.evaluate()
                if state.is_due(log.checkpoint_every) or state.ends_pretraining or report.stop:
                    record.save()
                record.checkpoints.check()
                if report.stop:
                    record.wait()
                    raise Stopped(report.stop, state.step, state.seconds)
            return record.finish()  # even if a signal asked to stop meanwhile
