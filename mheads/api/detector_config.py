"""The config of a detector that starts from a trained ensemble."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from mheads.common.errors import UserError
from mheads.problems import finds_objects
from mheads.runs.folder import RunFolder


def make_detector_overrides(
    run: Path | None, voc: Path | None, proposals: str | None, more: Sequence[str]
) -> list[str]:
    """The keys that make a recipe of detection start from a run and look at these images; `more` keys come after.

    The detector has the network, the members and the tree of the run, its weights, and its pixels' means.
    """
    overrides: list[str] = []
    if run is not None:
        folder = RunFolder(run)
        folder.require()
        config = folder.read_config()
        if finds_objects(folder.read_data().problem):
            raise UserError(f"{run} detects objects already: continue from it with init={run}")
        if (channels := folder.read_data().shape[0]) != 3:
            raise UserError(
                f"{run} was trained on examples of {channels} channel{'' if channels == 1 else 's'}, and a detector "
                "reads colour: start from a run on images of 3 channels"
            )
        base = yaml.safe_dump({"base": config.model, "base_args": config.model_args}, default_flow_style=True).strip()
        split = yaml.safe_dump(config.split, default_flow_style=True).removesuffix("...\n").strip()
        scale = folder.read_data().preprocess.scale
        overrides += [
            f"init={json.dumps(str(run))}",
            f"model_args={base}",
            f"members={config.members}",
            f"split={split}",
        ]
        overrides += ["data.normalize=init", f"data.scale={scale!r}"]
        if config.model != "caffenet":
            overrides.append("freeze=[]")  # the recipe freezes CaffeNet's first layer
    if voc is not None:
        overrides.append(f"data.path={json.dumps(str(voc))}")
    if proposals is not None:
        overrides.append(f"data.regions.proposals={json.dumps(proposals)}")
    return [*overrides, *more]
