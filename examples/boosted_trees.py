"""Gradient boosting of decision trees (scikit-learn) on the data, splits and terms of the suite `tabular`.

For each split, the held-out training examples choose the learning rate and the size of leaves.

python examples/boosted_trees.py 5          # the first five splits; prints a table
"""

import sys

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

import mheads
from mheads.suites.suite import read_suite

OPTIONS = [{"learning_rate": lr, "min_samples_leaf": leaf} for lr in (0.03, 0.1) for leaf in (5, 20)]


def measure_split(table: str, fold: int, validation: int, iterations: int = 300) -> float:
    """The root mean square error on the test set of a split."""
    data = mheads.data.load("uci", table=table, fold=fold)
    train, test = (
        (split.read(np.arange(len(split)), None).numpy(), split.targets[:, 0]) for split in (data.train, data.test)
    )
    known, held_out = ([part[rows] for part in train] for rows in (slice(-validation), slice(-validation, None)))
    models = [
        HistGradientBoostingRegressor(max_iter=iterations, early_stopping=False, **options).fit(*known)
        for options in OPTIONS
    ]
    best = min(models, key=lambda model: _error(model, *held_out))
    return _error(best, *test)


def _error(model: HistGradientBoostingRegressor, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((model.predict(x) - y) ** 2)))


def main(splits: int = 20) -> dict[str, list[float]]:
    suite, errors = read_suite("tabular"), {}
    for name, recipe in suite.recipes.items():
        table = next(text.removeprefix("data.table=") for text in recipe.set if text.startswith("data.table="))
        errors[name] = [measure_split(table, fold, recipe.validation) for fold in range(splits)]
        error = np.std(errors[name], ddof=1) / np.sqrt(splits) if splits > 1 else 0.0
        print(f"{name:10} {np.mean(errors[name]):.3g} ± {error:.2g}")
    return errors


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
