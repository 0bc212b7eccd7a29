"""Figures as matplotlib objects: nothing here reads a run folder, touches pyplot's state or needs a display."""
