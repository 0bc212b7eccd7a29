"""A net and a solver as a config: what `mheads convert` writes, and `mheads train NET.prototxt` trains.

The text of the net is in the config, so that a run folder needs no other file and a changed net is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mheads import config as configs
from mheads import files
from mheads.caffe import objective, solver
from mheads.caffe.graph import TEST, TRAIN, State, is_data, ranks_of, world_of
from mheads.caffe.layers.made import Shape
from mheads.caffe.network import checked_shape
from mheads.caffe.plan import Plan
from mheads.caffe.text import Layer, Net, Solver, read_net, read_solver
from mheads.caffe.trees import plan_of
from mheads.config import Config
from mheads.data import DATASETS
from mheads.errors import UserError

MODEL = "mheads.caffe.network:network"
KNOWN = {"cifar100": "cifar100", "cifar-100": "cifar100", "cifar10": "cifar10", "cifar-10": "cifar10"}
SOURCES = {
    "Data": "data_param", "ImageData": "image_data_param", "HDF5Data": "hdf5_data_param",
    "WindowData": "window_data_param",
}  # fmt: skip
LISTS = {"ImageData": "list", "HDF5Data": "hdf5"}
PROBLEMS = {
    "SoftmaxWithLoss": "auto", "HingeLoss": "classification", "EuclideanLoss": "regression",
    "SigmoidCrossEntropyLoss": "multilabel",
}  # fmt: skip
REQUEST = (
    "say which data to take: data.name=npz data.path=FILE.npz (x_train, y_train, x_test, y_test), data.name=folder "
    "data.path=FOLDER (train/CLASS/, val/CLASS/), or another that `mheads data list` shows"
)


@dataclass
class Converted:
    """A config as plain data, and what there is to say about it."""

    tree: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    asks: str | None = None  # for data, where the net's own cannot be read


def load(net: Path, solver_file: Path | None = None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The config that a net is trained by, and notes on it; asks for data where the net's cannot be read."""
    found = convert(net, solver_file, overrides)
    config = configs.from_tree(found.tree, str(net))
    if found.asks is not None:
        raise UserError(found.asks)
    return config, found.notes


def convert(net_file: str | Path, solver_file: str | Path | None = None, overrides: Sequence[str] = ()) -> Converted:
    """The config of a net and a solver, with config keys changed as `key=value` says."""
    net = read_net(net_file)
    found = Converted({"model": MODEL, "model_args": {"net": net.text}})
    tree, notes = found.tree, found.notes
    given = None if solver_file is None else read_solver(solver_file)
    state = {} if given is None else _state(given)
    tree["model_args"] |= state
    plan = plan_of(net, **state)
    tree["members"], tree["split"] = plan.members, plan.split
    layer = _data_layer(net, TRAIN)
    tree["data"], batch = _data(layer, _data_layer(net, TEST), plan, notes)
    said = dict(tree["data"])
    tree["optim"] = {"batch_size": batch} if batch else {}
    if given is not None:
        tree["optim"] |= solver.optim_of(given)
        tree["log"] = solver.log_of(given)
        if (seed := solver.seed_of(given)) is not None:
            tree["seed"] = seed
    for override in overrides:
        key, equals, value = override.partition("=")
        short = key in ("data", "loss", "optim.schedule") and not value.lstrip().startswith("{")
        configs.override(tree, f"{key}.name={value}" if equals and short else override)
    given_keys = {override.partition("=")[0] for override in overrides}
    _fit_data(tree["data"], said, given_keys, notes)
    data = tree["data"]
    shape = _shape(tree, layer)
    if data.get("name") is None:
        found.asks = f"{net.file}: {REQUEST}" if layer is None else str(layer.refuse(_unread(layer)))
    if shape is None and found.asks is None:
        found.asks = f"{net.file}: the shape of an example is not known: give it, such as model_args.shape=[3,32,32]"
    if shape is not None:
        tree["model_args"]["shape"] = list(shape)
        _add_losses(tree, plan, shape)
    _note_tree(plan, notes)
    return found


def _state(given: Solver) -> dict[str, Any]:
    """The stages and the level that a solver trains in."""
    state = given.message.train_state
    found = {"stages": list(state.stage), "level": state.level}
    return {key: value for key, value in found.items() if value}


def _add_losses(tree: dict[str, Any], plan: Plan, shape: Shape) -> None:
    built, outputs = plan.build(shape)
    shapes = [built.shapes[blob] for blob in outputs]
    terms = plan.described(shapes)
    if "loss" in tree:
        return  # said by the user
    if not terms:
        return  # a net without a loss: what the data are decides
    batch = tree["optim"].get("batch_size", Config().optim.batch_size)
    own: dict[str, Any] = {"terms": terms}
    if any(term.get("normalization") == 3 for term in terms):
        own["batch"] = batch
    plain = objective.is_plain(terms, len(shapes[0]))
    of = {} if plain else {"of": {"name": "mheads.caffe.objective:of_example", **own}}
    whole = objective.needs_whole_batch(terms)
    if whole:
        tree.setdefault("engine", {})["micro_batches"] = 1
    if plan.combine == "probabilities":
        tree["loss"] = {"name": "prob_averaged", "stable": False, "scale_rate": False}
    elif plan.combine == "mean" and not whole:
        tree["loss"] = {"name": "score_averaged", "scale_rate": False, **of}
    elif plan.combine is not None:
        count = plan.members
        coefficients = [1 / count] * count if plan.combine == "mean" else list(plan.combine)
        arguments = {"coefficients": coefficients, **own}
        tree["loss"] = {"name": "mheads.caffe.objective:combined", "args": arguments, "scale_rate": False}
    elif whole:
        tree["loss"] = {"name": "mheads.caffe.objective:whole", "args": own}
    else:
        tree["loss"] = {"name": "independent", **of}


def _note_tree(plan: Plan, notes: list[str]) -> None:
    ranks = len(plan.graph.ranks)
    if ranks == 1:
        return
    if plan.members > 1:
        where = "with nothing in common" if plan.split is None else f"that share a tree: {plan.split}"
        notes.append(f"its {ranks} ranks are {plan.members} members {where}; any number of processes may train them")
    else:
        notes.append(
            f"its {ranks} ranks make no tree: the layers run as they are written, on {ranks} processes or all on one"
        )


# Data.


def _data_layer(net: Net, phase: int) -> Layer | None:
    world = world_of(net)
    found = (layer for layer in net.layers if is_data(layer) and ranks_of(layer, State(phase), world))
    return next(found, None)


def _data(
    layer: Layer | None, testing: Layer | None, plan: Plan, notes: list[str]
) -> tuple[dict[str, Any], int | None]:
    """The `data` section as far as the net says it, and the size of a batch."""
    if layer is None:
        return {}, None
    transform = layer.message.transform_param
    found: dict[str, Any] = {"scale": transform.scale}
    source = _source(layer)
    known = next((name for part, name in KNOWN.items() if part in source.lower()), None)
    if known:
        found = {"name": known, **found}
    elif LISTS.get(layer.type) and Path(source).is_file():
        found = {"name": LISTS[layer.type], "path": source, **found}
        if testing is not None and testing is not layer and testing.type == layer.type:
            found["test_path"] = _source(testing)
        if layer.type == "ImageData":
            found |= _resized(layer, notes)
        elif plan.terms and (problem := PROBLEMS.get(plan.terms[0].step.layer.type)):
            found["problem"] = problem
    if transform.mirror:
        found["mirror"] = True
    if transform.mean_file or transform.mean_value:
        found["normalize"] = "mean_image"
        said = transform.mean_file or ", ".join(f"{value:g}" for value in transform.mean_value)
        notes.append(f"the mean ({said}) is measured on the training examples instead: data.normalize=mean_image")
    if transform.crop_size:
        found["crop"] = transform.crop_size
    return found, _batch_size(layer) or None


def _fit_data(data: dict[str, Any], said: dict[str, Any], given: set[str], notes: list[str]) -> None:
    """Leaves out what the net said of its own data, where others are taken or nobody asks for it."""
    entry = DATASETS.get(str(data.get("name")))
    for key in ("path", "test_path", "root", "resize", "grey", "problem"):
        if data.get("name") != said.get("name") and key in said and f"data.{key}" not in given:
            del data[key]
    if entry is not None and "crop" in said and "data.crop" not in given and not entry.takes("crop"):
        notes.append(f"crop_size: {said['crop']} is for images in folders and lists: {entry.name} keeps its size")
        del data["crop"]


def _resized(layer: Layer, notes: list[str]) -> dict[str, Any]:
    """How images of a list are read."""
    p, found = layer.message.image_data_param, {}
    if p.root_folder:
        found["root"] = p.root_folder
    if not p.is_color:
        found["grey"] = True
    if p.new_height and p.new_width:
        found["resize"] = min(p.new_height, p.new_width)
        notes.append(
            f"images are not warped to {p.new_height} x {p.new_width}: their shorter side is resized to "
            f"{found['resize']} pixels, and the middle is cut out"
        )
    return found


def _source(layer: Layer) -> str:
    parameter = SOURCES.get(layer.type)
    return getattr(layer.message, parameter).source if parameter else ""


def _batch_size(layer: Layer) -> int:
    m = layer.message
    if layer.type in SOURCES:
        return getattr(m, SOURCES[layer.type]).batch_size
    if layer.type == "MemoryData":
        return m.memory_data_param.batch_size
    dims = _dims(layer)
    return max(0, dims[0]) if dims else 0


def _dims(layer: Layer) -> list[int]:
    """The shape of the first top, examples first, where the layer says it."""
    m = layer.message
    if layer.type == "Input" and m.input_param.shape:
        return list(m.input_param.shape[0].dim)
    if layer.type == "DummyData":
        p = m.dummy_data_param
        if p.shape:
            return list(p.shape[0].dim)
        sides = [list(getattr(p, key)) for key in ("num", "channels", "height", "width")]
        return [side[0] for side in sides] if all(sides) else []
    if layer.type == "MemoryData":
        p = m.memory_data_param
        return [p.batch_size, p.channels, p.height, p.width]
    return []


def _unread(layer: Layer) -> str:
    source = _source(layer)
    if layer.type == "Data":
        kind = "LMDB" if layer.message.data_param.backend else "LevelDB"
        return f"it reads the {kind} {source!r}, which is not read here: {REQUEST}"
    there = "is not here" if layer.type in LISTS else "is not read here"
    what = f"it reads {source!r}, which {there}" if source else "it says nothing of where examples come from"
    return f"{what}: {REQUEST}"


def _shape(tree: dict[str, Any], layer: Layer | None) -> Shape | None:
    """The shape of an example: as it is given, as the data have it, or as the net says."""
    if (given := tree["model_args"].get("shape")) is not None:
        return checked_shape(given)
    data = tree["data"]
    entry = DATASETS.get(str(data.get("name")))
    if entry is not None:
        keys: dict[str, Any] = {"resize": 256, "crop": None, "grey": False, "path": None} | data
        keys["path"] = None if keys["path"] is None else Path(str(keys["path"])).expanduser()
        if (found := entry.example_shape(**keys)) is not None:
            return tuple(found)
    dims = _dims(layer) if layer is not None else []
    if len(dims) > 1 and all(0 < size < 2**31 for size in dims):
        return tuple(dims[1:])
    if layer is not None and layer.message.transform_param.crop_size:
        side = layer.message.transform_param.crop_size
        return (1 if layer.message.transform_param.force_gray else 3, side, side)
    return None


# As a recipe.


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(found: Converted, name: str) -> str:
    """A recipe: notes as comments, then the keys, the net as text that can be read and changed."""
    tree = {key: value for key, value in found.tree.items() if value not in ({}, None)}
    arguments = tree.pop("model_args")
    text = "\n".join(line.expandtabs(2).rstrip() for line in arguments["net"].splitlines()).rstrip() + "\n"
    tree = {**tree, "model_args": {**{k: v for k, v in arguments.items() if k != "net"}, "net": text}}
    asked = [f"to do: {found.asks}"] if found.asks else []
    comments = "".join(f"# {line}\n" for line in (f"Made of {name}.", *found.notes, *asked))
    return comments + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def convert_files(net: Path, more: Sequence[str], output: Path | None) -> str | None:
    """The recipe of a net, its solver and overrides: as text, or written to a file."""
    files_of = [given for given in more if "=" not in given]
    if len(files_of) > 1:
        raise UserError(f"{', '.join(files_of)}: give one solver, and config keys as key=value")
    found = convert(net, files_of[0] if files_of else None, [given for given in more if "=" in given])
    text = to_yaml(found, " and ".join(Path(str(name)).name for name in (net, *files_of)))
    configs.from_tree(found.tree, str(net))  # refused before anything is written
    if output is None:
        return text
    files.write_atomically(output, text.encode())
    return None
