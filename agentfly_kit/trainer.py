"""The loop: roll out, score, update, record, again. Knows nothing of how each of them is done.

A run is a folder that says what it is. Each iteration ends with its line in `steps.jsonl` and a checkpoint, so whatever
stops the loop (an interrupt, a break, a crash) stops it between two iterations, and the same call goes on from there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import math
import numbers
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from agentfly_kit import advantages as estimators
from agentfly_kit import functions, losses, seeds
from agentfly_kit.batch import Batch, Truncated, collate
from agentfly_kit.errors import BatchError, RunError, SettingsError, TaskError, TrainingError
from agentfly_kit.evaluation import Evaluation, evaluate
from agentfly_kit.pending import ended
from agentfly_kit.policy import Policy
from agentfly_kit.ppo import Correction, LossName, adamw, ppo_step_async, shaped_rewards
from agentfly_kit.record import Rollout
from agentfly_kit.rollout import Agent, RolloutRun
from agentfly_kit.runs import Run
from agentfly_kit.types import Stats, Task

T = TypeVar("T")

_OUTCOME = ("grpo", "dr_grpo", "rloo")
_TOKEN = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. An iteration is one rollout and one `ppo_step`; an update is one optimizer step."""

    steps: int = 24
    """Iterations."""
    tasks_per_step: int = 16
    group_size: int = 8
    """Chains a task."""
    advantage: str | Callable[..., Tensor] = "grpo"
    """"grpo", "dr_grpo", "rloo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"; or a function
    (rewards (N,), groups (N,)) -> (N,)."""
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    """Whiten token-level advantages over the sampled tokens of the batch (gae, reinforce_plus_plus)."""
    difficulty: str | Callable[[Task], float] | None = None
    """A task field, or a function of a task: each pass over the tasks goes from the lowest to the highest, and only
    tasks of one difficulty are shuffled. None shuffles all."""
    lr: float = 3e-4
    lr_end: float | None = 3e-5
    """Reached linearly at the last iteration; None keeps `lr`."""
    minibatch: int | None = 32
    """Rollouts an update."""
    epochs: int = 2
    loss: LossName | Callable[..., Tensor] = "ppo"
    aggregate: losses.How = "token_mean"
    denominator: float | None = None
    clip: float | None = None
    """None is the loss's own: 0.2 for "ppo"."""
    clip_high: float | None = None
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: losses.KLKind = "k3"
    """The reference is the policy as it was before the first iteration; under an adapter, its base."""
    kl_in: Literal["loss", "reward"] = "loss"
    """"reward" takes it from each token's reward before the advantages; an outcome estimator sees its sum."""
    kl_weighted: bool = False
    kl_target: float | None = None
    """nats a token: `kl_coef` is then only where the coefficient starts; see `losses.adaptive_kl_coef`."""
    kl_horizon: float = 10_000
    """Trajectories over which the coefficient adapts."""
    entropy_coef: float = 0.0
    max_grad_norm: float | None = 1.0
    target_kl: float | None = None
    micro_tokens: int | None = None
    correction: Correction | None = None
    """Importance weights of trainer over sampler; see `ppo_step`."""
    autocast: Literal["bfloat16"] | None = None
    checkpointing: bool = False
    truncated: Truncated = "score"
    """What a chain that a limit cut is worth; see `collate`. "bootstrap" needs advantage="gae"."""
    truncated_penalty: float = 0.5
    """Taken from its reward by truncated="penalty"."""
    max_concurrency: int = 128
    evaluate_every: int = 0
    """Iterations; 0 is never. Needs `eval_tasks=`."""
    checkpoint_every: int = 1
    save_rollouts: bool = False
    """Keep every training rollout in the run's folder."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "group_size", "epochs", "checkpoint_every", "max_concurrency"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: give at least 1")
        if not callable(self.advantage) and self.advantage not in (*_OUTCOME, *_TOKEN):
            known = ", ".join((*_OUTCOME, *_TOKEN))
            raise SettingsError(f"advantage={self.advantage!r}: give one of {known}, or a function")
        if self.truncated == "bootstrap" and self.advantage != "gae":
            raise SettingsError(f"truncated='bootstrap' needs values, so advantage='gae'; got {self.advantage!r}")
        if self.kl_target is not None and not (self.kl_target > 0 and self.kl_coef > 0):
            raise SettingsError(
                f"kl_target={self.kl_target} with kl_coef={self.kl_coef}: both are above 0, the coefficient is where "
                "it starts"
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SettingsError(f"lr={self.lr}: give a positive number")
        if self.minibatch is not None and self.minibatch < 1:
            raise SettingsError(f"minibatch={self.minibatch}: give at least 1 rollout, or None for all of them")
        for name in ("value_coef", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name}={getattr(self, name)}: give 0 or more")
        for name, kind in (("loss", LossName), ("aggregate", losses.How), ("truncated", Truncated)):
            value = getattr(self, name)
            if not callable(value) and value not in get_args(kind):
                raise SettingsError(f"{name}={value!r}: give one of {', '.join(map(repr, get_args(kind)))}")

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class TrainStep:
    """What one iteration did. A step that was replayed from the record has only its numbers."""

    step: int
    """From 1."""
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
) -> TrainRun:
    """A training run. `await` it, or `async for step in run`; it starts then.

    run: a folder. An unfinished run in it of the same config, tasks, tools, reward and starting policy continues; a
        finished one replays its recorded steps and loads its last weights. None is a fresh temporary folder.
    resume: False throws away what the folder holds and starts anew.
    progress: a bar with rate and time left (for curves, display `widgets.TrainView(run)` before the `await`).
    Raises:  RunMismatch, at once, if the folder holds another run: it shows the difference.
    """
    given = list(eval_tasks or ())
    return TrainRun(agent, policy, list(tasks), config or TrainConfig(), run, given, resume, progress)


class TrainRun:
    """A handle. After an interrupt or a break, going on with the same handle, or calling `train` again, continues.

    records, total, subscribe   what has been done, how much there is to do, and who wants to know
    rollout                     the rollout that runs now, for a live view
    stop(), pause(), resume()
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
    ) -> None:
        if not tasks:
            raise TaskError("there is no task to train on; give at least one")
        if config.advantage == "gae" and policy.value_head is None:
            raise SettingsError("advantage='gae' needs values; load the policy with value_head=True")
        if config.evaluate_every and not eval_tasks:
            raise SettingsError(f"evaluate_every={config.evaluate_every} needs eval_tasks=, such as tasks.test")
        if not agent.reward:
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
        agent._check([*tasks, *eval_tasks])
        self.agent = agent
        self.policy = policy
        self.tasks = tasks
        self.eval_tasks = eval_tasks
        self.config = config
        self._levels = _levels(tasks, config.difficulty)
        self._progress = progress
        self._bar: Any = None
        self.rollout: RolloutRun | None = None
        if run is None:
            run = tempfile.mkdtemp(prefix="agentfly-run-")
            weakref.finalize(self, shutil.rmtree, run, ignore_errors=True)
            resume = False
        self.run = Run(Path(run))
        self._fresh = not resume
        self._key = str(self.run.path.resolve())
        if self._fresh:
            policy.started.pop(self._key, None)
        start = policy.started.setdefault(self._key, policy.fingerprint())
        self.fingerprint = fingerprint(agent, tasks, config, start)
        self.run.check(self.fingerprint, resume=not self._fresh)
        self._optimizer: torch.optim.Optimizer | None = None
        self._reference: Policy | None = None
        self._kl_coef = config.kl_coef
        self._next = 0
        self._replay: list[dict[str, float]] = []
        self._given = 0
        """Steps that this handle has given out; going on with it replays none of them."""
        self._begun = False
        self._stopping = False
        self._open: asyncio.Event | None = None
        self._paused = False
        self._busy = False

    # --- what a view needs ---

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def records(self) -> list[dict[str, float]]:
        return self.run.records if self._begun or not self._fresh else []

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
        if self._open is not None:
            self._open.clear()
        if self.rollout is not None:
            self.rollout.pause()

    def resume(self) -> None:
        self._paused = False
        if self._open is not None:
            self._open.set()
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
        last = f", success {self.records[-1]['success']:.3f}" if done and "success" in self.records[-1] else ""
        hint = "" if self._begun else "; write `await` before it"
        return f"<training run, {done} of {self.total} steps done{last}, in {str(self.path)!r}{hint}>"

    # --- running ---

    def __await__(self) -> Generator[Any, Any, TrainRun]:
        return self._all().__await__()

    async def _all(self) -> TrainRun:
        async for _ in self:
            pass
        return self

    def _show(self, step: TrainStep | None) -> None:
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
        if self._busy:
            raise SettingsError("this run is already being awaited somewhere else; there is one loop a run")
        self._busy = True
        try:
            if not self._begun:
                await self._begin()
            if self._replay:
                record = self._replay.pop(0)
                self._given += 1
                return TrainStep(int(record["step"]), record, replayed=True)
            if self._stopping or self._next >= self.config.steps:
                self._show(None)
                raise StopAsyncIteration
            if self._open is not None:
                await self._open.wait()
            try:
                step = await self._iterate(self._next)
            except BaseException:
                # The weights may be those of half an iteration: whoever goes on begins at the checkpoint.
                self._begun = False
                self._show(None)
                raise
            self._given += 1
            self._show(step)
            return step
        finally:
            self._busy = False

    async def _begin(self) -> None:
        policy, config = self.policy, self.config
        self._open = asyncio.Event()
        if not self._paused:
            self._open.set()
        known = self.run.begin(self.fingerprint, resume=not self._fresh)
        self._fresh = False
        self._optimizer = adamw(policy, config.lr)
        checkpoint = self.run.checkpoint if known else None
        if checkpoint is not None:
            if config.kl_coef > 0:
                self._reference = self._load_reference()
            self._next = await _in_thread(self._load, checkpoint)
        else:
            if config.kl_coef > 0:
                self._reference = policy.reference()
                if not policy.has_adapter:
                    await _in_thread(self._save_reference)
            # Before the first update: whoever is interrupted in it has something to begin again from.
            self._next = 0
            await _in_thread(self._checkpoint, 0)
        self.run.truncate(self._next)
        self._given = min(self._given, self._next)
        self._replay = self.run.records[self._given :]
        self._begun = True

    async def _iterate(self, index: int) -> TrainStep:
        config, policy = self.config, self.policy
        assert self._optimizer is not None
        began = time.perf_counter()
        await self.agent.engine.update(policy)
        self.rollout = self.agent.rollout(
            self._draw(index), config.group_size, max_concurrency=config.max_concurrency, index=index, purpose="train"
        )
        if self._paused:
            self.rollout.pause()
        rollout = await self.rollout
        self.rollout = None
        rolled = time.perf_counter()
        for group, lr in zip(self._optimizer.param_groups, self._rates(index), strict=True):
            group["lr"] = lr
        try:
            batch = await _in_thread(self._batch, rollout)
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
                reference=self._reference,
                entropy_coef=config.entropy_coef,
                epochs=config.epochs,
                minibatch=config.minibatch,
                micro_tokens=config.micro_tokens,
                max_grad_norm=config.max_grad_norm,
                target_kl=config.target_kl,
                correction=config.correction,
                autocast=config.autocast,
                checkpointing=config.checkpointing,
                seed=seeds.derive(config.seed, "update", index),
            )
        except (TrainingError, BatchError) as error:
            raise type(error)(f"step {index + 1}: {error} (steps 1 to {index} are kept in {self.path})") from error
        updated = time.perf_counter()
        evaluation = None
        if config.evaluate_every and ((index + 1) % config.evaluate_every == 0 or index + 1 == config.steps):
            await self.agent.engine.update(self.policy)  # what is evaluated is what this step made
            evaluation = await evaluate(self.agent, self.eval_tasks, max_concurrency=config.max_concurrency)
        record = self._record(index, rollout, stats, evaluation)
        if config.kl_coef > 0:
            record["kl_coef"] = self._kl_coef
        if config.kl_target is not None:
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
        if stats.unscored > 0.05:
            why = next((str(t.error) for t in rollout.trajectories if t.error), "")
            warnings.warn(f"step {index + 1}: {stats.unscored:.0%} of the chains were unscored. {why}", stacklevel=2)
        try:
            await _in_thread(self._keep, index, rollout, record)
        finally:  # who is interrupted here has the step all the same
            if record in self.run.records[-1:]:
                self.run.tell(record)
        self._next = index + 1
        return TrainStep(index + 1, record, stats, rollout, evaluation)

    def _draw(self, index: int) -> list[Task]:
        """The tasks of an iteration: passes over all tasks, each in its own order. Depends on the index alone."""
        count, size = len(self.tasks), self.config.tasks_per_step
        out: list[Task] = []
        for position in range(index * size, (index + 1) * size):
            turn, place = divmod(position, count)
            if place == 0 or not out:
                generator = torch.Generator().manual_seed(seeds.derive(self.config.seed, "tasks", turn))
                order = torch.randperm(count, generator=generator).tolist()
                order.sort(key=self._levels.__getitem__)  # stable: the shuffle stays within a level
            out.append(self.tasks[order[place]])
        return out

    def _rates(self, index: int) -> list[float]:
        assert self._optimizer is not None
        config = self.config
        end = config.lr if config.lr_end is None else config.lr_end
        share = index / max(1, config.steps - 1)
        now = config.lr + (end - config.lr) * share
        # The value head keeps its own multiple of the policy's rate.
        return [now * group.setdefault("scale", group["lr"] / config.lr) for group in self._optimizer.param_groups]

    def _batch(self, rollout: Rollout) -> Batch:
        config = self.config
        name = config.advantage
        if callable(name) or name in _OUTCOME:
            estimator: Any = name if callable(name) else getattr(estimators, name)
            if config.kl_coef > 0 and config.kl_in == "reward":
                return self._shaped_outcome(rollout, estimator)
            return self._collate(rollout, estimator)
        batch = self._referenced(self._collate(rollout, None))
        rewards = batch.token_rewards
        if config.kl_coef > 0 and config.kl_in == "reward":
            rewards = shaped_rewards(batch, self._kl_coef)
        rewards = torch.where(batch.mask, rewards, 0.0)
        if name == "gae":
            values = self.policy.score(batch, {"value"}, micro_tokens=config.micro_tokens)["value"]
            bootstrap = None
            if config.truncated == "bootstrap" and bool(batch.truncated.any()):
                ends = self.policy.end_values(batch, micro_tokens=config.micro_tokens)
                bootstrap = torch.where(batch.truncated, ends, 0.0)
            adv, returns = estimators.gae(
                rewards, values, batch.mask, gamma=config.gamma, lam=config.lam, bootstrap=bootstrap
            )
            if config.whiten:
                adv = estimators.whiten(adv, batch.mask)
            return batch.replace(advantages=adv, returns=returns, values=values)
        if name == "reinforce_plus_plus":
            adv = estimators.reinforce_plus_plus(rewards, batch.mask, gamma=config.gamma, whiten=config.whiten)
        else:
            adv = estimators.reinforce_plus_plus_baseline(
                rewards, batch.mask, groups=batch.groups, whiten=config.whiten
            )
        return batch.replace(advantages=adv)

    def _collate(self, rollout: Rollout, advantages: Any, truncated: Truncated | None = None) -> Batch:
        config = self.config
        return collate(
            rollout,
            advantages,
            truncated=truncated or config.truncated,
            penalty=config.truncated_penalty,
            allow_truncated_sampling=config.correction is not None,
        )

    def _referenced(self, batch: Batch) -> Batch:
        """With the reference's logprobs where they are needed before the step."""
        if self._reference is None or self.config.kl_in != "reward":
            return batch
        scored = self._reference.score(batch, {"logprob"}, micro_tokens=self.config.micro_tokens)
        return batch.replace(ref_logprobs=scored["logprob"])

    def _shaped_outcome(self, rollout: Rollout, estimator: Callable[..., Tensor]) -> Batch:
        """An estimator of outcomes over rewards from which each chain's whole KL was taken."""
        # Rows that are masked for being cut count in their group, so their KL is wanted too.
        keep: Truncated = "score" if self.config.truncated == "mask" else self.config.truncated
        every = self._referenced(self._collate(rollout, None, keep))
        penalty = (every.token_rewards - shaped_rewards(every, self._kl_coef)).nansum(1)
        shaped = {t.id: float(r - p) for t, r, p in zip(every.trajectories, every.rewards, penalty, strict=True)}
        rewards = torch.tensor([shaped.get(t.id, math.nan) for t in rollout.trajectories])
        names: dict[str, int] = {}
        groups = torch.tensor([names.setdefault(t.group, len(names)) for t in rollout.trajectories])
        batch = self._collate(rollout, estimator(rewards, groups))
        if len(batch) == len(every):
            return batch.replace(ref_logprobs=every.ref_logprobs)
        return self._referenced(batch)

    def _record(self, index: int, rollout: Rollout, stats: Stats, evaluation: Evaluation | None) -> dict[str, float]:
        record: dict[str, float] = {"step": index + 1}
        record |= {k: v for k, v in rollout.numbers().items() if k != "seconds"}
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
        numbers = stats.numbers()
        record |= {k: numbers[k] for k in (*keep, *more) if k in numbers and math.isfinite(numbers[k])}
        record["version"] = self.policy.version
        if evaluation is not None:
            record |= {
                "eval_success": evaluation.success,
                "eval_low": evaluation.low,
                "eval_high": evaluation.high,
            }
        return record

    # --- disk ---

    def _keep(self, index: int, rollout: Rollout, record: dict[str, float]) -> None:
        if self.config.save_rollouts:
            rollout.save(self.run.rollout_path(f"step-{index + 1:05d}"))
        # The line comes first: one without a checkpoint is cut off by whoever goes on, one that is missing is lost.
        self.run.write(record)
        if (index + 1) % self.config.checkpoint_every == 0 or index + 1 == self.config.steps:
            self._checkpoint(index + 1)

    def _checkpoint(self, steps: int) -> None:
        assert self._optimizer is not None
        state = {
            "version": 1,
            "steps": steps,
            "policy": self.policy.state(),
            "policy_version": self.policy.version,
            "optimizer": self._optimizer.state_dict(),
            "kl_coef": self._kl_coef,
        }
        with self.run.new_checkpoint() as folder:
            torch.save(state, folder / "state.pt")

    def _load(self, checkpoint: Path) -> int:
        """Put a checkpoint's weights and optimizer in place; returns how many iterations it has behind it."""
        assert self._optimizer is not None
        file = checkpoint / "state.pt"
        try:
            state = torch.load(file, map_location=self.policy.device, weights_only=True)
            if state["version"] > 1:
                raise RunError(f"{file} was written by a newer version; upgrade agentfly_kit")
            self.policy.load_state(state["policy"])
            self.policy.version = state["policy_version"]
            self._optimizer.load_state_dict(state["optimizer"])
            self._kl_coef = float(state.get("kl_coef", self.config.kl_coef))
            return int(state["steps"])
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"{file} cannot be read ({error}); resume=False starts the run anew") from error

    def _save_reference(self) -> None:
        assert self._reference is not None
        torch.save(self._reference.state(), self.path / "reference.pt")

    def _load_reference(self) -> Policy:
        reference = self.policy.reference()
        if self.policy.has_adapter:
            return reference
        reference.load_state(torch.load(self.path / "reference.pt", map_location=self.policy.device, weights_only=True))
        return reference


async def _in_thread(function: Callable[..., T], *given: Any) -> T:
    """`function` in a thread. Who is cancelled meanwhile waits for its end: nothing goes on behind their back."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *given))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended([task])
        if not task.cancelled():
            task.exception()
        raise


def _said(value: Any) -> Any:
    """A setting as JSON; of a function its source and what it closes over, of a partial one what was filled in too."""
    if isinstance(value, functools.partial):
        filled = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in sorted(value.keywords.items()))]
        return {"function": _said(value.func), "with": filled}
    if callable(value):
        function = value if hasattr(value, "__code__") else getattr(value, "function", type(value).__call__)
        source = functions.source_of(function)
        return {"source": source, "fingerprint": functions.fingerprint(function, source)}
    return value


def _levels(tasks: Sequence[Task], difficulty: str | Callable[[Task], float] | None) -> list[float]:
    """The difficulty of each task; 0 for all where none is asked for."""
    if difficulty is None:
        return [0.0] * len(tasks)
    out = []
    for task in tasks:
        if callable(difficulty):
            value: Any = difficulty(task)
        elif difficulty in task.fields:
            value = task.fields[difficulty]
        else:
            known = ", ".join(task.fields) or "none"
            raise SettingsError(f"difficulty={difficulty!r}: task {task.id!r} has no such field (its fields: {known})")
        if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            raise SettingsError(f"difficulty: task {task.id!r} has {value!r}; give a finite number")
        out.append(float(value))
    return out


def fingerprint(agent: Agent, tasks: Sequence[Task], config: TrainConfig, start: str) -> dict[str, Any]:
    """What makes two runs the same run: settings, tasks, the source of tools and reward, and the starting weights."""
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks:
        digest.update(repr((task.id, task.messages, sorted(task.fields.items(), key=lambda item: item[0]))).encode())
    return {
        "config": {f.name: _said(getattr(config, f.name)) for f in dataclasses.fields(config)},
        "agent": {
            "system": agent.system,
            "max_turns": agent.max_turns,
            "max_tokens": agent.max_tokens,
            "max_invalid_calls": agent.max_invalid_calls,
            "timeout": agent.timeout,
            **({} if agent.max_tool_calls is None else {"max_tool_calls": agent.max_tool_calls}),
            "sampling": dataclasses.asdict(agent.sampling),
            "seed": agent.seed,
            "engine": type(agent.engine).__name__,
        },
        "tools": {t.name: {"source": t.source, "fingerprint": t.fingerprint} for t in agent.tools},
        "reward": {r.name: {"source": r.source, "fingerprint": r.fingerprint} for r in agent.reward},
        "tasks": {"count": len(tasks), "digest": digest.hexdigest()},
        "policy": start,
    }
