"""Pooling of regions: against the definition, cell by cell, and its gradient against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mheads.networks import roi_pooling
from mheads.networks.roi_pooling import RegionPool


def by_definition(x, regions, counts, size, scale):
    """Maxima and, of the same shape, where they are in the map, or -1 for a cell with nothing in it."""
    height, width = x.shape[2:]
    found, places = [], []
    images = [i for i, count in enumerate(counts) for _ in range(count)]
    for image, region in zip(images, regions.tolist(), strict=True):
        left, top, right, bottom = (math.floor(side * scale + 0.5) for side in region)
        rows, columns = max(bottom - top + 1, 1), max(right - left + 1, 1)
        for c in range(x.shape[1]):
            for i in range(size):
                for j in range(size):
                    begin = max(0, top + i * rows // size), max(0, left + j * columns // size)
                    end = min(height, top - (-(i + 1) * rows // size)), min(width, left - (-(j + 1) * columns // size))
                    best, where = 0.0, -1
                    for y in range(begin[0], end[0]):
                        for k in range(begin[1], end[1]):
                            value = x[image, c, y, k].item()
                            if where < 0 or value > best:
                                best, where = value, y * width + k
                    found.append(best)
                    places.append(where)
    shape = (len(images), x.shape[1], size, size)
    return torch.tensor(found, dtype=x.dtype).view(shape), torch.tensor(places).view(shape)


def drawn(seed, height, width, size, images=2, channels=2, regions=3, levels=4, outside=False):
    """Maps with many equal values, and regions of all sizes, some of a single pixel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(levels, (images, channels, height, width), generator=generator, dtype=torch.float64)
    counts = torch.randint(regions + 1, (images,), generator=generator)
    total = int(counts.sum())
    low, high = (-30, 16 * max(height, width) + 30) if outside else (0, 16 * min(height, width))
    corners = low + (high - low) * torch.rand(total, 2, 2, generator=generator)
    return x, torch.cat([corners.amin(1), corners.amax(1)], 1), counts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 20), st.integers(1, 7),
    st.sampled_from([1, 1 / 8, 1 / 16]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_pooling_and_where_gradients_go_are_those_of_the_definition(seed, height, width, size, scale, outside, last):
    x, regions, counts = drawn(seed, height, width, size, outside=outside)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    out = RegionPool(size, scale)(x, regions, counts)
    expected, places = by_definition(x.detach(), regions, counts.tolist(), size, scale)
    assert torch.equal(out, expected)
    weights = torch.arange(1.0, out.numel() + 1, dtype=x.dtype).view(out.shape)
    (out * weights).sum().backward()
    gradient = torch.zeros(x.shape, dtype=x.dtype)
    images = torch.arange(len(counts)).repeat_interleave(counts)
    for r, c, i, j in (places >= 0).nonzero().tolist():
        place = places[r, c, i, j].item()
        gradient[images[r], c, place // width, place % width] += weights[r, c, i, j]
    assert torch.equal(x.grad if x.grad is not None else torch.zeros_like(gradient), gradient)


def test_the_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randperm(2 * 3 * 9 * 7, generator=generator).double().view(2, 3, 9, 7).requires_grad_()  # no ties
    regions = torch.tensor([[0, 0, 100, 140], [16, 32, 48, 48], [3, 5, 3, 5], [90, 120, 300, 300]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: RegionPool(3, 1 / 16)(x, regions, torch.tensor([1, 3])), (x,))


def test_many_channels_are_pooled_in_parts_with_the_same_values(monkeypatch):
    x, regions, counts = drawn(3, 17, 19, 6, channels=7, regions=9, levels=1000)
    results = []
    for limit in (roi_pooling.TABLE, 1):
        monkeypatch.setattr(roi_pooling, "TABLE", limit)
        y = x.clone().requires_grad_()
        out = RegionPool(6, 1 / 16)(y, regions, counts)
        out.square().sum().backward()
        results.append((out.detach(), y.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("counts", [[0, 0], [0, 2], [2, 0]])
def test_images_without_regions_give_no_rows(counts):
    x = torch.randn(2, 3, 5, 5)
    out = RegionPool(2, 1.0)(x, torch.tensor([[0.0, 0, 4, 4]] * sum(counts)).view(-1, 4), torch.tensor(counts))
    assert out.shape == (sum(counts), 3, 2, 2)


def test_the_result_is_channels_last_as_the_next_layer_wants_it():
    x = torch.randn(1, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    out = RegionPool(2, 1.0)(x, torch.tensor([[0.0, 0, 4, 4]] * 3), torch.tensor([3]))
    assert out.is_contiguous(memory_format=torch.channels_last)
