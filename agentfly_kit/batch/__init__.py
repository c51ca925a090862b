"""Conversion of trajectories into training tensors: collation, filters, and data per turn."""
