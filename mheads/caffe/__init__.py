"""Caffe's and MPI-Caffe's specifications (.prototxt) and weights (.caffemodel), run on PyTorch.

    mheads train NET.prototxt --solver SOLVER.prototxt

`prototxt.py` reads a specification, `layer_graph.py` finds which layer feeds which on which rank, `layers/` makes the
modules, `network.py` puts them together, `solver.py` and `convert.py` turn the rest into a config.
"""
