"""The config of a detector that starts from a trained ensemble."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from mheads.common.errors import UserError
from mheads.problems import finds_objects
from mheads.runs.folder import RunFolder


def overrides_from(run: Path | None, voc: Path | None, proposals: str | None, given: Sequence[str]) -> list[str]:
    """The keys that make a recipe of detection start from a run and look at these images; `given` ones come after.

    The detector has the network, the members and the tree of the run, its weights, and its pixels' means.
    """
    found: list[str] = []
    if run is not None:
        folder = RunFolder(run)
        folder.require()
        there = folder.read_config()
        if finds_objects(folder.read_data().problem):
            raise UserError(f"{run} detects objects already: go on from it with init={run}")
        if (channels := folder.read_data().shape[0]) != 3:
            raise UserError(
                f"{run} was trained on examples of {channels} channel{'' if channels == 1 else 's'}, and a detector "
                "reads colour: start from a run on images of 3 channels"
            )
        base = yaml.safe_dump({"base": there.model, "base_args": there.model_args}, default_flow_style=True).strip()
        split = yaml.safe_dump(there.split, default_flow_style=True).removesuffix("...\n").strip()
        scale = folder.read_data().preprocess.scale
        found += [f"init={json.dumps(str(run))}", f"model_args={base}", f"members={there.members}", f"split={split}"]
        found += ["data.normalize=init", f"data.scale={scale!r}"]
        if there.model != "caffenet":
            found.append("freeze=[]")  # the recipe freezes CaffeNet's first layer
    if voc is not None:
        found.append(f"data.path={json.dumps(str(voc))}")
    if proposals is not None:
        found.append(f"data.regions.proposals={json.dumps(proposals)}")
    return [*found, *given]
