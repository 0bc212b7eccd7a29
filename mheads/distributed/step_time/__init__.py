"""Predicts how long a step on ranks takes, before any rank is started."""
