"""`AgentSettings`: engine, chat format, tools, rewards, limits and hooks of an agent."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit._display import Displayable
from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import SettingsError, TaskError, check_accepts, check_instance, check_settings
from agentfly_kit.pool.environment import check_reset, is_environment, reset_arguments
from agentfly_kit.rewards import RewardSet
from agentfly_kit.samples import Sampling
from agentfly_kit.success import SuccessRule, check_success_rule
from agentfly_kit.tools.tool import ToolSet
from agentfly_kit.trajectories import Group, Trajectory
from agentfly_kit.types import Message, Task, first_image, images_of

# Arguments that each hook receives.
_HOOKS = {
    "before_chain": ("chain",),
    "before_turn": ("chain",),
    "after_observation": ("chain",),
    "on_context_full": ("chain",),
    "user": ("chain",),
    "after_chain": ("chain", "trajectory"),
    "group_reward": ("group",),
    "watch": ("rollout",),
}

# Conditions in the form that `check_settings` expects.
_LIMITS = {
    "max_turns": "of at least 1",
    "max_tokens": "of at least 1",
    "max_tool_calls": "of at least 1",
    "max_invalid_calls": "of at least 1",
    "max_nudges": "of at least 1",
    "timeout": "above 0",
    "max_concurrent_requests": "of at least 1",
}

# Settings that cannot be combined with a harness, because it replaces the built-in agent loop.
_WITHOUT_HARNESS = (
    "tools",
    "system",
    "max_tool_calls",
    "nudge",
    "before_chain",
    "before_turn",
    "after_observation",
    "on_context_full",
    "user",
)


@dataclass(frozen=True, eq=False)
class AgentSettings(Displayable):
    """Engine, chat format, tools, rewards, limits and hooks of an agent. Immutable.

    Hooks may be sync or async.

    Args:
        engine: Engine that samples the actions.
        chat: `Chat` that converts between messages and token ids of the model.
        tools: Tools or plain functions; stored as a `ToolSet`.
        reward: A reward, a list of rewards, whose weighted sum is used, or None to leave chains unscored; stored as a
            `RewardSet`.
        success: Rule that decides whether a scored chain succeeds. A number is the minimum reward. A string is the name
            of a metric (a reward, or a number that a reward returns) that must be at least 1; a chain without this
            metric becomes unscored. A function receives the scored `Trajectory` and returns a bool. The result is
            recorded as the metric "success". By default, a chain succeeds if a reward returned a nonzero metric
            "success" or, if there is no such metric, if the reward is at least 1.
        system: System message placed before the messages of each task, or None.
        max_turns: Maximum number of actions per chain.
        max_tokens: Maximum number of sampled tokens per chain, or None for no limit. `Sampling.max_tokens` limits one
            action.
        max_tool_calls: Maximum number of tool calls per chain, or None for no limit. Malformed calls and calls of
            unknown tools are not counted. Calls over the limit are not run.
        max_invalid_calls: A chain ends after this many consecutive actions with only malformed or unknown calls.
        nudge: User message that is appended after a sampled action without a tool call, such as "Call a tool.", so that
            the chain continues. By default, the chain ends with "answered".
        max_nudges: Maximum number of nudges per chain. After the last nudge, an action without a tool call is the
            answer.
        user: Function that replies to the agent's texts in place of a person. The function is called with the chain
            after each action without a tool call and returns the reply, which becomes a user message, or None to end
            the chain with "answered". An action at the limit `max_turns` gets no reply. See `af.hooks.simulated_user`.
        show_exceptions: Whether the model sees the message of every exception that a tool raises. By default, the model
            sees only the message of a `ToolError`, because other exceptions may contain the answer.
        timeout: Time limit per chain in seconds, including waiting times, or None for no limit.
        sampling: Sampling settings of each action.
        pools: A pool or a list of pools, from which tools and rewards get their sandboxes.
        max_concurrent_requests: Maximum number of concurrent engine requests across all chains of this agent, or None
            for no limit.
        seed: Seed from which the seeds of all chains are derived.
        name: Author recorded for sampled turns.
        before_chain: Called with the chain before its first action, even if the chain is stepped interactively. Returns
            a string or messages to append to the prompt, for example the first observation of an environment, or None.
        before_turn: Called with the chain before each action in a rollout. The hook may write the action with
            `chain.force(text, author="hook")`, or start a new row with `chain.compact(summary)`.
        after_observation: Called with the chain after each observation in a rollout, unless the observation ends the
            chain. Returns the number of forks to run from this turn, or None.
        on_context_full: Called with the chain, in a rollout, if the context has no room for the next action or has
            truncated the last action. If the hook calls `chain.compact(...)`, the chain continues; otherwise the chain
            ends with "context_full".
        after_chain: Called with each finished chain of a rollout and its trajectory.
        group_reward: Called with each group after all chains of a rollout have ended, for rewards that compare chains.
            Returns one number per chain, in order, to add to its reward, or None to leave the chain unscored.
        watch: Called with the `RolloutHandle` of each rollout of the agent when it starts, including those of
            evaluations and training runs, for example to subscribe to its events; see `af.traces`.
        harness: Function that runs an agent of any framework on one task and replaces the built-in loop. The function
            sends requests to `endpoint`, an `af.Endpoint`. The function returns the final answer, or None to use the
            last action as the answer. Parameters are injected: `endpoint`, `task`, `context` and task fields by name,
            sandboxes by annotation. A sync function runs in a thread. `max_turns` limits the number of requests.
    """

    engine: Engine
    chat: Chat
    tools: Any = ()
    reward: Any = None
    success: SuccessRule = None
    system: str | None = None
    max_turns: int = 8
    max_tokens: int | None = None
    max_tool_calls: int | None = None
    max_invalid_calls: int = 3
    nudge: str | None = None
    max_nudges: int = 1
    user: Callable[[Any], Any] | None = None
    show_exceptions: bool = False
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    pools: Sequence[Any] = ()
    max_concurrent_requests: int | None = None
    seed: int = 0
    name: str = "policy"
    before_chain: Callable[[Any], Any] | None = None
    before_turn: Callable[[Any], Any] | None = None
    after_observation: Callable[[Any], Any] | None = None
    on_context_full: Callable[[Any], Any] | None = None
    after_chain: Callable[[Any, Trajectory], Any] | None = None
    group_reward: Callable[[Group], Any] | None = None
    watch: Callable[[Any], Any] | None = None
    harness: Any = None
    # Semaphores for `max_concurrent_requests`, keyed by event loop. A copy made by dataclasses.replace shares the
    # semaphores.
    _semaphores: dict[Any, asyncio.Semaphore] = field(default_factory=dict, repr=False)
    # Contains the handle of the most recently started rollout, if there is one.
    _last_handle: list[Any] = field(default_factory=list, repr=False)
    # Keys of the warnings that have been issued, such as the name of a redefined tool.
    _warned: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        check_instance("engine", self.engine, Engine, "an engine such as af.LocalEngine(policy)")
        check_instance("chat", self.chat, Chat, "a Chat such as policy.chat or af.Chat(tokenizer)")
        policy = getattr(self.engine, "policy", None)  # engines such as LocalEngine have a policy
        if policy is not None and (not self.chat.tokenizer or policy.chat.vocabulary != self.chat.vocabulary):
            raise SettingsError("chat must have the tokenizer of the engine's policy, such as chat=policy.chat")
        check_settings(self, _LIMITS)
        if self.nudge is not None and not self.nudge.strip():
            raise SettingsError(f"nudge must be a non-empty string or None, got {self.nudge!r}")
        if self.nudge is None and self.max_nudges != 1:
            raise SettingsError(f"max_nudges has an effect only with nudge, got {self.max_nudges}")
        if self.nudge is not None and self.user is not None:
            raise SettingsError("nudge must be None with user, because the user's reply continues the chain")
        # Check signatures here, because a wrong one would otherwise fail only in the first chain that calls the hook.
        for name, parameters in _HOOKS.items():
            if (hook := getattr(self, name)) is not None:
                check_accepts(name, hook, *parameters)
        check_success_rule(self.success)
        # Normalize arguments that accept several forms. With a text-only engine, the server parses tool calls, so the
        # template need not support them.
        tools = self.tools if isinstance(self.tools, ToolSet) else ToolSet(self.tools)
        if tools.names and self.exact:
            self.chat.require_tools()
        if (self.nudge is not None or self.user is not None) and self.exact:
            self.chat.require_append("user")
        reward = RewardSet(self.reward)
        harness = self.harness
        if harness is not None:
            for name in _WITHOUT_HARNESS:
                default = type(self).__dataclass_fields__[name].default
                if tools.names if name == "tools" else getattr(self, name) != default:
                    raise SettingsError(f"{name} must not be given with harness, which has its own loop")
        # Check pools here, because a chain leases a sandbox only at its first use and would fail late.
        pools = (self.pools,) if hasattr(self.pools, "acquire") else tuple(self.pools)
        for pool in pools:
            check_reset(pool.sandbox_type)
        required = (*tools.sandbox_types, *reward.sandbox_types, *(harness.sandbox_types if harness else ()))
        for sandbox_type in required:
            if not any(issubclass(pool.sandbox_type, sandbox_type) for pool in pools):
                raise SettingsError(
                    "pools must provide the sandboxes that the functions require, got none for "
                    f"{sandbox_type.__name__}; add pools=[af.Pool({sandbox_type.__name__}, size=8)]"
                )
        settings = {"tools": tools, "reward": reward, "harness": harness, "pools": pools}
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @property
    def exact(self) -> bool:
        """True if the engine exchanges token ids; False if it is text-only."""
        return self.engine.tokens == "exact"

    def _request_slot(self) -> AbstractAsyncContextManager[Any]:
        """Return a context manager that limits the number of concurrent requests to `max_concurrent_requests`."""
        if (limit := self.max_concurrent_requests) is None:
            return nullcontext()
        return self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(limit))

    def opening(self, task: Task) -> tuple[Message, ...]:
        """Return the initial messages of each chain of a task: the system message, if any, and the task's messages."""
        return task.messages if self.system is None else ({"role": "system", "content": self.system}, *task.messages)

    def check_images(self, task: Task, messages: Sequence[Message]) -> None:
        """Raise SettingsError if the messages of a chain of `task` contain images, and the engine reads none."""
        if not (first := first_image(messages)) or self.engine.images:
            return
        reason = f" ({self.engine.image_obstacle})" if self.engine.image_obstacle else ""
        raise SettingsError(
            f"task {task.id!r}: {first} has an image, but {self.engine!r} reads no images{reason}; use an engine that "
            "reads images, such as OpenAIEngine with a vision model, or describe the image in words"
        )

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise TaskError if a task lacks a required field, and warn once about each redefined tool or reward.

        Raise SettingsError if a reward requires token ids, which the engine does not return, or if a task has more
        images than the engine reads.
        """
        for task in tasks:
            self.check_images(task, task.messages)
            if (count := len(images_of(task.messages))) > self.engine.images:
                raise SettingsError(
                    f"task {task.id!r} must have at most {self.engine.images} images for {self.engine!r}, got {count}"
                )
        if not self.exact and (counting := [r.name for r in self.reward if r.needs_tokens]):
            raise SettingsError(
                f"the reward {counting[0]!r} requires an engine with exact tokens, got {self.engine!r}"
            )
        self.tools.check(tasks)
        self.reward.check(tasks)
        if self.harness is not None:
            self.harness.check(tasks)
        for pool in self.pools:
            if is_environment(pool.sandbox_type):
                for task in tasks:
                    reset_arguments(pool.sandbox_type, task)
        changed = [self.harness.name] if self.harness is not None and self.harness.redefined() else []
        for name in (*self.tools.redefined(), *self.reward.redefined(), *changed):
            if name not in self._warned:
                self._warned.append(name)
                warnings.warn(
                    f"{name!r} was defined again, but this agent still uses the earlier definition; "
                    f"agent.replace(tools=[...], reward=..., harness=...) takes the new one",
                    stacklevel=4,
                )


def task_list(tasks: Any) -> list[Task]:
    """Return one or several tasks as a list. Raise `TaskError` if there are none, or any is not a `Task`."""
    single = isinstance(tasks, Task | str) or not isinstance(tasks, Iterable)
    given: list[Any] = [tasks] if single else list(tasks)
    if not given:
        raise TaskError("tasks must hold at least one task, got none")
    for task in given:
        if not isinstance(task, Task):
            what = f"the string {task[:60]!r}" if isinstance(task, str) else repr(task)
            raise TaskError(f"tasks must be Task objects, got {what}; af.tasks_from(rows) makes them from rows")
    return given
