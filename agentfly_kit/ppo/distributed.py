"""Communication between the processes of a distributed training run.

A PPO step is data-parallel. The rows to score and to train on are distributed over the processes by token count, and
the scores, gradients and statistics of all processes are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from agentfly_kit._async.pending_call import run_in_thread
from agentfly_kit.batch.batch import Batch, join
from agentfly_kit.errors import BatchError, TrainingError

if TYPE_CHECKING:
    from agentfly_kit.policy.forward import ScoreName
    from agentfly_kit.policy.policy import Policy
    from agentfly_kit.ppo.stats import RunningStats

T = TypeVar("T")


def gather(batch: Batch, accelerator: Any) -> Batch:
    """Concatenate the batches of an accelerate.Accelerator's processes in order of rank, for use in `ppo_step`."""
    return batch if accelerator.num_processes == 1 else join(_all_gather(batch, accelerator.num_processes))


def _all_gather(value: T, size: int) -> list[T]:
    parts: list[Any] = [None] * size
    torch.distributed.all_gather_object(parts, value)
    return parts


class WorkerGroup:
    """Processes of a training run. All processes must call the methods in the same order.

    Args:
        accelerator: accelerate.Accelerator of the processes, or None for a single process, which does not communicate.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)
        self.is_single = self.size == 1
        self.is_main = self.rank == 0

    # --- the training loop ---

    async def all_gather(self, value: T) -> list[T]:
        """Collect a value from every process, in order of rank."""
        return [value] if self.is_single else await run_in_thread(_all_gather, value, self.size)

    async def all_gather_or_raise(self, value: T | None, error: Exception | None = None) -> list[T]:
        """Collect a value from every process, in order of rank. Raise in all processes if one passes an error."""
        failed = await self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(failed):
            if message is not None:
                raise TrainingError(f"process {rank} of {self.size} failed: {message}")
        parts: list[Any] = await self.all_gather(value)
        return parts

    async def run_on_main(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in a thread of the main process. Return the result or raise the error in all processes."""
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

    # --- a PPO step ---

    def check_same_batch(self, batch: Batch) -> None:
        """Check by row counts and by sums of keys and advantages that all processes passed the same batch."""
        # Reduce the keys to 32 bits, because the sum of such keys is exact in float64.
        keys = batch.ids if batch.row_keys is None else batch.row_keys % 2**32
        seen = [float(len(batch)), float(keys.sum()), float(batch.advantages.nansum())]
        every = self.accelerator.gather(torch.tensor([seen], dtype=torch.float64, device=self.accelerator.device))
        if not bool((every == every[0]).all()):
            raise BatchError(
                f"all processes must pass the same batch, got batches of {[int(n) for n in every[:, 0]]} rows; "
                "pass gather(batch, accelerator)"
            )

    def local_rows(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return this process's rows. Rows are assigned longest first, each to the process with the fewest tokens."""
        if self.is_single:
            return rows
        loads = [0] * self.size
        mine: list[int] = []
        for i in torch.argsort(lengths[rows], descending=True, stable=True).tolist():
            to = loads.index(min(loads))
            loads[to] += int(lengths[rows[i]])
            if to == self.rank:
                mine.append(i)
        return rows[mine]

    def score(self, policy: Policy, batch: Batch, what: ScoreName, micro_tokens: int | None) -> Tensor:
        """Compute a score of each token, (B, T). Each process scores some rows and returns the scores of all rows."""
        rows = self.local_rows(torch.arange(len(batch)), batch.lengths)
        values = policy.score(batch, {what}, rows=rows, micro_tokens=micro_tokens)[what]
        if self.is_single:
            return values
        mine = torch.zeros_like(values)
        mine[rows] = values[rows]
        every = self.accelerator.reduce(mine[batch.mask].to(self.accelerator.device), reduction="sum")
        return values.masked_scatter(batch.mask, every.cpu())

    def largest(self, value: float) -> float:
        """Return the largest value of all processes, ignoring NaN. If all values are NaN, return NaN."""
        if self.is_single:
            return value
        every = self.accelerator.gather(torch.tensor([value], dtype=torch.float64, device=self.accelerator.device))
        known = every[~every.isnan()]
        return float(known.max()) if len(known) else math.nan

    def sum_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients over all processes in a single reduction."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        together = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        for p, g in zip(parameters, together.split([g.numel() for g in gradients]), strict=True):
            p.grad = g.view_as(p).clone()

    def sum_stats(self, sums: RunningStats, cancelled: bool) -> bool:
        """Combine the statistics of all processes in place. Return True if any process was cancelled."""
        values = torch.cat([sums.values.cpu(), torch.tensor([float(cancelled)], dtype=torch.float64)])
        every = self.accelerator.gather(values[None].to(self.accelerator.device)).cpu()
        sums.values = torch.cat([every[:, :-2].sum(0), every[:, -2].amax(0, keepdim=True)])
        return bool(every[:, -1].any())
