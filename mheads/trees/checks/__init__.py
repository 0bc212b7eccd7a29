"""Runs a network on a few examples and raises an error for what a tree of its layers would silently get wrong.

`hidden_randomness_and_state.py` runs each layer by itself, `mixed_examples.py` changes the other examples of the batch,
`compare_with_forward.py` compares the layers in a row with the network's own forward.
"""
