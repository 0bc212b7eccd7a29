"""What the package requires, what `make` installs, and what its wheel holds."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import hypothesis
import pytest
import yaml

import mheads

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_takes_any_newer_torch_and_make_pins_its_own():
    (torch,) = (need for need in project()["dependencies"] if need.startswith("torch"))
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


def run(*command, cwd):
    """Runs a command that cannot see the checkout, since PYTHONPATH is not set and `cwd` is elsewhere."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy: in the checkout setuptools would leave build/, whose files go into the next wheel
    even after they are deleted from the package."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "mheads", folder / "mheads", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("benchmarks", "tests"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, folder, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    files = (path for path in (ROOT / "mheads").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert package == {path.relative_to(ROOT).as_posix() for path in files}
    assert {f"mheads-{mheads.__version__}.dist-info/{name}" for name in ("METADATA", "licenses/LICENSE")} <= names


def test_the_wheel_says_whose_it_is_and_under_which_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = Parser().parsestr(archive.read(f"mheads-{mheads.__version__}.dist-info/METADATA").decode())
    assert metadata["Version"] == mheads.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The mheads authors"
    assert metadata.get_all("Project-URL")
    versions = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if "Python :: 3." in line}
    assert {"3.11", "3.12", "3.13"} <= versions


def test_the_version_stands_in_one_place():
    assert project()["dynamic"] == ["version"] and "version" not in project()
    assert f"## [{mheads.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_workflows_call_targets_of_the_makefile_on_each_python_of_the_classifiers():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    called = {name: {step["run"] for step in job["steps"] if "run" in step} for name, job in jobs.items()}
    assert all(f"make {name}" in called[name] and name in targets for name in ("lint", "test", "full"))
    pythons = {line.rpartition(" ")[2] for line in project()["classifiers"] if "Python :: 3." in line}
    cases = jobs["test"]["strategy"]["matrix"]["include"]
    assert {case["python"] for case in cases} == pythons
    assert {case["torch"] for case in cases} == {"pinned", "oldest", "newest"}
    (torch,) = (need for need in project()["dependencies"] if need.startswith("torch"))
    assert f"'{torch.replace('>=', '==')}.*'" in (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize(("tag", "code"), [(f"v{mheads.__version__}", 0), ("v9.9.9", 1), (mheads.__version__, 1)])
def test_a_release_needs_the_tag_of_its_version(tag, code):
    steps = read_yaml(".github/workflows/release.yml")["jobs"]["build"]["steps"]
    (check,) = (step["run"] for step in steps if step.get("name") == "Check that the tag is the version")
    folder = Path(sys.executable).parent
    environment = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", check], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (f"has version {mheads.__version__}" in done.stderr) == bool(code)


def test_hooks_before_a_commit_are_the_commands_of_make_lint():
    (repo,) = read_yaml(".pre-commit-config.yaml")["repos"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    commands = [line.replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in lint.split("\n\t")]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in repo["hooks"]]
    assert entries == [command.strip() for command in commands]
    assert repo["repo"] == "local" and {hook["language"] for hook in repo["hooks"]} == {"system"}


def test_forms_for_issues_and_the_citation_have_what_their_readers_need():
    for name in ("bug", "feature"):
        form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids) > 0 and all(field["attributes"]["label"] for field in form["body"])
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == project()["license"] and "version" not in citation
    (paper,) = citation["references"]
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Lee", "Purushwalkam", "Cogswell", "Crandall", "Batra"]
    assert paper["identifiers"][0]["value"] == "arXiv:1511.06314"


# Imports every module and every public name, so that one that only the checkout has is noticed.
EVERYTHING = """
import importlib, pkgutil
import mheads

print(mheads.__file__)
print(mheads.__version__)
for name in mheads.__all__:
    getattr(mheads, name)
for module in pkgutil.walk_packages(mheads.__path__, "mheads."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.full
def test_the_demo_runs_from_a_wheel_in_a_clean_environment(wheel, tmp_path):
    """The clean environment takes the dependencies from this one: a .pth file names its site-packages. The .pth files
    in there are not read, so an editable mheads of this environment stays unknown."""
    clean, folder = tmp_path / "clean", tmp_path / "elsewhere"
    folder.mkdir()
    venv.create(clean, symlinks=True)
    python = clean / "bin/python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))

    file, version = run(python, "-W", "error::ImportWarning", "-c", EVERYTHING, cwd=folder).split()
    assert Path(file) == site / "mheads/__init__.py"
    command = clean / "bin/mheads"
    torch = importlib.metadata.version("torch")
    assert run(command, "--version", cwd=folder).startswith(f"mheads {version}, torch {torch}")
    listed = {line.split()[0] for line in run(command, "recipes", cwd=folder).splitlines() if line.strip()}
    assert listed >= {recipe.stem for recipe in (ROOT / "mheads/config/recipes").glob("*.yaml")}
    printed = run(command, "demo", cwd=folder)
    assert "MCL, k=1" in printed and "runs/demo/report.html" in printed
    assert (folder / "runs/demo/ownership.png").stat().st_size > 0
    assert "<style>" in (folder / "runs/demo/report.html").read_text()
