"""Per-turn inputs of advantage estimators, with one entry for each sampled turn."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit._display import Displayable
from agentfly_kit.errors import BatchError
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Turn

_turn_content = operator.attrgetter("kind", "author", "ids", "images", "sampled", "logprobs", "seed")


@dataclass(frozen=True, repr=False)
class TurnData(Displayable):
    """Inputs of `advantages.gigpo` and `advantages.arpo`, with one entry for each sampled turn of each trajectory.

    Attributes:
        turn_rewards: Reward earned by each turn. The last reward includes that of the trajectory, and is None if the
            trajectory is unscored.
        states: State at the beginning of each turn.
        turn_ids: Id of each turn. Turns that forked chains have in common have the same id.
    """

    turn_rewards: tuple[tuple[float | None, ...], ...]
    states: tuple[tuple[Hashable, ...], ...]
    turn_ids: tuple[tuple[Hashable, ...], ...]


def as_trajectories(rollout: Any) -> list[Trajectory]:
    """Convert a rollout, a trajectory, or an iterable of trajectories to a list of trajectories."""
    given: Iterable[Any] = getattr(rollout, "trajectories", rollout)
    if isinstance(given, Trajectory):
        return [given]
    if inspect.isawaitable(given):
        raise BatchError("the rollout has not run; await it first")
    trajectories = list(given)
    for item in trajectories:
        if not isinstance(item, Trajectory):
            raise BatchError(f"trajectories must be a Rollout or Trajectory objects, got {type(item).__name__}")
    return trajectories


def sampled_turn_indices(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the indices of the sampled turns. Column k of (N, K) advantages belongs to the k-th sampled turn."""
    return tuple(i for i, turn in enumerate(trajectory.turns) if turn.sampled and turn.ids)


def credited_turn(trajectory: Trajectory, index: int) -> int:
    """Return the index of the turn that earned the reward of turn `index`, the last sampled turn up to `index`."""
    for i in range(index, -1, -1):
        if trajectory.turns[i].sampled and trajectory.turns[i].ids:
            return i
    raise BatchError(
        f"trajectory {trajectory.id!r}: turn {index} has a reward of {trajectory.turns[index].reward:g}, but neither "
        "this turn nor any earlier one was sampled"
    )


def last_observation(trajectory: Trajectory, index: int) -> Hashable:
    """Return the token ids and images of the turn before turn `index`, usually an observation or the prompt."""
    before = trajectory.turns[index - 1] if index else None
    return () if before is None else (before.ids, before.images) if before.images else before.ids


def turn_data(
    rollout: Any,
    *,
    state: Callable[[Trajectory, int], Hashable] = last_observation,
    rewards: Sequence[float | None] | None = None,
) -> TurnData:
    """Collect the turn rewards, states and turn ids of a rollout for per-turn advantage estimators::

        turns = af.turn_data(rollout)
        batch = af.collate(rollout, lambda rewards, groups: af.advantages.gigpo(
            rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states))

    Args:
        rollout: A rollout, a trajectory, or an iterable of trajectories.
        state: Function of (trajectory, index) that returns the state at the beginning of the sampled turn
            `trajectory.turns[index]`, as a hashable object. Turns of a group with equal states are compared. By
            default, the state consists of the token ids and images of the preceding turn, the prompt or an observation.
        rewards: Rewards of the N trajectories to use instead of the recorded ones, such as those that `collate` passes
            to an estimator.

    Raises:
        ValueError: If the number of rewards differs from the number of trajectories.
        BatchError: If a turn has a reward, but neither this turn nor any earlier one was sampled.
    """
    trajectories = as_trajectories(rollout)
    outcomes = [t.reward for t in trajectories] if rewards is None else list(rewards)
    sampled = [sampled_turn_indices(t) for t in trajectories]
    return TurnData(
        tuple(_rewards_by_turn(t, at, r) for t, at, r in zip(trajectories, sampled, outcomes, strict=True)),
        tuple(tuple(state(t, i) for i in at) for t, at in zip(trajectories, sampled, strict=True)),
        _turn_ids(trajectories, sampled),
    )


def _rewards_by_turn(t: Trajectory, sampled: tuple[int, ...], outcome: float | None) -> tuple[float | None, ...]:
    """Return the total reward of each sampled turn. The last includes `outcome`, or is None if `outcome` is None."""
    earned = dict.fromkeys(sampled, 0.0)
    for i, turn in enumerate(t.turns):
        if turn.reward is not None:
            earned[credited_turn(t, i)] += turn.reward
    if not sampled:
        return ()
    *earlier, last = earned.values()
    return (*earlier, None if outcome is None else last + float(outcome))


def _turn_ids(trajectories: list[Trajectory], sampled: list[tuple[int, ...]]) -> tuple[tuple[Hashable, ...], ...]:
    """Assign an id to each sampled turn.

    The last turn of a trajectory always has an id of its own, even if a fork samples the same turns.
    """
    numbered = zip(_number_turns(trajectories), sampled, strict=True)
    return tuple(
        (*(numbers[i] for i in at[:-1]), ("leaf", n)) if at else () for n, (numbers, at) in enumerate(numbered)
    )


def executed_calls(rollout: Any) -> int:
    """Return the total number of tool calls that ran. A call in a turn that forked chains share counts once.

    Args:
        rollout: A rollout, a trajectory, or an iterable of trajectories.
    """
    trajectories = as_trajectories(rollout)
    turns: dict[int, Turn] = {}  # distinct turns
    for t, numbers in zip(trajectories, _number_turns(trajectories), strict=True):
        turns |= zip(numbers, t.turns, strict=True)
    return sum(call.result is not None and call.result.ran for turn in turns.values() for call in turn.tool_calls)


def _number_turns(trajectories: Iterable[Trajectory]) -> list[list[int]]:
    """Number the turns of all trajectories. Equal leading turns of forks of the same chain get the same number.

    Turns are equal if they are the same object or have equal content and seeds, for example after loading a file.
    """
    # A turn is identified by its content and the number of the preceding turn, or the chain for a first turn.
    known: dict[Hashable, int] = {}
    numbered = []
    for t in trajectories:
        before: Hashable = (t.group, t.chain)
        numbers = []
        for turn in t.turns:
            content = id(turn) if turn.sampled and turn.seed is None else _turn_content(turn)
            before = known.setdefault((before, content), len(known))
            numbers.append(before)
        numbered.append(numbers)
    return numbered
