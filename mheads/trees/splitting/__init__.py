"""Cuts a network into layers that follow one another, of which the stages of a tree are made.

`cut_sequential.py` takes children that run in a row; `trace.py` records any other forward as a graph, and
`cut_traced_graph.py` cuts it wherever exactly one value crosses.
"""
