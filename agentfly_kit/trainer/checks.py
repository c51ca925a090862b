"""Consistency checks for the arguments of a training run, made before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentfly_kit.agent.rollout_io import dump_json
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.trainer.config import GROUP_ESTIMATORS, SEE_TURN_REWARDS
from agentfly_kit.trainer.sampling import RolloutSampler
from agentfly_kit.types import Task


def check_run(sampler: RolloutSampler, eval_tasks: list[Task], run: str | Path | None) -> None:
    """Raise an error if the settings of a run are inconsistent with its agent, policy, tasks or processes."""
    agent, policy, config, workers = sampler.agent, sampler.policy, sampler.config, sampler.workers
    several = not workers.is_single
    turn_rewards = [r.name for r in agent.reward if r.weight and r.per == "turn"]
    turn_rewards += [f"the steps of {pool.name}" for pool in agent.pools if hasattr(pool.sandbox_type, "_wraps")]
    requirements = [
        # Reject settings that need a missing argument, and arguments that no setting uses.
        (
            config.advantage != "gae" or policy.value_head is not None,
            "advantage='gae' needs a value head; load the policy with value_head=True",
        ),
        (
            bool(config.evaluate_every) == bool(eval_tasks),
            f"evaluate_every={config.evaluate_every} needs eval_tasks=, such as tasks.test, and vice versa, got "
            f"{len(eval_tasks)} tasks",
        ),
        # The rewards must allow nonzero advantages.
        (
            config.group_size > 1 or config.advantage not in GROUP_ESTIMATORS or agent.after_observation is not None,
            f"group_size must be at least 2 for advantage={config.advantage!r}, got 1; use 'reinforce_plus_plus' or "
            "'gae' for single chains",
        ),
        (
            config.advantage != "gdpo" or len([r for r in agent.reward if r.weight and r.per == "trajectory"]) > 1,
            f"advantage='gdpo' needs an agent with at least two rewards per chain, got {agent.reward}",
        ),
        (
            not turn_rewards or config.sum_turn_rewards or config.advantage in SEE_TURN_REWARDS,
            f"sum_turn_rewards must be True for advantage={config.advantage!r}, which compares the rewards of whole "
            f"chains, so that the rewards per turn ({', '.join(turn_rewards)}) have an effect",
        ),
        (
            agent.reward or agent.group_reward is not None or config.advantage == "none",
            "agent must have a reward to learn from, got none; add one with agent.replace(reward=...)",
        ),
        # The chains must be sampled from the policy that is trained.
        (
            not agent.sampling.greedy,
            "temperature must be above 0 in training, got 0; use agent.replace(sampling=af.Sampling(temperature=1.0))",
        ),
        (
            getattr(agent.engine, "policy", policy) is policy,
            "the agent's engine must sample from the policy that is trained; use "
            "agent.replace(engine=af.LocalEngine(policy))",
        ),
        (
            policy.accelerator is None or not hasattr(agent.engine, "policy"),
            f"the agent's engine must not sample from a sharded policy in this process, got {agent.engine!r}",
        ),
        (
            config.overlap <= 1 or sampler.rollout_workers is None,
            f"overlap must be at most 1 with workers, which run one rollout after the other, got {config.overlap}",
        ),
        # Several processes cannot share a budget, a temporary folder, refills or a server.
        (
            not several or sampler.rollout_workers is None,
            f"workers must be None with {workers.size} processes, each of which runs its own chains",
        ),
        (
            not several or config.budget is None,
            f"budget must be None with several processes, each of which counts only its own chains, got "
            f"{config.budget}; use group_budget=",
        ),
        (not several or run is not None, "run must be a folder that all processes can access, got None"),
        (not several or not config.refill, f"refill must be 0 with several processes, got {config.refill}"),
        (
            not several or not agent.engine.remote,
            f"each of the {workers.size} processes must have its own engine, got {agent.engine!r}; use LocalEngine or "
            "VLLMEngine",
        ),
    ]
    for met, text in requirements:
        if not met:
            raise SettingsError(text)
    if config.save_rollouts:
        for task in sampler.tasks:
            dump_json(task, f"task {task.id!r}")
    sampler.request(sampler.tasks, 0, "train").check(agent, sampler.rollout_workers)
    agent.check_tasks(eval_tasks)


def check_splits(tasks: Any) -> None:
    """Raise TaskError if the tasks contain the split "train" and other splits."""
    splits = getattr(tasks, "splits", {})
    if "train" in splits and len(splits) > 1:
        counts = " and ".join(f"{count} {name}" for name, count in splits.items())
        raise TaskError(f"tasks must not contain held-out tasks, got {counts} tasks; pass tasks.train")
