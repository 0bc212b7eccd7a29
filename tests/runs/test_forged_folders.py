"""Run folders with right checksums and wrong contents: each is read, or refused with a message, and nothing else."""

import io
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from helpers.forged_folders import FILES, forge
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save

import mheads as package
from mheads.cli.printing.result_tables import comparison_table, result_table
from mheads.common import schemas
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.problems import PROBLEMS
from mheads.report.page.one_run import make_page
from mheads.report.shown_run import ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.manifest import Manifest
from mheads.runs.read_run import Record
from mheads.training.loop import train_config

TRAINED = [
    "data.limit=60", "optim.batch_size=20", "optim.iterations=4", "log.every=1", "log.checkpoint_every=2",
    "log.evaluate_every=2", "members=2", "loss=mcl", "data.normalize=mean_image", "engine.workers=1",
]  # fmt: skip


class Listening(Silent):
    def __init__(self):
        self.said = []

    def warn(self, message):
        self.said.append(message)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two members, finished, and the contents of its files."""
    run = tmp_path_factory.mktemp("forged") / "run"
    train_config(configs.load("digits", TRAINED), RunFolder(run), Listening())
    return run, {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def put_back(run, contents):
    for path in run.rglob("*"):
        if path.is_file() and path not in contents:
            path.unlink()
    for path in (run / "checkpoints").glob("*"):
        if not any(path.iterdir()):
            path.rmdir()
    for path, content in contents.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def unfinish(run):
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink(missing_ok=True)


def load(run, watch):
    repr(package.load(run, warn=watch.warn))


def show(run, watch):
    record = Record.read(run)
    assert len(record.read_ownership()[1]) >= 0
    assert len(record.read_learning()[1]) >= 0
    if record.finished:
        result_table(record.result)
        comparison_table({"run": record.result})


def draw(run, watch):
    make_page(ShownRun(Record.read(run, lenient=True), watch, look=False)).html()


@pytest.mark.parametrize("part", range(5))
def test_each_of_500_forged_run_folders_is_read_or_refused_with_its_name(trained, part):
    run, contents = trained
    refused, said = 0, set()
    for number in range(100 * part, 100 * part + 100):
        put_back(run, contents)
        file, done = forge(run, number)
        if number % 3 == 0 and file in ("metrics.jsonl", "state.json", "tensors.safetensors"):
            unfinish(run)
        watch = Listening()
        for read in (show if number % 3 else load, *([draw] if number % 25 == 0 else [])):
            try:
                read(run, watch)
            except UserError as error:
                assert str(run) in str(error), (number, file, done)
                refused += 1
                said.add(str(error)[:120])
            except Exception as error:
                raise AssertionError(f"forge({number}): {file}, {done}") from error
    put_back(run, contents)
    assert refused > 30
    assert len(said) > 15


COMMANDS = {
    "eval": lambda run, out: ["eval", run],
    "predict": lambda run, out: ["predict", run, out / "a.png"],
    "train": lambda run, out: ["train", "digits", *TRAINED, "--run", run, "--quiet"],
    "more": lambda run, out: ["train", "digits", *TRAINED, "optim.iterations=5", "--run", run, "--quiet"],
    "plot": lambda run, out: ["plot", "history", run, "-o", out / "p.svg"],
    "wins": lambda run, out: ["plot", "wins", run, "-o", out / "p.svg"],
    "init": lambda run, out: ["train", "digits", *TRAINED, "optim.iterations=1", f"init={run}", "--run", out / "new"],
}


def test_commands_end_with_a_message_on_forged_run_folders(mheads, trained, tmp_path):
    run, contents = trained
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    codes = []
    for number in range(1000, 1000 + 2 * len(FILES)):
        put_back(run, contents)
        file, done = forge(run, number)
        command = list(COMMANDS)[number % len(COMMANDS)]
        ended = mheads(*COMMANDS[command](run, tmp_path))
        assert ended.code in (0, 2), (number, command, file, done, ended.err)
        assert "Traceback" not in ended.err
        codes.append(ended.code)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert {0, 2} <= set(codes)


# Single ones, with their words.


def rewrite(run, name, content):
    Manifest(run).expect(run / name, content)
    (run / name).write_bytes(content)


def change_json(run, name, change):
    tree = json.loads((run / name).read_text())
    change(tree)
    rewrite(run, name, json.dumps(tree).encode())


def change_facts(run, change=lambda facts, tensors: None):
    with safe_open(run / "data.safetensors", "pt") as file:
        tensors, facts = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118
    change(facts, tensors)
    rewrite(run, "data.safetensors", save(tensors, {"facts": json.dumps(facts)}))


def change_arrays(run, **changed):
    with np.load(run / "assignments.npz") as file:
        arrays = {name: file[name] for name in file} | changed
    content = io.BytesIO()
    np.savez(content, **{name: array for name, array in arrays.items() if array is not None})
    rewrite(run, "assignments.npz", content.getvalue())


def change_lines(run, change):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    rewrite(run, "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode())


FORGED = {
    "identity.json is damaged (network = None": lambda run: change_json(
        run, "identity.json", lambda tree: tree.update(network=None)
    ),
    "identity.json is damaged (loss.code is missing": lambda run: change_json(
        run, "identity.json", lambda tree: tree["loss"].pop("code")
    ),
    "identity.json is damaged (network.code.f.source.0 = 3": lambda run: change_json(
        run, "identity.json", lambda tree: tree["network"]["code"].update(f={"source": [3]})
    ),
    "data.safetensors is damaged (shape = 'large'": lambda run: change_facts(run, lambda f, t: f.update(shape="large")),
    "data.safetensors is damaged (shape.0 = '1'": lambda run: change_facts(
        run, lambda f, t: f.update(shape=["1", "8", "8"])
    ),
    "data.safetensors is damaged (mean has shape [3], and examples are [1, 8, 8]": lambda run: change_facts(
        run, lambda f, t: t.update(mean=torch.zeros(3))
    ),
    "data.safetensors is damaged (mean (torch.int64) should hold finite": lambda run: change_facts(
        run, lambda f, t: t.update(mean=torch.zeros(1, 8, 8, dtype=torch.int64))
    ),
    "data.safetensors is damaged (problem = 'magic': there are classification": lambda run: change_facts(
        run, lambda f, t: f["problem"].update(name="magic")
    ),
    "data.safetensors is damaged (seen.0 = 'int4'": lambda run: change_facts(
        run, lambda f, t: f.update(seen=["int4", 0, 1])
    ),
    "result.json is damaged (oracle is missing": lambda run: change_json(
        run, "result.json", lambda tree: tree.pop("oracle")
    ),
    "result.json is damaged (members has 3 rows, and the run 2 members": lambda run: change_json(
        run, "result.json", lambda tree: tree["members"].append(1.0)
    ),
    "result.json is damaged (ownership has a row of 9 numbers, where 10": lambda run: change_json(
        run, "result.json", lambda tree: tree["ownership"][1].pop()
    ),
    "result.json is damaged (problem = 'regression', and data.safetensors says": lambda run: change_json(
        run, "result.json", lambda tree: tree.update(problem="regression")
    ),
    "metrics.jsonl is damaged (line 1: member_losses has 1 numbers": lambda run: change_lines(
        run, lambda lines: lines[0]["member_losses"].pop()
    ),
    "metrics.jsonl is damaged (line 2: iteration = -1": lambda run: change_lines(
        run, lambda lines: lines[1].update(iteration=-1)
    ),
    "assignments.npz is damaged (the array test is one of objects": lambda run: change_arrays(
        run, test=np.array([None, {}])
    ),
    "assignments.npz is damaged (train is missing": lambda run: change_arrays(run, train=None),
    "assignments.npz is damaged (steps has shape [2, 2]": lambda run: change_arrays(run, steps=np.zeros((2, 2))),
    "manifest.json is damaged (files = []": lambda run: (run / "manifest.json").write_text(
        '{"files": [], "sha256": ""}'
    ),
}


@pytest.mark.parametrize("words", FORGED)
def test_what_is_wrong_is_said_with_file_and_key_and_training_again_mends_it(trained, words):
    run, contents = trained
    put_back(run, contents)
    FORGED[words](run)
    with pytest.raises(UserError) as refused:
        Record.read(run).read_assignments()
        package.load(run)
    assert f"{run}/{words}" in str(refused.value)
    assert "the command that trained the run, given again, makes it anew" in str(refused.value)
    watch = Listening()
    train_config(configs.load("digits", TRAINED), RunFolder(run), watch)
    assert any(str(run / words.split()[0]) in line and "anew" in line for line in watch.said)
    for name in ("model.safetensors", "identity.json", "data.safetensors"):
        assert (run / name).read_bytes() == contents[run / name]
    Record.read(run).read_assignments()
    put_back(run, contents)


def test_a_checkpoint_that_does_not_fit_is_left_out_and_the_one_before_gone_on_from(trained):
    run, contents = trained
    for number in (9, 10, 20, 21, 31, 2309):  # of state.json and tensors.safetensors
        put_back(run, contents)
        file, done = forge(run, number)
        unfinish(run)
        watch = Listening()
        found = train_config(configs.load("digits", TRAINED), RunFolder(run), watch)
        assert found["iterations"] == 4
        if any("is damaged" in line for line in watch.said):
            assert (run / "model.safetensors").read_bytes() == contents[run / "model.safetensors"], (file, done)
    put_back(run, contents)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_result_of_every_problem_is_its_own_schema(name):
    """What is written is read; a number that is text, or a measure that is missing, is not."""
    problem = PROBLEMS[name]
    kind = problem.result_type
    made = kind.unknown(3, 4)
    written = json.loads(json.dumps(made.to_dict()))
    groups = len(written["ownership"][0])
    kind.from_dict(written).check_sizes(3, groups)
    for key in written:
        for odd in ("12", [[["x"]]], {"a": "b"}, True):
            if not (key == "images" and isinstance(odd, str)):
                with pytest.raises(ValueError, match=key):
                    kind.from_dict({**written, key: odd})
    with pytest.raises(ValueError, match="oracle is missing"):
        kind.from_dict({key: value for key, value in written.items() if key != "oracle"})
    with pytest.raises(ValueError, match="3 rows, and the run 2 members"):
        kind.from_dict(written).check_sizes(2, groups)
    with pytest.raises(ValueError, match="ownership has a row of"):
        kind.from_dict(written).check_sizes(3, groups + 1)


def test_numbers_of_a_schema_may_be_infinite_but_not_text_nor_beyond_floats():
    for good in (1, 1.5, -0.0, math.inf, math.nan, 2**53):
        schemas.check(schemas.Number, good)
    for bad in ("1", True, None, [], 2**53 + 1, 10**400, 1e305):
        with pytest.raises(ValueError, match="should be"):
            schemas.check(schemas.Number, bad)


@pytest.mark.parametrize(
    "name", ["identity.json", "data.safetensors", "manifest.json", "metrics.jsonl", "assignments.npz"]
)
def test_a_pipe_in_place_of_a_file_of_a_run_is_a_message(trained, name):
    run, contents = trained
    put_back(run, contents)
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=f"{run / name} .*it is a named pipe"):
        Record.read(run).read_assignments()
        package.load(run)
    (run / name).unlink()
    put_back(run, contents)
