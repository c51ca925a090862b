"""The training loop: sample a rollout, compute advantages, update the policy, record, repeat.

The state of a run is stored in its folder. Each iteration ends with a line in `steps.jsonl` and, every
`checkpoint_every` iterations, with a checkpoint. If the loop is interrupted or crashes, the same call continues from
the last checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentfly_kit import losses, seeds
from agentfly_kit._async.pending_call import wait_all
from agentfly_kit._display import Displayable
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.batch.batch import drop_counts
from agentfly_kit.batch.filters import drop_reasons
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.errors import BatchError, EmptyBatch, RunError, SettingsError, TaskError, TrainingError
from agentfly_kit.evaluation import Evaluation, evaluate
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo import adamw, ppo_step_async
from agentfly_kit.trainer import checkpoint
from agentfly_kit.trainer.batch_builder import BatchBuilder
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.distributed import WorkerGroup, run_in_thread
from agentfly_kit.trainer.fingerprint import fingerprint
from agentfly_kit.trainer.reward_collapse import detect_collapse
from agentfly_kit.trainer.run_dir import Run, last_success
from agentfly_kit.trainer.task_sampler import TaskSampler
from agentfly_kit.types import Stats, Task

# Limit of the drop reasons in a record: a filter that gives every chain its own reason would add a column for each.
_MAX_REASONS = 16


@dataclass(frozen=True)
class TrainStep:
    """Result of one iteration. A step that was replayed from the folder of the run has only its record.

    Attributes:
        step: Number of the iteration, starting at 1.
        record: Metrics of the iteration, as written to the folder of the run.
        stats: Statistics of the update; None if nothing was left to train on, or if the step was replayed.
        rollout: Chains of the iteration; None if the step was replayed.
        evaluation: Evaluation after the iteration, if there was one.
        replayed: Whether the step was read from the folder of the run instead of executed.
    """

    step: int
    record: dict[str, float] = field(repr=False)
    stats: Stats | None = field(default=None, repr=False)
    rollout: Rollout | None = field(default=None, repr=False)
    evaluation: Evaluation | None = None
    replayed: bool = False

    @property
    def success(self) -> float:
        """Success rate of the sampled chains of this step; NaN if none was scored."""
        return self.record.get("success", math.nan)

    def __repr__(self) -> str:
        shown = ("success", "reward", "approx_kl", "eval_success")
        numbers = ", ".join(f"{k} {self.record[k]:.3f}" for k in shown if k in self.record)
        return f"TrainStep({self.step}: {numbers}{', replayed' if self.replayed else ''})"


def train(
    agent: Agent,
    policy: Policy,
    tasks: Iterable[Task],
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    eval_tasks: Iterable[Task] | None = None,
    resume: bool = True,
    progress: bool = False,
    accelerator: Any = None,
) -> TrainRun:
    """Create a training run, which starts when it is awaited or iterated: `await run` or `async for step in run`.

    Args:
        agent: Agent that samples the chains. It must have a reward, and its engine must sample from `policy`.
        policy: Policy to train.
        tasks: Training tasks.
        config: Settings; None uses the defaults of `TrainConfig`.
        run: Folder of the run. If it holds an unfinished run with the same config, tasks, tools, reward and starting
            policy, that run continues; a finished one replays its recorded steps and loads its final weights. None
            creates a temporary folder.
        eval_tasks: Tasks for `config.evaluate_every`.
        resume: False discards the contents of the folder and starts from scratch.
        progress: Whether to show a progress bar with rate and remaining time. For curves, display
            `widgets.TrainView(run)` before the `await`.
        accelerator: An accelerate.Accelerator with several processes, each of which makes the same call. The tasks of
            an iteration and the rows of an update (see `ppo_step`) are distributed over the processes. Only the main
            process writes to the folder, which must be visible to all. Steps, records and weights equal those of a
            single process up to the order of summation.

    Returns:
        The handle of the run.

    Raises:
        RunMismatch: If the folder holds a different run; the message lists the differences. Raised by this call, before
            the run starts.
        RunError: If the folder holds something other than a run, or its file is damaged.
        SettingsError: If the settings do not fit the agent, the policy, the tasks or the accelerator.
        TaskError: If there are no tasks.
    """
    given = list(eval_tasks or ())
    return TrainRun(agent, policy, list(tasks), config or TrainConfig(), run, given, resume, progress, accelerator)


class TrainRun(Displayable):
    """Handle of a training run.

    After an interrupt or a `break`, awaiting or iterating the same handle, or calling `train` again, continues the run.
    `stop()`, `pause()` and `resume()` control it, and `subscribe()` reports the record of each new step.

    Attributes:
        records: Records of the steps so far.
        total: Total number of steps of the run.
        rollout: Rollout in progress, for live views; None between rollouts.
    """

    def __init__(
        self,
        agent: Agent,
        policy: Policy,
        tasks: list[Task],
        config: TrainConfig,
        run: str | Path | None,
        eval_tasks: list[Task],
        resume: bool,
        progress: bool = False,
        accelerator: Any = None,
    ) -> None:
        if not tasks:
            raise TaskError("there is no task to train on; give at least one")
        if config.advantage == "gae" and policy.value_head is None:
            raise SettingsError("advantage='gae' needs values; load the policy with value_head=True")
        if config.evaluate_every and not eval_tasks:
            raise SettingsError(f"evaluate_every={config.evaluate_every} needs eval_tasks=, such as tasks.test")
        if not agent.reward and agent.group_reward is None:
            raise SettingsError("the agent has no reward, so there is nothing to learn from; agent.replace(reward=...)")
        if agent.sampling.greedy:
            raise SettingsError(
                "the agent samples greedily (temperature=0), so its tokens have no probability to learn from; "
                "agent.replace(sampling=af.Sampling(temperature=1.0))"
            )
        served = getattr(agent.engine, "policy", policy)
        if served is not policy:
            raise SettingsError(
                "the agent's engine samples from another policy than the one that is trained; "
                "use agent.replace(engine=af.LocalEngine(policy))"
            )
        self._workers = WorkerGroup(accelerator)
        if config.refill and not self._workers.is_single:
            raise SettingsError("refill= is for one process: each of several would count its own groups; give refill=0")
        if run is None and not self._workers.is_single:
            raise SettingsError("several processes need run=, one folder that all of them see")
        if config.budget is not None and not self._workers.is_single:
            raise SettingsError(
                f"budget={config.budget} would be counted by each of {self._workers.size} processes alone; "
                "give group_budget=, whose chains run in one"
            )
        agent.check_tasks([*tasks, *eval_tasks])
        self.agent = agent
        self.policy = policy
        self.tasks = tasks
        self.eval_tasks = eval_tasks
        self.config = config
        self._task_sampler = TaskSampler(tasks, config.tasks_per_step, config.seed, config.difficulty)
        self._progress = progress
        self._bar: Any = None
        self.rollout: RolloutHandle | None = None
        if run is None:
            run = tempfile.mkdtemp(prefix="agentfly-run-")
            weakref.finalize(self, shutil.rmtree, run, ignore_errors=True)
            resume = False
        self.run = Run(Path(run))
        self._start_over = not resume
        self._run_key = str(self.run.path.resolve())
        if self._start_over:
            policy.run_fingerprints.pop(self._run_key, None)
        start = policy.run_fingerprints.setdefault(self._run_key, policy.fingerprint())
        self.fingerprint = fingerprint(agent, tasks, config, start)
        self.run.check(self.fingerprint, resume=not self._start_over)
        self._optimizer: torch.optim.Optimizer | None = None
        self._batch_builder = BatchBuilder(policy, config)
        # Chains of the next iteration, sampled during the previous update.
        self._prefetched: Rollout | None = None
        # Agent whose engine has its own copy of the weights, which do not change during an update.
        self._prefetch_agent: Agent | None = None
        self._kl_coef = config.kl_coef
        self._next_index = 0
        self._replay: list[dict[str, float]] = []
        # Number of steps that this handle has yielded; they are not replayed when iteration continues.
        self._steps_yielded = 0
        self._prepared = False
        self._stopping = False
        self._unpaused: asyncio.Event | None = None
        self._paused = False
        self._iterating = False

    # --- interface of views ---

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self.run.path

    @property
    def records(self) -> list[dict[str, float]]:
        return self.run.records if self._prepared or not self._start_over else []

    @property
    def total(self) -> int:
        return self.config.steps

    def subscribe(self, callback: Callable[[dict[str, float]], None]) -> Callable[[], None]:
        """Register a callback that receives the record of each new step.

        Args:
            callback: Function of a record.

        Returns:
            A function that removes the callback.
        """
        return self.run.subscribe(callback)

    def figure(self, *names: str) -> Any:
        """Return a plotly figure of recorded metrics; see `Run.figure`."""
        return self.run.figure(*names)

    def stop(self) -> None:
        """Stop after the current iteration, which resumes if it is paused."""
        self._stopping = True
        self.resume()

    def pause(self) -> None:
        """Pause the running chains, and the loop after the current iteration."""
        self._paused = True
        if self._unpaused is not None:
            self._unpaused.clear()
        if self.rollout is not None:
            self.rollout.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        if self._unpaused is not None:
            self._unpaused.set()
        if self.rollout is not None:
            self.rollout.resume()

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """True if the run stops after the current iteration."""
        return self._stopping

    def __repr__(self) -> str:
        done = len(self.records)
        last = last_success(self.records)
        hint = "" if self._prepared else "; write `await` before it"
        return f"<training run, {done} of {self.total} steps done{last}, in {str(self.path)!r}{hint}>"

    # --- running ---

    def __await__(self) -> Generator[Any, Any, TrainRun]:
        return self._run_to_end().__await__()

    async def _run_to_end(self) -> TrainRun:
        async for _ in self:
            pass
        return self

    def _update_bar(self, step: TrainStep | None) -> None:
        """Advance the progress bar to a step; None closes it."""
        if step is None or not self._progress:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            # Start at the first executed step: replayed steps take no time and would distort the rate.
            self._bar = tqdm(total=self.total, initial=step.step - 1, desc="training", unit="step")
        self._bar.set_postfix(success=f"{step.success:.3f}", refresh=False)
        self._bar.update(step.step - self._bar.n)

    def __aiter__(self) -> TrainRun:
        return self

    async def __anext__(self) -> TrainStep:
        if self._iterating:
            raise SettingsError("this run is already being awaited somewhere else; there is one loop a run")
        self._iterating = True
        try:
            if not self._prepared:
                await self._prepare()
            if self._replay:
                record = self._replay.pop(0)
                self._steps_yielded += 1
                return TrainStep(int(record["step"]), record, replayed=True)
            stopping = any(await self._workers.all_gather(self._stopping))
            if stopping or self._next_index >= self.config.steps:
                self._update_bar(None)
                raise StopAsyncIteration
            if self._unpaused is not None:
                await self._unpaused.wait()
            try:
                step = await self._iterate(self._next_index)
            except BaseException:
                # The iteration may have been interrupted between updates. Continue from the checkpoint next time.
                self._prepared = False
                self._update_bar(None)
                raise
            self._steps_yielded += 1
            self._update_bar(step)
            return step
        finally:
            self._iterating = False

    async def _prepare(self) -> None:
        """Claim the folder, load the checkpoint or write the first one, and queue the recorded steps for replay."""
        policy, config, workers = self.policy, self.config, self._workers
        self._unpaused = asyncio.Event()
        if not self._paused:
            self._unpaused.set()
        known = await workers.run_on_main(lambda: self.run.claim(self.fingerprint, resume=not self._start_over))
        if not workers.is_main:
            self.run.invalidate()
        self._start_over = False
        self._optimizer = adamw(policy, config.lr)
        self._prefetched = None
        found = self.run.checkpoint if known else None
        if not workers.is_single and len({*await workers.all_gather((str(found), self.fingerprint["policy"]))}) > 1:
            raise RunError(
                f"the processes do not see one and the same run in {self.path}, or began with different weights; give "
                "all of them one folder and one policy"
            )
        if found is not None:
            if config.kl_coef > 0:
                self._batch_builder.reference = await run_in_thread(checkpoint.load_reference, self.run, policy)
            resumed = await run_in_thread(checkpoint.load, self.run, found, policy, self._optimizer, config.kl_coef)
            self._next_index, self._kl_coef, self._prefetched = resumed.steps, resumed.kl_coef, resumed.prefetched
        else:
            if config.kl_coef > 0:
                self._batch_builder.reference = reference = policy.reference()
                if not policy.has_adapter:
                    await workers.run_on_main(checkpoint.save_reference, self.run, reference)
            # Save a checkpoint before the first update, so that an interrupt during it can be recovered from.
            self._next_index = 0
            await workers.run_on_main(self._save_checkpoint, 0)
        await workers.run_on_main(self.run.truncate, self._next_index)
        if not workers.is_main:
            self.run.invalidate()
        self._steps_yielded = min(self._steps_yielded, self._next_index)
        self._replay = self.run.records[self._steps_yielded :]
        self._prepared = True

    async def _iterate(self, index: int) -> TrainStep:
        """Run one iteration: rollout, update, evaluation, record and checkpoint."""
        config = self.config
        began = time.perf_counter()
        rollout, self._prefetched = self._prefetched, None
        if rollout is None:
            rollout = await self._gather_rollouts(self._sample_current(index))
        rolled = time.perf_counter()
        # With overlap=1, the chains of the next iteration are sampled during this update.
        prefetched = await self._start_prefetch(index + 1)
        try:
            stats, rollout, lag = await self._update(index, rollout)
            updated = time.perf_counter()
            if prefetched is not None:
                self._prefetched = await self._finish_prefetch(index + 1, prefetched)
        finally:
            if prefetched is not None:
                prefetched.cancel()
                await wait_all([prefetched])
                if not prefetched.cancelled():
                    prefetched.exception()  # mark as retrieved: the original exception propagates
        evaluation = None
        if config.evaluate_every and ((index + 1) % config.evaluate_every == 0 or index + 1 == config.steps):
            await self.agent.engine.update(self.policy)  # evaluate the updated weights
            evaluation = await evaluate(self.agent, self.eval_tasks, max_concurrency=config.max_concurrency)
        record = self._make_record(index, rollout, stats, evaluation)
        if config.overlap:
            record["lag"] = lag
        if config.kl_coef > 0:
            record["kl_coef"] = self._kl_coef
        if config.kl_target is not None and stats is not None:
            self._kl_coef = losses.adaptive_kl_coef(
                self._kl_coef,
                stats.kl_reference,
                target=config.kl_target,
                steps=len(rollout.trajectories),
                horizon=config.kl_horizon,
            )
        record["seconds_rollout"] = rolled - began
        record["seconds_update"] = updated - rolled
        record["seconds"] = time.perf_counter() - began
        if record.get("unscored", 0.0) > 0.05:
            why = next((str(t.error) for t in rollout.trajectories if t.error), "")
            share = record["unscored"]
            warnings.warn(f"step {index + 1}: {share:.0%} of the chains were unscored. {why}", stacklevel=2)
        # With increasing difficulty, a falling reward does not indicate a collapse.
        collapse = None
        if not config.difficulty:
            collapse = detect_collapse([*self.run.records, record], config.tasks_per_step)
        if collapse is not None:
            warnings.warn(
                f"step {index + 1}: {collapse}. Try a smaller lr than {config.lr:g} or a lower max_kl (now "
                f"{config.max_kl}), in a new run that starts from the last good weights; this folder keeps only its "
                "last checkpoint",
                stacklevel=2,
            )
        try:
            await self._workers.run_on_main(self._persist, index, rollout, record)
            if not self._workers.is_main:
                self.run.records.append(record)
        finally:  # if interrupted after the record was written, the step still counts
            if record in self.run.records[-1:]:
                self.run.notify(record)
        self._next_index = index + 1
        return TrainStep(index + 1, record, stats, rollout, evaluation)

    # --- sampling ---

    async def _sample(self, index: int, agent: Agent) -> Rollout:
        """Sample this process's chains of an iteration, including those that replace filtered groups (`refill`)."""
        rollout = await self._run_rollout(agent, self._task_sampler.sample(index), index, "train")
        for again in range(1, self.config.refill + 1):
            left_out = drop_reasons(rollout.trajectories, self.config.filters)
            full = sum(
                any(t.reward is not None and t.id not in left_out for t in g.trajectories) for g in rollout.groups
            )
            missing = self.config.tasks_per_step - full
            if missing <= 0:
                break
            others = self._task_sampler.refill(index, again, missing, [g.trajectories[0].task for g in rollout.groups])
            if not others:
                break
            more = await self._run_rollout(agent, others, index, f"refill{again}")
            rollout = Rollout((*rollout.groups, *more.groups), rollout.seconds + more.seconds)
        return rollout

    async def _run_rollout(self, agent: Agent, tasks: list[Task], index: int, purpose: str) -> Rollout:
        """Sample this process's share of the chains, exposing the handle as `self.rollout` meanwhile."""
        config, workers = self.config, self._workers
        self.rollout = agent.rollout(
            tasks,
            config.group_size,
            max_concurrency=config.max_concurrency,
            budget=config.budget,
            group_budget=config.group_budget,
            index=index,
            purpose=purpose,
            share=(workers.rank, workers.size),
        )
        if self._paused:
            self.rollout.pause()
        try:
            return await self.rollout
        finally:
            self.rollout = None

    async def _sample_current(self, index: int) -> Rollout:
        """Update the engine to the current weights, then `_sample`."""
        await self.agent.engine.update(self.policy)
        return await self._sample(index, self.agent)

    async def _gather_rollouts(self, sampling: Awaitable[Rollout]) -> Rollout:
        """Sample on every process and collect all chains in task order. If one process fails, all raise."""
        if self._workers.is_single:
            return await sampling
        mine, failed = None, None
        try:
            mine = await sampling
        except Exception as error:
            failed = error
        parts = await self._workers.all_gather_or_raise(mine, failed)
        size = self._workers.size
        count = sum(len(part.groups) for part in parts)
        groups = tuple(parts[i % size].groups[i // size] for i in range(count))
        return Rollout(groups, max(part.seconds for part in parts))

    async def _start_prefetch(self, index: int) -> asyncio.Task[Rollout] | None:
        """Start sampling the chains of an iteration from the current weights, unaffected by the coming update.

        Returns:
            The task that samples them; None without overlap, or if there is no such iteration.

        Raises:
            SettingsError: If the engine shares the policy's weights and is not a `LocalEngine`.
        """
        config = self.config
        if not config.overlap or index >= config.steps:
            return None
        engine = self.agent.engine
        agent = self.agent
        if getattr(engine, "policy", None) is self.policy:  # the update is about to change the engine's weights
            if not isinstance(engine, LocalEngine):
                raise SettingsError(f"overlap=1 with {engine!r}, which shares the policy's weights; use LocalEngine")
            if self._prefetch_agent is None:
                twin = await run_in_thread(self.policy.copy)
                # dataclasses.replace keeps the agent's state, such as its last run and the warnings it has issued.
                self._prefetch_agent = dataclasses.replace(agent, engine=LocalEngine(twin, slots=engine.slots))
            agent = self._prefetch_agent
            await run_in_thread(self._copy_weights, agent.engine)
        else:
            await engine.update(self.policy)
        return asyncio.create_task(self._sample(index, agent), name=f"agentfly-ahead-{index + 1}")

    def _copy_weights(self, engine: Any) -> None:
        """Copy the policy's weights and version to the policy of an engine."""
        engine.policy.load_state(self.policy.state())
        engine.policy.version = self.policy.version

    async def _finish_prefetch(self, index: int, prefetched: asyncio.Task[Rollout]) -> Rollout | None:
        """Wait for the prefetched chains. If they failed, warn and return None."""
        try:
            return await self._gather_rollouts(prefetched)
        except Exception as error:  # keep the completed step
            warnings.warn(
                f"the chains of step {index + 1}, sampled ahead, failed ({type(error).__name__}: {error}); they are "
                "sampled again",
                stacklevel=2,
            )
            return None

    async def _restore_checkpoint(self) -> None:
        """Load the last checkpoint, so that training does not continue with diverged weights."""
        found = self.run.checkpoint
        assert self._optimizer is not None
        if found is not None:
            config = self.config
            await run_in_thread(checkpoint.load, self.run, found, self.policy, self._optimizer, config.kl_coef)

    # --- updating ---

    async def _update(self, index: int, rollout: Rollout) -> tuple[Stats | None, Rollout, float]:
        """Build the batch of an iteration and update the policy.

        Returns:
            The statistics of the update, or None if nothing was left to train on; the rollout with the reasons of the
            dropped chains; and the largest age of a sampled token, in updates.

        Raises:
            TrainingError: If a gradient is not finite or the policy diverged. The last checkpoint is loaded first.
            BatchError: If the chains cannot be trained on.
        """
        config, policy = self.config, self.policy
        assert self._optimizer is not None
        for group, lr in zip(self._optimizer.param_groups, self._learning_rates(index), strict=True):
            group["lr"] = lr
        try:
            try:
                batch = await run_in_thread(self._batch_builder.build, rollout, self._kl_coef)
            except EmptyBatch as error:
                if not any(d.filtered for d in error.dropped):
                    raise
                said = ", ".join(f"{n} {reason}" for reason, n in drop_counts(error.dropped).items())
                warnings.warn(f"step {index + 1}: nothing was left to train on ({said}); no update", stacklevel=2)
                return None, rollout.with_drop_reasons(error.dropped), 0.0
            rollout = rollout.with_drop_reasons(batch.dropped)
            lag = float(policy.version - batch.versions[batch.mask].min())
            stats = await ppo_step_async(
                policy,
                self._optimizer,
                batch,
                loss=config.loss,
                aggregate=config.aggregate,
                denominator=config.denominator,
                clip=config.clip,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
                value_coef=config.value_coef,
                value_clip=config.value_clip,
                kl_coef=self._kl_coef,
                kl_kind=config.kl_kind,
                kl_in=config.kl_in,
                kl_weighted=config.kl_weighted,
                reference=self._batch_builder.reference,
                entropy_coef=config.entropy_coef,
                epochs=config.epochs,
                minibatch=config.minibatch,
                micro_tokens=config.micro_tokens,
                max_grad_norm=config.max_grad_norm,
                target_kl=config.target_kl,
                old_logprobs="engine"
                if config.overlap and config.old_logprobs == "auto" and config.correction is None
                else config.old_logprobs,
                correction=config.correction,
                max_lag=None,  # the loop bounds the age of its chains itself
                autocast=config.autocast,
                checkpointing=config.checkpointing,
                accelerator=self._workers.accelerator,
                seed=seeds.derive(config.seed, "update", index),
            )
            if config.max_kl is not None and stats.approx_kl > config.max_kl:
                raise TrainingError(
                    f"it moved the policy by {stats.approx_kl:.3g} nats a token (more than max_kl={config.max_kl}): it "
                    f"has diverged. Try a smaller lr than {config.lr:g}, target_kl=0.05, or fewer epochs"
                )
        except (TrainingError, BatchError) as error:
            kept = f"steps 1 to {index} are kept in {self.path}" if index else f"no step was kept in {self.path}"
            if isinstance(error, TrainingError):
                kept += "; the policy has the weights of its last checkpoint"
                await self._restore_checkpoint()
            raise type(error)(f"step {index + 1}: {error} ({kept})") from error
        return stats, rollout, lag

    def _learning_rates(self, index: int) -> list[float]:
        """Return the learning rate of each parameter group in an iteration: linear from `lr` to `lr_end`."""
        assert self._optimizer is not None
        config = self.config
        end = config.lr if config.lr_end is None else config.lr_end
        share = index / max(1, config.steps - 1)
        now = config.lr + (end - config.lr) * share
        # The rate of the value head is a fixed multiple of the policy's.
        return [now * group.setdefault("scale", group["lr"] / config.lr) for group in self._optimizer.param_groups]

    def _make_record(
        self, index: int, rollout: Rollout, stats: Stats | None, evaluation: Evaluation | None
    ) -> dict[str, float]:
        """Collect the metrics of an iteration, leaving out statistics of the update that are not finite."""
        record: dict[str, float] = {"step": index + 1}
        record |= {k: v for k, v in rollout.summary().items() if k != "seconds"}
        keep = (
            "loss",
            "policy_loss",
            "value_loss",
            "approx_kl",
            "clip_fraction",
            "entropy",
            "grad_norm",
            "lr",
            "updates",
        )
        more = (
            "explained_variance",
            "kl_reference",
            "effective_sample_size",
            "ratio_max",
            "sampler_gap",
            "dropped_groups",
            "advantage_mean",
            "reward_std",
        )
        numbers = {"updates": 0} if stats is None else stats.scalars()
        record |= {k: numbers[k] for k in (*keep, *more) if k in numbers and math.isfinite(numbers[k])}
        record["version"] = self.policy.version
        reasons = [t.dropped for t in rollout.trajectories if t.dropped is not None]
        record["dropped"] = len(reasons)
        record |= {f"dropped: {reason}": reasons.count(reason) for reason in sorted(set(reasons))[:_MAX_REASONS]}
        if evaluation is not None:
            record |= {
                "eval_success": evaluation.success,
                "eval_low": evaluation.low,
                "eval_high": evaluation.high,
            }
        return record

    # --- disk ---

    def _persist(self, index: int, rollout: Rollout, record: dict[str, float]) -> None:
        """Write the rollout (if requested), the record and the checkpoint (if due) of an iteration."""
        if self.config.save_rollouts:
            rollout.save(self.run.rollout_path(f"step-{index + 1:05d}"))
        # Write the record before the checkpoint: resuming deletes records that the checkpoint does not include, but
        # could not recover a missing one.
        self.run.write(record)
        if (index + 1) % self.config.checkpoint_every == 0 or index + 1 == self.config.steps:
            self._save_checkpoint(index + 1)

    def _save_checkpoint(self, steps: int) -> None:
        assert self._optimizer is not None
        checkpoint.save(self.run, self.policy, self._optimizer, steps, self._kl_coef, self._prefetched)
