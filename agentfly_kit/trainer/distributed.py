"""Communication between the processes of a training run.

The methods of `WorkerGroup` that communicate are collective: all processes must call them in the same order. With a
single process nothing is exchanged.
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
    """Run a function in a thread. If cancelled, wait until the function has returned before raising.

    Args:
        function: Function to run.
        given: Its positional arguments.

    Returns:
        Its result.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *given))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_all([task])
        if not task.cancelled():
            task.exception()
        raise


class WorkerGroup:
    """The processes of a training run.

    Args:
        accelerator: An accelerate.Accelerator; None for this process alone.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)

    @property
    def is_single(self) -> bool:
        """True if there is only one process."""
        return self.size == 1

    @property
    def is_main(self) -> bool:
        """True for the process of rank 0."""
        return self.rank == 0

    async def all_gather(self, value: T) -> list[T]:
        """Collect a value from every process.

        Args:
            value: Value of this process.

        Returns:
            The values in order of rank.
        """
        if self.is_single:
            return [value]
        parts: list[Any] = [None] * self.size
        await run_in_thread(torch.distributed.all_gather_object, parts, value)
        return parts

    async def all_gather_or_raise(self, value: T | None, error: Exception | None = None) -> list[T]:
        """Collect a value from every process, or raise on all of them if any process failed.

        Args:
            value: Value of this process, if it succeeded.
            error: Error of this process, if it failed.

        Returns:
            The values in order of rank.

        Raises:
            Exception: `error`, in a process that failed.
            TrainingError: If another process failed.
        """
        failed = await self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, said in enumerate(failed):
            if said is not None:
                raise TrainingError(f"process {rank} of {self.size} failed: {said}")
        parts: list[Any] = await self.all_gather(value)
        return parts

    async def run_on_main(self, function: Callable[..., T], *given: Any) -> T:
        """Run a function in a thread of the main process and broadcast its result.

        Args:
            function: Function to run.
            given: Its positional arguments.

        Returns:
            The result, in every process.

        Raises:
            Exception: The error of the function, in the main process.
            TrainingError: If the function failed, in the other processes.
        """
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
