"""What a terminal shows of training where nobody watches a bar: a log file, a pipe."""

import io

import pytest
from rich.console import Console

from mheads.common import progress
from mheads.problems.metrics import ClassificationResult


@pytest.fixture
def shown(monkeypatch):
    """Writes the progress of `total` steps of `seconds` each to a file, and returns the text."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def train(total, seconds):
        out = io.StringIO()
        terminal = progress.Terminal(Console(file=out, width=200))
        with terminal.training(total, 0):
            for step in range(1, min(total, 10) + 1):
                clock[0] += seconds
                terminal.step(step, 1.0, 0.1, 32, [0.5, 0.5])
        terminal.on_evaluation(10, ClassificationResult.unknown(2, 3))
        return out.getvalue()

    return train


def test_a_long_training_says_once_how_long_it_will_be(shown):
    assert shown(1003, 2.4).count("1,000 iterations to go, about 40 minutes") == 1


def test_a_short_training_says_nothing_of_the_kind(shown):
    assert "to go" not in shown(20, 1.0)


def test_an_evaluation_names_its_figures(shown):
    line = shown(3, 0.1).splitlines()[-1]
    assert [word for word in line.split() if word[0].isalpha() and word != "nan"] == [
        "iteration",
        "Ensemble-Mean",
        "Oracle",
        "top-2",
        "members",
    ]
