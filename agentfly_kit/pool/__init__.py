"""Pools that lease sandboxes and environments to chains."""
