"""Engines run the stages of a tree over micro-batches, forward and backward.

Read `training_step.py` first: it says what a step is. `threads.py` is the engine of one process; that of several ranks
is in `distributed/`.
"""
