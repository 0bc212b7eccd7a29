"""Weights that training starts from: those of a run, of a file, or of a state dict."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mheads.caffe import weights as blobs
from mheads.common import atomic_files, fingerprint, packed_arrays
from mheads.common.errors import UserError
from mheads.common.safe_yaml import short
from mheads.config.schema import Config
from mheads.data import Data
from mheads.problems import Problem, finds_objects, is_single_label
from mheads.runs.data_facts import DataFacts
from mheads.runs.folder import RunFolder
from mheads.trees.copy_weights import take_weights
from mheads.trees.tree_spec import parse, whole_spec
from mheads.trees.treenet import TreeNet

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", *blobs.SUFFIXES)


def load_init(
    net: TreeNet,
    init: str,
    renamed: Mapping[str, str | None] | None = None,
    members: Sequence[int | None] | None = None,
) -> str:
    """Gives a net the weights of a file or of a source run; returns a report on the names, if it was a file.

    `renamed` is `init_map`, see `load_into`; `members` are those of the source run that members start from, None for
    one that is drawn.
    """
    path = Path(init)
    if path.suffix in SUFFIXES:
        if members is not None:
            raise UserError(f"init_members names members of a run, and init = {init!r} is a file of weights")
        # Caffe fine-tunes so: what is not in the file, such as a last layer under another name, begins by its fillers.
        partly = path.suffix in blobs.SUFFIXES
        return str(load_into(net, _read_for(net, path), init, renamed, partly))
    source = RunFolder(path)
    _check_source(source, init, net, renamed, members)
    config = source.read_config()
    try:
        # The tree of the source run over the layers of this network: nothing that the source run names is built.
        tree = parse(whole_spec(config.members, config.split), net.layers, config.members, net.network_name)
        take_weights(net, tree, source.final_weights().tensors, members)
    except UserError as error:
        raise UserError(f"init = {init!r}: {error}") from error
    if config.members == 1 if members is None else len(set(members)) == 1:
        net.init = "same"
    return ""


def _check_source(
    source: RunFolder,
    init: str,
    net: TreeNet,
    renamed: Mapping[str, str | None] | None,
    members: Sequence[int | None] | None,
) -> None:
    if not source.exists():
        raise UserError(
            f"init = {init!r}: give random, same, the folder of a finished run, or a file of weights "
            f"({', '.join(SUFFIXES)})"
        )
    if renamed:
        raise UserError(f"init_map renames what is in a file of weights, and init = {init!r} is a run")
    count = source.read_config().members
    if members is None and count not in (1, net.num_members):
        raise UserError(
            f"init = {init!r} has {count} members, this run {net.num_members}: "
            "start from as many members, from one to be copied to all, or say with init_members which"
        )
    if members is not None and (bad := [m for m in members if m is not None and m >= count]):
        raise UserError(
            f"init_members names member {bad[0]}, but init = {init!r} has {count}, counted from 0 to {count - 1}"
        )


def digest_init(init: str) -> str | None:
    """A digest of the weights that `init` names: another run or file under the same name is another start."""
    if init in ("random", "same"):
        return None
    path = Path(init)
    return atomic_files.digest(path if path.suffix in SUFFIXES else RunFolder(path).model)


def compare_with_source(config: Config, net: TreeNet, data: Data) -> list[str]:
    """How the data of the run that the weights come from, that of `init` or an earlier `fit`, differ from these."""
    source_run, facts = RunFolder(Path(config.init)), DataFacts.of(data)
    source: DataFacts | None = source_run.read_data() if source_run.exists() else net.history.data
    if source is None:
        return []
    old, new = source.problem, facts.problem
    before, after = source.preprocess, facts.preprocess
    pairs: dict[str, tuple[Any, Any]] = {}
    if finds_objects(old) or not finds_objects(new):  # a detector that starts from a classifier is no surprise
        pairs = {
            "the shape of an example": (source.shape, facts.shape),
            "the problem": (old.name, new.name),
            f"the number of {'classes' if is_single_label(new) else 'groups'}": (len(old.groups), len(new.groups)),
            **{f"class {c}": names for c, names in enumerate(zip(old.groups, new.groups, strict=False))},
        }
    pairs |= {
        "data.scale": (before.scale, after.scale),
        "the order of channels": ("BGR" if before.bgr else "RGB", "BGR" if after.bgr else "RGB"),
        "the mean that is subtracted": (_describe(before.mean), _describe(after.mean)),
        "the standard deviation that is divided by": (_describe(before.std), _describe(after.std)),
        "data.normalize_targets": (_describe_target_scale(old), _describe_target_scale(new)),
    }
    lines = [f"{what}: {there} there, {here} here" for what, (there, here) in pairs.items() if there != here]
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"]


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.double().mean():.4g} on average ({fingerprint.weights({'': tensor})})"


def _describe_target_scale(problem: Problem) -> str:
    mean, std = (getattr(problem, name, ()) for name in ("mean_of_targets", "std_of_targets"))
    texts = [short([float(f"{value:.4g}") for value in values]) for values in (mean, std)]
    return f"true (mean {texts[0]}, standard deviation {texts[1]})" if std else "false"


# Weights by name.


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file, or in one that torch.save wrote; nothing in it is run."""
    try:
        packed_arrays.refuse_zip_bomb(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} with weights") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        cause = str(error).split("\n")[0].split("\x1b")[0].strip() or type(error).__name__
        raise UserError(
            f"{path} cannot be read as weights ({cause}); save them with safetensors.torch.save_file, "
            "or with torch.save(model.state_dict(), path)"
        ) from error
    for key in ("state_dict", "model"):  # what training scripts wrap it in
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return check_state_dict(content, str(path))


def _read_for(net: TreeNet, path: Path) -> dict[str, Tensor]:
    """The tensors in a file, under the names that they have in the network; Caffe's are matched by layer."""
    if path.suffix not in blobs.SUFFIXES:
        return read_weights(path)
    shapes = {_name_in_network(name): tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    names = [name for stage in net.tree.nodes for name in net.names_in(stage)]
    return blobs.by_name(blobs.read(path), {name: shapes.get(name) for name in names})


def check_state_dict(weights: Any, where: str) -> dict[str, Tensor]:
    """A state dict, without the `module.` that DataParallel puts before every name; raises if it is not one."""
    if not isinstance(weights, Mapping) or not weights:
        raise UserError(f"{where} holds a {type(weights).__name__}, not tensors by name like model.state_dict()")
    strange = next((name for name, tensor in weights.items() if not isinstance(tensor, Tensor)), None)
    if strange is not None:
        raise UserError(f"{where}: {strange!r} is a {type(weights[strange]).__name__}, not a tensor")
    prefix = "module." if all(str(name).startswith("module.") for name in weights) else ""
    return {str(name).removeprefix(prefix): tensor for name, tensor in weights.items()}


@dataclass(frozen=True)
class LoadReport:
    """The names of weights that were found, that were missing, and that were left over."""

    where: str
    found: list[str]
    missing: list[str]
    left: list[str]

    def __str__(self) -> str:
        rows = [("found", self.found), ("missing, drawn", self.missing), ("left over", self.left)]
        lines = [f"  {what:14} {len(names):5,}  {_shorten(names)}".rstrip() for what, names in rows]
        return "\n".join([f"weights of {self.where}:", *lines])


@torch.no_grad()
def load_into(
    net: TreeNet,
    weights: Mapping[str, Tensor],
    where: str = "the weights",
    renamed: Mapping[str, str | None] | None = None,
    partly: bool = False,
) -> LoadReport:
    """Copies weights into a tree.

    They are the tree's own (`stages.trunk.conv1.weight`), or those of one network (`conv1.weight`), for every member.
    `renamed` maps prefixes of their names to prefixes in this network; None skips them. With it, what is missing stays
    as it was drawn; without it, that is an error, unless whole layers may be missing (`partly`).
    """
    sources = _rename(weights, renamed, where) if renamed else {name: name for name in weights}
    whole = any(name in sources for name in net.state_dict())
    # Of all stages, also of those in other processes: what is missing or left over is so for all.
    wanted = {
        f"stages.{node.name}.{key}": f"stages.{node.name}.{key}" if whole else key
        for node in net.tree.nodes.values()
        for key in net.names_in(node.name)
    }
    names = list(dict.fromkeys(wanted.values()))
    taken, missing = [name for name in names if name in sources], sorted(name for name in names if name not in sources)
    needed = {name for full, name in wanted.items() if _name_in_network(full) not in net.facts.fresh} & set(missing)
    if partly:
        _check_whole_layers(taken, sorted(needed), where)
    if needed and not ((renamed or partly) and taken):
        raise UserError(
            f"{where} does not fit {net.network_name}: {len(missing)} of {len(names)} tensors are missing "
            f"({_shorten(missing)}); there are {_shorten(list(sources))}. init_map renames what begins otherwise "
            "there, such as {backbone: features}, and then what is missing stays as it is drawn"
        )
    state = net.state_dict()
    copies = [(sources[wanted[name]], tensor) for name, tensor in state.items() if wanted[name] in sources]
    for name, tensor in copies:
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"{where} does not fit: {name} is {tuple(weights[name].shape)} there, {tuple(tensor.shape)} here; "
                f"init_map={{{name.rpartition('.')[0]}: null}} leaves it out"
            )
    for name, tensor in copies:
        tensor.copy_(weights[name])
    used = {sources[name] for name in taken}
    return LoadReport(where, taken, missing, sorted(name for name in weights if name not in used))


def _check_whole_layers(found: Sequence[str], missing: Sequence[str], where: str) -> None:
    """Raises if a file has some weights of a layer and lacks others of it."""
    layers = {name.rpartition(".")[0] for name in found}
    if half := [name for name in missing if name.rpartition(".")[0] in layers]:
        raise UserError(
            f"{where} does not fit: it has no {half[0]}, but other weights of that layer: rename it here, or "
            f"init_map={{{half[0].rpartition('.')[0]}: null}} leaves it out"
        )


def _name_in_network(name: str) -> str:
    """stages.trunk.conv1.weight -> conv1.weight; names of stages hold no dots."""
    return name.split(".", 2)[2]


def _rename(weights: Mapping[str, Tensor], renamed: Mapping[str, str | None], where: str) -> dict[str, str]:
    """The names that weights have in this network, each with that in the file; the longest prefix counts."""
    sources: dict[str, str] = {}
    unused = set(renamed)
    for name in weights:
        prefixes = [old for old in renamed if old == "" or name == old or name.startswith(f"{old}.")]
        unused -= set(prefixes)
        new: str | None = name
        if prefixes:
            longest = max(prefixes, key=len)
            prefix, rest = renamed[longest], name.removeprefix(longest).removeprefix(".")
            new = None if prefix is None else ".".join(part for part in (prefix, rest) if part)
        if new is None:
            continue
        if new in sources:
            raise UserError(f"init_map gives {sources[new]} and {name} of {where} the same name, {new}")
        sources[new] = name
    if unused:
        raise UserError(
            f"init_map: nothing in {where} begins with {', '.join(map(repr, sorted(unused)))}; there are "
            f"{_shorten(list(weights))}"
        )
    return sources


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
