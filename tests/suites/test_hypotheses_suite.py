"""A suite whose seed is the split of a table, on recipes that it makes of one."""

import json

import numpy as np

from mheads.suites import findings
from mheads.suites.jobs import Options
from mheads.suites.planner import Planner
from mheads.suites.suite import read_suite


def test_every_recipe_of_the_suite_gives_its_rows_a_run():
    suite = read_suite("hypotheses")
    features = {"yacht": 6, "boston": 13, "protein": 9}
    for recipe in suite.own_recipes:
        planner = Planner(Options(recipe))
        for row in [row.name for row in planner.expand(suite).rows if row.from_ is None]:
            job = planner.job(suite, row, 3)
            config = job.config
            assert job.path.parts[-2:] == (recipe, f"{row}-seed3") and config.seed == 3
            assert (config.data.calibration == 0) == (row in ("one_gaussian", "gaussian_ensemble", "mixture_density"))
            if recipe in features:
                assert config.data.fold == 3 and config.model_args["features"] == features[recipe]
                assert "data.fold=3" in planner.command(job)
                assert planner.command(job).startswith("mheads train uci ")


SUITE = """# Trials are splits.
recipe: [sail]
metrics: [distortion, nll]
rows:
  - {name: one, set: [members=1, split=null, loss=independent]}
  - {name: points, from: one, metrics: {distortion: distortion_of_points}}
  - {name: mcl}
recipes:
  sail:
    base: uci
    trials: 2
    test_share: 0.2
    set: [data.table=sail, data.fold=<seed>, data.calibration=5, "model_args={features: 2}"]
"""


def test_trials_are_splits_of_a_table_and_no_more_than_there_are(mheads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    folder = tmp_path / "uci/sail"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", rng.normal(size=(40, 3)))
    np.savetxt(folder / "index_features.txt", [0, 1])
    np.savetxt(folder / "index_target.txt", [2])
    for fold in range(2):
        mixed = rng.permutation(40)
        np.savetxt(folder / f"index_train_{fold}.txt", mixed[8:])
        np.savetxt(folder / f"index_test_{fold}.txt", mixed[:8])
    (tmp_path / "mine.yaml").write_text(SUITE)
    mheads("reproduce", "mine.yaml", "--trials", "3", "optim.iterations=4", f"data.root={tmp_path / 'uci'}")
    document = json.loads((tmp_path / "results/mine-sail.json").read_text())
    for row in ("one", "mcl"):
        runs = document["runs"][row]
        assert [run["seed"] for run in runs] == [0, 1]
        assert len({run["marks"]["data"] for run in runs}) == 2  # each on its split
        assert runs[0]["result"]["nll"] != runs[1]["result"]["nll"]
    assert document["test_share"] == 0.2 and document["members"] == 5
    one = [run["result"] for run in document["runs"]["one"]]
    points = findings.by_seed(document, "points", "distortion")
    assert points == {seed: result["distortion_by_points"][4] for seed, result in enumerate(one)}
    assert all(points[seed] < result["distortion"] for seed, result in enumerate(one))
