"""From a rollout to the batch of a step: collated, filtered, with the advantages that the settings name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentfly_kit import advantages as estimators
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.batch import Batch, TruncationMode, collate
from agentfly_kit.batch.turn_data import turn_data
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo import shaped_rewards
from agentfly_kit.trainer.config import OUTCOME_ESTIMATORS, TURN_ESTIMATORS, TrainConfig


class BatchBuilder:
    """How a run's settings make a batch of a rollout."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.policy, self.config = policy, config
        self.reference: Policy | None = None

    def build(self, rollout: Rollout, kl_coef: float) -> Batch:
        """The batch of a rollout, with advantages; kl_coef is what a KL in the reward is multiplied by now."""
        config = self.config
        name = config.advantage
        if callable(name) or name in (*OUTCOME_ESTIMATORS, *TURN_ESTIMATORS):
            estimator: Any = name if callable(name) else getattr(estimators, name)
            if name in TURN_ESTIMATORS:
                estimator = self._turn_estimator(rollout, str(name))
            if config.kl_coef > 0 and config.kl_in == "reward":
                return self._shaped_outcome_batch(rollout, estimator, kl_coef)
            return self._collate(rollout, estimator)
        batch = self._with_reference_logprobs(self._collate(rollout, None))
        rewards = batch.token_rewards
        if config.kl_coef > 0 and config.kl_in == "reward":
            rewards = shaped_rewards(batch, kl_coef)
        rewards = torch.where(batch.mask, rewards, 0.0)
        if name == "gae":
            values = self.policy.score(batch, {"value"}, micro_tokens=config.micro_tokens)["value"]
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
                trajectory_index=batch.trajectory_index,
            )
            if config.whiten:
                adv = estimators.whiten(adv, batch.mask)
            return batch.replace(advantages=adv, returns=returns, values=values)
        if name == "reinforce_plus_plus":
            adv = estimators.reinforce_plus_plus(
                rewards, batch.mask, gamma=config.gamma, whiten=config.whiten, trajectory_index=batch.trajectory_index
            )
        else:
            adv = estimators.reinforce_plus_plus_baseline(
                rewards, batch.mask, groups=batch.groups, whiten=config.whiten, trajectory_index=batch.trajectory_index
            )
        return batch.replace(advantages=adv)

    def _turn_estimator(self, rollout: Rollout, name: str) -> Callable[..., Tensor]:
        """The estimator with what it asks of the rollout besides rewards and groups."""

        def estimator(rewards: Tensor, groups: Tensor) -> Tensor:
            turns = turn_data(rollout, rewards=[None if math.isnan(r) else r for r in rewards.tolist()])
            if name == "arpo":
                return estimators.arpo(rewards, groups, turn_ids=turns.turn_ids)
            return estimators.gigpo(
                rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states, gamma=self.config.gamma
            )

        return estimator

    def _collate(self, rollout: Rollout, advantages: Any, truncated: TruncationMode | None = None) -> Batch:
        config = self.config
        return collate(
            rollout,
            advantages,
            per=config.advantage_per,
            authors=config.authors,
            truncated=truncated or config.truncated,
            penalty=config.truncated_penalty,
            allow_truncated_sampling=config.correction is not None,
            filters=config.filters,
        )

    def _with_reference_logprobs(self, batch: Batch) -> Batch:
        """With the reference's logprobs where they are needed before the step."""
        if self.reference is None or self.config.kl_in != "reward":
            return batch
        scored = self.reference.score(batch, {"logprob"}, micro_tokens=self.config.micro_tokens)
        return batch.replace(ref_logprobs=scored["logprob"])

    def _shaped_outcome_batch(self, rollout: Rollout, estimator: Callable[..., Tensor], kl_coef: float) -> Batch:
        """An estimator of outcomes over rewards from which each chain's whole KL was taken."""
        # Rows that are masked for being cut count in their group, so their KL is wanted too.
        keep: TruncationMode = "score" if self.config.truncated == "mask" else self.config.truncated
        every = self._with_reference_logprobs(self._collate(rollout, None, keep))
        penalty = (every.token_rewards - shaped_rewards(every, kl_coef)).nansum(1)
        shaped: dict[str, float] = {}
        for t, reward, p in zip(every.trajectories, every.rewards.tolist(), penalty.tolist(), strict=True):
            shaped[t.id] = shaped.get(t.id, reward) - p  # a chain of several rows pays for all of them
        rewards = torch.tensor([shaped.get(t.id, math.nan) for t in rollout.trajectories])
        names: dict[str, int] = {}
        groups = torch.tensor([names.setdefault(t.group, len(names)) for t in rollout.trajectories])
        batch = self._collate(rollout, estimator(rewards, groups))
        if len(batch) == len(every):
            return batch.replace(ref_logprobs=every.ref_logprobs)
        return self._with_reference_logprobs(batch)
