"""The host's side of sandboxes: processes, isolation, limits and containers."""
