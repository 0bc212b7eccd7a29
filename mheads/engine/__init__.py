"""Engines run the stages of a tree over micro-batches. `threads.py` is the one for a single process."""
