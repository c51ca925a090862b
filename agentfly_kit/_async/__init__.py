"""Internal helpers for asyncio, threads, interrupts and garbage collection."""
