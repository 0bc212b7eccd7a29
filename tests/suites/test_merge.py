"""`mheads reproduce --merge`: runs of further seeds and machines are taken over without their run folders."""

import json
import shutil

import pytest

TINY = ["data.limit=60", "optim.iterations=3", "optim.batch_size=20", "log.every=1"]
OTHER = "rows:\n  - {name: mcl, set: [loss=mcl, loss.k=1]}\n"
MINE = f"{OTHER}  - {{name: plain}}\nclaims:\n  - {{order: [mcl, plain], by: oracle}}\n"


@pytest.fixture
def here(tmp_path, monkeypatch, mheads):
    """Seed 0 of two suites in results, seed 1 of one in elsewhere, and no run folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "other.yaml").write_text(OTHER)
    for suite, seed, output in (("mine", 0, "results"), ("other", 0, "results"), ("mine", 1, "elsewhere")):
        done = mheads("reproduce", f"{suite}.yaml", "--recipe", "digits", "--seed", seed, "-o", output, *TINY)
        assert done.code == 0, done.err
    shutil.rmtree("runs")
    return tmp_path


def runs(path):
    return {key: {run["seed"]: run for run in runs} for key, runs in json.loads(path.read_text())["runs"].items()}


def change(path, edit):
    document = json.loads(path.read_text())
    del document["checksum"]
    edit(document)
    path.write_text(json.dumps(document))


def test_runs_of_another_folder_fill_their_row_in_every_suite_without_training(mheads, here):
    seed_0, seed_1 = runs(here / "results/mine-digits.json"), runs(here / "elsewhere/mine-digits.json")
    done = mheads("reproduce", "--merge", "elsewhere")
    assert done.code == 0, done.err
    assert "results/mine-digits.json: 2 new runs" in done.out and "results/other-digits.json: 1 new run" in done.out
    assert not (here / "runs").exists()
    merged = runs(here / "results/mine-digits.json")
    assert merged == {row: seed_0[row] | seed_1[row] for row in ("plain", "mcl")}
    assert runs(here / "results/other-digits.json") == {"mcl": merged["mcl"]}
    table = (here / "results/mine-digits.md").read_text()
    assert "| plain | 2 |" in table and "; 2 seeds, p = " in table and "--trials 2" in table
    assert table in (here / "results/README.md").read_text()

    again = mheads("reproduce", "--merge", "elsewhere")
    assert again.code == 0 and "0 new runs" in again.out and runs(here / "results/mine-digits.json") == merged
    # Into a folder that is not there yet, and for one suite by the command that made it.
    assert mheads("reproduce", "--merge", "results", "-o", "new").code == 0
    assert runs(here / "new/mine-digits.json") == merged
    given = ("reproduce", "mine.yaml", "--recipe", "digits", *TINY, "--merge", "elsewhere", "-o", "one")
    assert mheads(*given).code == 0 and runs(here / "one/mine-digits.json") == seed_1


def test_runs_that_are_not_the_suites_or_differ_are_named_and_left_out(mheads, here):
    def edit(document):
        document["runs"]["plain"][0]["config"] = "0000beef"
        other = dict(document["runs"]["mcl"][0], seed=0)
        own = json.loads((here / "results/mine-digits.json").read_text())["runs"]["mcl"][0]
        document["runs"]["mcl"].insert(0, other | {key: own[key] for key in ("config", "command")})

    before = runs(here / "results/mine-digits.json")
    change(here / "elsewhere/mine-digits.json", edit)
    done = mheads("reproduce", "--merge", "elsewhere")
    assert done.code == 0, done.err
    assert "plain with seed 1 is left out: its config is not that of the suite here" in done.out
    assert "mcl with seed 0 is left out: the results have this run with other figures" in done.out
    merged = runs(here / "results/mine-digits.json")
    assert merged["plain"] == before["plain"] and merged["mcl"][0] == before["mcl"][0] and 1 in merged["mcl"]


def no_runs(document):
    document["runs"] = {}


def other_configs(document):
    for run in [run for runs in document["runs"].values() for run in runs]:
        run["config"] = "0000beef"


def test_a_file_of_which_no_run_can_be_taken_over_does_not_stop_the_others(mheads, here):
    kept = (here / "elsewhere/mine-digits.json").read_text()
    shutil.copy(here / "results/other-digits.json", here / "elsewhere")
    change(here / "elsewhere/mine-digits.json", no_runs)
    done = mheads("reproduce", "--merge", "elsewhere", "-o", "new")
    assert done.code == 0, done.err
    assert "new/other-digits.json: 1 new run" in done.out and not (here / "new/mine-digits.json").exists()

    (here / "elsewhere/other-digits.json").unlink()
    (here / "elsewhere/mine-digits.json").write_text(kept)
    change(here / "elsewhere/mine-digits.json", other_configs)
    done = mheads("reproduce", "--merge", "elsewhere", "-o", "none")
    assert "plain with seed 1 is left out: its config is not" in done.out and "none holds no results" in done.err


def test_results_without_runs_stay_as_they_are_when_others_are_merged(mheads, here):
    change(here / "results/mine-digits.json", lambda document: document.update(runs={}, overrides=["optim.lr=0.5"]))
    (here / "results/mine-digits.json").rename(here / "results/empty-digits.json")
    before = (here / "results/empty-digits.json").read_text()
    done = mheads("reproduce", "--merge", "elsewhere")
    assert done.code == 0, done.err
    assert "mine-digits.json: 3 new runs" in done.out and "empty-digits.json: " not in done.out
    assert (here / "results/empty-digits.json").read_text() == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda here: shutil.rmtree(here / "elsewhere"), "elsewhere: no file of results there"),
        (lambda here: (here / "elsewhere/mine-digits.json").write_text("{}"), "is not a file of results"),
        (lambda here: (here / "mine.yaml").unlink(), "mine-digits.json: there is no suite and no file 'mine.yaml'"),
        (
            lambda here: change(
                here / "elsewhere/mine-digits.json", lambda d: d["runs"]["mcl"][0]["marks"].update(data="0000")
            ),
            "mcl-seed1 has other data than seed 0 has in the results",
        ),
    ],
)
def test_what_cannot_be_merged_is_an_error_and_nothing_is_written(mheads, here, spoil, message):
    spoil(here)
    before = {path: path.read_bytes() for path in here.glob("results/*")}
    done = mheads("reproduce", "--merge", "elsewhere")
    assert done.code == 2 and message in done.err, done.out + done.err
    assert {path: path.read_bytes() for path in here.glob("results/*")} == before


@pytest.mark.parametrize("suite", [(), ("mine.yaml", "--recipe", "digits", *TINY)])
def test_each_folder_that_is_merged_has_results(mheads, here, suite):
    done = mheads("reproduce", *suite, "--merge", "elsewhere", "--merge", "elswhere", "-o", "new")
    assert done.code == 2 and "--merge elswhere: no file of results there" in done.err
    assert not (here / "new").exists()
