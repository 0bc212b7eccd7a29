from __future__ import annotations

import sys

import pytest

from mheads.common.errors import UserError
from mheads.networks import INPUT_SHAPES, NETWORKS, resolve


@pytest.fixture
def own_nets(tmp_path, monkeypatch):
    """A file own_nets.py in the current directory, which is not yet importable."""
    (tmp_path / "own_nets.py").write_text("from torch.nn import Linear\nsize = 3\ndef net(): return Linear(2, 1)\n")
    (tmp_path / "broken_nets.py").write_text("raise ValueError('no such thing')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("own_nets", None)


def test_every_name_has_a_shape_and_a_factory():
    assert set(NETWORKS) - {"mlp", "fast_rcnn"} == set(INPUT_SHAPES)  # which take inputs of any size
    assert all(resolve(name) is factory for name, factory in NETWORKS.items())


def test_a_factory_of_ones_own_in_the_current_directory(own_nets):
    assert resolve("own_nets:net")().in_features == 2


def test_an_unknown_name_lists_the_nearest_first():
    words = r"'nin_cifar10' is not known \(did you mean nin_cifar100\?\); there are nin_cifar100, .*digits"
    with pytest.raises(UserError, match=words):
        resolve("nin_cifar10")


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere_nets:net", "importing nowhere_nets failed with ModuleNotFoundError: No module named"),
        ("broken_nets:net", "importing broken_nets failed with ValueError: no such thing"),
        ("own_nets:nets", "own_nets.py. has no 'nets'"),
        ("own_nets:size", "size is of type int, not a function"),
        ("own_nets:", "expected package.module:factory"),
        (":net", "expected package.module:factory"),
    ],
)
def test_mistakes_in_a_name_of_ones_own_are_explained(own_nets, name, message):
    with pytest.raises(UserError, match=message):
        resolve(name)
