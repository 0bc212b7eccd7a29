"""The keys of a config's `optim` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from mheads.common.options import Section, named_section, option


class ScheduleOptions(Section):
    name: Literal["constant", "step", "multistep", "cosine", "plateau", "exp", "inv", "poly", "sigmoid"] = option(
        "constant", "how the rate falls"
    )
    every: int = option(1000, "step: multiply by gamma every n iterations; sigmoid: where the middle is", ge=1)
    at: list[int] = option([], "multistep: multiply by gamma at these iterations")
    gamma: float = option(0.1, "step, multistep, plateau, exp: the factor; inv: how fast it falls", gt=0)
    power: float = option(1.0, "inv: (1 + gamma i)^-power; poly: (1 - i / iterations)^power")
    slope: float = option(0.01, "sigmoid: 1 / (1 + exp(-slope (i - every))), falling if it is below 0")
    window: int = option(20000, "plateau: compare the mean loss of the last n iterations with the n before", ge=1)
    threshold: float = option(0.01, "plateau: the relative drop that counts as progress", ge=0, lt=1)
    warmup: int = option(0, "rise linearly over the first n iterations", ge=0)


class OptimOptions(Section):
    name: Literal["sgd", "adamw", "adam", "adagrad", "rmsprop", "adadelta"] = option(
        "sgd", "the optimizer; the last four as in Caffe"
    )
    lr: float = option(0.01, "the first rate", gt=0)
    momentum: float = option(0.9, "sgd: momentum; adam, adadelta: how slowly means forget", ge=0, lt=1)
    momentum2: float = option(0.999, "adam: how slowly the mean of squares forgets", ge=0, lt=1)
    rms_decay: float = option(0.99, "rmsprop: how slowly the mean of squares forgets", ge=0, lt=1)
    delta: float = option(1e-8, "adam, adagrad, rmsprop, adadelta: added where something is divided by", gt=0)
    nesterov: bool = option(False, "sgd: Nesterov's form")
    caffe_momentum: bool = option(False, "sgd: the rate inside the momentum, as in Caffe")
    weight_decay: float = option(0.0, "weight decay", ge=0)
    regularization: Literal["l2", "l1"] = option("l2", "l1: weights decay by their sign instead of their size")
    clip: float | None = option(None, "gradients of all weights together are cut to this norm", gt=0)
    batch_size: int = option(100, "examples per batch", ge=1, le=1_000_000)
    accumulate: int = option(1, "batches per step: gradients are averaged over them", ge=1, le=100_000)
    iterations: int = option(500, "steps", ge=1)
    schedule: Annotated[ScheduleOptions, BeforeValidator(named_section)] = option(
        ScheduleOptions(), "how the rate falls"
    )
