"""An environment for an agent: its tool methods, its own reward, its beginning and its end.

An environment is any class with `reset(task, seed)`; no base class, no registration. Knows no family: those are the
other files of this folder.

    class Guess:
        def reset(self, task, seed):
            self.secret, self.done = task.fields["secret"], False
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

reset(task, seed)   before each chain; makes everything anew, for the same object serves one chain after another. What
                    it returns (a text, messages or None) is put under the task. `seed` may be left out.
tools               methods under @af.tool. Plain ones run in a thread, coroutine functions on the loop.
done                true once the episode is over: the chain ends, `env_done`. May be left out.
reward(...)         its score of the chain. May ask for `state`, and by name for what any reward may: final, trajectory,
                    context, a task's field, a sandbox by its class. May be left out, or replaced by agent(reward=mine).
state               what rewards may read; left out, the public attributes.
fork(into)          bring another of the kind into the same state. Left out, a chain that has begun cannot fork.
cleanup()           when a chain has given it back: end what still runs. May be left out.
start, alive, close as of any kind of sandbox; may be left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly_kit.agent.agent import Agent
from agentfly_kit.errors import SandboxError, SettingsError
from agentfly_kit.pool import environment as environments
from agentfly_kit.pool.pool import Pool
from agentfly_kit.rewards import Reward, RewardSet
from agentfly_kit.tools import function as functions
from agentfly_kit.tools.context import Context, FromPool, injection
from agentfly_kit.tools.tool import Tool, ToolSet
from agentfly_kit.types import ToolResult

if TYPE_CHECKING:
    from agentfly_kit.agent.chain import Chain

K = TypeVar("K")
OVER = "The episode is over."
_EXTRA_POOL_SIZE = 4
"""Sandboxes of a kind that are made for tools and rewards: they are wanted for a moment each."""


class EnvironmentTool(Tool[..., Any]):
    """A tool method of an environment: each chain calls it on the one that it holds."""

    def __init__(self, method: Tool[..., Any], sandbox_type: type) -> None:
        self.__dict__.update(method.__dict__)
        self.sandbox_type = sandbox_type

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """The environment, and the sandboxes that the method asks for."""
        return (self.sandbox_type, *super().sandbox_types)

    def require_instance(self) -> None:
        """Each chain brings its own."""

    async def invoke(self, arguments: Mapping[str, Any], context: Context, *, raising: bool = False) -> ToolResult:
        """As of any tool. After the end nothing is run, and the model is told so."""
        try:
            sandbox_type: type[Any] = self.sandbox_type
            async with context.using(sandbox_type) as environment:
                if environments.episode_is_done(environment):
                    return ToolResult(False, OVER)
                method = Tool.__get__(self, environment)
                result = await Tool.invoke(method, arguments, context, raising=raising)
                return replace(result, env_done=True) if environments.episode_is_done(environment) else result
        except Exception as error:  # the pool, the environment's reset or its `done`
            if raising:
                raise
            return ToolResult(False, f"{self.name} failed.", functions.failure_from(f"tool {self.name}", error))


def check(sandbox_type: Any) -> None:
    """Raises SettingsError for what is no environment."""
    if not isinstance(sandbox_type, type):
        raise SettingsError(
            f"{sandbox_type!r}: want an environment's class, not an object of it; every chain gets its own"
        )
    if not environments.is_environment(sandbox_type):
        raise SettingsError(
            f"{sandbox_type.__name__} is no environment: "
            "give it a method reset(self, task, seed) that begins an episode"
        )


def tools(sandbox_type: type) -> tuple[EnvironmentTool, ...]:
    """The tool methods of an environment, for `Agent(tools=...)`, in the order they were written."""
    check(sandbox_type)
    found: dict[str, Tool[..., Any]] = {}
    for base in reversed(sandbox_type.__mro__):
        found |= {name: method for name, method in vars(base).items() if isinstance(method, Tool)}
    if not found:
        raise SettingsError(
            f"{sandbox_type.__name__} has no tool: put @af.tool above the methods that the model may call"
        )
    return tuple(EnvironmentTool(method, sandbox_type) for method in found.values())


def state(environment: Any) -> Any:
    """Its `state`, or its public attributes by name."""
    if hasattr(environment, "state"):
        return environment.state
    return {name: value for name, value in vars(environment).items() if not name.startswith("_")}


def reward(sandbox_type: type) -> Reward[..., Any] | None:
    """The environment's own reward, for `Agent(reward=...)`; None where it has none."""
    check(sandbox_type)
    method = getattr(sandbox_type, "reward", None)
    if method is None:
        return None
    parameters = list(inspect.signature(method).parameters.values())[1:]
    names = [p.name for p in parameters]

    async def scored(environment: Any, context: Context, trajectory: Any, **more: Any) -> Any:
        if context.trajectory_id.startswith("try "):  # its own went back: a fresh one is brought into the same state
            await _replay(environment, sandbox_type, context, trajectory)
        ready = {"context": context, "trajectory": trajectory}
        more |= {name: value for name, value in ready.items() if name in names}
        if "state" in names:
            more["state"] = state(environment)
        if inspect.iscoroutinefunction(method):
            return await method(environment, **more)
        outcome = await functions.call_user_function(environment.reward, more)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    sandboxes = {name: given for name, given in _hints(method).items() if _is_sandbox(given)}
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
    signed.__wrapped__ = method  # its source is the reward's, and so its fingerprint
    signed.__qualname__, signed.__module__, signed.__doc__ = method.__qualname__, method.__module__, method.__doc__
    return Reward(scored, name=sandbox_type.__name__.lower())


def _hints(method: Any) -> dict[str, Any]:
    try:
        return functions.type_hints(method, None)
    except Exception:  # a name that only a type checker knows: then no parameter asks for a sandbox
        return {}


def _is_sandbox(annotation: Any) -> bool:
    asks = injection(annotation)
    return asks is not None and asks.source == "sandbox"


async def _replay(environment: Any, sandbox_type: type, context: Context, trajectory: Any) -> None:
    """Run the calls of a trajectory again. Raises SandboxError at one that gives something else now."""
    methods = {tool.name: tool for tool in tools(sandbox_type)}
    for call in trajectory.tool_calls:
        if call.error is None and call.name in methods and call.result is not None:
            if environments.episode_is_done(environment):
                return
            got = await Tool.invoke(Tool.__get__(methods[call.name], environment), call.arguments, context)
            if (got.ok, got.observation) != (call.result.ok, call.result.observation):
                raise SandboxError(
                    f"{sandbox_type.__name__}.{call.name} gave {got.observation!r} when it was run again, and "
                    f"{call.result.observation!r} at first: the end of this chain cannot be had again"
                )


class ResetHook:
    """`before_chain` of an agent in an environment: begin the episode, and show what its reset returned."""

    def __init__(self, sandbox_type: type) -> None:
        self.sandbox_type = sandbox_type
        self.function = sandbox_type.reset  # type: ignore[attr-defined]  # what makes two runs the same run

    async def __call__(self, chain: Chain) -> Any:
        await chain.context.sandbox(self.sandbox_type)
        return chain.context.reset_results.get(self.sandbox_type)


def forward_signature(sandbox_type: type, *, omit: Sequence[str] = (), **defaults: Any) -> Callable[[type[K]], type[K]]:
    """For a class whose `__init__` hands its **settings to another: their names and defaults, but those in `omit`, are
    its own then, for whoever asks it: a pool, which refuses others when it is made, and a person's `?`."""

    def decorate(cls: type[K]) -> type[K]:
        own = inspect.signature(cls)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in inspect.signature(sandbox_type).parameters.items()
            if name not in own.parameters and name not in omit
        ]
        cls.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return cls

    return decorate


def agent(
    sandbox_type: type,
    engine: Any,
    *,
    chat: Any,
    tools: Sequence[Any] = (),
    reward: Any = None,
    pool: Pool[Any] | None = None,
    size: int = 64,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Agent:
    """An agent that lives in an environment: each chain leases one, resets it for its task, and gives it back.

    tools, reward   beside the environment's tools; in place of its reward. A reward that reads the environment asks for
                    it: `world: af.FromPool[Guess]`.
    pool, size      the pool that the environments come from; else one of `size` is made, and more chains wait. Small
                    ones are made for other sandboxes that a tool or the reward asks for and that no pool has.
    options         keyword arguments for the class.
    settings        the agent's others: max_turns, sampling, seed, pools, ...
    Raises:  SettingsError for a class without `reset(task, seed)` or without a tool.
    """
    own = _tools(sandbox_type)
    pools = settings.pop("pools", ())
    pools = (pools,) if hasattr(pools, "acquire") else tuple(pools)
    if pool is None:
        pool = next((p for p in pools if p.sandbox_type is sandbox_type), None)
    if pool is None:
        pool = Pool(sandbox_type, size=size, **(options or {}))
    elif options:
        raise SettingsError(f"options={options!r} are for a pool that is made here; give them to yours")
    toolset = ToolSet([*own, *tools])
    scored = RewardSet.coerce(_reward(sandbox_type) if reward is None else reward)
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
        before_chain=settings.pop("before_chain", ResetHook(sandbox_type)),
        **settings,
    )


_tools, _reward = tools, reward  # `agent` has parameters of these names
