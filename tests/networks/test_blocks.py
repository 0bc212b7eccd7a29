"""Pooling and normalisation against Caffe's arithmetic, written out in numpy."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch

from mheads.networks.caffe_style_layers import average_pool, local_response_norm, max_pool


def caffe_pool(x: np.ndarray, kernel: int, stride: int, reduce) -> np.ndarray:
    """[H, W] -> pooled; sizes round up, and a window over the edge is clipped to the input."""
    height, width = (ceil((size - kernel) / stride) + 1 for size in x.shape)
    out = np.empty((height, width))
    for i in range(height):
        for j in range(width):
            rows = slice(i * stride, i * stride + kernel)
            out[i, j] = reduce(x[rows, j * stride : j * stride + kernel])
    return out


@pytest.mark.parametrize("pool, reduce", [(max_pool, np.max), (average_pool, np.mean)])
@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 2), (3, 3), (5, 2)])
@pytest.mark.parametrize("height, width", [(8, 8), (7, 8), (5, 11)])
def test_pooling_is_caffes(pool, reduce, kernel, stride, height, width):
    x = np.random.default_rng(0).normal(size=(height, width))
    out = pool(kernel, stride)(torch.from_numpy(x)[None, None])[0, 0]
    np.testing.assert_allclose(out.numpy(), caffe_pool(x, kernel, stride, reduce), rtol=1e-12)


def test_average_pool_divides_an_edge_window_by_what_it_covers():
    out = average_pool()(torch.ones(1, 1, 32, 32))
    assert out.shape == (1, 1, 16, 16)
    assert (out == 1).all()


def test_local_response_norm_is_caffes():
    x = np.random.default_rng(0).normal(scale=30, size=(2, 9, 3, 3))
    expected = np.empty_like(x)
    for c in range(9):
        energy = (x[:, max(c - 2, 0) : c + 3] ** 2).sum(1)
        expected[:, c] = x[:, c] / (1 + 1e-4 / 5 * energy) ** 0.75
    out = local_response_norm()(torch.from_numpy(x))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)
