"""How long a run will take, measured on three of its steps."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from mheads.config.schema import Config
from mheads.engine.interface import Engine
from mheads.optim.stage_updates import Optimizer
from mheads.suites.jobs import SuiteJob
from mheads.training.experiment import Experiment, build_experiment

STEPS = 3
FORWARD = 1 / 3  # what an example costs in an evaluation, as a part of a step


def predict_seconds(job: SuiteJob) -> float:
    """What the rest of a run will take: its steps and its evaluations. Writes nothing."""
    config, done = job.config, job.steps_done()
    if job.rounds is not None:  # reading the training set between them takes little
        single = replace(job, rounds=None, path=job.path / "none")
        return predict_seconds(single) * (1 - done / job.total) * job.rounds
    experiment = build_experiment(_without_init(config))
    parts = [(config.pretrain - done, 0)] if done < config.pretrain else []  # (steps to go, a step like them)
    parts.append((job.total - max(done, config.pretrain), config.pretrain))
    with closing(experiment.make_engine()) as engine:
        times = [(count, _step(experiment, engine, at)) for count, at in parts]
    rows = config.optim.batch_size * config.optim.accumulate
    every = config.log.evaluate_every
    evaluations = 1 + ((job.total - 1) // every - done // every if every else 0)
    answered = len(experiment.data.test) * max(1, len(config.eval.views))
    evaluating = evaluations * answered / rows * FORWARD * times[-1][1]
    return sum(count * each for count, each in times) + evaluating


def _step(experiment: Experiment, engine: Engine, first: int) -> float:
    """The time of a step like that one: the fastest of three, since the first prepares what later ones reuse."""
    optimizer = Optimizer(experiment.net, experiment.config.optim, engine.stacks)
    optimizer.set_rate(experiment.config.optim.lr)
    times = []
    with closing(experiment.batches(engine)) as batches:
        for step in range(first, first + STEPS):
            began = time.perf_counter()
            engine.step(step, batches.batch(step), experiment.loss_at(step))
            engine.update(optimizer.update)
            times.append(time.perf_counter() - began)
    return min(times)


def _without_init(config: Config) -> Config:
    """The config without the weights that it starts from, which may not be there yet: they take no time."""
    if config.init in ("random", "same"):
        return config
    return config.model_copy(update={"init": "random", "init_members": None, "init_map": {}})
