"""Integration with TRL; requires `pip install "agentfly_kit[trl]"`. This module does not import TRL itself.

rows      sft_dataset                             train on recorded tokens and masks with SFTTrainer
agents    dataset, rollout_func, reward_func      train an agent's policy with GRPOTrainer
adapters  reward, environment                     use TRL reward functions and environments in an agent
settings  ppo_config, advantage                   convert a GRPOConfig to a PPOConfig and an advantage estimator
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from agentfly_kit import advantages, losses
from agentfly_kit.agent.agent import Agent
from agentfly_kit.errors import BatchError, SettingsError
from agentfly_kit.integrations.adapters import environment as environment
from agentfly_kit.integrations.adapters import reward as reward
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message, Task, drop_none, first_image

# --- rows ----------------------------------------------------------------------------------------


def sft_dataset(rows: Iterable[Trajectory], authors: str | Sequence[str] | None = None) -> Any:
    """Convert rows to a `datasets.Dataset` for SFTTrainer, with the columns "input_ids" and "labels".

    Action tokens are labelled with their ids, all other tokens with -100. SFTTrainer uses such rows unchanged, without
    rendering a chat template or inferring a mask. Rows without labelled tokens are omitted, but each trajectory must
    have at least one labelled row.

    Args:
        rows: A rollout or trajectories. To imitate successes only, pass `[t for t in rollout if t.success]`.
        authors: Authors whose action tokens are labelled, such as "policy" or "script". None labels all actions,
            whether sampled, scripted or forced.

    Raises:
        BatchError: If a trajectory has no labelled token.
        SettingsError: If a trajectory has an image.
    """
    from datasets import Dataset

    names = (authors,) if isinstance(authors, str) else authors
    out: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for trajectory in rows:
        _check_text(trajectory.task, trajectory.messages)
        masks = [row.written_by(*names or ()) for row in trajectory.rows]
        if not any(mask.any() for mask in masks):
            raise BatchError(
                f"{trajectory!r} must have at least one token to label, got none in actions"
                f"{'' if names is None else ' of ' + ' or '.join(names)}; omit this trajectory"
            )
        for row, mask in zip(trajectory.rows, masks, strict=True):
            if mask.any():
                out["input_ids"].append(row.ids.tolist())
                out["labels"].append([i if m else -100 for i, m in zip(row.ids.tolist(), mask, strict=True)])
    return Dataset.from_dict(out)


def _check_text(task: Task, messages: Iterable[Message]) -> None:
    if first := first_image(messages):
        raise SettingsError(
            f"task {task.id!r}: {first} has an image, but af.trl reads no images; train with af.train"
        )


# --- settings ------------------------------------------------------------------------------------

_AGGREGATES: dict[str, losses.AggregateMode] = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "fixed",
}
_UNSUPPORTED = {
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_adaptive_entropy": False,
    "mask_truncated_completions": False,
}


def ppo_config(args: Any) -> PPOConfig:
    """Convert a `trl.GRPOConfig` to settings of `ppo_step` that give the same loss on the same batch.

    `advantage(args)` returns the matching advantage estimator.

    Raises:
        SettingsError: If a setting has no counterpart in `ppo_step`. The message names the setting.

    Source:  trl 1.16, GRPOTrainer._compute_loss.
    """
    for name, off in _UNSUPPORTED.items():
        if getattr(args, name, off) != off:
            raise SettingsError(f"{name}={getattr(args, name)!r} of GRPOConfig has no counterpart in ppo_step")
    kind, level = args.loss_type, args.importance_sampling_level
    if kind not in _AGGREGATES or (level == "sequence" and kind in ("cispo", "sapo")):
        raise SettingsError(
            f"loss_type={kind!r} with importance_sampling_level={level!r} has no counterpart in ppo_step"
        )
    if level == "sequence" and args.beta and args.use_bias_correction_kl:
        raise SettingsError(
            "use_bias_correction_kl with importance_sampling_level='sequence' has no counterpart in ppo_step"
        )
    how = _AGGREGATES[kind]
    if args.entropy_coef and how != "token_mean":
        raise SettingsError(
            f"entropy_coef with loss_type={kind!r} has no counterpart in ppo_step; use loss_type='dapo'"
        )
    if args.delta is not None and level == "sequence":
        raise SettingsError("delta with importance_sampling_level='sequence' has no counterpart in ppo_step")
    config = PPOConfig(
        aggregate={"how": how, "denominator": float(args.max_completion_length)} if how == "fixed" else how,
        kl_coef=args.beta,
        kl_weighted=bool(args.beta and args.use_bias_correction_kl),
        entropy_coef=args.entropy_coef or 0.0,
        epochs=args.num_iterations,
        max_grad_norm=args.max_grad_norm,
    )
    low = args.epsilon
    high = low if args.epsilon_high is None else args.epsilon_high
    if kind == "cispo":
        # For CISPO, TRL's epsilon_high bounds the ratio itself, not its distance from 1.
        return config.replace(loss=functools.partial(losses.cispo, clip_high=high - 1, bounds="upper"))
    if kind == "sapo":
        taus = {"tau": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
        return config.replace(loss=functools.partial(losses.sapo, **taus))
    return config.replace(
        loss="gspo" if level == "sequence" else "ppo", clip=low, clip_high=high, dual_clip=args.delta
    )


def advantage(args: Any) -> Callable[..., torch.Tensor]:
    """Return the advantage estimator of a `trl.GRPOConfig`: `grpo` with the sample std and eps=1e-4, or `dr_grpo`.

    Raises:
        SettingsError: If `scale_rewards` has no counterpart.

    Source:  trl 1.16, GRPOTrainer._generate_and_score_completions.
    """
    if args.scale_rewards in ("none", False):
        return advantages.dr_grpo
    if args.scale_rewards in ("group", True):
        return functools.partial(advantages.grpo, eps=1e-4)
    raise SettingsError(f"scale_rewards must be 'group' or 'none', got {args.scale_rewards!r}")


# --- agents inside GRPOTrainer -------------------------------------------------------------------


def dataset(tasks: Iterable[Task]) -> Any:
    """Convert tasks to a `datasets.Dataset` with the column "prompt" (messages) and the fields that all tasks have.

    Raises:
        SettingsError: If there are no tasks, or a task has an image.
    """
    from datasets import Dataset

    every = list(tasks)
    if not every:
        raise SettingsError("dataset needs at least one task, got none")
    for task in every:
        _check_text(task, task.messages)
    shared = [name for name in every[0].fields if all(name in task.fields for task in every)]
    rows = [{"prompt": list(task.messages)} | {name: task.fields[name] for name in shared} for task in every]
    return Dataset.from_list(rows)


def reward_func(prompts: Any, completions: Any, agent_reward: Sequence[float], **columns: Any) -> list[float]:
    """Return the rewards that `rollout_func` recorded; pass this function as GRPOTrainer's `reward_funcs`."""
    return list(agent_reward)


def rollout_func(agent: Agent, tasks: Iterable[Task]) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` for GRPOTrainer that samples trajectories with the agent.

        GRPOTrainer(policy.model, processing_class=policy.chat.tokenizer, train_dataset=af.trl.dataset(tasks),
                    rollout_func=af.trl.rollout_func(agent, tasks), reward_funcs=af.trl.reward_func, args=...)

    Sampled tokens are marked in `env_mask`. The agent's engine must sample from the trained model, and `policy.version`
    follows TRL's optimizer steps. TRL cannot represent unscored trajectories and would count their reward as 0;
    instead, they get the mean reward of their group and a mask of zeros.

    Args:
        agent: An agent with a reward.
        tasks: The tasks of the dataset. For each prompt from TRL, tools and rewards get the fields of its task.

    Raises:
        SettingsError: If the agent has no reward, a task has an image, or two tasks have the same prompt but different
            fields. The returned function raises this error if agent and trainer have different models or sampling
            temperatures, or a tool returned an image.
    """
    if not agent.reward:
        raise SettingsError("the agent has no reward; add one with agent.replace(reward=...)")
    known: dict[str, Task] = {}
    for task in tasks:
        _check_text(task, task.messages)
        other = known.setdefault(_prompt_key(task.messages), task)
        if (other.fields, other.messages) != (task.fields, task.messages):
            raise SettingsError(f"tasks {other.id!r} and {task.id!r} have the same prompt but different fields")
    start: list[int] = []

    def roll(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        policy = getattr(agent.engine, "policy", None)
        if policy is None or trainer.accelerator.unwrap_model(trainer.model) is not policy.model:
            raise SettingsError(
                "the agent's engine must sample from the model that TRL trains; pass policy.model to GRPOTrainer and "
                "af.LocalEngine(policy) to the agent"
            )
        if agent.sampling.temperature != trainer.args.temperature:
            raise SettingsError(
                f"the agent samples at temperature {agent.sampling.temperature}, but GRPOConfig has temperature "
                f"{trainer.args.temperature}; set both to the same value"
            )
        if not start:
            start.append(policy.version - trainer.state.global_step)
        policy.version = start[0] + trainer.state.global_step
        training = trainer.model.training
        policy.model.eval()
        try:
            chains = _sample_trajectories(
                agent, [_find_task(known, p) for p in prompts], trainer.state.global_step, training
            )
        finally:
            policy.model.train(training)
        return _rollout_columns(chains, policy.chat.stop_ids[0])

    return roll


def _prompt_key(messages: Iterable[Message]) -> str:
    # A `datasets.Dataset` adds keys with the value None, so that all rows have the same keys.
    return json.dumps([drop_none(message) for message in messages], sort_keys=True)


def _find_task(known: dict[str, Task], prompt: Any) -> Task:
    task = known.get(_prompt_key(prompt)) if isinstance(prompt, list) else None
    if task is None:
        raise SettingsError(
            f"no task has this prompt: {prompt!r:.200}; create the dataset with af.trl.dataset(tasks)"
        )
    return task


def _sample_trajectories(agent: Agent, wanted: list[Task], index: int, training: bool) -> list[Trajectory]:
    """Sample one trajectory for each task in `wanted`, in this order. Trajectories of the same task form a group."""
    counts = Counter(task.id for task in wanted)
    by_id = {task.id: task for task in wanted}
    found: dict[str, list[Trajectory]] = defaultdict(list)

    async def go() -> None:
        for count in sorted(set(counts.values())):
            some = [by_id[i] for i, n in counts.items() if n == count]
            rollout = await agent.rollout(some, count, index=index, purpose="train" if training else "evaluate")
            for trajectory in rollout.trajectories:
                found[trajectory.task.id].append(trajectory)

    with ThreadPoolExecutor(1, "agentfly-trl") as thread:  # this thread may already run a notebook's event loop
        thread.submit(asyncio.run, go()).result()
    return [found[task.id].pop(0) for task in wanted]


def _rollout_columns(chains: list[Trajectory], end: int) -> dict[str, Any]:
    scored: dict[str, list[float]] = defaultdict(list)
    for t in chains:
        if t.reward is not None:
            scored[t.group].append(t.reward)
    out: dict[str, list[Any]] = defaultdict(list)
    for t in chains:
        _check_text(t.task, t.messages)
        if len(t.rows) > 1:
            raise SettingsError(
                f"{t.id!r} was compacted into {len(t.rows)} rows, but TRL needs one row per completion; remove the "
                "compaction from the agent's hooks (and use history='exact'), or train with af.train"
            )
        prompt_length = len(t.turns[0].ids or ())
        ids = [int(i) for i in t.ids]
        mask = [int(m) for m in t.action_mask]
        logprobs = [0.0 if math.isnan(x) else float(x) for x in t.logprobs.tolist()]
        if len(ids) == prompt_length:  # failed before the first action, but TRL needs at least one token
            ids, mask, logprobs = [*ids, end], [*mask, 0], [*logprobs, 0.0]
        group = scored[t.group]
        unscored = t.reward is None
        out["prompt_ids"].append(ids[:prompt_length])
        out["completion_ids"].append(ids[prompt_length:])
        out["logprobs"].append(logprobs[prompt_length:])
        out["env_mask"].append([0] * (len(ids) - prompt_length) if unscored else mask[prompt_length:])
        out["agent_reward"].append(t.reward if not unscored else sum(group) / max(len(group), 1))
    return dict(out)
