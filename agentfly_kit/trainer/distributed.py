"""Several processes on one run: what each of them knows, and what the first one does for all. Knows no training.

Every call here is one that all processes make, in the same order. With one process nothing is exchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.errors import TrainingError

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *given: Any) -> T:
    """`function` in a thread. Who is cancelled meanwhile waits for its end: nothing goes on behind their back."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *given))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_all([task])
        if not task.cancelled():
            task.exception()
        raise


class WorkerGroup:
    """The processes of an `accelerate.Accelerator`, or None: just this one."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)

    @property
    def is_single(self) -> bool:
        return self.size == 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    async def all_gather(self, value: T) -> list[T]:
        """What every process gave, in order of rank."""
        if self.is_single:
            return [value]
        parts: list[Any] = [None] * self.size
        await run_in_thread(torch.distributed.all_gather_object, parts, value)
        return parts

    async def all_gather_or_raise(self, value: T | None, error: Exception | None = None) -> list[T]:
        """As `all_gather`; where some process has an error instead, all raise it."""
        failed = await self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, said in enumerate(failed):
            if said is not None:
                raise TrainingError(f"process {rank} of {self.size} failed: {said}")
        parts: list[Any] = await self.all_gather(value)
        return parts

    async def run_on_main(self, function: Callable[..., T], *given: Any) -> T:
        """The first process runs it, in a thread; all get its result, or its error."""
        if self.is_single:
            return await run_in_thread(function, *given)
        value: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                value = await run_in_thread(function, *given)
            except Exception as raised:
                error = raised
        return (await self.all_gather_or_raise(value, error))[0]
