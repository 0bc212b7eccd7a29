"""`mheads.compare` and `mheads compare`: what they say of runs, against the runs' own results."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import mheads as package
from mheads import losses
from mheads.common.errors import UserError
from mheads.report.compare import Comparison, tabulate_results, tabulate_settings
from mheads.report.page import describe
from mheads.runs.metrics_log import Log
from mheads.runs.read_run import Record
from mheads.trees.treenet import TreeNet

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype("float32"), RNG.integers(0, 5, 60)
HEADS = ["run", "Ensemble-Mean", "Oracle", "top-3", "mean member", "disagreement"]


def fit(members, loss=None, y=Y, folder=None, iterations=3, outputs=5):
    def network():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))

    scored = loss is not None and loss.name == "scored"
    net = TreeNet(package.with_scores(network) if scored else network, members=members)
    examples = {"train": (X[:40], y[:40]), "test": (X[40:], y[40:])}
    return package.fit(
        net, loss or losses.independent(), **examples, iterations=iterations, folder=folder, show=False, batch_size=20
    )


def test_a_run_in_memory_and_its_folder_have_the_same_settings(tmp_path):
    run = fit(2, folder=tmp_path / "run")
    kept = Record.read(tmp_path / "run", "kept", lenient=True)
    assert tabulate_settings([run.record(), kept]) is None
    other = tabulate_settings([kept, fit(2, iterations=4).record()])
    assert [row[0].text for row in other.rows] == ["optim.iterations"]


def test_runs_in_memory_are_named_by_their_place():
    one, two = fit(2), fit(1)
    comparison = package.compare([one, two])
    assert [row["run"] for row in comparison.rows] == ["run 0", "run 1"]
    assert one.folder.parent.name not in str(comparison)
    numbers = fit(2, y=X[:, :2], outputs=2)
    with pytest.raises(UserError, match=r"compared: run 1 has root mean square error, .*; run 0 has accuracy"):
        package.compare([one, numbers])


def test_a_run_in_memory_beside_a_folder_is_named_by_its_place_and_the_folder_by_its_name(tmp_path):
    kept = fit(2, folder=tmp_path / "kept")
    assert [row["run"] for row in package.compare([tmp_path / "kept", fit(1), kept]).rows] == ["kept", "run 1", "kept"]


def test_rows_are_the_results_of_runs_in_memory_and_of_folders(tmp_path):
    three = fit(3, losses.mcl(k=2))
    one = fit(1, folder=tmp_path / "one")
    comparison = package.compare({"many": three, "alone": tmp_path / "one"})
    many, alone = comparison.rows
    assert list(many)[: len(HEADS)] == HEADS
    for row, run, members in ((many, three, 3), (alone, one, 1)):
        assert row["Ensemble-Mean"] == pytest.approx(run.result.ensemble_mean, abs=1e-3)
        assert row["Oracle"] == pytest.approx(run.result.oracle, abs=1e-3)
        assert row["mean member"] == pytest.approx(np.mean(run.result.members), abs=1e-3)
        assert (row["members"], row["parameters"]) == (members, members * (4 * 8 + 8 + 8 * 5 + 5))
    assert many["top-3"] == pytest.approx(
        np.mean(
            three.predict(X[40:]).softmax(-1).mean(0).topk(3).indices.eq(torch.tensor(Y[40:])[:, None]).any(-1).numpy()
        )
        * 100,
        abs=1e-3,
    )
    assert (many["run"], many["loss"].replace("\N{NO-BREAK SPACE}", " ")) == ("many", "mcl, k=2")
    assert alone["run"] == "alone" and "state" not in alone
    settings = {row[0].text: [cell.text for cell in row[1:]] for row in comparison.settings.rows}
    assert settings["members"] == ["3", "1"] and "optim.lr" not in settings

    text = str(comparison)
    assert f"{three.result.ensemble_mean:.2f}" in text and "\x1b" not in text and "Top-3:" in text
    assert comparison._repr_markdown_().startswith("| run | Ensemble-Mean | Oracle | top-3 |")


def test_the_command_prints_what_python_returns(mheads, tmp_path):
    for name, members in (("a", 2), ("b", 1)):
        fit(members, folder=tmp_path / name)
    done = mheads("compare", tmp_path / "a", tmp_path / "b")
    assert done.code == 0, done.err
    expected = str(package.compare([tmp_path / "a", tmp_path / "b"]))
    assert done.out.split() == expected.split()


def test_equal_settings_have_no_table_and_names_tell_folders_apart(tmp_path):
    first, second = (fit(1, folder=tmp_path / name / "run") for name in ("first", "second"))
    comparison = package.compare([first, second])
    assert comparison.settings is None and len(comparison.tables) == 1
    assert [row["run"] for row in comparison.rows] == ["first/run", "second/run"]


def test_runs_whose_answers_are_numbers_have_the_measures_of_hypotheses():
    run = fit(3, losses.scored(k=1), y=X[:, :1], outputs=1)
    (row,) = package.compare([run]).rows
    assert row["distortion"] == pytest.approx(run.result.distortion, rel=1e-3)
    assert "minADE" not in row and "NLL" not in row  # which are of trajectories, and of densities
    (row,) = package.compare([fit(2)]).rows
    assert "distortion" not in row


def test_the_loss_of_a_run_is_shown_with_the_options_that_are_not_its_defaults():
    given = [losses.mcl(k=1), losses.mcl(k=1, ce_weight=4.0), losses.mcl(k=2, normalize="wins"), losses.relaxed()]
    shown = [
        row["loss"].replace("\N{NO-BREAK SPACE}", " ") for row in package.compare([fit(3, one) for one in given]).rows
    ]
    assert shown == ["mcl, k=1", "mcl, k=1, ce_weight=4.0", "mcl, k=2, normalize=wins", "relaxed"]


def test_a_run_without_a_result_has_empty_cells_and_its_state():
    run = fit(2).record("done")
    early = dataclasses.replace(run, title="early", result=None, finished=False)
    done, begun = Comparison(tabulate_results([run, early]), None).rows
    assert done["Ensemble-Mean"] is not None and done["state"] == "finished"
    assert begun["Ensemble-Mean"] is None and begun["parameters"] is None and begun["state"] == "iteration 3"


def test_an_unfinished_run_says_at_which_iteration_its_figures_were_measured():
    run = fit(2, iterations=4).record("killed")
    evaluated = {"iteration": 500, "split": "test", "members": [1.0, 2.0], "ensemble_mean": 50.0, "oracle": 60.0}
    evaluated |= {"ownership": [[1], [1]], "single": 1.5, "examples": 20}
    killed = dataclasses.replace(
        run, log=Log([{"iteration": 525}], [evaluated]), result=evaluated, finished=False, in_memory=False
    )
    (row,) = Comparison(tabulate_results([killed]), None).rows
    assert (row["Ensemble-Mean"], row["state"]) == (50.0, "iteration 525, evaluated at 500")
    assert "parameters" not in row and "seconds" not in row  # which are known in the end
    assert describe.state(killed) == "Not finished: iteration 525 of 4, evaluated at 500"
    just = dataclasses.replace(killed, log=Log([{"iteration": 500}], [evaluated]))
    assert describe.state(just) == "Not finished: iteration 500 of 4"


def test_runs_that_are_measured_otherwise_are_refused(tmp_path):
    numbers = fit(2, y=X[:, :1], outputs=1)
    with pytest.raises(UserError, match=r"cannot be compared: .* has root mean square error, .*; .* has accuracy"):
        package.compare({"classes": fit(2), "numbers": numbers})
    with pytest.raises(UserError, match="there is no run to compare"):
        package.compare([])
    with pytest.raises(UserError, match="give a list of them"):
        package.compare(numbers)


def test_a_folder_that_is_no_run_ends_the_command(mheads, tmp_path):
    done = mheads("compare", tmp_path)
    assert done.code == 2 and str(tmp_path) in done.err
