"""The experiment file: typed, validated, one message per mistake.

config = load("cifar10_quick", ["loss.name=mcl", "loss.k=1"])
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from mheads import networks
from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError
from mheads.common.options import (
    Factories,
    S,
    Section,
    chosen_options,
    named_section,
    one_of,
    option,
    options_by_key,
    section_of,
)
from mheads.config.unknown_keys import meaning
from mheads.data import resampling
from mheads.data.resampling import SAMPLINGS
from mheads.losses import LOSSES, MEMBER_LOSSES, base_loss
from mheads.optim.optim_section import OptimOptions


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
        return chosen_options(self, self.entry.make)


if TYPE_CHECKING:
    Sampling = SamplingSection
else:
    Sampling = section_of("Sampling", SamplingSection, resampling.FACTORIES)


def _no_truth_value(value: Any) -> Any:
    """Refuses `split=yes`, which would count as a tree of one member."""
    if isinstance(value, bool):
        raise ValueError("give the name of a layer or a tree such as {conv1: [{conv2: 2}, 2]}, not yes or no")
    return value


def _named_stages(value: Any) -> Any:
    """Turns names of stages into text: the roots of a forest are called 0, 1, ..., which YAML reads as numbers."""
    return {str(key): rank for key, rank in value.items()} if isinstance(value, dict) else value


GIVEN = "weights "  # an `init` that begins with this was given to fit as tensors; their digest follows


def _loss_name(name: str) -> str:
    if name not in LOSSES and ":" not in name:
        raise ValueError(f"a loss is one of {', '.join(LOSSES)}, or package.module:factory of your own")
    return name


def _member_loss(given: Any) -> Any:
    try:
        return base_loss.checked(given)
    except UserError as error:
        raise ValueError(str(error)) from None


class LossSection(Section):
    """The keys that every loss has; the others in the section are options of single losses."""

    name: Annotated[str, AfterValidator(_loss_name)] = option(
        "independent", f"{', '.join(LOSSES)}, or package.module:factory of your own"
    )
    args: dict[str, Any] = option({}, "arguments of the factory of your own loss")
    of: Annotated[str | dict[str, Any] | None, AfterValidator(_member_loss)] = option(
        None,
        f"the loss of one member on one example: {', '.join(MEMBER_LOSSES)}, or package.module:function of your own, "
        "with its options {name: smooth_l1, beta: 0.5}; none: that of the problem",
    )
    scale_rate: bool = option(True, "averaged losses with sgd: multiply the rate by the number of members")

    @property
    def whole_batch(self) -> bool:
        """Whether the loss of an example depends on the others in its batch, which then is not cut."""
        return self.options.get("normalize") == "wins" and self.name in LOSSES

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for the factory of the loss."""
        if self.name not in LOSSES:
            return self.args
        return chosen_options(self, LOSSES[self.name])


if TYPE_CHECKING:
    LossOptions = LossSection
else:
    LossOptions = section_of("LossOptions", LossSection, LOSSES)


class RegionOptions(Section):
    """Of images with objects; the defaults are those of the Fast R-CNN release."""

    objects: Literal["voc"] | list[str] = option("voc", "their classes, or voc for the twenty of PASCAL VOC")
    proposals: str = option(
        "selective_search",
        "where regions come from: selective_search, an .npz or a .mat file; {part} in its name varies",
    )
    with_objects: bool = option(False, "evaluation: the objects' own boxes are proposed as well, as in training")
    most: int = option(2000, "regions proposed in an image", ge=1)
    per_image: int = option(64, "training: regions that an image gives to a step", ge=1)
    foreground: float = option(0.25, "training: the share of them that may be objects", gt=0, le=1)
    foreground_overlap: float = option(0.5, "training: overlap from which a region is an object", gt=0, le=1)
    background_overlap: tuple[float, float] = option(
        (0.1, 0.5), "training: overlaps from and below which it is background"
    )
    short_side: int = option(600, "length of the shorter side of an image", ge=16, le=10_000)
    long_side: int = option(1000, "length of the longer side, at most", ge=16, le=10_000)
    strict: bool = option(False, "stop at the first thing that is wrong in the annotations")


class DataOptions(Section):
    name: str = option("digits", "a dataset by name: `mheads data list` shows them")
    root: Path | None = option(None, "where a fetched set lies, if not in the cache; list: where names begin")
    path: Path | None = option(None, "the folder or file of your own data: folder, voc, npz, list, hdf5, lmdb")
    test_path: Path | None = option(None, "list, hdf5, lmdb: what is tested on")
    arrays: tuple[str, str] | None = option(
        None, "hdf5: the names of the arrays of examples and of targets; none: data and label, or x and y"
    )
    problem: Literal[
        "auto", "classification", "regression", "multilabel", "soft_labels", "segmentation", "examples"
    ] = option(
        "auto",
        "npz, list, hdf5, lmdb: what is learned; auto: what the targets look like; examples, of any data: to give "
        "these back",
    )
    validation: int = option(0, "hold out the last n training examples and evaluate on them", ge=0)
    normalize: Literal["none", "mean_image", "mean_std", "init"] = option(
        "none", "what is subtracted and divided by; init: as in the run that training starts from"
    )
    scale: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = option(
        "auto", "raw values are multiplied by this; auto: uint8 to 0..1, floats as they are"
    )
    channels: Literal["rgb", "bgr"] = option("rgb", "images: the order of channels that the network sees")
    pad: int = option(0, "training: pad by n pixels and crop back at random", ge=0, le=1000)
    mirror: bool = option(False, "training: mirror at random")
    resize: int = option(256, "folder, list: length of the shorter side after resizing", ge=1, le=10_000)
    crop: int | None = option(None, "folder, list, lmdb: side of the crop that the network sees", ge=1, le=10_000)
    grey: bool = option(False, "folder, list: read images in one channel")
    limit: int | None = option(None, "use only the first n training and n test examples", ge=1)
    regions: RegionOptions = option(RegionOptions(), "voc: regions of images")
    reader: Annotated[Literal["every", "lead"], BeforeValidator(lambda name: "lead" if name == "root" else name)] = (
        option("every", "ranks: each reads what it needs, or the main rank, 0, reads for all")
    )


class EngineSection(Section):
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] = option("auto", "threads; never changes a result")
    micro_batches: Literal["auto"] | Annotated[int, Field(ge=1)] = option("auto", "parts that a batch is cut into")


class LogOptions(Section):
    every: int = option(50, "iterations between lines of metrics.jsonl; the last one always has a line", ge=1)
    evaluate_every: int = option(500, "iterations between evaluations on the test set; 0: only at the end", ge=0)
    checkpoint_every: int = option(500, "iterations between checkpoints; 0: only at the end", ge=0)
    keep: int = option(2, "how many of the newest checkpoints are kept", ge=1)
    tensorboard: bool = option(False, "also write the log for TensorBoard, in the run folder")
    idle_after: int = option(100, "warn of a member that has won no example for n iterations", ge=1)


class TeacherOptions(Section):
    answers: Literal["array"] | Path | None = option(
        None, "an .npz or .npy file of probabilities [N, C] for the training examples, to be learned beside the labels"
    )
    weight: float = option(0.9, "how much these answers count; the labels count for the rest", gt=0, le=1)
    temperature: float = option(2.0, "softens the answers, and those of the members", gt=0, le=1000)


MAX_ROWS = 10_000_000  # of a step


class Config(Section):
    """One experiment."""

    model: Annotated[str, AfterValidator(networks.checked)] = option(
        "digits", "a network's name, or package.module:factory of your own"
    )
    model_args: dict[str, Any] = option({}, "arguments of the network's factory")
    members: int = option(4, "how many members", ge=1, le=10_000)
    split: Annotated[str | int | list[Any] | dict[str, Any] | None, BeforeValidator(_no_truth_value)] = option(
        None, "the last shared layer, or a tree such as {conv1: [{conv2: 2}, 2]}; none: independent members"
    )
    init: str = option("random", "random, same, a file of weights, or the folder of a finished run to start from")
    init_map: dict[str, str | None] = option(
        {}, "init: beginnings of the names in the file and what they are here, null to leave out: {backbone: features}"
    )
    init_members: list[Annotated[int, Field(ge=0)] | None] | None = option(
        None, "init: the member of that run that each member starts from, null for one that is drawn: [0, 2, null]"
    )
    freeze: list[str] = option(
        [], "stages, layers or modules inside that do not learn: [trunk], [conv1], [..conv3] up to it"
    )
    sampling: Annotated[Sampling, BeforeValidator(named_section)] = option(Sampling(), "who learns from which examples")
    loss: Annotated[LossOptions, BeforeValidator(named_section)] = option(LossOptions(), "the loss")
    teacher: TeacherOptions = option(TeacherOptions(), "whose answers are learned beside the labels")
    pretrain: int = option(0, "iterations of independent, each member by itself, before the loss takes over", ge=0)
    data: Annotated[DataOptions, BeforeValidator(named_section)] = option(DataOptions(), "the data")
    engine: EngineSection = option(EngineSection(), "how the work is cut and spread")
    placement: Annotated[
        Literal["default", "auto"] | dict[str, Annotated[int, Field(ge=0)]], BeforeValidator(_named_stages)
    ] = option(
        "default", "ranks: trunk on 0 and branches spread; auto: the fastest by measured costs; or {stage: rank}"
    )
    timeout: float = option(60.0, "ranks: seconds without progress after which a rank is given up", gt=0)
    optim: OptimOptions = option(OptimOptions(), "optimizer and schedule")
    log: LogOptions = option(LogOptions(), "logging, evaluation, checkpoints")
    device: str = option("auto", "cpu, cuda or cuda:N; auto: a GPU if torch sees one (untested), else the CPU")
    seed: int = option(0, "everything random follows from it", ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.optim.options.get("nesterov") and not self.optim.options["momentum"]:
            raise ValueError("optim.nesterov needs a momentum above 0, but optim.momentum is 0")
        if self.optim.entry.decoupled and self.optim.regularization == "l1":
            raise ValueError(
                f"optim.regularization = l1 is not for {self.optim.name}, whose decay is apart from gradients: use adam"
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

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def digest(self) -> str:
        """A short name for everything that decides the result.

        Keys at their defaults do not count, so that a key added in a later version changes no name.
        """
        given, default = flatten(self), flatten(Config())
        counts = [k for k in given if k == "optim.iterations" or not is_free(k, self)]
        decisive = {k: given[k] for k in counts if given[k] != default[k]}
        text = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_free(key: str, config: Config) -> bool:
    """Whether this key may differ when a run is resumed: it decides no bit of the steps already done."""
    if key == "optim.iterations":
        return not config.optim.schedule.entry.ends
    return key in ("engine.workers", "data.reader", "placement", "timeout") or key.startswith("log.")


def differing(one: Config, other: Config) -> list[str]:
    """The keys that have another value in the one than in the other."""
    old, new = flatten(one), flatten(other)
    return [key for key in new if not same(key, old[key], new[key])]


PATHS = (
    "init",
    "sampling.generalist",
    "sampling.path",
    "teacher.answers",
    "data.root",
    "data.path",
    "data.test_path",
    "data.regions.proposals",
)


def same(key: str, one: Any, other: Any) -> bool:
    """Whether two values of a key mean the same: of paths, however each is spelled, whether they lead to one place."""
    if key in PATHS and isinstance(one, str) and isinstance(other, str) and os.path.isabs(one) and os.path.isabs(other):
        return os.path.realpath(one) == os.path.realpath(other)
    return bool(one == other)


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


SECTIONS = ("sampling", "loss", "teacher", "data", "data.regions", "engine", "optim", "optim.schedule", "log")


@cache
def known_keys() -> list[str]:
    return list(flatten(Config()))


def recipes() -> list[str]:
    folder = resources.files("mheads.config.recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def timeout(recipe: str, overrides: Sequence[str] = ()) -> float | None:
    """How long ranks wait for each other, asked before they have agreed on the recipe; None if it cannot be read."""
    try:
        return load(recipe, overrides).timeout
    except (UserError, OSError):  # reported later, by one rank for all
        return None


def summary(recipe: str) -> str:
    """What a recipe's first line says about it."""
    return _recipe_text(recipe).partition("\n")[0].removeprefix("# ")


def _recipe_text(recipe: str) -> str:
    return (resources.files("mheads.config.recipes") / f"{recipe}.yaml").read_text()


def is_caffe(name: str) -> bool:
    """Whether a file is called as Caffe's specifications are."""
    return name.lower().endswith((".prototxt", ".pbtxt", ".prototxt.txt"))


def load(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a recipe by name, or of a file by path, with `key=value` overrides."""
    if recipe in recipes():
        text = _recipe_text(recipe)
    elif is_caffe(recipe):
        raise UserError(
            f"{recipe} is a Caffe specification: mheads train takes it as it is, and mheads convert makes a recipe of "
            "it for the other commands"
        )
    elif _is_file(recipe):
        return read(Path(recipe), overrides)
    else:
        near = difflib.get_close_matches(recipe, recipes(), 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"there is no recipe and no file {safe_yaml.short(recipe)}{hint}: "
            f"give one of {', '.join(recipes())}, or the path of a YAML file"
        )
    return _parse(text, recipe, overrides)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long, say
        return False


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a file."""
    try:
        text = atomic_files.read_text(path, most=safe_yaml.MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"it cannot be read as a YAML file: {error}"]) from error
    return _parse(text, str(path), overrides)


def _parse(text: str, source: str, overrides: Sequence[str]) -> Config:
    try:
        tree = safe_yaml.from_yaml(text) or {}
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from error
    if not isinstance(tree, dict):
        raise ConfigError(source, [f"it must hold a mapping of config keys, not {safe_yaml.short(tree)}"])
    data = tree.get("data")
    for text_of in overrides:
        override(tree, text_of)
    _forget_scale(tree, data, overrides)
    return _absolute(validate(tree, source))


def from_tree(tree: dict[str, Any], source: str) -> Config:
    """The config of keys that something else has put together."""
    return _absolute(validate(tree, source))


def _forget_scale(tree: dict[str, Any], before: Any, overrides: Sequence[str]) -> None:
    """Drops a recipe's scale, which is meant for its own data, if the dataset is another one and no scale is given."""
    now = tree.get("data")
    given = any(override.startswith(("data.scale=", "data=")) for override in overrides)
    if isinstance(before, dict) and isinstance(now, dict) and now.get("name") != before.get("name") and not given:
        now.pop("scale", None)


def of_model(model: str, model_args: Sequence[str]) -> Config:
    """A config that says no more than its network; the arguments of the factory are given as key=value."""
    tree: dict[str, Any] = {"model": model}
    for argument in model_args:
        override(tree, f"model_args.{argument}")
    return validate(tree, "the arguments")


def _absolute(config: Config) -> Config:
    """The config with absolute paths, so that a run folder means the same from any current folder."""
    data = _absolute_in(config.data, ("root", "path", "test_path"))
    if data.regions.proposals.endswith((".npz", ".mat")):
        proposals = str(_plain(Path(data.regions.proposals)))
        data = data.model_copy(update={"regions": data.regions.model_copy(update={"proposals": proposals})})
    sampling = _absolute_in(config.sampling, ("generalist", "path"))
    teacher = _absolute_in(config.teacher, ("answers",))
    in_memory = config.init in ("random", "same") or config.init.startswith(GIVEN)
    init = config.init if in_memory else str(_plain(Path(config.init)))
    paths = {"data.root": data.root, "data.path": data.path, "data.test_path": data.test_path, "init": init}
    paths |= {f"sampling.{key}": getattr(sampling, key) for key in ("generalist", "path")}
    paths["teacher.answers"] = teacher.answers
    for key, path in paths.items():
        if path is not None and str(path).encode("utf-8", "replace") != os.fsencode(path):
            raise UserError(f"{key} = {path}: its name is not UTF-8, and no config can hold it; rename the folder")
    return config.model_copy(update={"data": data, "sampling": sampling, "teacher": teacher, "init": init})


def _absolute_in(section: S, keys: Sequence[str]) -> S:
    found = {key: _plain(path) for key in keys if isinstance(path := getattr(section, key), Path)}
    return section.model_copy(update=found)


def _plain(path: Path) -> Path:
    """An absolute path without `~`, which no shell expands in `data.path=~/x`, and without `..`, unless that would lead
    elsewhere, as after a link."""
    path = Path(os.path.expanduser(path)).absolute()
    shorter = os.path.normpath(path)
    return Path(shorter) if os.path.realpath(shorter) == os.path.realpath(path) else path


def override(tree: dict[str, Any], given: str) -> None:
    """Changes the key that `key=value` names."""
    key, equals, text = given.partition("=")
    if not equals or not key:
        raise UserError(f"{safe_yaml.short(given)} is not key=value, for example loss.k=2")
    try:
        value = safe_yaml.from_yaml(text)
    except ValueError as error:
        raise UserError(f"the value of {safe_yaml.short(given)}: {error}") from error
    if isinstance(value, str) and not text.lstrip().startswith(("'", '"')):
        value = _number(value)
    *sections, last = key.split(".")
    for section in sections:
        child = tree.get(section)
        if isinstance(child, str):
            child = named_section(child)  # `loss: mcl` in the file, `loss.k=2` on the command line
        tree[section] = tree = dict(child) if isinstance(child, dict) else {}
    before = named_section(tree.get(last))
    if isinstance(value, dict) and isinstance(before, dict) and key in SECTIONS:
        value = before | value  # keys that are not given stay as they were, unless the section's name changes
        if before.get("name") != value.get("name"):
            value = {k: v for k, v in value.items() if k == "name" or k not in before or v is not before[k]}
    tree[last] = value


def keys_of(given: str) -> list[str]:
    """The keys that `key=value` sets: those in it if it is a section, loss.name for loss=mcl."""
    key, _, text = given.partition("=")
    try:
        return keys_in(key, safe_yaml.from_yaml(text))
    except ValueError:  # told by whoever loads it
        return [key]


def keys_in(key: str, value: Any) -> list[str]:
    """The keys that this value of a key sets."""
    inner = named_section(value) if key in SECTIONS else value
    if key not in SECTIONS or not isinstance(inner, dict):
        return [key]
    return [one for name, part in inner.items() for one in keys_in(f"{key}.{name}", part)]


def _number(text: str) -> Any:
    """The number in a text such as 1e-3, which YAML 1.1 reads as a string; else the text."""
    try:
        return float(text)
    except ValueError:
        return text


class ConfigError(UserError):
    """The mistakes in a config, whose `source` is a file or what else it was read from."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.source, self.problems = source, problems


def validate(tree: dict[str, Any], source: str = "the config") -> Config:
    try:
        return Config.model_validate(_floats(safe_yaml.as_plain(tree)))
    except ValidationError as error:
        # Pydantic reports a refused union once per branch: one message lists everything that it would take.
        messages: dict[str, list[str]] = {}
        for where, message in map(_explain, error.errors()):
            messages.setdefault(where, []).append(message)
        raise ConfigError(
            source, [f"{where}{', or '.join(dict.fromkeys(texts))}" for where, texts in messages.items()]
        ) from None


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _floats(v) for k, v in value.items()}
    if isinstance(value, str) and value[:1].isdigit():
        return _number(value) if "e" in value.lower() else value
    return value


def _explain(problem: Any) -> tuple[str, str]:
    """The place with its value, and what is wrong with it."""
    where = [str(part) for part in problem["loc"]]
    known = known_keys()
    # Pydantic appends the branch of a union that it tried: keep what is a key.
    while len(where) > 1 and ".".join(where) not in known and problem["type"] != "extra_forbidden":
        where.pop()
    key = ".".join(where)
    if problem["type"] == "extra_forbidden":
        # The same name elsewhere (`lr`) comes first, then another name for the same thing, then what is spelt alike.
        by_last = [k for k in known if k.rsplit(".", 1)[-1] == where[-1]]
        if not by_last and (meant := meaning(where[-1])):
            return f"unknown key {key!r}", f"; here it is {meant}"
        sections = sorted({k.rsplit(".", 1)[0] for k in known if "." in k})
        beside = [k for k in known if k.startswith(f"{'.'.join(where[:-1])}.")] if len(where) > 1 else []
        near = difflib.get_close_matches(key, beside or [*known, *sections], 1, 0.8 if beside else 0.4)
        best = by_last or near
        return (
            f"unknown key {key!r}",
            f"; did you mean {' or '.join(map(repr, best))}?" if best else f"; there are {', '.join(beside or known)}",
        )
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "model_attributes_type"):
        inside = [k for k in known if k.startswith(f"{key}.")]
        message = f"it is a section with keys of its own: {', '.join(inside)}"
    if not key:
        return "", message
    return f"{key} = {safe_yaml.short(problem['input'])}: ", f"{message[0].lower()}{message[1:]}"
