"""Figures of runs, to look at."""
