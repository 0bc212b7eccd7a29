"""An ensemble as one module: which layers its members share, and where they part.

`TreeNet` (treenet.py) is the module, `tree_spec.py` reads trees such as {conv1: [{conv2: 2}, 2]}. `splitting/` cuts a
network into layers that follow one another, `checks/` finds networks that a tree would silently get wrong.
Read `tree_spec.py` first. How stages are trained is in `engine/`.
"""
