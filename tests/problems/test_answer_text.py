"""Answers as text: what tables of predictions show, without knowing the problem."""

import csv
import io
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from mheads.api.predict import write_csv
from mheads.cli.printing.answers import details, tables
from mheads.common.console import Console
from mheads.problems import Classification, MultiLabel, Regression, Segmentation
from mheads.problems.answer_text import AnswerText

LOGIT = 2.0  # sigmoid(2) = 0.8808, and 0.8808 of two classes
ANIMALS = ("cat", "dog")


def lines(problem, outputs, weights=None):
    text = problem.answer_text(outputs, problem.together(outputs, weights))
    return list(text.lines), text


def test_classes_are_named_with_their_probability_and_members_that_agree_are_counted():
    outputs = torch.tensor([[[LOGIT, 0.0]], [[LOGIT, 0.0]], [[0.0, LOGIT]]])  # [3, 1, 2]: mean (2 * 0.8808 + 0.1192)/3
    found, text = lines(Classification(ANIMALS), outputs, torch.tensor([[0.0], [0.0], [1.0]]))
    assert found == [["dog 88.1%", "cat 62.7%", "1 of 3", "cat", "cat", "dog"]]
    detail = text.detail(0)
    assert (detail.answer, detail.about) == ("dog", "(88.1%), 1 of 3 members agree")
    assert detail.columns == ("answer", "second")
    assert detail.members[2] == ["dog 88.1%", "cat 11.9%"]
    assert detail.ensemble == [["dog 88.1%", "cat 11.9%"], ["cat 62.7%", "dog 37.3%"]]
    console = Console()
    console.file = io.StringIO()
    console.print(details("x", detail))
    names = [line.split()[0] for line in console.file.getvalue().splitlines() if "Ensemble" in line]
    assert names == ["Ensemble-Scored", "Ensemble-Mean"]


def test_labels_are_those_above_one_half_and_may_be_none():
    outputs = torch.tensor([[[LOGIT, LOGIT], [-LOGIT, -LOGIT]], [[LOGIT, -LOGIT], [-LOGIT, -LOGIT]]])  # [2, 2, 2]
    found, text = lines(MultiLabel(ANIMALS), outputs)
    assert found == [["cat 88.1%", "1 of 2", "cat, dog", "cat"], ["none", "2 of 2", "none", "none"]]
    assert text.long and text.detail is None


def test_the_classes_of_pixels_are_shares_and_agreement_is_that_of_all_members():
    outputs = torch.zeros(2, 1, 2, 1, 4)
    outputs[0, 0, 0] = LOGIT  # all cat
    outputs[1, 0, 0, 0, :3], outputs[1, 0, 1, 0, 3] = LOGIT, 3 * LOGIT  # but for one pixel, of which it is surer
    found, text = lines(Segmentation(ANIMALS, (1, 4)), outputs)
    assert found == [["cat 75.0%, dog 25.0%", "on 75.0%", "cat 100.0%", "cat 75.0%, dog 25.0%"]]
    assert text.long


def test_numbers_have_four_digits_and_no_agreement():
    found, text = lines(Regression(2), torch.tensor([[[1.0, 20000.0]], [[2.0, 0.123456]]]))
    assert found == [["1.5 1e+04", "1 2e+04", "2 0.1235"]]
    assert not text.agreement
    problem, numbers, weights = Regression(1), torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[0.25], [0.75]])
    columns = problem.answer_columns(numbers, problem.together(numbers, weights))
    assert (columns.names, columns.lines) == (["answer", "mean", "member_0", "member_1"], [["1.75", "1.5", "1", "2"]])
    plain = problem.answer_columns(numbers, problem.together(numbers, None))
    assert (plain.names, plain.lines) == (["mean", "member_0", "member_1"], [["1.5", "1", "2"]])


def test_of_a_trajectory_the_first_and_the_last_point_are_shown():
    found, _ = lines(Regression(8, (4, 2)), torch.arange(8.0).reshape(1, 1, 4, 2))
    assert found == [["0 1 ... 6 7", "0 1 ... 6 7"]]


def test_the_probability_of_each_answer_is_printed_and_written(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    weights, run = (
        torch.tensor([[0.25, 0.9], [0.75, 0.1]]),
        SimpleNamespace(data=SimpleNamespace(problem=Regression(1))),
    )
    outputs, names = torch.tensor([[[1.0], [3.0]], [[2.0], [5.0]]]), [("x.csv", "0"), ("x.csv", "1")]
    console = Console()
    console.file = io.StringIO()
    group = SimpleNamespace(names=names)
    predicted = SimpleNamespace(outputs=outputs, weights=weights, images=None, run=run, group=group)
    for table in tables(predicted, None):
        console.print(table)
    printed = [re.split("  +", line.strip()) for line in console.file.getvalue().splitlines()]
    assert ["0", "1.75", "1.5", "1 (25%)", "2 (75%)"] in printed
    assert ["1", "3.2", "4", "3 (90%)", "5 (10%)"] in printed

    file = io.BytesIO()
    write_csv(run, iter([(names, outputs, weights)]), file)
    lines = list(csv.DictReader(io.StringIO(file.getvalue().decode())))
    assert [(line["weight_0"], line["weight_1"]) for line in lines] == [("0.25", "0.75"), ("0.9", "0.1")]
    file = io.BytesIO()
    write_csv(run, iter([(names, outputs, None)]), file)
    assert b"weight" not in file.getvalue()


@dataclass(frozen=True)
class Clock(Regression):
    """A problem that tables do not know."""

    def answer_text(self, outputs, ensemble):
        hours = [[f"{int(x[row, 0])} o'clock" for x in (*ensemble, *outputs)] for row in range(outputs.shape[1])]
        return AnswerText(hours, agreement=False)


def test_a_new_problem_prints_as_it_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console()
    console.file = io.StringIO()
    predicted = SimpleNamespace(
        outputs=torch.tensor([[[3.0]], [[5.0]]]),
        weights=None,
        images=None,
        run=SimpleNamespace(data=SimpleNamespace(problem=Clock(1))),
        group=SimpleNamespace(names=[("times.csv", 0)]),
    )
    for table in tables(predicted, None):
        console.print(table)
    printed = [line.split("  ") for line in console.file.getvalue().splitlines()]
    printed = [[cell.strip() for cell in line if cell.strip()] for line in printed]
    assert ["row", "Ensemble-Mean", "member 0", "member 1"] in printed
    assert ["0", "4 o'clock", "3 o'clock", "5 o'clock"] in printed
