"""What the order of rooms in pyproject.toml (`make lint`) does not say of the package."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mheads"
PATTERN = re.compile(
    r"^\s*(import torch\.distributed|from torch\.distributed|from torch import distributed)", re.MULTILINE
)


def test_the_hall_is_empty():
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_only_distributed_imports_torch_distributed():
    users = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if PATTERN.search(path.read_text())}
    assert users == {"distributed"}


def test_each_room_says_at_the_door_what_lives_there():
    for room in (path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert (room / "__init__.py").read_text().startswith('"""'), room


def test_no_file_and_no_function_is_too_long_to_read_at_once():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, (path, node.name)
