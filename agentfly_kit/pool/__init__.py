"""Pools that lend sandboxes and environments to chains."""
