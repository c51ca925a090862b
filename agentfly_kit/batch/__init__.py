"""From trajectories to training tensors: collation, filters, and data per turn."""
