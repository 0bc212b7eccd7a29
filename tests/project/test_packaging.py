"""What the package requires, and what `make` installs."""

import tomllib
from pathlib import Path

import hypothesis

ROOT = Path(__file__).parents[2]


def test_the_package_takes_any_newer_torch_and_make_pins_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (need for need in project["dependencies"] if need.startswith("torch"))
    assert torch == "torch>=2.9"
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert any(pin.startswith("torch==") for pin in pins) and all("==" in pin for pin in pins)
    makefile = (ROOT / "Makefile").read_text()
    assert "$(READY): pyproject.toml constraints.txt\n" in makefile
    assert "--constraint constraints.txt" in makefile


def test_files_that_are_not_python_are_in_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mheads"]
    packed = {path for pattern in patterns for path in (ROOT / "mheads").glob(pattern)}
    there = {path for path in (ROOT / "mheads").rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there - packed == set()


def test_no_test_is_judged_by_the_clock():
    assert hypothesis.settings().deadline is None
