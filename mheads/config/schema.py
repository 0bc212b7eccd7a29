"""The keys of an experiment: each with its type, default, limits and description. `read.py` reads them from YAML."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from mheads import networks
from mheads.common import safe_yaml
from mheads.common.options import (
    Factories,
    Location,
    Section,
    absolute_path,
    expand_name,
    make_section,
    one_of,
    option,
    options_by_key,
    select_options,
)
from mheads.config.loss_section import LossOptions
from mheads.data import resampling
from mheads.data.data_section import DataOptions
from mheads.data.resampling import SAMPLINGS
from mheads.data.views import View
from mheads.optim.optim_section import GroupOptions, OptimOptions


class SamplingSection(Section):
    """The key that every sampling has."""

    name: Annotated[str, one_of(SAMPLINGS, "a sampling")] = option(
        "full", f"which member learns from which examples: {', '.join(SAMPLINGS)}"
    )

    @property
    def entry(self) -> resampling.SamplingEntry:
        return SAMPLINGS[self.name]

    @property
    def options(self) -> dict[str, Any]:
        return select_options(self, self.entry.make)


if TYPE_CHECKING:
    Sampling = SamplingSection
else:
    Sampling = make_section("Sampling", SamplingSection, resampling.FACTORIES)


def _no_truth_value(value: Any) -> Any:
    """Refuses `split=true`, which would count as a tree of one member."""
    if isinstance(value, bool):
        raise ValueError("give the name of a layer or a tree such as {conv1: [{conv2: 2}, 2]}, not true or false")
    return value


def _stage_names_as_text(value: Any) -> Any:
    """Turns names of stages into text: the roots of a forest are called 0, 1, ..., which YAML reads as numbers."""
    return {str(key): rank for key, rank in value.items()} if isinstance(value, dict) else value


GIVEN = "weights "  # an `init` that begins with this was given to fit as tensors; their digest follows


def _absolute_init(init: str) -> str:
    """Makes the path of a file or run folder absolute; other values of `init` are names."""
    return init if init in ("random", "same") or init.startswith(GIVEN) else str(absolute_path(Path(init)))


class EngineSection(Section):
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] = option("auto", "threads; never changes a result")
    micro_batches: Literal["auto"] | Annotated[int, Field(ge=1)] = option("auto", "parts that a batch is cut into")
    shared_micro_batches: Literal["auto"] | Annotated[int, Field(ge=1)] = option(
        "auto", "the same for the stages that members share: a multiple of engine.micro_batches; auto: as many"
    )
    stack: Literal["never", "auto", "always"] = option("auto", "run sibling stages as one; auto: where they are small")
    stack_batch_norm: Literal["never", "auto"] = option("auto", "whether engine.stack=auto takes stages with BatchNorm")
    cores: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = option(
        "auto", "the number of cores for which a batch is cut and a stage gets threads; decides the last bits"
    )


class DistributedSection(Section):
    sums: Literal["ordered", "fast"] = option(
        "ordered",
        "ranks: gradients of weights are added in the order of one process, so that the bits are the same; fast: by "
        "the backend's own reductions, bits may differ",
    )


class LogOptions(Section):
    every: int = option(50, "iterations between lines of metrics.jsonl; the last one always has a line", ge=1)
    evaluate_every: int = option(500, "iterations between evaluations on the test set; 0: only at the end", ge=0)
    checkpoint_every: int = option(500, "iterations between checkpoints; 0: only at the end", ge=0)
    keep: int = option(2, "how many of the newest checkpoints are kept", ge=1)
    tensorboard: bool = option(False, "also write the log for TensorBoard, in the run folder")
    idle_after: int = option(100, "warn of a member that has won no example for n iterations", ge=1)


class EvalOptions(Section):
    views: list[View] = option(
        [],
        "images: answers are weighted means over these views, each {weight: , mirror: , down: , right: }; empty: "
        "the image alone",
    )


class TeacherOptions(Section):
    answers: Literal["array"] | Location | None = option(
        None, "an .npz or .npy file of probabilities [N, C] for the training examples, learned beside the labels"
    )
    weight: float = option(0.9, "weight of these answers; the labels have the rest", gt=0, le=1)
    temperature: float = option(2.0, "softens the answers of the teacher and of the members", gt=0, le=1000)


MAX_ROWS = 10_000_000  # of a step


class Config(Section):
    """One experiment."""

    model: Annotated[str, AfterValidator(networks.check_name)] = option(
        "digits", "a network's name, or package.module:factory of your own"
    )
    model_args: dict[str, Any] = option({}, "arguments of the network's factory")
    members: int = option(4, "how many members", ge=1, le=10_000)
    split: Annotated[str | int | list[Any] | dict[str, Any] | None, BeforeValidator(_no_truth_value)] = option(
        None, "the last shared layer, or a tree such as {conv1: [{conv2: 2}, 2]}; none: independent members"
    )
    init: Annotated[str, AfterValidator(_absolute_init)] = option(
        "random", "random, same, a file of weights, or the folder of a finished run to start from"
    )
    init_map: dict[str, str | None] = option(
        {}, "init: maps name prefixes in the file to prefixes in this network; null skips them: {backbone: features}"
    )
    init_members: list[Annotated[int, Field(ge=0)] | None] | None = option(
        None,
        "init: the member of the source run that each member starts from; null initialises at random: [0, 2, null]",
    )
    freeze: list[str] = option(
        [],
        "stages, layers or modules inside layers that do not learn: [trunk], [conv1]; [..conv3] is all layers up "
        "to conv3",
    )
    sampling: Annotated[Sampling, BeforeValidator(expand_name)] = option(Sampling(), "who learns from which examples")
    loss: Annotated[LossOptions, BeforeValidator(expand_name)] = option(LossOptions(), "the loss")
    teacher: TeacherOptions = option(TeacherOptions(), "answers of another network, learned beside the labels")
    pretrain: int = option(0, "iterations with the independent loss before the chosen loss starts", ge=0)
    data: Annotated[DataOptions, BeforeValidator(expand_name)] = option(DataOptions(), "the data")
    engine: EngineSection = option(EngineSection(), "how the work is cut and spread")
    placement: Annotated[
        Literal["default", "auto"] | dict[str, Annotated[int, Field(ge=0)]], BeforeValidator(_stage_names_as_text)
    ] = option("default", "ranks: members spread evenly; auto: the fastest by measured costs; or {stage: rank}")
    distributed: DistributedSection = option(DistributedSection(), "how ranks work together")
    timeout: float = option(60.0, "ranks: seconds without progress after which a rank counts as lost", gt=0)
    optim: OptimOptions = option(OptimOptions(), "optimizer and schedule")
    eval: EvalOptions = option(EvalOptions(), "how examples are answered")
    log: LogOptions = option(LogOptions(), "logging, evaluation, checkpoints")
    device: str = option(
        "auto",
        "cpu, or an accelerator that torch sees: cuda, cuda:N, xpu; auto: an accelerator if there is one, else cpu",
    )
    precision: Literal["float32", "bf16"] = option(
        "float32", "the precision in which stages compute; weights, losses and sums stay in float32"
    )
    seed: int = option(0, "everything random follows from it", ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.optim.options.get("nesterov") and not self.optim.options["momentum"]:
            raise ValueError("optim.nesterov needs a momentum above 0, but optim.momentum is 0")
        if self.optim.options.get("caffe_momentum") and self.optim.has_early_ends:
            raise ValueError(
                "optim.caffe_momentum puts one learning rate into the momentum of all weights, so "
                "optim.parameter_groups cannot have groups that end early (until): leave one of them out"
            )
        if self.optim.entry.decoupled and self.optim.regularization == "l1":
            raise ValueError(
                f"optim.regularization = l1 is not for {self.optim.name}, whose weight decay is decoupled from the "
                "gradients: use sgd or adam"
            )
        if self.optim.batch_size * self.optim.accumulate > MAX_ROWS:
            raise ValueError(
                f"optim.batch_size x optim.accumulate is {self.optim.batch_size * self.optim.accumulate:,} examples "
                f"per step: at most {MAX_ROWS:,}"
            )
        if self.init_members is not None and len(self.init_members) != self.members:
            raise ValueError(
                f"init_members names {len(self.init_members)} for {self.members} members: give one each, null for new"
            )
        groups = self.sampling.options.get("groups")
        if isinstance(groups, list) and len(groups) != self.members:
            raise ValueError(f"sampling.groups has {len(groups)} groups for {self.members} members: give one each")
        self._check_required("sampling", self.sampling, resampling.FACTORIES)
        return self

    @staticmethod
    def _check_required(section: str, chosen: SamplingSection, factories: Factories) -> None:
        """An option without a default belongs to its entry: the entry needs it, and no other takes it."""
        for key, shared in options_by_key(factories).items():
            if shared.default is not None:
                continue
            given, (owner, *_) = getattr(chosen, key), shared.owners
            if chosen.name == owner and given is None:
                meaning = next(iter(shared.meanings))
                raise ValueError(f"{section}.name = {owner} needs {section}.{key}, {meaning}")
            if chosen.name != owner and given is not None:
                raise ValueError(f"{section}.{key} is for {section}.name={owner}, but it is {chosen.name}")

    @property
    def is_split(self) -> bool:
        """Whether members share layers; a bare number of members, as fit writes it, is none that do."""
        return not isinstance(self.split, int | None)

    def to_yaml(self) -> str:
        return safe_yaml.to_yaml(self.model_dump(mode="json"))

    def digest(self, form: Callable[[Any], Any] = lambda value: value) -> str:
        """A short name for everything that decides the result, from the values of keys in a certain form.

        Keys at their defaults do not count, so that a key added in a later version changes no name.
        """
        given, default = {key: form(value) for key, value in flatten(self).items()}, flatten(Config())
        counts = [k for k in given if decides_result(k, self)]
        decisive = {FIRST_NAMES.get(k, k): given[k] for k in counts if given[k] != default[k]}
        text = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


FIRST_NAMES = {"loss.base_loss": "loss.of"}  # of keys in digests, which name folders: these keep their names


def decides_result(key: str, config: Config) -> bool:
    """Whether another value of a key gives another result. How long a run is does, though a run may resume longer."""
    return key == "optim.iterations" or not is_free(key, config)


def is_free(key: str, config: Config) -> bool:
    """Whether this key may differ when a run is resumed: it decides no bit of the steps already done."""
    if key == "optim.iterations":
        return not config.optim.schedule.entry.ends and not config.optim.has_early_ends
    return key in ("engine.workers", "placement", "timeout") or key.startswith("log.")


def differing(one: Config, other: Config) -> list[str]:
    """The keys that have another value in the one than in the other."""
    old, new = flatten(one), flatten(other)
    return [key for key in new if not same(key, old[key], new[key])]


# `auto` means what the run was begun with, or the rule for a new run.
CHOICES = ("engine.stack", "engine.stack_batch_norm", "engine.cores")
PATHS = (
    "init", "sampling.generalist", "sampling.path", "teacher.answers",
    "data.root", "data.path", "data.test_path", "data.regions.proposals",
)  # fmt: skip


def same(key: str, one: Any, other: Any) -> bool:
    """Whether a value of a key means the same as one before it: of paths, whether they lead to one place."""
    if key in CHOICES and other == "auto":
        return True
    if key in PATHS and isinstance(one, str) and isinstance(other, str) and os.path.isabs(one) and os.path.isabs(other):
        return os.path.realpath(one) == os.path.realpath(other)
    return bool(one == other)


def adopt_choices(config: Config, begun: Config) -> Config:
    """The config with what an earlier one, which began the run, chose where this one says `auto`."""
    kept = {
        name: getattr(begun.engine, name)
        for name in (key.removeprefix("engine.") for key in CHOICES)
        if getattr(config.engine, name) == "auto"
    }
    return config.model_copy(update={"engine": config.engine.model_copy(update=kept)})


def flatten(config: Config) -> dict[str, Any]:
    """The config as dotted keys and JSON values."""

    def walk(prefix: str, value: Any, model: BaseModel | None) -> dict[str, Any]:
        if model is None:
            return {prefix: value}
        flat: dict[str, Any] = {}
        for name in type(model).model_fields:
            child = getattr(model, name)
            section = child if isinstance(child, BaseModel) else None
            flat |= walk(f"{prefix}.{name}" if prefix else name, value[name], section)
        return flat

    return walk("", config.model_dump(mode="json"), config)


SECTIONS = ("sampling", "loss", "teacher", "data", "data.regions", "engine", "optim", "optim.schedule", "eval", "log")
# Keys whose value holds sections.
ENTRIES: dict[str, type[BaseModel]] = {"eval.views": View, "optim.parameter_groups": GroupOptions}


@cache
def all_keys() -> list[str]:
    return list(flatten(Config()))
