"""The keys of a config's `data` section, which are the keywords of `load` and `from_arrays` as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from mheads.common.errors import UserError
from mheads.common.options import Location, Section, absolute_path, option
from mheads.common.safe_yaml import as_plain, short
from mheads.data.augmentation import Mirror


def _absolute_proposals(proposals: str) -> str:
    return str(absolute_path(Path(proposals))) if proposals.endswith((".npz", ".mat")) else proposals


class RegionOptions(Section):
    """Of images with objects; the defaults are those of the Fast R-CNN release."""

    objects: Literal["voc"] | list[str] = option("voc", "the classes of objects; voc: the twenty of PASCAL VOC")
    proposals: Annotated[str, AfterValidator(_absolute_proposals)] = option(
        "selective_search",
        "where regions come from: selective_search, or an .npz or .mat file, {part} in its name",
    )
    with_objects: bool = option(False, "evaluation: the objects' own boxes are added to the proposals, as in training")
    most: int = option(2000, "regions proposed in an image", ge=1)
    per_image: int = option(64, "training: regions per image in a step", ge=1)
    foreground: float = option(0.25, "training: the largest share of these that are objects", gt=0, le=1)
    foreground_overlap: float = option(
        0.5, "training: the smallest overlap of a region that counts as an object", gt=0, le=1
    )
    background_overlap: tuple[float, float] = option(
        (0.1, 0.5), "training: the range of overlaps that count as background"
    )
    short_side: int = option(600, "length of the shorter side of an image", ge=16, le=10_000)
    long_side: int = option(1000, "length of the longer side, at most", ge=16, le=10_000)
    strict: bool = option(False, "stop at the first mistake in the annotations")

    def scale(self, width: int, height: int) -> float:
        """What an image is multiplied by: the shorter side becomes `short_side`, the longer at most `long_side`."""
        ratio = self.short_side / min(width, height)
        return self.long_side / max(width, height) if round(ratio * max(width, height)) > self.long_side else ratio


class DataOptions(Section):
    name: str = option("digits", "a dataset by name: `mheads data list` shows them")
    root: Location | None = option(
        None, "the folder of a fetched dataset, if not in the cache; list: the folder that names are relative to"
    )
    path: Location | None = option(None, "the folder or file of your own data: folder, voc, npz, csv, list, hdf5, lmdb")
    table: str | None = option(None, "uci: which table, the name of its folder in data.root")
    fold: int = option(0, "uci: which of the splits of the table", ge=0)
    test_path: Location | None = option(None, "csv, list, hdf5, lmdb: the test set")
    arrays: tuple[str, str] | None = option(
        None, "hdf5: the names of the arrays of examples and of targets; none: data and label, or x and y"
    )
    problem: Literal[
        "auto", "classification", "regression", "multilabel", "soft_labels", "segmentation", "examples"
    ] = option(
        "auto",
        "npz, csv, list, hdf5, lmdb: what is learned; auto: decided by the targets; examples, for any data: the "
        "network reproduces its input",
    )
    validation: int = option(0, "hold out the last n training examples and evaluate on them", ge=0)
    normalize: Literal["none", "mean_image", "mean_std", "init"] = option(
        "none", "how inputs are normalised; init: as in the source run"
    )
    normalize_targets: bool = option(
        False,
        "regression: targets are learned with mean 0 and standard deviation 1; answers and metrics are in the "
        "original units",
    )
    calibration: int = option(
        0,
        "regression: keep the last n training examples from learning, and choose the kernels of a density on them",
        ge=0,
    )
    scale: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = option(
        "auto", "raw values are multiplied by this; auto: uint8 to 0..1, floats as they are"
    )
    channels: Literal["rgb", "bgr"] = option("rgb", "images: the order of channels that the network sees")
    pad: int = option(0, "training: pad by n pixels and crop back at random", ge=0, le=1000)
    padding: Literal["zeros", "reflect"] = option(
        "zeros", "training, with data.pad: what surrounds a padded image: zeros, or its reflection"
    )
    mirror: Mirror = option(
        False,
        "training: mirror at random; alternating: each example in every other epoch, starting with the first or the "
        "second at random",
    )
    resize: int = option(256, "folder, list: length of the shorter side after resizing", ge=1, le=10_000)
    crop: int | None = option(None, "folder, list, lmdb: side of the crop that the network sees", ge=1, le=10_000)
    grey: bool = option(False, "folder, list: read images in one channel")
    limit: int | None = option(None, "use only the first n training and n test examples", ge=1)
    regions: RegionOptions = option(RegionOptions(), "voc: regions of images")


def as_default(*keys: str) -> str:
    """The keys with their defaults, which take back what a recipe gives: `data.pad=0 and data.mirror=false`."""
    defaults = {key: DataOptions.model_fields[key].default for key in keys}
    texts = [value if isinstance(value, str) else json.dumps(value) for value in defaults.values()]
    return " and ".join(f"data.{key}={text}" for key, text in zip(defaults, texts, strict=True))


def read_options(**keys: Any) -> DataOptions:
    """The section with these keys; a value that it does not take raises a UserError."""
    try:
        return DataOptions.model_validate(as_plain(keys))
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        key = str(mistakes[0]["loc"][0])
        if key not in DataOptions.model_fields:
            raise UserError(f"there is no data key {key!r}; there are {', '.join(DataOptions.model_fields)}") from None
        messages = [mistake["msg"].removeprefix("Value error, ") for mistake in mistakes if mistake["loc"][0] == key]
        text = ", or ".join(dict.fromkeys(message[0].lower() + message[1:] for message in messages))
        raise UserError(f"data.{key} is {short(keys.get(key))}: {text}", key=f"data.{key}") from None
