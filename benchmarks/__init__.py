"""Measures speed and memory, side by side with what people would write otherwise. See benchmarks/README.md."""
