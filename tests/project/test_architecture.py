"""What the order of rooms in pyproject.toml (`make lint`) does not say of the package."""

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
