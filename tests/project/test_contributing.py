"""Following CONTRIBUTING.md is all that adding something takes: tried on a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]

NETWORK = '''
from torch import nn

from mheads.networks.caffe_style_layers import linear, network


def strip(classes: int = 1, channels: int = 1) -> nn.Sequential:
    """Images [B, channels, 6, 10] -> numbers [B, classes]."""
    return network(
        flatten=nn.Flatten(), ip1=linear(60 * channels, 8, std=0.1), relu=nn.ReLU(), ip2=linear(8, classes, std=0.1)
    )
'''
PROBLEM = '''
from dataclasses import dataclass
from typing import ClassVar

from mheads.problems.regression import Regression, RegressionMetrics, RegressionResult


@dataclass(frozen=True)
class AbsoluteResult(RegressionResult):
    problem: ClassVar[str] = "absolute"


class AbsoluteMetrics(RegressionMetrics):
    def result(self):
        return AbsoluteResult(**{key: value for key, value in super().result().to_dict().items() if key != "problem"})


@dataclass(frozen=True)
class Absolute(Regression):
    """Numbers, by the distance and not by its square."""

    name: ClassVar[str] = "absolute"

    def losses(self, outputs, targets):
        return (outputs - targets).abs().mean(-1)

    def metrics(self, members):
        return AbsoluteMetrics(members, self.num_values)
'''
DISTANCES = '''
from mheads.data.readers.bars import read_bars
from mheads.problems import Absolute


def read_distances(mirror, crop):
    """The bars again, for the other problem; `crop` cuts columns off, and nothing is mirrored."""
    train, test, problem = read_bars()
    return train, test, Absolute(problem.num_values)
'''
RECIPE = """# Bars, by a network of two layers
model: strip
members: 2
split: ip1
data: {name: bars}
optim: {iterations: 30, lr: 0.05, batch_size: 20}
"""
# The commands, one after another in one process: code, out and err of each.
OPTIMIZER = """
from typing import Annotated

import torch
from pydantic import Field


class SignDescent(torch.optim.Optimizer):
    def __init__(self, groups, lr, beta):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.mul_(self.beta).add_(p.grad, alpha=1 - self.beta).sign(), alpha=group["lr"])


def signs(
    groups, lr: float, beta: Annotated[float, Field(ge=0, lt=1, description="the decay rate of the mean")] = 0.5
) -> torch.optim.Optimizer:
    return SignDescent(groups, lr, beta)
"""
SCHEDULE = """
from typing import Annotated

from pydantic import Field


def saw(teeth: Annotated[int, Field(ge=1, description="how often it falls")] = 3):
    return lambda i, n: 1 - (i * teeth / n) % 1
"""
SAMPLING = '''
from typing import Annotated

import numpy as np
from pydantic import Field


def turns(stride: Annotated[int, Field(ge=1, description="so many examples in a row go to one member")] = 1):
    """Members take turns."""

    def draw(request):
        owner = np.arange(len(request.labels)) // stride % request.members
        mine = np.stack([owner == m for m in range(request.members)]).astype(np.float32)
        return mine / mine.mean(1, keepdims=True)

    return draw
'''
FIGURE = '''
from mheads.report.charts.chart import Line, LineChart


def sizes(runs):
    """How many members runs have."""
    members = [run.record.config.members for run in runs]
    return [LineChart("Sizes", [Line("members", range(len(runs)), members)], "run", "members")]
'''
PANEL = """
from mheads.common.errors import UserError
from mheads.report.sizes import sizes


def members(run):
    if run.record.config.members == 1:
        raise UserError("One member has no size to compare")
    return sizes([run])
"""
COMMAND = '''
from pathlib import Path

from mheads.cli.shared import console


def size(run: Path) -> None:
    """Say how many bytes the weights of a run take."""
    console.print(f"{(run / 'model.safetensors').stat().st_size} bytes")
'''
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from mheads.cli.main import main

for line in sys.stdin:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["mheads", *json.loads(line)]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def blocks():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)


def insert(file, line, last):
    """Adds an entry to a table in a file, after the last one, and the import before the first import."""
    text = file.read_text()
    assert text.count(last) == 1, f"{file} has another last line"
    *imports, entry = line.splitlines()
    text = text.replace(last, last + entry + "\n" * last.endswith("\n"))
    first = re.search(r"^from mheads", text, re.MULTILINE).start()
    file.write_text(text[:first] + "".join(f"{line}\n" for line in imports) + text[first:])


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package with a loss and a dataset from the page, and one of everything else that is an entry."""
    root = tmp_path_factory.mktemp("copy")
    package = root / "mheads"
    shutil.copytree(ROOT / "mheads", package, ignore=shutil.ignore_patterns("__pycache__"))
    loss, loss_line, dataset, dataset_line = blocks()
    for block in (loss, dataset):
        (root / re.match(r"# (\S+)\n", block)[1]).write_text(block)
    (package / "networks/strip.py").write_text(NETWORK)
    (package / "problems/absolute.py").write_text(PROBLEM)
    (package / "data/readers/distances.py").write_text(DISTANCES)
    (package / "config/recipes/bars.yaml").write_text(RECIPE)
    insert(package / "losses/__init__.py", loss_line, '    "mixture_density": mixture_density,\n')
    catalog, last = package / "data/catalog.py", '.npz file", read_npz, npz_shape),\n'
    insert(catalog, dataset_line, last)
    entry = '        Dataset("distances", "the bars again", read_distances, (1, 6, 10)),'
    insert(
        catalog,
        f"from mheads.data.readers.distances import read_distances\n{entry}",
        dataset_line.splitlines()[-1] + "\n",
    )
    models = package / "networks/__init__.py"
    insert(models, "from mheads.networks.strip import strip\n    (strip, (1, 6, 10)),", "    (digits, (1, 8, 8)),\n")
    problems = package / "problems/__init__.py"
    insert(
        problems, 'from mheads.problems.absolute import Absolute\n, "absolute": Absolute', '"regression": Regression'
    )
    for file, code, table, entry, last in (
        (
            "optim/signs.py",
            OPTIMIZER,
            "optim/optimizers.py",
            '"signs": OptimizerEntry(signs)',
            '    "adam": OptimizerEntry(adam),\n',
        ),
        ("optim/saw.py", SCHEDULE, "optim/schedules.py", '"saw": ScheduleEntry(saw, ends=True)', '    "exp": '),
        (
            "data/turns.py",
            SAMPLING,
            "data/resampling.py",
            '"turns": SamplingEntry(turns)',
            '    "array": SamplingEntry(array),\n',
        ),
        ("report/sizes.py", FIGURE, "report/plot.py", '"sizes": FigureEntry(sizes)', '    "k": FigureEntry(k),\n'),
        (
            "report/page/members.py",
            PANEL,
            "report/page/one_run.py",
            '"members": Panel("cost", members)',
            '    "cost": Panel("cost", show_cost),\n',
        ),
    ):
        (package / file).write_text(code)
        module, name = file.removesuffix(".py").replace("/", "."), entry.split('"')[1]
        text = (package / table).read_text()
        assert text.count(last) == 1, (table, last)
        text = text.replace(last, f"    {entry},\n{last}")
        first = re.search(r"^from mheads", text, re.MULTILINE).start()
        (package / table).write_text(f"{text[:first]}from mheads.{module} import {name}\n{text[first:]}")
    (package / "cli/size_command.py").write_text(COMMAND)
    insert(package / "cli/main.py", " size", '"reproduce tree cuts detect')
    return root


@pytest.fixture(scope="module")
def command(copy, tmp_path_factory):
    """Commands of that copy: `command("train", "digits")` gives code, out and err."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "240"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path_factory.mktemp("here"),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(*args):
            process.stdin.write(json.dumps([str(arg) for arg in args]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line.startswith("["), (args, line, process.stdout.readline())
            return json.loads(line)

        yield run
        process.stdin.close()


QUICK = ["data.limit=100", "optim.iterations=4", "optim.batch_size=20", "members=2"]


def test_a_loss_is_a_file_and_a_line(command, tmp_path):
    code, out, _ = command("config", "digits", "loss=bounded", "loss.bound=5e-1")
    assert code == 0
    assert re.search(r"^  name: bounded +# independent, .*, bounded, or", out, re.MULTILINE)
    assert re.search(r"^  bound: 0.5 +# bounded: what an example costs at most$", out, re.MULTILINE)
    assert re.search(r"^  shape: tanh +# bounded: how the loss levels off$", out, re.MULTILINE)
    for override, words in (
        ("loss.bond=2", "unknown key 'loss.bond'; did you mean 'loss.bound'?"),
        ("loss.bound=0", "loss.bound = 0: input should be greater than 0"),
        ("loss.bound=wide", "loss.bound = 'wide': input should be a valid number"),
        ("loss.shape=round", "loss.shape = 'round': input should be 'tanh' or 'clamp'"),
    ):
        code, _, err = command("train", "digits", *QUICK, "loss=bounded", override, "--run", tmp_path / "refused")
        assert (code, words in err) == (2, True), err
    losses = {
        "independent": [],
        "loose": ["loss=bounded", "loss.shape=clamp", "loss.bound=1e9"],
        "tight": ["loss={name: bounded, shape: clamp, bound: 2.2}"],
        "smooth": ["loss=bounded"],
    }
    for name, options in losses.items():
        code, _, err = command("train", "digits", *QUICK, *options, "--run", tmp_path / name)
        assert code == 0, err
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in losses}
    assert weights["loose"] == weights["independent"]
    assert len(set(weights.values())) == 3
    code, _, err = command("train", "digits", *QUICK, "loss=bounded", "loss.bound=2", "--run", tmp_path / "smooth")
    assert (code, "loss.bound: 3.0 in the folder, 2.0 now" in err) == (2, True), err


def test_a_dataset_is_a_file_and_an_entry_and_so_are_a_network_a_problem_and_a_recipe(command, tmp_path):
    assert re.search(
        r" bars +6 x 10 drawings of a bar, whose length is learned; built in +yes", command("data", "list")[1]
    )
    assert re.search(r" bars +Bars, by a network of two layers +bars +2 +30", command("recipes")[1])
    code, out, err = command("plan", "bars", "--ranks", 2, "--flops", 2)
    assert code == 0, err
    assert "ip1/0" in out
    results = {}
    for data in ("bars", "distances"):
        run = tmp_path / data
        code, out, err = command("train", "bars", f"data={data}", "--run", run)
        assert code == 0, err
        results[data] = json.loads((run / "result.json").read_text())
        code, out, err = command("eval", run)
        assert code == 0, err
        assert f"{results[data]['oracle']:.4g}" in out
    assert [found["problem"] for found in results.values()] == ["regression", "absolute"]
    assert all(found["ensemble_mean"] < 0.2 for found in results.values())
    assert results["bars"]["members"] != results["distances"]["members"]
    bar = np.zeros((6, 10), np.uint8)
    bar[:, :7] = 255
    Image.fromarray(bar).save(tmp_path / "seven.png")
    Image.fromarray(bar.repeat(2, 0)).save(tmp_path / "tall.png")
    code, out, err = command("predict", tmp_path / "bars", tmp_path / "seven.png")
    assert code == 0, err
    assert abs(float(re.search(r"^ *0 +(\S+)", out, re.MULTILINE)[1]) - 0.7) < 0.2
    code, _, err = command("predict", tmp_path / "bars", tmp_path / "tall.png")
    assert (code, "is 10 x 12, but" in err, "10 x 6" in err) == (2, True, True), err


def test_the_arguments_of_a_reader_are_its_keys(command, tmp_path):
    for data, override, words in (
        ("bars", "data.crop=3", "data.crop is 3, but 'bars' keeps its size"),
        ("bars", "data.path=x", "but 'bars' is not read from a path; give data.path=null, or use folder or voc or npz"),
        ("bars", "data.pad=1", None),
        ("distances", "data.crop=3", None),
        ("distances", "data.pad=1", "data.pad is 1, but distances crops"),
    ):
        command_line = [
            "bars",
            f"data={data}",
            override,
            "optim.iterations=1",
            "--run",
            tmp_path / f"{data} {override}",
        ]
        code, _, err = command("train", *command_line)
        assert (code, words is None or words in err) == (0 if words is None else 2, True), err


def test_one_of_each_is_an_entry_and_every_command_takes_a_run_of_it(command, copy, tmp_path):
    """A problem, a network, a dataset, a loss, an optimizer, a schedule and a sampling of one's own in one run."""
    run = tmp_path / "run"
    keys = ["data=distances", "loss=bounded", "optim.name=signs", "optim.beta=0.25", "optim.schedule=saw"]
    keys += ["optim.schedule.teeth=2", "sampling=turns", "sampling.stride=5", "optim.lr=0.01"]
    code, _, err = command("train", "bars", *keys, "--folder", run)
    assert code == 0, err
    for key, said in (("optim.beta=1", "less than 1"), ("optim.momentum=0.5", "optim.momentum is an option of sgd")):
        code, _, err = command("train", "bars", *keys, key, "--folder", tmp_path / "refused")
        assert (code, said in err) == (2, True), err
    Image.fromarray(np.zeros((6, 10), np.uint8)).save(tmp_path / "none.png")
    assert command("size", run) == [0, f"{(run / 'model.safetensors').stat().st_size} bytes\n", ""]
    for args in (
        ["config", "bars", *keys],
        ["tree", "bars", *keys],
        ["plan", "bars", "--ranks", 2, "--flops", 2],
        ["eval", run, "--outputs", tmp_path / "outputs.npz"],
        ["predict", run, tmp_path / "none.png"],
        ["predict", run, tmp_path / "none.png", "-o", tmp_path / "answers.csv"],
        ["predict", run, tmp_path / "none.png", "-o", tmp_path / "answers.npz"],
        ["plot", "history", run],
        ["plot", "sizes", run],
        ["video", run, "-o", tmp_path / "video.gif"],
        ["report", run],
        ["compare", run, run],
        ["report", run, run, "-o", tmp_path / "both.html"],
        ["export", run, "-o", tmp_path / "net.pt2"],
        ["train", "bars", *keys, "--folder", run],
    ):
        code, out, err = command(*args)
        assert code == 0, (args, out, err)
    page = (run / "report.html").read_text()
    assert all(word in page for word in ("absolute", "signs", "saw", "turns", "bounded", "<h3>Sizes</h3>"))
    assert "sizes         How many members runs have" in command("plot")[1]
    for args in (
        ["plot", "reliability", run],
        ["saliency", run],
        ["distil", run],
        ["detect", "eval", run],
    ):
        code, out, err = command(*args)
        assert (code, err[:7], "Traceback" in err) == (2, "error: ", False), (args, out, err)
