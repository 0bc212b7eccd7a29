"""How values of metrics are written."""

import pytest

from mheads.problems.metric_text import format_metric
from mheads.problems.regression import Regression, RegressionResult


@pytest.mark.parametrize(
    ("metric", "value", "percent", "text"),
    [
        ("oracle", 93.456, True, "93.46"),
        ("oracle_by_loss", 93.456, True, "93.46"),  # an accuracy
        ("nll_scaled_ensemble_mean", 0.54321, True, "0.543"),
        ("member_train_loss", 0.54321, False, "0.543"),
        ("parameters", 54824.0, True, "54,824"),
        ("iterations", 2.0, False, "2"),
        ("peak_memory", 473680554.67, True, "473,680,555"),
        ("seconds", 12.345, False, "12.3"),
        ("oracle", 0.123456, False, "0.1235"),
        ("oracle", 12345.6, False, "12345.60"),
        ("r2_oracle", -1e70, False, "-1e+70"),
        ("nll", 1e70, False, "1e+70"),
    ],
)
def test_the_name_of_a_metric_decides_how_it_is_written(metric, value, percent, text):
    assert format_metric(value, metric, percent) == text


def test_an_explained_variance_that_diverged_is_short():
    summary = RegressionResult.unknown(2, 1).to_dict()
    summary["r2"] = {"members": [0.5, 0.5], "single": -1.23456e70, "ensemble_mean": 0.98765, "oracle": 1.0}
    text = dict(Regression.rows(summary))["R²"]
    assert text == "mean member -1.235e+70, Ensemble-Mean 0.9877, Oracle 1"
