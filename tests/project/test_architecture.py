"""Imports point one way: down the table in docs/architecture.md."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mheads"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
EVERYWHERE = {"__init__.py", "__main__.py"}  # names for users, imported when they are first used


@cache
def rows():
    """The files of each row of the table, as patterns: `cli.py`, `bench/`, `distributed/build.py`, ..."""
    table = (ROOT / "docs/architecture.md").read_text().split("## Files, and who imports whom")[1].split("\n\n")[2]
    return [re.findall(r"`([\w/]+(?:\.py|/))`", line.split(" | ")[0]) for line in table.splitlines()[2:]]


def row_of(file):
    """The row that names the file, or else the one that names its folder."""
    found = rows()
    for name in (file, *(f"{folder.as_posix()}/" for folder in Path(file).parents)):
        for i, names in enumerate(found):
            if name in names:
                return i
    return None


def imports(file):
    """Files of ours that a file imports, anywhere in it but for type checkers."""
    tree = ast.parse((PACKAGE / file).read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mheads":
            for alias in node.names:
                yield from existing(f"{node.module}.{alias.name}", node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mheads":
                    yield from existing(alias.name)


def existing(*modules):
    """The file of the first of these modules that has one."""
    for module in modules:
        path = "/".join(module.split(".")[1:])
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in FILES:
                yield file
                return


def test_the_table_names_every_file_and_nothing_else():
    assert [file for file in FILES if file not in EVERYWHERE and row_of(file) is None] == []
    named = [name for row in rows() for name in row]
    assert [name for name in named if not (PACKAGE / name).exists()] == []


@pytest.mark.parametrize("file", [file for file in FILES if file not in EVERYWHERE])
def test_a_file_imports_nothing_from_a_row_above_it(file):
    above = [other for other in imports(file) if other not in EVERYWHERE and row_of(other) < row_of(file)]
    assert above == []


def test_only_distributed_imports_torch_distributed():
    def uses(file):
        return re.search(r"^\s*(import torch\.distributed|from torch\.distributed|from torch import distributed)",
                         (PACKAGE / file).read_text(), re.MULTILINE)  # fmt: skip

    assert [file for file in FILES if uses(file) and not file.startswith("distributed/")] == []
