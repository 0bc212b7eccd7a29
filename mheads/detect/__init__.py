"""Detectors: training one from a trained ensemble, measuring several beside the paper, and seeing what members see."""
