from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from helpers.commands import Running
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from mheads.common.errors import UserError
from mheads.problems import Regression
from mheads.report.charts import outcomes
from mheads.report.charts.chart import Line, LineChart
from mheads.report.charts.outcomes import map_ownership
from mheads.report.charts.over_training import chart_losses, chart_measures
from mheads.report.charts.overlaps import Hidden, find_hidden_parts, name_equal_lines
from mheads.report.figures import draw, figure
from mheads.report.figures.figure import save
from mheads.report.figures.suite_costs import draw_costs, find_limits
from mheads.report.figures.suite_rows import draw_suite
from mheads.report.page import svg

DIGITS = [str(digit) for digit in range(10)]


def counts(members: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 100, size=(members, classes))


def ownership_figure(ownership, classes):
    return draw(map_ownership(ownership if isinstance(ownership, dict) else {"": ownership}, classes))


def history_figure(steps, evaluations, measure="accuracy, %"):
    return draw([*([chart_losses(steps)] if steps else []), chart_measures(evaluations, measure)])


def panels(figure):
    """The heat maps, without the colour bar."""
    return [axes for axes in figure.axes if axes.images]


def texts(panel) -> list[str]:
    return [text.get_text() for text in panel.texts]


def test_each_class_is_shared_out_to_a_hundred_percent():
    table = counts(4, 10)
    (panel,) = panels(ownership_figure(table, DIGITS))
    shown = panel.images[0].get_array()
    np.testing.assert_allclose(shown.sum(0), 100)
    np.testing.assert_allclose(shown, 100 * table / table.sum(0))


def test_values_stand_in_their_cells():
    (panel,) = panels(ownership_figure(np.array([[3, 0], [1, 5]]), ["cat", "dog"]))
    values = {text.get_position(): text.get_text() for text in panel.texts}
    assert values == {(0, 0): "75", (1, 0): "0", (0, 1): "25", (1, 1): "100"}


def test_labels_name_members_and_classes():
    (panel,) = panels(ownership_figure(counts(2, 3), ["cat", "dog", "automobile"]))
    assert [label.get_text() for label in panel.get_xticklabels()] == ["cat", "dog", "automobile"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["member 0", "member 1"]


def test_names_are_drawn_as_they_are(tmp_path):
    names = ["$x^2$", "$_", "no \udc80 character", "two\nlines\tof 猫", 120 * "a"]
    figure = ownership_figure({"a $b$": counts(2, 5), "c\udc81": counts(2, 5)}, names)
    save(figure, tmp_path / "names.png")  # and no warning of letters that no font has
    first = panels(figure)[0]
    shown = ["$x^2$", "$_", "no ? character", "two lines of 猫", 23 * "a" + "…"]
    assert [label.get_text() for label in first.get_xticklabels()] == shown
    assert not any(label.get_parse_math() for label in first.get_xticklabels())


def test_letters_that_a_font_lacks_are_taken_from_others_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "further_fonts", lambda: ["DejaVu Serif"])
    drawn = ownership_figure(counts(2, 2), ["cat", "dog"])
    for _ in range(2):
        save(drawn, tmp_path / "a.png")
        assert panels(drawn)[0].get_xticklabels()[0].get_fontfamily() == ["sans-serif", "DejaVu Serif"]


def test_several_ensembles_stand_side_by_side_with_one_colour_bar():
    figure = ownership_figure({"independent": counts(4, 10), "MCL": counts(3, 10)}, DIGITS)
    assert [panel.get_title() for panel in panels(figure)] == ["independent", "MCL"]
    assert len(figure.axes) == 3
    first, second = (panel.get_subplotspec() for panel in panels(figure))
    assert first.rowspan == second.rowspan


def test_more_ensembles_than_a_page_is_wide_stand_in_rows():
    found = panels(ownership_figure({str(i): counts(4, 10) for i in range(4)}, DIGITS))
    assert [panel.get_subplotspec().num1 for panel in found] == [0, 1, 2, 3]
    assert found[0].get_gridspec().get_geometry() == (2, 2)


@pytest.mark.parametrize(
    ("members", "names"), [(1, ["all"]), (1, DIGITS), (4, ["all"]), (2, 8 * ["a rather long name"])]
)
def test_nothing_is_cut_off_small_figures(members, names):
    figure = ownership_figure(counts(members, len(names)), names)
    figure.draw_without_rendering()
    bar = figure.axes[-1].yaxis.label.get_window_extent()
    labels = [label.get_window_extent() for label in panels(figure)[0].get_xticklabels()]
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsy(box.y0) for box in [bar, *labels])
    assert figure.bbox.containsx(bar.x1) and figure.bbox.containsy(bar.y1)


def test_a_hundred_classes_stand_one_above_the_other_without_values():
    names = [f"class {c}" for c in range(100)]
    figure = ownership_figure({"independent": counts(4, 100), "MCL": counts(4, 100)}, names)
    first, second = (panel.get_subplotspec() for panel in panels(figure))
    assert first.colspan == second.colspan
    assert [texts(panel) for panel in panels(figure)] == [[], []]


@pytest.mark.parametrize("num_classes", [100, 301])
def test_labels_of_many_classes_do_not_overlap(num_classes):
    figure = ownership_figure(counts(4, num_classes), [f"class {c}" for c in range(num_classes)])
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in panels(figure)[0].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_a_class_without_examples_stays_empty():
    (panel,) = panels(ownership_figure(np.array([[0, 2], [0, 2]]), ["cat", "dog"]))
    assert panel.images[0].get_array().mask.tolist() == [[True, False], [True, False]]
    assert texts(panel) == ["50", "50"]


@pytest.mark.parametrize("members", [1, 12, 13])
def test_lines_of_members_can_be_told_apart(members):
    line = {
        "iteration": 1,
        "member_losses": [1.0] * members,
        "members": [1.0] * members,
        "ensemble_mean": 1,
        "oracle": 2,
    }
    figure = history_figure([line], [line])
    figure.draw_without_rendering()
    left, right = figure.axes
    assert len({(line.get_color(), line.get_linestyle()) for line in left.lines}) == members
    assert [line.get_label() for line in right.lines[members:]] == ["Ensemble-Mean", "Oracle"][: 2 * (members > 1)]
    named = left.get_legend()
    assert (named is None) == (members == 13)
    full, beside = (left, named) if members == 12 else (right, right.get_legend())
    if members > 1:  # beside the lines, not on them
        assert beside.get_window_extent().x0 >= full.get_window_extent().x1
    assert all(tick == round(tick) for tick in left.get_xticks())  # there is no half iteration, also of one point
    assert len(history_figure([], [line]).axes) == 1  # a panel without lines says nothing


def test_large_errors_that_differ_little_are_written_in_full():
    lines = [
        {"iteration": i, "members": [1476.1 + i / 10] * 2, "ensemble_mean": 1476.1, "oracle": 1476.0} for i in (1, 2, 3)
    ]
    figure = history_figure([], lines, "root mean square error")
    figure.canvas.draw()
    (panel,) = figure.axes
    assert panel.yaxis.get_offset_text().get_text() == ""
    assert any(tick.get_text().startswith("1476") for tick in panel.get_yticklabels())


def test_a_single_evaluation_has_one_tick():
    line = {"iteration": 100, "members": [2.0, 3.0], "ensemble_mean": 2.0, "oracle": 1.0}
    (panel,) = history_figure([], [line], "root mean square error").axes
    assert list(panel.get_xticks()) == [100]


def test_the_axes_of_answers_in_long_units_are_not_cut_off():
    figure = draw([outcomes.chart_answers({"run": (2.0, 1.0)}, Regression(1).measure)])
    figure.draw_without_rendering()
    box = figure.axes[0].yaxis.label.get_window_extent()
    assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match=r"ownership 'MCL' is \(4, 10\), expected \(M, 2\)"):
        ownership_figure({"MCL": counts(4, 10)}, ["cat", "dog"])


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_save_replaces_the_file_and_leaves_no_other(tmp_path, suffix):
    path = tmp_path / f"ownership.{suffix}"
    path.write_text("old")
    save(ownership_figure(counts(3, 10), DIGITS), path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() != b"old"
    if suffix == "png":
        assert imread(path).std() > 0.05


def test_a_failed_save_keeps_the_old_file(tmp_path):
    class Unwritable:
        def savefig(self, file, format):
            file.write(b"half")
            raise OSError("disk full")

    path = tmp_path / "ownership.png"
    path.write_text("old")
    with pytest.raises(UserError, match=r"could not save .*ownership.png: disk full"):
        save(Unwritable(), path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_pyplot_is_never_loaded():
    code = (
        "import sys, numpy, mheads.api.fit; assert 'matplotlib' not in sys.modules;"
        "from mheads.report.charts.outcomes import map_ownership; from mheads.report.figures import draw;"
        "draw(map_ownership({'': numpy.ones((2, 2))}, ['cat', 'dog'])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = Running("--version", before=partial(exec, code, {})).finish()
    assert done.code == 0, done.err


def test_a_suite_has_panels_and_rows_for_what_is_known():
    nothing, ours, theirs = (None,) * 4, (80.0, 1.0, None, None), (None, None, 81.0, None)
    panels = {
        "Oracle": [ours, nothing, nothing],
        "Ensemble-Scored": [nothing, nothing, nothing],
        "Ensemble-Mean": [nothing, nothing, theirs],
    }
    shown = draw_suite(["one", "two", "three"], panels, "a suite").axes
    assert [panel.get_xlabel() for panel in shown] == ["Oracle", "Ensemble-Mean"]
    assert [text.get_text() for text in shown[0].get_yticklabels()] == ["one", "three"]
    assert len(draw_suite(["one"], {"Oracle": [nothing]}, "not run yet").axes) == 1


def test_costs_of_a_suite_are_multiples_of_those_of_its_first_row():
    nothing = (None,) * 4
    metrics = {"Ensemble-Mean": [(80.0, 1.0, None, None), (82.0, None, None, None), nothing, (90.0, None, None, None)]}
    costs = {"training FLOP": [2e9, 8e9, 1e9, None], "inference FLOP": [1e6, 1e6, 1e6, None]}
    figure = draw_costs(["one", "four", "not run", "of unknown cost"], metrics, costs, "a suite")
    training, inference = figure.axes
    points = [[tuple(bar[0].get_xydata()[0]) for bar in panel.containers] for panel in (training, inference)]
    assert points == [[(1, 80), (4, 82)], [(1, 80), (1, 82)]]
    assert training.get_xlabel() == "training FLOP, one = 1" and training.get_ylabel() == "Ensemble-Mean"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "four"]
    # A first row whose cost is not known is not the one that others are measured by.
    turned = [{name: each[::-1] for name, each in part.items()} for part in (metrics, costs)]
    panel = draw_costs(["of unknown cost", "not run", "four", "one"], *turned, "a suite").axes[0]
    assert [tuple(bar[0].get_xydata()[0]) for bar in panel.containers] == [(8, 82), (2, 80)]
    assert panel.get_xlabel() == "training FLOP, not run = 1"


def test_no_two_rows_of_a_figure_against_costs_look_alike():
    rows, points = [f"row {i}" for i in range(20)], [(80.0, None, None, None)] * 20
    panel = draw_costs(rows, {"Ensemble-Mean": points}, {"training": [1.0] * 20}, "a suite").axes[0]
    looks = [(bar[0].get_color(), bar[0].get_marker()) for bar in panel.containers]
    assert len({*looks}) == 20


def test_a_row_of_one_seed_is_hollow_and_the_title_says_so():
    several, one = (80.0, 1.0, 81.0, None), (82.0, None, None, None)
    panel = draw_suite(["several", "one"], {"Oracle": [several, one]}, "a suite").axes[0]
    ours, hollow, papers = (bar[0].get_markerfacecolor() for bar in panel.containers[:3])
    assert hollow == "none" and ours != "none" and papers == "white"
    assert panel.figure.get_suptitle() == "a suite\nhollow: one seed"
    assert draw_suite(["several"], {"Oracle": [several]}, "a suite").get_suptitle() == "a suite"
    costs = draw_costs(["several", "one"], {"Oracle": [several, one]}, {"training": [1.0, 2.0]}, "a suite")
    assert [bar[0].get_markerfacecolor() == "none" for bar in costs.axes[0].containers] == [False, True]
    assert "hollow" in costs.get_suptitle()


def test_a_row_far_from_all_others_does_not_squeeze_them():
    means = [91.5, 91.7, 91.9, 92.1, 92.3, 93.0]
    rows, points = [f"row {i}" for i in range(7)], [(mean, 0.1, None, None) for mean in [*means, 85.6]]
    assert find_limits(points[:-1]) is None
    bottom, top = find_limits(points)
    assert bottom == pytest.approx(91.145) and top == pytest.approx(93.355)
    assert find_limits([(100.0, None, None, None) for _ in points]) is None
    panel = draw_costs(rows, {"Ensemble-Mean": points}, {"training": [1.0 + i for i in range(7)]}, "a suite").axes[0]
    assert panel.get_ylim() == (bottom, top)
    assert [text.get_text() for text in panel.texts] == ["", "85.6"]  # an arrow, and the value
    assert panel.figure.legends[0].get_texts()[-1].get_text() == "row 6"


def test_the_guesses_of_one_network_stand_beside_the_oracles():
    def panels(oracle):
        return {
            "mean member": [(77.0, None, None, None), (78.0, None, None, None)],
            "Ensemble-Mean": [(80.0, None, None, None), (78.0, None, None, None)],
            "Oracle": [(90.0, None, None, None), (oracle, None, None, None)],
            "top-M": [(97.8, None, None, None), (97.5, None, None, None)],
        }

    oracles = draw_suite(["four", "one"], panels(78.0), "a suite").axes[2]
    (line,) = [line for line in oracles.lines if line.get_linestyle() == "--"]
    assert [*line.get_xdata()] == [97.5, 97.5]
    assert [text.get_text() for text in oracles.get_legend().get_texts()] == ["top-M of one"]
    assert draw_suite(["four", "two"], panels(85.0), "a suite").axes[2].get_legend() is None


def test_means_that_span_more_than_one_order_have_a_logarithmic_axis():
    def scale_of(*means, std=0.01, metric="distortion"):
        return draw_suite([*"abc"], {metric: [(mean, std, None, None) for mean in means]}, "a suite").axes[0]

    assert scale_of(0.4, 1.0, 21.0).get_xscale() == "log"
    assert scale_of(0.4, 1.0, 21.0, metric="NLL, Voronoi").get_xscale() == "linear"
    assert scale_of(0.4, 1.0, 7.0).get_xscale() == scale_of(-0.4, 1.0, 21.0).get_xscale() == "linear"
    assert scale_of(0.4, 1.0, 21.0, std=0.399).get_xlim()[0] == pytest.approx(0.4 / 3)


# Losses, and lines that lie on each other.


def history(trained, members, *, mean=1.0, oracle=2.0):
    """The panels of a history whose steps have these losses, and whose evaluations are all alike."""
    logged = enumerate(zip(trained, members, strict=True))
    steps = [{"iteration": i, "loss": loss, "member_losses": own} for i, (loss, own) in logged]
    own = [0.5] * len(members[0])
    evaluations = [{"iteration": i, "members": own, "ensemble_mean": mean, "oracle": oracle} for i in range(3)]
    return history_figure(steps, evaluations).axes


def test_the_history_shows_the_loss_that_is_trained():
    left, _ = history([0.7, 0.1, 0.01], [[6, 7], [16, 17], [9, 8]])
    assert [line.get_label() for line in left.lines] == ["member 0", "member 1", "trained loss"]
    trained = left.lines[-1]
    assert list(trained.get_ydata()) == [0.7, 0.1, 0.01] and trained.get_linewidth() > left.lines[0].get_linewidth()
    assert left.get_yscale() == "log"  # or it would lie on the floor
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["member 0", "member 1", "trained loss"]


def test_a_sum_over_members_is_shown_for_one_of_them():
    left, _ = history([8.0, 4.0, 3.0], [[5, 3], [2, 2], [1.5, 1.5]])
    assert left.lines[-1].get_label() == "trained loss / 2" and list(left.lines[-1].get_ydata()) == [4, 2, 1.5]
    left, _ = history([3.0, 2.0], [[3.0], [2.0]])
    assert left.lines[-1].get_label() == "trained loss" and left.get_yscale() == "linear"


def test_losses_below_zero_are_on_a_plain_axis():
    left, _ = history([-50.0, 0.1, 9.0], [[1.0, -3.0]] * 3)
    assert left.get_yscale() == "linear" and list(left.lines[-1].get_ydata()) == [-50.0, 0.1, 9.0]


def drawn_again(panel):
    """(colour, x, y) of what is drawn once more over the line that hides it."""
    return [
        (tuple(found.get_color()[0][:3]), *found.get_segments()[0].T.tolist())
        for found in panel.collections
        if isinstance(found, LineCollection)
    ]


def test_lines_that_lie_on_each_other_are_all_seen():
    left, right = history([4.0, 3.0, 2.0], [[4.0, 9.0], [3.0, 9.0], [1.0, 9.0]], mean=2.0)
    first = drawn_again(left)
    assert first == [(to_rgb("#0072B2"), [0, 1], [4, 3])]  # member 0, as long as it is what is trained
    members, mean = drawn_again(right)
    assert members == (to_rgb("#0072B2"), [0, 1, 2], [0.5] * 3) and mean == ((0, 0, 0), [0, 1, 2], [2.0] * 3)
    wide = [found.get_linewidth()[0] for found in right.collections]
    assert wide[1] > right.lines[-1].get_linewidth()  # black on black is told by its width
    assert right.lines[-1].get_fillstyle() == "none"  # and one point of the Oracle is a ring
    assert drawn_again(history([4.0], [[5.0, 6.0]])[0]) == []


def test_hidden_lines_take_turns():
    x = [1, 2, 3, 4]
    lines = [(x, [5, 5, 5, 1]), (x, [5, 5, 5, 9]), (x, [0, 5, 5, None]), (x[1:], [5, 5, 9])]
    found = {(part.line, part.turn, part.turns, tuple(part.x)): part for part in find_hidden_parts(lines, 10)}
    assert list(found) == [
        (0, 0, 2, (1, 2)),
        (0, 0, 4, (2, 3)), (1, 1, 4, (2, 3)), (2, 2, 4, (2, 3)),
        (1, 0, 2, (3, 4)),
    ]  # fmt: skip
    # Each has a quarter of the way, and the last one, which is on top, shows through in its own.
    (length, gap), *_ = [part.dashes[1] for key, part in found.items() if key[2] == 4]
    starts = [-part.dashes[0] % (length + gap) for key, part in found.items() if key[2] == 4]
    assert starts == [0, length, 2 * length] and gap == 3 * length
    assert find_hidden_parts([([1], [5.0]), ([1], [5.0]), ([1], [6.0])], 10) == [Hidden(0, 0, 2, [1], [5.0])]
    assert find_hidden_parts([(x, [5.0] * 4)] * 13, 10) == []


def test_lines_that_are_equal_from_end_to_end_are_named():
    x = [1, 2, 3]
    lines = [(x, [1, 2, 3]), (x, [1, 2, 3.001]), (x, [1.0, 2.0, 3.0]), (x, [None] * 3), (x, [None] * 3)]
    assert name_equal_lines(["a", "b", "c", "d", "e"], lines) == "a = c"


def draw_lines(*lines):
    return str(svg.draw_chart(LineChart("", lines, "x", "y")))


def test_the_lines_of_a_page_are_all_seen_too():
    lines = [Line("mean", [1, 2, 3], [7, 8, 9], "ink"), Line("Oracle", [1, 2, 3], [9, 8, 9], "ink", "dashed")]
    assert ' again"' not in draw_lines(lines[0], Line("Oracle", [1, 2, 3], [9, 8, 8]))
    lines.append(Line("<member>", [2, 3], [8, 9], 1))
    drawn = draw_lines(*lines)
    (one, two) = re.findall(r'<g class="line ([^"]*) again"><title>(.*?)</title><path style="(.*?)" d="M(.*?)"', drawn)
    assert (one[:2], two[:2]) == (("ink", "mean"), ("ink dashed", "Oracle"))
    assert one[2] == "stroke-dasharray: 8.0 16.0; stroke-dashoffset: 24.0" and two[2].endswith("offset: 16.0")
    assert one[3] == two[3]
    dots = [Line(name, [1], [5.0], i) for i, name in enumerate("abc")]
    drawn = draw_lines(*dots)
    widths = re.findall(r'again"><title>.</title><path class="dot" style="stroke-width: (.*?)"', drawn)
    assert widths == ["5.3", "2.7"]  # two thirds and a third of the dot on top


def test_every_kind_of_chart_can_stand_on_a_page():
    def result(value):
        return {"members": [value], "single": value, "ensemble_mean": value + 1, "oracle": value + 2, "parameters": 5}

    runs = {1: [result(10.0), result(20.0)], 2: [result(30.0)]}
    drawn = str(svg.draw_chart(outcomes.chart_k(runs, level=("top-4", 35.0))))
    assert drawn.count('class="dot"') == 3  # the members
    assert "<title>top-4</title>" in drawn and drawn.count("<title>Oracle</title>") == 3  # the line, and two errors
    drawn = str(svg.draw_chart(outcomes.chart_splits({"no <layer>": runs[1], "conv1": runs[2]})))
    assert (
        drawn.count('<rect class="bar"') == 2 and ">no &lt;layer&gt;</text>" in drawn and "thousand parameters" in drawn
    )
    drawn = str(svg.draw_chart(outcomes.chart_answers({"a": (1.0, 2.0), "b": (3.0, 4.0)})))
    assert [name for name in "ab" if f">{name}</text>" in drawn] == ["a", "b"]
