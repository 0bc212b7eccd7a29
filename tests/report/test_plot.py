"""Figures of runs: what they draw, from which files, and what they refuse."""

import dataclasses
import json
import re
import shutil
import signal
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import process
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.image import imread

from mheads import TreeNet, UserError, fit, load
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.data import load as load_data
from mheads.problems import metrics
from mheads.report.charts import outcomes
from mheads.report.charts.hypotheses import chart_hypotheses
from mheads.report.charts.over_training import chart_wins
from mheads.report.figures import draw
from mheads.report.figures.figure import save
from mheads.report.figures.object_boxes import draw_objects
from mheads.report.plot import FIGURES, draw_figure
from mheads.report.shown_run import ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.read_run import Record, read_all
from mheads.training.loop import train_config

QUICK = ("optim.iterations=6", "optim.batch_size=20", "data.limit=100", "log.every=2", "log.evaluate_every=3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four short runs by name."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "mcl_k1": ["loss.name=mcl", "loss.k=1"],
        "independent": [],
        "tree": ["split=conv1"],
        "single": ["members=1"],
    }
    for name, overrides in made.items():
        train_config(configs.load("digits", [*QUICK, *overrides]), RunFolder(folder / name), Silent())
    return {name: folder / name for name in made}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("ownership", ["mcl_k1", "independent"]),
        ("history", ["tree"]),
        ("wins", ["mcl_k1"]),
        ("k", ["independent", "mcl_k1"]),
        ("splits", ["single", "tree", "independent"]),
        ("answers", ["mcl_k1", "tree", "single"]),
        ("disagreement", ["mcl_k1", "tree", "single"]),
        ("reliability", ["mcl_k1", "single"]),
    ],
)
def test_every_plot_is_drawn_at_a_size_that_can_be_read(mheads, runs, tmp_path, what, names):
    file = tmp_path / "plot.png"
    done = mheads("plot", what, *(runs[name] for name in names), "-o", file)
    assert (done.code, done.out.strip()) == (0, str(file))
    picture = imread(file)
    assert picture.shape[1] >= 600
    assert np.ptp(picture[..., :3]) > 0.5


def test_a_split_given_as_a_tree_of_one_layer_stands_with_its_name(tmp_path):
    train_config(configs.load("digits", [*QUICK, "split={conv1: 4}"]), RunFolder(tmp_path / "run"), Silent())
    (chart,) = FIGURES["splits"].describe([ShownRun(record) for record in read_all([tmp_path / "run"])])
    assert list(chart.x_names) == ["conv1"]


def test_the_figures_are_listed_by_the_command_and_in_the_docs(mheads):
    done = mheads("plot")
    assert done.code == 0 and [line.split()[0] for line in done.out.splitlines()] == list(FIGURES)
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("| NAME |")[2].partition("\n\n")[0], re.MULTILINE) == [
        (name, figure.help) for name, figure in FIGURES.items()
    ]
    assert "give the run folders that wins shows" in mheads("plot", "wins").err


def test_without_a_file_the_picture_is_in_the_folder_of_the_first_run(mheads, runs):
    assert mheads("plot", "wins", runs["mcl_k1"]).code == 0
    assert (runs["mcl_k1"] / "wins.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "single"), "there is no plot 'nothing': give ownership, history"),
        (("ownrship", "single"), "there is no plot 'ownrship' (did you mean ownership?): give ownership, history"),
        (("wins", "single", "tree"), "wins shows one run, and there are 2"),
        (("wins", "single", "-o", "plot.jpg"), "give a file that ends in .png, .svg or .pdf"),
        (("wins", "single", "-o", "nowhere/plot.png"), "cannot write nowhere/plot.png: there is no folder nowhere"),
        (("wins", "single", "-o", "folder.png"), "cannot write folder.png: it is a folder; give a file in it"),
        (("wins", "all"), "is not a run folder: it has no config.yaml; it holds 4 runs, such as"),
        (("disagreement", "single"), "has one member, and disagreement needs two"),
    ],
)
def test_what_cannot_be_drawn_is_said(mheads, runs, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    places = {**runs, "all": runs["single"].parent}
    done = mheads("plot", *(places.get(argument, argument) for argument in arguments))
    assert done.code == 2
    assert message in done.err


def test_losses_without_k_and_other_classes_are_named(mheads, runs, tmp_path):
    averaged = tmp_path / "averaged"
    assert mheads("train", "digits", *QUICK, "loss.name=score_averaged", "-f", averaged).code == 0
    done = mheads("plot", "k", runs["mcl_k1"], averaged)
    assert (done.code, mheads("plot", "k", runs["mcl_k1"], runs["independent"], "-o", tmp_path / "K.PNG").code) == (
        2,
        0,
    )
    assert "averaged was trained with score_averaged, which has no k" in done.err
    data = tmp_path / "two.npz"
    x, y = np.random.default_rng(0).integers(17, size=(40, 1, 8, 8)).astype(np.uint8), np.arange(40) % 2
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=y)
    two = tmp_path / "two"
    done = mheads(
        "train", "digits", *QUICK[:2], "model_args.classes=2", "data.name=npz", f"data.path={data}", "-f", two
    )
    assert done.code == 0, done.err
    assert "have other classes: plot them one by one" in mheads("plot", "ownership", runs["mcl_k1"], two).err
    for what in ("k", "splits"):  # one axis would say nothing of these
        err = mheads("plot", what, runs["mcl_k1"], two).err
        assert "digits on the test set of digits (" in err and "digits on the test set of npz (40 examples" in err
    err = mheads("plot", "splits", runs["tree"], runs["mcl_k1"]).err  # nor of these
    assert "is trained with independent, and" in err and "trained with mcl {'k': 1" in err
    assert "is not split, and" in mheads("plot", "k", runs["mcl_k1"], runs["tree"]).err
    weighted, pair = tmp_path / "weighted", tmp_path / "pair"
    mcl = ["loss.name=mcl", "loss.k=1", "loss.ce_weight=4"]
    assert mheads("train", "digits", *QUICK, *mcl, "-f", weighted).code == 0
    err = mheads("plot", "k", runs["mcl_k1"], weighted).err
    assert "'ce_weight': 0.0" in err and "'ce_weight': 4.0" in err and "'k'" not in err
    assert mheads("train", "digits", *QUICK, "members=2", "-f", pair).code == 0
    assert "is of 4 members, and" in mheads("plot", "splits", runs["tree"], pair).err
    (two / "result.json").unlink()
    (two / "metrics.jsonl").write_text('5\n{"iteration": 3}\n')  # damaged, and still JSON
    assert "metrics.jsonl is damaged (line 1: 5: input should be" in mheads("plot", "wins", two).err


def test_an_unfinished_run_is_drawn_as_far_as_it_is(mheads, tmp_path):
    folder = tmp_path / "run"
    command = ("train", "digits", *QUICK, "log.checkpoint_every=4", "-f", folder)
    assert process(*command, stop=(signal.SIGKILL, "os.rename", ".model.safetensors")).code == -signal.SIGKILL
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99')  # half a line
    done = mheads("plot", "history", folder)
    assert done.code == 0
    assert "is not finished: this shows it at iteration 6" in " ".join(done.out.split())


def test_a_run_before_its_first_evaluation_says_so(mheads, tmp_path):
    folder = tmp_path / "run"
    command = ("train", "digits", *QUICK, "log.evaluate_every=0", "log.checkpoint_every=2", "-f", folder)
    assert process(*command, stop=(signal.SIGKILL, "open", ".step-00000004.new")).code == -signal.SIGKILL
    done = mheads("plot", "history", folder)
    assert done.code == 2
    assert re.search(r"was not evaluated yet \(iteration [46]\)", done.err)  # it trains on while it saves


def test_titles_tell_runs_apart(runs, tmp_path):
    assert [record.title for record in read_all([runs["tree"], runs["single"]])] == ["tree", "single"]
    shutil.copytree(runs["tree"], tmp_path / "tree")
    first, second = read_all([runs["tree"], tmp_path / "tree"])
    assert (first.title, second.title) == (f"{runs['tree'].parent.name}/tree", f"{tmp_path.name}/tree")


def test_wins_are_those_of_the_log(runs):
    steps = Record.read(runs["mcl_k1"]).log.steps
    assert {line.get_marker() for line in draw([chart_wins(steps[:1])]).axes[0].lines} == {"o"}  # one point is seen
    (panel,) = draw([chart_wins(steps)]).axes
    assert [line.get_label() for line in panel.lines] == [f"member {m}" for m in range(4)]
    for m, line in enumerate(panel.lines):
        np.testing.assert_allclose(line.get_ydata(), [100 * step["wins"][m] for step in steps])
        assert list(line.get_xdata()) == [2, 4, 6]


def test_members_that_win_nothing_at_the_end_are_named():
    wins = [[0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [0.7, 0.3, 0.0]]
    steps = [{"iteration": 10 * i, "share": row} for i, row in enumerate(wins, 1)]
    assert chart_wins(steps).note.startswith("Members that won nothing in the last fifth of training: 2. Do not rely")
    assert "won nothing" not in chart_wins(steps[:1]).note


def test_a_run_may_be_called_whatever_a_folder_can(tmp_path):
    bins = {"$\\frac{$ \udc80": {"confidence": [50.0], "accuracy": [40.0], "examples": [3]}}
    save(draw([outcomes.chart_reliability(bins)]), tmp_path / "a.png")
    found = {"mean": [("$\\frac{$", 0.5, np.array([1, 1, 6, 6])), (90 * "a", 0.4, np.array([0, 0, 5, 5]))]}
    save(draw_objects(np.zeros((8, 9, 3), np.uint8), found), tmp_path / "b.png")
    assert imread(tmp_path / "a.png").std() > 0.05 < imread(tmp_path / "b.png").std()


def test_names_of_objects_stay_in_the_image(tmp_path):
    boxes = [np.array(box) for box in ([0, 0, 20, 20], [280, 100, 319, 150], [200, 3, 310, 90])]
    found = [("tvmonitor", 1.0, box) for box in boxes]
    figure = draw_objects(np.zeros((200, 320, 3), np.uint8), dict.fromkeys("abc", found))
    save(figure, tmp_path / "a.png")
    panel = figure.axes[0]
    inside = panel.get_window_extent().padded(2)
    for text in panel.texts:
        extent = text.get_window_extent()
        assert inside.x0 <= extent.x0 < extent.x1 <= inside.x1
        assert inside.y0 <= extent.y0 < extent.y1 <= inside.y1


def test_trials_are_drawn_as_mean_and_deviation():
    def result(value):
        return {"members": [value], "single": value, "ensemble_mean": value + 1, "oracle": value + 2, "parameters": 5}

    panel = draw([outcomes.chart_k({2: [result(10.0), result(20.0)], 1: [result(30.0)]})]).axes[0]
    oracle = next(c for c in panel.containers if c.get_label() == "Oracle")
    assert list(oracle[0].get_ydata()) == [32, 17]
    heights = [float(np.ptp(segment[:, 1])) for segment in oracle[2][0].get_segments()]
    assert heights == pytest.approx([0, 2 * np.std([10, 20], ddof=1)])
    (members,) = [line for line in panel.lines if line.get_label() == "members"]
    assert members.get_xydata().tolist() == [[1, 30], [2, 10], [2, 20]]
    scored = result(10.0) | {"ensemble_scored": 14.0}
    for chart in (
        outcomes.chart_k({1: [result(9.0)], 2: [scored]}),
        outcomes.chart_splits({"a": [result(9.0)], "b": [scored]}),
    ):
        assert [line.y for line in chart.lines if line.name == "Ensemble-Scored"] == [[14.0]]


def test_an_oracle_that_is_no_better_than_the_mean_is_seen_beside_it():
    """Of one member, or of members that are alike."""

    def result(value):
        return {"members": [value] * 2, "single": value, "ensemble_mean": value, "oracle": value, "parameters": 5}

    for panel in (
        draw([outcomes.chart_k({1: [result(30.0)], 2: [result(20.0)]})]).axes[0],
        draw([outcomes.chart_splits({"none": [result(30.0)], "single": [result(20.0)]})]).axes[0],
    ):
        (again,) = (found for found in panel.collections if isinstance(found, LineCollection))
        first, second = (line for line in panel.lines if line.get_linestyle() != "None")
        assert again.get_segments()[0].tolist() == [list(point) for point in zip(*first.get_data(), strict=True)]
        assert to_hex(again.get_color()[0]) == first.get_color().lower() != second.get_color().lower()
        assert first.get_markersize() > second.get_markersize() and first.get_fillstyle() == "none"


def test_names_of_answers_are_apart_and_inside_the_figure():
    places = np.random.default_rng(0).normal(80, 0.4, (12, 2))
    drawn = draw([outcomes.chart_answers({f"a longer name {i}": tuple(place) for i, place in enumerate(places)})])
    panel = drawn.axes[0]
    texts = [text for text in panel.texts if text.get_text()]
    assert [text.get_text() for text in texts] == [f"a longer name {i}" for i in range(12)]
    boxes = [text.get_window_extent() for text in texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= drawn.bbox.x1 for box in boxes)


@pytest.mark.parametrize(
    ("scored", "axis", "named"),
    [
        ((), "Ensemble-Mean (one answer), accuracy, %", []),
        (("a", "b", "c"), "Ensemble-Scored (one answer), accuracy, %", []),
        (("b",), "one answer, accuracy, %", ["Ensemble-Mean", "Ensemble-Scored"]),
    ],
)
def test_the_axis_of_answers_says_what_runs_answer_with(scored, axis, named):
    runs = {"a": (80.0, 90.0), "b": (81.0, 91.0), "c": (80.0, 90.0)}
    figure = draw([outcomes.chart_answers(runs, scored=scored)])
    (panel,) = figure.axes
    assert panel.get_xlabel() == axis
    markers = ["s" if name in scored else "o" for name in "abc"]
    assert [line.get_marker() for line in panel.lines] == markers
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == named
    keys = [handle.get_marker() for legend in figure.legends for handle in legend.legend_handles]
    assert keys == ["o", "s"][: len(named)]
    sizes = [line.get_markersize() for line in panel.lines]
    assert sizes[0] > sizes[2]  # what lies below another is seen around it


def test_a_run_with_scores_is_drawn_by_them(runs):
    plain, scored = (Record.read(runs[name]) for name in ("mcl_k1", "tree"))
    scored = dataclasses.replace(scored, result=scored.result | {"ensemble_scored": 12.5})
    (panel,) = draw_figure("answers", [ShownRun(plain), ShownRun(scored)]).axes
    assert [line.get_xdata()[0] for line in panel.lines[:2]] == [plain.result["ensemble_mean"], 12.5]
    assert [line.get_marker() for line in panel.lines[:2]] == [
        "o",
        "s",
    ] and panel.get_xlabel() == "one answer, accuracy, %"


def test_reliability_is_counted_in_bins_of_confidence():
    rng = np.random.default_rng(0)
    outputs, labels = torch.tensor(3 * rng.normal(size=(2, 500, 4))), torch.tensor(rng.integers(4, size=500))
    found = metrics.ClassificationMetrics(2, 4)
    found.update(outputs, labels)
    p = outputs.softmax(-1)
    for name, predictors in (("members", list(p)), ("Ensemble-Mean", [p.mean(0)])):
        confidence = torch.cat([q.amax(-1) for q in predictors]).numpy()
        right = torch.cat([q.argmax(-1) == labels for q in predictors]).numpy()
        bins = found.reliability()[name]
        for i in range(metrics.BINS):
            here = (confidence > i / metrics.BINS) & (confidence <= (i + 1) / metrics.BINS)
            assert bins["examples"][i] == here.sum()
            if here.any():
                assert bins["confidence"][i] == pytest.approx(100 * confidence[here].mean())
                assert bins["accuracy"][i] == pytest.approx(100 * right[here].mean())


def test_reliability_of_a_run_in_memory_is_that_of_its_own_net():
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), np.arange(90) % 3
    run = fit(TreeNet(lambda: torch.nn.Linear(4, 3), members=1), train=(x, y), test=(x, y), iterations=1)
    panel = run.plot("reliability", x, y).axes[0]
    (line,) = [line for line in panel.lines if line.get_label() == "the network"]
    found = metrics.ClassificationMetrics(1, 3)
    found.update(run.predict(x), torch.from_numpy(y))
    bins = found.reliability()["Ensemble-Mean"]
    drawn = np.array(line.get_ydata(), float)
    np.testing.assert_allclose(drawn[np.isfinite(drawn)], np.array(bins["accuracy"])[np.array(bins["examples"]) > 0])
    with pytest.raises(
        UserError, match=r"does not keep the arrays of its examples: give run\.plot or run\.report x and y"
    ):
        run.plot("reliability")
    numbers = fit(TreeNet(lambda: torch.nn.Linear(4, 3), members=2), train=(x, x[:, :3]), iterations=1)
    with pytest.raises(UserError, match=r"^reliability is only for classification, but this run is regression"):
        numbers.plot("reliability")
    with pytest.raises(UserError, match=r"^disagreement is only for classification, but this run is regression"):
        numbers.plot("disagreement")
    with pytest.raises(UserError, match=r"^this figure is only for regression, but this run is classification"):
        run.plot("hypotheses", x, y)


def test_result_and_log_of_a_finished_run_are_those_of_its_files(runs):
    record = Record.read(runs["single"])
    assert record.finished
    assert record.result["oracle"] == json.loads((runs["single"] / "result.json").read_text())["oracle"]
    assert record.read_assignments()["test"].shape == (2, 1, 10)


def test_figures_of_an_oracle_show_the_guesses_of_one_network(runs):
    """A dotted line where as many guesses of one network are as the ensembles have members."""
    alone, several = Record.read(runs["independent"]), Record.read(runs["mcl_k1"])
    members = several.config.members
    level = alone.result["top_k"]["single"][members - 1]
    for figure in (draw_figure(name, [ShownRun(alone), ShownRun(several)]) for name in ("answers", "k")):
        (panel,) = figure.axes
        (line,) = [line for line in panel.lines if line.get_linestyle() == ":"]
        assert list(line.get_ydata()) == [level, level]
        assert line.get_label() == f"top-{members} of one network (the mean member of {alone.title})"
    (panel,) = draw_figure("answers", [ShownRun(several)]).axes
    assert not [line for line in panel.lines if line.get_linestyle() == ":"]  # MCL's members are not one network


# Hypotheses: answers that are numbers, beside their targets.


def test_hypotheses_about_a_number_are_drawn_against_an_input_that_is_one_number():
    x, y = np.array([[0.5], [0.1], [0.9]]), np.array([[5.0], [1.0], [9.0]])
    hypotheses = np.stack([y + 0.5, -y])
    (chart,) = chart_hypotheses([4, 5, 6], x, y, hypotheses, np.array([[0.2, 0.4, 0.6], [0.8, 0.6, 0.4]]))
    target, first, second = chart.lines
    assert (target.name, target.x, target.y, target.joined) == ("target", [0.1, 0.5, 0.9], [1.0, 5.0, 9.0], False)
    assert (first.name, first.y, first.joined) == ("member 0 (40 %)", [1.5, 5.5, 9.5], True)
    assert (second.name, second.y) == ("member 1 (60 %)", [-1.0, -5.0, -9.0])


def test_hypotheses_about_a_number_of_many_inputs_stand_in_the_order_of_the_targets():
    y = np.array([[3.0], [1.0], [2.0]])
    (chart,) = chart_hypotheses([0, 1, 2], np.zeros((3, 4)), y, np.stack([10 * y]))
    member, target = chart.lines
    assert (member.name, member.x, member.y) == ("member 0", [1, 2, 3], [10.0, 20.0, 30.0])
    assert (target.name, target.y, target.joined, member.joined) == ("target", [1.0, 2.0, 3.0], True, False)


def test_trajectories_have_a_chart_for_each_of_three_examples():
    ways = np.arange(5 * 2 * 2, dtype=float).reshape(5, 2, 2)
    hypotheses = np.stack([ways + 100, ways + 200])
    probabilities = np.linspace(0, 0.9, 10).reshape(2, 5)
    charts = chart_hypotheses([10, 11, 12, 13, 14], np.zeros((5, 1)), ways, hypotheses, probabilities)
    assert [chart.title for chart in charts] == ["Example 10", "Example 12", "Example 14"]
    first, second, target = charts[1].lines
    assert (first.name, first.x, first.y) == ("member 0 (20 %)", [108.0, 110.0], [109.0, 111.0])
    assert second.name == "member 1 (70 %)" and (target.x, target.y) == ([8.0, 10.0], [9.0, 11.0])


def test_every_trajectory_is_named_though_its_percentage_is_that_of_another_example():
    ways = np.arange(3 * 2 * 2, dtype=float).reshape(3, 2, 2)
    charts = chart_hypotheses([0, 1, 2], np.zeros((3, 1)), ways, np.stack([ways + 1, ways + 2]), np.full((2, 3), 0.5))
    for panel in draw(charts).axes:
        names = [text.get_text() for text in panel.get_legend().get_texts()]
        assert names == ["member 0 (50 %)", "member 1 (50 %)", "target"]


def test_targets_that_no_chart_shows_are_refused():
    with pytest.raises(UserError, match=r"targets of shape \[3\] are not drawn: this shows one number"):
        chart_hypotheses([0], np.zeros((1, 1)), np.zeros((1, 3)), np.zeros((2, 1, 3)))


def test_the_hypotheses_of_a_run_are_what_its_members_answer(mheads, tmp_path):
    """By the command, in Python, and on the page; in the units of the targets."""
    run = tmp_path / "run"
    trained = mheads("train", "hypotheses", "loss=scored", "members=3", "optim.iterations=5", "-f", run)
    assert trained.code == 0, trained.err
    done = mheads("plot", "hypotheses", run)
    assert (done.code, done.out.strip()) == (0, str(run / "hypotheses.png"))
    assert np.ptp(imread(run / "hypotheses.png")[..., :3]) > 0.5

    loaded = load(run)
    numbers = ShownRun(Record.read(run)).numbers
    assert len(numbers.rows) == 400 and (numbers.rows[0], numbers.rows[-1]) == (0, 999)
    test = load_data("two_roots").test
    np.testing.assert_array_equal(numbers.targets, test.targets[numbers.rows])
    values, probabilities = loaded.hypotheses(test.read(np.array(numbers.rows), None))
    np.testing.assert_allclose(numbers.hypotheses, values.numpy().swapaxes(0, 1), rtol=1e-5)
    np.testing.assert_allclose(numbers.probabilities, probabilities.numpy().T, rtol=1e-5)

    x = np.linspace(0, 1, 7, dtype="float32")[:, None]
    (panel,) = loaded.plot("hypotheses", x, x).axes
    np.testing.assert_allclose(panel.lines[1].get_ydata(), loaded.hypotheses(x).values[:, 0, 0], rtol=1e-5)
    assert mheads("report", run).code == 0
    page = (run / "report.html").read_text()
    assert "What members answer" in page and "Answers to each input" in page


def test_a_run_of_classes_has_no_hypotheses_to_draw(mheads, runs):
    done = mheads("plot", "hypotheses", runs["mcl_k1"])
    assert done.code == 2 and "this figure is only for regression, but" in done.err
