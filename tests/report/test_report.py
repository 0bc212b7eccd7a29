"""Pages of runs: what they show, of which numbers, and what they say where something is missing."""

import base64
import dataclasses
import io
import json
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.chromium import CHROMIUM, Browser
from rich.console import Console
from torch import nn

import mheads as package
from mheads.api import evaluate
from mheads.common.errors import UserError
from mheads.common.progress import Silent, Terminal
from mheads.common.table import Cell, Table
from mheads.config import read as configs
from mheads.problems import Classification, MultiLabel
from mheads.problems.baselines import tell_collapse
from mheads.problems.metrics import compute
from mheads.report import evidence, plot, shown_run
from mheads.report.charts.chart import Line, LineChart
from mheads.report.charts.outcomes import chart_reliability, map_ownership_over_time
from mheads.report.charts.over_training import chart_losses, chart_measures
from mheads.report.compare import tabulate_results
from mheads.report.page import describe, one_run, report, several_runs, svg
from mheads.report.page import html as page
from mheads.report.page.html import Missing
from mheads.report.page.one_run import make_page, show_saliency
from mheads.report.page.panels import Panel, make_sections
from mheads.report.page.run_results import tabulate_result
from mheads.report.page.stage_tree import box_stages, name_members
from mheads.report.plot import check_alike, name_split
from mheads.report.shown_run import ShownRun
from mheads.runs.folder import RunFolder
from mheads.runs.metrics_log import Log
from mheads.runs.read_run import Record
from mheads.suites import demo
from mheads.suites import page as suite_page
from mheads.suites.paper_rows import paper_figures
from mheads.training.loop import train_config

QUICK = ("optim.iterations=6", "optim.batch_size=100", "data.limit=100", "log.every=2", "log.evaluate_every=3")
SECTIONS = ["run", "results", "curves", "ownership", "wins", "agreement", "reliability", "hardest"]
SECTIONS += ["saliency", "cost", "repeat"]
EVIL = ["<script>alert(1)</script>", "</script><!--\udc80", '"><img src=x onerror=alert(2)>', "{{7*7}}&amp;"]


class Parsed(HTMLParser):
    """The elements of a page: their attributes by tag, ids, texts, and whether all are closed in order."""

    VOID = ("meta", "link", "input", "img", "hr", "circle", "path", "line", "rect")

    def __init__(self, file):
        super().__init__()
        self.tags, self.ids, self.texts, self._open, self._svg = [], {}, [], [], 0
        self.feed(file.read_text())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if "id" in found:
            assert found["id"] not in self.ids
            self.ids[found["id"]] = tag
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in ("p", "li", "tr", "td") and self._open[-1] != tag:
            raise AssertionError(f"</{tag}> closes <{self._open[-1]}>")
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs by name; one has classes with the names that nobody should have."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    x, y = rng.integers(17, size=(60, 1, 8, 8)).astype(np.uint8), np.arange(60) % len(EVIL)
    np.savez(folder / "evil.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(EVIL))
    soft = np.eye(4, dtype=np.float32)[y] * 0.8 + 0.05
    np.savez(folder / "soft.npz", x_train=x, y_train=soft, x_test=x, y_test=soft)
    npz = ["loss.name=mcl", "model_args.classes=4", "data.name=npz"]
    made = {
        "mcl_k1": ["loss.name=mcl", "loss.k=1"],
        "tree": ["split=conv1"],
        "single": ["members=1"],
        "<b>evil": [*npz, f"data.path={folder / 'evil.npz'}"],
        "soft": [*npz, f"data.path={folder / 'soft.npz'}", "data.problem=soft_labels"],
    }
    for name, overrides in made.items():
        train_config(configs.load("digits", [*QUICK, *overrides]), RunFolder(folder / name), Silent())
    return {name: folder / name for name in made}


def test_a_page_has_every_section_and_asks_nobody_for_anything(mheads, runs):
    done = mheads("report", runs["mcl_k1"])
    file = runs["mcl_k1"] / "report.html"
    assert (done.code, done.out.strip()) == (0, str(file)), done.err
    found = Parsed(file)
    assert [name for name in found.ids if name in SECTIONS] == SECTIONS
    assert [link["href"] for link in found.all("a")][1:] == [f"#{name}" for name in SECTIONS]
    assert "http" not in re.sub(r"http-equiv", "", file.read_text())
    for tag, attributes in found.tags:
        assert attributes.get("src", "data:").startswith("data:")
        assert tag not in ("iframe", "object", "embed", "base")
    assert all("alt" in image for image in found.all("img"))
    assert all(drawing.get("aria-label") or drawing.get("aria-hidden") for drawing in found.all("svg"))
    assert file.stat().st_size < 400_000


def test_the_numbers_are_those_of_the_result(runs):
    record = Record.read(runs["mcl_k1"])
    made = report.make_any_page([record], Silent(), trust=False)
    beside = record.result["top_k"]["ensemble_mean"][record.config.members - 1]
    shown = [record.result["ensemble_mean"], record.result["oracle"], beside, record.result["single"]]
    assert [entry[1] for entry in made.headline] == [f"{value:.2f}" for value in shown]
    sections = {section.name: section for section in made.sections}
    learned, owned = (part.maps[0] for part in sections["ownership"].parts)
    counts = np.asarray(record.result["ownership"])
    np.testing.assert_array_equal(page.cells(owned)[-1], np.round(100 * counts / counts.sum(0)))
    assert owned.moments == ["iteration 3", "iteration 6"]
    assert learned.moments == [f"iteration {i}" for i in (2, 3, 5, 6)]
    steps = record.read_assignments()["steps"]
    totals = steps[0].sum(0)
    there = totals > 0
    np.testing.assert_array_equal(page.cells(learned)[0][:, there], np.round(100 * steps[0][:, there] / totals[there]))
    differ = sections["agreement"].parts[0].maps[0]
    assert page.cells(differ)[0, 1, 2] == round(record.result["disagreement_pairs"][1][2])
    assert page.cells(differ)[0, 1, 1] == page.NOTHING
    assert base64.b64decode(page.encode_cells(owned)["cells"]) == page.cells(owned).tobytes()


def test_confusion_and_hardest_examples_follow_from_the_outputs(runs):
    record = Record.read(runs["tree"])
    found = ShownRun(record).evidence
    outputs, labels = evaluate.outputs_of(runs["tree"])
    p = outputs.double().softmax(-1)
    p = torch.cat([p.mean(0)[None], p])
    for counts, answers in zip(found.confusion, p.argmax(-1), strict=True):
        assert counts.sum() == len(labels)
        assert np.trace(counts) == (answers == labels).sum()
        assert counts[3, 5] == ((labels == 3) & (answers == 5)).sum()
    wrong = p.argmax(-1) != labels
    of_truth = [float(p[0, i, label]) for i, label in enumerate(labels)]
    order = sorted(range(len(labels)), key=lambda i: (not wrong[0, i], of_truth[i], i))
    assert [example.number for example in found.hardest] == order[:24]
    first = found.hardest[0]
    assert first.probability == pytest.approx(100 * of_truth[order[0]])
    assert first.truth == record.data.problem.groups[labels[order[0]]]
    assert [answer.who for answer in first.answers] == ["mean", *(f"member {m}" for m in range(4))]
    assert first.answers[2].confidence == pytest.approx(100 * float(p[2, order[0]].max()))
    assert first.image.startswith("data:image/png;base64,")


def test_soft_labels_are_shown_by_their_most_probable_class(runs):
    record = Record.read(runs["soft"])
    parts = {section.name: section.parts for section in make_page(ShownRun(record)).sections}
    assert list(parts) == SECTIONS
    assert not [part for part in parts.values() if isinstance(part[0], Missing)]
    np.testing.assert_allclose(
        page.cells(parts["agreement"][1].maps[0]).astype(int).sum(2), 100, atol=2
    )  # of each true class
    assert len(parts["ownership"][0].maps[0].pictures) == 4


def test_one_network_is_not_called_an_ensemble(runs):
    for name, lines in (("single", ["the network"]), ("tree", ["members", "Ensemble-Mean"])):
        legend = chart_reliability(ShownRun(Record.read(runs[name])).reliability).legend
        assert [line.name for line in legend] == ["as accurate as confident", *lines]


def test_the_energy_of_the_owners_maps_is_measured_on_the_page(runs):
    record = Record.read(runs["tree"])
    (found,) = show_saliency(ShownRun(record))
    assert re.search(r"^Owner \d+\.\d\d times the energy of the others, on [\d,]+ images\.$", found.note)
    ((_, source, text),) = found.pictures
    assert source.startswith("data:image/png;base64,")
    assert "6 images" in text
    assert f'<p class="wide dim">{found.note}</p>' in make_page(ShownRun(record)).html()


def test_names_from_data_are_shown_and_not_run(mheads, runs):
    assert mheads("report", runs["<b>evil"]).code == 0
    found = Parsed(runs["<b>evil"] / "report.html")
    for name in [*EVIL, "<b>evil"]:
        assert name.replace("\udc80", "?") in found.text
    assert [script.get("type") for script in found.all("script")].count(None) == 1
    assert found.all("b") == []
    assert not [image for image in found.all("img") if "onerror" in image]


def test_an_unfinished_run_and_damaged_files_are_told(mheads, runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mcl_k1"], folder)
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-2]) + lines[-1][:20])
    assert mheads("report", folder).code == 0
    text = Parsed(folder / "report.html").text
    assert "Not finished: iteration 4 of 6" in text
    assert "result.json is missing" in text

    shutil.copytree(runs["mcl_k1"], tmp_path / "damaged")
    for name in ("assignments.npz", "metrics.jsonl"):
        (tmp_path / "damaged" / name).write_bytes(b"nothing of use")
    assert mheads("report", tmp_path / "damaged").code == 0
    text = Parsed(tmp_path / "damaged" / "report.html").text
    assert "metrics.jsonl is damaged" in text
    assert "assignments.npz is damaged" in text
    assert "There is no evaluation in metrics.jsonl yet" in text


def test_a_run_without_its_data_says_so(mheads, runs, tmp_path):
    shutil.copytree(runs["<b>evil"], tmp_path / "run")
    data = runs["<b>evil"].parent / "evil.npz"
    data.rename(tmp_path / "away.npz")
    try:
        assert mheads("report", tmp_path / "run").code == 0
    finally:
        (tmp_path / "away.npz").rename(data)
    found = Parsed(tmp_path / "run" / "report.html")
    assert found.text.count("evil.npz does not exist") == 1
    assert [name for name in found.ids if name in SECTIONS] == SECTIONS  # what is missing has its place


def test_code_of_the_run_is_called_only_if_it_is_trusted(mheads, tmp_path):
    folder = tmp_path / "run"
    given = ("model=user_networks:with_dropout", "members=2", "split=conv", *QUICK)
    assert mheads("train", "digits", *given, "-f", folder).code == 0
    done = mheads("report", folder)
    assert done.code == 0
    printed = " ".join((done.out + done.err).split())
    assert "give --trust" in printed and "the page has nothing in run, agreement, reliability" in printed
    text = Parsed(folder / "report.html").text
    assert text.count("None of it was run. If you trust it, give --trust") == 1
    assert text.count("the reason is above") >= 2
    assert "The tree is not drawn" in text
    assert mheads("report", folder, "--trust").code == 0
    found = Parsed(folder / "report.html")
    assert "grid-confusion" in found.ids
    assert "The tree is not drawn" not in found.text


def test_numbers_instead_of_classes(mheads, tmp_path):
    assert mheads("train", "diabetes", "optim.iterations=4", "-f", tmp_path / "run").code == 0
    done = mheads("report", tmp_path / "run")
    assert done.code == 0, done.err
    found = Parsed(tmp_path / "run" / "report.html")
    assert "agreement" not in found.ids and "the page has nothing in" not in done.out + done.err
    text = found.text
    assert "Who owns which examples" in text


def test_several_runs_are_compared(mheads, runs, tmp_path):
    file = tmp_path / "all.html"
    done = mheads("report", *(runs[name] for name in ("single", "tree", "mcl_k1")), "-o", file)
    assert (done.code, done.out.strip()) == (0, str(file)), done.err
    found = Parsed(file)
    for name in ("runs", "settings", "curves", "ownership", "repeat"):
        assert found.ids[name] == "section"
    assert "split null conv1 null" in found.text
    assert "mheads train digits members=1" in found.text
    assert [name for name in found.ids if name.startswith("grid-")] == ["grid-owned-1", "grid-owned-2"]
    assert "Best Ensemble-Mean" in found.text

    done = mheads("report", runs["tree"], runs["<b>evil"], "-o", file)
    assert done.code == 0, done.err
    text = Parsed(file).text
    assert "Best" not in text and "digits, 10 classes" in text and "npz, 4 classes" in text  # none is the better one


@pytest.mark.parametrize("other", ["data.validation=30", "data.limit=50"])
def test_runs_on_other_examples_of_the_same_data_are_told_apart(mheads, runs, tmp_path, other):
    run = tmp_path / "other"
    train_config(configs.load("digits", [*QUICK, "loss=mcl", other]), RunFolder(run), Silent())
    done = mheads("report", runs["mcl_k1"], run, "-o", tmp_path / "both.html")
    assert done.code == 0, done.err
    text = Parsed(tmp_path / "both.html").text
    assert "Best" not in text and "test set, 100 examples" in text
    assert ("validation set, 30 examples" if "validation" in other else "test set, 50 examples") in text
    for name in ("k", "answers"):
        done = mheads("plot", name, runs["mcl_k1"], run, "-o", tmp_path / "both.png")
        assert done.code == 2 and "plot those that are alike" in done.err


def test_a_column_of_numbers_is_one_wherever_they_begin():
    table = Table("", ["run", "score", "loss"], [[Cell("a"), Cell(""), Cell("x")],
                                                      [Cell("b"), Cell("1", 1), Cell("y")]])  # fmt: skip
    assert table.numbers == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give run folders, or --suite SUITE"),
        (("single", "--suite", "mcl"), "give run folders, or --suite SUITE"),
        (("single", "-o", "page.pdf"), "give a file that ends in .html or .htm"),
        (("single", "-o", "nowhere/page.html"), "there is no folder nowhere"),
        (("nowhere",), "nowhere is not a run folder: it has no config.yaml"),
        ((".", "--watch"), ". is not empty and not a run folder"),  # no run can begin there
        (("--suite", "mcl", "-f", "nowhere", "-o", "x.html"), "nowhere holds no run of mcl on cifar10_quick"),
    ],
)
def test_what_cannot_be_reported_is_said(mheads, runs, arguments, message):
    done = mheads("report", *(runs.get(argument, argument) for argument in arguments))
    assert done.code == 2
    assert message in done.err


def test_the_confusions_of_the_mean_are_those_of_the_mean_that_was_trained(tmp_path):
    folder = RunFolder(tmp_path / "run")
    config = configs.load("digits", [*QUICK, "loss=score_averaged", "data.limit=400", "optim.iterations=30"])
    train_config(config, folder, Silent())
    record = Record.read(folder.path)
    found = ShownRun(record).evidence.confusion[0]
    assert 100 * np.trace(found) / found.sum() == pytest.approx(record.result["ensemble_mean"])
    outputs, labels = evaluate.outputs_of(folder.path)
    assert record.result["ensemble_mean"] != pytest.approx(compute(outputs, labels).ensemble_mean)


def test_the_command_trains_the_same_again(runs):
    for name in ("mcl_k1", "tree", "single"):
        config = Record.read(runs[name]).config
        _, _, recipe, *overrides = describe.command(config).split()
        assert configs.load(recipe, overrides) == config
    arrays = config.model_copy(update={"data": config.data.model_copy(update={"name": "arrays"})})
    assert describe.command(arrays).startswith("mheads.fit(...) in Python")  # which no command can


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["loss=independent"], "each by itself"),
        (["loss=mcl"], "by Multiple Choice Learning: each example teaches the member that does best on it"),
        (
            ["loss=mcl", "loss.k=2", "loss.ce_weight=4"],
            "by Multiple Choice Learning: each example teaches the 2 members that do best on it, and all members with "
            "a weight of 4",
        ),
        (["loss=relaxed"], "with the loss relaxed"),
        (["loss.name=my_losses:factory"], "with the loss my_losses:factory"),
    ],
)
def test_how_members_learn_is_said_as_the_loss_says_it(overrides, text):
    assert describe.describe_loss(configs.load("digits", overrides)) == text


def test_members_of_a_fit_without_a_split_are_said_to_share_nothing_as_those_of_a_recipe_are():
    examples = np.zeros((6, 4), np.float32), np.arange(6) % 3
    run = package.fit(
        package.TreeNet(lambda: nn.Linear(4, 3), members=3), train=examples, test=examples, iterations=1, show=False
    )
    assert run.config.split == 3  # the forest as Python writes it
    assert dict(describe.facts(run.record()))["Members"] == "3"
    assert "networks with nothing in common" in describe.sentence(run.record())
    recipe = dataclasses.replace(run.record(), config=configs.load("digits"))
    assert check_alike([recipe, run.record()], name_split) is None
    split = dataclasses.replace(run.record(), config=configs.load("digits", ["split=conv1"]))
    assert dict(describe.facts(split))["Members"] == "4, split conv1"


def test_a_title_keeps_the_capitals_of_a_measure():
    evaluations = [{"iteration": 1, "members": [1.0], "split": "test"}]
    assert chart_measures(evaluations, "mean IoU, %").title == "Mean IoU on the test set"


@pytest.mark.parametrize(("size", "text"), [(23_456, "0.023 MB"), (2_340_000, "2.3 MB"), (1_446_000_000, "1,446 MB")])
def test_sizes_have_at_least_two_digits(size, text):
    assert describe.megabytes(size) == text


def test_the_papers_figures_are_found_by_the_config():
    row, figures = paper_figures(configs.load("cifar10_quick", ["loss.name=mcl", "loss.k=1", "seed=3"]))
    assert row == "mcl_k1 of mcl, cifar10_quick"
    assert figures["oracle"]["mean"] == 93.10
    assert paper_figures(configs.load("cifar10_quick", ["loss.name=mcl", "optim.iterations=10"])) is None
    assert paper_figures(configs.load("digits")) is None


def test_a_suite_is_shown_beside_the_paper(mheads, tmp_path):
    recipe, suite = tmp_path / "tiny.yaml", tmp_path / "two.yaml"
    text = configs.load("digits", [*QUICK, "members=2"]).to_yaml()
    recipe.write_text(text)
    suite.write_text(
        "# Two rows.\nrows: [{name: plain}, {name: mcl, set: [loss=mcl]}, {name: later, set: [members=2]}]\n"
        "paper: {tiny: {plain: {oracle: 55.5}}}\nclaims: [{left: mcl.oracle, is: better, right: plain.single}]\n"
    )
    given = (str(suite), "--recipe", str(recipe), "-f", tmp_path / "runs")
    done = mheads("reproduce", *given, "--only", "plain", "--only", "mcl", "-o", tmp_path / "results")
    assert done.code == 0, done.err
    done = mheads("report", "--suite", *given)
    assert done.code == 0, done.err
    file = tmp_path / "runs" / "two-tiny.html"
    assert done.out.strip() == str(file)
    found = Parsed(file)
    assert "Two rows." in found.text
    assert (
        "55.50" in found.text
        and "Not run: later." in found.text
        and "mcl.oracle is better than plain.single" in found.text
    )
    assert [name for name in found.ids if name.startswith("grid-")] == ["grid-owned-0", "grid-owned-1"]

    foreign = tmp_path / "runs/tiny/mcl-seed1"
    assert mheads("train", recipe, "optim.lr=0.5", "loss=mcl", "seed=1", "-f", foreign).code == 0
    done = mheads("report", "--suite", *given)
    assert done.code == 0 and f"left out: {foreign} is in the way" in done.out
    assert "mcl, seed 1" not in Parsed(file).text


def test_a_suite_has_a_recipe_of_its_own_and_runs_of_any_seed(mheads, tmp_path):
    suite = tmp_path / "two.yaml"
    suite.write_text(f"rows: [{{name: plain, set: [{', '.join(QUICK)}]}}]\nrecipe: digits\n")
    given = (str(suite), "-f", tmp_path / "runs", "--validation", "20")
    done = mheads("reproduce", *given, "--seed", "3", "-o", tmp_path / "results")
    assert done.code == 0, done.err
    done = mheads("report", "--suite", *given)
    assert done.code == 0, done.err
    assert "plain, seed 3" in Parsed(tmp_path / "runs" / "two-digits-validation20.html").text


def test_the_best_of_a_suite_is_a_mean_over_trials(mheads, tmp_path):
    suite = tmp_path / "two.yaml"
    rows = [f"{{name: {name}, set: [{', '.join([*QUICK, given])}]}}" for name, given in
            (("plain", "members=2"), ("slow", "optim.lr=1e-6"))]  # fmt: skip
    suite.write_text(f"recipe: digits\nrows: [{', '.join(rows)}]\n")
    assert mheads("reproduce", suite, "-f", tmp_path / "runs", "--trials", "2", "-o", tmp_path / "results").code == 0
    assert mheads("report", "--suite", suite, "-f", tmp_path / "runs").code == 0
    found = [
        json.loads((tmp_path / f"runs/digits/plain-seed{seed}/result.json").read_text())["ensemble_mean"]
        for seed in (0, 1)
    ]
    text = Parsed(tmp_path / "runs" / "two-digits.html").text
    assert re.search(rf"Best Ensemble-Mean {np.mean(found):.2f} ± {np.std(found, ddof=1):.2f} % plain ", text)


class Warned(Silent):
    """Keeps what it is warned of."""

    def __init__(self):
        self.said = []

    def warn(self, message):
        self.said.append(message)


def test_a_watched_page_follows_until_the_run_is_finished(runs, tmp_path, monkeypatch):
    build, watch = shown_run.build_net_of_run, Warned()

    def warning(folder, config, warn, trust):
        warn("other code")
        return build(folder, config, warn, trust=trust)

    monkeypatch.setattr(shown_run, "build_net_of_run", warning)
    folder, file = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(runs["mcl_k1"], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.json").rename(tmp_path / "result.json")
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    seen = []

    def wait(seconds):
        text = file.read_text()
        seen.append((re.search(r"iteration (\d) of 6", text)[1], 'data-refresh="5"' in text))
        if len(seen) == 1:
            (folder / "metrics.jsonl").write_text("".join(lines[:3]))
        elif len(seen) == 2:
            (folder / "metrics.jsonl").write_text("".join(lines))
            (tmp_path / "result.json").rename(folder / "result.json")

    assert report.follow([folder], file, watch, wait=wait) == file
    assert watch.said == ["other code"] * 2  # of the first page and of the last
    assert seen == [("3", True), ("4", True)]
    assert "data-refresh" not in file.read_text() and "Not finished" not in file.read_text()
    assert "grid-confusion" in Parsed(file).ids


def test_a_run_is_waited_for_and_its_page_stays_when_it_is_gone(runs, tmp_path, capsys):
    folder, file = tmp_path / "run", tmp_path / "page.html"
    waited = []

    def wait(seconds):
        waited.append(file.exists())
        if len(waited) == 2:
            shutil.copytree(runs["mcl_k1"], folder)
            (folder / "result.json").unlink()
        elif len(waited) == 3:
            assert "data-refresh" in file.read_text()
            shutil.rmtree(folder)

    with pytest.raises(UserError, match="run is not a run folder"):
        report.follow([folder], file, Terminal(Console(width=300)), wait=wait)
    assert waited == [False, False, True]
    assert capsys.readouterr().out.count(f"waiting for {folder} to begin; Ctrl-C ends this") == 1
    assert "Not finished" in file.read_text() and "data-refresh" not in file.read_text()


def test_ctrl_c_leaves_a_page_that_no_longer_loads_itself(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mcl_k1"], folder)
    (folder / "result.json").unlink()

    def wait(seconds):
        raise KeyboardInterrupt

    file = report.follow([folder], None, Silent(), wait=wait)
    assert "Not finished" in file.read_text() and "data-refresh" not in file.read_text()


def test_a_long_history_of_many_classes_stays_small():
    counts = np.random.default_rng(0).integers(0, 5, size=(256, 50, 1000))
    names = [f"class {c}" for c in range(1000)]
    grid = page.thin_out(map_ownership_over_time("owned", "", np.arange(256), counts, names))
    assert grid.percents.shape[1:] == (50, page.MOST_COLUMNS)
    assert grid.percents.size <= page.MOST_CELLS
    assert (grid.moments[0], grid.moments[-1]) == ("iteration 0", "iteration 255")


def test_lines_have_gaps_where_there_is_no_number():
    drawn = str(
        svg.draw_chart(LineChart("", [Line("<a>", [0, 1, 2, 3, 4], [1.0, 2.0, None, float("nan"), 3.0])], "x", "y"))
    )
    assert drawn.count("<path") == 2 and drawn.count('class="dot"') == 1
    assert "<title>&lt;a&gt;</title>" in drawn and "nan" not in drawn
    assert svg._ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert svg._ticks(0.013, 0.052)[0] <= 0.013


def test_many_leaves_that_are_alike_are_drawn_once():
    nodes = {"trunk": SimpleNamespace(layers=("conv",), members=range(40), children=[f"b/{m}" for m in range(40)])}
    nodes |= {f"b/{m}": SimpleNamespace(layers=("fc",), members=(m,), children=()) for m in range(40)}
    (trunk,) = box_stages(nodes, ["trunk"], {"conv": 5, "fc": 7}, {"trunk": 1})
    assert (trunk.title, trunk.parameters, trunk.note, trunk.colour) == ("trunk", 5, "rank 1", "")
    (leaf,) = trunk.children
    assert (leaf.title, leaf.parameters, leaf.note) == ("members 0 to 39", 7, "each with its own")
    few = {name: node for name, node in nodes.items() if name in ("b/3", "b/9")}
    assert [(box.title, box.colour) for box in box_stages(few, list(few), {"fc": 7}, {})] == [
        ("member 3", "s3"),
        ("member 9", "s1"),
    ]
    assert [name_members(m) for m in ((3,), (1, 2), (0, 2))] == ["member 3", "members 1 to 2", "members 0, 2"]


# In a browser.

QUIET = ("optim.iterations=12", "log.every=2", "log.evaluate_every=4", "data.limit=200")


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    """The page of the demo, with shorter runs."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        shorter = {t: [*(o for o in given if o[:8] != "pretrain"), *QUIET] for t, given in demo.ENSEMBLES.items()}
        patch.setattr(demo, "ENSEMBLES", shorter)
        demo.write_demo(folder, demo.train_demo(folder, Console(file=io.StringIO())))
    return folder / "report.html"


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_pages_work_in_a_browser(mheads, runs, demo_page):
    assert mheads("report", runs["<b>evil"]).code == 0
    assert mheads("report", runs["mcl_k1"]).code == 0
    pages = [demo_page, runs["mcl_k1"] / "report.html", runs["<b>evil"] / "report.html"]
    with Browser() as browser:
        for file in pages:
            for width in (1280, 390):
                browser.size(width, dark=width == 390)
                browser.open(file)
                assert browser.complaints == []
                assert [url for url in browser.requests if not url.startswith(("data:", "file:"))] == []
                assert [url.rpartition("/")[2] for url in browser.requests if url.startswith("file:")] == [
                    "report.html"
                ]
                assert browser.js("document.documentElement.scrollWidth") <= width
                assert browser.js("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
                assert browser.js("[...document.querySelectorAll('figure > svg')].every(s => s.clientWidth > 300)")
            _ownership_moves(browser)
        _rows_are_sorted(browser, demo_page)
        _the_page_follows(browser, runs["mcl_k1"])
        _themes_change(browser)
        browser.open(pages[1])
        choose = "(s => { s.value = '2'; s.dispatchEvent(new Event('change')) })(document.querySelector('select'))"
        cells = "document.querySelector('#grid-confusion tbody').textContent"
        before = browser.js(cells)
        browser.js(choose)
        assert browser.js(cells) != before


def _ownership_moves(browser):
    """The slider, by keyboard too, and the play button change what is shown."""
    cells = "[...document.querySelectorAll('#ownership tbody td')].map(c => c.textContent).join()"
    slider = "document.querySelector('#ownership input')"
    last = browser.js(cells)
    browser.js(f"(s => {{ s.value = 0; s.dispatchEvent(new Event('input')) }})({slider})")
    first = browser.js(cells)
    assert first != last
    browser.js(f"{slider}.focus()")
    for kind in ("keyDown", "keyUp"):
        browser("Input.dispatchKeyEvent", type=kind, key="End", code="End", windowsVirtualKeyCode=35)
    assert browser.js(cells) == last
    said = "document.querySelector('#ownership output').textContent"
    assert re.search(r"iteration|100 %", browser.js(said))
    ended = browser.js(
        """new Promise(done => {
          const button = document.querySelector('#ownership .play'), seen = [];
          const watch = new MutationObserver(() => {
            seen.push(document.querySelector('#ownership input').value);
            if (button.getAttribute('aria-pressed') === 'false') { watch.disconnect(); done(seen); }
          });
          button.click();
          watch.observe(button.closest('.player'), { attributes: true, subtree: true, childList: true });
        })"""
    )
    assert len(set(ended)) > 1 and browser.js(cells) == last


def _rows_are_sorted(browser, file):
    browser.open(file)
    column = "[...document.querySelectorAll('#runs tbody tr')].map(r => r.cells[1].textContent)"
    head = "document.querySelectorAll('#runs thead th')[1]"
    browser.js(f"{head}.querySelector('button').focus()")
    for order, state in ((-1, "descending"), (1, "ascending")):
        for kind in ("keyDown", "keyUp"):
            browser("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
        values = [float(value) for value in browser.js(column)]
        assert values == sorted(values, key=lambda value: order * value)
        assert browser.js(f"{head}.getAttribute('aria-sort')") == state


def _the_page_follows(browser, run):
    """A page of a run that goes on loads itself again, and stays where the reader was."""
    made = dataclasses.replace(report.make_any_page([Record.read(run)], Silent(), False, look=False), refresh=2)
    file = run / "live.html"
    file.write_text(made.html())
    browser.open(file)
    browser.js("scrollTo({ top: 700, behavior: 'instant' })")
    slider = "document.querySelector('#ownership input')"
    browser.js(
        f"{slider}.value = 0; {slider}.dispatchEvent(new Event('input')); {slider}.focus({{preventScroll: true}})"
    )
    cells = browser.js("document.querySelector('#ownership tbody').textContent")
    file.write_text(made.html().replace("<h1>", "<h1>Again "))
    browser.wait_for("Page.loadEventFired")
    assert browser.js("document.querySelector('h1').textContent").startswith("Again ")
    assert browser.js("scrollY") == 700
    assert browser.js(f"document.activeElement === {slider}")
    assert browser.js("document.querySelector('#ownership tbody').textContent") == cells
    assert browser.complaints == []


def _themes_change(browser):
    ground = "getComputedStyle(document.body).backgroundColor"
    before = browser.js(ground)
    browser.js("document.getElementById('theme').click()")
    assert browser.js(ground) != before
    ink = "getComputedStyle(document.body).color"
    shades = {}
    for theme in ("light", "dark"):  # paper is white, whatever the screen is
        browser.js(f"document.documentElement.dataset.theme = '{theme}'")
        browser("Emulation.setEmulatedMedia", media="print")
        shades[theme] = browser.js(ink)
        browser("Emulation.setEmulatedMedia", media="")
    assert shades["dark"] == shades["light"] != browser.js(ink)


# What a page says of several runs, and of lines.


def test_the_hardest_examples_are_the_ensembles_and_not_those_of_most_members():
    examples = [  # the truth, and the probabilities of three members
        (0, [[0.98, 0.01, 0.01], [0.33, 0.34, 0.33], [0.33, 0.34, 0.33]]),  # two are wrong, their mean is right: 0.547
        (1, [[0.90, 0.05, 0.05], [0.30, 0.40, 0.30], [0.30, 0.40, 0.30]]),  # one is wrong, and the mean too: 0.283
        (0, [[0.90, 0.05, 0.05], [0.90, 0.05, 0.05], [0.20, 0.70, 0.10]]),  # 0.667
        (0, [[0.45, 0.50, 0.05]] * 3),  # all are wrong, if only just: 0.45
        (0, [[0.50, 0.20, 0.30], [0.28, 0.36, 0.36], [0.30, 0.40, 0.30]]),  # right, although 0.36
        (2, [[0.20, 0.20, 0.60]] * 3),  # nobody is wrong
    ]
    labels = np.array([truth for truth, _ in examples])
    p = torch.tensor([found for _, found in examples]).double().transpose(0, 1)  # [M, N, C]
    sure, said = torch.cat([p.mean(0)[None], p]).max(-1)
    of_truth = p.mean(0)[range(len(labels)), labels]
    table = SimpleNamespace(shape=(4,))
    found = evidence.choose_hardest(
        table, ["a", "b", "c"], ["Ensemble-Mean"], said.numpy(), sure.numpy(), labels, of_truth.numpy()
    )
    assert [example.number for example in found] == [1, 3, 4, 0, 2]
    assert [example.answers[0].right for example in found] == [False, False, True, True, True]
    assert found[0].probability == pytest.approx(100 * (0.05 + 0.4 + 0.4) / 3)


def recorded(title, *results, steps=()):
    """A finished run that was evaluated to these results, without its folder."""
    problem = Classification(("a", "b"))
    evaluations = [{"iteration": i, "split": "test", **result} for i, result in enumerate(results)]
    data = SimpleNamespace(problem=problem, name="digits", fingerprint="1", shape=(4,))
    log, config = Log(list(steps), evaluations), configs.load("digits")
    last = results[-1] | {"split": "test"} if results else None
    return Record(title, SimpleNamespace(path=title, problems=dict), config, data, log, last, True)


def test_all_runs_that_are_equal_as_shown_are_the_best():
    runs = [
        recorded("one", {"ensemble_mean": 99.171, "oracle": 99.4}),
        recorded("two", {"ensemble_mean": 98.0, "oracle": 99.5}),
        recorded("three", {"ensemble_mean": 99.169, "oracle": 99.4}),
    ]
    assert several_runs.headline(runs) == [
        ("Best Ensemble-Mean", "99.17", "%", "one, three"),
        ("Best Oracle", "99.50", "%", "two"),
    ]
    near = {"ensemble_mean": 90.0, "oracle": 99.6, "members": [1.0, 2.0], "oracle_chance": 99.6}
    sure = near | {"oracle": 100.0, "oracle_chance": 100.0}  # as many members as classes
    runs += [recorded("near", near), recorded("sure", sure)]
    assert several_runs.headline(runs)[1] == ("Best Oracle", "99.60", "%", "near (by chance 99.60)")
    assert [name for name, *_ in several_runs.headline(runs[-1:])] == ["Best Ensemble-Mean"]
    (table,) = several_runs.show_table([ShownRun(run) for run in runs])
    assert table.note.endswith("The Oracle by chance: near 99.60, sure 100.00.")
    page = one_run.headline(recorded("sure", sure | {"single": 1.5}))
    assert page[1] == (
        "Oracle",
        "100.00",
        "%",
        "accuracy if the best member is picked for each example (by chance 100.00)",
    )
    assert several_runs.find_best({"a": 0.5, "b": 0.25, "c": 0.2501}, False, "{:.2f}".format) == ("0.25", ["b", "c"])


@pytest.mark.parametrize(
    ("oracle", "chance", "told"),
    [(40.0, 40.28, True), (46.0, 40.28, True), (46.5, 40.28, False), (99.4, 40.28, False), (100.0, 100.0, False)],
)
def test_an_ensemble_at_chance_is_told_on_the_page_and_in_the_figure(oracle, chance, told):
    """Chance and a tenth of the way from there to 100 %: 46.25. With as many members as classes there is no chance."""
    result = {"members": [10.0] * 2, "oracle": oracle, "oracle_chance": chance, "ownership": [[3, 0], [0, 3]]}
    note = tell_collapse(result)
    assert note.startswith(f"The Oracle, {oracle:.2f} %, is about that of") if told else not note
    (chart,) = plot.ownership([SimpleNamespace(record=recorded("run", result))])
    assert chart.title == ("Oracle near chance: members may have collapsed" if told else "")


def test_the_page_of_a_run_whose_members_collapsed_says_so(tmp_path):
    folder = RunFolder(tmp_path / "run")
    train_config(configs.load("digits", [*QUICK, "loss=mcl", "optim.lr=1e-12"]), folder, Silent())
    record = Record.read(folder.path)
    assert record.result["oracle"] < record.result["oracle_chance"]  # nothing was learned
    assert make_page(ShownRun(record)).notes == [f"{tell_collapse(record.result)}."]


def test_an_oracle_of_several_labels_is_not_said_to_be_above_the_mean():
    # In its numbers it may be below: the precision of a class ranks all examples, whichever member answers them.
    record = recorded("labels", {"ensemble_mean": 80.0, "oracle": 70.0, "members": [1.0, 2.0], "single": 1.5})
    record.data.problem = MultiLabel(("a", "b"))
    assert one_run.headline(record)[1] == (
        "Oracle",
        "70.00",
        "%",
        "mean average precision if the member with the lowest loss is picked for each example; since precision is over "
        "all examples together, this need not be above the others",
    )


def test_all_rows_of_a_suite_that_are_equal_as_shown_are_the_best():
    result = {"problem": "classification", "oracle": 90.0}
    document = {
        "rows": [{"name": name, "run": name} for name in "abc"],
        "runs": {name: [{"seed": 0, "result": result | {"ensemble_mean": mean}}]
                 for name, mean in (("a", 80.0), ("b", 81.0), ("c", 81.001))},
    }  # fmt: skip
    assert [(value, who) for _, value, _, who in suite_page._best(document)] == [
        ("81.00", "b, c"),
        ("90.00", "a, b, c"),
    ]
    document["runs"]["b"][0]["result"]["oracle_chance"] = 100.0
    assert suite_page._best(document)[1][-1] == "a, c"


def compared(records):
    (chart,) = several_runs.show_one_answer([ShownRun(record) for record in records])
    return chart


def test_runs_with_scores_are_compared_by_what_they_answer_with_and_say_so():
    mean = recorded("plain", {"ensemble_mean": 90.0, "oracle": 95.0}, {"ensemble_mean": 91.0, "oracle": 96.0})
    results = [{"ensemble_mean": 10.0 + i, "ensemble_scored": 92.0 + i, "oracle": 97.0} for i in (0, 1)]
    scored = recorded("scored", *results)
    assert several_runs.headline([mean, scored])[0] == ("Best one answer", "93.00", "%", "scored (Ensemble-Scored)")
    chart = compared([mean, scored])
    assert (chart.title, [line.name for line in chart.legend]) == (
        "One answer", ["plain, Ensemble-Mean", "scored, Ensemble-Scored"],
    )  # fmt: skip
    assert "plain, Ensemble-Mean: from 90 to 91; scored, Ensemble-Scored: from 92 to 93" in str(svg.draw_chart(chart))
    chart = compared([mean, mean])
    assert (chart.title, [line.name for line in chart.legend]) == ("Ensemble-Mean", ["plain", "plain"])


def test_scores_are_named_with_the_loss_and_only_classes_are_called_so():
    run = dataclasses.replace(recorded("run"), config=configs.load("digits", ["loss=mcl", "loss.scores=0.5"]))
    (row,) = tabulate_results([run]).rows
    assert "mcl, k=1, scores=0.5" in [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in row]
    assert describe.loss_text(run.config).startswith("mcl (") and "scores=0.5)" in describe.loss_text(run.config)
    panels = {"owned": Panel("ownership", lambda run: [Missing("x")])}
    for groups, share in ((("a", "b"), "share of a class,"), (("all",), "share of all examples,")):
        (section,), _ = make_sections(panels, run, groups)
        assert share in section.lead


def test_the_loss_that_is_trained_is_drawn_beside_the_members_own():
    steps = [
        {"iteration": i, "loss": loss, "member_losses": [own, own + 1]}
        for i, loss, own in ((1, 0.7, 6.0), (2, 0.1, 16.0), (3, 0.01, 9.0))
    ]
    chart = chart_losses(steps)
    assert [line.name for line in chart.legend] == ["member 0", "member 1", "trained loss"]
    assert chart.legend[-1].colour == "ink"
    assert "trained loss: from 0.7 to 0.01" in str(svg.draw_chart(chart)) and "may rise meanwhile" in chart.note
    # By the logarithm, a third of the way from 0.01 to 10 is 0.1.
    assert [text for text in re.findall(r'class="end">([^<]*)<', str(svg.draw_chart(chart))) if "." in text] == [
        "0.01",
        "0.1",
    ]
    old = [{key: value for key, value in step.items() if key != "loss"} for step in steps]
    assert [line.name for line in chart_losses(old).legend] == ["member 0", "member 1"]


def test_a_run_that_is_not_finished_is_not_set_beside_the_paper():
    config = configs.load("cifar10_quick", ["loss.name=mcl", "loss.k=1"])
    result = {"members": [30.0] * 4, "single": 30.0, "ensemble_mean": 40.0, "oracle": 80.0, "examples": 9}
    for finished, head in ((True, ["measure", "here", "paper", "difference"]), (False, ["measure", "here"])):
        record = dataclasses.replace(recorded("run", result), config=config, finished=finished)
        record.data.problem = SimpleNamespace(name="classification", rows=lambda result: [("Oracle", "80.00 %")])
        table = tabulate_result(record, paper_figures)
        assert table.head == head


def test_the_page_of_an_earlier_run_leaves_the_weights_that_its_net_has_now(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32), np.arange(40) % 3
    net = package.TreeNet(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3)), members=2)
    common = {"train": (x, y), "test": (x, y), "iterations": 3}
    first = package.fit(net, folder=tmp_path / "run", **common)
    package.fit(net, init=net, lr=0.1, **common)
    now = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.warns(UserWarning, match="the weights of this net have changed since the run"):
        first.report(tmp_path / "page.html", x, y)
    assert all(torch.equal(tensor, now[name]) for name, tensor in net.state_dict().items())
    found = Parsed(tmp_path / "page.html")
    assert "What members look at" in found.text and "was trained from Python on arrays" not in found.text


def test_a_run_of_a_script_writes_its_page_with_the_network_and_the_examples_at_hand(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    net = package.TreeNet(lambda: nn.Linear(4, 3), members=2)
    run = package.fit(net, train=(x, np.arange(60) % 3), test=(x, np.arange(60) % 3), iterations=3)
    assert run.report(tmp_path / "page.html", x, np.arange(60) % 3) == tmp_path / "page.html"
    assert "grid-confusion" in Parsed(tmp_path / "page.html").ids
    with pytest.raises(UserError, match=r"ends in \.html"):
        run.report(tmp_path / "page.pdf")
