"""Values as bytes, and back: what processes send each other.

A block describes itself: its length, the length of the pickled form, the form, and the tensors as they lie in memory,
so that channels-last arrives as channels-last.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor

from mheads.common.nested_values import Value

ALIGNED = 64  # bytes: where tensors begin in a block
HEADER = 16  # bytes: the two lengths


class PackedValue(pickle.Pickler):
    """A value, its tensors apart from its form."""

    def __init__(self, value: Value) -> None:
        form = io.BytesIO()
        super().__init__(form)
        self.parts: list[Tensor] = []
        self.dump(value)
        self.parts.insert(0, torch.frombuffer(form.getbuffer(), dtype=torch.uint8))
        self.length = HEADER
        for part in self.parts:
            self.length = align(self.length + part.numel())

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        t = obj.detach().resolve_conj().resolve_neg()
        dense = t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))
        t = t if dense else t.clone()  # in strides of its own if it has gaps, in the same ones otherwise
        self.parts.append(memory_of(t))
        return t.dtype, tuple(t.shape), t.stride()

    def write(self, room: int, device: torch.device) -> Tensor:
        """A block of so many bytes; of a value that needs more, the header alone."""
        block = torch.empty(room, dtype=torch.uint8, device=device)
        block[:HEADER] = torch.tensor([self.length, self.parts[0].numel()]).view(torch.uint8)
        start = HEADER
        for part in self.parts if self.length <= room else ():
            block[start : start + part.numel()] = part
            start = align(start + part.numel())
        return block


class _Unpickler(pickle.Unpickler):
    def __init__(self, form: bytes, tensors: Tensor) -> None:
        super().__init__(io.BytesIO(form))
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        dtype, shape, strides = pid
        size = math.prod(shape) * dtype.itemsize
        flat, self.tensors = self.tensors[:size].view(dtype), self.tensors[align(size) :]
        return torch.as_strided(flat, shape, strides, flat.storage_offset())


def pack(value: Value) -> Tensor:
    packed = PackedValue(value)
    return packed.write(packed.length, torch.device("cpu"))


def unpack(block: Tensor) -> Value:
    """The value in a block; its tensors are views of it."""
    _, size = block[:HEADER].clone().view(torch.int64).tolist()
    end = HEADER + size
    return _Unpickler(block[HEADER:end].cpu().numpy().tobytes(), block[align(end) :]).load()


def memory_of(dense: Tensor) -> Tensor:
    """The bytes of a tensor as they lie in memory."""
    flat = torch.as_strided(dense, (dense.numel(),), (1,), dense.storage_offset())
    return flat.view(torch.uint8) if dense.numel() else flat.new_empty(0, dtype=torch.uint8)


def align(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
