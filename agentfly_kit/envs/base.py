"""Build an agent from an environment class that defines tool methods and, optionally, a reward and a `done` flag.

An environment is any class whose `reset` takes the task or some of its fields. No base class or registration is needed.

    class Guess:
        def reset(self, secret):
            self.secret, self.done = secret, False
            return "I think of a number from 1 to 10."

        @af.tool
        def guess(self, number: int) -> str:
            \"\"\"Guess the number.

            Args:
                number: from 1 to 10.
            \"\"\"
            self.done = number == self.secret
            return "right" if self.done else "higher" if number < self.secret else "lower"

        def reward(self):
            return float(self.done)

    agent = af.envs.agent(Guess, engine, chat=policy.chat)

check_task(task)    Called for every task before a rollout starts, on an instance whose `start` was not called. Raise
                    TaskError or another ValueError, which becomes a TaskError with the id of the task, if `reset`
                    cannot use the task. Optional.
reset(...)          Called before each chain. Must reset all state, because an instance is used for many chains in turn.
                    Parameters are filled by name: `task`, `seed`, and fields of the task; `**fields` receives all
                    fields. The return value (a string, messages or None) is appended to the task's prompt.
tools               Methods decorated with @af.tool. Sync methods run in a thread, async methods on the event loop. The
                    calls of an action run one after the other, in order. All sync methods of an instance run in one
                    thread. If a call was cancelled or timed out, the
                    instance is replaced after the chain, because the call may continue.
done                True once the episode is over: the chain then stops with `env_done`. Optional.
reward(...)         Score of the chain. Parameters are filled by name: `state`, and everything else that rewards may
                    request (final, trajectory, context, a task field, a sandbox by its class). Optional;
                    agent(reward=mine) replaces it. The method may also be named `get_reward`.
reward_sandboxes    Sandbox classes that `reward` leases with `await context.sandbox(...)`. Optional.
state               Value that rewards may read. Defaults to a dictionary of the public attributes.
fork(into)          Copy the state to another instance. Without it, a chain that has started cannot be forked.
cleanup()           Called after a chain has released the environment, to stop anything that is still running. Optional.
start, alive, close Used as in any other sandbox class. Optional.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentfly_kit._async import threads
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.chain_editing import Chain
from agentfly_kit.errors import SandboxError, SettingsError, TaskError, is_host_failure
from agentfly_kit.pool import environment as environments
from agentfly_kit.pool.pool import Pool
from agentfly_kit.rewards import Reward, RewardSet
from agentfly_kit.tools.calling import call_user_function, failure_from
from agentfly_kit.tools.context import Context
from agentfly_kit.tools.injection import FromPool, injection
from agentfly_kit.tools.inspection import type_hints
from agentfly_kit.tools.tool import Tool, ToolSet
from agentfly_kit.types import Task, ToolResult

OVER = "The episode is over."
# Size of the pools that `agent` creates for sandboxes requested by tools and rewards, whose leases are short.
_EXTRA_POOL_SIZE = 4


class EnvironmentTool(Tool[..., Any]):
    """A tool method of an environment, called on the instance that the chain has leased."""

    # `check_task` method of an environment instance. Set only on the first tool of an agent's environment.
    check_task: Callable[[Task], Any] | None = None

    def __init__(self, method: Tool[..., Any], sandbox_type: type) -> None:
        self.__dict__.update(method.__dict__)
        self.sandbox_type = sandbox_type

    def check(self, tasks: Iterable[Task]) -> None:
        """Check that the tasks have the fields that the tool requires, and that the environment accepts them.

        Raises:  TaskError for the first task that is not accepted.
        """
        super().check(tasks)
        if self.check_task is None:
            return
        for task in tasks:
            try:
                self.check_task(task)
            except (ValueError, TypeError, KeyError) as error:
                raise TaskError(f"task {task.id!r}: {error}") from error

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """The environment class and the sandbox classes that the tool method requests as parameters."""
        return (self.sandbox_type, *super().sandbox_types)

    def require_instance(self) -> None:
        """Do nothing. No instance is required, because each chain calls the method on its leased environment."""

    async def invoke(self, arguments: Mapping[str, Any], context: Context, *, raising: bool = False) -> ToolResult:
        """Call the tool method as `Tool.invoke` does, or return the observation `OVER` if the episode has ended."""
        try:
            sandbox_type: type[Any] = self.sandbox_type
            async with context.using(sandbox_type) as environment:
                if await _episode_is_done(environment):
                    return ToolResult(False, OVER, ran=False)
                method = Tool.__get__(self, environment)
                result = await Tool.invoke(method, arguments, context, raising=raising)
                if result.error is not None and result.error.host:
                    threads.discard()
                return replace(result, env_done=True) if await _episode_is_done(environment) else result
        except Exception as error:  # raised by the pool, `reset` or `done`
            if raising:
                raise
            return ToolResult(False, f"{self.name} failed.", failure_from(f"tool {self.name}", error))


def check(sandbox_type: Any) -> None:
    """Check that a class is an environment.

    Raises:  SettingsError if `sandbox_type` is an instance, or a class without a suitable `reset`.
    """
    if not isinstance(sandbox_type, type):
        raise SettingsError(
            f"the environment must be a class, got the object {sandbox_type!r}; pass its class, since every chain "
            "gets its own instance"
        )
    if not environments.is_environment(sandbox_type):
        without = "its reset has no parameters; " if hasattr(sandbox_type, "reset") else ""
        raise SettingsError(
            f"{sandbox_type.__name__} is not an environment: {without}"
            "give it a method reset(self, task, ...) or reset(self, **fields) that starts an episode"
        )


def tools(sandbox_type: type) -> tuple[EnvironmentTool, ...]:
    """Return the tool methods of an environment in definition order, for `Agent(tools=...)`.

    Raises:  SettingsError if the class is not an environment or has no tool.
    """
    check(sandbox_type)
    found: dict[str, Tool[..., Any]] = {}
    for base in reversed(sandbox_type.__mro__):
        found |= {name: method for name, method in vars(base).items() if isinstance(method, Tool)}
    if not found:
        raise SettingsError(
            f"{sandbox_type.__name__} has no tool: decorate the methods that the model may call with @af.tool"
        )
    return tuple(EnvironmentTool(method, sandbox_type) for method in found.values())


def state(environment: Any) -> Any:
    """Return `environment.state`, or a dictionary of its public attributes if it has no `state`."""
    if hasattr(environment, "state"):
        return environment.state
    return {name: value for name, value in vars(environment).items() if not name.startswith("_")}


def reward(sandbox_type: type) -> Reward[..., Any] | None:
    """Return the environment's own `reward` or `get_reward` for `Agent(reward=...)`, or None if it defines neither."""
    check(sandbox_type)
    name = next((n for n in ("reward", "get_reward") if callable(getattr(sandbox_type, n, None))), None)
    if name is None:
        return None
    method = getattr(sandbox_type, name)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    names = [p.name for p in parameters]

    async def scored(environment: Any, context: Context, trajectory: Any, **more: Any) -> Any:
        # `Reward.try_` scores a finished chain, whose environment has been released, so replay the chain's tool calls.
        if context.trajectory_id.startswith("try "):
            await _replay(environment, sandbox_type, context, trajectory)
        ready = {"context": context, "trajectory": trajectory}
        more |= {name: value for name, value in ready.items() if name in names}
        if "state" in names:
            more["state"] = await _call(state, environment=environment)
        return await _call(getattr(environment, name), **more)

    sandboxes = {
        name: given
        for name, given in _hints(method).items()
        if getattr(injection(given), "source", None) == "sandbox"
    }
    own = inspect.Parameter("environment", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hidden = [own.replace(name=name, kind=own.KEYWORD_ONLY) for name in ("context", "trajectory")]
    others = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in parameters
        if p.name not in ("state", "context", "trajectory") and p.kind is not p.VAR_KEYWORD
    ]
    signed: Any = scored
    from_pool: Any = FromPool
    signed.__signature__ = inspect.Signature([own, *hidden, *others])
    signed.__annotations__ = {**sandboxes, "environment": from_pool[sandbox_type]}
    signed.__wrapped__ = method  # fingerprint the source of the reward, not of this wrapper
    signed.__qualname__, signed.__module__, signed.__doc__ = method.__qualname__, method.__module__, method.__doc__
    made = EnvironmentReward(scored, name=sandbox_type.__name__.lower())
    made.leased = tuple(getattr(sandbox_type, "reward_sandboxes", ()))
    return made


class EnvironmentReward(Reward[..., Any]):
    """Reward that calls an environment's `reward` method. `leased` lists the sandbox classes that the method leases."""

    leased: tuple[type, ...] = ()
    metric = "reward"

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        return (*super().sandbox_types, *self.leased)


def _hints(method: Any) -> dict[str, Any]:
    try:
        return type_hints(method)
    except Exception:  # a name is imported only under TYPE_CHECKING; then no parameter can request a sandbox
        return {}


async def _replay(environment: Any, sandbox_type: type, context: Context, trajectory: Any) -> None:
    """Replay the tool calls of a trajectory, or raise SandboxError if a call returns a different result."""
    methods = {tool.name: tool for tool in tools(sandbox_type)}
    for call in trajectory.tool_calls:
        if call.error is None and call.name in methods and call.result is not None:
            if await _episode_is_done(environment):
                return
            got = await Tool.invoke(Tool.__get__(methods[call.name], environment), call.arguments, context)
            if (got.ok, got.observation, got.images) != (call.result.ok, call.result.observation, call.result.images):
                raise SandboxError(
                    f"{sandbox_type.__name__}.{call.name} returned {got.observation!r} on replay but "
                    f"{call.result.observation!r} originally: the final state of this chain cannot be restored"
                )


class ResetHook:
    """`before_chain` hook that resets the chain's environment and returns the result of `reset`."""

    def __init__(self, sandbox_type: type) -> None:
        self.sandbox_type = sandbox_type
        self.function = sandbox_type.reset  # type: ignore[attr-defined]  # part of the run's fingerprint

    def __repr__(self) -> str:
        return f"<hook {self.sandbox_type.__name__}.reset>"

    async def __call__(self, chain: Chain) -> Any:
        await chain.context.sandbox(self.sandbox_type)
        return chain.context.reset_results.get(self.sandbox_type)


class SandboxEnvironment:
    """Base class of environments that wrap one sandbox, `_sandbox`, and are started and closed together with it."""

    _sandbox: Any

    async def start(self) -> None:
        await self._sandbox.start()

    @property
    def alive(self) -> bool:
        return bool(self._sandbox.alive)

    @property
    def isolation(self) -> str | None:
        isolation: str | None = self._sandbox.isolation
        return isolation

    async def close(self) -> None:
        await self._sandbox.close()

    def kill(self) -> None:
        self._sandbox.kill()


def agent(
    sandbox_type: type,
    engine: Any,
    *,
    chat: Any,
    tools: Sequence[Any] = (),
    reward: Any = None,
    pool: Pool[Any] | None = None,
    size: int = 64,
    acquire_timeout: float = 120.0,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Agent:
    """Create an agent for an environment class. Each chain leases an instance, which is reset for its task.

    Args:
        sandbox_type: the environment class.
        engine: the engine that samples the actions.
        chat: the `af.Chat` of the engine's model.
        tools: tools in addition to those of the environment.
        reward: the reward to use instead of the environment's own. The reward can read the environment through a
            parameter such as `world: af.FromPool[Guess]`.
        pool: the pool of environments; by default a new one is created.
        size: size of the new pool; chains wait while all instances are leased. If a tool or the reward requests other
            sandbox classes that no given pool provides, small pools are created for them.
        acquire_timeout: maximum time in seconds for which a chain waits for an environment of the new pool.
        options: keyword arguments for the environment class.
        **settings: further arguments of `Agent`: max_turns, sampling, seed, pools, ... With `harness=`, the model gets
            no tools, and the harness gets the environment through a parameter such as `world: af.FromPool[Guess]`.

    Raises:  SettingsError if the class is not an environment or has no tool.
    """
    own = _tools(sandbox_type)
    pools = settings.pop("pools", ())
    pools = (pools,) if hasattr(pools, "acquire") else tuple(pools)
    if pool is None:
        pool = next((p for p in pools if p.sandbox_type is sandbox_type), None)
    if pool is None:
        pool = Pool(sandbox_type, **{"size": size, "acquire_timeout": acquire_timeout, **(options or {})})
    elif options:
        raise SettingsError(
            f"options must not be given together with a pool, got options={options!r}; pass them to the pool"
        )
    if hasattr(sandbox_type, "check_task"):
        own[0].check_task = sandbox_type(**getattr(pool, "options", {})).check_task
    is_harnessed = settings.get("harness") is not None
    toolset = ToolSet(tools if is_harnessed else [*own, *tools])
    scored = RewardSet(_reward(sandbox_type) if reward is None else reward)
    have = [pool, *(p for p in pools if p is not pool)]
    for asked in dict.fromkeys((*toolset.sandbox_types, *scored.sandbox_types)):
        if not any(issubclass(p.sandbox_type, asked) for p in have):
            have.append(Pool(asked, size=min(size, _EXTRA_POOL_SIZE)))
    return Agent(
        engine,
        chat=chat,
        tools=toolset,
        reward=scored,
        pools=have,
        before_chain=settings.pop("before_chain", None if is_harnessed else ResetHook(sandbox_type)),
        **settings,
    )


_tools, _reward = tools, reward  # `agent` has parameters named `tools` and `reward`


async def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of the environment that is in use. A sync function runs in the instance's thread."""
    outcome = await call_user_function(function, arguments)
    if outcome.error is not None:
        if is_host_failure(outcome.error):
            threads.discard()
        raise outcome.error
    return outcome.value


async def _episode_is_done(environment: Any) -> bool:
    """Return the environment's `done` (an attribute, a property or a method), or False if it is not defined.

    If an abandoned call is still running, a property or method would wait for it, so False is returned.
    """
    is_property = isinstance(getattr(type(environment), "done", False), property)
    done = (lambda: environment.done) if is_property else getattr(environment, "done", False)
    if not callable(done):
        return bool(done)
    return not any(worker.busy for worker in threads.current()) and bool(await _call(done))
