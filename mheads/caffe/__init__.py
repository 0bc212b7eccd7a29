"""Caffe's and MPI-Caffe's specifications (.prototxt) and weights (.caffemodel), run on PyTorch.

    mheads train NET.prototxt --solver SOLVER.prototxt

`text.py` reads, `graph.py` says which layer feeds which on which rank, `layers/` makes the modules, `network.py` puts
them together, `solver.py` and `convert.py` turn the rest into a config.
"""

from typing import Any

__all__ = ["Blobs", "convert", "network", "read_net", "read_solver", "read_weights", "write_weights"]


def __getattr__(name: str) -> Any:
    # Imported when first used: protobuf and torch take a moment.
    if name == "network":
        from mheads.caffe.network import network

        return network
    if name == "Blobs":
        from mheads.caffe.network import Blobs

        return Blobs
    if name == "convert":
        from mheads.caffe.convert import convert

        return convert
    if name in ("read_net", "read_solver"):
        from mheads.caffe import text

        return getattr(text, name)
    if name in ("read_weights", "write_weights"):
        from mheads.caffe import weights

        return getattr(weights, name)
    raise AttributeError(f"module 'mheads.caffe' has no attribute {name!r}")
