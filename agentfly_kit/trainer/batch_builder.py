"""Conversion of a rollout to a training batch: collation, filters and advantages."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from agentfly_kit import advantages as estimators
from agentfly_kit._async.pending_call import run_in_thread, wait_all
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import with_turn_rewards
from agentfly_kit.batch.batch import Batch
from agentfly_kit.batch.collate import TruncationMode, collate, refuse_turn_rewards
from agentfly_kit.batch.turn_data import turn_data
from agentfly_kit.engines.base import Engine, check_scorer
from agentfly_kit.errors import BatchError, SettingsError, check_instance
from agentfly_kit.policy.forward import ScoreName
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.ppo.scoring import shaped_rewards
from agentfly_kit.rewards import RewardSet
from agentfly_kit.trainer.config import TOKEN_ESTIMATORS, TURN_ESTIMATORS, TrainConfig
from agentfly_kit.trajectories import UNSCORED_STOPS


class Scorer(Protocol):
    """Processes that score batches: a `WorkerGroup`, or the processes of `af.ray.learner`."""

    def score(self, policy: Policy, batch: Batch, what: ScoreName, micro_tokens: int | None) -> Tensor: ...


class BatchBuilder:
    """Builds training batches according to the settings of a run."""

    def __init__(
        self, policy: Policy, config: TrainConfig, rewards: RewardSet, workers: Scorer | None = None
    ) -> None:
        self.policy, self.config, self.workers = policy, config, workers or WorkerGroup(None)
        self.weights = {r.name: r.weight for r in rewards if r.weight != 0}
        self.reference: Policy | None = None

    def build(self, rollout: Rollout, kl_coef: float, baselines: Mapping[str, float] | None = None) -> Batch:
        """Build the training batch for a rollout.

        Args:
            rollout: Sampled trajectories, in groups.
            kl_coef: Current coefficient of the KL penalty, used only if the penalty is part of the reward.
            baselines: Rewards of greedily sampled chains for advantage="remax", keyed by task id.
        """
        config, name = self.config, self.config.advantage
        estimator: Any
        kl_in_reward = config.kl_coef > 0 and config.kl_in == "reward"

        # Outcome and turn-level estimators take one reward per trajectory.
        if name not in TOKEN_ESTIMATORS:
            if name == "none" and not self.weights:  # an agent without rewards: chains that did not fail get 0
                scored = [
                    t
                    if t.reward is not None or t.error is not None or t.stop in UNSCORED_STOPS
                    else t.replace(reward=0.0)
                    for t in rollout.trajectories
                ]
                rollout = Rollout.from_trajectories(scored, rollout.seconds)
            if name == "none":
                rollout = rollout.sum_turn_rewards()
            elif name == "gdpo":  # the metrics include turn rewards except those returned by tools
                turns = [t.replace(turns=with_turn_rewards(t.turns, {})) for t in rollout.trajectories]
                rollout = Rollout.from_trajectories(turns, rollout.seconds)
            if name != "gigpo":
                refuse_turn_rewards(rollout.trajectories)
            estimator = _checked(self._estimator(rollout, baselines or {}))
            if kl_in_reward:
                return self._shaped_outcome_batch(rollout, estimator, kl_coef)
            return self._collate(rollout, estimator)

        batch = self._with_reference_logprobs(self._collate(rollout, None))
        rewards = shaped_rewards(batch, kl_coef) if kl_in_reward else batch.token_rewards
        rewards = torch.where(batch.mask, rewards, 0.0)
        index = batch.trajectory_index
        if name != "gae":
            options: dict[str, Any] = {"groups": batch.groups, "whiten": config.whiten}
            if name == "reinforce_plus_plus":
                options = {"gamma": config.gamma, "whiten": config.whiten}
            elif name == "optimal_token_baseline":
                squares = self.workers.score(self.policy, batch, "sum_squared_probs", config.micro_tokens)
                options = {"groups": batch.groups, "logprobs": batch.logprobs, "sum_squared_probs": squares}
            estimator = getattr(estimators, str(name))
            adv = estimator(rewards, batch.mask, trajectory_index=index, **options)
            return batch.replace(advantages=adv)

        # GAE needs the values before the update and, to bootstrap truncated chains, the value of the last state.
        values = self.workers.score(self.policy, batch, "value", config.micro_tokens)
        bootstrap = None
        if config.truncated == "bootstrap" and bool(batch.truncated.any()):
            ends = self.policy.bootstrap_values(batch, micro_tokens=config.micro_tokens)
            bootstrap = torch.where(batch.truncated, ends, 0.0)
        adv, returns = estimators.gae(
            rewards,
            values,
            batch.mask,
            gamma=config.gamma,
            lam=config.lam,
            bootstrap=bootstrap,
            trajectory_index=index,
        )
        if config.whiten:
            adv = estimators.whiten(adv, batch.mask)
        return batch.replace(advantages=adv, returns=returns, values=values)

    def _estimator(self, rollout: Rollout, baselines: Mapping[str, float]) -> Callable[..., Tensor]:
        """Return the configured estimator as a function of rewards and groups, with all other arguments bound."""
        name, trajectories = self.config.advantage, rollout.trajectories
        if callable(name):
            return name
        if name in TURN_ESTIMATORS:
            return self._turn_estimator(rollout, name)
        if name == "none":
            return lambda rewards, groups: torch.zeros_like(rewards)
        function = getattr(estimators, name)
        if name == "opo":
            authors = (self.config.authors,) if isinstance(self.config.authors, str) else self.config.authors or ()
            lengths = [sum(int(row.sampled_by(*authors).sum()) for row in t.rows) for t in trajectories]
            return functools.partial(function, lengths=lengths)
        if name == "remax":
            return functools.partial(function, baselines=[baselines[t.task.id] for t in trajectories])
        if name == "gdpo":
            columns = [[t.metrics.get(r, math.nan) for r in self.weights] for t in trajectories]

            def gdpo(rewards: Tensor, groups: Tensor) -> Tensor:
                scored = torch.where(rewards.isnan()[:, None], torch.nan, torch.tensor(columns))
                return estimators.gdpo(scored, groups, weights=list(self.weights.values()))

            return gdpo
        return cast(Callable[..., Tensor], function)

    def _turn_estimator(self, rollout: Rollout, name: str) -> Callable[..., Tensor]:
        """Return the estimator "gigpo" or "arpo" as a function of rewards and groups, for the turns of the rollout."""

        def estimator(rewards: Tensor, groups: Tensor) -> Tensor:
            turns = turn_data(rollout, rewards=[None if math.isnan(r) else r for r in rewards.tolist()])
            if name == "arpo":
                return estimators.arpo(rewards, groups, turn_ids=turns.turn_ids, attribution=self.config.attribution)
            return estimators.gigpo(
                rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states, gamma=self.config.gamma
            )

        return estimator

    def _collate(self, rollout: Rollout, advantages: Any, truncated: TruncationMode | None = None) -> Batch:
        """Collate a rollout with the settings of the run. If given, `truncated` overrides `config.truncated`."""
        config = self.config
        batch = collate(
            rollout,
            advantages,
            per=config.advantage_per,
            authors=config.authors,
            truncated=truncated or config.truncated,
            penalty=config.truncated_penalty,
            allow_truncated_sampling=config.correction is not None,
            filters=config.filters,
        )
        if advantages is None or config.row_credit == "broadcast":
            return batch
        factors = estimators.row_credit(batch.trajectory_index, config.row_credit, discount=config.row_discount)
        return batch.replace(advantages=batch.advantages * factors[:, None])

    def _with_reference_logprobs(self, batch: Batch) -> Batch:
        if self.reference is None or self.config.kl_in != "reward":
            return batch
        scored = self.workers.score(self.reference, batch, "logprob", self.config.micro_tokens)
        return batch.replace(ref_logprobs=scored)

    def _shaped_outcome_batch(self, rollout: Rollout, estimator: Callable[..., Tensor], kl_coef: float) -> Batch:
        """Build a batch whose advantages are estimated from the rewards of chains minus their KL penalties."""
        # With truncated="mask", truncated chains still count in the group mean, so their KL penalties are needed too.
        keep: TruncationMode = "score" if self.config.truncated == "mask" else self.config.truncated
        every = self._with_reference_logprobs(self._collate(rollout, None, keep))
        penalty = (every.token_rewards - shaped_rewards(every, kl_coef)).nansum(1)
        shaped: dict[str, float] = {}
        for t, reward, p in zip(every.trajectories, every.rewards.tolist(), penalty.tolist(), strict=True):
            shaped[t.id] = shaped.get(t.id, reward) - p  # subtract the penalties of all rows of a chain
        rewards = torch.tensor([shaped.get(t.id, math.nan) for t in rollout.trajectories])
        names: dict[str, int] = {}
        groups = torch.tensor([names.setdefault(t.group, len(names)) for t in rollout.trajectories])
        batch = self._collate(rollout, estimator(rewards, groups))
        if len(batch) == len(every):
            return batch.replace(ref_logprobs=every.ref_logprobs)
        return self._with_reference_logprobs(batch)


async def distilled(batch: Batch, teacher: Policy | Engine, config: TrainConfig) -> Batch:
    """Add the advantages of on-policy distillation, multiplied by `config.teacher_coef`, to the batch's advantages."""
    if isinstance(teacher, Policy):
        score = functools.partial(teacher.score, batch, {"logprob"}, micro_tokens=config.micro_tokens)
        scored = (await run_in_thread(score))["logprob"]
    else:
        scored = torch.zeros_like(batch.logprobs)
        rows = [ids[:length].tolist() for ids, length in zip(batch.ids, batch.lengths.tolist(), strict=True)]
        tasks = [asyncio.ensure_future(teacher.score(row)) for row in rows]
        try:
            for i, logprobs in enumerate(await asyncio.gather(*tasks)):
                scored[i, 1 : len(rows[i])] = torch.tensor(logprobs)
        finally:
            for task in tasks:
                task.cancel()
            await wait_all(tasks)
    gap = estimators.distillation(scored, batch.logprobs, batch.mask)
    return batch.replace(advantages=batch.advantages + config.teacher_coef * gap)


def check_teacher(teacher: Policy | Engine | None, agent: AgentSettings, policy: Policy, config: TrainConfig) -> None:
    """Raise SettingsError if the teacher cannot score the policy's chains. Teacher engines are checked later."""
    if (teacher is not None) != (config.teacher_coef > 0):
        raise SettingsError(
            "teacher= requires TrainConfig(teacher_coef=) above 0, and vice versa, got "
            f"teacher={teacher!r} with teacher_coef={config.teacher_coef}"
        )
    if teacher is None:
        return
    if teacher is policy or teacher is agent.engine:
        raise SettingsError("teacher must not be the policy that is trained; use policy.copy()")
    if isinstance(teacher, Policy):
        teacher.check_head()
        check_scorer(teacher.chat, teacher.max_length, agent.chat, agent.engine.max_length)
    elif not isinstance(teacher, Engine) or type(teacher).check_teacher is Engine.check_teacher:
        raise SettingsError(f"teacher must be a Policy, a VLLMEngine, or an OpenAIEngine with vLLM, got {teacher!r}")
    elif agent.sampling.temperature != 1:
        raise SettingsError(
            f"temperature must be 1 with a teacher engine, which scores at temperature 1, got "
            f"{agent.sampling.temperature}"
        )


def _checked(estimator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an estimator so that its exceptions are raised as BatchError."""
    inner = getattr(estimator, "func", estimator)
    name = getattr(inner, "__name__", type(inner).__name__)

    def checked(rewards: Tensor, groups: Tensor) -> Tensor:
        try:
            return torch.as_tensor(estimator(rewards, groups), dtype=torch.float32)
        except Exception as error:
            raise BatchError(f"the advantage function {name} raised {type(error).__name__}: {error}") from error

    return checked


def check_reference(reference: Policy | None, policy: Policy, config: TrainConfig) -> None:
    """Raise SettingsError if a reference policy has no effect, or cannot score the policy's chains."""
    if reference is None:
        return
    check_instance("reference", reference, Policy, "an af.Policy, or None for policy.reference()")
    if config.kl_coef == 0:
        raise SettingsError("reference= requires TrainConfig(kl_coef=) above 0, got 0")
    if reference.model is policy.model:
        raise SettingsError("reference must have weights of its own, such as policy.copy(), got those of the policy")
    check_scorer(reference.chat, reference.max_length, policy.chat, policy.max_length, "reference")
