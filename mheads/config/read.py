"""Reads configs: recipes by name, YAML files and `key=value`; one message per mistake.

config = load("cifar10_quick", ["loss.name=mcl", "loss.k=1"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mheads.common import atomic_files, safe_yaml
from mheads.common.errors import UserError, did_you_mean
from mheads.common.options import expand_name
from mheads.config.aliases import GONE, rename_key, rename_keys
from mheads.config.schema import ENTRIES, SECTIONS, Config, all_keys
from mheads.config.unknown_keys import suggest
from mheads.optim.optimizers import OPTIMIZERS

Defaults = Mapping[str, Mapping[str, Any]]  # values of keys that a file does not have, by section


class ConfigError(UserError):
    """The mistakes in a config, whose `source` is a file or what else it was read from."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.source, self.problems = source, problems


def recipes() -> list[str]:
    folder = resources.files("mheads.config.recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


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
        return parse(_recipe_text(recipe), recipe, overrides)
    if is_caffe(recipe):
        raise UserError(
            f"{recipe} is a Caffe specification: mheads train takes it as it is, and mheads convert makes a recipe of "
            "it for the other commands"
        )
    if is_file(recipe):
        return read(Path(recipe), overrides)
    if is_file(f"{recipe}/config.yaml"):
        raise UserError(
            f"{recipe} is the folder of a run: give {recipe}/config.yaml for a new run of the same config, with "
            f"--folder {recipe} to resume it"
        )
    raise UserError(
        f"there is no recipe and no file {safe_yaml.short(recipe)}{did_you_mean(recipe, recipes())}: "
        f"give one of {', '.join(recipes())}, or the path of a YAML file"
    )


def is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long, say
        return False


def read(path: Path, overrides: Sequence[str] = (), defaults: Defaults | None = None) -> Config:
    """The config in a file; `defaults` are those of a run that was begun without some keys."""
    try:
        text = atomic_files.read_text(path, most=safe_yaml.MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"it cannot be read as a YAML file: {error}"]) from error
    return parse(text, str(path), overrides, defaults)


def parse(text: str, source: str, overrides: Sequence[str] = (), defaults: Defaults | None = None) -> Config:
    """The config in a text."""
    try:
        tree = rename_keys(safe_yaml.from_yaml(text) or {})
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from error
    if not isinstance(tree, dict):
        raise ConfigError(source, [f"it must hold a mapping of config keys, not {safe_yaml.short(tree)}"])
    for section, keys in GONE.items():
        if isinstance(tree.get(section), dict):
            tree[section] = {key: value for key, value in tree[section].items() if key not in keys}
    for section, values in (defaults or {}).items():
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section] = {**values, **tree[section]}
    data = tree.get("data")
    for given in overrides:
        override(tree, given)
    _forget_scale(tree, data, overrides)
    return validate(tree, source)


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
    return validate(tree, "the network")


def override(tree: dict[str, Any], given: str) -> None:
    """Changes the key that `key=value` names."""
    key, equals, text = given.partition("=")
    if not equals or not key:
        raise UserError(f"{safe_yaml.short(given)} is not key=value, for example loss.k=2")
    key = rename_key(key)
    try:
        value = rename_keys(safe_yaml.from_yaml(text), key)
    except ValueError as error:
        raise UserError(f"the value of {safe_yaml.short(given)}: {error}", key=key) from error
    *sections, last = key.split(".")
    for section in sections:
        child = tree.get(section)
        if isinstance(child, str):
            child = expand_name(child)  # `loss: mcl` in the file, `loss.k=2` on the command line
        tree[section] = tree = dict(child) if isinstance(child, dict) else {}
    before = expand_name(tree.get(last))
    if isinstance(value, dict) and isinstance(before, dict) and key in SECTIONS:
        value = before | value  # keys that are not given stay as they were, unless the section's name changes
        if before.get("name") != value.get("name"):
            value = {k: v for k, v in value.items() if k == "name" or k not in before or v is not before[k]}
    tree[last] = value


def keys_of(given: str) -> list[str]:
    """The keys that `key=value` sets: those in it if it is a section, loss.name for loss=mcl."""
    key, _, text = given.partition("=")
    try:
        return keys_in(rename_key(key), safe_yaml.from_yaml(text))
    except ValueError:  # reported by whoever loads it
        return [rename_key(key)]


def keys_in(key: str, value: Any) -> list[str]:
    """The keys that this value of a key sets."""
    inner = expand_name(value) if key in SECTIONS else value
    if key not in SECTIONS or not isinstance(inner, dict):
        return [key]
    return [leaf for name, part in inner.items() for leaf in keys_in(rename_key(f"{key}.{name}"), part)]


def validate(tree: dict[str, Any], source: str = "the config") -> Config:
    """The config of these keys, which a file or something else has put together."""
    try:
        return Config.model_validate(rename_keys(safe_yaml.as_plain(tree)))
    except ValidationError as error:
        # Pydantic reports a refused union once per branch: one message lists everything that it would take.
        messages: dict[str, list[str]] = {}
        for where, message in map(_explain, error.errors()):
            messages.setdefault(where, []).append(message)
        problems = [f"{where}{', or '.join(dict.fromkeys(texts))}" for where, texts in messages.items()]
    except ValueError as error:
        problems = [str(error)]
    raise ConfigError(source, problems)


def _explain(problem: Any) -> tuple[str, str]:
    """The place with its value, and what is wrong with it."""
    where = [str(part) for part in problem["loc"]]
    entry = next((key for key in ENTRIES if ".".join(where).startswith(f"{key}.")), None)
    place = where[: entry.count(".") + 2] if entry else []
    known = [".".join([*place, name]) for name in ENTRIES[entry].model_fields] if entry else all_keys()
    if problem["type"] == "extra_forbidden":
        hint = f"there are {', '.join(known)}" if entry else suggest(where, known)
        return f"unknown key {'.'.join(where)!r}", f"; {hint}"
    # Pydantic appends the branch of a union that it tried: keep what is a key.
    while len(where) > max(1, len(place)) and ".".join(where) not in known:
        where.pop()
    key = ".".join(where)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "model_attributes_type"):
        inside = [k for k in known if k.startswith(f"{key}.")]
        message = f"it is a section with keys of its own: {', '.join(inside)}"
    if key == "optim.name" and problem["type"] == "string_type":
        message = f"give the name of one: {', '.join(OPTIMIZERS)}"
    if not key:
        return "", message
    return f"{key} = {safe_yaml.short(problem['input'])}: ", f"{message[0].lower()}{message[1:]}"
