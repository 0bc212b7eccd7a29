"""Protobuf's binary form, field by field: what Caffe writes weights and examples in.

Its runtime would make a list of Python numbers of every array, ten times the memory of the array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """The fields of a message: number, wire type, and the value or the bytes of it."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = varint(data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {kind} at byte {at}")
        if number == 0 or at + size > len(data):
            raise ValueError(f"a field that ends beyond the file, at byte {at}")
        yield number, kind, data[at : at + size]
        at += size


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at a byte, and the byte behind it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number that does not end, at byte {at}")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_packed(data: memoryview) -> list[int]:
    """The numbers of a packed list."""
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def encode(value: int) -> bytes:
    """A number as it is written."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes | int) -> bytes:
    """A field as it is written: bytes, or a number."""
    if isinstance(content, int):
        return encode(number << 3 | VARINT) + encode(content)
    return encode(number << 3 | BYTES) + encode(len(content)) + content
