"""Communication between the processes of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from agentfly_kit._async.pending_call import run_in_thread
from agentfly_kit.errors import TrainingError

T = TypeVar("T")


class WorkerGroup:
    """Processes of a training run, given by its Accelerator, if any. All must call the methods in the same order."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)
        self.is_single = self.size == 1
        self.is_main = self.rank == 0

    async def all_gather(self, value: T) -> list[T]:
        """Collect a value from every process, in order of rank."""
        if self.is_single:
            return [value]
        parts: list[Any] = [None] * self.size
        await run_in_thread(torch.distributed.all_gather_object, parts, value)
        return parts

    async def all_gather_or_raise(self, value: T | None, error: Exception | None = None) -> list[T]:
        """Collect a value from every process, in order of rank. If any process passes an error, all processes raise."""
        failed = await self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(failed):
            if message is not None:
                raise TrainingError(f"process {rank} of {self.size} failed: {message}")
        parts: list[Any] = await self.all_gather(value)
        return parts

    async def run_on_main(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread of the main process. All processes return the result, or raise if it fails."""
        if self.is_single:
            return await run_in_thread(function, *args)
        value: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                value = await run_in_thread(function, *args)
            except Exception as raised:
                error = raised
        return (await self.all_gather_or_raise(value, error))[0]
