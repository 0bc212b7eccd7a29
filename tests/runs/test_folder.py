"""Run folders of strangers, damaged ones, ones with links in them, unfinished ones, and ones to start from."""

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import user_networks
import yaml
from helpers.commands import TINY, Running, assert_same_run, log_lines, ownership, process, result, weights
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import mheads as package
from mheads.common import fingerprint
from mheads.common.errors import UserError
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.networks import NETWORKS
from mheads.runs.folder import RunFolder
from mheads.runs.manifest import Manifest
from mheads.training.build_from_config import build_net
from mheads.training.experiment import build_experiment
from mheads.training.loop import train
from mheads.trees.member_scores import with_scores

SMALL = ["data.limit=100", "optim.batch_size=20", "optim.iterations=8", "log.every=1", "log.checkpoint_every=2"]
SMALL += ["log.keep=9", "log.evaluate_every=3", "members=3", "engine.workers=1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three independent members of a built-in network, trained for 8 iterations, all checkpoints kept."""
    run = tmp_path_factory.mktemp("plain") / "run"
    done = process("train", "digits", *SMALL, "--run", run)
    assert done.code == 0, done.err
    return run


@pytest.fixture
def copied(tmp_path, undisturbed):
    """A finished run that may be changed."""
    return shutil.copytree(undisturbed, tmp_path / "copied")


@pytest.fixture
def unfinished(copied):
    """A run that was killed at iteration 20, of which 18 are saved."""
    return unfinish(copied)


def unfinish(run):
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints/step-00000024")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["iteration"] <= 20))
    return run


def write(path, content):
    """Writes a file of a run as its author would, with its digest in the manifest."""
    manifest = Manifest(path.parent)
    manifest.expect(path, content)
    path.write_bytes(content)


def edit_config(run, **changed):
    write(run / "config.yaml", yaml.safe_dump(yaml.safe_load((run / "config.yaml").read_text()) | changed).encode())


# Strangers.


STRANGE = {
    "a command": {"model": "os:system", "model_args": {"command": "touch ran"}},
    "a file to be made": {"model": "pathlib:Path.touch", "model_args": {}},
    "a module that acts when it is imported": {"model": "acts:factory", "model_args": {}},
    "a factory of torch": {"model": "torch.hub:load", "model_args": {"repo_or_dir": ".", "source": "local"}},
    "code inside a built-in network": {"model": "fast_rcnn", "model_args": {"base": "acts:factory"}},
    "a loss": {"loss": {"name": "acts:loss"}},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strangers_run_folder_runs_nothing(mheads, plain, tmp_path, monkeypatch, kind):
    """Neither eval, predict, load nor init does; a loss alone is not refused, since they do not need it."""
    run = shutil.copytree(plain, tmp_path / "stranger")
    edit_config(run, **STRANGE[kind])
    (tmp_path / "acts.py").write_text("from pathlib import Path\nPath('ran').touch()\nfactory = loss = print\n")
    (tmp_path / "hubconf.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    strange = "model" in STRANGE[kind]
    for command in (["eval", run], ["predict", run, "a.png"]):
        done = mheads(*command)
        assert done.code == (2 if strange else 0), done.err
        if strange:
            assert STRANGE[kind]["model"] in done.err
            assert all(str(value) in done.err for value in STRANGE[kind]["model_args"].values())
            assert "None of it was run" in done.err
            assert "--trust" in done.err
    if strange:
        with pytest.raises(UserError, match="trust=True"):
            package.load(run)
    else:
        package.load(run)
    build_net(configs.load("digits", [*SMALL, f"init={run}"]))
    assert not (tmp_path / "ran").exists()


def test_code_that_a_run_names_is_run_where_it_is_trusted(mheads, copied):
    assert mheads("eval", copied).code == 2
    assert mheads("eval", copied, "--trust").code == 0
    assert package.load(copied, user_networks.with_dropout).result == package.load(copied, trust=True).result


def test_a_built_in_network_needs_no_trust(mheads, plain):
    assert mheads("eval", plain).code == 0
    assert len(package.load(plain).result.members) == 3


BUILT_IN = {
    "by itself": (NETWORKS["digits"], {}, ()),
    "with arguments": (partial(NETWORKS["mlp"], features=64, outputs=10, hidden=(8,)), {"flat": True}, ()),
    "with arguments and scores": (partial(partial(NETWORKS["digits"], classes=10), channels=1), {}, ("scored",)),
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_built_in_network_from_python_needs_no_trust_and_goes_on(kind, tmp_path):
    """Nor does a run of an older version, whose folder called it by its path, or by no name if it had arguments."""
    make, given, loss = BUILT_IN[kind]
    digits = load_digits()
    x = digits.images[:60].astype(np.float32).reshape(60, *((64,) if given else (1, 8, 8)))
    options = {"train": (x, digits.target[:60]), "test": (x, digits.target[:60]), "show": False, "batch_size": 20}
    net = package.TreeNet(with_scores(make) if loss else make, 2)
    run = package.fit(net, *loss, **options, iterations=3, folder=tmp_path / "run")
    loaded = package.load(tmp_path / "run")  # nor does it warn: that would be an error
    assert torch.equal(run.predict(x), loaded.predict(x))
    assert loaded.config.model in NETWORKS
    old = tmp_path / "old"
    for folder in (tmp_path / "run", shutil.copytree(tmp_path / "run", old)):
        if folder == old:
            name = "__main__:<Sequential>" if isinstance(make, partial) else "mheads.networks.digits:digits"
            edit_config(folder, model=name, model_args={})
        again = package.TreeNet(with_scores(make) if loss else make, 2)
        more = package.fit(again, *loss, **options, iterations=5, folder=folder)
        assert more.summary["iterations"] == 5
    assert weights(old) == weights(tmp_path / "run")
    longer = package.fit(package.load(tmp_path / "run").net, *loss, **options, iterations=6, folder=tmp_path / "run")
    assert longer.summary["iterations"] == 6


def test_arguments_of_a_network_that_came_from_a_config_are_kept(tmp_path):
    net = build_net(configs.load("digits", ["model_args.classes=12", "members=2"]))
    x, y = np.zeros((20, 1, 8, 8), np.float32), np.arange(20) % 12
    package.fit(net, train=(x, y), test=(x, y), iterations=1, batch_size=10, folder=tmp_path / "run", show=False)
    assert package.load(tmp_path / "run").predict(x).shape == (2, 20, 12)


# Damage.


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def listed(run):
    return sorted(p for p in run.rglob("*") if p.is_file() and p.name != ".lock")


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_each_bit_that_flips_in_a_file_is_noticed_or_harmless(copied, state, monkeypatch):
    """Noticed where the file is needed; harmless if load, or a step of training, gives the same bits as before."""
    if state == "unfinished":
        unfinish(copied)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    built = build_experiment(configs.load("digits", TINY))
    paths = listed(copied)
    before = {path: path.read_bytes() for path in paths}
    start = {name: tensor.clone() for name, tensor in built.net.state_dict().items()}
    good = list(read(copied, built, start))
    put_back(copied, before)
    rng = random.Random(1)
    noticed = dict.fromkeys(paths, 0)
    for path in [*paths, *paths]:
        flip(path, rng)
        for (bits, said), (same, _) in zip(read(copied, built, start), good, strict=True):
            named = any(str(path) in text or f"{path.parent} is damaged" in text for text in said)
            assert named or bits == same, (path, said)
            noticed[path] += named
        put_back(copied, before)
    used = {copied, copied / "checkpoints/step-00000018"} if state == "unfinished" else {copied}
    assert all(count for path, count in noticed.items() if path.parent in used), noticed


def put_back(run, content):
    shutil.rmtree(run)
    for path, kept in content.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)


class Stepped(Exception):  # noqa: N818
    """Raised when training has taken a step, which is enough."""


class OneStep(Silent):
    def __init__(self, said):
        self.warn = said.append

    def step(self, *found):
        raise Stepped(found)


def read(run, built, start):
    """What load gives, what one step of training makes of the folder, and the messages about it."""
    said = []
    try:
        loaded = package.load(run, user_networks.with_dropout, warn=said.append)
        yield (fingerprint.weights(loaded.net.state_dict()), loaded.summary), said
    except UserError as error:
        yield None, [*said, str(error)]
    said = []
    built.net.load_state_dict(start)
    try:
        found = train(built, RunFolder(run), OneStep(said))
        yield (found, [path.read_bytes() for path in listed(run) if path.parent == run]), said
    except Stepped as step:
        lines = (run / "metrics.jsonl").read_bytes()
        yield (step.args, fingerprint.weights(built.net.state_dict()), lines, ownership(run)), said
    except UserError as error:
        yield None, [*said, str(error)]


def trained_again(mheads, run, undisturbed):
    done = mheads("train", "digits", *TINY, "--run", run)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize(
    ("state", "name"),
    [
        *(("unfinished", name) for name in ("config.yaml", "identity.json", "data.safetensors", "manifest.json")),
        *(("finished", name) for name in ("config.yaml", "manifest.json")),
    ],
)
def test_what_a_run_begins_with_is_mended_from_a_checkpoint(mheads, copied, undisturbed, state, name):
    if state == "unfinished":
        unfinish(copied)
    before = (copied / name).read_text(errors="ignore").replace("workers: 1", "workers: auto")
    flip(copied / name, random.Random(0))
    assert str(copied / name) in trained_again(mheads, copied, undisturbed)
    assert_same_run(copied, undisturbed)
    if name != "manifest.json":
        assert (copied / name).read_text(errors="ignore").replace("workers: 1", "workers: auto") == before
    assert "nothing to do" in trained_again(mheads, copied, undisturbed)


@pytest.mark.parametrize("name", ["model.safetensors", "result.json", "assignments.npz"])
def test_what_a_run_ends_with_is_made_anew_from_the_last_checkpoint(mheads, copied, undisturbed, name):
    flip(copied / name, random.Random(0))
    out = trained_again(mheads, copied, undisturbed)
    assert f"{copied / name} is damaged" in out
    assert "resuming at iteration 24 of 24" in out
    assert_same_run(copied, undisturbed)
    assert "nothing to do" in trained_again(mheads, copied, undisturbed)


def test_a_run_without_checkpoints_says_what_cannot_be_made_anew(mheads, copied, undisturbed):
    shutil.rmtree(copied / "checkpoints")
    flip(copied / "assignments.npz", random.Random(0))
    out = trained_again(mheads, copied, undisturbed)
    assert "assignments.npz is damaged" in out
    assert "no checkpoint" in out
    assert "nothing to do" in out


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_damaged_lines_of_the_log_are_left_out_and_the_others_kept(mheads, copied, undisturbed, state):
    if state == "unfinished":
        unfinish(copied)
    content = bytearray((copied / "metrics.jsonl").read_bytes())
    content[content.index(b'"iteration": 8') + 20] ^= 1  # in the lines from checkpoint 6 to checkpoint 12
    (copied / "metrics.jsonl").write_bytes(content)
    assert "metrics.jsonl is damaged" in trained_again(mheads, copied, undisturbed)
    kept = [line for line in log_lines(undisturbed) if not 6 < line["iteration"] <= 12]
    assert log_lines(copied) == kept
    assert weights(copied) == weights(undisturbed)
    # What is left is whole, also for a run that goes on.
    longer = mheads("train", "digits", *TINY, "optim.iterations=26", "--run", copied)
    assert longer.code == 0
    assert "is damaged" not in longer.out
    assert log_lines(copied)[: len(kept)] == kept


@pytest.mark.parametrize("other", ["renamed", "of another run"])
def test_a_checkpoint_that_is_not_its_own_is_not_resumed(mheads, copied, undisturbed, plain, other):
    unfinish(copied)
    newest = copied / "checkpoints/step-00000018"
    if other == "renamed":
        shutil.copytree(newest, copied / "checkpoints/step-00000020")
        said = "step-00000020 is damaged (it is that of iteration 18, renamed); going back to the one before"
    else:
        shutil.rmtree(newest)
        shutil.copytree(plain / "checkpoints/step-00000008", copied / "checkpoints/step-00000008")
        said = "step-00000008 is damaged (it belongs to another run); going back to the start"
    assert said in trained_again(mheads, copied, undisturbed)
    assert_same_run(copied, undisturbed)


def test_a_run_that_nothing_can_check_is_refused_and_stays(mheads, copied):
    shutil.rmtree(copied / "checkpoints")
    (copied / "manifest.json").unlink()
    before = {path: path.read_bytes() for path in listed(copied)}
    for command in (["train", "digits", *TINY, "--run", copied], ["eval", copied, "--trust"]):
        done = mheads(*command)
        assert done.code == 2
        assert "manifest.json is missing" in done.err
    assert {path: path.read_bytes() for path in listed(copied)} == before


# Links.


@pytest.mark.parametrize(
    "name", [".config.yaml.new", ".metrics.jsonl.new", ".model.safetensors.new", ".manifest.json.new"]
)
def test_a_link_in_place_of_a_temporary_file_is_not_written_through(mheads, copied, undisturbed, tmp_path, name):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    unfinish(copied)
    (copied / name).symlink_to(mine)
    assert mheads("train", "digits", *TINY, "log.keep=3", "--run", copied).code == 0
    assert mine.read_text() == "mine"
    assert_same_run(copied, undisturbed)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints", ".lock", "manifest.json"])
def test_a_link_inside_a_run_folder_is_refused(mheads, unfinished, tmp_path, name):
    (unfinished / name).rename(tmp_path / "elsewhere")
    (unfinished / name).symlink_to(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in listed(tmp_path)}
    for command in (["train", "digits", *TINY, "--run", unfinished], ["eval", unfinished, "--trust"]):
        done = mheads(*command)
        assert done.code == 2
        assert f"{unfinished / name} is a symbolic link" in done.err
    assert {path: path.read_bytes() for path in listed(tmp_path)} == before


def test_links_in_place_of_checkpoints_are_damage_and_nothing_behind_them_is_lost(
    mheads, unfinished, undisturbed, tmp_path
):
    checkpoints = unfinished / "checkpoints"
    (checkpoints / "step-00000018").rename(tmp_path / "behind")
    (checkpoints / "step-00000018").symlink_to(tmp_path / "behind")
    (checkpoints / ".step-00000024.new").symlink_to(tmp_path / "behind")
    (checkpoints / ".old-00000018").symlink_to(tmp_path / "behind")
    before = {path: path.read_bytes() for path in listed(tmp_path / "behind")}
    assert "step-00000018 is damaged (it is a link)" in trained_again(mheads, unfinished, undisturbed)
    assert {path: path.read_bytes() for path in listed(tmp_path / "behind")} == before
    assert_same_run(unfinished, undisturbed)


def test_a_run_folder_may_be_a_link_itself(mheads, unfinished, undisturbed, tmp_path):
    (tmp_path / "link").symlink_to(unfinished)
    trained_again(mheads, tmp_path / "link", undisturbed)
    assert_same_run(unfinished, undisturbed)
    assert mheads("eval", tmp_path / "link", "--trust").code == 0


# Unfinished runs.


def test_an_unfinished_run_is_evaluated_asked_and_loaded_at_its_newest_checkpoint(mheads, unfinished, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    saved = load_file(unfinished / "checkpoints/step-00000018/tensors.safetensors")
    for command in (["eval", unfinished, "--trust"], ["predict", unfinished, tmp_path / "a.png", "--trust"]):
        done = mheads(*command)
        assert done.code == 0, done.err
        assert "is not finished: iteration 18 of 24 is its newest checkpoint" in done.out
    with pytest.warns(UserWarning, match="iteration 18 of 24|evaluation at iteration 16, on the test set") as said:
        run = package.load(unfinished, trust=True)
    assert len(said) == 2
    assert all(torch.equal(tensor, saved[f"model/{name}"]) for name, tensor in run.net.state_dict().items())
    [line] = [line for line in log_lines(unfinished) if line["iteration"] == 16 and "result" in line]
    assert run.result.to_dict() == line["result"]
    assert run.summary["iterations"] == 18


def test_a_run_without_any_evaluation_or_checkpoint_says_so(mheads, plain, tmp_path):
    early = shutil.copytree(plain, tmp_path / "early")
    cut(early, 2)
    said = []
    assert np.isnan(package.load(early, warn=said.append).result.oracle)
    assert "no evaluation yet" in said[-1]
    assert mheads("eval", early).code == 0
    shutil.rmtree(early / "checkpoints")
    assert "no checkpoint yet" in mheads("eval", early).err


def cut(run, step):
    """As if the process had been killed right after this checkpoint."""
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)


@pytest.mark.parametrize(("iterations", "at"), [(4, 4), (7, 6)])
def test_fewer_iterations_end_a_run_at_a_checkpoint_or_after_it(mheads, plain, tmp_path, iterations, at):
    run = shutil.copytree(plain, tmp_path / "run")
    cut(run, 6)
    shorter = ["train", "digits", *SMALL, f"optim.iterations={iterations}", "--run"]
    done = mheads(*shorter, run)
    assert done.code == 0, done.err
    assert f"resuming at iteration {at} of {iterations}" in done.out
    assert mheads(*shorter, tmp_path / "fresh").code == 0
    assert_same_run(run, tmp_path / "fresh")


def test_fewer_iterations_between_checkpoints_or_of_a_finished_run_are_refused(mheads, plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    shorter = ["train", "digits", *SMALL, "optim.iterations=5", "--run", run]
    assert "is finished" in mheads(*shorter).err
    cut(run, 6)
    done = mheads(*shorter)
    assert done.code == 2
    assert "optim.iterations: 8 in the folder, 5 now" in done.err
    assert "checkpoints of iterations 2, 4, 6" in done.err


# Starting from another run.


def train_from(mheads, run, tmp_path, *options):
    return mheads("train", "digits", *SMALL, "optim.iterations=1", *options, f"init={run}", "--run", tmp_path / "new")


@pytest.mark.parametrize("split", ["conv1", "{conv1: [{conv2: 2}, 1]}", "[{ip1: 2}, 1]"])
def test_members_trained_apart_are_not_grafted_onto_one_trunk(mheads, plain, tmp_path, split):
    done = train_from(mheads, plain, tmp_path, f"split={split}")
    assert done.code == 2
    assert f"init = '{plain}'" in done.err
    assert "share conv1 here, but each has its own there" in done.err
    assert "the same tree" in done.err
    assert not (tmp_path / "new").exists()


def test_a_tree_that_splits_earlier_takes_every_layer_from_where_its_members_had_it(mheads, tmp_path):
    shared = tmp_path / "shared"
    assert mheads("train", "digits", *SMALL, "split={conv2: [{ip1: 2}, 1]}", "--run", shared).code == 0
    net = build_net(configs.load("digits", [*SMALL, "split=conv1", f"init={shared}"]))
    donor = package.load(shared).net
    for m in range(3):
        mine, theirs = net.member(m).state_dict(), donor.member(m).state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="members 0, 1, 2 share ip1 here"):
        build_net(configs.load("digits", [*SMALL, "split=ip1", f"init={shared}"]))
    copy = package.TreeNet(package.networks.digits, members=3, split="ip1")
    with pytest.raises(UserError, match="share ip1 here"):
        copy.copy_weights(donor)


def test_a_donor_of_other_inputs_is_said(mheads, plain, tmp_path):
    done = train_from(mheads, plain, tmp_path, "data.normalize=mean_std", "data.scale=0.5")
    assert done.code == 0
    for part in ("trained on other data", "data.scale: 1.0 there, 0.5 here", "the mean that is subtracted: "):
        assert part in done.out
    assert "trained on other data" not in train_from(mheads, plain, tmp_path / "same", "seed=3").out


def test_a_donor_that_was_trained_on_is_another_start(mheads, plain, tmp_path):
    donor = shutil.copytree(plain, tmp_path / "donor")
    assert train_from(mheads, donor, tmp_path).code == 0
    assert "nothing to do" in train_from(mheads, donor, tmp_path).out
    assert mheads("train", "digits", *SMALL, "optim.iterations=9", "--run", donor).code == 0
    assert "weights that training starts from differ" in train_from(mheads, donor, tmp_path).err


# Evaluating on something else.


def test_the_log_and_the_result_say_which_split_they_are_of(mheads, plain, tmp_path):
    assert mheads("train", "digits", *SMALL, "data.validation=50", "--run", tmp_path / "held").code == 0
    for run, split in ((plain, "test"), (tmp_path / "held", "validation")):
        lines = [line for line in log_lines(run) if "result" in line]
        assert [line["iteration"] for line in lines] == [3, 6, 8]
        assert {line["split"] for line in lines} == {result(run)["split"]} == {split}
        assert lines[-1]["result"]["oracle"] == result(run)["oracle"]


def outputs(mheads, tmp_path, *args):
    done = mheads("eval", *args, "--outputs", tmp_path / "outputs.npz")
    assert done.code == 0, done.err
    with np.load(tmp_path / "outputs.npz") as file:
        return file["outputs"], file["labels"]


def test_a_run_is_evaluated_on_every_split_with_its_own_preprocessing(mheads, tmp_path):
    run = tmp_path / "held"
    options = ["data.validation=50", "data.limit=200", "data.normalize=mean_image"]
    assert mheads("train", "digits", *SMALL, *options, "--run", run).code == 0
    loaded = package.load(run)
    whole = package.data.load("digits")
    for split, rows in {"train": 200, "validation": 50, "test": 200}.items():
        found, labels = outputs(mheads, tmp_path, run, "--split", split)
        data = whole.test if split == "test" else whole.train
        start = len(data) - 50 if split == "validation" else 0
        wanted = np.arange(start, start + rows)
        assert labels.tolist() == data.targets[wanted].tolist()
        raw = data.read(wanted, None).numpy().transpose(0, 3, 1, 2)
        np.testing.assert_allclose(found, loaded.predict(raw).numpy(), rtol=1e-4, atol=1e-5)


def test_a_run_is_evaluated_on_other_data(mheads, plain, tmp_path):
    data = package.data.load("digits")
    x = data.test.read(np.arange(200, 260), None).numpy().transpose(0, 3, 1, 2)
    labels = data.test.targets[200:260]
    np.savez(tmp_path / "other.npz", x_train=x[:10], y_train=np.arange(10), x_test=x, y_test=labels)
    found, given = outputs(mheads, tmp_path, plain, "data.name=npz", f"data.path={tmp_path / 'other.npz'}")
    assert given.tolist() == labels.tolist()
    np.testing.assert_allclose(found, package.load(plain).predict(x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["seed=3"], ["'seed=3'", "data.path"]),
        (["data.scale=2"], ["'data.scale=2'", "as in training"]),
        (["data=npz"], ["'data=npz'", "data.path"]),
        (["--split", "holdout"], ["holdout", "train, validation, test"]),
        (["--split", "validation"], ["held no examples out", "data.validation=N"]),
        (["data.name=npz", "data.path=small.npz"], ["(1, 7, 7)", "(1, 8, 8)"]),
        (["data.name=npz", "data.path=named.npz"], ["a, b", "0, 1, 2"]),
    ],
)
def test_what_a_run_cannot_be_evaluated_on_is_refused(mheads, plain, tmp_path, monkeypatch, args, parts):
    monkeypatch.chdir(tmp_path)
    for name, side, more in (("small", 7, {}), ("named", 8, {"classes": np.array(["a", "b"])})):
        x, y = np.zeros((4, 1, side, side), np.uint8), np.arange(4) % 2
        np.savez(f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y, **more)
    done = mheads("eval", plain, *args)
    assert done.code == 2
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


def test_a_network_of_ones_own_is_found_from_another_folder(tmp_path):
    """Where it was when it was trained; if that is gone, the message says what to set."""
    (tmp_path / "project/nets").mkdir(parents=True)
    source = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "project/nets/mine.py").write_text(source)
    before, run = partial(os.chdir, tmp_path / "project"), tmp_path / "run"
    trained = Running("train", "digits", *SMALL, "model=nets.mine:net", "--run", run, before=before).finish()
    assert trained.code == 0, trained.err
    elsewhere = ["eval", run, "--trust"]
    assert Running(*elsewhere, before=partial(os.chdir, tmp_path)).finish().code == 0
    (tmp_path / "project").rename(tmp_path / "moved")
    gone = Running(*elsewhere, before=partial(os.chdir, tmp_path)).finish()
    assert gone.code == 2
    assert "PYTHONPATH" in gone.err
    assert str(tmp_path / "project") in gone.err
