"""Sections of a config, and entries that own their options.

A loss, an optimizer, a schedule, a sampling: each is a factory, and the arguments whose annotations say what they mean
are its options, keys of the section that names it:

    def mcl(k: Annotated[int, Field(ge=1, description="how many members learn from each example")] = 1) -> Loss:
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from mheads.common.errors import did_you_mean

Factories = Mapping[str, Callable[..., Any]]


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


def absolute_path(path: Path) -> Path:
    """The path without `~`, which no shell expands in `data.path=~/x`, and without `..`, unless that would lead
    elsewhere, as after a link. A run folder then means the same from any current folder."""
    path = Path(os.path.expanduser(path)).absolute()
    if str(path).encode("utf-8", "replace") != os.fsencode(path):
        raise ValueError("its name is not UTF-8, and no config can hold it; rename the folder")
    shorter = os.path.normpath(path)
    return Path(shorter) if os.path.realpath(shorter) == os.path.realpath(path) else path


Location = Annotated[Path, AfterValidator(absolute_path)]


def option(default: Any, description: str, **limits: Any) -> Any:
    """A key of a section: its default, what it means, and limits as pydantic has them."""
    return Field(default, description=description, **limits)


def expand_name(value: Any) -> Any:
    """Turns `bagging` into `{name: bagging}`, which it is short for."""
    return {"name": value} if isinstance(value, str) else value


def one_of(entries: Mapping[str, Any], what: str) -> AfterValidator:
    """Takes the name of an entry, and no other: `what` is what an entry is called in the message."""

    def check(name: str) -> str:
        if name not in entries:
            raise ValueError(f"{what} is one of {', '.join(entries)}{did_you_mean(name, entries)}")
        return name

    return AfterValidator(check)


def select_options(section: Section, factory: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a section gives to the factory of the entry that it names."""
    return {key: getattr(section, key) for key in options_of(factory)}


@dataclass(frozen=True)
class Option:
    """An argument of a factory that a config may give: its type with its limits, its default, and what it means."""

    type: Any
    default: Any
    description: str


@dataclass(frozen=True)
class SharedOption:
    """An option, and the entries that have it by what it means to them."""

    type: Any
    default: Any
    meanings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(name for names in self.meanings.values() for name in names)

    @property
    def description(self) -> str:
        return "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in self.meanings.items())


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """The annotated arguments of a factory; the others are for callers in Python alone."""
    options = {}
    arguments = inspect.signature(factory).parameters
    for key, hint in get_type_hints(factory, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        texts = [part.description for part in hint.__metadata__ if isinstance(part, FieldInfo) and part.description]
        if arguments[key].default is inspect.Parameter.empty or not texts:
            raise TypeError(f"option {key} of {factory.__name__} needs a default and Field(description=...)")
        options[key] = Option(hint, arguments[key].default, texts[0])
    return options


def options_by_key(factories: Factories) -> dict[str, SharedOption]:
    """Each option with the entries that have it. Those that share one must give it one type and default."""
    shared: dict[str, SharedOption] = {}
    for name, factory in factories.items():
        for key, declared in options_of(factory).items():
            first = shared.setdefault(key, SharedOption(declared.type, declared.default))
            if _kind(declared) != _kind(first):
                raise TypeError(
                    f"{first.owners[0]} and {name} both have an option {key}, but {_kind(first)} and "
                    f"{_kind(declared)}: declare it alike in both, or give it another name"
                )
            first.meanings.setdefault(declared.description, []).append(name)
    return shared


def _kind(declared: Option | SharedOption) -> str:
    """The type, limits and default of an option in words."""
    parts = [repr(part.metadata) for part in declared.type.__metadata__ if isinstance(part, FieldInfo)]
    return f"{declared.type.__origin__} {' '.join(parts)} = {declared.default!r}"


def make_section(name: str, base: type[S], factories: Factories) -> type[S]:
    """A section with a field for each option of any entry; all are checked, whichever entry is named.

    It is to be bound to this name in the module of the base, so that configs can be pickled.
    """
    shared = options_by_key(factories)
    if taken := base.model_fields.keys() & shared:
        raise TypeError(f"no entry can have an option {', '.join(taken)}: every {base.__name__} has that key")
    fields: dict[str, Any] = {
        key: (declared.type, option(declared.default, declared.description)) for key, declared in shared.items()
    }
    return create_model(name, __base__=base, __module__=base.__module__, **fields)
