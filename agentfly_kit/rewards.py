"""Rewards (functions that score finished chains) and their weighted sums."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable, printable, shorten
from agentfly_kit.errors import RewardError, check_choice, check_count, check_value
from agentfly_kit.tools.calling import Outcome, call_user_function, failure_from
from agentfly_kit.tools.context import Context, Fields, temporary_context
from agentfly_kit.tools.injection import FunctionSet, InjectedFunction, Injection
from agentfly_kit.trajectories import UNSCORED_STOPS, Trajectory
from agentfly_kit.types import Failure, Turn

if TYPE_CHECKING:
    from agentfly_kit.pool.pool import Pool

P = ParamSpec("P")
R = TypeVar("R")
Per: TypeAlias = Literal["trajectory", "turn"]

# Names of parameters that receive injected values, for each value of `per`. All other names refer to task fields.
_INJECTED_NAMES = {
    "trajectory": ("final", "trajectory", "context"),
    "turn": ("final", "trajectory", "context", "turn", "observation"),
}


@dataclass(frozen=True)
class Score(Displayable):
    """Result of scoring a trajectory with the reward `name` or with a set of rewards. `seconds` is the time taken.

    Attributes:
        reward: The score, or None if the trajectory is unscored.
        metrics: Values of the rewards and additional numbers that they returned, keyed by name.
        error: Failure of the first reward that failed, or None.
        turn_rewards: Weighted sum of the `per="turn"` rewards of each action, keyed by index in `trajectory.turns`.
        extras: Returned values that are not numbers, keyed by name.
        arguments: Injected values, keyed by parameter name.
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
        lines = [f"{self.name}: {'unscored' if self.reward is None else f'{self.reward:g}'}"]
        lines += [f"  {key} = {shorten(repr(value), 80)}" for key, value in self.arguments.items()]
        lines += [f"  -> {key} {value:g}" for key, value in self.metrics.items() if key != self.name]
        lines += [f"  -> {key} {shorten(repr(value), 80)}" for key, value in self.extras.items()]
        lines += [f"  turn {turn}: {value:g}" for turn, value in self.turn_rewards.items()]
        if self.error is not None:
            lines.append(f"  {self.error}")
        return printable("\n".join(lines))


class Reward(Displayable, InjectedFunction[P, R]):
    """Function that scores a chain, created by `@reward`. It can also be called like the original function."""

    kind = "reward"
    error_type = RewardError
    needs_tokens = False  # whether the reward requires the token ids of a chain

    def __init__(
        self,
        function: Callable[P, R],
        *,
        weight: float = 1.0,
        per: Per = "trajectory",
        name: str | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        check_choice("per", per, Per)
        check_value("weight", weight)
        super().__init__(function, name, timeout, _INJECTED_NAMES[per])
        self.weight = float(weight)
        self.per: Per = per
        if self._method:
            raise self._error("a reward must not be an unbound method; use a function that calls the bound method")
        if self._hidden.get("sandbox") == Injection("field") and "sandbox" not in function.__annotations__:
            raise self._error("parameter 'sandbox' must have a type, for example sandbox: af.PythonSandbox")

    def _settings(self) -> str:
        return f"{self.name} {self.weight} {self.per} {self.timeout}"

    @property
    def metric(self) -> str:
        """Name of the metric that contains the value of this reward."""
        return self.name

    def __repr__(self) -> str:
        weight = f", weight {self.weight:g}" if self.weight != 1 else ""
        per = ", per turn" if self.per == "turn" else ""
        return f"<Reward {self.name}({', '.join(self._parameters)}){weight}{per}>"

    @pending_call
    async def try_(
        self, trajectory: Trajectory, /, *, turn: Turn | int | None = None, pool: Pool[Any] | None = None
    ) -> Score:
        """Score a trajectory interactively. The score is unweighted and includes the injected arguments.

        Args:
            trajectory: the trajectory to score.
            turn: with `per="turn"`, the action or its index in `trajectory.turns`; by default the last action.
            pool: pool from which a sandbox is leased if the reward requires one, or None to start a sandbox. The
                chain's own sandbox is no longer available.
        """
        if self.per == "turn":
            turn = _action_to_score(trajectory, turn)
        elif turn is not None:
            raise RewardError(f"turn must be None for {self.name}, which scores a whole trajectory, got {turn!r}")
        async with temporary_context(trajectory.task, self.sandbox_types, pool) as context:
            return await self.score(trajectory, context, turn=turn)

    async def score(self, trajectory: Trajectory, context: Context, *, turn: Turn | None = None) -> Score:
        """Return the unweighted score. If the reward function raises or times out, the trajectory is unscored."""
        arguments: dict[str, Any] = {}
        # Use the original task fields, because tools may have modified the copy in `context`.
        fields = Fields(trajectory.task.fields)
        observation = _observation_after(trajectory, turn)
        try:
            async with self._inject(
                context, fields, final=trajectory.final, trajectory=trajectory, turn=turn, observation=observation
            ) as arguments:
                outcome = await call_user_function(
                    self.function, arguments, timeout=self.timeout, convert=self._split_result
                )
        except Exception as error:  # raised by a pool, or for a missing task field
            outcome = Outcome(error=error)
        score = Score(None, arguments=arguments, name=self.name, seconds=outcome.seconds)
        if outcome.error is not None:
            return replace(score, error=failure_from(f"reward {self.name}", outcome.error))
        reward, metrics, extras = outcome.value
        own = {} if reward is None else {self.metric: reward}
        return replace(score, reward=reward, metrics=own | metrics, extras=extras)

    def _split_result(self, value: Any) -> tuple[float | None, dict[str, float], dict[str, Any]]:
        """Split the return value of the reward function into (reward, metrics, extras)."""
        given = value if isinstance(value, Mapping) else {"reward": value}
        if "reward" not in given:
            raise RewardError(
                f"{self.name} must return a dict with the key 'reward', got {', '.join(map(str, given))}"
            )
        known = {str(key): part for key, part in given.items() if part is not None}
        metrics = {
            key: self._to_number(key, part) for key, part in known.items() if key == "reward" or _is_number(part)
        }
        extras = {key: part for key, part in known.items() if key not in metrics}
        return metrics.pop("reward", None), metrics, extras

    def _to_number(self, key: str, value: Any) -> float:
        if not _is_number(value):
            raise RewardError(
                f"{self.name}: {key!r} must be a number, True or False, or None (unscored), got {value!r:.80}, "
                f"a {type(value).__qualname__}"
            )
        number = float(value.item() if hasattr(value, "item") else value)
        if not math.isfinite(number):
            raise RewardError(f"{self.name}: {key!r} must be finite, or None for unscored, got {number}")
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
    """Decorator that turns a function into a reward, as `@reward` or `@reward(weight=0.5, per="turn")`.

    Arguments are injected by parameter name: `final` (text of the final answer or None), `trajectory`, `context` and,
    with per="turn", also `turn` (the action) and `observation` (the observation that follows, or None). A parameter
    annotated with a sandbox class receives the sandbox of the chain. All other names refer to task fields.
    The function returns a number, a bool, None for unscored, or dict(reward=..., anything=...). Additional numbers in
    the dict become metrics. A metric "success" determines whether the chain succeeded (see `Agent(success=)`).

    Args:
        function: the function to decorate.
        weight: factor in the sum of all rewards. With weight 0, the value is only a metric.
        per: "trajectory" to score the whole chain, or "turn" to score each action.
        name: name in metrics; the function's name by default.
        timeout: time limit for one call of the function in seconds, or None. After a timeout, the chain is unscored.

    Raises:
        RewardError: for an invalid signature or option.
    """
    if function is None:
        return lambda function: Reward(function, weight=weight, per=per, name=name, timeout=timeout)
    return Reward(function, weight=weight, per=per, name=name, timeout=timeout)


def overlong_penalty(tokens: int, buffer: int, *, weight: float = 1.0) -> Reward[..., float]:
    """Create a reward that decreases linearly from 0 to -1 over the last `buffer` tokens before a length limit::

        agent = af.Agent(..., reward=[exact, af.overlong_penalty(1024, 256)], max_tokens=1024)

    The penalty lowers the sum of the rewards. Set `Agent(success=)` if a long correct answer should count as a success.

    Args:
        tokens: Number of sampled tokens per chain at which the reward reaches -1.
        buffer: Number of tokens over which the reward decreases.
        weight: Weight of the reward.

    Raises:
        SettingsError: If a number is below 1, or if `buffer` exceeds `tokens`. `Agent.rollout` raises this error if the
            engine is text-only.

    Source:  DAPO, arXiv 2503.14476, equation 13.
    """
    check_count("tokens", tokens)
    check_value("buffer", buffer, "int", f"of at least 1 and at most {tokens}")

    @reward(weight=weight, name="overlong_penalty")
    def penalty(trajectory: Trajectory) -> float:
        if not trajectory.exact:
            raise RewardError("overlong_penalty counts tokens, which a text-only engine does not return")
        sampled = sum(turn.num_tokens for turn in trajectory.turns if turn.kind == "action")
        return min(0.0, max(-1.0, (tokens - buffer - sampled) / buffer))

    penalty.needs_tokens = True
    return penalty


class RewardSet(Displayable, FunctionSet[Reward[..., Any]]):
    """Rewards of one agent. A trajectory's reward is the weighted sum of their values, which also become metrics."""

    def __init__(self, rewards: Reward[..., Any] | Callable[..., Any] | Iterable[Any] | None = None) -> None:
        if rewards is None:
            rewards = ()
        elif isinstance(rewards, Reward) or not isinstance(rewards, Iterable):
            rewards = (rewards,)
        super().__init__(r if isinstance(r, Reward) else reward(r) for r in rewards)

    async def score(self, trajectory: Trajectory, context: Context) -> Score:
        """Run all rewards concurrently, and return their weighted sum.

        If a reward with nonzero weight is unscored, the sum is unscored, too, but the metrics of the other rewards are
        kept. Chains with the stop reason "error" or "cancelled", which the model did not cause, are not scored.
        Rewards with `per="turn"` do not contribute to the sum, which is 0.0 if there are no other rewards.
        """
        if trajectory.stop in UNSCORED_STOPS or len(self) == 0:
            return Score(None)
        actions = [(i, t) for i, t in enumerate(trajectory.turns) if t.kind == "action"]
        jobs: list[tuple[Reward[..., Any], int | None, Turn | None]] = []
        for r in self:
            jobs += [(r, None, None)] if r.per == "trajectory" else [(r, i, t) for i, t in actions]
        if len(jobs) == 1:
            ((r, index, turn),) = jobs
            return _combine_scores([(r, index, await r.score(trajectory, context, turn=turn))])
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(r.score(trajectory, context, turn=turn)) for r, _, turn in jobs]
        return _combine_scores([(r, i, task.result()) for (r, i, _), task in zip(jobs, running, strict=True)])

    def __repr__(self) -> str:
        return f"<RewardSet {' + '.join(f'{r.weight:g} {r.name}' for r in self) or 'empty'}>"


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
            # The metric of a per-turn reward is the sum over turns.
            into[r.name] = into.get(r.name, 0.0) + value
        extras |= {key: value for key, value in part.extras.items() if index is None}
        if r.weight == 0:
            continue  # only a metric
        if index is None:
            scored = scored and part.reward is not None
            total += r.weight * (part.reward or 0.0)
        elif part.reward is not None:
            turn_rewards[index] = turn_rewards.get(index, 0.0) + r.weight * part.reward
        else:
            # None means no turn reward, but a failure makes the sum unscored.
            scored = scored and part.error is None
    metrics = dict(own)
    for key, by_reward in others.items():
        # If several rewards report a metric with the same name, such as "success", prefix it with the reward's name.
        if len(by_reward) == 1 and key not in metrics:
            metrics[key] = next(iter(by_reward.values()))
        else:
            metrics |= {f"{name}/{key}": value for name, value in by_reward.items()}
    if not scored:
        return Score(None, metrics, error, extras=extras)
    return Score(total, metrics, error, turn_rewards, extras)


# --- turns and values ----------------------------------------------------------------------------


def _action_to_score(trajectory: Trajectory, turn: Turn | int | None) -> Turn:
    if isinstance(turn, int):
        turn = trajectory.turns[turn]
    if turn is None:
        turn = [t for t in trajectory.turns if t.kind == "action"][-1]
    if turn.kind != "action":
        raise RewardError(f"turn must be an action, got {turn!r}")
    return turn


def _observation_after(trajectory: Trajectory, turn: Turn | None) -> Turn | None:
    following = (after for before, after in pairwise(trajectory.turns) if before is turn)
    return next((after for after in following if after.kind == "observation"), None)


def _is_number(value: Any) -> bool:
    """Return True for real numbers, and for NumPy arrays and torch tensors with one element."""
    if isinstance(value, numbers.Number):
        return not isinstance(value, complex)
    shape = getattr(value, "shape", None)
    return shape is not None and math.prod(shape) == 1 and hasattr(value, "item") and hasattr(value, "dtype")
