"""What a terminal shows of training where nobody watches a bar: a log file, a pipe."""

import io

import pytest
from rich.console import Console

from mheads.common import progress
from mheads.problems.metrics import ClassificationResult


@pytest.fixture
def shown(monkeypatch):
    """Writes the progress of `total` steps of `seconds` each, the first three of `first`, and returns the text."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def train(total, seconds, first=None):
        out = io.StringIO()
        terminal = progress.Terminal(Console(file=out, width=200))
        with terminal.training(total, 0):
            for step in range(1, min(total, 100) + 1):
                clock[0] += first if first is not None and step <= 3 else seconds
                terminal.step(step, 1.0, 0.1, 32, [0.5, 0.5])
        terminal.on_evaluation(10, ClassificationResult.unknown(2, 3))
        return out.getvalue()

    return train


def test_a_long_training_says_once_how_long_it_will_be(shown):
    assert shown(1004, 2.4).count("1,000 iterations to go, about 40 minutes") == 1  # at step 4


def test_the_first_steps_do_not_count_and_fast_ones_are_measured_for_a_second(shown):
    # Steps of 1/16 s: a second after step 3 it is step 19, with 1,000 steps of 62.5 s to go. By the first three, of two
    # seconds each, it would be half an hour.
    assert shown(1019, 1 / 16, first=2.0).splitlines()[0] == "1,000 iterations to go, about 1 minute"
    assert "to go" not in shown(519, 1 / 16, first=2.0)


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
