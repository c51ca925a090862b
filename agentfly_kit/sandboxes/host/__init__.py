"""The part of sandboxes that runs on the host: processes, isolation, limits and containers."""
