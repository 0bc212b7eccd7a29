"""Optimizers, each stage by itself, and schedules of the learning rate."""
