"""Conversion of trajectories to training tensors: collation, filters, and per-turn data."""
