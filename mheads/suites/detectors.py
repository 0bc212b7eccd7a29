"""Average precisions of detectors, class by class: of one run, or of several, beside the paper's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mheads.api.evaluate import evaluate_run
from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.problems import finds_objects
from mheads.runs.folder import RunFolder

PREDICTORS = {"ensemble_mean": "Ensemble-Mean", "single": "mean member", "oracle": "Oracle"}


@dataclass(frozen=True, eq=False)
class Precisions:
    """Of runs [R, C], in percent: what one predictor reaches in each class, NaN where there is nothing to find."""

    classes: tuple[str, ...]
    values: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """[R] over the classes that have any."""
        any_objects = ~np.isnan(self.values).all(0)
        return self.values[:, any_objects].mean(1) if any_objects.any() else np.full(len(self.values), math.nan)


class Difference(NamedTuple):
    """Of two mean average precisions: the probability p is of such a difference, or a larger one either way, if neither
    were better; NaN if the difference is the same in every class, of which the test can say nothing."""

    mean: float
    num_classes: int
    p: float


def evaluate_detectors(
    runs: Sequence[Path], watch: Watcher, overrides: Sequence[str], split: str | None, trust: bool
) -> list[dict[str, Any]]:
    """What result.json holds of each run; computed anew where other data is asked for, or the run is not finished."""
    results = []
    for path in runs:
        folder = RunFolder(path)
        folder.require()
        problem = folder.read_data().problem
        if not finds_objects(problem):
            raise UserError(f"{path} is a run that learned {problem.name}: mheads eval measures it")
        finished = folder.result.is_file() and not overrides and split is None
        results.append(folder.read_result() if finished else evaluate_run(path, None, watch, overrides, split, trust))
    return results


def precisions(
    runs: Sequence[Path], results: Sequence[dict[str, Any]], boxes: str, measure: str
) -> dict[str, Precisions]:
    """Those of each predictor, with the boxes and by the measure that are asked for."""
    check_same_images(runs, results)
    if doubles := [path for i, path in enumerate(runs) if path.resolve() in [other.resolve() for other in runs[:i]]]:
        raise UserError(f"{doubles[0]} is given twice: give each run once")
    classes = {RunFolder(path).read_data().problem.classes for path in runs}  # type: ignore[attr-defined]
    if len(classes) > 1:
        raise UserError("the runs have different classes: compare runs with the same classes")
    names, by_class = classes.pop(), [result["classes"][boxes][measure] for result in results]
    values = {who: [each[who] for each in by_class] for who in ("ensemble_mean", "oracle")}
    values["single"] = [np.array(each["members"], float).mean(0) for each in by_class]
    return {who: Precisions(names, np.array(values[who], float)) for who in PREDICTORS}


def check_same_images(runs: Sequence[Path], results: Sequence[dict[str, Any]]) -> None:
    """Raises an error for results of other images, which cannot stand beside each other."""
    sets = [f"{result['examples']:,} images of {result['split']}" for result in results]
    first = results[0].get("images")
    for path, images, result in zip(runs[1:], sets[1:], results[1:], strict=True):
        if images != sets[0]:
            raise UserError(
                f"{runs[0]} was measured on {sets[0]} and {path} on {images}: measure both on the same, with --split "
                "test or --data data.limit=null"
            )
        if first and result.get("images") and result["images"] != first:
            raise UserError(
                f"{runs[0]} and {path} were each measured on {images}, and these are not the same images: measure both "
                "on the same, with --data data.path=FOLDER"
            )


def compare(ours: Precisions, others: Precisions) -> Difference:
    """Student's paired t-test over the classes: is the mean over runs of the first above that of the second?"""
    from scipy.stats import ttest_rel

    if ours.classes != others.classes:
        raise UserError("the two sets of runs were trained on other classes than each other")
    a, b = ours.values.mean(0), others.values.mean(0)
    both = ~np.isnan(a) & ~np.isnan(b)
    if both.sum() < 2:
        raise UserError("a paired test needs at least two classes with objects in the images")
    a, b = a[both], b[both]
    if np.array_equal(a, b):
        return Difference(0.0, len(a), 1.0)
    same = np.ptp(a - b) <= 1e-9 * max(1.0, np.abs(a - b).max())
    return Difference(float((a - b).mean()), len(a), math.nan if same else float(ttest_rel(a, b).pvalue))


def paper_figures(runs: Sequence[Path], classes: Sequence[str], boxes: str) -> tuple[str, dict[str, Any]] | None:
    """The row of the paper that runs are beside, and its figures: CaffeNets on the classes of VOC, by the split."""
    facts = json.loads(resources.files("mheads.suites").joinpath("paper_detection.json").read_text())
    configs = [RunFolder(path).read_config() for path in runs]
    nets = {config.model_args.get("base", "caffenet") for config in configs if config.model == "fast_rcnn"}
    splits = {"single" if config.members == 1 else str(config.split or "ensemble") for config in configs}
    if list(classes) != facts["classes"] or nets != {"caffenet"} or len(splits) != 1:
        return None
    (row,) = splits
    return (row, facts[boxes][row]) if row in facts["regressed"] else None
