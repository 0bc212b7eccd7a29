"""Objects in images: a class and a box for each region that is proposed."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor

from mheads.common import nested_values, seeds
from mheads.common.errors import UserError
from mheads.common.nested_values import Value
from mheads.common.schemas import Measures, Number, OfClasses, check
from mheads.problems import boxes as box
from mheads.problems.average_precision import MEASURES, Truth, average_precisions, matches
from mheads.problems.base import Problem, format_number, percent_rows
from mheads.problems.member_losses import region_losses
from mheads.problems.metrics import owner_of
from mheads.problems.result import PercentResult, by_predictor

BACKGROUND = "background"
BOXES = ("regressed", "proposals")  # what is measured: the boxes that members give, or those that were proposed
MOST = 100  # regions of a class and image that are looked at, the best
SUPPRESS = 0.3  # what overlaps a better box of its class by more than this goes
FLOOR = 0.001  # detections of a lower probability are not kept: there are thousands in every image


def _each(schema: Any) -> AfterValidator:
    """Of both kinds of boxes, each measure."""

    def validate(value: Any) -> Any:
        for which, measure in product(BOXES, MEASURES):
            if measure not in value.get(which, {}):
                raise ValueError(f"{which}.{measure} is missing")
            check(schema, value[which][measure])
        return value

    return AfterValidator(validate)


@dataclass(frozen=True)
class DetectionResult(PercentResult):
    """Mean average precisions, in percent, of VOC 2007's 11 points and with the boxes that members give, unless said.

    Classes of which no image has an object have none, and do not count. `further` holds those of other measures and
    with the boxes as proposed, `classes` of every class: [boxes][measure], then by predictor. `ensemble_mean` is of
    mean probabilities and mean boxes, `oracle` of each region answered by its owner; examples are images, and members
    own regions of each class.
    """

    problem: ClassVar[str] = "detection"

    on_proposals: Number  # of mean probabilities, with the boxes as proposed
    single_on_proposals: Number  # the mean of that over the members
    further: Annotated[dict[str, Any], _each(Measures)]
    classes: Annotated[dict[str, Any], _each(OfClasses)]
    oracle_chance: Number | None = None  # the Oracle of members whose answers are dealt to the regions at random
    images: str = ""  # a digest of sizes and objects, by which others tell whether they were measured on the same

    def headline(self) -> dict[str, str]:
        chance = "" if self.oracle_chance is None else f" (by chance {self.oracle_chance:.2f})"
        shown = super().headline()
        return {**shown, "Oracle": shown["Oracle"] + chance}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DetectionResult:
        result = super().from_dict({"on_proposals": 0.0, "single_on_proposals": 0.0} | values)
        each = result.further["proposals"]["11-point"]  # of which an older file has no copy
        copies = {"on_proposals": each["ensemble_mean"], "single_on_proposals": each["single"]}
        return replace(result, **{name: value for name, value in copies.items() if name not in values})

    def check_sizes(self, members: int, groups: int) -> None:
        super().check_sizes(members, groups)
        for which, measure in product(BOXES, MEASURES):
            each = self.classes[which][measure]
            for row in (*each["members"], each["ensemble_mean"], each["oracle"]):
                if len(row) != groups - 1:
                    raise ValueError(f"classes.{which}.{measure} has {len(row)} classes, and the run {groups - 1}")

    @classmethod
    def unknown(cls, members: int, groups: int, **further: Any) -> DetectionResult:
        row, each = [math.nan] * (groups - 1), by_predictor([math.nan] * (members + 2))
        of_classes = {"members": [row] * members, "ensemble_mean": row, "oracle": row}
        parts = {"further": each, "classes": of_classes}
        further |= {key: {which: dict.fromkeys(MEASURES, part) for which in BOXES} for key, part in parts.items()}
        further |= dict.fromkeys(("on_proposals", "single_on_proposals", "oracle_chance"), math.nan)
        return super().unknown(members, groups, **further)


@dataclass(frozen=True)
class Detection(Problem):
    """Targets are, for each region, the class (0: background), what turns it into the object's box, the region itself
    in pixels of the image, and the number of the image. Outputs are scores [M, B, 1 + C] and, normalised by the `means`
    and `deviations` [1 + C, 4] of the training set, what turns a region into a box of each class, [M, B, 4 (1 + C)].
    """

    classes: tuple[str, ...]
    means: tuple[tuple[float, ...], ...]
    deviations: tuple[tuple[float, ...], ...]
    truths: Sequence[Truth] = field(default=(), compare=False, repr=False)  # of the images that are evaluated on
    name: ClassVar[str] = "detection"
    unit: ClassVar[str] = "%"
    answer_kind: ClassVar[str] = "boxes"
    measure: ClassVar[str] = "mean average precision, VOC 2007's 11 points, %"
    oracle_picks: ClassVar[str] = (
        "the member with the lowest loss is picked for each region; since precision is over all images together, "
        "this need not be above the others"
    )
    result_type: ClassVar[Any] = DetectionResult
    base_losses: ClassVar[tuple[str, ...]] = ("fast_rcnn",)
    finds_objects: ClassVar[bool] = True
    output_form: ClassVar[str] = "logits [B, C]"
    answer_dims: ClassVar[int] = 2
    other_losses: ClassVar[tuple[str, ...]] = ("prob_averaged", "confident", "scored")  # that know classes, not boxes
    evaluation_rows: ClassVar[int] = 1  # images differ in size

    @property
    def groups(self) -> tuple[str, ...]:
        return (BACKGROUND, *self.classes)

    def group(self, targets: Value) -> Tensor:
        return nested_values.leaves(targets)[0]

    def answer(self, outputs: Value) -> Tensor:
        """Scores and box deltas, side by side."""
        return torch.cat(nested_values.leaves(outputs)[:2], -1)

    def mean(self, answers: Tensor, weights: Tensor | None = None) -> Tensor:
        raise UserError(
            "this run detects objects: their boxes are averaged by mheads detect eval and mheads detect show"
        )

    def losses(self, outputs: Value, targets: Value) -> Tensor:
        return region_losses(outputs, targets)

    def check_output(self, output: Value, network: str, data: str) -> None:
        shapes = [tuple(t.shape[1:]) for t in nested_values.leaves(output)]
        count = len(self.groups)
        if shapes[2:] == [()]:
            raise UserError("loss.name = scored is not for detection: a region has scores of its own; use mcl, say")
        if shapes != [(count,), (4 * count,)]:
            raise UserError(
                f"{network} gives outputs of shape {' and '.join(map(str, shapes))} for a region, but {data} has "
                f"{count - 1} classes: a detector gives {count} scores and {4 * count} numbers for boxes "
                f"(model_args.classes={count - 1}, or what the factory calls their number)"
            )

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        pass  # the reader of annotations did

    def metrics(self, members: int, scored: bool = False) -> DetectionMetrics:
        if scored:
            raise UserError("loss scored is not for detection: regions have scores of their own")
        return DetectionMetrics(self, members)

    @staticmethod
    def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
        rows = percent_rows(summary, "members, mAP of VOC 2007")
        if summary.get("oracle_chance") is not None and len(summary["members"]) > 1:
            chance = format_number(summary["oracle_chance"])
            rows.append(("Oracle by chance", f"{chance} %, of answers dealt at random"))
        further = summary["further"]
        for which, measure, name in (
            ("regressed", "all-point", "the same, all points"),
            ("proposals", "11-point", "boxes as proposed"),
            ("proposals", "all-point", "the same, all points"),
        ):
            mean, single = (format_number(further[which][measure][key]) for key in ("ensemble_mean", "single"))
            rows.append((name, f"Ensemble-Mean {mean}, mean member {single} %"))
        return rows

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Detection:
        if {len(facts["means"]), len(facts["deviations"])} != {1 + len(facts["classes"])}:
            raise ValueError("problem.means and problem.deviations should have a row for each class and the background")
        return super().from_dict(facts)

    def read(self, answers: Tensor, regions: np.ndarray, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities [M, R, 1 + C] and boxes [M, R, 1 + C, 4] that answers mean for regions [R, 4] of an image."""
        count = len(self.groups)
        scores, deltas = answers.double().split([count, 4 * count], -1)
        probabilities = scores.softmax(-1).numpy()
        deltas = deltas.unflatten(-1, (count, 4)).numpy() * np.array(self.deviations) + np.array(self.means)
        return probabilities, box.clip(box.decode(regions[:, None].astype(float), deltas), width, height)


@dataclass(frozen=True, eq=False)
class Detections:
    """What is left of one image after suppression: the best regions of each class, best first.

    boxes [A, C, n, 4], scores [A, C, n] and which of them `stay` [A, C, n], for A predictors and the C classes.
    """

    boxes: np.ndarray
    scores: np.ndarray
    stay: np.ndarray

    @staticmethod
    def of(probabilities: np.ndarray, boxes: np.ndarray, floor: float = FLOOR) -> Detections:
        """From probabilities [A, R, 1 + C] and boxes [A, R, 1 + C, 4]."""
        scores, boxes = probabilities[:, :, 1:].swapaxes(1, 2), boxes[:, :, 1:].swapaxes(1, 2)
        best = np.argsort(-scores, axis=2, kind="stable")[:, :, :MOST]
        scores = np.take_along_axis(scores, best, 2)
        boxes = np.take_along_axis(boxes, best[..., None], 2)
        return Detections(boxes, scores, box.suppress(boxes, scores >= floor, SUPPRESS))


class DetectionMetrics:
    """Takes detections in, image by image, and keeps what each found; only objects of these images count."""

    def __init__(self, problem: Detection, members: int) -> None:
        self.problem, self.members = problem, members
        self.first = np.cumsum([0, *(len(truth.boxes) for truth in problem.truths)])  # the number of the first object
        self.kept: dict[tuple[str, int, int], list[np.ndarray]] = defaultdict(list)  # of (boxes, predictor, class)
        self.ownership = torch.zeros(members, len(problem.groups), dtype=torch.int64)
        self.images: dict[int, Truth] = {}

    def update(self, answers: Tensor, targets: Value, weights: Tensor | None = None) -> None:
        answers, targets = answers.cpu(), nested_values.map_leaves(Tensor.cpu, targets)
        for image in dict.fromkeys(targets[3].tolist()):
            rows = targets[3] == image
            self._add(answers[:, rows], [t[rows] for t in targets], image)

    def _add(self, answers: Tensor, targets: list[Tensor], image: int) -> None:
        self.images[image] = truth = self.problem.truths[image]
        regions = targets[2].double().numpy()
        owner, owned = owner_of(region_losses(self._split(answers), targets))
        self.ownership.index_put_((owner[owned], targets[0][owned]), torch.ones((), dtype=torch.int64), accumulate=True)
        by_member = self.problem.read(answers, regions, truth.width, truth.height)
        dealt = self.problem.read(self._deal_answers(answers, targets, image)[None], regions, truth.width, truth.height)
        probabilities, boxes = (
            np.concatenate([_with_mean_and_oracle(of, owner.numpy()), by_chance])
            for of, by_chance in zip(by_member, dealt, strict=True)
        )
        proposed = np.broadcast_to(regions[:, None], boxes.shape)
        for which, given in zip(BOXES, (boxes, proposed), strict=True):
            left = Detections.of(probabilities, given)
            for a, c in np.argwhere(left.stay.any(2)):
                stay = left.stay[a, c]
                hits = matches(left.boxes[a, c, stay], c + 1, truth)
                hits = np.where(hits >= 0, hits + self.first[image], hits)
                self.kept[which, a, c].append(np.stack([left.scores[a, c, stay], hits]))

    def _deal_answers(self, answers: Tensor, targets: list[Tensor], image: int) -> Tensor:
        """The Oracle's answers [R, ...] where members know nothing: what each says, of any region of the image.

        The Oracle looks at the truth, so that it finds objects among answers that have nothing to do with them.
        """
        generator = seeds.generator("chance", image)
        orders = [torch.randperm(answers.shape[1], generator=generator) for _ in range(self.members)]
        dealt = torch.stack([of[order] for of, order in zip(answers, orders, strict=True)])
        owner, _ = owner_of(region_losses(self._split(dealt), targets))
        return dealt[owner, torch.arange(dealt.shape[1])]

    def _split(self, answers: Tensor) -> tuple[Tensor, ...]:
        """Scores and box deltas."""
        return tuple(answers.double().split([len(self.problem.groups), 4 * len(self.problem.groups)], -1))

    def result(self) -> DetectionResult:
        if not self.images:
            raise ValueError("no images to measure")
        predictors, numbers = range(self.members + 2), range(len(self.problem.classes))
        classes: dict[str, Any] = {}
        for which in BOXES:
            each = [[self._of_class(which, a, c) for c in numbers] for a in predictors]
            classes[which] = {name: _by_predictor([[of[name] for of in one] for one in each]) for name in MEASURES}
        further = {which: {name: by_predictor(_means(classes[which][name])) for name in MEASURES} for which in BOXES}
        chance = np.array([self._of_class(BOXES[0], self.members + 2, c)["11-point"] for c in numbers])
        return DetectionResult(
            **further["regressed"]["11-point"],
            on_proposals=further["proposals"]["11-point"]["ensemble_mean"],
            single_on_proposals=further["proposals"]["11-point"]["single"],
            further=further,
            classes=classes,
            ownership=self.ownership.tolist(),
            examples=len(self.images),
            oracle_chance=float(np.nanmean(chance)) if not np.isnan(chance).all() else math.nan,
            images=digest(self.images.values()),
        )

    def _of_class(self, which: str, predictor: int, c: int) -> dict[str, float]:
        parts = self.kept.get((which, predictor, c))
        scores, hits = np.concatenate(parts, 1) if parts else np.empty((2, 0))
        counts = (((truth.classes == c + 1) & ~truth.difficult).sum() for truth in self.images.values())
        return average_precisions(scores, hits.astype(np.int64), int(sum(counts)))


def digest(truths: Iterable[Truth]) -> str:
    """Of what is to be found in images, in whatever order they come."""
    parts = ((t.boxes, t.classes, t.difficult, [t.width, t.height]) for t in truths)
    each = [b"".join(np.ascontiguousarray(part).tobytes() for part in of_image) for of_image in parts]
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in sorted(each))).hexdigest()[:16]


def _with_mean_and_oracle(answers: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """What members [M, R, ...] say, then what their mean does, and the owner of each region."""
    return np.concatenate([answers, answers.mean(0, keepdims=True), answers[owner, np.arange(answers.shape[1])][None]])


def _by_predictor(each: list[list[float]]) -> dict[str, Any]:
    """Of every class, [members + 2][C]."""
    return {"members": each[:-2], "ensemble_mean": each[-2], "oracle": each[-1]}


def _means(each: dict[str, Any]) -> list[float]:
    """Over the classes that have any."""
    precisions = np.array([*each["members"], each["ensemble_mean"], each["oracle"]])
    known = ~np.isnan(precisions).all(0)
    return precisions[:, known].mean(1).tolist() if known.any() else [math.nan] * len(precisions)
