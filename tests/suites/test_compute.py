"""What a row takes, by hand from the shapes of CIFAR10-Quick."""

import pytest

from mheads.common.errors import UserError
from mheads.suites.compute import add_costs, compute_table, count_cost, in_words
from mheads.suites.jobs import Options
from mheads.suites.planner import Planner
from mheads.suites.suite import read_suite

# Multiply-adds: 5x5 kernels on 32x32 (3 -> 32), on 16x16 (32 -> 32), on 8x8 (32 -> 64), then 1024 -> 64 -> 10.
LAYERS = [32 * 32 * 32 * 75, 16 * 16 * 32 * 800, 8 * 8 * 64 * 800, 1024 * 64, 640]
FORWARD = sum(LAYERS)
BACKWARD = 2 * FORWARD - LAYERS[0]  # of weights and of inputs, but not of the images
STEPS, BATCH = 5000, 350


def cost(suite, row, recipe="cifar10_quick"):
    return count_cost(Planner(Options(recipe)).job(read_suite(suite), row, 0))


@pytest.mark.parametrize(
    ("suite", "row", "parameters", "forward", "training"),
    [
        ("standard", "one_network", 145578, FORWARD, STEPS * (FORWARD + BACKWARD)),
        ("standard", "random_init", 4 * 145578, 4 * FORWARD, STEPS * 4 * (FORWARD + BACKWARD)),
        ("mcl", "mcl_k1", 4 * 145578, 4 * FORWARD, STEPS * (4 * FORWARD + BACKWARD)),  # one of four learns
        (
            "pretrain",
            "pretrain_4000_k1",
            4 * 145578,
            4 * FORWARD,
            STEPS * (4 * FORWARD + BACKWARD) + 4000 * 4 * (FORWARD + BACKWARD),
        ),
        (
            "tree",
            "tree_conv1",
            4 * 145578 - 3 * (32 * 75 + 32),
            4 * FORWARD - 3 * LAYERS[0],
            STEPS * (4 * 3 * FORWARD - 10 * LAYERS[0]),  # conv1: forward and weights, once instead of 4 x 3
        ),
    ],
)
def test_parameters_and_operations_are_counted_from_shapes(suite, row, parameters, forward, training):
    assert cost(suite, row) == {"parameters": parameters, "inference": 2 * forward, "training": 2 * BATCH * training}


def test_rounds_count_each_and_what_has_no_known_shape_is_left_out():
    assert (
        cost("classical", "classical", "digits")["training"]
        == 5 * cost("classical", "random_init", "digits")["training"]
    )
    unknown = Planner(
        Options("digits", overrides=("data={name: file, path: none.npz}", "model=mlp", "model_args={features: 4}"))
    )
    with pytest.raises(UserError, match="the shape of an example of 'file' is not known"):
        count_cost(unknown.job(read_suite("standard"), "random_init", 0))


def test_what_is_known_of_a_run_stays_where_its_data_are_not_here_and_is_counted_anew_where_they_are():
    absent = ("data={name: file, path: none.npz}", "model=mlp", "model_args={features: 4}")
    for overrides, expected in ((absent, {"parameters": 1}), ((), cost("standard", "random_init", "digits"))):
        document = {"rows": [{"name": "random_init", "run": "r"}], "runs": {"r": []}}
        planner = Planner(Options("digits", overrides=overrides))
        add_costs(document, planner, read_suite("standard"), {"r": {"parameters": 1}})
        assert document["rows"][0]["cost"] == expected


def test_the_table_shows_hours_and_counts_of_rows_that_were_run():
    runs = [{"seed": seed, "result": {"seconds": seconds, "members": []}} for seed, seconds in enumerate((3600, 7200))]
    rows = [
        {"name": "a", "run": "a", "cost": {"parameters": 145578, "inference": 24.7e6, "training": 9.996e14}},
        {"name": "part", "run": "a", "metrics": {"oracle": "single"}, "cost": {"parameters": 1}},
        {"name": "b", "run": "b"},
    ]
    table = compute_table({"rows": rows, "runs": {"a": runs}})
    assert [[cell.text for cell in row] for row in table.rows] == [["a", "1.50", "145,578", "1 P", "24.7 M"]]
    assert [in_words(n) for n in (0, 999, 1000, 999_600, 12_345_000)] == ["0", "999", "1 k", "1 M", "12.3 M"]
