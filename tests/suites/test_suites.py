"""Suites as data: what rows stand for, what a table says of results, and what is wrong with a file."""

import json
import math
from pathlib import Path

import pytest

from mheads.common.errors import UserError
from mheads.config import read as configs
from mheads.optim.schedules import Schedule
from mheads.suites import findings
from mheads.suites.claims import Claim, MetricTerm
from mheads.suites.expand import binary_tree
from mheads.suites.jobs import Options, find_difference
from mheads.suites.markdown import markdown
from mheads.suites.metric_names import metric_names, read_figure
from mheads.suites.planner import Planner, hide_local_paths, scale_training
from mheads.suites.results import command, make_document
from mheads.suites.run_entries import evenness
from mheads.suites.suite import SUITES, read_suite
from mheads.suites.verdicts import verdicts

PAPER = ("cifar10_quick", "nin_cifar100", "caffenet", "nin_ilsvrc")


def planned(suite, recipe, *overrides, **options):
    planner = Planner(Options(recipe, overrides=tuple(overrides), **options))
    return planner, planner.expand(read_suite(suite))


def rows(suite, recipe, *overrides):
    return planned(suite, recipe, *overrides)[1].names


# Rows.


FOREST = ("fast", "forest", "forest_full", "forest_rates")  # which name layers of one network


@pytest.mark.parametrize("recipe", [*PAPER, "digits", "cifar10_resnet20", "cifar10_fast"])
def test_every_suite_has_runs_for_every_recipe_and_rows_of_one_name_are_one_run(recipe):
    planner, found = Planner(Options(recipe)), {}
    for name in [name for name in SUITES if (name in FOREST) == (recipe == "cifar10_fast")]:
        suite = read_suite(name)
        table = planner.expand(suite)
        assert set(table.paper) <= set(table.names)  # the paper has no figure for a row that is not there
        for row in table.names:
            job = planner.job(suite, row, 0)
            assert job.path.name == f"{job.row}-seed0"
            same = found.setdefault(job.path, job)
            assert find_difference(same.config, job.config) is None
    assert planner.job(read_suite("standard"), "random_init", 0).config == configs.load(recipe, ["seed=0"])


def test_a_mixture_in_the_forest_takes_steps_as_large_as_cross_entropy_by_itself():
    """Its weights are 4 + 1/4 on average: learning rates of SGD are divided by that, what decays does so as before."""
    planner, table = planned("forest", "cifar10_fast")
    mixtures = [name for name in table.names if name.endswith("_mixture")]
    assert len(mixtures) == 7
    for name in mixtures:
        mixture, plain = (
            planner.job(read_suite("forest"), row, 0).config for row in (name, name.removesuffix("_mixture"))
        )
        assert (mixture.loss.name, mixture.loss.k, mixture.loss.ce_weight) == ("mcl", 1, 4)
        assert mixture.loss.base_loss == plain.loss.base_loss == {"name": "cross_entropy", "smoothing": 0.2}
        groups = plain.optim.parameter_groups
        assert mixture.optim.parameter_groups.keys() == groups.keys()
        for key, group in mixture.optim.parameter_groups.items():
            assert group.lr == pytest.approx(groups[key].lr / 4.25)
            assert group.lr * group.weight_decay == pytest.approx(groups[key].lr * groups[key].weight_decay, rel=1e-5)
            assert group.until == groups[key].until
        same = {"loss", "optim"}
        assert mixture.model_dump(exclude=same) == plain.model_dump(exclude=same)


def test_rows_are_the_papers_experiments():
    planner, _ = planned("standard", "cifar10_quick")

    def config(suite, row):
        return planner.job(read_suite(suite), row, 3).config

    assert config("standard", "bagging") == configs.load("cifar10_quick", ["sampling=bagging", "init=same", "seed=3"])
    assert config("standard", "combined") == configs.load("cifar10_quick", ["sampling=bagging", "seed=3"])
    assert config("standard", "unique_subset") == configs.load("cifar10_quick", ["sampling=subset", "seed=3"])
    assert config("tree", "tree_conv2") == configs.load("cifar10_quick", ["split=conv2", "seed=3"])
    direct = config("averaged", "prob_averaged_direct").loss
    assert (direct.name, direct.stable, direct.scale_rate) == ("prob_averaged", False, True)
    assert config("mcl", "mcl_k2") == configs.load("cifar10_quick", ["loss=mcl", "loss.k=2", "seed=3"])
    assert config("pretrain", "pretrain_4000_k1").pretrain == 4000
    assert config("mixture", "mixture_0.1").loss.ce_weight == 0.1
    copies = config("finetune", "finetune_copies_k1")
    assert (copies.init_members, copies.optim.accumulate, copies.optim.iterations) == ([0, 0, 0, 0], 5, 3000)
    assert copies.init.endswith("runs/reproduce/cifar10_quick/random_init-seed3")


def test_a_single_network_and_all_members_of_mcl_are_trained_once():
    planner, _ = planned("standard", "cifar10_quick")
    ensemble = planner.job(read_suite("standard"), "random_init", 0)
    assert planner.job(read_suite("standard"), "single", 0) == ensemble
    assert planner.job(read_suite("mcl"), "mcl_k4", 0) == ensemble
    assert planner.job(read_suite("finetune"), "base", 0) == ensemble
    assert planner.job(read_suite("finetune"), "finetune_k1", 0).needs == (ensemble,)


def test_trees_are_split_wherever_the_network_can_be():
    assert rows("tree", "cifar10_quick") == [
        "random_init", "tree_conv1", "tree_conv2", "tree_conv3", "tree_ip1", "tree_binary", "single",
    ]  # fmt: skip
    assert "tree_cccp7" in rows("tree", "nin_ilsvrc") and "tree_cccp8" not in rows("tree", "nin_ilsvrc")
    assert rows("tree", "digits", "members=2") == ["random_init", "tree_conv1", "tree_conv2", "tree_ip1", "single"]
    planner, _ = planned("tree", "nin_ilsvrc")
    job = planner.job(read_suite("tree"), "tree_binary", 0)
    assert job.config.members == 4 and job.config.split == {"conv1": [{"cccp1": 2}, {"cccp1": 2}]}
    assert job.path.parent.name == "nin_ilsvrc_x4"  # five members in the other suites


@pytest.mark.parametrize(
    ("members", "tree"),
    [
        (2, {"a": 2}),
        (3, {"a": [1, {"b": 2}]}),
        (4, {"a": [{"b": 2}, {"b": 2}]}),
        (5, {"a": [{"b": 2}, {"b": [1, {"c": 2}]}]}),
        (8, {"a": [{"b": [{"c": 2}, {"c": 2}]}, {"b": [{"c": 2}, {"c": 2}]}]}),
        (16, {"a": [{"b": [{"c": [2, 2]}] * 2}] * 2}),  # no layer is left for the last splits
    ],
)
def test_binary_trees_are_balanced(members, tree):
    def leaves(spec):
        if isinstance(spec, int):
            return spec
        return sum(map(leaves, spec.values() if isinstance(spec, dict) else spec))

    assert leaves(binary_tree(members, ["a", "b", "c"])) == members
    assert binary_tree(members, ["a", "b", "c"]) == tree


def test_k_goes_up_to_the_number_of_members():
    assert rows("mcl", "cifar10_quick") == ["one_network", "mcl_k1", "mcl_k2", "mcl_k3", "mcl_k4", "mcl_k1_same"]
    assert rows("mcl", "caffenet")[:6] == ["one_network", "mcl_k1", "mcl_k2", "mcl_k3", "mcl_k4", "mcl_k5"]
    _, table = planned("mcl", "digits", "members=3")
    assert table.claims[0].order == ["mcl_k1", "mcl_k2", "mcl_k3"]
    assert table.claims[1].order == ["mcl_k3", "mcl_k2", "mcl_k1"]


def test_claims_are_for_the_recipes_that_they_name():
    def orders(recipe):
        return [claim.order for claim in planned("standard", recipe)[1].claims if claim.order]

    assert orders("cifar10_quick") == [["random_init", "combined", "bagging", "single"]]
    assert orders("nin_ilsvrc") == [["random_init", "combined", "single", "bagging"]]
    assert orders("digits") == []


def test_claims_of_rows_that_this_network_lacks_are_left_out():
    def claims(*overrides):
        return [claim.say for claim in planned("tree", "digits", *overrides)[1].claims]

    assert "a balanced binary tree gains as well" in claims()
    assert "a balanced binary tree gains as well" not in claims("members=2")


def test_a_row_of_a_layer_that_this_network_lacks_is_told(tmp_path):
    suite = mine(tmp_path, "{name: at_<layer>, each: {layer: splits}, set: [split=<layer>]}")
    claim = Claim(order=["at_conv1", "at_cnov2"], by="oracle")
    planner = Planner(Options("digits"))
    found = make_document(planner.expand(suite.model_copy(update={"claims": [claim]})), planner)
    assert verdicts(found)[0].figures == "at_conv1 not run, at_cnov2 is no row here"


def test_every_number_of_a_result_may_be_a_metric():
    kept = json.loads((Path(__file__).parents[2] / "results/residual-cifar10_resnet20-scale0.03125.json").read_text())
    (run,) = kept["runs"]["mcl_k1"]
    assert {key for key, value in run["result"].items() if not isinstance(value, str)} <= set(metric_names())


@pytest.mark.parametrize(
    ("suite", "given", "key"),
    [
        ("mcl", "loss.k=2", "loss.k"),
        ("mcl", "loss={k: 2}", "loss.k"),
        ("mcl", "loss=independent", "loss.name"),
        ("standard", "sampling.name=subset", "sampling.name"),
        ("tree", "split=conv1", "split"),
    ],
)
def test_what_rows_say_is_not_overridden_for_all_of_them(suite, given, key):
    planner, table = planned(suite, "digits", given)
    with pytest.raises(UserError) as error:
        for row in table.names:
            planner.job(read_suite(suite), row, 0)
    assert given in str(error.value) and f"sets {key} itself" in str(error.value)


def test_what_no_row_says_is_overridden_for_all():
    planner, table = planned("finetune", "digits", "optim.iterations=7", "loss.ce_weight=0.1", "sampling=bagging")
    assert {planner.job(read_suite("finetune"), row, 0).config.optim.iterations for row in table.names} == {7}


@pytest.mark.parametrize("given", ["data={validation: 300}", "data.validation=300", "seed=3"])
def test_what_is_in_the_names_of_runs_is_not_overridden(given):
    with pytest.raises(UserError, match=r"give --\w+ instead"):
        Options("digits", overrides=(given,))


def test_scaling_shortens_everything_that_is_counted_in_iterations():
    def scaled(recipe, *overrides):
        given = [*overrides, "seed=0"]
        return configs.load(recipe, given + scale_training(configs.load(recipe, given), 0.2))

    quick = scaled("cifar10_quick", "pretrain=4000", "optim.schedule.warmup=50")
    assert (quick.optim.iterations, quick.optim.schedule.at) == (1000, [800])
    assert (quick.pretrain, quick.optim.schedule.warmup) == (800, 10)
    assert quick.log == configs.load("cifar10_quick").log
    assert scaled("nin_cifar100").optim.schedule.window == 4000
    alex = scaled("caffenet").optim
    assert (alex.iterations, alex.schedule.every) == (90_000, 20_000)
    # The rate at a part of the way is the same: 1 / (1 + exp(-slope (i - every))), gamma^i, (1 + gamma i)^-power.
    for schedule in ("sigmoid, every: 300, slope: -0.02", "exp, gamma: 0.999", "inv, gamma: 0.01, power: 0.75"):
        full = configs.load("digits", [f"optim.schedule={{name: {schedule}}}"]).optim
        short = scaled("digits", f"optim.schedule={{name: {schedule}}}").optim
        for at in (0, 100, 300, 500):
            rates = [Schedule(o.schedule, 1.0, o.iterations).rate(i) for o, i in ((full, at), (short, at // 5))]
            assert rates[1] == pytest.approx(rates[0])
    tiny = configs.load("cifar10_quick", scale_training(configs.load("cifar10_quick"), 0.0001))
    assert (tiny.optim.iterations, tiny.optim.schedule.at, tiny.log.every) == (1, [1], 1)


def test_runs_are_named_after_row_seed_and_length():
    planner, _ = planned("mcl", "cifar10_quick", scale=0.2)
    job = planner.job(read_suite("mcl"), "mcl_k1", 7)
    assert str(job.path) == "runs/reproduce/cifar10_quick/mcl_k1-seed7-scale0.2"
    assert planner.command(job) == (
        "mheads train cifar10_quick loss=mcl loss.k=1 seed=7 optim.iterations=1000 'optim.schedule.at=[800]' "
        "-f runs/reproduce/cifar10_quick/mcl_k1-seed7-scale0.2"
    )
    planner, _ = planned("mixture", "cifar10_quick", validation=5000)
    job = planner.job(read_suite("mixture"), "mixture_0.1", 0)
    assert job.config.data.validation == 5000 and job.name == "mixture_0.1-seed0-validation5000"


def test_no_path_of_this_machine_is_shown():
    assert hide_local_paths("data.path=/home/me/pictures") == "data.path=.../pictures"
    assert hide_local_paths("loss.k=2") == "loss.k=2" and hide_local_paths("mine/digits.yaml") == "mine/digits.yaml"
    assert hide_local_paths("/home/me/a=b.yaml") == ".../a=b.yaml"
    assert hide_local_paths("data.path=/home/me=you/it") == "data.path=.../it"
    assert hide_local_paths("sampling={name: file, path: /home/me/it.npz}") == "sampling={name: file, path: .../it.npz}"
    assert (
        hide_local_paths("data={'path': '~/my pictures', name: folder}")
        == "data={'path': '.../my pictures', name: folder}"
    )
    assert hide_local_paths("split={conv1: [2, 2]}") == "split={conv1: [2, 2]}"


@pytest.mark.parametrize("folder", [".", "d", "e", "/", "runs/../runs"])
def test_commands_name_the_usual_folder_wherever_runs_are(folder, tmp_path):
    planner = Planner(Options("digits"), Path(folder))
    job = planner.job(read_suite("finetune"), "finetune_k1", 0)
    assert planner.command(job) == (
        "mheads train digits init=runs/reproduce/digits/random_init-seed0 loss=mcl loss.k=1 optim.accumulate=5 "
        "optim.iterations=3000 seed=0 -f runs/reproduce/digits/finetune_k1-seed0"
    )


def mine(tmp_path, *rows):
    path = tmp_path / "mine.yaml"
    path.write_text("".join(["rows:\n", *(f"  - {row}\n" for row in rows)]))
    return read_suite(str(path))


def test_a_row_may_start_from_two_runs(tmp_path):
    both = "'sampling={name: clustered, generalist: <run:a>, path: <run:b>}'"
    suite = mine(tmp_path, "{name: a}", "{name: b, set: [loss=mcl]}", f"{{name: c, set: [{both}]}}")
    planner = Planner(Options("digits"))
    with pytest.raises(UserError, match=r"sampling.path is for"):  # both folders are in, and it has no use for one
        planner.job(suite, "c", 0)
    suite = mine(tmp_path, "{name: a}", "{name: b, set: [loss=mcl]}",
                 "{name: c, set: ['init=<run:a>', 'sampling={name: clustered, generalist: <run:b>}']}")  # fmt: skip
    job = Planner(Options("digits")).job(suite, "c", 0)
    assert [need.row for need in job.needs] == ["a", "b"]
    assert job.config.init.endswith("digits/a-seed0") and job.config.sampling.generalist.name == "b-seed0"


# What a table says.


def document(values, claims=(), problem="classification", **rows_of):
    """Runs with these values of `oracle` (and `single`, a tenth of them), one for each seed."""
    runs = {
        row: [
            {"seed": seed, "result": {"oracle": v, "single": v / 10, "members": [v, v], "problem": problem}}
            for seed, v in enumerate(found)
        ]
        for row, found in values.items()
        if found
    }
    entries = [{"name": row, "run": row, **rows_of.get(row, {})} for row in values]
    how = {"scale": 1, "validation": 0, "overrides": []}
    return {"rows": entries, "claims": list(claims), "runs": runs, "metrics": ["oracle"], **how}


def test_means_deviations_and_differences():
    found = document({"a": [90.0, 92.0, 94.0], "b": [80.0], "c": []}, a={"paper": {"oracle": [91.5, 0.4]}})
    assert findings.format_ours(found, "a", "oracle") == "92.00 ± 2.00"  # n - 1: sqrt((4 + 0 + 4) / 2)
    assert findings.format_paper(found, "a", "oracle") == "91.50 ± 0.40"
    assert findings.format_difference(found, "a", "oracle") == "+0.50"
    assert findings.format_ours(found, "b", "oracle") == "80.00"
    assert (findings.format_paper(found, "b", "oracle"), findings.format_difference(found, "b", "oracle")) == ("", "")
    assert findings.format_ours(found, "c", "oracle") == "not run"
    assert findings.format_ours(found, "b", "train_loss") == ""  # it was run, and has none


def test_errors_are_shown_in_four_digits():
    """Of numbers in units of their own, two decimals may be all zeros."""
    found = document({"a": [0.0083, 0.0042]}, a={"paper": {"oracle": [0.00512, 0.0001]}})
    for run in found["runs"]["a"]:
        run["result"] |= {"problem": "regression", "members": [0.0123456, 2.5], "parameters": 123456}
    assert findings.format_ours(found, "a", "oracle") == "0.00625 ± 0.002899"
    assert findings.format_paper(found, "a", "oracle") == "0.00512 ± 0.0001"
    assert findings.format_difference(found, "a", "oracle") == "+0.00113"
    assert findings.format_ours(found, "a", "members") == "0.01235 2.5"
    assert findings.format_ours(found, "a", "parameters").startswith("123,456")


def test_a_range_of_the_paper_stands_beside_ours():
    found = document({"a": [90.0, 94.0]}, a={"paper": {"oracle": {"mean": 93, "min": 88, "max": 95}}})
    assert findings.format_ours(found, "a", "oracle") == "92.00 ± 2.83 (90.00 to 94.00)"
    assert findings.format_paper(found, "a", "oracle") == "93.00 (88.00 to 95.00)"
    assert findings.format_difference(found, "a", "oracle") == "-1.00"


def test_a_row_shows_another_metric_of_anothers_run():
    found = document({"a": [90.0]})
    found["rows"].append({"name": "one", "run": "a", "metrics": {"oracle": "single"}})
    assert findings.format_ours(found, "one", "oracle") == "9.00"
    assert findings.format_ours(found, "one", "members") == "90.0 90.0"


@pytest.mark.parametrize(
    ("values", "word", "figures"),
    [
        (
            {"a": [3.0], "b": [2.0, 1.0], "c": [1.0]},
            "in this order, one seed",
            "a 3.00, b 2.00, c 1.00; 1 seed in common",
        ),
        ({"a": [3.0], "b": [1.0], "c": [2.0]}, "in another order, one seed", "a 3.00, b 1.00, c 2.00"),
        ({"a": [3.001], "b": [3.0], "c": [2.0]}, "in this order but for ties, one seed", "a 3.00, b 3.00, c 2.00"),
        ({"a": [3.0], "b": [3.001], "c": [2.0]}, "in this order but for ties, one seed", "a 3.00, b 3.00, c 2.00"),
        ({"a": [3.0], "b": [], "c": [2.0]}, "in this order so far, one seed", "a 3.00, c 2.00, b not run"),
        ({"a": [1.0], "b": [], "c": [2.0]}, "in another order, one seed", "a 1.00, c 2.00, b not run"),
        ({"a": [3.0], "b": [], "c": []}, "open", "a 3.00, b not run, c not run"),
    ],
)
def test_an_order_in_one_seed_is_seen_and_not_proved(values, word, figures):
    claim = {"order": ["a", "b", "c"], "by": "oracle"}
    (verdict,) = verdicts(document(values, [claim]))
    assert (verdict.claim, verdict.word, verdict.figures) == ("Oracle: a > b > c", word, figures)


def test_many_claims_that_are_open_are_told_together():
    claims = [{"left": f"{row}.oracle", "is": "better", "right": "a.oracle"} for row in "bcdefgh"]
    found = verdicts(document({"a": [1.0], "b": [2.0], **{row: [] for row in "cdefgh"}}, claims))
    assert [verdict.word for verdict in found] == ["higher, one seed", "open"]
    assert found[1].claim.startswith("6 claims") and found[1].figures.startswith("c not run, d not run, ")
    assert [verdict.word for verdict in verdicts(document({"a": [1.0], "b": []}, claims[:1]))] == ["open"]


def test_of_errors_the_lower_is_better():
    claims = [
        {"order": ["a", "b"], "by": "oracle"},
        {"left": "a.oracle", "is": "better", "right": "b.oracle"},
        {"left": "a.oracle", "is": "above", "right": "b.oracle"},
    ]
    for problem, words in (
        ("classification", ["does not hold", "does not hold", "does not hold"]),
        ("regression", ["holds", "holds", "does not hold"]),
    ):
        found = verdicts(document({"a": [1.0, 1.1, 1.0], "b": [2.0, 2.0, 2.1]}, claims, problem))
        assert [verdict.word for verdict in found] == words
        assert found[0].claim == ("Oracle: a < b" if problem == "regression" else "Oracle: a > b")


@pytest.mark.parametrize("problem", ["classification", "regression"])
@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("nll_ensemble_mean", True),
        ("train_loss", True),
        ("member_train_loss", True),
        ("calibration_error_single", True),
        ("mae_oracle", True),
        ("r2_oracle", False),
        ("evenness", False),
    ],
)
def test_which_way_is_better_is_the_metrics_own(problem, metric, lower):
    claims = [{"order": ["a", "b"], "by": metric}, {"left": f"a.{metric}", "is": "better", "right": f"b.{metric}"}]
    found = document({"a": [1.0], "b": [2.0]}, claims, problem)
    for row, value in (("a", 0.25), ("b", 0.5)):
        found["runs"][row][0]["result"][metric] = value
    assert [verdict.agrees for verdict in verdicts(found)] == [lower, lower]
    assert (" < " if lower else " > ") in verdicts(found)[0].claim


@pytest.mark.parametrize(
    ("relation", "right", "holds"),
    [
        ("better", "b.oracle", True),
        ("better", "b.oracle + 1", False),
        ("no worse", "b.oracle + 1", True),
        ("no better", "b.oracle + 1", True),
        ("no worse", "b.oracle + 1.01", False),
        ("worse", "b.oracle", False),
        ("worse", "2 * b.oracle", True),
        ("below", "b.oracle - 1", False),
        ("about", "b.oracle", True),  # 3 is within a half of 2
        ("about", "0.9 * b.oracle", False),
        ("about", "2 * b.oracle", True),
        ("above", "b.oracle - a.oracle + 3.9", True),  # 2 - 3 + 3.9
        ("above", "2 * b.oracle - a.single", False),  # 4 - 0.3
        ("above", "b.member_1", True),
    ],
)
def test_relations_of_two_terms(relation, right, holds):
    claim = {"left": "a.oracle", "is": relation, "right": right, "within": 0.5}
    (verdict,) = verdicts(document({"a": [3.0], "b": [2.0]}, [claim]))
    assert verdict.agrees is holds
    said = f"{relation} than" if "bet" in relation or "wor" in relation else relation
    assert verdict.claim == f"a.oracle is {said} {right}"
    assert verdict.figures.startswith(f"a.oracle 3.00, {right} ")


@pytest.mark.parametrize(
    ("right", "holds"),
    [
        (0.00001, True),  # as YAML reads it; its text is 1e-05
        (0.00005, False),
        ("1.5e-07", True),
        ("2e-5 * b.oracle", False),  # 4e-5
        ("1E-5*b.oracle", True),  # 2e-5
        ("b.oracle - 1.99998", True),  # 2e-5
        ("b.oracle - 199996e-5", False),  # 4e-5
        ("1.5e-5 * b.oracle - 1e-6", True),  # 2.9e-5
        (".5e-4 * b.oracle + 1e+1", False),
    ],
)
def test_the_numbers_of_a_claim_may_be_small(right, holds):
    claim = {"left": "a.oracle", "is": "above", "right": right}
    claim["right"] = Claim.model_validate(claim).right  # the text that a suite keeps
    (verdict,) = verdicts(document({"a": [3e-5], "b": [2.0]}, [claim]))
    assert verdict.agrees is holds


def test_what_is_no_number_of_a_claim_is_refused():
    for right in ("1e", "1.5e-07e", "1.2.3 * b.oracle", "b.oracle + 1.2.3", "b.oracle + e5"):
        with pytest.raises(ValueError, match=r"is not row\.metric, for example 2 "):
            MetricTerm.parse(right)


def test_one_member_is_a_metric_by_its_number():
    claims = [{"left": "a.member_0", "is": "below", "right": "a.member_1"},
              {"left": "a.member_0", "is": "below", "right": "a.member_2"}]  # fmt: skip
    found = document({"a": [3.0]}, claims)
    found["runs"]["a"][0]["result"]["members"] = [1.0, 5.0]
    assert [verdict.agrees for verdict in verdicts(found)] == [True, None]
    assert verdicts(found)[1].figures == "a has no member 2"


@pytest.mark.parametrize(
    ("suite", "recipe", "of_paper"),
    [
        (suite, recipe, figures)
        for suite in SUITES
        for recipe, figures in read_suite(suite).paper.items()
        if recipe in configs.recipes()
    ],
)
def test_no_claim_is_against_the_papers_own_figures(suite, recipe, of_paper):
    _, table = planned(suite, recipe)
    runs, entries = {}, []
    for row in table.names:
        figures = {metric: read_figure(metric, figure) for metric, figure in of_paper.get(row, {}).items()}
        result = {metric: figure.get("mean", figure.get("members")) for metric, figure in figures.items()}
        if "members" in result:
            result["single"] = sum(result["members"]) / len(result["members"])
        runs[row] = [{"seed": 0, "result": result | {"problem": "classification"}}] if result else []
        entries.append({"name": row, "run": row})
    claims = [claim.model_dump(by_alias=True, exclude_defaults=True) for claim in table.claims]
    found = verdicts({"rows": entries, "runs": runs, "claims": claims, "metrics": []})
    assert [verdict for verdict in found if verdict.agrees is False] == []


def test_a_claim_is_open_where_a_row_or_a_metric_is_missing():
    claims = [{"left": "a.oracle", "is": "better", "right": "b.oracle"},
              {"left": "a.train_loss", "is": "about", "right": "a.oracle"}]  # fmt: skip
    (first,), (second,) = (verdicts(document({"a": [3.0], "b": []}, [claim])) for claim in claims)
    assert (first.agrees, first.figures) == (None, "b not run")
    assert (second.agrees, second.figures) == (None, "a has no training loss")


def test_a_bar_or_a_line_break_does_not_break_the_table_of_claims():
    claims = [{"say": "P(a | b)\nis more", "left": "a.oracle", "is": "better", "right": "b.oracle"}]
    found = document({"a": [3.0], "b": [2.0]}, claims) | {"suite": "s", "recipe": "r", "members": 2, "scale": 1}
    text = markdown(found | {"validation": 0, "overrides": [], "command": "c", "runs": {}})
    assert "| P(a \\| b) is more | open | a not run, b not run |" in text


def test_seeds_with_gaps_are_several_commands():
    assert command("mcl", Options("digits"), [3, 4, 9], 0) == (
        "mheads reproduce mcl --recipe digits --trials 2 --seed 3 && mheads reproduce mcl --recipe digits --seed 9"
    )
    assert command("mcl", Options("digits"), [0, 1, 2], 0) == "mheads reproduce mcl --recipe digits --trials 3"


def test_evenness_is_one_where_all_own_as_many_and_zero_where_one_owns_all():
    assert evenness([5, 5, 5, 5]) == pytest.approx(1)
    assert evenness([20, 0, 0, 0]) == 0
    assert evenness([10, 10, 0, 0]) == pytest.approx(math.log(2) / math.log(4))


# Files of the user's own.

GOOD = "rows:\n  - {name: a}\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rows: [", ["not valid YAML"]),
        ("- 1", ["mapping"]),
        ("rows: []", ["rows"]),
        ("metrics: [oracle]", ["rows is missing"]),
        ("rows:\n  - {name: a}\n  - {name: b, sett: [loss=mcl]}", ["row 'b'", "'sett'", "name, set, from"]),
        ("rows:\n  - {set: [loss=mcl]}", ["row number 1", "name is missing"]),
        ("rows:\n  - {name: a b}", ["row 'a b'", "name"]),
        ("rows:\n  - {name: a, set: loss=mcl}", ["row 'a'", "set = 'loss=mcl'"]),
        ("rows:\n  - {name: a}\n  - {name: b, from: a, set: [loss=mcl]}", ["row 'b'", "from"]),
        (f"{GOOD}nmae: x", ["'nmae'", "metrics, rows"]),
        (f"{GOOD}name: x", ["'name'", "metrics, rows"]),
        (f"{GOOD}claims:\n  - {{left: a.oracle, is: better}}", ["claim number 1", "`left`, `is` and `right`"]),
        (f"{GOOD}claims:\n  - {{left: a, is: better, right: a.oracle}}", ["'a'", "row.metric"]),
        (f"{GOOD}claims:\n  - {{say: so, left: a.b, is: nicer, right: a.c}}", ["claim 'so'", "is = 'nicer'"]),
        (f"{GOOD}paper: {{digits: {{a: {{oracle: high}}}}}}", ["paper.digits.a.oracle", "'high'"]),
        (f"{GOOD}paper: {{digits: {{a: {{oracle: .nan}}}}}}", ["paper.digits.a.oracle", "nan"]),
        (f"{GOOD}paper: {{digits: {{a: {{orcale: 1}}}}}}", ["paper.digits.a names 'orcale'", "did you mean oracle?"]),
        (
            "rows:\n  - {name: a, metrics: {members: oracle}}",
            ["row 'a': metrics: members: oracle", "is a list of numbers"],
        ),
        (
            "rows:\n  - {name: a, metrics: {oracle: members}}",
            ["row 'a': metrics: oracle: members", "is a list of numbers"],
        ),
        (f"{GOOD}metrics: [learning_wins]", ["metrics names 'learning_wins'", "learning_entropy"]),
        (f"{GOOD}metrics: [single, orcale]", ["metrics names 'orcale'", "did you mean oracle?"]),
    ],
)
def test_a_bad_file_is_told_with_row_and_key(text, parts, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_suite(str(path))
    assert str(path) in str(error.value)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rows:\n  - {name: a, set: [loss.kk=1]}", ["row 'a'", "'loss.kk'", "'loss.k'"]),
        ("rows:\n  - {name: a}\n  - {name: a}", ["two rows 'a'"]),
        ("rows:\n  - {name: a_<n>}", ["row 'a_<n>'", "<n>", "<M>"]),
        ("rows:\n  - {name: a_<n>, each: {n: some}}", ["row 'a_<n>'", "'some'", "1..M-1"]),
        ("rows:\n  - {name: a, from: b}", ["no row 'b'", "it has a"]),
        ("rows:\n  - {name: a_<n>, each: {n: 1..M-4}}", ["no row is left on digits with 4 members"]),
        ("rows:\n  - {name: a, metrics: {oracle: singel}}", ["row 'a'", "'singel' (did you mean single?)"]),
        ("rows:\n  - {name: a}\nclaims:\n  - {say: so, order: [a, b], by: oracle}",
         ["claim 'so': order names 'b'", "there are a"]),
        ("rows:\n  - {name: a}\nclaims:\n  - {order: [a, a], by: orcale}", ["a claim: by names 'orcale'", "oracle"]),
        ("rows:\n  - {name: a}\nclaims:\n  - {left: a.oracle, is: better, right: aa.oracle}",
         ["right names 'aa' (did you mean a?)"]),
        ("rows:\n  - {name: a_<n>, each: {n: [1, 2]}}\nclaims:\n  - {order: [a_1, a_3], by: oracle}",
         ["order names 'a_3'", "there are a_1, a_2"]),
        ("rows:\n  - {name: k<k>, each: {k: 1..M}}\nclaims:\n  - {order: [k1, kk2], by: oracle}", ["names 'kk2'"]),
        ("rows:\n  - {name: a, set: [seed=7]}", ["row 'a'", "seed", "--seed"]),
        ("rows:\n  - {name: a, from: standrd/b}", ["row 'a'", "standrd", "did you mean standard?"]),
        ("rows:\n  - {name: a, from: b}\n  - {name: b, from: a}", ["'a' needs itself"]),
        ("rows:\n  - {name: a, set: ['init=<run:a>']}", ["'a' needs itself"]),
        ("rows:\n  - {name: a}\n  - {name: b, set: ['init=<run:a']}", ["row 'b'", "'init=<run:a'", "close it with >"]),
        ("rows:\n  - {name: a, rounds: 2}\n  - {name: b, set: ['init=<run:a>']}", ["row 'b'", "<run:a>", "rounds"]),
        ("rows:\n  - {name: random_init, set: [loss=mcl]}\n  - {name: b, from: standard/random_init}",
         ["random_init", "loss.name", "another name"]),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_before_anything_is_run(text, parts, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    planner, suite = Planner(Options("digits")), read_suite(str(path))
    with pytest.raises(UserError) as error:
        for row in planner.expand(suite).names:
            planner.job(suite, row, 0)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_the_example_of_residual_networks_is_what_it_says():
    file = Path(__file__).parents[2] / "examples/residual.yaml"
    planner, table = planned(str(file), "cifar10_resnet20", scale=0.03125)
    assert table.names == ["independent", "single", "tree_layer2.1", "mcl_k1"]
    for row in table.names:
        optim = planner.job(read_suite(str(file)), row, 0).config.optim
        assert (optim.iterations, optim.schedule.at) == (2000, [1000, 1500])


def test_a_claim_may_compare_with_a_number():
    claim = Claim.model_validate({"left": "a.oracle", "is": "above", "right": 50})
    assert claim.right == "50" and list(claim.places()) == [("left", "a", "oracle")]
    for number, holds in (("2.9", True), ("3", False)):
        made = {"left": "a.oracle", "is": "better", "right": number}
        (verdict,) = verdicts(document({"a": [3.0]}, [made]))
        assert (verdict.agrees, verdict.figures) == (holds, "a.oracle 3.00")
    with pytest.raises(ValueError, match=r"left is 50: give row.metric there"):
        Claim.model_validate({"left": "50", "is": "above", "right": "a.oracle"})


@pytest.mark.parametrize(
    ("top_k", "members", "value"),
    [
        ([80.0, 95.0, 100.0], 3, None),  # of three classes
        ([80.0, 95.0, 99.0], 3, None),  # where some answers were NaN
        ([80.0, 95.0, 100.0], 2, 95.0),
        ([80.0 + k for k in range(10)], 10, 89.0),  # of more classes than are kept
        ([*range(90, 99), 100.0], 10, None),  # of ten
    ],
)
def test_as_many_guesses_as_there_are_classes_compare_with_no_oracle(top_k, members, value):
    assert findings.read_value({"top_k": top_k}, "top_m", members) == value


def test_equivalents_beyond_one_and_all_independent_members_are_bounds():
    def runs(*nlls):
        known = {"nll_by_members": [0.8, 0.6]}
        return [{"seed": seed, "result": known | {"nll_ensemble_mean": nll}} for seed, nll in enumerate(nlls)]

    values = {"two": (0.6, 0.6), "worse": (0.9, 0.81), "better": (0.5, 0.59), "once": (0.9, 0.7), "same": (0.8, 0.8)}
    found = document({row: [1.0] for row in values}) | {"independent": "two"}
    found["runs"] = {row: runs(*nlls) for row, nlls in values.items()} | {"fewer": runs(0.9, 0.81, 0.9)}
    found["rows"].append({"name": "fewer", "run": "fewer"})
    shown = {row: findings.format_ours(found, row, "dee") for row in [*values, "fewer"]}
    assert shown == {
        "two": "2.00 ± 0.00",
        "worse": "< 1",
        "better": "> 2",
        "once": "1.25 ± 0.35",
        "same": "1.00 ± 0.00",
        "fewer": "< 1 (n = 2)",
    }
    assert findings.by_seed(found, "better", "dee") == {0: 2, 1: 2}  # which claims and figures go by
