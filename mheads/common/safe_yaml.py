"""Plain data of what others wrote: YAML and JSON within limits, so that no file can exhaust the machine.

Mistakes raise ValueError with a message that goes after the name of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import yaml

MAX_TEXT = 1_000_000  # characters
MAX_DEPTH = 50
MAX_VALUES = 100_000  # each alias counts as what it stands for
MAX_DIGITS = 40
SEAL = "checksum"
_TAG = "tag:yaml.org,2002:"


def from_yaml(text: str) -> Any:
    """The value of a YAML text: mappings with text for keys, lists, text, numbers, true, false and null."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"it has {len(text):,} characters: at most {MAX_TEXT:,} are read")
    try:
        return yaml.load(text, _Loader)
    except _Refused as error:
        raise ValueError(str(error)) from error
    except yaml.YAMLError as error:
        raise ValueError(f"it is not valid YAML: {error}") from error


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def seal(value: dict[str, Any], **form: Any) -> str:
    """A JSON text of a mapping and of its checksum, by which `unseal` notices damage."""
    return json.dumps({**value, SEAL: _checksum(value)}, **form) + "\n"


def unseal(text: str | bytes) -> dict[str, Any]:
    """The mapping in a JSON text, checked if it has a checksum: files of earlier versions have none."""
    document = from_json(text)
    if not isinstance(document, dict):
        raise ValueError(f"it holds {short(document)}")
    seal = document.pop(SEAL, None)
    if seal is not None and seal != _checksum(document):
        raise ValueError(
            f"it was changed after it was written: its {SEAL} is not {short(seal)}; if you changed it yourself, "
            f"remove the key {SEAL} from it"
        )
    return document


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class _Refused(yaml.YAMLError):
    """Valid YAML beyond our limits."""


def _read_int(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _read_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


# What text without quotes is, by the rules of YAML 1.2 (core schema): `yes`, `1:30` and 2026-01-01 are text.
_FORMS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"null|Null|NULL|~|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _read_int),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _read_float,
    ),
}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without dates, sets and the like, which would not read back as they were written."""

    yaml_implicit_resolvers = {}  # noqa: RUF012, its parent's name
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("str", "seq", "map")
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Refused(f"it is nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        _count(node, {})
        return super().construct_document(node)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
            raise _Refused(f"{short(text)} holds a character that no text can have")
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == f"{_TAG}merge":
                continue
            if key.tag == f"{_TAG}int":
                key.tag = f"{_TAG}str"  # the roots of a forest are called 0, 1, ...
            if key.tag != f"{_TAG}str":
                shown = short(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                raise _Refused(f"keys are text, not {shown}: put it in quotes{key.start_mark}")
            if key.value in seen:
                raise _Refused(f"the key {short(key.value)} is there twice{key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_plain(self, node: yaml.ScalarNode) -> Any:
        """The value of a text that is null, a truth value or a number."""
        text, kind = self.construct_scalar(node), node.tag.removeprefix(_TAG)
        if len(text) > MAX_DIGITS:
            raise _Refused(f"{short(text)} is a number of more than {MAX_DIGITS} digits")
        if not re.fullmatch(_FORMS[kind][0], text):
            raise _Refused(f"{short(text)} is not a number ({kind})")  # in spite of its tag
        return _FORMS[kind][1](text)


class QuotingDumper(yaml.SafeDumper):
    """YAML's safe dumper, which puts into quotes what either version of YAML would not read as text."""


for _kind, (_form, _) in _FORMS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"({_form})$"), None)
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.construct_plain)
    QuotingDumper.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"({_form})$"), None)
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile("<<$"), ["<"])


def to_yaml(value: Any) -> str:
    """The YAML text of a value, in the order of its keys; `from_yaml` is the inverse."""
    return yaml.dump(value, Dumper=QuotingDumper, sort_keys=False)


def _count(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """The number of values below a node, with aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise _Refused("an alias stands for something that holds itself")
        return size
    sizes[id(node)] = None
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 + sum(_count(part, sizes) for part in parts)
    if size > MAX_VALUES:
        raise _Refused(f"it holds more than {MAX_VALUES:,} values, with aliases written out")
    sizes[id(node)] = size
    return size


def as_plain(value: Any) -> Any:
    """The value with Python's own numbers in place of numpy's, also inside dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: as_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    return value.item() if isinstance(value, np.number | np.bool_) else value


def is_plain(value: Any) -> bool:
    """Whether YAML can hold the value, and gives it back as it was."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def short(value: Any) -> str:
    """The text of a value for messages, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text):,} characters)"
