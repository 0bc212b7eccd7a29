"""Reading specifications: protobuf's text format, older forms brought up to date, and where everything stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mheads.caffe import message_schema
from mheads.common import atomic_files
from mheads.common.errors import UserError

MAX_TEXT = 500_000  # characters
TOKEN = re.compile(
    r"""(?P<skip>[\s,;]+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)|(?P<open>[{<])|(?P<close>[}>])"""
    r"""|(?P<other>[\[\]:]|[^\s,;\#"'{}<>\[\]:]+)"""
)

# What the types of `layers { type: CONVOLUTION }` are called now, where more changed than capitals.
V1_NAMES = {
    "ABSVAL": "AbsVal", "ARGMAX": "ArgMax", "BNLL": "BNLL", "DUMMY_DATA": "DummyData", "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output", "IM2COL": "Im2col", "LRN": "LRN", "MVN": "MVN", "RELU": "ReLU", "TANH": "TanH",
    "SOFTMAX_LOSS": "SoftmaxWithLoss", "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
}  # fmt: skip
# Where data layers once had what is now in transform_param.
MOVED = {"data_param", "image_data_param", "window_data_param"}

# Fields that a solver has, and no net.
SOLVERS = {"net", "train_net", "test_net", "base_lr", "lr_policy", "max_iter"}


@dataclass(frozen=True)
class CaffeLayer:
    """A layer as it is written, and where: `message` is a LayerParameter."""

    message: Any
    file: str
    line: int
    column: int

    @property
    def name(self) -> str:
        name: str = self.message.name
        return name

    @property
    def type(self) -> str:
        kind: str = self.message.type
        return kind

    def __str__(self) -> str:
        return f"layer {self.name!r} ({self.type})"

    def refuse(self, what: str) -> UserError:
        """What is wrong with it, with its place: to be raised."""
        return UserError(f"{self.file}, line {self.line}, column {self.column}: {self}: {what}")

    @property
    def bottoms(self) -> list[str]:
        return list(self.message.bottom)

    @property
    def tops(self) -> list[str]:
        return list(self.message.top)


@dataclass(frozen=True)
class Net:
    """A net as it is written, in today's form."""

    name: str
    layers: list[CaffeLayer]
    text: str
    file: str
    state: Any = field(repr=False, default=None)  # a NetState


@dataclass(frozen=True)
class Place:
    line: int
    column: int
    fields: dict[str, list[Place]]


@dataclass(frozen=True)
class Solver:
    """A solver as it is written: `message` is a SolverParameter."""

    message: Any
    places: Place
    file: str

    def refuse(self, key: str, what: str) -> UserError:
        """What is wrong with a key, with its place: to be raised."""
        key_places = self.places.fields.get(key)
        where = f", line {key_places[0].line}, column {key_places[0].column}" if key_places else ""
        return UserError(f"{self.file}{where}: {key}: {what}")

    def nets(self) -> tuple[Path, Path | None]:
        """The files of the net that is trained and of the one that is tested, where that is another."""
        m = self.message
        key = next((key for key in ("net", "train_net") if m.HasField(key)), None)
        if key is None:
            raise self.refuse("net", "it names no net: give the net's file too, before the solver")
        tested = self._beside(m.test_net[0]) if m.test_net else None
        trained = self._beside(getattr(m, key))
        if trained is None:
            raise self.refuse(key, f"there is no {getattr(m, key)}, here or beside the solver: give the net's file too")
        return trained, tested

    def _beside(self, name: str) -> Path | None:
        """A file, from here (as in Caffe), from where the solver lies, or by its name alone beside the solver."""
        here = Path(self.file).parent
        return next((path for path in (Path(name), here / name, here / Path(name).name) if path.is_file()), None)


def read_file(path: Path) -> str:
    """The text of a specification."""
    try:
        with atomic_files.open_file(path) as file:
            data = file.read(4 * MAX_TEXT)
        try:
            return data.decode("utf-8-sig")  # some editors put a mark before the text
        except UnicodeDecodeError:
            if b"\0" in data:
                raise
            return data.decode("latin-1")  # comments of another time
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a .prototxt, a text in UTF-8: {error}") from error


def is_solver(path: str | Path) -> bool:
    """Whether a file looks like a solver, by the fields that it has."""
    return not SOLVERS.isdisjoint(places_of(read_file(Path(path))).fields)


def read_net(path: str | Path) -> Net:
    """The net in a file."""
    return parse_net(read_file(Path(path)), str(path))


def read_solver(path: str | Path) -> Solver:
    """The solver in a file."""
    return Solver(*parse(read_file(Path(path)), "SolverParameter", str(path)), str(path))


def parse_net(text: str, file: str = "the net") -> Net:
    """The net in a text, its layers in today's form."""
    message, places = parse(text, "NetParameter", file)
    return net_of(message, text, file, places)


def parse(text: str, kind: str, file: str) -> tuple[Any, Place]:
    """A message in protobuf's text format, and the places of its fields."""
    if len(text) > MAX_TEXT:
        raise UserError(f"{file} has {len(text):,} characters: at most {MAX_TEXT:,} are read")
    if "\0" in text:
        raise UserError(f"{file} holds a NUL character: it is no text; is it a .caffemodel?")
    made = message_schema.message(kind)()
    from google.protobuf import text_format

    try:
        text_format.Parse(text, made, descriptor_pool=message_schema.pool())
    except text_format.ParseError as error:
        raise _unreadable(error, kind, file) from None
    except RecursionError:
        raise UserError(f"{file}: messages are nested too deeply to be a {kind}") from None
    except (UnicodeError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a {kind}: {error}") from None
    return made, places_of(text)


def _unreadable(error: Any, kind: str, file: str) -> UserError:
    line, column = error.GetLine(), error.GetColumn()
    message = re.sub(r"^\d+:\d+ : ", "", str(error)).replace("caffe.", "")
    message = re.sub(r"^'.*': (?=[A-Z])", "", message, flags=re.DOTALL)
    if (enum := re.search(r'"(\w+)\.(\w+)" has no value named', message)) is not None:
        values = message_schema.pool().FindEnumTypeByName(f"caffe.{enum[1]}.{enum[2]}").values_by_name
        message = f"{message.replace(f'{enum[1]}.{enum[2]}', enum[2])} There are {', '.join(values)}"
    unknown = re.search(r'type "(\w+)" has no field named "(\w+)"', message)
    if unknown is not None:
        known = [f.name for f in message_schema.message(unknown[1]).DESCRIPTOR.fields]
        near = difflib.get_close_matches(unknown[2], known, 1)
        other = "SolverParameter" if kind == "NetParameter" else "NetParameter"
        if unknown[1] == "V1LayerParameter" and unknown[2] == "layer":
            message += " This is the format of 2013: bring it up to date with Caffe's upgrade_net_proto_text"
        elif near:
            message += f" Did you mean {near[0]}?"
        elif unknown[1] == kind and unknown[2] in [f.name for f in message_schema.message(other).DESCRIPTOR.fields]:
            message += f" It is one of a {'solver' if kind == 'NetParameter' else 'net'}: give the files in their order"
        else:
            message += f" There are {', '.join(known)}"
    where = f", line {line}, column {column}" if line is not None else ""
    if len(message) > 600:
        message = f"{message[:600]}..."
    return UserError(f"{file}{where}: {message}")


# Where things stand: protobuf's reader for Python does not tell.


def places_of(text: str) -> Place:
    """The places of the fields of a message whose text is known to be right."""
    root = Place(1, 1, {})
    stack, valued = [root], False
    name: tuple[str, int, int] = ("", 1, 1)
    lists: list[tuple[int, str]] = []  # that are open: how deep, and of which field
    for kind, token, line, column in _tokens(text):
        listed = bool(lists) and lists[-1][0] == len(stack)
        if kind == "open":
            child = Place(line, column, {}) if listed else Place(name[1], name[2], {})
            stack[-1].fields.setdefault(lists[-1][1] if listed else name[0], []).append(child)
            stack.append(child)
            valued = False
        elif kind == "close":
            stack = stack[:-1] or [root]
        elif token == "[":
            lists.append((len(stack), name[0]))
        elif token == "]":
            lists, valued = lists[:-1], False
        elif token == ":":
            valued = True
        elif valued or listed:  # a number, a string, the name of an enum's value
            stack[-1].fields.setdefault(name[0], []).append(Place(name[1], name[2], {}))
            valued = False
        elif kind == "other":
            name = (token, line, column)
    return root


def _tokens(text: str) -> Iterator[tuple[str, str, int, int]]:
    line, start, at = 1, 0, 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:  # nothing that a right text has
            at += 1
            continue
        token = match.group()
        if match.lastgroup != "skip":
            yield str(match.lastgroup), token, line, at - start + 1
        breaks = token.count("\n")
        if breaks:
            line, start = line + breaks, at + token.rindex("\n") + 1
        at = match.end()


# Older forms.


def net_of(message: Any, text: str, file: str, places: Place) -> Net:
    """The net in today's form: layers instead of `layers`, Input layers instead of `input`."""
    if message.layer and message.layers:
        raise UserError(f"{file} has both `layer` and the older `layers`: write all of them as `layer`")
    layer_places = places.fields.get("layer" if message.layer else "layers", [])
    made = list(message.layer) if message.layer else [_upgrade_layer(old) for old in message.layers]
    layers = [CaffeLayer(m, file, p.line, p.column) for m, p in zip(made, layer_places, strict=True)]
    for layer in layers:
        _move_transform(layer.message)
        if layer.type.endswith("Loss") and not layer.message.top:
            layer.message.top.append(f"{layer.name} (loss)")  # as Caffe does
    layers = [*_inputs(message, file), *layers]
    if not layers:
        raise UserError(f"{file} has no layers: a net is a list of `layer {{ ... }}`")
    return Net(message.name or Path(file).stem, layers, text, file, message.state)


def _upgrade_layer(old: Any) -> Any:
    new = message_schema.message("LayerParameter")()
    name = type(old).DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number[old.type].name
    new.type = (
        V1_NAMES.get(name, "".join(part.capitalize() for part in name.split("_"))) if old.HasField("type") else ""
    )
    new.name = old.name
    for key in (text.split()[1] for text in message_schema.parameter_fields(3)):
        if old.HasField(key):
            getattr(new, key).CopyFrom(getattr(old, key))
    for key in ("bottom", "top", "include", "exclude", "blobs", "loss_weight"):
        getattr(new, key).extend(getattr(old, key))
    for i in range(max(len(old.param), len(old.blobs_lr), len(old.weight_decay))):
        spec = new.param.add()
        if i < len(old.param):
            spec.name = old.param[i]
        if i < len(old.blobs_lr):
            spec.lr_mult = old.blobs_lr[i]
        if i < len(old.weight_decay):
            spec.decay_mult = old.weight_decay[i]
    return new


def _move_transform(layer: Any) -> None:
    for name in MOVED:
        if not layer.HasField(name):
            continue
        old = getattr(layer, name)
        for key in ("scale", "mean_file", "crop_size", "mirror"):
            if old.HasField(key):
                setattr(layer.transform_param, key, getattr(old, key))


def _inputs(message: Any, file: str) -> list[CaffeLayer]:
    """`input: "data" input_dim: 10 ...` as an Input layer."""
    if not message.input:
        return []
    shapes: list[Sequence[int]] = [list(shape.dim) for shape in message.input_shape]
    if not shapes and message.input_dim:
        dims = list(message.input_dim)
        if len(dims) != 4 * len(message.input):
            raise UserError(
                f"{file}: {len(dims)} input_dim for {len(message.input)} input: give four for each, or input_shape"
            )
        shapes = [dims[i : i + 4] for i in range(0, len(dims), 4)]
    if shapes and len(shapes) not in (1, len(message.input)):
        raise UserError(f"{file}: {len(shapes)} input_shape for {len(message.input)} input: give one for each")
    layer = message_schema.message("LayerParameter")(name="input", type="Input", top=list(message.input))
    for shape in shapes:
        layer.input_param.shape.add(dim=shape)
    return [CaffeLayer(layer, file, 1, 1)]
