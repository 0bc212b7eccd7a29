"""What the terminal shows: words in short, and tables that fit."""

import io
from dataclasses import replace

import pytest
import torch

from mheads.cli.printing.answers import details
from mheads.cli.printing.plan import show
from mheads.cli.printing.rank_text import names, numbers, ranks_of
from mheads.cli.printing.result_tables import comparison_table, result_table
from mheads.cli.printing.tree import draw
from mheads.common.console import Console
from mheads.config.read import load
from mheads.data.catalog import DATASETS
from mheads.distributed.planning.placement import Placement
from mheads.distributed.planning.workload import Cluster
from mheads.problems import Classification
from mheads.training.plan_ranks import make_plan


def test_many_names_and_numbers_are_said_in_short():
    assert names(["trunk", "a/0", "a/1", "a/2", "a/4", "b"]) == "trunk, a/0-2, a/4, b"
    assert names(["0", "1", "a/b/0", "a/b/1"]) == "0-1, a/b/0-1"
    assert numbers([3, 1, 2, 7]) == "1-3, 7"
    assert numbers(range(0, 40, 2)) == "0, 2, ..., 38"
    mesh = Placement({}, 4, 8)
    assert ranks_of(mesh, [1]) == "ranks 1, 5, ..., 29"
    assert ranks_of(mesh, [1, 2]) == "ranks 1-2, 5-6, ..., 29-30"
    assert ranks_of(mesh, range(4)) == "ranks 0-31"
    assert ranks_of(Placement({}, 4), [2]) == "rank 2"


def words(text):
    return sorted(word for word in text.split() if set(word) - set("─│├└"))


def printed(thing, columns):
    """The words printed on a terminal of this many columns; asserts that no line is longer."""
    console = Console()
    console.file, console.width = io.StringIO(), columns
    console.print(thing)
    text = console.file.getvalue()
    assert all(len(line) <= columns for line in text.splitlines())
    return words(text)


@pytest.mark.parametrize("command", [["recipes"], ["data", "list"]], ids=" ".join)
def test_no_list_breaks_a_word_or_leaves_one_out_at_80_columns(mheads, monkeypatch, command, tmp_path):
    cached = tmp_path / "a-cache-folder-with-quite-a-long-name-so-that-no-table-of-80-columns-can-hold-it"
    monkeypatch.setenv("MHEADS_DATA", str(cached))
    for name in ("cifar10", "cifar100"):
        here = replace(DATASETS[name], find=lambda root, name=name: cached / name)
        monkeypatch.setitem(DATASETS, name, here)

    def listed(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = mheads(*command)
        assert done.code == 0, done.err
        paths = [line for line in done.out.splitlines() if str(cached) in line]  # which are never broken
        widest = max(len(line) for line in done.out.splitlines() if line not in paths)
        assert widest <= columns
        return words(done.out), widest

    (narrow, _), (wide, widest) = listed(80), listed(400)
    assert narrow == wide
    assert widest > 80  # there was something to fold


@pytest.mark.parametrize(
    ("recipe", "split", "ranks"),
    [("nin_cifar100", "{conv1: [{cccp1: 2}, 2]}", 5), ("nin_ilsvrc", "cccp6", 64)],
    ids=["nested", "replicas"],
)
def test_no_tree_breaks_a_word_or_leaves_one_out_at_80_columns(recipe, split, ranks):
    drawn = draw(load(recipe, [f"split={split}"]), ranks)
    assert "trunk" in printed(drawn, 80)
    assert printed(drawn, 80) == printed(drawn, 400)


@pytest.mark.parametrize(
    ("recipe", "overrides", "ranks"),
    [
        ("cifar10_quick", ["split=conv2"], 100),
        ("digits", ["members=200", "split={conv1: [{conv2: 100}, {conv2: 100}]}"], 64),
    ],
    ids=["idle ranks", "many members"],
)
def test_no_plan_breaks_a_word_or_leaves_one_out_at_80_columns(recipe, overrides, ranks):
    plan = show(make_plan(load(recipe, overrides), Cluster(ranks), 2e12, None, recipe))
    assert "speed-up" in printed(plan, 80)
    assert printed(plan, 80) == printed(plan, 400)


def test_a_file_has_no_right_edge(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = comparison_table({"m" * 300: {**dict.fromkeys(("single", "ensemble_mean", "oracle", "seconds"), 1.0),
                                          "members": [99.5] * 50, "parameters": 7}})  # fmt: skip
    console = Console()
    console.file = io.StringIO()
    console.print(table)
    assert "m" * 300 in console.file.getvalue() and " ".join(["99.5"] * 50) in console.file.getvalue()


def test_predictions_and_comparisons_fit_80_columns():
    members = [98.06, 97.5, 98.61, 98.33]
    one = {
        "problem": "classification",
        "members": members,
        "single": 98.06,
        "ensemble_mean": 99.17,
        "oracle": 100.0,
        "parameters": 54824,
    }
    one |= {"seconds": 11.9, "iterations": 500, "disagreement": 1.2, "nll": {"ensemble_mean": 0.1}}
    one |= {"calibration_error": {"ensemble_mean": 1.0}, "split": "validation", "examples": 1234}
    assert {"1,234", "validation"} <= set(printed(result_table(one), 80))
    problem = Classification(("aquarium_fish", "pickup_truck", "maple_tree"))
    scores = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0))
    things = [
        comparison_table({"independent": one, "TreeNet, conv1": one}),
        result_table(one),
        details("cat.png", problem.answer_text(scores, [problem.mean(scores)]).detail(0)),
    ]
    for thing in things:
        assert printed(thing, 80) == printed(thing, 300)
