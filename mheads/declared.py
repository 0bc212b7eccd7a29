"""What the losses take, read from their source: importing them would import torch, and a config need not wait for it.

A loss is declared once, by the factory in its file. An argument of it is an option, a key of the config's section
`loss`, if its annotation says what it means:

    def mcl(k: Annotated[int, Field(ge=1, description="how many members learn from each example")] = 1) -> Loss:
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

_WORDS = {"Annotated": Annotated, "Field": Field, "Literal": Literal}  # that annotations are written with


@dataclass(frozen=True)
class Option:
    """An argument of a factory that a config may give."""

    type: Any  # with its limits
    default: Any
    description: str


@cache
def losses() -> dict[str, dict[str, Option]]:
    """The losses of the table LOSSES by name, with the options of each."""
    folder = resources.files("mheads") / "losses"
    package = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in package if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module).rpartition(".")[2] for node in imports for alias in node.names}
    table = next(node.value for node in package if isinstance(node, ast.AnnAssign) and _name(node.target) == "LOSSES")
    assert isinstance(table, ast.Dict)
    found = {}
    for name, factory in zip(table.keys, map(_name, table.values), strict=True):
        file = folder / f"{homes[factory]}.py"
        assert isinstance(name, ast.Constant)
        found[str(name.value)] = _options(file.read_text(encoding="utf-8"), factory)
    return found


def loss_keys() -> dict[str, tuple[Option, list[str]]]:
    """Each option with the losses that have it. A key means one thing: losses that share one declare it alike."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for loss, options in losses().items():
        for key, option in options.items():
            first, owners = found.setdefault(key, (option, []))
            if str(option) != str(first):
                raise TypeError(
                    f"losses {owners[0]} and {loss} both have an option {key}, but {first} and {option}: declare it "
                    "alike in both, or give it another name"
                )
            owners.append(loss)
    return found


def _options(source: str, name: str) -> dict[str, Option]:
    """The annotated arguments of a function, from the lines of its definition alone."""
    head = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    head.body, head.returns, head.decorator_list = [ast.Pass()], None, []
    for argument in (*head.args.posonlyargs, *head.args.args, *head.args.kwonlyargs):
        if not (isinstance(argument.annotation, ast.Subscript) and _name(argument.annotation.value) == "Annotated"):
            argument.annotation = None  # for callers in Python alone
    made: dict[str, Any] = dict(_WORDS)
    exec(compile(ast.fix_missing_locations(ast.Module([head], [])), f"the head of {name}", "exec"), made)
    options = {}
    for key, found in inspect.signature(made[name], eval_str=True).parameters.items():
        if found.annotation is found.empty:
            continue
        said = [part.description for part in found.annotation.__metadata__ if isinstance(part, FieldInfo)]
        if found.default is found.empty or not said or not said[0]:
            raise TypeError(f"option {key} of loss {name} needs a default and Field(description=...)")
        options[key] = Option(found.annotation, found.default, said[0])
    return options


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""
