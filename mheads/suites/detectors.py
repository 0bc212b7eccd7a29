"""Average precisions of detectors, class by class: of one run, or of several with their spread, beside the paper's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mheads.api.evaluate import evaluate_run
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.runs.folder import RunFolder

PREDICTORS = ("ensemble_mean", "single", "oracle")  # single: the mean over the members


@dataclass(frozen=True, eq=False)
class Precisions:
    """Of runs [R, C], in percent: what one predictor reaches in each class, NaN where there is nothing to find."""

    name: str
    classes: tuple[str, ...]
    values: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """[R] over the classes that have any."""
        there = ~np.isnan(self.values).all(0)
        return self.values[:, there].mean(1) if there.any() else np.full(len(self.values), math.nan)

    def spread(self, values: np.ndarray) -> float:
        """The standard deviation over runs (n - 1); NaN for one."""
        return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def measured(
    runs: Sequence[Path], watch: Watcher, overrides: Sequence[str], split: str | None, trust: bool
) -> list[dict[str, Any]]:
    """What result.json holds of each run; computed anew where other data is asked for, or the run is not finished."""
    found = []
    for path in runs:
        folder = RunFolder(path)
        folder.require()
        if folder.read_data().problem.name != "detection":
            raise UserError(f"{path} is a run that learned {folder.read_data().problem.name}: mheads eval measures it")
        finished = folder.result.is_file() and not overrides and split is None
        found.append(folder.read_result() if finished else evaluate_run(path, None, watch, overrides, split, trust))
    return found


def precisions(
    runs: Sequence[Path], results: Sequence[dict[str, Any]], boxes: str, measure: str, predictor: str
) -> Precisions:
    """Those of a predictor, with the boxes and by the measure that are asked for."""
    same_images(runs, results)
    if doubles := [path for i, path in enumerate(runs) if path.resolve() in [other.resolve() for other in runs[:i]]]:
        raise UserError(f"{doubles[0]} is given twice: give each run once")
    known = {RunFolder(path).read_data().problem.classes for path in runs}  # type: ignore[attr-defined]
    if len(known) > 1:
        raise UserError("the runs were trained on other classes than each other: compare those of the same classes")
    rows = [_row(result["classes"][boxes][measure], predictor) for result in results]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return Precisions(name, known.pop(), np.array(rows, float))


def same_images(runs: Sequence[Path], results: Sequence[dict[str, Any]]) -> None:
    """Refuses results that cannot stand beside each other: those of other images."""
    told = [f"{result['examples']:,} images of {result['split']}" for result in results]
    first = results[0].get("images")
    for path, said, result in zip(runs[1:], told[1:], results[1:], strict=True):
        if said != told[0]:
            raise UserError(
                f"{runs[0]} was measured on {told[0]} and {path} on {said}: measure both on the same, with --split "
                "test or --data data.limit=null"
            )
        if first and result.get("images") and result["images"] != first:
            raise UserError(
                f"{runs[0]} and {path} were each measured on {said}, and these are not the same images: measure both "
                "on the same, with --data data.path=FOLDER"
            )


def _row(found: dict[str, Any], predictor: str) -> list[float]:
    if predictor == "single":
        mean: list[float] = np.array(found["members"], float).mean(0).tolist()
        return mean
    row: list[float] = found[predictor]
    return row


def paired_test(one: Precisions, other: Precisions) -> dict[str, float]:
    """Student's paired t-test over the classes: is the mean over runs of the one above that of the other?

    The difference of the mean average precisions, the number of classes, and the probability of such a difference, or
    a larger one either way, if neither were better; NaN if the difference is the same in every class, of which the test
    can say nothing.
    """
    from scipy.stats import ttest_rel

    if one.classes != other.classes:
        raise UserError("the two sets of runs were trained on other classes than each other")
    a, b = one.values.mean(0), other.values.mean(0)
    there = ~np.isnan(a) & ~np.isnan(b)
    if there.sum() < 2:
        raise UserError("a paired test needs at least two classes with objects in the images")
    if np.array_equal(a[there], b[there]):
        return {"difference": 0.0, "classes": int(there.sum()), "p": 1.0}
    difference = (a - b)[there]
    same = np.ptp(difference) <= 1e-9 * max(1.0, np.abs(difference).max())
    p = math.nan if same else float(ttest_rel(a[there], b[there]).pvalue)
    return {"difference": float(difference.mean()), "classes": int(there.sum()), "p": p}


def paper() -> dict[str, Any]:
    """What the paper reports, by boxes, row and class."""
    facts: dict[str, Any] = json.loads(resources.files("mheads.suites").joinpath("paper_detection.json").read_text())
    return facts


def paper_row(runs: Sequence[Path], classes: Sequence[str]) -> str | None:
    """The row of the paper that runs are beside: CaffeNets on the classes of VOC, by where they split."""
    facts = paper()
    configs = [RunFolder(path).read_config() for path in runs]
    nets = {config.model_args.get("base", "caffenet") for config in configs if config.model == "fast_rcnn"}
    splits = {"single" if config.members == 1 else str(config.split or "ensemble") for config in configs}
    if list(classes) != facts["classes"] or nets != {"caffenet"} or len(splits) != 1:
        return None
    (row,) = splits
    return row if row in facts["regressed"] else None
