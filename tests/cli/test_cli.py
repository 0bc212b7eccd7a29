"""What a user types, right and wrong."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import PYTHONPATH, TINY, process, result
from PIL import Image

import mheads as package
from mheads.config import options_without_effect, schema
from mheads.config.read import load, recipes
from mheads.data.resampling import SAMPLINGS
from mheads.engine.threads import available_cores
from mheads.optim.optim_section import OptimOptions
from mheads.optim.optimizers import OPTIMIZERS
from mheads.optim.schedules import SCHEDULES, ScheduleOptions

QUICK = ["data.limit=150", "optim.iterations=2", "optim.batch_size=32"]


def files(folder):
    return {p.relative_to(folder): p.stat().st_mtime_ns for p in folder.rglob("*")} if folder.exists() else None


@pytest.fixture
def refused(mheads, tmp_path, monkeypatch):
    """Runs a command that must be refused: exit code 2, the message, no traceback, and nothing written."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        before = files(tmp_path)
        done = mheads(*args)
        assert done.code == 2, done.out + done.err
        assert done.err.startswith("error: ")
        assert "Traceback" not in done.err
        assert files(tmp_path) == before
        return done.err

    return run


@pytest.fixture
def copied(tmp_path, undisturbed):
    return shutil.copytree(undisturbed, tmp_path / "copied")


# Looking before training.


def test_the_version_names_what_decides_bits(mheads):
    import platform
    from importlib.metadata import version

    done = mheads("--version")
    assert done.code == 0
    assert done.out == f"mheads {package.__version__}, torch {version('torch')}, Python {platform.python_version()}\n"


def test_recipes_says_of_each_what_it_trains_on_what_and_for_how_long(mheads, monkeypatch):
    lines = mheads("recipes").out.splitlines()
    (quick,) = (line for line in lines if line.startswith(" cifar10_quick "))
    assert "CIFAR10-Quick as the paper trains it" in quick
    assert quick.split()[-3:] == ["cifar10", "4", "5,000"]
    assert {line.split()[0] for line in lines if line.strip()} >= set(recipes())


def test_config_shows_what_training_would_take_and_is_a_config_itself(mheads, tmp_path):
    for options in ([], ["--no-describe"]):
        done = mheads("config", "digits", "loss=mcl", "loss.k=2", "split={conv1: [{conv2: 2}, 2]}", *options)
        assert done.code == 0
        assert ("# mcl, confident, scored: how many members learn from each example" in done.out) is (options == [])
        (tmp_path / "mine.yaml").write_text(done.out)
        assert load(str(tmp_path / "mine.yaml")) == load(
            "digits", ["loss=mcl", "loss.k=2", "split={conv1: [{conv2: 2}, 2]}"]
        )
    assert "'loss.k'" in mheads("config", "digits", "loss.kk=2").err


def test_longer_training_has_a_folder_of_its_own_unless_one_is_named(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for iterations in (2, 3):
        assert mheads("train", "digits", *QUICK, f"optim.iterations={iterations}").code == 0
    short, long = sorted(Path("runs").iterdir(), key=lambda run: result(run)["iterations"])
    assert (result(short)["iterations"], result(long)["iterations"]) == (2, 3)
    done = mheads("train", "digits", *QUICK, "optim.iterations=3", "--folder", short)
    assert done.code == 0
    assert "resuming at iteration 2 of 3" in done.out
    assert len(list(Path("runs").iterdir())) == 2


# Training.


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss.kk=1"], ["'loss.kk'", "'loss.k'"]),
        (["split=conv9"], ["'conv9'", "digits", "conv1, conv2, ip1, ip2"]),
        (["split=pool1"], ["'pool1'", "no parameters", "split at conv1, conv2, ip1"]),
        (["split=ip2"], ["'ip2'", "conv1, conv2, ip1"]),
        (["split={conv1: [2, 3]}"], ["5 leaves", "members is 4"]),
        (["split={conv2: {conv1: 4}}"], ["'conv1'", "downwards"]),
        (["device=gpu"], ["'gpu'", "cpu, cuda"]),
        (["device=meta"], ["'meta'", "cpu, cuda"]),
        (["init=nowhere"], ["nowhere'", "random, same"]),
        (["init=same"], ["init=same", "identical", "mcl"]),
        (["model=digit"], ["'digit'", "(did you mean digits?)", "package.module:factory"]),
        (["loss=mlc"], ["loss.name = 'mlc'", "package.module:factory of your own (did you mean mcl?)"]),
        (["optim.name=sdg"], ["optim.name = 'sdg'", "adadelta (did you mean sgd?)"]),
        (["optim.schedule=cosin"], ["optim.schedule.name = 'cosin'", "(did you mean cosine?)"]),
        (["sampling=bagin"], ["sampling.name = 'bagin'", "(did you mean bagging?)"]),
        (["data=cifar"], ["no dataset 'cifar' (did you mean cifar10?); there are digits"]),
        (["model=user_networks:half"], ["'user_networks:half'", "0.5", "Module"]),
        (["model=user_networks:nothing"], ["'user_networks:nothing'", "networks"]),
        (["model_args.clases=3"], ["'clases'", "digits"]),
        (["model_args.classes=7"], ["(7,)", "10 classes", "model_args.classes=10"]),
        (["model=helpers.timm_style:create_model", "model_args.model_name=resnet99"], ["failed with", "(resnet99)"]),
        (["model=cifar10_quick"], ["conv1", "(2, 1, 8, 8)"]),
        (
            ["model=user_networks:normalised", "engine.micro_batches=2"],
            ["micro_batches is 2", "norm", "micro_batches=1"],
        ),
        (
            ["model=user_networks:normalised", "engine.shared_micro_batches=2", "split=norm"],
            ["shared_micro_batches is 2", "norm", "shared_micro_batches=1"],
        ),
        (
            ["split=conv1", "engine.micro_batches=2", "engine.shared_micro_batches=5"],
            ["shared_micro_batches is 5", "engine.micro_batches is 2", "multiple"],
        ),
        (["loss.name=nowhere:f"], ["loss 'nowhere:f'", "importing"]),
        (["loss.name=user_networks:half"], ["'user_networks:half'", "float", "Loss"]),
        (["loss.name=user_networks:squared", "loss.args.pow=1"], ["'user_networks:squared'", "pow"]),
        (["loss={name: mcl, k: 5}", "init=same"], ["loss.k is 5", "4 members", "1 to 4"]),
        (["loss={name: mcl, k: 5, ce_weight: 0.1}"], ["loss.k is 5", "4 members", "1 to 4"]),
        (["loss=mcl", "loss.args.k=2"], ["loss.args = {'k': 2}", "mcl", "loss.k, loss.ce_weight"]),
        (["loss=score_averaged", "sampling=bagging"], ["sampling is bagging", "score_averaged", "sampling=full"]),
        (["data=digts"], ["'digts'", "digits, diabetes"]),
        (["data.name=npz"], ["'npz'", "data.path"]),
        (["data={name: npz, path: no.npz}"], ["no.npz", "does not exist"]),
        (["data={name: folder, path: nowhere}"], ["nowhere/train", "train/<class>"]),
        (["data.validation=5000"], ["5000", "1437"]),
        (["sampling={name: specialists, groups: [[0], [1], [2], [99]]}"], ["group 3", "99", "0 to 9"]),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(refused, overrides, parts):
    message = refused("train", "digits", *overrides, "--run", "run")
    for part in parts:
        assert part in message


def arrays(**changed):
    rng = np.random.default_rng(0)
    found = {
        "x_train": rng.integers(0, 17, (40, 1, 8, 8), dtype=np.uint8), "y_train": np.arange(40) % 10,
        "x_test": rng.integers(0, 17, (20, 1, 8, 8), dtype=np.uint8), "y_test": np.arange(20) % 10,
    }  # fmt: skip
    return found | changed


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"y_train": np.arange(40) - 3}, ["example 0", "-3", "0 to 36"]),
        ({"classes": np.array(["a", "b"])}, ["label 2", "2 classes", "0 to 1"]),
        ({"x_test": np.zeros((20, 1, 9, 9), np.uint8)}, ["(1, 8, 8)", "(1, 9, 9)"]),
        (
            {"x_train": np.zeros((40, 1, 12, 12), np.uint8), "x_test": np.zeros((20, 1, 12, 12), np.uint8)},
            ["ip1", "(2, 288)"],
        ),
        ({"y_train": np.linspace(0, 9, 40)}, ["train labels are floats", "same way"]),
        ({"x_test": np.zeros((0, 1, 8, 8), np.uint8), "y_test": np.zeros(0, int)}, ["no test examples", "validation"]),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(refused, tmp_path, changed, parts):
    np.savez(tmp_path / "mine.npz", **arrays(**changed))
    message = refused("train", "digits", "data={name: npz, path: mine.npz}", "--run", "run")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("spoil", ["truncated", "altered"])
def test_a_truncated_or_altered_data_file_is_refused(refused, tmp_path, save, spoil):
    save(tmp_path / "mine.npz", **arrays())
    content = bytearray((tmp_path / "mine.npz").read_bytes())
    content[300] ^= 255
    (tmp_path / "mine.npz").write_bytes(content if spoil == "altered" else content[: len(content) // 2])
    assert "mine.npz cannot be read" in refused("train", "digits", "data={name: npz, path: mine.npz}", "--run", "run")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["loss.k=2"], "loss.k is an option of mcl, confident, scored, and the loss is independent: give loss=mcl too"),
        (["loss=mcl", "loss.epsilon=0.3"], "loss.epsilon is an option of relaxed, and the loss is mcl"),
        (["loss={name: mcl, beta: 0.3}"], "loss.beta is an option of confident, and the loss is mcl"),
        (["loss.scale_rate=false"], "loss.scale_rate is an option of score_averaged, prob_averaged, and the loss is"),
        (["optim.schedule.every=5"], "optim.schedule.every is an option of step, sigmoid, and optim.schedule.name is"),
        (["optim={schedule: {name: step, at: [5]}}"], "optim.schedule.at is an option of multistep"),
        (
            ["optim.name=adagrad", "optim.momentum=0.9"],
            "optim.momentum is an option of sgd, adamw, adam, adadelta, muon",
        ),
        (["sampling=bagging", "sampling.fraction=0.5"], "give sampling.name=subset too, or leave it out"),
        (["data.resize=16"], "data.resize is an option of folder, list, and data.name is digits: give data=folder too"),
        (["data.regions.most=16"], "data.regions.most is an option of voc"),
        (["data.padding=reflect"], "data.padding = reflect, but data.pad is 0: give data.pad too"),
        (["optim.name=muon", "optim.regularization=l1"], "optim.regularization = l1 is not for muon"),
        (["teacher.weight=0.5"], "teacher.weight is about a teacher's answers, and there are none"),
        (["model=digit"], "model = 'digit': it is not known (did you mean digits?); there are digits, "),
    ],
)
def test_what_would_do_nothing_is_refused_by_train_and_config(refused, given, said):
    assert said in refused("train", "digits", *given)
    assert said in refused("config", "digits", *given)


def test_a_suite_is_no_recipe_and_the_hint_names_the_command_for_it(refused):
    assert "masks is a suite, which trains several runs: mheads reproduce masks" in refused("train", "masks")


def test_a_run_for_many_more_cores_than_there_are_is_warned_of(mheads, tmp_path):
    given = ["train", "digits", "optim.iterations=1", "data.limit=20", "members=1", "log.evaluate_every=0"]
    cores = 4 * available_cores() + 4
    done = mheads(*given, f"engine.cores={cores}", "-f", tmp_path / "many")
    assert done.code == 0 and f"engine.cores = {cores}, and {available_cores()} are here" in done.out
    assert "are here" not in mheads(*given, "engine.cores=2", "-f", tmp_path / "two").out


NOBODY = ["sampling=full", "optim.schedule=cosine", "loss=independent", "data=digits"]


def test_the_options_that_the_config_describes_as_somebodys_are_refused_for_others():
    sections = {"sampling": schema.Sampling, "optim": OptimOptions, "optim.schedule": ScheduleOptions}
    for section, kind in sections.items():
        names = (*OPTIMIZERS, *SCHEDULES, *SAMPLINGS)
        for key, field in kind.model_fields.items():
            before = [part.partition(":")[0] for part in str(field.description).split(";") if ":" in part]
            owners = [word for words in before for word in words.strip().split(", ") if word in names]
            assert options_without_effect.OPTIONS[f"{section}.name"].get(f"{section}.{key}", ()) == tuple(owners), key
    for chooser, options in options_without_effect.OPTIONS.items():
        for key, owners in options.items():
            nobody = [*NOBODY, f"optim.name={next(name for name in OPTIMIZERS if name not in owners)}"]
            with pytest.raises(package.UserError, match=f"{key} is an option of {', '.join(owners)}"):
                options_without_effect.check_idle_keys(load("digits", nobody), [key])
            if chooser not in ("sampling.name", "data.name"):  # which want files
                for name in owners:
                    options_without_effect.check_idle_keys(load("digits", [*nobody, f"{chooser}={name}"]), [key])


def test_an_option_that_did_nothing_does_not_keep_a_run_from_going_on(tmp_path, monkeypatch, mheads):
    command = ["train", "digits", "optim.schedule.every=7", "data.limit=50", "optim.batch_size=10"]
    with monkeypatch.context() as older:
        older.setattr(options_without_effect, "OPTIONS", {})
        assert mheads(*command, "optim.iterations=1", "--folder", tmp_path / "run").code == 0
    done = mheads(*command, "optim.iterations=2", "--folder", tmp_path / "run")
    assert done.code == 0 and "resuming at iteration 1 of 2" in done.out, done.err


def test_specialists_need_classes(refused):
    for given in ([], ["members=1"], ["sampling.groups=[[0], [0], [0], [0]]"]):
        said = refused("train", "diabetes", "sampling.name=specialists", *given)
        assert "sampling = specialists deals out examples by their class, and regression has none" in said


def in_ascii():
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


def test_letters_that_the_terminal_has_not_end_no_command(tmp_path):
    done = process("train", "diabetes", "optim.iterations=3", "--folder", tmp_path / "run", before=in_ascii)
    assert done.code == 0 and r"R\xb2" in done.out, done.err


def test_an_empty_class_folder_is_refused(refused, tmp_path):
    (tmp_path / "images/train/cat").mkdir(parents=True)
    message = refused("train", "digits", "data={name: folder, path: images}", "--run", "run")
    assert "images/train/cat holds no image" in message


def test_a_file_in_place_of_the_run_folder_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        assert f"cannot write the run folder {place}" in refused("train", "digits", *QUICK, "--run", place)


def test_a_folder_of_other_things_is_not_written_into(refused, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_text("mine")
    assert "photos is not empty and not a run folder" in refused("train", "digits", *QUICK, "--run", "photos")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_an_unwritable_place_is_refused(refused):
    assert "cannot write the run folder /proc/run" in refused("train", "digits", *QUICK, "--run", "/proc/run")


def test_a_run_of_another_config_shows_the_difference_and_stays(refused, copied):
    message = refused("train", "digits", *TINY, "seed=7", "optim.lr=0.5", "--run", copied)
    assert "seed: 0 in the folder, 7 now" in message
    assert "optim.lr: 0.01 in the folder, 0.5 now" in message
    assert "--force" in message


def test_force_starts_beside_a_run_and_never_over_it(mheads, copied):
    before = files(copied)
    for name in ("copied-2", "copied-3"):
        done = mheads("train", "digits", *TINY, "optim.iterations=2", "--force", "--run", copied)
        assert done.code == 0
        assert str(copied.with_name(name)) in done.out
        assert result(copied.with_name(name))["iterations"] == 2
    assert files(copied) == before


def test_a_run_on_data_that_changed_is_refused(mheads, refused, tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays())
    command = ["train", "digits", "data={name: npz, path: mine.npz}", "optim.iterations=2", "--run", "run"]
    assert mheads(*command).code == 0
    np.savez(tmp_path / "mine.npz", **arrays(y_train=np.arange(40)[::-1] % 10))
    assert "other data: checksum" in refused(*command)
    assert "other data than npz is now: checksum" in refused("eval", "run")


def test_a_folder_that_another_process_trains_in_is_refused(refused, copied):
    holder = os.open(copied / ".lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        message = refused("train", "digits", *TINY, "optim.iterations=30", "--run", copied)
    finally:
        os.close(holder)
    assert f"another process is training in {copied}" in message


def test_a_refused_config_gives_the_lock_back(mheads, copied):
    assert mheads("train", "digits", *TINY, "seed=7", "--run", copied).code == 2
    assert mheads("train", "digits", *TINY, "--run", copied).code == 0


def test_the_run_folder_is_named_after_the_recipe_and_found_again(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mheads("train", "digits", *QUICK).code == 0
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("digits-")
    assert "nothing to do" in mheads("train", "digits", *QUICK, "--quiet").out


def test_one_trained_model_can_be_forked_into_several(mheads, refused, tmp_path):
    assert mheads("train", "digits", *QUICK, "members=1", "--run", "one").code == 0
    assert mheads("train", "digits", *QUICK, "members=3", "loss=mcl", "init=one", "--run", "three").code == 0
    assert len(result(tmp_path / "three")["members"]) == 3
    assert "3 members, this run 2" in refused("train", "digits", *QUICK, "members=2", "init=three", "--run", "two")
    (tmp_path / "one/model.safetensors").unlink()
    assert "model.safetensors is missing" in refused("train", "digits", *QUICK, "members=2", "init=one", "--run", "two")
    (tmp_path / "one/result.json").unlink()
    assert "not finished" in refused("train", "digits", *QUICK, "members=2", "init=one", "--run", "two")


def test_an_image_folder_is_trained_and_asked(mheads, refused, tmp_path):
    rng = np.random.default_rng(0)
    for part, count in {"train": 6, "val": 3}.items():
        for name in ("cat", "[dog]"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 255, (20 + i, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    options = ["data={name: folder, path: images, resize: 10, crop: 8, mirror: true}", "model_args.channels=3"]
    options += ["model_args.classes=2", "optim.iterations=2", "optim.batch_size=4", "--run", "run"]
    assert mheads("train", "digits", *options).code == 0
    done = mheads("predict", "run", "images/val/cat/0.png")
    assert done.code == 0
    assert "[dog]" in done.out
    assert "there is no image missing.png" in refused("predict", "run", "missing.png")
    (tmp_path / "images/val/cat/0.png").write_bytes(b"no image")
    assert "0.png cannot be read as an image" in refused("predict", "run", "images/val/cat/0.png")


# Looking at runs.


def percent(values):
    return 100 * np.mean(values)


def recomputed(outputs, labels):
    """Every metric of result.json from outputs [M, N, C] and labels [N], in plain numpy."""
    m, n, c = outputs.shape
    logits = outputs.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    predictors = [*p, p.mean(0)]
    loss = -np.log(np.stack(predictors)[:, np.arange(n), labels])  # [M + 1, N]
    best = [np.argsort(-q, -1, kind="stable") for q in predictors]
    top = np.array(
        [[percent((b[:, : j + 1] == labels[:, None]).any(1)) for j in range(min(max(m, 10), c))] for b in best]
    )
    answers = np.stack([b[:, 0] for b in best[:m]])
    owner = loss[:m].argmin(0)

    def calibration(q):
        confidence, right = q.max(-1), q.argmax(-1) == labels
        bins = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
        return 100 * sum(abs((right[bins == i] - confidence[bins == i]).sum()) for i in range(15)) / n

    pairs = np.array([[percent(a != b) for b in answers] for a in answers])
    ownership = np.zeros((m, c), int)
    np.add.at(ownership, (owner, labels), 1)
    errors = [calibration(q) for q in predictors]
    brier = [((q - np.eye(c)[labels]) ** 2).sum(-1).mean() for q in predictors]
    return {
        "members": top[:m, 0],
        "single": top[:m, 0].mean(),
        "ensemble_mean": top[m, 0],
        "ensemble_mean_scores": percent(logits.mean(0).argmax(-1) == labels),
        "oracle": percent((answers == labels).any(0)),
        "oracle_by_loss": percent(answers[owner, np.arange(n)] == labels),
        "top_k": {"single": top[:m].mean(0), "ensemble_mean": top[m]},
        "nll": {"single": loss[:m].mean(), "ensemble_mean": loss[m].mean()},
        "calibration_error": {"single": np.mean(errors[:m]), "ensemble_mean": errors[m]},
        "brier": {"single": np.mean(brier[:m]), "ensemble_mean": brier[m]},
        "nll_by_members": [
            np.mean([-np.log(p[[*some]].mean(0)[np.arange(n), labels]).mean() for some in combinations(range(m), size)])
            for size in range(1, m + 1)
        ],
        "disagreement": pairs.sum() / (m * (m - 1)),
        "disagreement_pairs": pairs,
        "ownership": ownership,
        "examples": n,
        "oracle_chance": 100 * np.sort(np.bincount(labels))[::-1][:m].sum() / n,
    }


def rounded(value, digits):
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return np.round(np.asarray(value, float), digits).tolist()


def test_every_metric_follows_from_the_saved_outputs_to_the_last_digit(mheads, undisturbed, tmp_path):
    done = mheads("eval", undisturbed, "--trust", "--outputs", tmp_path / "o.npz")
    assert done.code == 0
    with np.load(tmp_path / "o.npz", allow_pickle=False) as file:
        expected = recomputed(file["outputs"], file["labels"])
        assert file["outputs"].shape == (3, 150, 10)
        assert file["classes"].tolist() == [str(c) for c in range(10)]
    shown = result(undisturbed)
    for name, value in expected.items():
        assert shown[name] == rounded(value, 6 if name in ("nll", "brier", "nll_by_members") else 4), name
    about_training = {"engine", "iterations", "learning", "machine", "parameters", "problem", "split", "versions"}
    assert set(shown) - set(expected) == about_training
    assert f"{shown['oracle']:.2f} %" in done.out


def test_a_folder_that_is_no_run_is_refused(refused, tmp_path):
    assert "is not a run folder" in refused("eval", tmp_path)
    assert "is not a run folder" in refused("predict", tmp_path / "nowhere", "a.png")


@pytest.mark.parametrize("name", ["config.yaml", "data.safetensors", "model.safetensors", "result.json"])
def test_a_damaged_file_of_a_run_is_named(refused, copied, name):
    (copied / name).write_bytes(b"{" + b"\xff" * 40)
    assert str(copied / name) in refused("eval", copied, "--trust")


def test_outputs_to_a_place_that_is_not_there_are_refused(refused, undisturbed, tmp_path):
    assert "no folder nowhere" in refused("eval", undisturbed, "--trust", "--outputs", "nowhere/o.npz")
    (tmp_path / "taken").mkdir()
    assert "cannot write taken: it is a folder; give a file in it" in refused(
        "eval", undisturbed, "--trust", "--outputs", "taken"
    )


def test_predict_shows_every_member_and_the_ensemble(mheads, undisturbed, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    done = mheads("predict", "--trust", undisturbed, tmp_path / "black.png")
    assert done.code == 0
    for text in ("member 0", "member 2", "Ensemble-Mean", "of 3 members agree"):
        assert text in done.out


def test_an_image_of_another_size_is_refused_or_resized(refused, mheads, undisturbed, tmp_path):
    Image.new("RGB", (9, 12)).save(tmp_path / "other.png")
    message = refused("predict", "--trust", undisturbed, "other.png")
    for part in ("9 x 12", "8 x 8", "--resize"):
        assert part in message
    assert mheads("predict", "--trust", undisturbed, "other.png", "--resize").code == 0


@pytest.mark.parametrize(("name", "content"), [("missing.png", None), ("text.png", b"no image")])
def test_an_image_that_cannot_be_read_is_refused(refused, undisturbed, tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert name in refused("predict", "--trust", undisturbed, name)


def test_the_tree_is_drawn_with_what_sharing_saves(mheads):
    done = mheads("tree", "cifar10_quick", "split=conv1")
    assert done.code == 0
    assert "trunk" in done.out
    assert f"{4 * 145578:,}" in done.out
    assert "sharing saves" in done.out


def test_the_tree_of_a_wrong_split_lists_the_layers(refused):
    assert "digits can be split at conv1, conv2, ip1\n" in refused("tree", "digits", "split=relu1")


def test_a_number_is_not_taken_for_the_layer_of_that_name_or_the_other_way_round(refused, mheads):
    """Layers of a plain nn.Sequential are called 0, 1, ...; a number says how many members share nothing."""
    recipe = ["tree", "digits", "model=user_networks:unnamed"]
    for number in (1, 3):
        err = refused(*recipe, "members=3", f"split={number}")
        assert f"split = {number} may be meant otherwise: the layer {number} is " in err
        assert f"""a shell leaves ('split="{number}"')""" in err and "leave it out" in err
    done = mheads(*recipe, "members=3", 'split="1"')
    assert done.code == 0 and "sharing saves" in done.out


def test_the_datasets_are_listed(mheads):
    done = mheads("data", "list")
    assert done.code == 0
    assert all(name in done.out for name in ("digits", "cifar10", "cifar100", "folder", "npz"))


def test_an_unknown_dataset_cannot_be_fetched(refused):
    assert "'nope'" in refused("data", "get", "nope")


def test_help_groups_the_commands_and_gives_an_example_of_each(mheads):
    done = mheads("--help")
    assert done.code == 0
    assert all(name in done.out for name in ("demo", "train", "eval", "predict", "tree", "data"))
    for command in ("demo", "train", "eval", "predict", "tree"):
        assert f"mheads {command}" in mheads(command, "--help").out


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], [], ["recipes"]], ids=" ".join)
def test_a_command_ends_quietly_when_the_reader_closes_the_pipe(command):
    """As in `mheads --help | head -1`: with the code of a process that SIGPIPE ends, and no word on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "mheads", *command]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_help_does_not_wait_for_torch():
    code = "import sys, mheads.cli.main; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment).stdout == b"False\n"


def test_an_unknown_command_or_option_is_exit_code_2(mheads):
    assert mheads("trian").code == 2
    assert mheads("train", "digits", "--rum", "x").code == 2


def test_a_process_that_fails_prints_the_message_alone():
    done = process("train", "digits", "loss.kk=1")
    assert done.code == 2
    assert done.err.splitlines() == ["error: digits: unknown key 'loss.kk'; did you mean 'loss.k'?"]
    assert done.out == ""


def test_the_demo_ends_with_a_table_a_picture_and_a_page(mheads, tmp_path, monkeypatch):
    from mheads.suites import demo

    shorter = {title: [*given, *QUICK, "pretrain=2"] for title, given in demo.ENSEMBLES.items()}
    monkeypatch.setattr(demo, "ENSEMBLES", shorter)
    monkeypatch.setenv("COLUMNS", "80")
    done = mheads("demo", "--run", tmp_path / "demo")
    assert done.code == 0
    for text in ("single model", "TreeNet, conv1", "MCL, k=1", "Oracle", "seconds"):
        assert text in done.out
    assert (tmp_path / "demo/ownership.png").read_bytes().startswith(b"\x89PNG")
    assert done.out.splitlines()[-1] == f"All of it, to open in a browser: {tmp_path / 'demo/report.html'}"
    assert "Four ways to use four networks" in (tmp_path / "demo/report.html").read_text()


def test_the_package_names_are_all_there():
    assert all(hasattr(package, name) for name in package.__all__)


# Odd places.


def test_a_current_folder_that_is_gone_is_a_message(mheads, tmp_path):
    (tmp_path / "gone").mkdir()
    before = os.getcwd()
    os.chdir(tmp_path / "gone")
    try:
        (tmp_path / "gone").rmdir()
        done = mheads("train", "digits", *QUICK)
    finally:
        os.chdir(before)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: the current folder is gone (No such file or directory): change to one that is there\n"


LONG = "x" * 5000


@pytest.mark.parametrize(
    "command",
    [
        ["train", LONG],
        ["train", "digits", *QUICK, "--folder", LONG],
        ["train", "digits", "data.name=npz", f"data.path={LONG}"],
        ["train", "digits", "data.name=folder", f"data.path={LONG}"],
        ["train", "cifar10_quick", f"data.root={LONG}"],
        ["train", "digits", f"init={LONG}"],
        ["eval", LONG],
        ["predict", LONG, LONG],
        ["demo", "--folder", LONG],
        ["config", f"{LONG}.yaml"],
    ],
)
def test_a_path_that_is_too_long_is_a_message(refused, command):
    assert re.search("too long|no file .*characters", refused(*command))


def test_a_name_that_is_not_utf8_is_refused_or_read_and_shown_with_a_question_mark(refused, mheads, tmp_path):
    odd = os.fsdecode(b"odd\xff")
    for command in (["train", "digits", *QUICK, "--folder", odd], ["eval", odd], ["demo", "--folder", odd]):
        assert "odd?" in refused(*command)
    (tmp_path / odd).write_text("members: 2\nloss.kk: 3\n")
    assert "odd?: unknown key 'loss.kk'" in refused("config", odd)
    (tmp_path / odd).write_text("members: 2\n")
    assert "members: 2 " in mheads("config", odd).out


def test_data_whose_path_no_config_can_hold_is_refused(refused, tmp_path, monkeypatch):
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    assert "YAML" in refused("train", "digits", "data.name=npz", f"data.path={odd}/x.npz")
    monkeypatch.chdir(odd)
    assert "its name is not UTF-8" in refused("train", "digits", "data.name=npz", "data.path=x.npz")


def test_no_home_folder_is_a_message(refused, mheads, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "MHEADS_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    assert "set MHEADS_DATA" in refused("train", "cifar10_quick")
    assert "mheads data get cifar10" in mheads("data", "list").out
