"""Weights from elsewhere, by name: of one network for all members, or of a whole tree."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mheads.caffe import weights as blobs
from mheads.common import packed_arrays
from mheads.common.errors import UserError
from mheads.trees.treenet import TreeNet

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", *blobs.SUFFIXES)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file, or in one that torch.save wrote; nothing in it is run."""
    try:
        packed_arrays.refuse_zip_bomb(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} with weights") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        cause = str(error).split("\n")[0].split("\x1b")[0].strip() or type(error).__name__
        raise UserError(
            f"{path} cannot be read as weights ({cause}); save them with safetensors.torch.save_file, "
            "or with torch.save(model.state_dict(), path)"
        ) from error
    for key in ("state_dict", "model"):  # what training scripts wrap it in
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    return by_name(found, str(path))


def read_for(net: TreeNet, path: Path) -> dict[str, Tensor]:
    """The tensors in a file, under the names that they have in the network; those of Caffe find theirs by layer."""
    if path.suffix not in blobs.SUFFIXES:
        return read(path)
    here = {_in_network(name): tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    names = [name for stage in net.tree.nodes for name in net.names_in(stage)]
    return blobs.by_name(blobs.read(path), {name: here.get(name) for name in names})


def by_name(found: Any, where: str) -> dict[str, Tensor]:
    """A state dict, checked; without the `module.` that DataParallel puts before every name."""
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{where} holds a {type(found).__name__}, not tensors by name like model.state_dict()")
    strange = next((name for name, tensor in found.items() if not isinstance(tensor, Tensor)), None)
    if strange is not None:
        raise UserError(f"{where}: {strange!r} is a {type(found[strange]).__name__}, not a tensor")
    prefix = "module." if all(str(name).startswith("module.") for name in found) else ""
    return {str(name).removeprefix(prefix): tensor for name, tensor in found.items()}


@dataclass(frozen=True)
class Taken:
    """What became of weights by name: taken, missing there, and left over there."""

    where: str
    found: list[str]
    missing: list[str]
    left: list[str]

    def __str__(self) -> str:
        rows = [("found", self.found), ("missing, drawn", self.missing), ("left over", self.left)]
        lines = [f"  {what:14} {len(names):5,}  {_some(names)}".rstrip() for what, names in rows]
        return "\n".join([f"weights of {self.where}:", *lines])


@torch.no_grad()
def load_into(
    net: TreeNet,
    weights: Mapping[str, Tensor],
    where: str = "the weights",
    renamed: Mapping[str, str | None] | None = None,
    partly: bool = False,
) -> Taken:
    """Copies weights into a tree.

    They are the tree's own (`stages.trunk.conv1.weight`), or those of one network (`conv1.weight`), for every member.
    `renamed` says which beginnings of their names are others here, None for what is to be left out. With it, what is
    missing stays as it was drawn; without it, that is refused, unless they may be there `partly`: whole layers.
    """
    given = {name: name for name in weights} if not renamed else _renamed(weights, renamed, where)
    whole = any(name in given for name in net.state_dict())
    # Of all stages, also of those in other processes: what is missing or left over is so for all.
    wanted = {
        f"stages.{node.name}.{key}": f"stages.{node.name}.{key}" if whole else key
        for node in net.tree.nodes.values()
        for key in net.names_in(node.name)
    }
    names = list(dict.fromkeys(wanted.values()))
    found, missing = [name for name in names if name in given], sorted(name for name in names if name not in given)
    needed = {name for full, name in wanted.items() if not net.is_fresh(_in_network(full))}
    if partly:
        begun = {name.rpartition(".")[0] for name in found}
        if half := [name for name in missing if name.rpartition(".")[0] in begun and name in needed]:
            layer = half[0].rpartition(".")[0]
            raise UserError(
                f"{where} does not fit: it has no {half[0]}, but other weights of that layer: rename it here, or "
                f"init_map={{{layer}: null}} leaves it out"
            )
    if needed & set(missing) and not ((renamed or partly) and found):
        raise UserError(
            f"{where} does not fit {net.network_name}: {len(missing)} of {len(names)} tensors are missing "
            f"({_some(missing)}); there are {_some(list(given))}. init_map renames what begins otherwise there, "
            "such as {backbone: features}, and then what is missing stays as it is drawn"
        )
    tensors = {name: tensor for name, tensor in net.state_dict().items() if wanted[name] in given}
    for name, tensor in tensors.items():
        there = given[wanted[name]]
        if weights[there].shape != tensor.shape:
            raise UserError(
                f"{where} does not fit: {there} is {tuple(weights[there].shape)} there, {tuple(tensor.shape)} here; "
                f"init_map={{{there.rpartition('.')[0]}: null}} leaves it out"
            )
    for name, tensor in tensors.items():
        tensor.copy_(weights[given[wanted[name]]])
    used = {given[name] for name in found}
    return Taken(where, found, missing, sorted(name for name in weights if name not in used))


def _in_network(name: str) -> str:
    """stages.trunk.conv1.weight -> conv1.weight; names of stages hold no dots."""
    return name.split(".", 2)[2]


def _renamed(weights: Mapping[str, Tensor], renamed: Mapping[str, str | None], where: str) -> dict[str, str]:
    """The names that weights have here, each with that in the file; the longest beginning counts."""
    given: dict[str, str] = {}
    unused = set(renamed)
    for name in weights:
        fits = [old for old in renamed if old == "" or name == old or name.startswith(f"{old}.")]
        unused -= set(fits)
        here: str | None = name
        if fits:
            old = max(fits, key=len)
            new = renamed[old]
            rest = name.removeprefix(old).removeprefix(".")
            here = None if new is None else ".".join(part for part in (new, rest) if part)
        if here is None:
            continue
        if here in given:
            raise UserError(f"init_map gives {given[here]} and {name} of {where} the same name, {here}")
        given[here] = name
    if unused:
        raise UserError(
            f"init_map: nothing in {where} begins with {', '.join(map(repr, sorted(unused)))}; there are "
            f"{_some(list(weights))}"
        )
    return given


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
