"""The training loop: sampling of rollouts, advantages, updates of the policy, and records of metrics.

Each iteration appends a line to `steps.jsonl`. A checkpoint is written every `checkpoint_every` iterations. After an
interrupt or a crash, calling `train` with the same arguments continues from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly_kit import losses
from agentfly_kit._async.pending_call import Handle, run_in_thread
from agentfly_kit._display import Displayable, explain_interrupt, show_progress
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.request import GroupWorkers
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.agent.settings import task_list
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import (
    AgentFlyError,
    RunError,
    SettingsError,
    TrainingError,
    check_instance,
    checks_keywords,
)
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.trainer import checkpoint
from agentfly_kit.trainer.checkpoint import LoopState
from agentfly_kit.trainer.checks import check_run, check_splits
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.fingerprint import fingerprint
from agentfly_kit.trainer.run_dir import Run, describe_success
from agentfly_kit.trainer.sampling import RolloutSampler
from agentfly_kit.trainer.step import TrainStep, make_record, warn_about_step
from agentfly_kit.trainer.tracking import TrackerSet
from agentfly_kit.trainer.updates import UpdateProcesses, Updater
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.diagnosis.findings import Findings


@checks_keywords
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
    teacher: Policy | Engine | None = None,
    reference: Policy | None = None,
    workers: GroupWorkers | None = None,
    learner: UpdateProcesses | None = None,
) -> TrainRun:
    """Create a training run. It starts with `await run` or `async for step in run`.

    Args:
        agent: Agent that samples the chains with `policy`. It needs a reward unless advantage="none".
        policy: Policy to train, starting from its current weights.
        tasks: Training tasks, such as `tasks.train` if the tasks have splits.
        config: Settings; None uses the defaults of `TrainConfig`.
        run: Folder of the run. If it contains a run with the same config, agent, tasks and initial policy, that run
            is continued. If that run is complete, its recorded steps are replayed and its final weights are loaded;
            a larger `config.steps` then adds iterations, for which `lr` and `lr_end` may differ. None creates a
            temporary folder.
        eval_tasks: Tasks to evaluate every `config.evaluate_every` iterations; this setting must be above 0.
        resume: Whether to continue a run in the folder. False discards its contents and starts from scratch.
        progress: Whether to show a progress bar, which stays visible. For curves, display `widgets.TrainView(run)`.
        accelerator: An accelerate.Accelerator with several processes, each of which must make the same call. The tasks
            of an iteration and the rows of an update are distributed over the processes. All processes must have access
            to the folder. Results equal those of one process up to rounding. By default, the accelerator of a sharded
            policy is used.
        teacher: Model to distill from, with the vocabulary of `policy`: a `Policy`, a `VLLMEngine`, or an
            `OpenAIEngine` connected to a vLLM server. It is not trained. See `config.teacher_coef`.
        reference: Reference policy for the KL penalty, such as one after imitation; `policy.reference()` by default.
        workers: Processes created by `af.ray.workers` for rollouts and evaluations. None runs them in this process. The
            records are the same in both cases.
        learner: Processes created by `af.ray.learner` that update the policy. None updates it in this process.

    Returns:
        A handle for the run. In each record, `metric_<name>` is the mean of a metric over the scored chains, and
        `eval_metric_<name>` is its mean in the evaluation.

    Raises:
        RunMismatch: If the folder contains a different run, or a function of the agent was redefined after this call.
        RunError: If the folder is damaged or contains something other than a run.
        SettingsError: If the settings are inconsistent with the agent, the policy, the tasks or the accelerator.
        TaskError: If there are no tasks, or if they contain tasks of other splits in addition to the split "train".
    """
    check_instance("agent", agent, Agent, "an af.Agent")
    check_instance("policy", policy, Policy, "an af.Policy")
    check_instance("config", config, TrainConfig | None, "an af.TrainConfig, or None for the defaults")
    check_instance("run", run, str | os.PathLike | None, "a folder, or None for a temporary folder")
    check_splits(tasks)
    group = WorkerGroup(accelerator or policy.accelerator)
    sampler = RolloutSampler(agent, policy, task_list(tasks), config or TrainConfig(), group, workers)
    updater = Updater(sampler, teacher, reference, learner)
    return TrainRun(updater, task_list(eval_tasks) if eval_tasks else [], run, resume, progress)


class TrainRun(Handle["TrainRun"], Displayable):
    """Handle for a training run.

    To continue the run after an interrupt, an error, `stop()` or a `break`, await or iterate over the same handle, or
    call `train` again. `stop()`, `pause()` and `resume()` control the run, and `subscribe()` registers callbacks for
    new records.

    Attributes:
        run: Folder of the run.
        records: Records of the steps so far.
        total: Total number of steps of the run.
        rollout: Training rollout in progress, for live views; None between rollouts.
        latest_rollout: Step number and handle of the last training rollout that was started, or None.
        stopping: True if the run stops after the current iteration.
        state: "not started", "running", "paused", "stopping", "done", "stopped", "interrupted" or "failed".
        iterating: True during an iteration. Between iterations, another handle may continue the run.
        error: Exception that ended the run, or None.
        resumed_from: Number of completed steps when the run was last loaded from its folder.
    """

    def __init__(
        self, updater: Updater, eval_tasks: list[Task], run: str | Path | None, resume: bool, progress: bool
    ) -> None:
        sampler = updater.sampler
        check_run(sampler, eval_tasks, run)
        self.agent, self.policy, self.config = sampler.agent, sampler.policy, sampler.config
        self.eval_tasks = eval_tasks
        self.total = self.config.steps
        self._sampler, self._updater, self._workers = sampler, updater, sampler.workers
        self._progress = self._watched = progress
        self._bar: Any = None
        self._temporary = run is None
        if run is None:
            run = tempfile.mkdtemp(prefix="agentfly-run-")
            weakref.finalize(self, shutil.rmtree, run, ignore_errors=True)
            resume = False
        self.run = Run(run)
        self._trackers = TrackerSet()
        self.run.subscribe(self._trackers.step)
        self._start_over = not resume
        # Store the initial fingerprint for each folder, so that a second call with the trained policy matches the run.
        key = str(self.path.resolve())
        trained = self.policy.version > 0 and bool(self.policy.run_fingerprints)
        if self._start_over:
            self.policy.run_fingerprints.pop(key, None)
        self._start = self.policy.run_fingerprints.setdefault(key, self.policy.fingerprint())
        if not self._check_identity() and trained and self._workers.is_main:
            warnings.warn(
                f"this run starts from trained weights (version {self.policy.version}); for the original weights, load "
                "the policy again with af.Policy.load, or train a policy.copy() made before the first training",
                stacklevel=4,
            )
        # Rollout and statistics of the last step that this handle executed, for `diagnose`.
        self._latest: tuple[Rollout, Stats | None] | None = None
        # Number of completed iterations, current KL coefficient, and prefetched chains.
        self._state = LoopState(0, self.config.kl_coef)
        # Number of steps that this handle has yielded and does not yield again when the run continues.
        self._steps_yielded = 0
        self._prepared = self.iterating = self.stopping = False
        self.error: Exception | None = None
        self.resumed_from = 0
        # Number of steps in the last checkpoint; None until a checkpoint is loaded or written.
        self._saved_steps: int | None = None
        # Value of `state` while no loop over this handle is in progress.
        self._outcome = "not started"
        self._loop: object | None = None  # identifies the current loop over this handle
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    def _check_identity(self) -> bool:
        """Return True if the folder contains this run. Raise RunMismatch if it contains another run."""
        self.fingerprint = fingerprint(self._sampler, self._start, self._updater.teacher, self._updater.reference)
        return self.run.check(self.fingerprint, resume=not self._start_over)

    # --- state and control ---

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self.run.path

    @property
    def records(self) -> list[dict[str, float]]:
        return self.run.records if self._prepared or not self._start_over else []

    @property
    def rollout(self) -> RolloutHandle | None:
        return next(reversed(self._sampler.running.values()), None)

    @property
    def latest_rollout(self) -> tuple[int, RolloutHandle] | None:
        return self._sampler.latest

    @property
    def state(self) -> str:
        if self._loop is None:
            return self._outcome
        return "stopping" if self.stopping else "paused" if self.paused else "running"

    def describe_kept(self) -> str:
        """Describe which steps are saved and which must be repeated when the run continues."""
        done = len(self.records)
        saved = done if self._saved_steps is None else self._saved_steps
        kept = f"{_steps(1, saved)} and the checkpoint are kept in {str(self.path)!r}" if saved else "no step is kept"
        again = f"; {_steps(saved + 1, done)} will run again, because checkpoint_every={self.config.checkpoint_every}"
        temporary = " until this handle is deleted; run= sets a permanent folder" if saved and self._temporary else ""
        return kept + temporary + (again if saved < done else "")

    def subscribe(self, callback: Callable[[dict[str, float]], object]) -> Callable[[], None]:
        """Register a callback that receives the record of each new step. Return a function that unregisters it."""
        self._watched = True
        return self.run.subscribe(callback)

    def track(self, *trackers: Any) -> TrainRun:
        """Copy the records to other tools, such as `af.trackers.TensorBoard()`, and return this run.

        A tracker is an object with the methods of `af.trackers.Tracker`, or a function that is called with each record.

        No record is sent twice, even if the run continues after an interrupt. If a tracker raises an exception, a
        warning is issued and the run continues without it. With several processes, only the main process sends records.

        Raises:
            SettingsError: If an argument is not a tracker, or was already added.
        """
        if self._workers.is_main:
            self._trackers.add(trackers)
        return self

    def diagnose(self) -> Findings:
        """Apply `af.diagnose` to the last step and all records, to find out why the policy does not learn."""
        from agentfly_kit.diagnosis.diagnose import diagnose

        if self._latest is None:
            return self.run.diagnose()
        rollout, stats = self._latest
        return diagnose(rollout, stats=stats, records=self.records)

    def stop(self) -> None:
        """Stop after the current iteration. A paused run is resumed first."""
        self.stopping = True
        self.resume()

    def pause(self) -> None:
        """Pause the running chains before their next action or tool call, and the loop after the current iteration."""
        self._unpaused.clear()
        self._sampler.pause()

    def resume(self) -> None:
        """Resume the run after `pause`."""
        self._unpaused.set()
        self._sampler.resume()

    @property
    def paused(self) -> bool:
        return not self._unpaused.is_set()

    def __repr__(self) -> str:
        done = len(self.records)
        success = describe_success(self.records)
        hint = f"; {self.state}, await it again to continue"
        if self._loop is not None or self._outcome in ("not started", "done"):
            hints = {"not started": "write `await` before it", "done": "complete, nothing is left to train"}
            hint = f"; {hints.get(self.state, self.state)}"
        version = self.run.start_version
        start = f", from trained weights (version {version})" if version and not self._start_over else ""
        return f"<training run, {done} of {self.total} steps done{success}, in {str(self.path)!r}{start}{hint}>"

    # --- running ---

    async def _wait(self) -> TrainRun:
        line = show_progress(lambda: f"training, {len(self.records)} of {self.total} steps done")
        with contextlib.nullcontext() if self._watched else line:
            async for _ in self:
                pass
        return self

    def _update_bar(self, step: TrainStep | None) -> None:
        """Advance the progress bar to the given step, or close it if `step` is None."""
        if step is not None and self._progress:
            if self._bar is None:
                from tqdm.auto import tqdm

                # Start at the first step that is executed, because replayed steps would distort the rate.
                self._bar = tqdm(total=self.total, initial=step.step - 1, desc="training", unit="step")
            self._bar.set_postfix(success=f"{step.success:.3f}", refresh=False)
            self._bar.update(step.step - self._bar.n)
        elif self._bar is not None:
            self._bar.close()
            self._bar = None

    async def __aiter__(self) -> AsyncIterator[TrainStep]:
        self._check_identity()  # functions may have changed since `train` was called
        self._check_not_iterating()
        loop = self._loop = object()
        outcome, self.error = "stopped", None  # also the outcome if the caller's loop ends with `break`
        try:
            while (step := await self._next_step()) is not None:
                yield step
            outcome = "done" if self._state.steps >= self.total else "stopped"
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            outcome = "interrupted"
            explain_interrupt(
                error,
                f"training was interrupted after step {len(self.records)} of {self.total}: {self.describe_kept()}. "
                f"To continue, {'' if self._temporary else 'run the cell again, or '}await the same run",
            )
            raise
        except Exception as error:
            outcome, self.error = "failed", error
            raise
        finally:
            try:
                if self._loop is loop:  # no other loop has started in the meantime
                    await self._sampler.cancel_ahead()
            finally:
                if self._loop is loop:
                    self._outcome, self._loop, self.stopping = outcome, None, False
                    self._trackers.end(outcome)
                    self.run.lock.release(self)

    def _check_not_iterating(self) -> None:
        if self.iterating:
            raise SettingsError("this run is already being awaited elsewhere; wait until that call has ended")

    async def _next_step(self) -> TrainStep | None:
        """Run or replay the next step. Return None if the run is complete or was stopped."""
        self._check_not_iterating()
        self.iterating = True
        try:
            if not await self._workers.run_on_main(self.run.lock.acquire, self):  # another handle continued it
                self.run.reload()
                self._prepared = False
            if not self._prepared:
                await self._sampler.cancel_ahead()
                await self._prepare()
            self._trackers.begin(self.run)
            if self._steps_yielded < self._state.steps:
                record = self.run.records[self._steps_yielded]
                step = TrainStep(int(record["step"]), record, replayed=True)
            else:
                if any(await self._workers.all_gather(self.stopping)) or self._state.steps >= self.total:
                    self._update_bar(None)
                    return None
                await self._unpaused.wait()
                try:
                    step = await self._iterate(self._state.steps)
                except BaseException:
                    # Reload the checkpoint next time, because the update may be incomplete.
                    self._prepared = False
                    self._update_bar(None)
                    await self._sampler.cancel_ahead()
                    raise
                self._update_bar(step)
            self._steps_yielded += 1
            return step
        finally:
            self.iterating = False
            self.run.lock.mark_read()

    async def _prepare(self) -> None:
        """Prepare the folder of the run, and load the last checkpoint or write the first one."""
        policy, workers, teacher = self.policy, self._workers, self._updater.teacher
        if isinstance(teacher, Engine):
            await teacher.check_teacher(self.agent.chat, self.agent.engine.max_length)
        known = await workers.run_on_main(
            lambda: self.run.claim(self.fingerprint, resume=not self._start_over, start_version=policy.version)
        )
        self._start_over = False
        found = self.run.checkpoint if known else None
        if not workers.is_single and len({*await workers.all_gather((str(found), self.fingerprint["policy"]))}) > 1:
            raise RunError(
                f"all processes must find the same run in {self.path} and start from the same weights; use a shared "
                "folder, and load the same policy in every process"
            )
        self._state = await self._updater.prepare(self.run, found)
        if found is not None and self._state.steps >= self.total > self._steps_yielded and workers.is_main:
            warnings.warn(
                f"the run in {str(self.path)!r} is complete: its steps are replayed and nothing is trained; to "
                "continue it, use more steps; to train again, use another folder or resume=False",
                stacklevel=4,
            )
        await workers.run_on_main(self.run.truncate, self._state.steps)
        if not workers.is_main:
            self.run.reload()  # reload now, because the main process may write the next record at any time
        self._steps_yielded = min(self._steps_yielded, self._state.steps)
        self.resumed_from = self._saved_steps = self._state.steps
        self._prepared = True

    async def _iterate(self, index: int) -> TrainStep:
        """Run one iteration: rollout, update, evaluation, record and checkpoint."""
        config = self.config
        began = time.perf_counter()
        rollout = self._state.prefetched
        if rollout is None:
            rollout = await self._sampler.sample(index)
        rolled = time.perf_counter()

        # With `overlap`, the chains of the next iterations are sampled during this update.
        await self._sampler.start_ahead(index)
        stats, rollout, lag = await self._update(index, rollout)
        updated = time.perf_counter()
        prefetched = await self._sampler.finish_ahead(index + 1)

        evaluation = None
        if config.evaluate_every and ((index + 1) % config.evaluate_every == 0 or index + 1 == self.total):
            evaluation = await self._sampler.evaluate(self.eval_tasks)

        kl_coef = self._state.kl_coef
        record = make_record(index + 1, self.policy.version, rollout, stats, evaluation, config)
        if config.overlap:
            record["lag"] = lag
        if config.kl_coef > 0:
            record["kl_coef"] = kl_coef
        if config.kl_target is not None and stats is not None:
            kl_coef = losses.adaptive_kl_coef(
                kl_coef,
                stats.kl_reference,
                target=config.kl_target,
                steps=len(rollout.trajectories),
                horizon=config.kl_horizon,
            )
        record["seconds_rollout"], record["seconds_update"] = rolled - began, updated - rolled
        record["seconds"] = time.perf_counter() - began
        warn_about_step(record, rollout, self.run.records, config)
        self._latest = rollout, stats

        state = LoopState(index + 1, kl_coef, prefetched)
        due = state.steps % config.checkpoint_every == 0 or state.steps == self.total
        saved = await self._updater.gather() if due or evaluation is not None else (self.policy, None)
        try:
            await self._workers.run_on_main(self._persist, state, rollout, record, due, *saved)
            if not self._workers.is_main:
                self.run.records.append(record)
        finally:  # notify even if interrupted, provided that the record was written
            if record in self.run.records[-1:]:
                self.run.notify(record)
        self._state = state
        return TrainStep(index + 1, record, stats, rollout, evaluation)

    async def _update(self, index: int, rollout: Rollout) -> tuple[Stats | None, Rollout, float]:
        """Build the batch and update the policy. If this fails, save the rollout.

        Return the statistics (None if there was nothing to train on), the rollout with drop reasons, and the number of
        updates since the oldest token of the batch was sampled.
        """
        updater, kl_coef = self._updater, self._state.kl_coef
        try:
            batch, rollout = await updater.build(index, rollout, kl_coef)
            stats, lag = (None, 0.0) if batch is None else await updater.step(index, batch, kl_coef)
        except AgentFlyError as error:
            kept = f"steps 1 to {index} are kept in {self.path}" if index else f"no step was kept in {self.path}"
            if isinstance(error, TrainingError) and (found := self.run.checkpoint) is not None:
                # Restore the weights of the last checkpoint, because the update may have diverged.
                await run_in_thread(checkpoint.load, self.run, found, self.policy, updater.optimizer)
                kept += "; the policy has the weights of its last checkpoint"
            if self._workers.is_main:
                with contextlib.suppress(RunError):  # the tasks are not JSON-serializable, or the disk is full
                    path = self.run.rollout_path(f"step-{index + 1:05d}-failed")
                    saved = await run_in_thread(rollout.save, path)
                    kept += f"; the chains of this step are in {saved}"
            raise type(error)(f"step {index + 1}: {error} ({kept})") from error
        return stats, rollout, lag

    def _persist(self, state: LoopState, rollout: Rollout, record: Any, due: bool, policy: Any, adamw: Any) -> None:
        """Write the rollout (if requested), the record and the checkpoint (if due) of an iteration."""
        if self.config.save_rollouts:
            rollout.save(self.run.rollout_path(f"step-{state.steps:05d}"))
        # Write the record before the checkpoint, because resuming deletes records that are newer than the checkpoint
        # but cannot recover a missing record.
        self.run.append(record)
        if "eval_success" in record or due:
            self.run.keep_policy(state.steps, policy, self.config.keep)
        if due:
            checkpoint.save(self.run, policy, adamw, state)
            self._saved_steps = state.steps


def _steps(first: int, last: int) -> str:
    return f"steps {first} to {last}" if last > first else f"step {last}"
