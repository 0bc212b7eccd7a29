"""Runs a network on a few examples and refuses what a tree of its layers would silently get wrong."""
