"""Weights that training starts from: a run, or a file of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mheads.caffe import weights as blobs
from mheads.common import atomic_files, fingerprint
from mheads.common.errors import UserError
from mheads.config.schema import Config
from mheads.data import Data
from mheads.problems import finds_objects, is_single_label
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.training import weight_files
from mheads.trees.tree_spec import parse, whole_spec
from mheads.trees.treenet import TreeNet


def start_from(
    net: TreeNet,
    init: str,
    renamed: Mapping[str, str | None] | None = None,
    members: Sequence[int | None] | None = None,
) -> str:
    """Gives a net the weights in a file, or those of a run; returns what there is to say of it.

    `renamed` is about the names in a file, see `weight_files.py`; `members` are those of the run that members start
    from, None for one that is drawn.
    """
    if Path(init).suffix in weight_files.SUFFIXES:
        if members is not None:
            raise UserError(f"init_members names members of a run, and init = {init!r} is a file of weights")
        path = Path(init)
        # Caffe fine-tunes so: what is not in the file, such as a last layer under another name, begins by its fillers.
        partly = path.suffix in blobs.SUFFIXES
        return str(weight_files.load_into(net, weight_files.read_for(net, path), init, renamed, partly))
    donor = RunFolder(Path(init))
    if not donor.exists():
        raise UserError(
            f"init = {init!r}: give random, same, the folder of a finished run, or a file of weights "
            f"({', '.join(weight_files.SUFFIXES)})"
        )
    if renamed:
        raise UserError(f"init_map renames what is in a file of weights, and init = {init!r} is a run")
    there = donor.read_config()
    if members is None and there.members not in (1, net.num_members):
        raise UserError(
            f"init = {init!r} has {there.members} members, this run {net.num_members}: "
            "start from as many members, from one to be copied to all, or say with init_members which"
        )
    if members is not None and (bad := [m for m in members if m is not None and m >= there.members]):
        raise UserError(
            f"init_members names member {bad[0]}, but init = {init!r} has {there.members}, counted from 0 to "
            f"{there.members - 1}"
        )
    try:
        # The donor's tree over the layers of this network: nothing that the donor names is built.
        tree = parse(whole_spec(there.members, there.split), net.layers, there.members, net.network_name)
        net.take_weights(tree, donor.final_weights().tensors, members)
    except UserError as error:
        raise UserError(f"init = {init!r}: {error}") from error
    if there.members == 1 if members is None else len(set(members)) == 1:
        net.init = "same"
    return ""


def donor_digest(init: str) -> str | None:
    """A digest of the weights that `init` names: another run or file under the same name is another start."""
    if init in ("random", "same"):
        return None
    path = Path(init)
    return atomic_files.digest(path if path.suffix in weight_files.SUFFIXES else RunFolder(path).model)


def donor_differences(config: Config, data: Data) -> list[str]:
    """How the inputs and classes of the run that `init` names differ from those here."""
    if not RunFolder(Path(config.init)).exists():  # random, same, or weights without a run
        return []
    there, here = RunFolder(Path(config.init)).read_data(), DataFacts.of(data)
    what = "classes" if is_single_label(here.problem) else "groups"
    alike = {
        "the shape of an example": (there.shape, here.shape),
        "the problem": (there.problem.name, here.problem.name),
        f"the number of {what}": (len(there.problem.groups), len(here.problem.groups)),
        **{f"class {c}": names for c, names in enumerate(zip(there.problem.groups, here.problem.groups, strict=False))},
    }
    detects = finds_objects(here.problem) and not finds_objects(there.problem)  # which is no surprise
    pairs = {
        **({} if detects else alike),
        "data.scale": (there.preprocess.scale, here.preprocess.scale),
        "the order of channels": tuple("BGR" if p.bgr else "RGB" for p in (there.preprocess, here.preprocess)),
        "the mean that is subtracted": (_said(there.preprocess.mean), _said(here.preprocess.mean)),
        "the deviation that is divided by": (_said(there.preprocess.std), _said(here.preprocess.std)),
    }
    lines = [f"{what}: {old} there, {new} here" for what, (old, new) in pairs.items() if old != new]
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"]


def _said(tensor: torch.Tensor | None) -> str:
    return (
        "none" if tensor is None else f"{tensor.double().mean():.4g} on average ({fingerprint.weights({'': tensor})})"
    )
