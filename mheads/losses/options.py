"""The options of losses in a config: the arguments of a loss's factory whose annotations say what they mean.

def mcl(k: Annotated[int, Field(ge=1, description="how many members learn from each example")] = 1) -> Loss:
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Option:
    """An argument of a factory that a config may give: its type with its limits, its default, and what it means."""

    type: Any
    default: Any
    description: str


def options(factory: Callable[..., Any]) -> dict[str, Option]:
    """The annotated arguments of a loss's factory; the others are for callers in Python alone."""
    found = {}
    arguments = inspect.signature(factory).parameters
    for key, hint in get_type_hints(factory, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        said = [part.description for part in hint.__metadata__ if isinstance(part, FieldInfo) and part.description]
        if arguments[key].default is inspect.Parameter.empty or not said:
            raise TypeError(f"option {key} of loss {factory.__name__} needs a default and Field(description=...)")
        found[key] = Option(hint, arguments[key].default, said[0])
    return found


def keys(factories: Mapping[str, Callable[..., Any]]) -> dict[str, tuple[Option, list[str]]]:
    """Each option with the losses that have it. Losses that share an option must declare it alike."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for loss, factory in factories.items():
        for key, option in options(factory).items():
            first, owners = found.setdefault(key, (option, []))
            if str(option) != str(first):
                raise TypeError(
                    f"losses {owners[0]} and {loss} both have an option {key}, but {first} and {option}: declare it "
                    "alike in both, or give it another name"
                )
            owners.append(loss)
    return found
