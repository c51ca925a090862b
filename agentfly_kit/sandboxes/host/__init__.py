"""What runs on the host's side of a sandbox: processes, isolation, limits and containers."""
