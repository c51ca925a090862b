"""Helpers for asyncio, threads and signals that every other package may use."""
