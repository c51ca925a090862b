"""Per-turn inputs of advantage estimators: one entry for each turn of a trajectory that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.errors import AlignmentError, BatchError
from agentfly_kit.types import Trajectory, Turn


@dataclass(frozen=True)
class TurnData:
    """Inputs of `advantages.gigpo` and `advantages.arpo`: N tuples each, with one entry per sampled turn, in order.

    Attributes:
        turn_rewards: Reward earned by each turn. The last one includes the trajectory's reward and is None if the
            trajectory is unscored.
        states: State in which each turn began.
        turn_ids: Id of each turn. Forked chains share the ids of their common turns.
    """

    turn_rewards: tuple[tuple[float | None, ...], ...]
    states: tuple[tuple[Hashable, ...], ...]
    turn_ids: tuple[tuple[Hashable, ...], ...]


def sampled_turn_indices(trajectory: Trajectory) -> tuple[int, ...]:
    """Return the indices in `trajectory.turns` of the turns that the policy sampled.

    The k-th of them receives entry k of advantages of shape (N, K).
    """
    return tuple(i for i, turn in enumerate(trajectory.turns) if turn.sampled and turn.ids)


def last_observation(trajectory: Trajectory, index: int) -> Hashable:
    """Return the token ids of the turn before the turn at `index`: an observation, or the prompt for the first action.

    The result is () if there is no such turn.
    """
    previous = trajectory.turns[index - 1] if index else None
    return () if previous is None else previous.ids


def turn_data(
    rollout: Any,
    *,
    state: Callable[[Trajectory, int], Hashable] = last_observation,
    rewards: Sequence[float | None] | None = None,
) -> TurnData:
    """Collect turn rewards, states and turn ids of a rollout for estimators of per-turn advantages::

        turns = af.turn_data(rollout)
        batch = af.collate(rollout, lambda rewards, groups: af.advantages.gigpo(
            rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states))

    Args:
        rollout: A rollout, a trajectory, or an iterable of trajectories.
        state: Function (trajectory, index in trajectory.turns of a sampled turn) -> any hashable object. Turns of a
            group with equal states are compared. The default is the turn before it: the prompt, then each observation.
        rewards: (N,) rewards to use instead of those of the trajectories, such as the ones that `collate` passes to an
            estimator.

    Returns:
        One entry per sampled turn of each trajectory.

    Raises:
        AlignmentError: If the number of rewards differs from the number of trajectories.
        BatchError: If a turn has a reward, but no sampled turn precedes its end.
    """
    given: Iterable[Any] = getattr(rollout, "trajectories", rollout)
    trajectories = [given] if isinstance(given, Trajectory) else list(given)
    outcomes = [t.reward for t in trajectories] if rewards is None else list(rewards)
    if len(outcomes) != len(trajectories):
        raise AlignmentError(f"{len(outcomes)} rewards for {len(trajectories)} trajectories; give one each")
    where = [sampled_turn_indices(t) for t in trajectories]
    return TurnData(
        tuple(_rewards_by_turn(t, at, r) for t, at, r in zip(trajectories, where, outcomes, strict=True)),
        tuple(tuple(state(t, i) for i in at) for t, at in zip(trajectories, where, strict=True)),
        _turn_ids(trajectories, where),
    )


def _rewards_by_turn(t: Trajectory, at: tuple[int, ...], outcome: float | None) -> tuple[float | None, ...]:
    """Credit each turn reward to the last sampled turn up to it, as `collate` does, and `outcome` to the last turn."""
    earned = [0.0] * len(at)
    for i, turn in enumerate(t.turns):
        if turn.reward is None:
            continue
        before = [k for k, place in enumerate(at) if place <= i]
        if not before:
            raise BatchError(
                f"trajectory {t.id!r}: turn {i} has a reward of {turn.reward:g} and no sampled turn comes before its "
                "end, so nothing can be credited with it"
            )
        earned[before[-1]] += turn.reward
    if not earned:
        return ()
    last = None if outcome is None else earned[-1] + float(outcome)
    return (*earned[:-1], last)


def _turn_ids(trajectories: list[Trajectory], where: list[tuple[int, ...]]) -> tuple[tuple[Hashable, ...], ...]:
    """Assign an id to each sampled turn, derived from the first trajectory that contains the turn.

    The last turn of a trajectory is never shared: a fork that sampled the same turns again, with the same noise, is
    another leaf.
    """
    out: list[tuple[Hashable, ...]] = []
    seen: dict[tuple[str, int], list[int]] = {}
    for n, (t, at) in enumerate(zip(trajectories, where, strict=True)):
        names: list[Hashable] = [(n, i) for i in at]
        family = seen.setdefault((t.group, t.chain), [])
        for other in family:  # the longest shared prefix determines the ids
            theirs = trajectories[other]
            same = 0
            for a, b in zip(theirs.turns, t.turns, strict=False):
                if not is_same_turn(a, b):
                    break
                same += 1
            shared = sum(1 for i in at[:-1] if i < same)
            shared = min(shared, max(0, len(where[other]) - 1))
            if shared and names[shared - 1] == (n, at[shared - 1]):
                names[:shared] = out[other][:shared]
        family.append(n)
        out.append(tuple(names))
    return tuple(out)


def is_same_turn(a: Turn, b: Turn) -> bool:
    """Return True if two objects represent the same turn.

    That is the same object or, after loading from disk, a turn with equal tokens, author and kind and, if it was
    sampled, equal logprobs and seed.
    """
    if a is b:
        return True
    alike = (a.kind, a.author, a.ids, a.sampled, a.logprobs, a.seed) == (
        b.kind,
        b.author,
        b.ids,
        b.sampled,
        b.logprobs,
        b.seed,
    )
    return alike and (not a.sampled or a.seed is not None)
