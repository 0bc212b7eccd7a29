"""What runs say of a claim: by how many seeds, and how surely."""

from pathlib import Path

import pytest

from mheads.suites import findings, results
from mheads.suites.markdown import markdown
from mheads.suites.verdicts import correct_p_values, verdicts

RESULTS = Path(__file__).parents[2] / "results"


def document(values, *claims, **how):
    """Runs with these values of `oracle`, by row and seed (a list counts from 0)."""
    runs = {
        row: [
            {"seed": seed, "result": {"problem": "classification", "parameters": 10 * len(row), "oracle": value}}
            for seed, value in (found.items() if isinstance(found, dict) else enumerate(found))
        ]
        for row, found in values.items()
    }
    rows = [{"name": row, "run": row, "paper": {"oracle": [90, 1]}} for row in values]
    usual = {"scale": 1, "validation": 0, "overrides": [], "metrics": ["oracle"]}
    return usual | {"rows": rows, "claims": list(claims), "runs": runs} | how


def claim(relation, right="b.oracle", **further):
    return {"left": "a.oracle", "is": relation, "right": right, **further}


def word_of(values, made):
    (verdict,) = verdicts(document(values, made))
    return verdict.word


@pytest.mark.parametrize(
    ("a", "relation", "right", "word"),
    [
        (98.06, "better", "b.oracle", "higher, one seed"),
        (97.99, "better", "b.oracle + 0.07", "lower, one seed"),
        (97.99, "no worse", "b.oracle + 0.07", "lower, one seed"),
        (97.994, "better", "b.oracle", "equal, one seed"),  # at the precision that is shown
        (97.994, "worse", "97.99", "equal, one seed"),
        (50.0, "below", "60", "lower, one seed"),
        (97.0, "about", "b.oracle", "within 2 %, one seed"),
        (90.0, "about", "b.oracle", "not within 2 %, one seed"),
    ],
)
def test_one_seed_gives_a_direction_and_no_verdict(a, relation, right, word):
    assert word_of({"a": [a], "b": [97.99]}, claim(relation, right, within=0.02)) == word


# By hand, n = 3: t = mean / (std / sqrt 3), and |t| must be above 4.303, the 97.5 % point of t with 2 degrees.
FAR = [92.0, 92.3, 91.8]  # a - b = 2, 2.3, 1.8: mean 2.033, std 0.252, t = 14.0
NEAR = [90.5, 89.8, 90.3]  # 0.5, -0.2, 0.3: mean 0.2, std 0.361, t = 0.96
EVEN = [90.0, 90.0, 90.0]


@pytest.mark.parametrize(
    ("a", "b", "relation", "right", "word"),
    [
        (FAR, EVEN, "better", "b.oracle", "holds"),
        (FAR, EVEN, "no worse", "b.oracle", "holds"),
        (FAR, EVEN, "worse", "b.oracle", "does not hold"),
        (FAR, EVEN, "no better", "b.oracle", "does not hold"),
        (FAR, EVEN, "below", "b.oracle", "does not hold"),
        (FAR, EVEN, "better", "b.oracle + 1", "holds"),  # 1, 1.3, 0.8: t = 7.1
        (FAR, EVEN, "better", "b.oracle + 2", "within noise"),
        (FAR, EVEN, "better", "b.oracle + 3", "does not hold"),  # -1, -0.7, -1.2: t = -6.7
        (FAR, EVEN, "above", "2 * b.oracle - 90", "holds"),  # the same margins as b.oracle
        (FAR, EVEN, "above", "90", "holds"),
        (FAR, EVEN, "above", "92", "within noise"),
        (NEAR, EVEN, "better", "b.oracle", "within noise"),
        (NEAR, EVEN, "no worse", "b.oracle", "within noise"),
        (NEAR, EVEN, "worse", "b.oracle", "within noise"),
        # Rows that rise and fall together: apart by less than they vary, and yet surely. 0.4, 0.5, 0.45: t = 15.6
        ([80.4, 90.5, 85.45], [80.0, 90.0, 85.0], "better", "b.oracle", "holds"),
        # About: both ends of the tolerance, 90 +- 1.8 and 90 +- 2.7, must be told from the difference.
        (NEAR, EVEN, "about", "b.oracle", "holds"),  # to the ends 1.3, 2.0, 1.5 and 2.3, 1.6, 2.1: t = 7.7 and 9.6
        (FAR, EVEN, "about", "b.oracle", "within noise"),  # -0.2, -0.5, 0
        ([95.0, 95.2, 94.9], EVEN, "about", "b.oracle", "does not hold"),
        # The same in every seed: no variance, and by signs alone six seeds are wanted (2 / 2^6 = 0.03).
        ([90.5] * 3, EVEN, "better", "b.oracle", "within noise"),
        ([90.5] * 6, [90.0] * 6, "better", "b.oracle", "holds"),
        ([89.5] * 6, [90.0] * 6, "no worse", "b.oracle", "does not hold"),
        (EVEN, EVEN, "better", "b.oracle", "within noise"),
        (EVEN, EVEN, "no worse", "b.oracle", "holds"),
        # 0.1 apart in both seeds, but for the arithmetic: 0.3 - 0.2 and 0.8 - 0.7 are not the same number.
        ([0.3, 0.8], [0.2, 0.7], "better", "b.oracle", "within noise"),
        # Two seeds: |t| must be above 12.7.
        ([92.0, 92.1], [90.0, 90.0], "better", "b.oracle", "holds"),  # 2, 2.1: t = 41
        ([92.0, 93.0], [90.0, 90.0], "better", "b.oracle", "within noise"),  # 2, 3: t = 5
    ],
)
def test_several_seeds_are_tested_in_pairs(a, b, relation, right, word):
    assert word_of({"a": a, "b": b}, claim(relation, right, within=0.02)) == word


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ({"a": FAR, "b": EVEN, "c": [80.0, 80.1, 80.0]}, "holds"),
        ({"a": FAR, "b": EVEN, "c": []}, "holds so far"),
        ({"a": NEAR, "b": EVEN, "c": [80.0, 80.1, 80.0]}, "within noise"),
        ({"a": NEAR, "b": EVEN, "c": FAR}, "does not hold"),
        ({"a": NEAR, "b": EVEN, "c": []}, "within noise"),
    ],
)
def test_neighbours_of_an_order_are_tested_one_by_one(rows, word):
    assert word_of(rows, {"order": ["a", "b", "c"], "by": "oracle"}) == word


def test_only_seeds_that_all_rows_have_are_compared():
    rows = {"a": {1: 92.0, 2: 92.3, 3: 91.8, 7: 1.0}, "b": {0: 99.0, 1: 90.0, 2: 90.0, 3: 90.0}}
    (verdict,) = verdicts(document(rows, claim("better")))
    assert (verdict.word, verdict.num_seeds) == ("holds", 3)
    # t = 2.0333 / (0.25166 / sqrt 3) = 13.994 with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.0051
    # 4.3027 is the 97.5 % point of t with 2 degrees: 2.0333 -+ 4.3027 * 0.25166 / sqrt 3 = 1.408 to 2.659.
    figures = "a.oracle 92.03 ± 0.25, b.oracle 90.00 ± 0.00, difference +2.03 ± 0.25 (95 % CI +1.41 to +2.66)"
    assert verdict.figures == f"{figures}; 3 seeds in common, p = 0.0051"
    order = {"order": ["b", "a"], "by": "oracle"}
    (verdict,) = verdicts(document(rows, order))
    assert verdict.figures == "b 90.00 ± 0.00, a 92.03 ± 0.25; 3 seeds in common, p = 0.0051"
    (verdict,) = verdicts(document({"a": {0: 9.0, 1: 2.0}, "b": {1: 1.0, 2: 9.0}}, claim("better")))
    assert (verdict.word, verdict.figures) == ("higher, one seed", "a.oracle 2.00, b.oracle 1.00; 1 seed in common")
    for made in (claim("better"), {"order": ["a", "b"], "by": "oracle"}):
        (verdict,) = verdicts(document({"a": {0: 2.0}, "b": {1: 1.0}}, made))
        assert (verdict.word, verdict.figures) == ("open", "no seed is in all of a and b")


@pytest.mark.parametrize("seeds", [1, 3])
def test_what_no_seed_changes_needs_no_test(seeds):
    made = {"left": "bb.parameters", "is": "above", "right": "a.parameters"}
    (verdict,) = verdicts(document({"a": [1.0] * seeds, "bb": [1.0] * seeds}, made))
    assert (verdict.word, verdict.figures) == ("holds", "bb.parameters 20, a.parameters 10")


def test_splits_of_one_data_set_are_tested_with_the_variance_that_their_overlap_leaves():
    # n = 10: mean 1, std 1.054, t = 3.0, p = 0.015; with 1 / 10 + 0.2 / 0.8 for 1 / 10, t = 1.60, p = 0.14. The 97.5 %
    # point of t with 9 degrees is 2.262: 1 -+ 2.262 * 1.054 * sqrt(0.1), and sqrt(0.35) for sqrt(0.1).
    splits = {"a": [91.0 + (-1) ** i for i in range(10)], "b": [90.0] * 10}
    for share, word, interval, p in (
        (0.0, "holds", "+0.25 to +1.75", "p = 0.015"),
        (0.2, "within noise", "-0.41 to +2.41", "p = 0.14"),
    ):
        (verdict,) = verdicts(document(splits, claim("better"), test_share=share))
        assert verdict.word == word and verdict.figures.endswith(f"(95 % CI {interval}); 10 seeds, {p}")


@pytest.mark.parametrize("unit", [1.0, 1e-12, 1e12])
def test_a_verdict_does_not_depend_on_the_unit(unit):
    rows = {row: [unit * value for value in values] for row, values in {"a": FAR, "b": EVEN}.items()}
    (verdict,) = verdicts(document(rows, claim("better")))
    assert verdict.word == "holds" and verdict.figures.endswith("3 seeds, p = 0.0051")
    same = {row: [unit * value for value in values] for row, values in {"a": [91.0, 92.1], "b": [90.0, 91.1]}.items()}
    (verdict,) = verdicts(document(same, claim("better")))
    assert verdict.figures.endswith("2 seeds, p = 0.5")  # the same difference: a sign test


def test_a_difference_that_is_the_same_in_every_seed_has_no_interval():
    (verdict,) = verdicts(document({"a": [91.0, 92.1, 93.2], "b": [90.0, 91.1, 92.2]}, claim("better")))
    assert verdict.figures.endswith("difference +1.00 ± 0.00; 3 seeds, p = 0.25")


def written(found):
    return markdown(found | {"suite": "s", "recipe": "r", "members": 2, "command": "c"})


def test_a_page_names_the_test_its_level_and_the_number_of_seeds(monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    assert "One seed each: where the first figure lies from the second, and no verdict" in written(
        document({"a": [2.0], "b": [1.0]}, claim("better"))
    )
    text = written(document({"a": FAR, "b": EVEN}, claim("better"), claim("above", "a.oracle")))
    assert "By a paired t-test over seeds (n = 3), two-sided at 5 %." in text
    text = written(document({"a": FAR, "b": EVEN}, claim("better"), test_share=0.1))
    assert "By a paired t-test over splits, corrected for their overlap (n = 3), two-sided at 5 %." in text
    text = written(document({"a": FAR, "b": EVEN[:2]}, claim("better"), claim("above", "90")))
    assert "(n = 2 to 3)" in text
    assert "t-test" not in written(document({"a": FAR, "b": EVEN}))


def test_rows_that_were_not_run_are_one_line_and_what_differs_between_runs_is_said(monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    found = document({"a": [40.0, 44.0], "b": [90.0, 91.0], "c": [], "d": []})
    found |= {"metrics": ["oracle", "train_loss"]}
    for row in "ab":
        for run, machine, loss in zip(found["runs"][row], ("x86_64, AVX2", "x86_64, AVX512"), (0.5, None), strict=True):
            run["machine"] = machine if row == "b" else "x86_64, AVX512"
            run["result"] |= {"members": [10.0, 10.0, 10.0, 10.0], "oracle_chance": 40.0}
            run["result"] |= {"train_loss": loss} if loss else {}
    text = written(found)
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| row", "| ---", "| a", "| b"]
    assert "0.500 (n = 1)" in text  # of the two runs of each row
    assert "Not run: c, d." in text and "not run" not in text
    # 40 % of four constant members, and a tenth of the way from there to 100 is 46.
    assert "Near chance: a; members that always give one class each have an Oracle of 40.00." in text
    assert "On 2 kinds of CPU, whose bits differ: b on x86_64, AVX2; a, b on x86_64, AVX512." in text
    del found["runs"]["a"]
    assert "Near chance" not in written(found)


def test_each_row_near_chance_is_beside_its_own_and_one_network_of_a_row_is_not():
    found = document({"a": [40.0], "b": [20.0], "c": [90.0], "d": [41.0]})
    for row, chance in (("a", 40.0), ("b", 20.0), ("c", 60.0), ("d", 40.0)):
        found["runs"][row][0]["result"] |= {"members": [10.0, 10.0], "oracle_chance": chance}
    found["rows"].append({"name": "one", "run": "a", "metrics": {"oracle": "single"}})
    chances = "40.00 (a, d), 20.00 (b)"
    assert findings.describe_chance(found) == (
        f"Near chance: a, d, b; members that always give one class each have an Oracle of {chances}."
    )


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"scale": 0.2}, "training takes 0.2 of the iterations"),
        ({"validation": 5000}, "5,000 training examples are held out, they are what is measured on"),
        ({"validation": 5000, "test": True}, "5,000 training examples are held out"),
        ({"overrides": ["optim.iterations=100"]}, "optim.iterations=100 is set"),
        ({"overrides": ["data.path=.../it", "data={limit: 60}"]}, "data={limit: 60} is set"),
        ({"overrides": ["teacher.answers=.../a.npz"]}, "teacher.answers=.../a.npz is set"),
    ],
)
def test_the_papers_figures_stand_beside_runs_like_the_papers_alone(how, why, monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    found = document({"a": FAR}, **how)
    text = written(found)
    assert "| row | trials | Oracle |\n" in text and f"since its runs are others: here {why}." in text
    assert (findings.format_paper(found, "a", "oracle"), findings.format_difference(found, "a", "oracle")) == ("", "")


@pytest.mark.parametrize("overrides", [[], ["data.path=.../it", "log.every=5", "engine.workers=2"]])
def test_the_papers_figures_stand_beside_full_runs_wherever_they_are_made(overrides, monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    text = written(document({"a": FAR}, overrides=overrides))
    assert "| Oracle | paper | difference |\n" in text and "| 90.00 ± 1.00 | +2.03 |" in text
    assert "its runs are others" not in text


def test_the_pages_of_results_are_those_of_the_files():
    for path in RESULTS.glob("*.json"):
        found = results.load(path)
        assert path.with_suffix(".md").read_text() == markdown(found, f"{path.stem}.png"), (
            "run mheads reproduce --tables"
        )


def test_holm_corrects_for_all_comparisons():
    # Sorted 0.01, 0.02, 0.03, 0.4: times 4, 3, 2, 1 they are 0.04, 0.06, 0.06, 0.4, none below the one before.
    assert correct_p_values([0.03, 0.01, 0.4, 0.02]) == pytest.approx([0.06, 0.04, 0.4, 0.06])
    assert correct_p_values([0.03, 0.9, 0.6]) == pytest.approx([0.09, 1.0, 1.0])  # no p-value is above 1


def test_a_table_says_which_verdicts_stay_after_the_correction(monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    # p = 0.00507 (see above); of 1, 1.3 and 0.8, t = 7.1, p = 0.0192;
    # and c to b, t = 0.96, p = 0.44. Sorted, times 3, 2 and 1: 0.0152, 0.038 and 0.44.
    rows = {"a": FAR, "b": EVEN, "c": NEAR, "e": []}
    claims = [claim("better"), claim("better", "b.oracle + 1"), {"order": ["c", "b", "e"], "by": "oracle"}]
    found = document(rows, *claims, {"left": "a.parameters", "is": "above", "right": "5"})
    words = [(verdict.word, verdict.figures.rpartition("seeds, ")[2]) for verdict in verdicts(found)]
    assert words == [
        ("holds", "p = 0.0051 (Holm: p = 0.015)"),
        ("holds", "p = 0.019 (Holm: p = 0.038)"),
        ("within noise", "p = 0.44 (Holm: p = 0.44)"),
        ("holds", "a.parameters 10"),
    ]
    assert "Verdicts beyond noise: 2, and 2 after Holm's correction for the table's 3 comparisons." in written(found)
    # p = 0.0315 (of 1.5, 2.5, 1.5), 0.0062 and 0.0056: six, of which 0.0192 times 3 is 0.058.
    found["claims"] += [claim("better", "c.oracle"), claim("above", "90.2"), claim("above", "90.1")]
    assert "Verdicts beyond noise: 5, and 3 after" in written(found)


def test_a_table_speaks_of_a_test_only_where_there_was_one(monkeypatch):
    monkeypatch.setattr("mheads.suites.markdown.list_runs", lambda found: [])
    exact = {"left": "a.parameters", "is": "above", "right": "5"}
    for seeds in (1, 5):
        text = written(document({"a": [90.0] * seeds}, exact))
        assert "holds" in text and "t-test" not in text and "One seed" not in text
    rows = {"a": FAR, "b": EVEN, "c": [80.0]}
    assert "(n = 3)" in written(document(rows, claim("better"), claim("better", "c.oracle"), exact))
    # The same figures in every seed hold by themselves, and no test has shown it.
    text = written(document({"a": EVEN, "b": EVEN, "c": EVEN}, claim("no worse"), claim("no worse", "c.oracle")))
    assert "two-sided at 5 %." in text and "beyond noise" not in text


def test_open_claims_together_name_only_what_is_missing():
    claims = [{"order": ["a", row], "by": "oracle"} for row in "bc"]
    (together,) = verdicts(document({"a": FAR, "b": [], "c": []}, *claims))
    assert (together.claim, together.figures) == ("2 claims of which nothing is known yet", "b not run, c not run")
