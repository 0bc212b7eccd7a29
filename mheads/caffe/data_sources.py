"""Where the examples of a net come from: its data layers as the `data` of a config, and the shape of an example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mheads.caffe.layer_graph import TEST, NetState, is_data, ranks_of, world_of
from mheads.caffe.layers.layer_modules import Shape
from mheads.caffe.net_plan import NetPlan
from mheads.caffe.network import check_shape
from mheads.caffe.prototxt import CaffeLayer, Net
from mheads.data import DATASETS
from mheads.data.data_section import read_options
from mheads.data.readers.caffe_lmdb import lmdb_shape

KNOWN = {"cifar100": "cifar100", "cifar-100": "cifar100", "cifar10": "cifar10", "cifar-10": "cifar10"}
SOURCES = {
    "Data": "data_param", "ImageData": "image_data_param", "HDF5Data": "hdf5_data_param",
    "WindowData": "window_data_param",
}  # fmt: skip
READ = {"ImageData": "list", "HDF5Data": "hdf5", "Data": "lmdb"}  # by these datasets, where the source is there
PROBLEMS = {"HingeLoss": "classification", "EuclideanLoss": "regression", "SigmoidCrossEntropyLoss": "multilabel"}
REQUEST = (
    "say which data to take: data.name=npz data.path=FILE.npz (x_train, y_train, x_test, y_test), data.name=folder "
    "data.path=FOLDER (train/CLASS/, val/CLASS/), or another that `mheads data list` shows"
)


def find_data_layers(plan: NetPlan) -> list[CaffeLayer]:
    """The layers that the network's examples come from: one, unless ranks have their own."""
    name = plan.inputs[0].name
    layers = [plan.graph.last[plan.inputs[0]].layer]
    layers += [step.layer for step in plan.graph.steps if is_data(step.layer) and name in step.layer.tops]
    return list({id(layer): layer for layer in layers}.values())


def find_test_layer(net: Net, plan: NetPlan, stages: Sequence[str] = (), level: int = 0) -> CaffeLayer | None:
    """The data layer of the phase TEST: of several, the one that makes the blob that the network reads."""
    state, world = NetState(TEST, frozenset((*net.state.stage, *stages)), level or net.state.level), world_of(net)
    layers = [layer for layer in net.layers if is_data(layer) and ranks_of(layer, state, world)]
    named = [layer for layer in layers if plan.inputs[0].name in layer.tops]
    return next(iter(named or layers), None)


def explain_apart(plan: NetPlan) -> str | None:
    """What keeps the net's own data from being read as one set of examples with their labels, if anything does."""
    made = plan.graph.last
    first, *others = find_data_layers(plan)
    for other in others:
        if (other.type, _source(other)) != (first.type, _source(first)):
            ranks = [[s.rank for s in plan.graph.steps if s.layer is layer] for layer in (first, other)]
            return str(
                other.refuse(
                    f"rank {ranks[1][0]} reads {_source(other)!r} by it, and rank {ranks[0][0]} {_source(first)!r} by "
                    f"{first} of line {first.line}: here all ranks learn from the same examples: {REQUEST}"
                )
            )
    for label in (term.label for term in plan.terms if term.label is not None):
        layer = made[label].layer
        if layer not in (first, *others) and not (layer.type == "HDF5Data" and _source(layer) == _source(first)):
            return str(
                layer.refuse(
                    f"it gives the labels, and {first} of line {first.line} the examples: here one set of data has "
                    f"both: {REQUEST}"
                )
            )
    return None


def data_of(
    layer: CaffeLayer, testing: CaffeLayer | None, plan: NetPlan, notes: list[str]
) -> tuple[dict[str, Any], int | None]:
    """The `data` section as far as the net says it, and the size of a batch."""
    transform = layer.message.transform_param
    section: dict[str, Any] = {"scale": transform.scale}
    source = _source(layer)
    known = next((name for part, name in KNOWN.items() if part in source.lower()), None)
    if _is_there(layer):
        section = {"name": READ[layer.type], "path": source, **section}
        if testing is not None and testing is not layer and testing.type == layer.type:
            section["test_path"] = _source(testing)
        if layer.type != "HDF5Data" and not known and _has_colour(layer):
            section["channels"] = "bgr"  # as OpenCV reads images for Caffe; its tool for CIFAR writes RGB
        if layer.type == "HDF5Data":
            section["arrays"] = _arrays(layer, plan)
        if layer.type == "ImageData":
            section |= _image_options(layer, notes)
    elif known:
        section = {"name": known, **section}
    if transform.mirror:
        section["mirror"] = True
    if transform.mean_file or transform.mean_value:
        section["normalize"] = "mean_image"
        mean = transform.mean_file or ", ".join(f"{value:g}" for value in transform.mean_value)
        notes.append(f"the mean ({mean}) is measured on the training examples instead: data.normalize=mean_image")
    if transform.crop_size:
        section["crop"] = transform.crop_size
    return section, _batch_size(layer) or None


def problem_of(plan: NetPlan) -> str | None:
    """What the targets are by the loss that looks at the answer; None where they say it themselves."""
    terms = [term for term in plan.terms if plan.outputs[0] in term.inputs]
    labelled = [term for term in terms if term.label is not None]
    return PROBLEMS.get(labelled[-1].step.layer.type) if labelled else None


def fit_data(data: dict[str, Any], net_data: dict[str, Any], given: set[str], plan: NetPlan, notes: list[str]) -> None:
    """Leaves out what the net said of its own data, where others are taken or nobody asks for it."""
    entry = DATASETS.get(str(data.get("name")))
    for key in ("path", "test_path", "arrays", "root", "resize", "grey", "channels"):
        if data.get("name") != net_data.get("name") and key in net_data and f"data.{key}" not in given:
            data.pop(key, None)
    if entry is not None and "crop" in net_data and "data.crop" not in given and not entry.takes("crop"):
        notes.append(f"crop_size: {net_data['crop']} is for images in folders and lists: {entry.name} keeps its size")
        data.pop("crop", None)
    if entry is not None and entry.takes("problem") and "problem" not in data and (problem := problem_of(plan)):
        data["problem"] = problem
    if plan.unlabelled and "problem" not in data and "name" in data:
        data["problem"] = "examples"
        notes.append("its losses look at no labels: what is measured is how well it gives the examples back")


def _arrays(layer: CaffeLayer, plan: NetPlan) -> list[str]:
    """The arrays of examples and of targets, which Caffe finds by the names of tops."""
    name = plan.inputs[0].name
    labels = [term.label.name for term in plan.terms if term.label is not None]
    if not labels and not plan.terms:
        labels = [top for top in layer.tops if top != name]
    return [name, labels[0] if labels else name]  # nothing but the examples: these are what is learned


def _image_options(layer: CaffeLayer, notes: list[str]) -> dict[str, Any]:
    """How images of a list are read."""
    p, options = layer.message.image_data_param, {}
    if p.root_folder:
        if not p.root_folder.endswith("/") and not Path(p.root_folder).is_dir():
            raise layer.refuse(
                f"root_folder: {p.root_folder!r} is no folder, but the beginning of names: end it with /, and write "
                "the rest into the list"
            )
        options["root"] = p.root_folder
    if not p.is_color:
        options["grey"] = True
    if p.new_height and p.new_width:
        options["resize"] = min(p.new_height, p.new_width)
        notes.append(
            f"images are not warped to {p.new_height} x {p.new_width}: their shorter side is resized to "
            f"{options['resize']} pixels, and the middle is cut out"
        )
    return options


def _is_there(layer: CaffeLayer) -> bool:
    """Whether what the layer reads is there, and can be read."""
    source = Path(_source(layer))
    if layer.type == "Data":
        return (source / "data.mdb").is_file()
    return layer.type in READ and source.is_file()


def _has_colour(layer: CaffeLayer) -> bool:
    if layer.type == "ImageData":
        colour: bool = layer.message.image_data_param.is_color
        return colour
    shape = lmdb_shape(Path(_source(layer)), None)
    return shape is not None and shape[0] == 3


def _source(layer: CaffeLayer) -> str:
    parameter = SOURCES.get(layer.type)
    return getattr(layer.message, parameter).source if parameter else ""


def _batch_size(layer: CaffeLayer) -> int:
    m = layer.message
    if layer.type in SOURCES:
        return int(getattr(m, SOURCES[layer.type]).batch_size)
    if layer.type == "MemoryData":
        return int(m.memory_data_param.batch_size)
    dims = _dims(layer)
    return max(0, dims[0]) if dims else 0


def _dims(layer: CaffeLayer) -> list[int]:
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


def explain_unread(layer: CaffeLayer) -> str:
    source = _source(layer)
    if layer.type == "Data":
        kind = "LMDB" if layer.message.data_param.backend else "LevelDB"
        there = "not here" if layer.message.data_param.backend else "not read here"
        return f"it reads the {kind} {source!r}, which is {there}: {REQUEST}"
    there = "is not here" if layer.type in READ else "is not read here"
    what = f"it reads {source!r}, which {there}" if source else "it says nothing of where examples come from"
    return f"{what}: {REQUEST}"


def shape_of(tree: dict[str, Any], layer: CaffeLayer) -> Shape | None:
    """The shape of an example: as it is given, as the data have it, or as the net says."""
    if (given := tree["model_args"].get("shape")) is not None:
        return check_shape(given)
    data = tree["data"]
    entry = DATASETS.get(str(data.get("name")))
    if entry is not None and (shape := entry.example_shape(**dict(read_options(**data)))) is not None:
        return tuple(shape)
    dims = _dims(layer)
    if len(dims) > 1 and all(0 < size < 2**31 for size in dims):
        return tuple(dims[1:])
    if layer.message.transform_param.crop_size:
        side = layer.message.transform_param.crop_size
        return (1 if layer.message.transform_param.force_gray else 3, side, side)
    return None
