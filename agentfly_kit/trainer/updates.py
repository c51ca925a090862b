"""`Updater`, which updates the policy of a training run: batches, optimizer, learning rates and reference policy."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch

from agentfly_kit import seeds
from agentfly_kit._async.pending_call import run_in_thread
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.batch import Batch, drop_counts
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import EmptyBatch, SettingsError, TrainingError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.optimizer import adamw
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.ppo.step import ppo_step_async
from agentfly_kit.trainer import checkpoint
from agentfly_kit.trainer.batch_builder import BatchBuilder, Scorer, check_reference, check_teacher, distilled
from agentfly_kit.trainer.checkpoint import LoopState
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.run_dir import Run
from agentfly_kit.trainer.sampling import RolloutSampler


class UpdateProcesses(Scorer, Protocol):
    """Processes that update a policy, created by `af.ray.learner`."""

    policy: Policy
    optimizer: Any

    async def reset(self, lr: float | None = None) -> None:
        """Send the weights of the policy to the processes, which create a new optimizer."""

    async def step(self, batch: Batch, config: TrainConfig, *, reference: Policy | None, seed: int) -> Stats:
        """Update the policy in the same way as `ppo_step`."""


class Updater:
    """Updates the policy of a run on the chains sampled by `sampler`.

    Attributes:
        optimizer: Optimizer of the policy, set by `prepare`.
        batch_builder: Builder of training batches, which also holds the reference policy for the KL penalty.
        teacher: Model to distill from, or None.
        reference: Reference policy given by the user, or None.
        learner: Processes that update the policy, or None for this process.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        sampler: RolloutSampler,
        teacher: Policy | Engine | None,
        reference: Policy | None,
        learner: UpdateProcesses | None,
    ) -> None:
        if learner is not None and (learner.policy is not sampler.policy or not sampler.workers.is_single):
            raise SettingsError(
                "learner must update the policy that is trained, in one process that samples its chains: "
                "af.ray.learner(policy, n)"
            )
        check_teacher(teacher, sampler.agent, sampler.policy, sampler.config)
        check_reference(reference, sampler.policy, sampler.config)
        self.sampler, self.teacher, self.reference, self.learner = sampler, teacher, reference, learner
        self.policy, self.config = sampler.policy, sampler.config
        self.batch_builder = BatchBuilder(self.policy, self.config, sampler.agent.reward, learner or sampler.workers)

    async def prepare(self, run: Run, found: Path | None) -> LoopState:
        """Load the checkpoint `found`, or write the first checkpoint of the run if `found` is None."""
        policy, config, workers = self.policy, self.config, self.sampler.workers
        if self.learner is None:
            self.optimizer = adamw(policy, config.lr)
        else:
            await self.learner.reset(config.lr)
            self.optimizer = self.learner.optimizer
        self._first_step = run.first_step
        if found is not None:
            if config.kl_coef > 0:
                self.batch_builder.reference = self.reference or await run_in_thread(
                    checkpoint.load_reference, run, policy
                )
            return await run_in_thread(checkpoint.load, run, found, policy, self.optimizer)
        if config.kl_coef > 0:
            self.batch_builder.reference = reference = self.reference or policy.reference()
            if self.reference is None and not policy.has_adapter:
                await workers.run_on_main(checkpoint.save_reference, run, reference)
        # Save a checkpoint before the first update, to be able to recover if the update is interrupted.
        state = LoopState(0, config.kl_coef)
        await workers.run_on_main(checkpoint.save, run, *await self.gather(), state)
        return state

    async def gather(self) -> tuple[Policy, torch.optim.Optimizer]:
        """Return policy and optimizer for a checkpoint. If they are sharded, all processes gather them."""
        if self.policy.accelerator is None:
            return self.policy, self.optimizer
        from agentfly_kit.policy.sharding import gather

        return await run_in_thread(gather, self.policy, self.optimizer)

    async def build(self, index: int, rollout: Rollout, kl_coef: float) -> tuple[Batch | None, Rollout]:
        """Build the batch for an iteration.

        Return the batch, or None if filters left nothing to train on, and the rollout with drop reasons.
        """
        try:
            baselines = await self.sampler.greedy_rewards(rollout) if self.config.advantage == "remax" else None
            batch = await run_in_thread(self.batch_builder.build, rollout, kl_coef, baselines)
        except EmptyBatch as error:
            if not any(d.filtered for d in error.dropped):
                raise
            reasons = ", ".join(f"{n} {reason}" for reason, n in drop_counts(error.dropped).items())
            warnings.warn(f"step {index + 1}: nothing was left to train on ({reasons}); no update", stacklevel=3)
            return None, rollout.with_drop_reasons(error.dropped)
        return batch, rollout.with_drop_reasons(batch.dropped)

    async def step(self, index: int, batch: Batch, kl_coef: float) -> tuple[Stats, float]:
        """Update the policy with a batch.

        Return the statistics and the number of updates since the oldest token of the batch was sampled.

        Raises:
            TrainingError: If the approximate KL exceeds `config.max_kl`.
        """
        policy, config = self.policy, self.config
        for group, lr in zip(self.optimizer.param_groups, self._learning_rates(index), strict=True):
            group["lr"] = lr
        if self.teacher is not None:
            batch = await distilled(batch, self.teacher, config)
        lag = float(policy.version - batch.versions[batch.mask].min())
        step_config = config.replace(kl_coef=kl_coef)
        if config.overlap and config.old_logprobs == "auto" and config.correction is None:
            step_config = step_config.replace(old_logprobs="engine")
        reference, seed = self.batch_builder.reference, seeds.derive(config.seed, "update", index)
        if self.learner is not None:
            stats = await self.learner.step(batch, step_config, reference=reference, seed=seed)
        else:
            accelerator = self.sampler.workers.accelerator
            options: Any = {"reference": reference, "seed": seed, "accelerator": accelerator}
            stats = await ppo_step_async(policy, self.optimizer, batch, step_config, **options)
            if policy.size > 2**24:
                # Without this, memory that was freed stays with the process, which grows by gigabytes during a run.
                with contextlib.suppress(AttributeError, OSError, TypeError):  # the C library is not glibc
                    ctypes.CDLL(None).malloc_trim(0)
        if config.max_kl is not None and stats.approx_kl > config.max_kl:
            raise TrainingError(
                f"the update moved the policy by {stats.approx_kl:.3g} nats per token, more than "
                f"max_kl={config.max_kl}: training has diverged. Try a smaller lr than {config.lr:g}, "
                "target_kl=0.05, or fewer epochs"
            )
        return stats, lag

    def _learning_rates(self, index: int) -> list[float]:
        """Return the learning rate for each parameter group: linear from `lr` to `lr_end`, and lower during warmup."""
        config = self.config
        end = config.lr if config.lr_end is None else config.lr_end
        now = config.lr + (end - config.lr) * (
            (index - self._first_step) / max(1, config.steps - 1 - self._first_step)
        )
        now *= min(1, (index + 1) / (config.lr_warmup + 1))
        # The learning rate of the value head is a fixed multiple of the policy's learning rate.
        return [now * group.setdefault("scale", group["lr"] / config.lr) for group in self.optimizer.param_groups]
