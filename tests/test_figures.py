from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from commands import Running
from matplotlib.image import imread

from mheads.errors import UserError
from mheads.report import figures
from mheads.report.figures import history_figure, ownership_figure, save, suite_figure

DIGITS = [str(digit) for digit in range(10)]


def counts(members: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 100, size=(members, classes))


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
    monkeypatch.setattr(figures, "further_fonts", lambda: ["DejaVu Serif"])
    figure = ownership_figure(counts(2, 2), ["cat", "dog"])
    for _ in range(2):
        save(figure, tmp_path / "a.png")
        assert panels(figure)[0].get_xticklabels()[0].get_fontfamily() == ["sans-serif", "DejaVu Serif"]


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
        def savefig(self, path, format):
            path.write_text("half")
            raise OSError("disk full")

    path = tmp_path / "ownership.png"
    path.write_text("old")
    with pytest.raises(UserError, match=r"could not save .*ownership.png: disk full"):
        save(Unwritable(), path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_pyplot_is_never_loaded():
    code = (
        "import sys, numpy, mheads.api; assert 'matplotlib' not in sys.modules;"
        "import mheads.report.figures as f;"
        "f.ownership_figure(numpy.ones((2, 2)), ['cat', 'dog']); assert 'matplotlib.pyplot' not in sys.modules"
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
    shown = suite_figure(["one", "two", "three"], panels, "a suite").axes
    assert [panel.get_xlabel() for panel in shown] == ["Oracle", "Ensemble-Mean"]
    assert [text.get_text() for text in shown[0].get_yticklabels()] == ["one", "three"]
    assert len(suite_figure(["one"], {"Oracle": [nothing]}, "not run yet").axes) == 1
