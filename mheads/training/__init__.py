"""Training: from a config to a finished run folder.

Read `loop.py` first: it is the training loop, from top to bottom. `build_from_config.py` makes the parts of a config,
`experiment.py` puts them together, `check_experiment.py` checks that they fit each other, `train_state.py` is what a
checkpoint holds of the loop, `log_and_checkpoint.py` keeps the run folder, `join_ranks.py` runs a command on several
ranks.
"""
