"""Checks that the arguments of a training run are consistent, made before anything is sampled."""

from __future__ import annotations

from pathlib import Path

from agentfly_kit.agent.rollout_io import dump_json
from agentfly_kit.errors import SettingsError
from agentfly_kit.trainer.config import GROUP_ESTIMATORS, SEE_TURN_REWARDS
from agentfly_kit.trainer.sampling import RolloutSampler
from agentfly_kit.types import Task


def check_run(sampler: RolloutSampler, eval_tasks: list[Task], run: str | Path | None) -> None:
    """Raise an error if the settings of a run do not fit its agent, policy, tasks or processes."""
    agent, policy, config, workers = sampler.agent, sampler.policy, sampler.config, sampler.workers
    # Settings that need a part which is missing, and parts that no setting uses.
    if config.advantage == "gae" and policy.value_head is None:
        raise SettingsError("advantage='gae' needs a value head; load the policy with value_head=True")
    if config.evaluate_every and not eval_tasks:
        raise SettingsError(f"evaluate_every={config.evaluate_every} needs eval_tasks=, such as tasks.test")
    if eval_tasks and not config.evaluate_every:
        raise SettingsError(f"eval_tasks ({len(eval_tasks)} tasks) need TrainConfig(evaluate_every=), got 0")
    # The rewards must allow advantages other than 0.
    if config.group_size == 1 and config.advantage in GROUP_ESTIMATORS and agent.after_observation is None:
        raise SettingsError(
            f"group_size must be at least 2 for advantage={config.advantage!r}, got 1, because the only chain of a "
            "group would have advantage 0; use 'reinforce_plus_plus' or 'gae' for single chains"
        )
    if config.advantage == "gdpo" and len([r for r in agent.reward if r.weight and r.per == "trajectory"]) < 2:
        raise SettingsError(f"advantage='gdpo' needs an agent with at least two rewards per chain, got {agent.reward}")
    turn_rewards = [r.name for r in agent.reward if r.weight and r.per == "turn"]
    turn_rewards += [f"the steps of {pool.name}" for pool in agent.pools if hasattr(pool.sandbox_type, "_wraps")]
    if turn_rewards and not config.sum_turn_rewards and config.advantage not in SEE_TURN_REWARDS:
        raise SettingsError(
            f"sum_turn_rewards must be True for advantage={config.advantage!r}, which compares the rewards of whole "
            f"chains, so that the rewards per turn ({', '.join(turn_rewards)}) have an effect"
        )
    if not agent.reward and agent.group_reward is None and config.advantage != "none":
        raise SettingsError("agent must have a reward to learn from, got none; add one with agent.replace(reward=...)")
    # The chains must be drawn from the policy that is trained.
    if agent.sampling.greedy:
        raise SettingsError(
            "temperature must be above 0 in training, because the loss needs tokens drawn from the policy; use "
            "agent.replace(sampling=af.Sampling(temperature=1.0))"
        )
    if getattr(agent.engine, "policy", policy) is not policy:
        raise SettingsError(
            "the agent's engine must sample from the policy that is trained; use "
            "agent.replace(engine=af.LocalEngine(policy))"
        )
    # Budgets, folders, refills and servers that several processes cannot share.
    if not workers.is_single:
        if sampler.rollout_workers is not None:
            raise SettingsError(
                f"workers must be None with {workers.size} processes, each of which runs its own chains"
            )
        if config.budget is not None:
            raise SettingsError(
                f"budget must be None with several processes, got {config.budget}, because each would count only its "
                "own chains; use group_budget=, because all chains of a group run in the same process"
            )
        if run is None:
            raise SettingsError("run must be a folder that all processes can access, got None")
        if config.refill:
            raise SettingsError(f"refill must be 0 with several processes, got {config.refill}")
        if agent.engine.remote:
            raise SettingsError(
                f"each of the {workers.size} processes must have its own engine, such as LocalEngine or VLLMEngine, "
                f"got {agent.engine!r}; otherwise, every process would send its weights to the same servers"
            )
    if config.save_rollouts:
        for task in sampler.tasks:
            dump_json(task, f"task {task.id!r}")
    sampler.request(sampler.tasks, 0, "train").check(agent, sampler.rollout_workers)
    agent.check_tasks(eval_tasks)
