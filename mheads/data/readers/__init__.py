"""Reads datasets: one file for each layout on disk, and for each set that is fetched."""
