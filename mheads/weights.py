"""Weights from elsewhere, by name: of one network for all members, or of a whole tree."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mheads.errors import UserError
from mheads.tree import TreeNet

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def read(path: Path) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file, or in one that torch.save wrote; nothing in it is run."""
    try:
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


def by_name(found: Any, where: str) -> dict[str, Tensor]:
    """A state dict, checked; without the `module.` that DataParallel puts before every name."""
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{where} holds a {type(found).__name__}, not tensors by name like model.state_dict()")
    strange = next((name for name, tensor in found.items() if not isinstance(tensor, Tensor)), None)
    if strange is not None:
        raise UserError(f"{where}: {strange!r} is a {type(found[strange]).__name__}, not a tensor")
    prefix = "module." if all(str(name).startswith("module.") for name in found) else ""
    return {str(name).removeprefix(prefix): tensor for name, tensor in found.items()}


@torch.no_grad()
def load_into(net: TreeNet, weights: Mapping[str, Tensor], where: str = "the weights") -> list[str]:
    """Copies weights into a tree; returns the names that fit nowhere.

    They are the tree's own (`stages.trunk.conv1.weight`), or those of one network (`conv1.weight`), for every member.
    """
    whole = any(name in weights for name in net.state_dict())
    wanted = {name: name if whole else _in_network(net, name) for name in net.state_dict()}
    missing = sorted({name for name in wanted.values() if name not in weights})
    if missing:
        raise UserError(
            f"{where} does not fit {net.network_name}: {len(missing)} of {len(set(wanted.values()))} tensors are "
            f"missing ({_some(missing)}); there are {_some(list(weights))}"
        )
    tensors = net.state_dict()
    for name, there in wanted.items():
        if weights[there].shape != tensors[name].shape:
            here = tuple(tensors[name].shape)
            raise UserError(f"{where} does not fit: {there} is {tuple(weights[there].shape)} there, {here} here")
    for name, there in wanted.items():
        tensors[name].copy_(weights[there])
    return sorted(set(weights) - set(wanted.values()))


def _in_network(net: TreeNet, name: str) -> str:
    """`stages.conv1/0.conv2.weight` -> `conv2.weight`."""
    stage = next(stage for stage in net.tree.nodes if name.startswith(f"stages.{stage}."))
    return name.removeprefix(f"stages.{stage}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
