"""`mheads reproduce`: what is trained, what is reused, what is written, and what stops it."""

import io
import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from importlib import resources

import numpy as np
import pytest
import rich.console
import torch
from helpers.commands import process, weights
from matplotlib.image import imread
from safetensors.torch import save_file

from mheads.api.evaluate import evaluate_run
from mheads.common.atomic_files import hold_lock
from mheads.common.errors import UserError
from mheads.common.number_words import duration
from mheads.common.progress import Silent
from mheads.config.read import load
from mheads.networks.digits import digits
from mheads.problems.metrics import compute
from mheads.runs.checkpoint import Checkpoints
from mheads.runs.folder import RunFolder
from mheads.suites import dry_run, run_entries
from mheads.suites import results as documents
from mheads.suites.dry_run import print_plan_of_all
from mheads.suites.jobs import Options
from mheads.suites.planner import Planner
from mheads.suites.progress_line import Overview
from mheads.suites.reproduce import Reproduction, SuiteRequest, for_each, reproduce
from mheads.suites.run_entries import digest_job
from mheads.suites.suite import read_suite
from mheads.trees.treenet import TreeNet

TINY = ["data.limit=60", "optim.iterations=4", "optim.batch_size=20", "log.every=1"]
MINE = """# Does MCL need its own suite?
metrics: [members, single, oracle, train_loss]
rows:
  - {name: plain}
  - {name: mcl, set: [loss=mcl, loss.k=1, 'init=<run:plain>']}
  - {name: one, from: plain, metrics: {oracle: single, train_loss: member_train_loss}}
paper: {digits: {plain: {oracle: [99.5, 0.1]}}}
claims:
  - {order: [mcl, plain, one], by: oracle}
  - {say: nobody is lost, left: mcl.evenness, is: above, right: 0.1 * plain.evenness}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


@pytest.fixture
def refused(mheads, here):
    """Runs a command that must be refused: exit code 2, the message, no traceback, and nothing written or changed."""

    def contents():
        return {p.relative_to(here): p.stat().st_mtime_ns for p in here.rglob("*") if p.is_file()}

    def run(*args):
        before = contents()
        done = mheads("reproduce", *args)
        assert done.code == 2, done.out + done.err
        assert "Traceback" not in done.err
        assert contents() == before
        return done.err

    return run


def results(folder, name="mine-digits"):
    """The document without its checksum, so that it may be changed and written back."""
    found = json.loads((folder / "results" / f"{name}.json").read_text())
    del found["checksum"]
    return found


def trained_at(folder):
    return {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("runs/**/model.safetensors")}


def test_a_suite_of_the_users_own_runs_once_and_is_written_as_tables(mheads, here):
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--trials", 2, *TINY)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "4 runs to train, 0 finished"
    # The first seed of all rows comes first, and a run after the one that it starts from.
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["1/4", "plain-seed0"], ["2/4", "mcl-seed0"], ["3/4", "plain-seed1"], ["4/4", "mcl-seed1"],
    ]  # fmt: skip
    found = results(here)
    assert {row: [run["seed"] for run in runs] for row, runs in found["runs"].items()} == {
        "plain": [0, 1], "mcl": [0, 1],
    }  # fmt: skip
    folder = here / "runs/reproduce/digits/plain-seed1"
    told, kept = json.loads((folder / "result.json").read_text()), found["runs"]["plain"][1]
    assert kept["result"]["oracle"] == told["oracle"] and kept["result"]["members"] == told["members"]
    assert kept["versions"] == told["versions"]
    assert kept["command"].endswith("seed=1 -f runs/reproduce/digits/plain-seed1")
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-2]
    assert kept["result"]["train_loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert kept["result"]["member_train_loss"] == pytest.approx(np.mean(last["member_losses"]), abs=1e-6)
    assert str(here) not in (here / "results/mine-digits.json").read_text()

    table = (here / "results/mine-digits.md").read_text()
    oracles = [run["result"]["oracle"] for run in found["runs"]["plain"]]
    mean, std = np.mean(oracles), np.std(oracles, ddof=1)
    assert "Does MCL need its own suite?" in table
    assert f"| {mean:.2f} ± {std:.2f} |" in table
    assert "| Oracle: mcl > plain > one |" in table and "nobody is lost" in table
    assert "By a paired t-test over seeds (n = 2), two-sided at 5 %." in table and "; 2 seeds, p = " in table
    # The paper's figure is of full training.
    assert "99.50" not in table and f"its runs are others: here {', '.join(TINY[:3])} are set." in table
    assert table in (here / "results/README.md").read_text()
    assert imread(here / "results/mine-digits.png").std() > 0.05

    times = trained_at(here)
    again = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--trials", 2, *TINY)
    assert again.code == 0 and again.out.startswith("0 runs to train, 4 finished")
    assert trained_at(here) == times and results(here) == found

    # However the folder is spelled, and wherever it has been moved, its runs are known by what they started from.
    (here / "deep").mkdir()
    (here / "link").symlink_to(here / "runs", target_is_directory=True)
    shutil.copytree(here / "runs", here / "moved")
    shutil.move(here / "moved/reproduce/digits/plain-seed0", here / "plain-seed0")
    (here / "moved/reproduce/digits/plain-seed0").symlink_to(here / "plain-seed0")
    for folder in ("deep/../runs/reproduce", "link/reproduce", "moved/reproduce", here / "link/../runs/reproduce"):
        dry = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--trials", 2, *TINY, "-f", folder, "--dry-run")
        assert dry.code == 0 and "0 runs to train" in dry.out, (folder, dry.out, dry.err)
    alone = ["train", "digits", *TINY, "loss=mcl", "loss.k=1", "-f", "runs/reproduce/digits/mcl-seed0"]
    assert mheads(*alone, "init=moved/reproduce/digits/plain-seed0").code == 0
    assert mheads(*alone, "init=moved/reproduce/digits/plain-seed1").code == 2  # other weights
    assert trained_at(here)["mcl-seed0"] == times["mcl-seed0"]

    # Without the runs, tables are made anew from the JSON files alone.
    page = (here / "results/README.md").read_text()
    shutil.rmtree(here / "runs")
    for name in ("README.md", "mine-digits.md", "mine-digits.png"):
        (here / "results" / name).unlink()
    assert mheads("reproduce", "--tables").code == 0
    assert (here / "results/README.md").read_text() == page and (here / "results/mine-digits.png").exists()
    assert mheads("reproduce", "mine.yaml", "--recipe", "digits", "--tables", *TINY).code == 0
    assert results(here)["runs"] == found["runs"] and not (here / "runs").exists()

    # With the runs, and without the files, all seeds are found again.
    args = ["mine.yaml", "--recipe", "digits", *TINY, "-f", "moved/reproduce", "-o", "new"]
    assert mheads("reproduce", *args, "--tables").code == 0
    again = json.loads((here / "new/mine-digits.json").read_text())["runs"]
    assert {row: len(runs) for row, runs in again.items()} == {"plain": 2, "mcl": 2}


def test_a_run_is_shown_in_every_suite_that_has_its_row_also_where_it_is_gone(mheads, here):
    """By its name and its config; it is trained again only if it is asked for."""
    assert mheads("reproduce", "mine.yaml", "--recipe", "digits", "--trials", 2, "--only", "plain", *TINY).code == 0
    kept = results(here)["runs"]["plain"]
    shutil.rmtree(here / "runs")
    rows = "[{name: plain}, {name: wide, set: [members=5]}, {name: mcl, set: [loss=mcl]}, {name: all, from: plain}]"
    (here / "other.yaml").write_text(f"metrics: [oracle]\nrows: {rows}\n")
    (here / "third.yaml").write_text("metrics: [oracle]\nrows: [{name: plain, set: [members=5]}, {name: again}]\n")
    (here / "results/torn.json").write_text("{")
    tiny = ["--recipe", "digits", *TINY]
    assert mheads("reproduce", "other.yaml", "--only", "wide", *tiny).code == 0
    assert list(trained_at(here)) == ["wide-seed0"]
    found = results(here, "other-digits")
    assert found["runs"]["plain"] == kept and set(found["runs"]) == {"plain", "wide"}
    assert found["command"].startswith("mheads reproduce other.yaml --recipe digits --trials 2")
    assert "2 runs to train" in mheads("reproduce", "other.yaml", "--dry-run", *tiny).out  # plain and mcl
    # Of the same name but another config, or of the same config but another name: another run.
    assert mheads("reproduce", "third.yaml", "--tables", *tiny).code == 0
    assert results(here, "third-digits")["runs"] == {}


def shown_elsewhere(here, first, second, row, recipes=("digits", "digits")):
    """Whether the run of a row of the first suite, kept as results alone, is shown in the second."""
    for name, rows, recipe in zip(("first", "second"), (first, second), recipes, strict=True):
        (here / f"{name}.yaml").write_text(f"metrics: [oracle]\nrows: {rows}\n")
        suite, planner = read_suite(f"{name}.yaml"), Planner(Options(recipe))
        found, table = documents.make_document(planner.expand(suite), planner), planner.expand(suite)
        if name == "first":
            job = planner.job(suite, row, 0)
            kept = run_entry(0, digest_job(job)) | {"command": planner.command(job)}
            found["runs"][planner.key(suite, job)] = [kept]
            (here / "results").mkdir(exist_ok=True)
            documents.save(found, here / "results/first.json")
        else:
            documents.merge(found, here / "results/second.json", table, planner, [0])
    return [kept] in found["runs"].values()


def test_a_run_elsewhere_is_the_same_only_if_all_that_decides_it_is(here):
    tuned = "{name: tuned, set: ['init=<run:base>', loss=mcl]}"
    base = f"[{{name: base, set: [optim.lr=0.1]}}, {tuned}]"
    assert shown_elsewhere(here, base, base, "tuned")
    assert not shown_elsewhere(here, base, base.replace("0.1", "0.2"), "tuned")  # from other weights
    rounds = "[{name: classical, rounds: 1}]"
    assert shown_elsewhere(here, rounds, rounds, "classical")
    assert not shown_elsewhere(here, rounds, rounds.replace("1", "3"), "classical")
    assert not shown_elsewhere(here, rounds, "[{name: classical}]", "classical")
    # Data of one's own, of which a file of results knows no more than the name.
    for folder in ("x", "y"):
        (here / folder).mkdir()
        (here / folder / "mine.yaml").write_text(f"data: {{name: npz, path: {folder}/set.npz}}\n")
    assert not shown_elsewhere(here, "[{name: plain}]", "[{name: plain}]", "plain", ("x/mine.yaml", "y/mine.yaml"))


def test_a_row_that_is_taken_out_of_a_suite_is_told_unless_its_run_is_kept_elsewhere(mheads, refused, here):
    (here / "other.yaml").write_text("metrics: [oracle]\nrows: [{name: plain}, {name: more, set: [members=5]}]\n")
    tiny = ["--recipe", "digits", *TINY]
    assert mheads("reproduce", "mine.yaml", "--only", "plain", *tiny).code == 0
    assert mheads("reproduce", "other.yaml", "--only", "more", *tiny).code == 0
    assert set(results(here, "other-digits")["runs"]) == {"plain", "more"}
    (here / "other.yaml").write_text("metrics: [oracle]\nrows: [{name: more, set: [members=5]}]\n")
    assert mheads("reproduce", "other.yaml", "--tables", *tiny).code == 0
    assert set(results(here, "other-digits")["runs"]) == {"more"}
    (here / "other.yaml").write_text("metrics: [oracle]\nrows: [{name: less, set: [members=3]}]\n")
    assert "holds a run that is not of this suite: more with seed 0" in refused("other.yaml", "--dry-run", *tiny)


def test_one_row_alone_leaves_the_others_as_not_run(mheads, here):
    done = mheads("reproduce", "standard", "--recipe", "digits", "--only", "bagging", *TINY)
    assert done.code == 0, done.err
    assert list(trained_at(here)) == ["bagging-seed0"]
    table = (here / "results/standard-digits.md").read_text()
    assert "Not run: single, one_network, random_init, combined, unique_subset.\n" in table
    assert "| bagging | 1 |" in table and "| random_init |" not in table
    assert "claims of which nothing is known yet (random_init not run, unique_subset not run)" in done.out


def test_a_run_trained_by_hand_is_reused_whatever_its_log_and_workers(mheads, here):
    folder = here / "runs/reproduce/digits/random_init-seed0"
    given = [*TINY, "log.every=3", "engine.workers=1", "timeout=5"]
    assert mheads("train", "digits", *given, "seed=0", "-f", folder).code == 0
    # As an older version left it, which did not know a key yet.
    run = RunFolder(folder)
    text = run.config.read_text()
    assert "init_map: {}\n" in text
    run.write(run.config, text.replace("init_map: {}\n", "").encode())
    before = trained_at(here)
    done = mheads("reproduce", "standard", "--recipe", "digits", "--only", "single", *TINY)
    assert done.code == 0 and "0 runs to train, 1 finished" in done.out
    assert trained_at(here) == before
    assert len(results(here, "standard-digits")["runs"]["random_init"]) == 1


@pytest.mark.parametrize("given", [["optim.lr=0.5"], ["optim.iterations=5"]])
def test_a_folder_of_another_config_in_the_way_is_refused(mheads, refused, here, given):
    folder = here / "runs/reproduce/digits/combined-seed0"
    assert mheads("train", "digits", *TINY, "sampling=bagging", *given, "-f", folder).code == 0
    message = refused("standard", "--recipe", "digits", *TINY)
    assert "runs/reproduce/digits/combined-seed0 is in the way" in message
    assert given[0].partition("=")[0] in message and "--folder" in message


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["standard, tree, averaged, mcl"]),
        (["standrd"], ["'standrd'", "did you mean standard?", "mcl, pretrain"]),
        (
            ["standard", "--only", "bagged"],
            ["'bagged'", "did you mean bagging?", "single, one_network, random_init, bagging"],
        ),
        (["standard", "--recipe", "digit"], ["'digit'", "did you mean digits?"]),
        (["standard", "--scale", "0"], ["--scale 0", "above 0"]),
        (["standard", "--scale", "1.5"], ["--scale 1.5"]),
        (["standard", "--trials", "0"], ["--trials 0"]),
        (["standard", "--seed", "-1"], ["--seed -1"]),
        (["standard", "seed=3"], ["--seed"]),
        (["standard", "data.validation=10"], ["--validation"]),
        (["standard", "--test"], ["--test", "--validation N"]),
        (["standard", "loss.kk=3"], ["'loss.kk'"]),
        (["--tables"], ["results holds no results"]),
        (["--tables", "--recipe", "digits", "--only", "plain"], ["--recipe, --only: without a suite", "give a suite"]),
        (["--tables", "--trials", "3", "--test"], ["--test, --trials: without a suite"]),
        (["standard", "--tables", "--dry-run"], ["--dry-run", "leave one out"]),
        (["--merge", "elsewhere", "--dry-run", "-o", "new"], ["--dry-run", "leave one out"]),
        (["mine.yaml", "--recipe", "digits", "--only", "two"], ["mine has no row 'two'", "plain, mcl, one"]),
    ],
)
def test_bad_input_is_refused(refused, args, parts):
    message = refused(*args)
    assert all(part in message for part in parts), message


def test_a_figure_of_the_paper_for_no_row_is_refused(refused, here):
    (here / "mine.yaml").write_text(MINE.replace("plain: {oracle: [99", "plan: {oracle: [99"))
    assert "'plan'" in refused("mine.yaml", "--recipe", "digits")


def test_figures_of_the_paper_are_not_shown_beside_a_file_of_the_recipes_name(mheads, here):
    (here / "digits.yaml").write_text(
        "model: digits\nmembers: 4\ndata: {name: digits, limit: 60}\noptim: {iterations: 3, batch_size: 20}\n"
    )
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits.yaml", "--only", "plain")
    assert done.code == 0, done.err
    table = (here / "results/mine-digits.md").read_text()
    assert "here digits is a file of this name, not the recipe of the package." in table and "99.50" not in table
    assert mheads("reproduce", "mine.yaml", "--recipe", "digits", "--tables", "-f", "new", "-o", "new").code == 0
    assert "is a file of this name" not in (here / "new/mine-digits.md").read_text()


def test_results_with_other_overrides_or_of_another_experiment_are_not_mixed(mheads, refused, here):
    run = ["mine.yaml", "--recipe", "digits", "--only", "plain", *TINY]
    assert mheads("reproduce", *run).code == 0
    assert "-o" in refused(*run[:-1], "log.every=2", "-f", "elsewhere")
    (here / "mine.yaml").write_text(MINE.replace("{name: plain}", "{name: plain, set: [optim.lr=0.03]}"))
    message = refused(*run, "-f", "elsewhere")
    assert "plain with seed 0" in message and "mine-digits.json" in message


def other_recipe(here, *rows):
    """A recipe of the user's own that differs, and a suite with these rows."""
    (here / "other.yaml").write_text(
        (resources.files("mheads.config.recipes") / "digits.yaml").read_text() + "pretrain: 3\n"
    )
    (here / "mine.yaml").write_text("".join(["metrics: [members]\nrows:\n", *(f"  - {row}\n" for row in rows)]))


def test_runs_of_another_recipe_stay_apart_from_rows_of_the_same_name(here):
    other_recipe(here, "{name: random_init}", "{name: far, from: 'other.yaml:standard/random_init'}")
    planner = Planner(Options("digits"))
    suite = read_suite("mine.yaml")
    found = documents.make_document(planner.expand(suite), planner)
    assert [entry["run"] for entry in found["rows"]] == ["random_init", "other/random_init"]
    digests = [digest_job(planner.job(suite, row, 0)) for row in ("random_init", "far")]
    assert len(set(digests)) == 2


def run_entry(seed, config, **result):
    found = {"problem": "classification", "members": [50.0], "single": 50.0, "seconds": 1.0, **result}
    return {"seed": seed, "config": config, "command": "mheads train", "result": found,
            "versions": {"mheads": "0.1.0"}, "machine": "none"}  # fmt: skip


def written(here, name="plain", **changes):
    """Writes results of one run, with these keys changed, and returns their file."""
    (here / "results").mkdir(exist_ok=True)
    found = {"suite": name, "recipe": "digits", "members": 1, "scale": 1, "validation": 0, "overrides": [],
             "command": "mheads reproduce", "metrics": ["members", "oracle"], "rows": [{"name": "a", "run": "a"}],
             "claims": [], "runs": {"a": [run_entry(0, "abc")]}, **changes}  # fmt: skip
    path = here / f"results/{name}-digits.json"
    path.write_text(json.dumps(found))
    return path


RUN = run_entry(0, "abc")


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "a"},
        {"rows": [{"name": "a"}]},
        {"rows": [{"name": "a", "run": "a", "paper": {"oracle": "high"}}]},
        {"rows": [{"name": "a", "run": "a", "metrics": {"members": "oracle"}}]},
        {"claims": [{"left": "a", "is": "better", "right": "a.oracle"}]},
        {"claims": [{"left": "a.oracle", "is": "nicer", "right": "a.oracle"}]},
        {"claims": [{"left": "a.oracle", "right": "a.oracle"}]},
        {"claims": [{"order": ["a"]}]},
        {"runs": [RUN]},
        {"runs": {"a": [{}]}},
        {"runs": {"a": [{**RUN, "seed": "0"}]}},
        {"runs": {"a": [{**RUN, "seed": -1}]}},
        {"runs": {"a": [{**RUN, "result": {"oracle": {"deep": 1}}}]}},
        {"runs": {"a": [run_entry(0, "abc", members=50.0)]}},
        {"runs": {"a": [run_entry(0, "abc", oracle="high")]}},
        {"runs": {"a": [RUN, RUN]}},
        {"runs": {"a": [run_entry(0, "abc", problem=["classification"])]}},
        {"scale": "1"},
        {"overrides": None},
    ],
)
def test_a_deformed_file_of_results_is_named_and_the_others_are_shown(mheads, here, changes):
    bad = written(here, "bad", **changes)
    written(here)
    (here / "results/notes.json").write_text("[1, 2]")
    done = mheads("reproduce", "--tables")
    assert done.code == 0 and "Traceback" not in done.err, done.err
    assert f"left out: results/{bad.name} is not a file of results (" in done.out
    assert "left out: results/notes.json" in done.out and "results/plain-digits.json read" in done.out
    assert (here / "results/README.md").read_text().count("## ") == 1


def test_a_claim_of_no_rows_is_refused_or_with_few_members_left_out(mheads, refused, here):
    (here / "mine.yaml").write_text("rows:\n  - {name: a}\nclaims:\n  - {order: [], by: oracle}\n")
    assert "claim number 1: order = []" in refused("mine.yaml", "--recipe", "digits")
    (here / "mine.yaml").write_text("rows:\n  - {name: a}\nclaims:\n  - {order: ['k<1..M-1>'], by: oracle}\n")
    planner = Planner(Options("digits", overrides=("members=1",)))
    assert planner.expand(read_suite("mine.yaml")).claims == []


def test_two_processes_on_one_suite_keep_each_others_runs(here):
    one, other = (
        Reproduction(
            SuiteRequest("mine.yaml", Options("digits"), folder=here / "runs", output=here / "out"),
            rich.console.Console(file=io.StringIO()),
        )
        for _ in range(2)
    )
    for process_of, row in ((one, "plain"), (other, "mcl")):
        job = process_of.planner.job(process_of.suite, row, 0)
        process_of.document["runs"][row] = [run_entry(0, digest_job(job))]
        process_of.publish(show=False)
    one.publish(show=False)
    assert set(documents.load(here / "out/mine-digits.json")["runs"]) == {"plain", "mcl"}
    saving = threading.Thread(target=other.publish, args=(False,))
    with documents.lock(here / "out"):
        saving.start()
        saving.join(0.2)
        assert saving.is_alive()  # it waits
    saving.join()


def test_a_run_that_another_process_finished_meanwhile_has_not_failed(mheads, here, monkeypatch):
    train = Reproduction._train

    def beaten(self, job, watch):
        train(self, job, watch)
        raise UserError(f"another process is training in {job.path}")

    monkeypatch.setattr(Reproduction, "_train", beaten)
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY)
    assert done.code == 0, done.err
    assert len(results(here)["runs"]["plain"]) == 1


@pytest.mark.parametrize("place", ["mine.yaml", "mine.yaml/deep", "full"])
def test_a_place_that_takes_no_results_is_refused_before_training(refused, here, place):
    (here / "full/mine-digits.json").mkdir(parents=True)
    message = refused("mine.yaml", "--recipe", "digits", *TINY, "-o", place)
    assert place in message and "give another folder with -o" in message


def test_a_run_that_another_starts_from_is_not_taken_for_it(mheads, here):
    other_recipe(here, "{name: random_init, set: ['init=<run:other.yaml:standard/random_init>']}")
    assert mheads("train", "other.yaml", *TINY, "-f", "runs/reproduce/other/random_init-seed0").code == 0
    (here / "other.yaml").write_text((here / "runs/reproduce/other/random_init-seed0/config.yaml").read_text())
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--tables")
    assert done.code == 0, done.err
    assert results(here)["runs"] == {}  # the donor's figures are not this row's


def test_runs_of_data_that_changed_are_not_averaged_with_those_before(mheads, here):
    def data(seed):
        x, y = np.random.default_rng(seed).integers(0, 17, (60, 1, 8, 8)).astype(np.uint8), np.arange(60) % 10
        np.savez(here / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    args = ["mine.yaml", "--recipe", "digits", *TINY, "data.name=npz", "data.path=data.npz", "--only", "plain"]
    data(0)
    assert mheads("reproduce", *args).code == 0
    data(1)
    done = mheads("reproduce", *args, "--trials", "2")
    assert done.code == 2 and "plain-seed1 has other data than plain-seed0 had (checksum" in done.err
    assert "plain-seed0 away, and it is trained anew" in done.err
    assert list((here / "runs/reproduce/digits").iterdir()) == [here / "runs/reproduce/digits/plain-seed0"]
    shutil.rmtree(here / "runs/reproduce/digits/plain-seed0")
    assert mheads("reproduce", *args, "--trials", "2").code == 0
    data(0)
    assert mheads("reproduce", *args, "--trials", "2").code == 0  # the table of what is there
    shutil.rmtree(here / "runs/reproduce/digits/plain-seed0")
    assert mheads("train", "digits", *TINY, *args[-4:-2], "-f", here / "runs/reproduce/digits/plain-seed0").code == 0
    done = mheads("reproduce", *args, "--trials", "2")
    assert done.code == 2 and "plain-seed1 has other data than plain-seed0 had" in done.err


def test_results_of_other_data_or_code_are_not_averaged_with_those_before(mheads, here):
    """Also where the other runs are in other folders, or were of a file of the same name."""
    for seed in (0, 1):
        x, y = np.random.default_rng(seed).integers(0, 17, (60, 1, 8, 8)).astype(np.uint8), np.arange(60) % 10
        (here / str(seed)).mkdir()
        np.savez(here / str(seed) / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    args = ["mine.yaml", "--recipe", "digits", *TINY, "data.name=npz", "--only", "plain"]
    assert mheads("reproduce", *args, f"data.path={here}/0/data.npz").code == 0
    before = results(here)
    done = mheads("reproduce", *args, f"data.path={here}/1/data.npz", "--seed", "1", "-f", "others")
    assert done.code == 2 and "plain-seed1 has other data than seed 0 has in the results" in done.err
    assert results(here)["runs"] == before["runs"] and not list(here.glob("others/*/*/model.safetensors"))
    marks = {"data": before["runs"]["plain"][0]["marks"]["data"], "code": "of another version"}
    before["runs"]["plain"][0]["marks"] = marks
    (here / "results/mine-digits.json").write_text(json.dumps(before))
    done = mheads("reproduce", *args, f"data.path={here}/0/data.npz", "--seed", "1")
    assert done.code == 2 and "other code of its network or loss" in done.err


def test_runs_start_from_others_in_folders_of_any_name(here):
    folder = here / "runs #2: {x}"
    job = Planner(Options("digits", overrides=tuple(TINY)), folder).job(read_suite("mine.yaml"), "mcl", 0)
    assert job.config.init == str(folder / "digits" / "plain-seed0")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("sampling={name: file, path: FILE}", "other sample weights or answers of a teacher"),
        ("teacher.answers=FILE", "other sample weights or answers of a teacher"),
        ("init=FILE", "other initial weights"),
    ],
)
def test_runs_of_a_file_that_changed_are_not_averaged_with_those_before(mheads, here, row, words):
    file = here / ("given.safetensors" if "init" in row else "given.npz")

    def write(seed):
        generator = np.random.default_rng(seed)
        if "init" in row:
            net = TreeNet(digits, members=1, seed=seed)
            save_file({k: v.contiguous() for k, v in net.member(0).state_dict().items()}, file)
        else:
            answers = generator.dirichlet(np.ones(10), 60)
            np.savez(file, sample_weights=generator.random((4, 60)), answers=answers.astype(np.float32))

    suite = {"metrics": ["oracle"], "rows": [{"name": "a", "set": [row.replace("FILE", str(file)), "loss=mcl"]}]}
    (here / "given.yaml").write_text(json.dumps(suite))
    args = ["given.yaml", "--recipe", "digits", *TINY]
    write(0)
    assert mheads("reproduce", *args).code == 0
    write(1)
    done = mheads("reproduce", *args, "--trials", "2")
    assert done.code == 2 and f"a-seed1 has {words} than a-seed0 had (checksum" in done.err, done.err
    write(0)
    done = mheads("reproduce", *args, "--trials", "2")
    assert done.code == 0, done.err


def test_a_recipe_with_few_trials_has_no_seeds_beyond_them(mheads, refused, here):
    (here / "few.yaml").write_text("rows: [{name: plain}]\nrecipes: {digits: {trials: 3}}\n")
    given = ["few.yaml", "--recipe", "digits", *TINY]
    done = mheads("reproduce", *given, "--seed", 2, "--trials", 3, "--dry-run")
    assert done.code == 0 and "1 run to train" in done.out and "plain-seed2" in done.out
    assert mheads("reproduce", *given, "--seed", 2, "--trials", 3, "--tables").code == 0
    assert results(here, "few-digits")["command"].startswith("mheads reproduce few.yaml --recipe digits --seed 2 data")
    message = refused(*given, "--seed", 3, "-o", "other")
    assert "--seed 3: few has 3 trials with digits; give a seed below 3" in message


def test_rows_with_a_teacher_stand_beside_rows_without_and_with_another_weight(mheads, here):
    np.save(here / "a.npy", np.full((60, 10), 0.1, np.float32))
    rows = [{"name": "none"}]
    rows += [{"name": f"w_{w}", "set": [f"teacher.answers={here / 'a.npy'}", f"teacher.weight={w}"]} for w in (0.3, 1)]
    (here / "taught.yaml").write_text(json.dumps({"metrics": ["oracle"], "rows": rows}))
    done = mheads("reproduce", "taught.yaml", "--recipe", "digits", *TINY)
    assert done.code == 0, done.err
    assert len(trained_at(here)) == 3


def test_figures_of_another_test_set_are_measured_anew(mheads, here):
    def data(seed):
        x, y = np.random.default_rng(0).integers(0, 17, (90, 1, 8, 8)).astype(np.uint8), np.arange(90) % 10
        np.savez(here / "data.npz", x_train=x, y_train=y, x_test=x[seed:], y_test=y[seed:])

    args = ["mine.yaml", "--recipe", "digits", *TINY, "data.name=npz", "data.path=data.npz", "--only", "plain"]
    args += ["--validation", 20]
    data(0)
    for further in ([], ["--test"]):
        done = mheads("reproduce", *args, *further)
        assert done.code == 0, done.err

    def examples():
        return results(here, "mine-digits-validation20-test")["runs"]["plain"][0]["result"]["examples"]

    assert examples() == 60  # of the limit
    data(50)
    assert mheads("reproduce", *args, "--test").code == 0
    assert examples() == 40
    (here / "data.npz").unlink()
    assert mheads("reproduce", *args[:-2], "--validation", 20, "--test", "--tables").code == 0
    assert examples() == 40  # without the data what was measured stands


def test_runs_of_a_network_whose_code_changed_are_not_averaged_with_those_before(here):
    def network(units):
        layers = f"nn.Flatten(), nn.Linear(64, {units}), nn.ReLU(), nn.Linear({units}, 10)"
        (here / "my_net.py").write_text(f"from torch import nn\n\n\ndef net():\n    return nn.Sequential({layers})\n")

    args = ["reproduce", "mine.yaml", "--recipe", "digits", *TINY, "model=my_net:net", "--only", "plain"]
    network(12)
    for trials in (1, 2):
        done = process(*args, "--trials", trials)
        assert done.code == 0, done.err
    network(2)
    done = process(*args, "--trials", 3)
    assert done.code == 2
    assert "plain-seed2 has another network than plain-seed0 had (layer 1: Linear(in_features=64, out_f" in done.err
    assert not (here / "runs/reproduce/digits/plain-seed2").exists()


def test_two_recipes_of_one_name_do_not_share_a_folder(refused, here):
    (here / "deep").mkdir()
    other_recipe(here, "{name: random_init}", "{name: far, from: 'deep/digits.yaml:standard/random_init'}")
    (here / "other.yaml").rename(here / "deep/digits.yaml")
    assert "whose name is the same and is another run (pretrain differs)" in refused("mine.yaml", "--recipe", "digits")


def test_a_run_that_fails_does_not_stop_the_others(mheads, here):
    (here / "mine.yaml").write_text(
        "rows:\n  - {name: bad, set: [optim.lr=1e30]}\n  - {name: good}\n"  # the first of all, too
        "  - {name: after, set: ['init=<run:bad>']}\n  - {name: other, set: [loss=mcl]}\n"
    )
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", *TINY)
    assert done.code == 2
    assert "2 of 4 runs failed" in done.err and "bad-seed0: " in done.err and "after-seed0: it starts from" in done.err
    assert set(trained_at(here)) == {"good-seed0", "other-seed0"}
    assert {row for row, runs in results(here)["runs"].items() if runs} == {"good", "other"}


def test_what_no_run_can_be_built_for_is_told_once(refused, here):
    (here / "mine.yaml").write_text("rows:\n  - {name: a, set: [split=conv9]}\n  - {name: b, set: [split=conv9]}\n")
    message = refused("mine.yaml", "--recipe", "digits", *TINY)
    assert message.startswith("error: 2 of 2 runs failed:\n  a-seed0, b-seed0: ") and message.count("conv9") == 1


def test_a_damaged_run_is_made_anew_or_named_and_one_that_nobody_asked_for_is_not_shown(mheads, here):
    command = ["reproduce", "mine.yaml", "--recipe", "digits", *TINY, "--only", "plain"]
    (here / "mine.yaml").write_text("rows:\n  - {name: plain}\n  - {name: other, set: [loss=mcl]}\n")
    assert mheads(*command).code == 0
    run = here / "runs/reproduce/digits/plain-seed0"
    before, figures = weights(run), results(here)["runs"]["plain"][0]["result"]
    for damage in (run.joinpath("metrics.jsonl").unlink, lambda: run.joinpath("metrics.jsonl").write_text("{")):
        damage()
        assert "1 run to train, 0 finished" in mheads(*command).out
        assert "0 runs to train, 1 finished" in mheads(*command).out
        assert weights(run) == before and results(here)["runs"]["plain"][0]["result"]["oracle"] == figures["oracle"]
    run.joinpath("metrics.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    done = mheads(*command)
    assert done.code == 2 and f"metrics.jsonl is missing: move {run.relative_to(here)} away" in done.err
    shutil.rmtree(here / "results")
    assert mheads(*command[:-1], "other", "--tables").code == 0
    assert results(here)["runs"] == {}


def test_a_round_that_is_damaged_is_made_anew_also_in_a_folder_that_was_moved(mheads, here):
    (here / "mine.yaml").write_text(
        "rows:\n  - {name: plain}\n  - {name: rounds, rounds: 1, set: ['init=<run:plain>']}\n"
    )
    command = ["reproduce", "mine.yaml", "--recipe", "digits", *TINY]
    assert mheads(*command).code == 0
    (here / "runs/reproduce/digits/rounds-seed0/round0/result.json").write_text("{}")
    (here / "runs").rename(here / "moved")
    assert "1 run to train, 1 finished" in mheads(*command, "-f", "moved/reproduce").out
    assert "0 runs to train, 2 finished" in mheads(*command, "-f", "moved/reproduce").out


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
def test_a_folder_that_is_no_run_is_seen_before_anything_is_trained(refused, here, further):
    (here / "runs/reproduce/digits/mcl-seed0").mkdir(parents=True)
    (here / "runs/reproduce/digits/mcl-seed0/notes.txt").touch()
    message = refused("mine.yaml", "--recipe", "digits", *TINY, *further)
    assert "mcl-seed0 is not empty and not a run folder" in message


def test_a_signal_stops_after_the_step_and_the_same_command_goes_on(mheads, here):
    longer = [*TINY, "optim.iterations=12", "log.checkpoint_every=5"]
    command = ["reproduce", "mine.yaml", "--recipe", "digits", "-f", here / "runs", "-o", here / "results", *longer]
    at = (signal.SIGTERM, "os.rename", "mcl-seed0/checkpoints")  # of the second run, at its first checkpoint
    done = process(*command[:1], here / "mine.yaml", *command[2:], stop=at)
    assert done.code == 143, done.out + done.err
    assert "1 of 2 runs done. To resume: mheads reproduce" in done.out
    assert "stopped by SIGTERM" in done.err
    assert list(trained_at(here)) == ["plain-seed0"]
    assert 5 <= Checkpoints(here / "runs/digits/mcl-seed0/checkpoints").steps()[0] < 12
    assert set(results(here)["runs"]) == {"plain"}
    assert " Not run: mcl.\n" in (here / "results/mine-digits.md").read_text()

    assert "1 run to train, 1 finished" in mheads(*command).out
    other = mheads("train", "digits", *longer, "loss=mcl", "loss.k=1", f"init={here}/runs/digits/plain-seed0",
                   "-f", here / "other")  # fmt: skip
    assert other.code == 0
    assert weights(here / "other") == weights(here / "runs/digits/mcl-seed0")


def test_a_signal_before_the_first_step_stops_as_well(here):
    done = process("reproduce", here / "mine.yaml", "--recipe", "digits", *TINY, "-f", here / "runs", "-o",
                   here / "results", stop=(signal.SIGTERM, "os.mkdir", "plain-seed0"))  # fmt: skip
    assert done.code == 143, done.out + done.err
    assert "0 of 2 runs done. To resume: mheads reproduce" in done.out
    assert not (here / "results").exists()


def test_results_without_runs_do_not_refuse_other_overrides(mheads, here):
    given = ["reproduce", "mine.yaml", "--recipe", "digits", *TINY]
    assert mheads(*given, "--tables").code == 0 and results(here)["runs"] == {}
    assert mheads(*given, "optim.lr=0.05", "--tables").code == 0
    assert results(here)["overrides"] == [*TINY, "optim.lr=0.05"]


def test_a_signal_at_the_end_of_a_run_lets_that_finish_and_stops_before_the_next(here):
    done = process("reproduce", here / "mine.yaml", "--recipe", "digits", *TINY, "-f", here / "runs", "-o",
                   here / "results", stop=(signal.SIGTERM, "os.rename", "model.safetensors"))  # fmt: skip
    assert done.code == 143, done.out + done.err
    assert list(trained_at(here)) == ["plain-seed0"]  # whose last file came after the signal
    assert "1 of 2 runs done. To resume: mheads reproduce" in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_built_is_not_taken_for_a_fault_of_the_network(here, number):
    (here / "stopping.py").write_text(
        "import os\nfrom torch import nn\n\n"
        "class Telling(nn.Linear):\n"
        f"    def extra_repr(self):\n        os.kill(os.getpid(), {int(number)})\n        return ''\n\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), Telling(64, 10))\n"
    )
    done = process("reproduce", here / "mine.yaml", "--recipe", "digits", *TINY, "model=stopping:net", "-f",
                   here / "runs", "-o", here / "results", before=partial(os.chdir, here))  # fmt: skip
    assert done.code == 128 + number, done.out + done.err
    assert "0 of 2 runs done. To resume: mheads reproduce" in done.out and not trained_at(here)


def test_the_command_that_resumes_is_the_same_command(here):
    (here / "own.yaml").write_text("model: digits\nmembers: 4\ndata: {name: digits, validation: 40}\n")
    given = SuiteRequest("mine.yaml", Options("own.yaml"), 2, ["plain"], output=here, outputs=True)
    words = f"mine.yaml --recipe own.yaml --trials 2 --validation 0 --only plain -o {here} --outputs"
    assert given.command() == f"mheads reproduce {words}"
    (here / "own.yaml").write_text("model: digits\nmembers: 4\ndata: {name: digits}\n")
    assert given.command() == f"mheads reproduce {words}".replace(" --validation 0", "")


def test_scaled_runs_have_names_and_results_of_their_own(mheads, here):
    given = ["--recipe", "digits", "--scale", 0.01, "--validation", 30, "data.limit=60", "optim.batch_size=20"]
    assert mheads("reproduce", "pretrain", "--only", "pretrain_1000_k2", *given).code == 0
    (run,) = trained_at(here)
    assert run == "pretrain_1000_k2-seed0-scale0.01-validation30"
    config = RunFolder(here / "runs/reproduce/digits" / run).read_config()
    assert (config.optim.iterations, config.optim.schedule.at, config.pretrain) == (5, [4], 10)
    found = results(here, "pretrain-digits-scale0.01-validation30")
    kept = found["runs"]["pretrain_1000_k2"][0]["result"]
    assert kept["split"] == "validation" and kept["iterations"] == 15
    assert "0.01 of the iterations, on 30 validation examples" in (here / "results/README.md").read_text()


def test_what_was_chosen_on_validation_examples_is_measured_on_the_test_set_without_training_again(mheads, here):
    given = ["mine.yaml", "--recipe", "digits", "--validation", 40, *TINY]
    assert mheads("reproduce", *given).code == 0
    model = here / "runs/reproduce/digits/mcl-seed0-validation40/model.safetensors"
    before = model.stat().st_mtime_ns

    def on_test():
        done = mheads("reproduce", *given, "--test", "--only", "mcl")
        assert done.code == 0, done.err
        assert "0 runs to train" in done.out and "without 40 validation examples, on the test set" in done.out
        return results(here, "mine-digits-validation40-test")

    found = on_test()
    assert model.stat().st_mtime_ns == before
    assert found["command"].endswith("--validation 40 --test " + " ".join(TINY))
    for row in ("plain", "mcl"):  # rows that were not asked for are shown as far as they are there
        (kept,) = found["runs"][row]
        run = here / f"runs/reproduce/digits/{row}-seed0-validation40"
        wanted = evaluate_run(run, None, Silent(), split="test")
        assert kept["result"]["split"] == wanted["split"] == "test"
        for key in ("members", "ensemble_mean", "oracle"):
            assert kept["result"][key] == wanted[key]
        (chosen,) = results(here, "mine-digits-validation40")["runs"][row]
        assert chosen["result"]["split"] == "validation"  # neither file takes the other's figures
        assert chosen["config"] == kept["config"] and chosen["command"] == kept["command"]
        assert chosen["result"]["train_loss"] == kept["result"]["train_loss"]

    path = here / "results/mine-digits-validation40-test.json"
    found["runs"]["mcl"][0]["result"]["oracle"] = 12.5
    path.write_text(json.dumps(found))
    assert on_test()["runs"]["mcl"][0]["result"]["oracle"] == 12.5  # it is not measured twice
    found["runs"]["mcl"][0]["weights"] = "those of another training"
    path.write_text(json.dumps(found))
    assert on_test()["runs"]["mcl"][0]["result"]["oracle"] == wanted["oracle"]


def test_validation_examples_of_a_recipe_are_named_as_those_of_the_command(mheads, here):
    (here / "own.yaml").write_text(
        "model: digits\nmembers: 4\ndata: {name: digits, validation: 40, limit: 60}\n"
        "optim: {iterations: 4, batch_size: 20}\nlog: {every: 1}\n"
    )
    given = ["reproduce", "mine.yaml", "--recipe", "own.yaml", "--only", "plain"]
    for option, end, split, title in (
        ((), "-validation40", "validation", "on 40 validation examples"),
        (("--test",), "-validation40-test", "test", "without 40 validation examples, on the test set"),
        (("--validation", 30), "-validation30", "validation", "on 30 validation examples"),
        (("--validation", 0), "", "test", None),
    ):
        done = mheads(*given, *option)
        assert done.code == 0, done.err
        found = results(here, f"mine-own{end}")
        (run,) = found["runs"]["plain"]
        assert run["result"]["split"] == split
        assert title is None or title in done.out
        held_out = f"--validation {found['validation']}"
        assert found["command"] == " ".join(
            ["mheads reproduce mine.yaml --recipe own.yaml", held_out, *(option if "--test" in option else ())]
        )
        folder = here / f"runs/reproduce/own/plain-seed0{end.removesuffix('-test')}"
        assert RunFolder(folder).read_config().data.validation == found["validation"]
    assert len(trained_at(here)) == 3  # with --test nothing is trained again
    done = mheads("report", "--suite", "mine.yaml", "--recipe", "own.yaml", "-o", "page.html")
    assert done.code == 0, done.err
    assert "on 40 validation examples" in (here / "page.html").read_text()


def test_a_dry_run_lists_times_and_what_is_reused_and_writes_nothing(mheads, here):
    assert mheads("reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY).code == 0
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--trials", 2, "--dry-run", *TINY)
    assert done.code == 0, done.err
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "finished, reused" in lines["plain-seed0"]
    assert lines["mcl-seed1"].split()[1:3] == ["4", "0"]
    assert lines["3"].startswith("3 runs to train, about ") and "; 1 reused" in lines["3"]
    assert {p: p.stat().st_mtime_ns for p in here.rglob("*")} == before


def test_a_dry_run_of_all_suites_counts_each_run_once(here):
    given = [
        SuiteRequest(suite, Options("digits", overrides=tuple(TINY)), trials, folder=here / "runs", output=here / "out")
        for suite, trials in (("standard", 2), ("mcl", 1))
    ]
    shown = io.StringIO()
    print_plan_of_all(given, rich.console.Console(file=shown, width=100))
    rows = {words[0]: words[1:] for line in shown.getvalue().splitlines() if len(words := line.split()) > 1}
    assert rows["standard"][:2] == ["10", "0"]  # five rows, of two seeds
    assert rows["mcl"][:2] == ["4", "0"]  # k = 1, 2, 3 and from identical weights: the others are in `standard`
    assert "hours in all" in shown.getvalue() and not (here / "runs").exists() and not (here / "out").exists()

    (here / "runs/digits/combined-seed0").mkdir(parents=True)
    (here / "runs/digits/combined-seed0/notes.txt").touch()
    shown = io.StringIO()
    print_plan_of_all(given, rich.console.Console(file=shown, width=200))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["standard", *["not", "known"] * 3] in rows and ["mcl", "6", "0"] in [row[:3] for row in rows]
    assert "standard on digits: " in shown.getvalue() and "not a run folder" in shown.getvalue()


def test_all_suites_are_run_and_one_that_fails_is_named_after_the_others(here):
    (here / "bad.yaml").write_text("rows: [{name: bad, set: [data.path=none]}]\n")
    (here / "one.yaml").write_text("rows: [{name: plain}]\n")
    given = [
        SuiteRequest(name, Options("digits", overrides=tuple(TINY)), folder=here / "runs", output=here / "results")
        for name in ("bad.yaml", "one.yaml")
    ]
    given[0] = replace(given[0], options=Options("digits", overrides=("data={name: file, path: none.npz}",)))
    console = rich.console.Console(file=io.StringIO())
    with pytest.raises(UserError, match=r"1 of 2 tables failed: bad\.yaml on digits; see above"):
        for_each(given, console, lambda request: reproduce(request, console))
    assert list(trained_at(here)) == ["plain-seed0"]


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
def test_a_recipe_of_a_suite_that_fails_does_not_stop_the_others(mheads, here, further):
    own = "model: digits\nmembers: 2\ndata: {name: digits, limit: 60}\noptim: {iterations: 3, batch_size: 20}\n"
    (here / "good.yaml").write_text(own)
    (here / "bad.yaml").write_text(own)
    (here / "runs/reproduce/bad/plain-seed0").mkdir(parents=True)
    (here / "runs/reproduce/bad/plain-seed0/notes.txt").touch()
    (here / "two.yaml").write_text("recipe: [bad.yaml, good.yaml]\nrows: [{name: plain}]\n")
    done = mheads("reproduce", "two.yaml", *further)
    assert done.code == 2 and "1 of 2 tables failed: two.yaml on bad; see above" in done.err
    assert "two.yaml on bad: " in done.out and "not a run folder" in done.out and "1 run to train" in done.out
    assert list(trained_at(here)) == ([] if further else ["plain-seed0"])


def test_outputs_of_runs_are_written_from_which_the_figures_can_be_computed_again(mheads, here):
    given = ["reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY]
    assert mheads(*given).code == 0 and not (here / "results/outputs").exists()
    assert mheads(*given, "--tables", "--outputs").code == 0
    file = here / "results/outputs/digits/plain-seed0.npz"
    with np.load(file) as arrays:
        assert arrays["outputs"].dtype == np.float16
        again = compute(arrays["outputs"].astype(np.float32), arrays["labels"])
    kept = results(here)["runs"]["plain"][0]["result"]
    assert again.nll["single"] == pytest.approx(kept["nll_single"], abs=2e-3)
    assert again.members == pytest.approx(kept["members"], abs=100 / 60 + 1e-4)  # an example near a tie may change
    before = file.stat().st_mtime_ns
    assert mheads(*given, "--outputs").code == 0 and file.stat().st_mtime_ns == before
    file.write_bytes(b"cut off")
    assert mheads(*given, "--outputs").code == 0 and "labels" in np.load(file)


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
@pytest.mark.parametrize("option", ["--ood", "--shifted"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["loss.k=2"], "settings of a finished run cannot be changed"),
        (["data.name=npz", "data.path=none.npz"], "none.npz"),
        (["data.limit=20"], "that is the run's own digits"),
        (["data.name=npz", "data.path=small.npz"], "has examples of shape (1, 4, 4), and digits of (1, 8, 8)"),
    ],
)
def test_other_data_that_cannot_be_measured_on_are_told_before_training(refused, here, option, keys, message, further):
    x, y = np.zeros((10, 1, 4, 4), np.uint8), np.arange(10)
    np.savez(here / "small.npz", x_test=x, y_test=y)
    given = [word for key in keys for word in (option, key)]
    assert message in refused("mine.yaml", "--recipe", "digits", *TINY, *given, *further)


def test_other_data_of_another_problem_are_told_before_training(refused, here):
    given = ["data.name=diabetes", "model=mlp", "model_args={features: 10}", "optim.iterations=3"]
    message = refused("mine.yaml", "--recipe", "digits", *given, "--ood", "data.name=digits", "--only", "plain")
    assert "--ood data.name=digits: other data are for runs whose examples have one class each" in message


def test_runs_that_cannot_be_measured_have_failed_and_the_others_are_written(mheads, here, monkeypatch):
    add = Reproduction._add

    def fail(self, job):
        if job.row == "plain":
            raise UserError("there are no such examples")
        add(self, job)

    monkeypatch.setattr(Reproduction, "_add", fail)
    (here / "mine.yaml").write_text("rows: [{name: plain}, {name: mcl, set: [loss=mcl]}]\n")
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", *TINY)
    assert done.code == 2 and "plain-seed0: there are no such examples" in done.err
    assert set(results(here)["runs"]) == {"mcl"} and set(trained_at(here)) == {"plain-seed0", "mcl-seed0"}


def test_two_processes_do_not_write_outputs_of_one_run_at_once(mheads, here, monkeypatch):
    assert mheads("reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY).code == 0
    job = Planner(Options("digits", overrides=tuple(TINY))).job(read_suite("mine.yaml"), "plain", 0)
    outputs = torch.ones(2, 3, 4), None, torch.ones(3)
    monkeypatch.setattr(run_entries, "outputs_and_weights_of", lambda run, split: outputs)
    (here / "outputs").mkdir()
    writing = threading.Thread(target=run_entries.write_half_outputs, args=(job, here / "outputs/plain.npz", "test"))
    with hold_lock(here / "outputs"):
        writing.start()
        writing.join(1)
        assert writing.is_alive() and not any((here / "outputs").iterdir())  # it waits
    writing.join()
    assert np.load(here / "outputs/plain.npz")["outputs"].shape == (2, 3, 4)


def test_outputs_of_a_network_of_ones_own_are_written(mheads, here):
    (here / "own_net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    given = ["reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY, "model=own_net:net"]
    done = process(*given, "--outputs")
    assert done.code == 0, done.out + done.err
    assert (here / "results/outputs/digits/plain-seed0.npz").exists()


def test_outputs_of_runs_with_validation_examples_are_those_that_the_table_is_of(mheads, here):
    given = ["reproduce", "mine.yaml", "--recipe", "digits", "--only", "plain", *TINY, "--validation", 30, "--outputs"]
    assert mheads(*given).code == 0 and mheads(*given, "--test").code == 0
    folder = here / "results/outputs/digits"
    on_validation, on_test = (np.load(folder / f"plain-seed0-validation30{end}.npz") for end in ("", "-test"))
    assert len(on_validation["labels"]) == 30
    (kept,) = json.loads((here / "results/mine-digits-validation30-test.json").read_text())["runs"]["plain"]
    again = compute(on_test["outputs"].astype(np.float32), on_test["labels"])
    assert again.nll["single"] == pytest.approx(kept["result"]["nll_single"], abs=2e-3)


def test_a_dry_run_tells_what_cannot_be_built(mheads, here):
    (here / "mine.yaml").write_text("rows:\n  - {name: good}\n  - {name: bad, set: [split=conv9]}\n")
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--dry-run", *TINY)
    assert done.code == 0 and "not known" in done.out and "2 runs to train, more than" in done.out
    assert "bad-seed0: split 'conv9'" in done.out


def test_a_dry_run_goes_by_flop_or_times_what_cannot_be_counted(mheads, here, monkeypatch):
    """Only the first row of the recipe is timed, in small steps; a network of an unknown shape is timed itself."""
    timed = []

    def time_steps(job):
        timed.append(job.row)
        return dry_run.StepTime(0.01, None if job.row == "own" else 1e6, 0.0, 50)

    monkeypatch.setattr(dry_run, "_time_steps", time_steps)
    counts = {"one": {"training": 7.2e11, "inference": 2e6}, "four": {"training": 28.8e11, "inference": 8e6}}
    monkeypatch.setattr(dry_run, "_count_or_none", lambda job: counts.get(job.row))
    (here / "mine.yaml").write_text("rows: [{name: one}, {name: four}, {name: own}]\n")
    shorter = ["optim.iterations=100", "optim.batch_size=20", "log.evaluate_every=0"]
    done = mheads("reproduce", "mine.yaml", "--recipe", "digits", "--dry-run", "--trials", 2, *shorter)
    times = {line.split()[0]: line.split()[2:] for line in done.out.splitlines() if "-seed" in line}
    assert timed == ["one", "own"]
    assert times["one-seed1"] == ["2", "h", "00", "min"]  # 7.2e11 / 1e6 * 0.01 s, and 50 answers
    assert times["four-seed0"] == ["8", "h", "00", "min"]
    assert times["own-seed0"] == ["20", "s"]  # 100 steps of 20 examples, and 50 answers at a third


def test_rounds_of_classical_mcl_are_a_row(mheads, here):
    (here / "mine.yaml").write_text("rows:\n  - {name: rounds, rounds: 2}\n")
    command = ["reproduce", "mine.yaml", "--recipe", "digits", *TINY]
    assert "4 runs" not in mheads(*command, "--dry-run").out and not (here / "runs").exists()
    assert mheads(*command).code == 0
    (run,) = results(here)["runs"]["rounds"]
    rounds = json.loads((here / "runs/reproduce/digits/rounds-seed0/classical.json").read_text())["rounds"]
    assert run["result"]["oracle"] == rounds[-1]["oracle"] and len(rounds) <= 2
    assert run["command"].startswith("mheads classical --rounds 2 digits ")
    before = trained_at(here)
    assert "0 runs to train, 1 finished" in mheads(*command).out
    assert trained_at(here) == before
    assert mheads(*command[:-1], "optim.lr=0.3", "-o", "other").code == 2  # rounds of another config


# The paper's other networks, on small data of the right kind.


def pictures(folder, side, classes):
    """A set of coloured noise, one mean for each class."""
    rng = np.random.default_rng(0)
    labels = np.arange(6) % classes
    images = (rng.integers(0, 60, (6, 3, side, side)) + 40 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "data.npz", x_train=images, y_train=labels, x_test=images[:3], y_test=labels[:3],
             classes=np.array([f"class{c}" for c in range(classes)]))  # fmt: skip
    return ["data={name: npz, path: data.npz, normalize: mean_image, scale: 1}", f"model_args.classes={classes}",
            "optim.iterations=2", "optim.batch_size=2", "optim.lr=0.0001", "log.every=1"]  # fmt: skip


@pytest.mark.parametrize(
    ("suite", "recipe", "side", "rows"),
    [
        ("standard", "nin_cifar100", 32, ["random_init"]),
        pytest.param("tree", "nin_ilsvrc", 224, ["tree_cccp7"], marks=pytest.mark.full),
        ("finetune", "caffenet", 32, ["base", "finetune_k4", "finetune_copies_k1"]),
    ],
)
def test_suites_of_the_larger_networks_run(mheads, here, suite, recipe, side, rows):
    given = pictures(here, side, 3)
    if recipe == "caffenet":
        given.append("model=cifar10_quick")  # five of CaffeNet itself would take gigabytes
    only = [word for row in rows for word in ("--only", row)]
    done = mheads("reproduce", suite, "--recipe", recipe, *only, *given)
    assert done.code == 0, done.err
    found = results(here, f"{suite}-{recipe}")
    assert set(found["runs"]) == {"random_init" if row == "base" else row for row in rows}
    assert all(0 <= runs[0]["result"]["oracle"] <= 100 for runs in found["runs"].values())
    assert (here / f"results/{suite}-{recipe}.md").read_text().count("Not run: ") == 1
    if recipe == "nin_cifar100":
        assert found["rows"][2]["paper"]["ensemble_mean"] == [66.51, 0.27]
        assert "66.51" not in (here / "results/README.md").read_text()  # of two iterations on three classes


# What is seen meanwhile.


def test_one_line_shows_the_run_its_bar_and_the_time_left_for_all(here):
    planner = Planner(Options("digits", overrides=tuple(TINY)))
    jobs = [planner.job(read_suite("standard"), row, 0) for row in ("random_init", "bagging")]
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=140, highlight=False)
    watch = Overview(console, "standard", jobs)
    watch.begin(jobs[0])
    with watch.training(4, 0):
        for step in range(1, 5):
            watch.step(step, 1.0, 0.1, 20, [0.5, 0.5])
        watch._bar.refresh()
    watch.end(jobs[0], {"single": 80.0, "ensemble_mean": 90.0, "oracle": None, "seconds": 3.0})
    assert "standard 1/2 random_init-seed0" in out.getvalue()
    assert "left for all" in out.getvalue() and "4/4" in out.getvalue()
    assert "1/2  random_init-seed0  mean member 80.00  Ensemble-Mean 90.00  3 s" in out.getvalue()
    assert watch._left == 4  # steps of the second run
    errors = {"single": 0.00123456, "ensemble_mean": 0.001, "oracle": 1234.5}
    watch.end(jobs[1], {"problem": "regression", **errors, "seconds": 3.0})
    assert "2/2  bagging-seed0  mean member 0.001235  Ensemble-Mean 0.001  Oracle 1234.50  3 s" in out.getvalue()


def test_durations_are_told_in_two_units():
    assert [duration(s) for s in (0.4, 75, 7500)] == ["0 s", "1 min 15 s", "2 h 05 min"]


def test_the_config_of_a_run_can_be_trained_by_its_command(here):
    planner = Planner(Options("digits", scale=0.1, overrides=("data.limit=60",)))
    job = planner.job(read_suite("mixture"), "mixture_0.5", 2)
    assert load("digits", job.overrides) == job.config
