"""What each member of a detector, and their mean, find in an image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import ExifTags

from mheads.common.errors import UserError
from mheads.common.progress import Watcher
from mheads.data.batches import Reader
from mheads.data.detection.proposals import propose_regions
from mheads.data.detection.regions import RegionSplit, decode_image
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
    scene = read_scene(image, watch)
    sampling = config.data.regions
    if proposals:
        sampling = sampling.model_copy(update={"proposals": proposals})
    (regions,) = propose_regions(sampling.proposals, [scene], "test", sampling.most, watch.warn)
    if not len(regions):
        raise UserError(f"no region is proposed in {image} by {sampling.proposals}: give others with --proposals")
    sizes = np.array(problem.means), np.array(problem.deviations)
    split = RegionSplit([scene], [regions], np.zeros(1, np.int64), sampling, *sizes, training=False)
    with closing(make_engine(config, net)) as engine:
        ((outputs, _),) = engine.outputs([Reader(split, facts.inputs, np.arange(1))])
    proposed = regions.astype(float)
    width, height = scene.truth.width, scene.truth.height
    probabilities, regressed = problem.read(problem.answer(outputs), proposed, width, height)
    if boxes == "proposals":
        regressed = np.broadcast_to(proposed[:, None], regressed.shape)
    answers = {f"member {m}": (probabilities[m], regressed[m]) for m in range(len(probabilities))}
    if len(probabilities) > 1:
        answers = {MEAN: (probabilities.mean(0), regressed.mean(0)), **answers}
    return decode_image(image), {who: list_objects(problem.classes, *answer, least) for who, answer in answers.items()}


def read_scene(path: Path, watch: Watcher) -> Scene:
    with open_image(path) as image:
        width, height = image.size
        turned = image.getexif().get(ORIENTATION, 1) != 1
    if turned:
        watch.warn(f"{path} is to be turned, its camera says: objects are looked for as it is stored; save it upright")
    nothing = Truth(np.empty((0, 4)), np.empty(0, np.int64), np.empty(0, bool), width, height)
    return Scene(path.stem, path, nothing)


def list_objects(
    classes: Sequence[str], probabilities: np.ndarray, boxes: np.ndarray, least: float
) -> list[tuple[str, float, np.ndarray]]:
    """Class, score and box of each object with a score of at least `least`, the best first."""
    left = Detections.of(probabilities[None], boxes[None], floor=least)
    objects = [(classes[c], float(left.scores[0, c, i]), left.boxes[0, c, i]) for c, i in np.argwhere(left.stay[0])]
    return sorted(objects, key=lambda entry: -entry[1])
