"""Training: from a config to a finished run folder.

Read `loop.py` first: it is the training loop, from top to bottom. `experiment.py` checks what `build.py` makes of a
config, `state.py` is what a checkpoint holds of the loop, `session.py` runs a command on one or several ranks.
"""
