"""Weights as Caffe keeps them: for each layer, by its name, a list of blobs. Files are .caffemodel, or HDF5.

A .caffemodel is protobuf's binary form of a net. Of that only the names of layers and their blobs are looked at.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mheads.common import atomic_files
from mheads.common.errors import UserError
from mheads.common.packed_arrays import refuse_too_large
from mheads.common.protobuf import BYTES, FIXED32, FIXED64, VARINT, encode, field, fields, read_packed
from mheads.data.readers.hdf5 import import_h5py

BINARY, HDF5 = (".caffemodel",), (".h5", ".hdf5")
SUFFIXES = (*BINARY, *HDF5)
Blobs = dict[str, list[np.ndarray]]
_TAKEN = nn.Sequential()  # names that a layer cannot have in a module


def free_name(name: str, taken: Any = ()) -> str:
    """A name that a module can have, like this one."""
    name = name.replace(".", "_") or "layer"
    while name in taken or hasattr(_TAKEN, name):
        name += "_"
    return name


def read(path: Path) -> Blobs:
    """The blobs of each layer that has some."""
    try:
        with atomic_files.open_file(path) as file:
            blobs = _read_binary(memoryview(file.read())) if path.suffix in BINARY else _read_hdf5(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} with weights") from None
    except (OSError, ValueError, KeyError, struct.error, RuntimeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as Caffe's weights ({error}): is it whole?") from error
    if not blobs:
        raise UserError(f"{path} holds no weights: give a file that Caffe's solver wrote, not a .solverstate")
    return blobs


def write(path: Path, network: nn.Module) -> None:
    """Writes the weights of one network, under the names of its layers."""
    blobs = of_network(network)
    if not blobs:
        raise UserError(f"{path}: a {type(network).__name__} has no layers with weights of its own")
    content = _hdf5(blobs) if path.suffix in HDF5 else _binary(blobs, types_of(network))
    atomic_files.write_atomically(path, content)


def of_network(network: nn.Module) -> Blobs:
    """The blobs of a network: parameters in their order, or for a normalisation its statistics."""
    blobs: Blobs = {}
    for path, module in network.named_modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        own = [t.detach().cpu().contiguous().numpy() for t in tensors if t is not None]
        own = [array.reshape(()) for array in own] if getattr(module, "scalar", False) else own
        if own:
            blobs[str(getattr(module, "caffe_name", "") or path)] = own
    return blobs


def types_of(network: nn.Module) -> dict[str, str]:
    names = {
        "Conv": "Convolution", "ConvTranspose": "Deconvolution", "Linear": "InnerProduct",
        "TransposedLinear": "InnerProduct", "ScaleBy": "Scale", "BiasBy": "Bias",
    }  # fmt: skip
    types = {}
    for path, module in network.named_modules():
        kind = type(module).__name__.removesuffix("1d").removesuffix("2d").removesuffix("3d")
        types[str(getattr(module, "caffe_name", "") or path)] = names.get(kind, kind)
    return types


def by_name(blobs: Blobs, wanted: Mapping[str, tuple[int, ...] | None]) -> dict[str, Tensor]:
    """Blobs under the names and in the shapes of a network's state; those of other layers under names of their own.

    Older files give every blob four axes, the first of size 1 where there are fewer. A blob of another shape stays as
    it is, to be refused where it is taken.
    """
    places: dict[str, list[str]] = {}
    for name in wanted:
        places.setdefault(name.rpartition(".")[0], []).append(name)
    tensors: dict[str, Tensor] = {}
    for layer, arrays in blobs.items():
        names = places.get(layer) or places.get(free_name(layer), [])  # `block.fc`, as it was exported
        for i, array in enumerate(arrays):
            if i >= len(names):
                tensors[f"{free_name(layer)}.{i}"] = torch.from_numpy(array)
                continue
            shape = wanted[names[i]]
            if shape is not None and _without_ones(array.shape) == _without_ones(shape):
                array = array.reshape(shape)
            tensors[names[i]] = torch.from_numpy(array)
    return tensors


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A shape without the ones that it begins with."""
    return list(dropwhile(lambda size: size == 1, shape))


# The binary form.


def _read_binary(data: memoryview) -> Blobs:
    by_layer: Blobs = {}
    for number, kind, layer in fields(data):
        if number not in (2, 100) or kind != BYTES:  # `layers` and `layer`
            continue
        name_field, blobs_field = (1, 7) if number == 100 else (4, 6)
        name, blobs = "", []
        for inner, form, value in fields(layer):
            if inner == name_field and form == BYTES:
                name = bytes(value).decode("utf-8", "replace")
            elif inner == blobs_field and form == BYTES:
                blobs.append(_read_blob(value))
        if blobs:
            by_layer[name] = blobs
    return by_layer


def _read_blob(data: memoryview) -> np.ndarray:
    sides, parts = {1: 0, 2: 0, 3: 0, 4: 0}, []
    shape: list[int] | None = None
    for number, kind, value in fields(data):
        if number in sides and kind == VARINT:
            sides[number] = value
        elif number == 7 and kind == BYTES:
            shape = []
            for _, form, dim in fields(value):
                shape += [dim] if form == VARINT else read_packed(dim)
        elif number in (5, 8) and kind in (BYTES, FIXED32, FIXED64):
            parts.append(np.frombuffer(value, "<f4" if number == 5 else "<f8"))
    values = np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)
    sizes = list(sides.values()) if shape is None else shape
    return values.reshape(sizes)


def _binary(blobs: Blobs, types: Mapping[str, str]) -> bytes:
    out = []
    for name, arrays in blobs.items():
        parts = [field(1, name.encode()), field(2, types.get(name, "").encode())]
        for array in arrays:
            shape = field(1, b"".join(map(encode, array.shape)))
            parts.append(field(7, field(5, np.ascontiguousarray(array, "<f4").tobytes()) + field(7, shape)))
        out.append(field(100, b"".join(parts)))
    return b"".join(out)


# HDF5: data / layer / number of the blob.


def _read_hdf5(path: Path) -> Blobs:
    h5py = import_h5py()
    by_layer: dict[str, dict[int, np.ndarray]] = {}
    with h5py.File(path, "r") as file:
        if "data" not in file:
            raise ValueError("it has no group `data`")

        def visit(name: str, thing: Any) -> None:
            layer, _, number = name.rpartition("/")
            if isinstance(thing, h5py.Dataset) and number.isdecimal():
                refuse_too_large(4 * thing.size, path)
                by_layer.setdefault(layer, {})[int(number)] = np.asarray(thing, np.float32)

        file["data"].visititems(visit)
    return {layer: [blobs[i] for i in sorted(blobs)] for layer, blobs in by_layer.items()}


def _hdf5(blobs: Blobs) -> bytes:
    buffer = io.BytesIO()
    with import_h5py().File(buffer, "w") as file:
        for name, arrays in blobs.items():
            for i, array in enumerate(arrays):
                file[f"data/{name}/{i}"] = np.asarray(array, np.float32)
    return buffer.getvalue()
