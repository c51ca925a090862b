"""The loop: roll out, score, update, record, again. Knows nothing of how each of them is done.

A run is a folder that says what it is. Each iteration ends with its line in `steps.jsonl` and a checkpoint, so whatever
stops the loop (an interrupt, a break, a crash) stops it between two iterations, and the same call goes on from there.
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

from agentfly_kit import _html, losses, seeds
from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.agent.agent import Agent, RolloutHandle
from agentfly_kit.agent.rollout import Rollout
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
from agentfly_kit.trainer.run_dir import Run, last_success, recent_steps_table
from agentfly_kit.trainer.task_sampler import TaskSampler
from agentfly_kit.types import Stats, Task

# Of a record: a filter that says something else of each chain would make a column of each.
_MAX_REASONS = 16


@dataclass(frozen=True)
class TrainStep:
    """What one iteration did. A step that was replayed from the record has only its numbers.

    Attributes:
        step: From 1.
        record: The numbers of the iteration, as written to the run's folder.
        stats: What the update did; None if nothing was left to train on, or if the step was replayed.
        rollout: The chains of the iteration; None if the step was replayed.
        evaluation: The evaluation after the iteration, if there was one.
        replayed: Whether the step was read from the run's folder instead of made.
    """

    step: int
    record: dict[str, float] = field(repr=False)
    stats: Stats | None = field(default=None, repr=False)
    rollout: Rollout | None = field(default=None, repr=False)
    evaluation: Evaluation | None = None
    replayed: bool = False

    @property
    def success(self) -> float:
        """Of the sampled chains that this step was trained on; NaN if none was scored."""
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
    """A training run. `await` it, or `async for step in run`; it starts then.

    run: a folder. An unfinished run in it of the same config, tasks, tools, reward and starting policy continues; a
        finished one replays its recorded steps and loads its last weights. None is a fresh temporary folder.
    resume: False throws away what the folder holds and starts anew.
    progress: a bar with rate and time left (for curves, display `widgets.TrainView(run)` before the `await`).
    accelerator: an accelerate.Accelerator of several processes, each of which makes this very call. The tasks of an
        iteration are dealt to them, the rows of an update too (see `ppo_step`), and the first one writes the folder,
        which all must see. Steps, records and weights are those of one process, up to the order of sums.
    Raises:  RunMismatch, at once, if the folder holds another run: it shows the difference.
    """
    given = list(eval_tasks or ())
    return TrainRun(agent, policy, list(tasks), config or TrainConfig(), run, given, resume, progress, accelerator)


class TrainRun:
    """A handle. After an interrupt or a break, going on with the same handle, or calling `train` again, continues.

    `stop()`, `pause()` and `resume()` control it, and `subscribe()` reports the numbers of each new step.

    Attributes:
        records: The numbers of each step so far.
        total: Number of steps of the whole run.
        rollout: The rollout that runs now, for a live view; None between rollouts.
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
        agent._check_tasks([*tasks, *eval_tasks])
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
        # The next iteration's chains, sampled while the last one was updated.
        self._prefetched: Rollout | None = None
        # With an engine of its own weights, which stay as they are while the policy learns.
        self._prefetch_agent: Agent | None = None
        self._kl_coef = config.kl_coef
        self._next_index = 0
        self._replay: list[dict[str, float]] = []
        # Steps that this handle has given out; going on with it replays none of them.
        self._steps_yielded = 0
        self._prepared = False
        self._stopping = False
        self._unpaused: asyncio.Event | None = None
        self._paused = False
        self._iterating = False

    # --- what a view needs ---

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def records(self) -> list[dict[str, float]]:
        return self.run.records if self._prepared or not self._start_over else []

    @property
    def total(self) -> int:
        return self.config.steps

    def subscribe(self, callback: Callable[[dict[str, float]], None]) -> Callable[[], None]:
        """Be called with each new step's numbers. Returns what ends it."""
        return self.run.subscribe(callback)

    def figure(self, *names: str) -> Any:
        return self.run.figure(*names)

    def stop(self) -> None:
        """End after the iteration that runs now."""
        self._stopping = True
        self.resume()

    def pause(self) -> None:
        """Hold the chains that run, and the loop after this iteration."""
        self._paused = True
        if self._unpaused is not None:
            self._unpaused.clear()
        if self.rollout is not None:
            self.rollout.pause()

    def resume(self) -> None:
        self._paused = False
        if self._unpaused is not None:
            self._unpaused.set()
        if self.rollout is not None:
            self.rollout.resume()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def stopping(self) -> bool:
        """Whether it ends after the iteration that runs now."""
        return self._stopping

    def __repr__(self) -> str:
        done = len(self.records)
        last = last_success(self.records)
        hint = "" if self._prepared else "; write `await` before it"
        return f"<training run, {done} of {self.total} steps done{last}, in {str(self.path)!r}{hint}>"

    def _repr_html_(self) -> str:
        return _html.heading(self) + recent_steps_table(self.records)

    # --- running ---

    def __await__(self) -> Generator[Any, Any, TrainRun]:
        return self._run_to_end().__await__()

    async def _run_to_end(self) -> TrainRun:
        async for _ in self:
            pass
        return self

    def _update_bar(self, step: TrainStep | None) -> None:
        """Move the bar to a step; None takes it away."""
        if step is None or not self._progress:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            # What was replayed took no time: the rate is that of the steps that ran.
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
                # The weights may be those of half an iteration: whoever goes on begins at the checkpoint.
                self._prepared = False
                self._update_bar(None)
                raise
            self._steps_yielded += 1
            self._update_bar(step)
            return step
        finally:
            self._iterating = False

    async def _prepare(self) -> None:
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
            # Before the first update: whoever is interrupted in it has something to begin again from.
            self._next_index = 0
            await workers.run_on_main(self._save_checkpoint, 0)
        await workers.run_on_main(self.run.truncate, self._next_index)
        if not workers.is_main:
            self.run.invalidate()
        self._steps_yielded = min(self._steps_yielded, self._next_index)
        self._replay = self.run.records[self._steps_yielded :]
        self._prepared = True

    async def _iterate(self, index: int) -> TrainStep:
        config = self.config
        began = time.perf_counter()
        rollout, self._prefetched = self._prefetched, None
        if rollout is None:
            rollout = await self._gather_rollouts(self._sample_current(index))
        rolled = time.perf_counter()
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
                    prefetched.exception()  # seen: what ended the step is what is raised
        evaluation = None
        if config.evaluate_every and ((index + 1) % config.evaluate_every == 0 or index + 1 == config.steps):
            await self.agent.engine.update(self.policy)  # what is evaluated is what this step made
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
        # Harder tasks lower the reward by themselves.
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
        finally:  # who is interrupted here has the step all the same
            if record in self.run.records[-1:]:
                self.run.notify(record)
        self._next_index = index + 1
        return TrainStep(index + 1, record, stats, rollout, evaluation)

    # --- sampling ---

    async def _sample(self, index: int, agent: Agent) -> Rollout:
        """This process's chains of an iteration, with those that are sampled in the place of filtered groups."""
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
        """As `_sample`, from the weights as they are now."""
        await self.agent.engine.update(self.policy)
        return await self._sample(index, self.agent)

    async def _gather_rollouts(self, sampling: Awaitable[Rollout]) -> Rollout:
        """The chains of all processes, in the order of the tasks."""
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
        """Begin to sample an iteration's chains from the weights as they are now, whatever becomes of them."""
        config = self.config
        if not config.overlap or index >= config.steps:
            return None
        engine = self.agent.engine
        agent = self.agent
        if getattr(engine, "policy", None) is self.policy:  # it samples from the very weights that are about to change
            if not isinstance(engine, LocalEngine):
                raise SettingsError(f"overlap=1 with {engine!r}, which shares the policy's weights; use LocalEngine")
            if self._prefetch_agent is None:
                twin = await run_in_thread(self.policy.copy)
                # Still the same agent: it knows its last run, and what it warned of.
                self._prefetch_agent = dataclasses.replace(agent, engine=LocalEngine(twin, slots=engine.slots))
            agent = self._prefetch_agent
            await run_in_thread(self._copy_weights, agent.engine)
        else:
            await engine.update(self.policy)
        return asyncio.create_task(self._sample(index, agent), name=f"agentfly-ahead-{index + 1}")

    def _copy_weights(self, engine: Any) -> None:
        engine.policy.load_state(self.policy.state())
        engine.policy.version = self.policy.version

    async def _finish_prefetch(self, index: int, prefetched: asyncio.Task[Rollout]) -> Rollout | None:
        try:
            return await self._gather_rollouts(prefetched)
        except Exception as error:  # the step that was made meanwhile is kept
            warnings.warn(
                f"the chains of step {index + 1}, sampled ahead, failed ({type(error).__name__}: {error}); they are "
                "sampled again",
                stacklevel=2,
            )
            return None

    async def _restore_checkpoint(self) -> None:
        """Put the last checkpoint's weights in place: nobody shall go on with those that diverged."""
        found = self.run.checkpoint
        assert self._optimizer is not None
        if found is not None:
            config = self.config
            await run_in_thread(checkpoint.load, self.run, found, self.policy, self._optimizer, config.kl_coef)

    # --- updating ---

    async def _update(self, index: int, rollout: Rollout) -> tuple[Stats | None, Rollout, float]:
        """The step's numbers, the chains with what was left out of it, and how many updates old their weights were."""
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
                max_lag=None,  # it knows how old its chains are
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
        assert self._optimizer is not None
        config = self.config
        end = config.lr if config.lr_end is None else config.lr_end
        share = index / max(1, config.steps - 1)
        now = config.lr + (end - config.lr) * share
        # The value head keeps its own multiple of the policy's rate.
        return [now * group.setdefault("scale", group["lr"] / config.lr) for group in self._optimizer.param_groups]

    def _make_record(
        self, index: int, rollout: Rollout, stats: Stats | None, evaluation: Evaluation | None
    ) -> dict[str, float]:
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
        if self.config.save_rollouts:
            rollout.save(self.run.rollout_path(f"step-{index + 1:05d}"))
        # The line comes first: one without a checkpoint is cut off by whoever goes on, one that is missing is lost.
        self.run.write(record)
        if (index + 1) % self.config.checkpoint_every == 0 or index + 1 == self.config.steps:
            self._save_checkpoint(index + 1)

    def _save_checkpoint(self, steps: int) -> None:
        assert self._optimizer is not None
        checkpoint.save(self.run, self.policy, self._optimizer, steps, self._kl_coef, self._prefetched)
