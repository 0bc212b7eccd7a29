"""What each member of a detector, and their mean, find in an image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.data.batches import Reader
from mheads.data.detection.proposals import propose_regions
from mheads.data.detection.regions import RegionSampling, RegionSplit, decode_image
from mheads.data.detection.voc import Scene
from mheads.data.readers.image_files import open_image
from mheads.problems import finds_objects
from mheads.problems.average_precision import Truth
from mheads.problems.detection import Detections
from mheads.runs.folder import RunFolder
from mheads.training.build_from_config import build_net_of_run, make_engine

MEAN = "Ensemble-Mean"
ORIENTATION = ExifTags.Base.Orientation


def find_objects(
    path: Path,
    image: Path,
    watch: Watcher,
    *,
    proposals: str | None = None,
    least: float = 0.5,
    boxes: str = "regressed",
    trust: bool = False,
) -> tuple[np.ndarray, dict[str, list[tuple[str, float, np.ndarray]]]]:
    """The pixels of an image and, for each member and for their mean, the objects with a score of at least `least`:
    class, score and box, the best first."""
    folder = RunFolder(path)
    folder.require()
    config, facts = folder.read_config(), folder.read_data()
    problem = facts.problem
    if not finds_objects(problem):
        raise UserError(f"{path} is a run that learned {problem.name}: mheads predict shows its answers")
    net = build_net_of_run(folder, config, watch.warn, trust=trust)
    folder.load_weights(net, watch.warn)
    scene = _scene(image, watch)
    options = config.data.regions.model_dump(exclude={"objects", "strict"})
    drawing = RegionSampling(**{**options, "proposals": proposals or options["proposals"]})
    (given,) = propose_regions(drawing.proposals, [scene], "test", drawing.most, watch.warn)
    if not len(given):
        raise UserError(f"no region is proposed in {image} by {drawing.proposals}: give others with --proposals")
    sizes = np.array(problem.means), np.array(problem.deviations)
    split = RegionSplit([scene], [given], np.zeros(1, np.int64), drawing, *sizes, training=False)
    with closing(make_engine(config, net)) as engine:
        ((outputs, _),) = engine.outputs([Reader(split, facts.inputs, np.arange(1))])
    probabilities, decoded_boxes = problem.read(
        problem.answer(outputs), given.astype(float), scene.truth.width, scene.truth.height
    )
    if boxes == "proposals":
        decoded_boxes = np.broadcast_to(given[:, None].astype(float), decoded_boxes.shape)
    members = [f"member {m}" for m in range(len(probabilities))]
    found = {who: (probabilities[m], decoded_boxes[m]) for m, who in enumerate(members)}
    if len(members) > 1:
        found = {MEAN: (probabilities.mean(0), decoded_boxes.mean(0)), **found}
    return decode_image(image), {who: _objects(problem.classes, *answers, least) for who, answers in found.items()}


def _scene(path: Path, watch: Watcher) -> Scene:
    with open_image(path) as image:
        width, height = image.size
        turned = image.getexif().get(ORIENTATION, 1) != 1
    if turned:
        watch.warn(f"{path} is to be turned, its camera says: objects are looked for as it is stored; save it upright")
    nothing = Truth(np.empty((0, 4)), np.empty(0, np.int64), np.empty(0, bool), width, height)
    return Scene(path.stem, path, nothing)


def _objects(
    classes: Sequence[str], probabilities: np.ndarray, boxes: np.ndarray, least: float
) -> list[tuple[str, float, np.ndarray]]:
    left = Detections.of(probabilities[None], boxes[None], floor=least)
    found: list[tuple[Any, ...]] = [
        (classes[c], float(left.scores[0, c, i]), left.boxes[0, c, i]) for c, i in np.argwhere(left.stay[0])
    ]
    return sorted(found, key=lambda one: -one[1])
