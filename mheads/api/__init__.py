"""What users call, and commands call the same: fit, evaluate, load, predict, export, distil.

Read `fit.py` first. `run.py` is the trained ensemble that `fit` and `load` return.
"""
