"""Helpers for asyncio, threads, signals and garbage collection, used by the other packages."""
