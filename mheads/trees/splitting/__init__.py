"""Cuts a network into a chain of layers, of which the stages of a tree are made. `cut_network.py` decides how.

`cut_sequential.py` takes children that run in a row; `trace.py` records any other forward as a graph, and
`cut_traced_graph.py` cuts it wherever exactly one value crosses. `list_cuts.py` lists where a network can be split.
"""
