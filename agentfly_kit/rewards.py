"""Rewards: functions that score a finished chain, and weighted sums of them.

Arguments are injected by parameter name. An unscored chain has reward None, never 0.0. An exception in a reward leaves
only its own chain unscored.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
import types as pytypes
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

from agentfly_kit._async.pending_call import PendingCall, pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.errors import RewardError
from agentfly_kit.tools import function as functions
from agentfly_kit.tools.context import Context, Injection, PoolLike, copy_or_share, injection, temporary_context
from agentfly_kit.types import UNSCORED_STOPS, Failure, Task, Trajectory, Turn

P = ParamSpec("P")
R = TypeVar("R")
Per: TypeAlias = Literal["trajectory", "turn"]

# Parameter names with injected values, by kind of reward. All other names refer to task fields.
_INJECTED_NAMES = {
    "trajectory": ("final", "trajectory", "context"),
    "turn": ("final", "trajectory", "context", "turn", "observation"),
}


@dataclass(frozen=True)
class Score(Displayable):
    """Score of one trajectory by one reward or a set of rewards.

    Attributes:
        reward: None if unscored.
        metrics: Value of each reward under its own name, and further returned numbers under theirs.
        error: First failure, if any reward failed.
        turn_rewards: Sum of the `per="turn"` rewards of each action, by index in `trajectory.turns`.
        extras: Returned values that are not numbers, by name.
        arguments: Injected values by parameter name.
        name
        seconds
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: Failure | None = None
    turn_rewards: dict[int, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict, compare=False)
    name: str = "reward"
    seconds: float = field(default=0.0, compare=False)

    def __repr__(self) -> str:
        lines = [f"{self.name}: {_format_reward(self.reward)}"]
        lines += [f"  {key} = {_short_repr(value)}" for key, value in self.arguments.items()]
        lines += [f"  -> {key} {value:g}" for key, value in self.metrics.items() if key != self.name]
        lines += [f"  -> {key} {_short_repr(value)}" for key, value in self.extras.items()]
        lines += [f"  turn {turn}: {value:g}" for turn, value in self.turn_rewards.items()]
        if self.error is not None:
            lines.append(f"  {self.error}")
        return "\n".join(lines)


class Reward(Displayable, Generic[P, R]):
    """Function that scores a chain, created by `@reward`. Calling it calls the function.

    `score` returns its value for a trajectory and records exceptions as failures. `try_` does so interactively and
    shows every injected argument.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        weight: float = 1.0,
        per: Per = "trajectory",
        name: str | None = None,
        timeout: float | None = 60.0,
        frame: pytypes.FrameType | None = None,
    ) -> None:
        shown = getattr(function, "__qualname__", repr(function))
        if not inspect.isfunction(function):
            raise RewardError(
                f"{shown} must be a function defined with `def`; wrap it in one whose parameters name its inputs"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise RewardError(f"{shown} is a generator; a reward must return one result")
        if per not in _INJECTED_NAMES:
            raise RewardError(f"{shown}: per={per!r} must be 'trajectory' or 'turn'")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise RewardError(f"{shown}: weight={weight!r} must be a finite number")
        if timeout is not None and not timeout > 0:
            raise RewardError(f"{shown}: timeout={timeout!r} must be above 0 seconds, or None for no limit")
        self.function = function
        self.name = name or function.__name__
        self.weight = float(weight)
        self.per: Per = per
        self.timeout = timeout
        self.source = functions.source_of(function)
        self._parameters, self._hidden = _signature(self.name, function, frame)
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__doc__, self.__module__, self.__wrapped__ = function.__doc__, function.__module__, function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function: Callable[..., R] = self.function
        if inspect.iscoroutinefunction(function):
            return typing.cast(R, PendingCall(f"{self.name}(...)", lambda: function(*args, **kwargs)))
        return function(*args, **kwargs)

    def replace(self, *, weight: float | None = None, name: str | None = None) -> Reward[P, R]:
        """Return a copy with another weight or name.

        Raises:
            RewardError: if the weight is not finite.
        """
        other = copy.copy(self)
        if weight is not None:
            if not math.isfinite(weight):
                raise RewardError(f"{self.name}: weight={weight!r} must be a finite number")
            other.weight = float(weight)
        if name is not None:
            other.name = name
        return other

    @property
    def fingerprint(self) -> str:
        return functions.fingerprint(self.function, self.source, f"{self.name} {self.weight} {self.per} {self.timeout}")

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the reward requires, and for which the agent needs pools."""
        return tuple(
            dict.fromkeys(injected.sandbox_type for injected in self._hidden.values() if injected.source == "sandbox")
        )

    @property
    def task_fields(self) -> tuple[str, ...]:
        """Task fields that the reward requires (parameters without a default)."""
        return tuple(n for n, p in self._parameters.items() if self._source_of(n) == "field" and p.default is p.empty)

    def redefined(self) -> bool:
        """Return True if a later notebook cell has redefined the reward with different source code."""
        now = functions.current_definition(self.function)
        return isinstance(now, Reward) and now.function is not self.function and now.fingerprint != self.fingerprint

    def check(self, tasks: Task | Iterable[Task]) -> None:
        """Check that every task has the required fields.

        Raises:
            RewardError: names the function, the missing field and the available fields.
        """
        for task in [tasks] if isinstance(tasks, Task) else tasks:
            for name in self.task_fields:
                if name not in task.fields:
                    raise RewardError(_missing_field_message(self.name, name, task, self.per))

    def __repr__(self) -> str:
        weight = f", weight {self.weight:g}" if self.weight != 1 else ""
        per = ", per turn" if self.per == "turn" else ""
        return f"<Reward {self.name}({', '.join(self._parameters)}){weight}{per}>"

    # --- scoring ---

    @pending_call
    async def try_(
        self, trajectory: Trajectory, /, *, turn: Turn | int | None = None, pool: PoolLike | None = None
    ) -> Score:
        """Score one trajectory interactively, without weighting, and record the injected arguments.

        Args:
            trajectory: the trajectory to score.
            turn: for a reward per turn, the action or its index in `trajectory.turns`; the last action by default.
            pool: pool that provides a required sandbox. Without it, one is started for this call. Either way it is a
                fresh sandbox, not the one of the chain, which has been released.

        Raises:
            RewardError: if `turn` is given for a reward per trajectory, or is not an action.
        """
        if self.per == "turn":
            turn = _action_to_score(trajectory, turn)
        elif turn is not None:
            raise RewardError(f"{self.name} scores a whole trajectory; turn= requires a reward with per='turn'")
        async with temporary_context(trajectory.task, self.sandbox_types, () if pool is None else (pool,)) as context:
            return await self.score(trajectory, context, turn=turn)

    async def score(self, trajectory: Trajectory, context: Context, *, turn: Turn | None = None) -> Score:
        """Return the unweighted score. Sync functions run in a thread, so that they do not block other chains.

        An exception or timeout in the reward gives an unscored `Score`.

        Raises:
            CancelledError: if the caller was cancelled.
            KeyboardInterrupt: always propagates.
        """
        where = f"reward {self.name}"
        values: dict[str, Any] = {}
        try:
            async with AsyncExitStack() as stack:
                values = await self._inject(trajectory, context, turn, stack)
                shown = dict(values)
                async with context.concurrency.rewards.slot():
                    outcome = await functions.call_user_function(
                        self.function, values, timeout=self.timeout, convert=self._split_result
                    )
        except Exception as error:  # from the pool, or a missing task field
            return Score(None, error=functions.failure_from(where, error), arguments=values, name=self.name)
        if outcome.timed_out:
            text = f"took longer than {self.timeout:g} s and was {outcome.timed_out}; raise timeout=, or make it faster"
            found = Failure(where, "TimeoutError", text)
            return Score(None, error=found, arguments=shown, name=self.name, seconds=outcome.seconds)
        if outcome.error is not None:
            found = functions.failure_from(where, outcome.error)
            return Score(None, error=found, arguments=shown, name=self.name, seconds=outcome.seconds)
        reward, metrics, extras = outcome.value
        if reward is not None:
            metrics = {self.name: reward, **metrics}
        return Score(reward, metrics, extras=extras, arguments=shown, name=self.name, seconds=outcome.seconds)

    def _source_of(self, name: str) -> str:
        if name in self._hidden:
            return self._hidden[name].source
        return name if name in _INJECTED_NAMES[self.per] else "field"

    async def _inject(
        self, trajectory: Trajectory, context: Context, turn: Turn | None, stack: AsyncExitStack
    ) -> dict[str, Any]:
        ready = {"final": trajectory.final, "trajectory": trajectory, "context": context, "turn": turn}
        values: dict[str, Any] = {}
        sandbox_types = {
            name: injected.sandbox_type for name, injected in self._hidden.items() if injected.source == "sandbox"
        }
        # Leased in a fixed global order, so that two rewards that need the same two sandboxes cannot deadlock.
        leased: dict[str, Any] = {
            name: await stack.enter_async_context(context.using(sandbox_type))
            for name, sandbox_type in sorted(sandbox_types.items(), key=lambda item: item[1].__qualname__)
        }
        for name, parameter in self._parameters.items():
            source = self._source_of(name)
            if source == "sandbox":
                values[name] = leased[name]
            elif source == "observation":
                values[name] = _observation_after(trajectory, turn)
            elif source in ready:
                values[name] = ready[source]
            elif name in trajectory.task.fields:
                # Copied from the task, not from the chain, whose fields a tool may have changed.
                values[name] = copy_or_share(trajectory.task.fields[name])
            elif parameter.default is parameter.empty:
                raise RewardError(_missing_field_message(self.name, name, trajectory.task, self.per))
        return values

    def _split_result(self, value: Any) -> tuple[float | None, dict[str, float], dict[str, Any]]:
        if not isinstance(value, Mapping):
            return self._to_number(value, "it"), {}, {}
        if "reward" not in value:
            raise RewardError(
                f"{self.name} must return a dict with the key 'reward', got keys: {', '.join(map(str, value))}"
            )
        metrics: dict[str, float] = {}
        extras: dict[str, Any] = {}
        for key, part in value.items():
            if key == "reward" or part is None:
                continue
            if _is_number(part):
                number = self._to_number(part, f"metric {key!r}")
                assert number is not None
                metrics[str(key)] = number
            else:
                extras[str(key)] = part
        return self._to_number(value["reward"], "'reward'"), metrics, extras

    def _to_number(self, value: Any, what: str) -> float | None:
        if value is None:
            return None
        if not _is_number(value):
            raise RewardError(
                f"{self.name}: {what} is {_short_repr(value)}, a {type(value).__qualname__}; "
                "return a number, True or False, None (unscored), or dict(reward=..., ...)"
            )
        number = float(value.item() if hasattr(value, "item") else value)
        if not math.isfinite(number):
            raise RewardError(f"{self.name}: {what} is {number}; return a finite number, or None for unscored")
        return number


@overload
def reward(function: Callable[P, R], /) -> Reward[P, R]: ...
@overload
def reward(
    *, weight: float = 1.0, per: Per = "trajectory", name: str | None = None, timeout: float | None = 60.0
) -> Callable[[Callable[P, R]], Reward[P, R]]: ...
def reward(
    function: Callable[P, R] | None = None,
    /,
    *,
    weight: float = 1.0,
    per: Per = "trajectory",
    name: str | None = None,
    timeout: float | None = 60.0,
) -> Reward[P, R] | Callable[[Callable[P, R]], Reward[P, R]]:
    """Turn a function into a reward: `@reward`, or `@reward(weight=0.5, per="turn")`. It stays callable as before.

    Arguments are injected by parameter name: `final` (text of the final answer, None if there is none), `trajectory`,
    `context`, and with per="turn" also `turn` (the action) and `observation` (the turn that follows it, or None). A
    parameter annotated with a sandbox class receives the sandbox of the chain. All other names refer to task fields.
    The function returns a number, a bool, None for unscored, or dict(reward=..., anything=...), whose further numbers
    become metrics.

    Args:
        function: the function to decorate.
        weight: factor in the sum of all rewards; with 0 the value is only a metric.
        per: "trajectory", or "turn" to score each action.
        name: name in metrics; the function's name by default.
        timeout: limit in seconds for one call of the function, or None. After a timeout the chain is unscored.

    Raises:
        RewardError: names the function and the parameter.
    """
    frame = functions.caller_frame(1)

    def decorate(function: Callable[P, R]) -> Reward[P, R]:
        return Reward(function, weight=weight, per=per, name=name, timeout=timeout, frame=frame)

    return decorate if function is None else decorate(function)


class RewardSet(Displayable, Sequence[Reward[..., Any]]):
    """Rewards of one agent. The reward of a trajectory is their weighted sum; each value is also a metric."""

    def __init__(self, rewards: Iterable[Reward[..., Any] | Callable[..., Any]] = ()) -> None:
        self._rewards = tuple(r if isinstance(r, Reward) else reward(r) for r in rewards)
        names = [r.name for r in self._rewards]
        for name in names:
            if names.count(name) > 1:
                raise RewardError(f"two rewards are named {name!r}; rename one: @af.reward(name=...)")

    @classmethod
    def coerce(cls, rewards: RewardSet | Reward[..., Any] | Callable[..., Any] | Iterable[Any] | None) -> RewardSet:
        """Convert the argument of `Agent(reward=)`: None, a reward or function, a list, or a `RewardSet`."""
        if isinstance(rewards, RewardSet):
            return rewards
        if rewards is None:
            return cls()
        if isinstance(rewards, Reward) or callable(rewards):
            return cls([rewards])
        return cls(rewards)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(r.name for r in self._rewards)

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the rewards require."""
        return tuple(dict.fromkeys(sandbox_type for r in self._rewards for sandbox_type in r.sandbox_types))

    @property
    def fingerprint(self) -> str:
        return " ".join(f"{r.name}={r.fingerprint}" for r in self._rewards)

    def redefined(self) -> tuple[str, ...]:
        """Return the names of rewards that a later notebook cell has redefined; this set still runs the old ones."""
        return tuple(r.name for r in self._rewards if r.redefined())

    def check(self, tasks: Task | Iterable[Task]) -> None:
        """Check that every task has the fields that the rewards require.

        Raises:
            RewardError: names the function, the missing field and the available fields.
        """
        for task in [tasks] if isinstance(tasks, Task) else tasks:
            for r in self._rewards:
                r.check(task)

    async def score(self, trajectory: Trajectory, context: Context) -> Score:
        """Run all rewards concurrently and return their weighted sum.

        If a reward with nonzero weight is unscored, so is the sum, but the metrics of the others are kept. A chain that
        failed or was cancelled is not scored, because the model did not cause that. If all rewards are per turn, the
        reward of the trajectory itself is 0.0.
        """
        if trajectory.stop in UNSCORED_STOPS or not self._rewards:
            return Score(None)
        actions = [(i, t) for i, t in enumerate(trajectory.turns) if t.kind == "action"]
        jobs: list[tuple[Reward[..., Any], int | None, Turn | None]] = []
        for r in self._rewards:
            jobs += [(r, None, None)] if r.per == "trajectory" else [(r, i, t) for i, t in actions]
        if len(jobs) == 1:
            ((r, index, turn),) = jobs
            return _combine_scores([(r, index, await r.score(trajectory, context, turn=turn))])
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(r.score(trajectory, context, turn=turn)) for r, _, turn in jobs]
        return _combine_scores([(r, i, task.result()) for (r, i, _), task in zip(jobs, running, strict=True)])

    @overload
    def __getitem__(self, key: int) -> Reward[..., Any]: ...
    @overload
    def __getitem__(self, key: slice) -> RewardSet: ...
    def __getitem__(self, key: int | slice) -> Reward[..., Any] | RewardSet:
        return RewardSet(self._rewards[key]) if isinstance(key, slice) else self._rewards[key]

    def __iter__(self) -> Iterator[Reward[..., Any]]:
        return iter(self._rewards)

    def __len__(self) -> int:
        return len(self._rewards)

    def __repr__(self) -> str:
        return f"<RewardSet {' + '.join(f'{r.weight:g} {r.name}' for r in self._rewards) or 'empty'}>"


def _combine_scores(parts: Sequence[tuple[Reward[..., Any], int | None, Score]]) -> Score:
    total = 0.0
    scored = True
    error: Failure | None = None
    turn_rewards: dict[int, float] = {}
    own: dict[str, float] = {}
    others: dict[str, dict[str, float]] = {}
    extras: dict[str, Any] = {}
    for r, index, part in parts:
        error = error or part.error
        for key, value in part.metrics.items():
            into = own if key == r.name else others.setdefault(key, {})
            into[r.name] = into.get(r.name, 0.0) + value  # a reward per turn reports the sum over turns
        extras |= {key: value for key, value in part.extras.items() if index is None}
        if r.weight == 0:
            continue  # a metric only
        if index is None:
            scored = scored and part.reward is not None
            total += r.weight * (part.reward or 0.0)
        elif part.reward is not None:
            turn_rewards[index] = turn_rewards.get(index, 0.0) + r.weight * part.reward
        else:
            scored = scored and part.error is None  # None credits nothing to the turn; a failure unscores the sum
    metrics = dict(own)
    for key, by_reward in others.items():
        # Two rewards may report the same metric, such as "success"; prefix it with the name of the reward.
        if len(by_reward) == 1 and key not in metrics:
            metrics[key] = next(iter(by_reward.values()))
        else:
            metrics |= {f"{name}/{key}": value for name, value in by_reward.items()}
    if not scored:
        return Score(None, metrics, error, extras=extras)
    return Score(total, metrics, error, turn_rewards, extras)


# --- reading a function and its result -----------------------------------------------------------


def _signature(
    owner: str, function: Callable[..., Any], frame: pytypes.FrameType | None
) -> tuple[dict[str, inspect.Parameter], dict[str, Injection]]:
    try:
        annotations = functions.type_hints(function, frame)
    except Exception as error:
        raise RewardError(
            f"{owner}: an annotation cannot be resolved ({error}); define or import it before the function, "
            "and not only under TYPE_CHECKING"
        ) from None
    parameters = dict(inspect.signature(function).parameters)
    if next(iter(parameters), None) == "self":
        raise RewardError(f"{owner} is a method without an instance; use a function that calls the bound method")
    hidden: dict[str, Injection] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise RewardError(
                f"{owner}: arguments are injected by name, but {str(parameter)!r} has none; name each parameter"
            )
        if name in annotations and (injected := injection(annotations[name])) is not None:
            hidden[name] = injected
        elif name == "sandbox" and name not in annotations:
            raise RewardError(f"{owner}: parameter 'sandbox' has no type; for example sandbox: af.PythonSandbox")
    return parameters, hidden


def _missing_field_message(owner: str, name: str, task: Task, per: Per) -> str:
    have = ", ".join(task.fields) or "none"
    return (
        f"reward {owner} requires {name!r}, which task {task.id!r} does not have (its fields: {have}; "
        f"also available: {', '.join(_INJECTED_NAMES[per])}); rename the parameter or give it a default"
    )


def _action_to_score(trajectory: Trajectory, turn: Turn | int | None) -> Turn:
    if isinstance(turn, int):
        turn = trajectory.turns[turn]
    if turn is None:
        actions = [t for t in trajectory.turns if t.kind == "action"]
        if not actions:
            raise RewardError(f"trajectory {trajectory.id!r} has no action to score")
        turn = actions[-1]
    if turn.kind != "action":
        raise RewardError(f"a reward per turn must be given an action, got {turn!r}")
    return turn


def _observation_after(trajectory: Trajectory, turn: Turn | None) -> Turn | None:
    for this, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        if this is turn:
            return following if following.kind == "observation" else None
    return None


def _is_number(value: Any) -> bool:
    """Return True for real Python numbers, Fraction, Decimal, and one-element NumPy arrays and torch tensors."""
    if isinstance(value, numbers.Number):
        return not isinstance(value, complex)
    shape = getattr(value, "shape", None)
    return shape is not None and math.prod(shape) == 1 and hasattr(value, "item") and hasattr(value, "dtype")


def _format_reward(reward: float | None) -> str:
    return "unscored" if reward is None else f"{reward:g}"


def _short_repr(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
