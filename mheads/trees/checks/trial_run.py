"""Runs a module to see what it does, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from mheads.common import nested_values, seeds
from mheads.common.nested_values import Value
from mheads.networks.dropout import keyed_masks

Side = dict[str, Value] | None
Layers = Sequence[tuple[str, nn.Module]]  # stages of one layer each, by name


def masks(x: Value) -> AbstractContextManager[None]:
    return keyed_masks(("probe",), nested_values.num_rows(x))


def call(stage: nn.Module, x: Value, side: Side) -> Value:
    with masks(x):
        return stage(x, side)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@contextmanager
def isolated() -> Iterator[None]:
    """Inside, the global generators are seeded anew and put back afterwards, and one thread computes.

    That is enough for a few rows, and processes that start at once do not wait for each other's threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with seeds.seed_generators("probe"):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Puts buffers and modes back afterwards, whatever happens inside."""
    stores = [m._buffers for m in module.modules()]
    kept = [(s, key, b, b.clone()) for s in stores for key, b in s.items() if b is not None]
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for store, key, buffer, before in kept:
            store[key] = buffer.copy_(before)
        for m, mode in modes:
            m.training = mode


@contextmanager
def shake(module: nn.Module, seed: int = 0) -> Iterator[None]:
    """Inside, the module has other weights, none of them zero, and other running statistics: zeros hide its doings."""
    generator = torch.Generator().manual_seed(seed)
    before = [(p, p.data) for p in module.parameters() if p.is_floating_point()]
    with as_it_was(module):
        try:
            for p, data in before:  # by amounts that keep the outputs of the layers at their size
                inputs = p.numel() // max(1, len(p)) if p.dim() > 1 else 1
                p.data = torch.add(data, noise(p, generator), alpha=0.5 / max(1, inputs) ** 0.5)
            for m in module.modules():
                if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None:
                    assert m.running_var is not None
                    m.running_mean += 0.5 * noise(m.running_mean, generator)
                    m.running_var *= 0.5 + noise(m.running_var, generator).abs()
            yield
        finally:
            for p, data in before:
                p.data = data


def noise(t: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers in the shape of t; they repeat after a while, which is enough here and costs less."""
    drawn = torch.randn(min(t.numel(), 65537), generator=generator, dtype=t.dtype)
    return drawn.repeat(-(-t.numel() // max(1, len(drawn))))[: t.numel()].view(t.shape).to(t.device)


def is_rowwise(t: Tensor, rows: int) -> bool:
    """Whether the first dimension of a tensor is as long as the batch."""
    return t.dim() > 0 and len(t) == rows


def replace_others(x: Value, row: int) -> Value:
    """The batch with other examples in all rows but this one; whole numbers stay among those that occur."""
    rows = nested_values.num_rows(x)

    def replace(t: Tensor) -> Tensor:
        if not is_rowwise(t, rows):
            return t
        if t.is_floating_point():
            others = t + (1 + t.abs().max()) * noise(t, torch.Generator().manual_seed(0))
        else:
            others = t[row].flip(tuple(range(t.dim() - 1))).repeat(rows, *[1] * (t.dim() - 1))
        others[row] = t[row]
        return others

    return nested_values.map_leaves(replace, x)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN counting as equal to NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def close(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether they are equal up to rounding, relative to the largest value among them."""
    kinds, wanted = ([(t.shape, t.dtype) for t in tensors] for tensors in (got, expected))
    if kinds != wanted:
        return False
    if all(map(torch.equal, got, expected)):
        return True
    floats = [b for b in expected if b.is_floating_point() and b.numel()]
    scale = max((b.nan_to_num(0, 0, 0).abs().max().item() for b in floats), default=0.0)
    return all(
        torch.allclose(a, b, 1e-4, 1e-5 * scale, equal_nan=True) if b.is_floating_point() else equal(a, b)
        for a, b in zip(got, expected, strict=True)
    )
