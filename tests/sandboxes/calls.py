"""Several calls of one sandbox."""

from typing import Any


async def each(field: str, sandbox: Any, *inputs: str) -> list[Any]:
    """Run cells, commands or statements one after another, and return one field of every result."""
    return [getattr(await sandbox.run(text), field) for text in inputs]
