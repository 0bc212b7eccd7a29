"""Broadcast and Gather for any network, and the engine of nets that say themselves which rank runs what."""
