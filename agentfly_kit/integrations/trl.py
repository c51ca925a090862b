"""The bridge to TRL: our rows for its trainers, our agents inside its GRPOTrainer, its settings for our step.

Knows TRL only by what it asks for: nothing here imports it. Needs `pip install "agentfly_kit[trl]"`.

    rows      sft_dataset, grpo_inputs     tokens and masks as they were recorded, never rendered again
    agents    dataset, rollout_func, reward_func      our engine, tools and rewards roll out, TRL updates
    parts     tools, rewards, response_template       TRL rolls out with its own loop
    settings  step_options                 a GRPOConfig as options of `ppo_step`
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from agentfly_kit import advantages, losses
from agentfly_kit.agent.agent import Agent
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError, SettingsError
from agentfly_kit.types import Message, Row, Task, Trajectory

# --- rows ----------------------------------------------------------------------------------------


def sft_dataset(rows: Iterable[Any]) -> Any:
    """A `datasets.Dataset` for SFTTrainer: "input_ids", and as "labels" the ids where the mask is 1, -100 elsewhere.

    rows: trajectories, each with all its rows, or anything with `ids` and a `mask` of the same length, such as the
        demonstrations of `tiny`.
    SFTTrainer takes such rows as they are: it renders no template and guesses no mask.
    """
    from datasets import Dataset

    out: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for row in (part for given in rows for part in (given.rows if isinstance(given, Trajectory) else (given,))):
        ids = [int(i) for i in row.ids]
        mask = [bool(m) for m in (row.action_mask if isinstance(row, Row) else row.mask)]
        if len(ids) != len(mask):
            raise BatchError(f"a row has {len(ids)} ids and a mask of {len(mask)}; give equal lengths")
        out["input_ids"].append(ids)
        out["labels"].append([i if m else -100 for i, m in zip(ids, mask, strict=True)])
    return Dataset.from_dict(out)


def grpo_inputs(batch: Batch, pad: int = 0) -> dict[str, torch.Tensor]:
    """A batch as GRPOTrainer's own loss takes it: prompts padded on the left, the rest on the right.

    What comes before a row's first sampled token is its prompt. One advantage a row: that of its action tokens.
    Raises:  BatchError if advantages differ within a row.
    """
    first = batch.mask.int().argmax(1)
    rows = len(batch)
    prompt_width, width = int(first.max()), int((batch.lengths - first).max())
    out = {
        name: torch.full((rows, size), fill)
        for name, size, fill in (
            ("prompt_ids", prompt_width, pad),
            ("prompt_mask", prompt_width, 0),
            ("completion_ids", width, pad),
            ("completion_mask", width, 0),
            ("tool_mask", width, 1),
        )
    }
    old = torch.zeros(rows, width)
    ref = torch.zeros(rows, width)
    each = torch.zeros(rows)
    for i in range(rows):
        p, n = int(first[i]), int(batch.lengths[i])
        out["prompt_ids"][i, prompt_width - p :] = batch.ids[i, :p]
        out["prompt_mask"][i, prompt_width - p :] = 1
        out["completion_ids"][i, : n - p] = batch.ids[i, p:n]
        out["completion_mask"][i, : n - p] = 1
        out["tool_mask"][i, : n - p] = batch.mask[i, p:n].long()
        old[i, : n - p] = torch.where(batch.mask[i, p:n], batch.logprobs[i, p:n], 0.0)
        if batch.ref_logprobs is not None:
            ref[i, : n - p] = torch.where(batch.mask[i, p:n], batch.ref_logprobs[i, p:n], 0.0)
        own = batch.advantages[i][batch.mask[i]]
        if not torch.equal(own, own[:1].expand_as(own)):
            raise BatchError(f"row {i} has several advantages, and GRPOTrainer takes one a row")
        each[i] = own[0]
    out |= {"old_per_token_logps": old, "advantages": each, "num_items_in_batch": batch.mask.sum()}
    if batch.ref_logprobs is not None:
        out["ref_per_token_logps"] = ref
    return out


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


def step_options(args: Any) -> dict[str, Any]:
    """A `trl.GRPOConfig` as options of `ppo_step`: the same loss on the same batch.

    The advantages that belong to it are `advantage(args)`.
    Raises:  SettingsError naming a setting that has no counterpart here.
    Source:  trl 1.16, GRPOTrainer._compute_loss.
    """
    for name, off in _UNSUPPORTED.items():
        if getattr(args, name, off) != off:
            raise SettingsError(f"{name}={getattr(args, name)!r} of GRPOConfig has no counterpart in ppo_step")
    kind, level = args.loss_type, args.importance_sampling_level
    if kind not in _AGGREGATES or (level == "sequence" and kind in ("cispo", "sapo")):
        raise SettingsError(f"loss_type={kind!r} with importance_sampling_level={level!r} has no counterpart here")
    if level == "sequence" and args.beta and args.use_bias_correction_kl:
        raise SettingsError(
            "use_bias_correction_kl with importance_sampling_level='sequence' weighs the KL by the row's ratio, which "
            "has no counterpart here; set use_bias_correction_kl=False"
        )
    how = _AGGREGATES[kind]
    low = args.epsilon
    high = low if args.epsilon_high is None else args.epsilon_high
    out: dict[str, Any] = {
        "aggregate": how,
        "denominator": float(args.max_completion_length) if how == "fixed" else None,
        "kl_coef": args.beta,
        "kl_kind": "k3",
        "kl_weighted": bool(args.beta and args.use_bias_correction_kl),
        "epochs": args.num_iterations,
        "max_grad_norm": args.max_grad_norm,
    }
    if kind == "cispo":
        # TRL's epsilon_high is here the cap on the ratio itself.
        out["loss"] = functools.partial(losses.cispo, clip_high=high - 1, bounds="upper")
    elif kind == "sapo":
        taus = {"tau": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
        out["loss"] = functools.partial(losses.sapo, **taus)
    else:
        out |= {"loss": "gspo" if level == "sequence" else "ppo", "clip": low, "clip_high": high}
        if args.delta is not None:
            if level == "sequence":
                raise SettingsError("delta with importance_sampling_level='sequence' has no counterpart here")
            out["dual_clip"] = args.delta
    if args.entropy_coef:
        if how != "token_mean":
            raise SettingsError(
                f"entropy_coef with loss_type={kind!r}: TRL averages the entropy over tokens whatever the loss does, "
                "and ppo_step aggregates both alike; take loss_type='dapo'"
            )
        out["entropy_coef"] = args.entropy_coef
    return out


def advantage(args: Any) -> Callable[..., torch.Tensor]:
    """The estimator of a `trl.GRPOConfig`: sample std and eps 1e-4, or no std.

    Source:  trl 1.16, GRPOTrainer._generate_and_score_completions.
    """
    if args.scale_rewards in ("none", False):
        return advantages.dr_grpo
    if args.scale_rewards in ("group", True):
        return functools.partial(advantages.grpo, eps=1e-4)
    raise SettingsError(f"scale_rewards={args.scale_rewards!r} has no counterpart here; give 'group' or 'none'")


# --- agents inside GRPOTrainer -------------------------------------------------------------------


def dataset(tasks: Iterable[Task]) -> Any:
    """A `datasets.Dataset` with a "prompt" of messages, and each task field that all tasks have as a column."""
    from datasets import Dataset

    every = list(tasks)
    if not every:
        raise SettingsError("dataset was given no task")
    shared = [name for name in every[0].fields if all(name in task.fields for task in every)]
    rows = [{"prompt": list(task.messages)} | {name: task.fields[name] for name in shared} for task in every]
    return Dataset.from_list(rows)


def reward_func(prompts: Any, completions: Any, agent_reward: Sequence[float], **columns: Any) -> list[float]:
    """The reward that `rollout_func` took with each chain: give it as GRPOTrainer's `reward_funcs`."""
    return list(agent_reward)


def rollout_func(agent: Agent, tasks: Iterable[Task]) -> Callable[..., dict[str, Any]]:
    """GRPOTrainer's `rollout_func`: the agent's chains, with what it sampled marked in `env_mask`.

        GRPOTrainer(policy.model, processing_class=policy.chat.tokenizer, train_dataset=af.trl.dataset(tasks),
                    rollout_func=af.trl.rollout_func(agent, tasks), reward_funcs=af.trl.reward_func, args=...)

    tasks: those of the dataset; a prompt is looked up among them, so that tools and rewards get their fields.
    The agent's engine samples from the very model that is trained. `policy.version` counts TRL's optimizer steps.
    An unscored chain gets its group's mean reward and an empty mask: TRL has no word for it, and would count it as 0.
    Raises:  SettingsError if two tasks have one prompt and different fields; when run, if the engine's model is not the
             trainer's, or the temperatures differ.
    """
    if not agent.reward:
        raise SettingsError("the agent has no reward; agent.replace(reward=...)")
    known: dict[str, Task] = {}
    for task in tasks:
        other = known.setdefault(_prompt_key(task.messages), task)
        if other.fields != task.fields:
            raise SettingsError(f"tasks {other.id!r} and {task.id!r} have one prompt and different fields")
    start: list[int] = []

    def roll(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        policy = getattr(agent.engine, "policy", None)
        if policy is None or trainer.accelerator.unwrap_model(trainer.model) is not policy.model:
            raise SettingsError(
                "the agent's engine samples from another model than the one that TRL trains; give GRPOTrainer "
                "policy.model, and the agent af.LocalEngine(policy)"
            )
        if agent.sampling.temperature != trainer.args.temperature:
            raise SettingsError(
                f"the agent samples at temperature {agent.sampling.temperature} and GRPOConfig trains at "
                f"{trainer.args.temperature}; give both the same"
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
    return json.dumps([{k: m[k] for k in ("role", "content")} for m in messages], sort_keys=True)


def _find_task(known: dict[str, Task], prompt: Any) -> Task:
    task = known.get(_prompt_key(prompt)) if isinstance(prompt, list) else None
    if task is None:
        raise SettingsError(f"no task has this prompt: {prompt!r:.200}; make the dataset with af.trl.dataset(tasks)")
    return task


def _sample_trajectories(agent: Agent, wanted: list[Task], index: int, training: bool) -> list[Trajectory]:
    """One chain for each task in `wanted`, in order; a task that is there several times is a group."""
    counts = Counter(task.id for task in wanted)
    by_id = {task.id: task for task in wanted}
    found: dict[str, list[Trajectory]] = defaultdict(list)

    async def go() -> None:
        for count in sorted(set(counts.values())):
            some = [by_id[i] for i, n in counts.items() if n == count]
            rollout = await agent.rollout(some, count, index=index, purpose="train" if training else "evaluate")
            for trajectory in rollout.trajectories:
                found[trajectory.task.id].append(trajectory)

    with ThreadPoolExecutor(1, "agentfly-trl") as thread:  # a notebook's own loop may be running in this one
        thread.submit(asyncio.run, go()).result()
    return [found[task.id].pop(0) for task in wanted]


def _rollout_columns(chains: list[Trajectory], end: int) -> dict[str, Any]:
    scored: dict[str, list[float]] = defaultdict(list)
    for t in chains:
        if t.reward is not None:
            scored[t.group].append(t.reward)
    out: dict[str, list[Any]] = defaultdict(list)
    for t in chains:
        if len(t.rows) > 1:
            raise SettingsError(
                f"{t.id!r} was compacted into {len(t.rows)} rows, and TRL trains a completion as one; take the "
                "compaction out of the agent's hooks (and history='exact'), or train with af.train"
            )
        prompt_length = len(t.turns[0].ids or ())
        ids = [int(i) for i in t.ids]
        mask = [int(m) for m in t.action_mask]
        logprobs = [0.0 if math.isnan(x) else float(x) for x in t.logprobs.tolist()]
        if len(ids) == prompt_length:  # it failed before its first action; TRL wants a token
            ids, mask, logprobs = [*ids, end], [*mask, 0], [*logprobs, 0.0]
        group = scored[t.group]
        unscored = t.reward is None
        out["prompt_ids"].append(ids[:prompt_length])
        out["completion_ids"].append(ids[prompt_length:])
        out["logprobs"].append(logprobs[prompt_length:])
        out["env_mask"].append([0] * (len(ids) - prompt_length) if unscored else mask[prompt_length:])
        out["agent_reward"].append(t.reward if not unscored else sum(group) / max(len(group), 1))
    return dict(out)


# --- parts for TRL's own loop --------------------------------------------------------------------


def response_template(start: str = "<|im_start|>assistant\n", end: str = "<|im_end|>") -> dict[str, Any]:
    """How TRL reads tool calls in hermes form: set it as `tokenizer.response_template` where TRL knows none.

    Source:  the form is transformers', that of trl 1.16's template for Qwen3.
    """
    escaped = "".join("\\" + c if c in r"\|.*+?()[]{}^$" else c for c in end)
    call = {"type": "function", "function": "{content}"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": start,
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": call,
            },
            "content": {"close_pattern": escaped + r"\s*", "content": "text"},
        },
    }


def tools(agent: Agent) -> list[Callable[..., Any]]:
    """The agent's tools as GRPOTrainer's `tools=`: what the model is told is what it would be told here.

    Raises:  SettingsError for a tool that needs a sandbox, a task field or the context: TRL has nothing to give it.
             Use `rollout_func` for those.
    """
    out = []
    for tool in agent.tools:
        shown = set(tool.schema["function"]["parameters"]["properties"])
        hidden = [name for name in inspect.signature(tool.function).parameters if name not in shown]
        if hidden:
            raise SettingsError(
                f"tool {tool.name!r} asks for {', '.join(hidden)}, which TRL cannot give; use af.trl.rollout_func"
            )
        out.append(_as_trl_tool(tool))
    return out


def _as_trl_tool(tool: Any) -> Callable[..., Any]:
    @functools.wraps(tool.function)
    async def call(*positional: Any, **arguments: Any) -> str:
        bound = inspect.signature(tool.function).bind(*positional, **arguments)
        return str((await tool.try_(**bound.arguments)).observation)

    call.__name__ = tool.name
    return call


def rewards(agent: Agent) -> list[Callable[..., list[float]]]:
    """The agent's rewards as GRPOTrainer's `reward_funcs`: `final` is the last message, fields are dataset columns.

    Raises:  SettingsError for a reward that asks for more than that. Use `rollout_func` for those.
    """
    return [_as_trl_reward(reward) for reward in agent.reward]


def _as_trl_reward(reward: Any) -> Callable[..., list[float]]:
    wanted = inspect.signature(reward.function).parameters
    unsupported = sorted({"trajectory", "context", "turn", "sandbox"} & set(wanted))
    if unsupported or inspect.iscoroutinefunction(reward.function) or reward.per != "trajectory":
        what = ", ".join(unsupported) or ("awaiting" if reward.per == "trajectory" else "one call a turn")
        raise SettingsError(f"reward {reward.name!r} asks for {what}; use af.trl.rollout_func(agent)")

    def score(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        out = []
        for i, completion in enumerate(completions):
            last = completion[-1]
            answered = last["role"] == "assistant" and not last.get("tool_calls")
            arguments = {name: columns[name][i] for name in wanted if name in columns}
            if "final" in wanted:
                arguments["final"] = str(last.get("content") or "") if answered else None
            value = reward(**arguments)
            out.append(reward.weight * float(value["reward"] if isinstance(value, dict) else value))
        return out

    score.__name__ = reward.name
    return score
