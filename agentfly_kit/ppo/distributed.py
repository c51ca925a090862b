"""Data parallelism within a PPO step: rows are distributed by token count; gradients and statistics are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentfly_kit.batch.batch import Batch, join
from agentfly_kit.errors import BatchError
from agentfly_kit.ppo.stats import RunningStats


def gather(batch: Batch, accelerator: Any) -> Batch:
    """Concatenate the batches of all processes of an accelerate.Accelerator in order of rank, for `ppo_step`."""
    if accelerator.num_processes == 1:
        return batch
    parts: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, batch)
    return join(parts)


class DistributedStep:
    """Communication between the processes that share a training step. A single process exchanges nothing."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.is_single = accelerator is None or accelerator.num_processes == 1

    def check_same_batch(self, batch: Batch) -> None:
        """Check that every process passed the same batch, by comparing row counts and sums of ids and advantages."""
        if self.is_single:
            return
        seen = [float(len(batch)), float(batch.ids.sum()), float(batch.advantages.nansum())]
        every = self.accelerator.gather(torch.tensor([seen], dtype=torch.float64, device=self.accelerator.device))
        if not bool((every == every[0]).all()):
            raise BatchError(
                f"all processes must pass the same batch, got batches of {[int(n) for n in every[:, 0]]} rows; "
                "pass gather(batch, accelerator)"
            )

    def local_rows(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return this process's rows. Each row, longest first, goes to the process with the fewest tokens so far."""
        if self.is_single:
            return rows
        loads = [0] * self.accelerator.num_processes
        mine: list[int] = []
        for i in torch.argsort(batch.lengths[rows], descending=True, stable=True).tolist():
            to = loads.index(min(loads))
            loads[to] += int(batch.lengths[rows[i]])
            if to == self.accelerator.process_index:
                mine.append(i)
        return rows[mine]

    def sum_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients over all processes, in a single reduction."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        together = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        for p, g in zip(parameters, together.split([g.numel() for g in gradients]), strict=True):
            p.grad = g.view_as(p).clone()

    def sum_stats(self, sums: RunningStats, cancelled: bool) -> bool:
        """Combine the statistics `sums` of all processes, in place. Return True if any process was cancelled."""
        values = torch.cat([sums.values.cpu(), torch.tensor([float(cancelled)], dtype=torch.float64)])
        every = self.accelerator.gather(values[None].to(self.accelerator.device)).cpu()
        sums.values = torch.cat([every[:, :-2].sum(0), every[:, -2].amax(0, keepdim=True)])
        return bool(every[:, -1].any())
