"""Rollouts as estimators of turns see them: for each trajectory, one entry a turn that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.errors import AlignmentError, BatchError
from agentfly_kit.types import Trajectory, Turn


@dataclass(frozen=True)
class TurnData:
    """N lists each, one entry a sampled turn, in order: what `advantages.gigpo` and `advantages.arpo` want to know.

    Attributes:
        turn_rewards: What each turn earned, the trajectory's reward on the last; None there if it is unscored.
        states: What the turn began from.
        turn_ids: A name for each turn; chains that were forked have the same name for a turn that they share.
    """

    turn_rewards: tuple[tuple[float | None, ...], ...]
    states: tuple[tuple[Hashable, ...], ...]
    turn_ids: tuple[tuple[Hashable, ...], ...]


def sampled_turn_indices(trajectory: Trajectory) -> tuple[int, ...]:
    """Indices in `trajectory.turns` of the turns that the policy sampled a token in: entry k of an (N, K) advantage."""
    return tuple(i for i, turn in enumerate(trajectory.turns) if turn.sampled and turn.ids)


def last_observation(trajectory: Trajectory, index: int) -> Hashable:
    """What the turn at this index answered: the tokens told just before it, the prompt for a first turn."""
    previous = trajectory.turns[index - 1] if index else None
    return () if previous is None else previous.ids


def turn_data(
    rollout: Any,
    *,
    state: Callable[[Trajectory, int], Hashable] = last_observation,
    rewards: Sequence[float | None] | None = None,
) -> TurnData:
    """Turn rewards, states and the tree of forks of a rollout, or of trajectories, as estimators of turns want them::

        turns = af.turn_data(rollout)
        batch = af.collate(rollout, lambda rewards, groups: af.advantages.gigpo(
            rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states))

    state: (trajectory, index in trajectory.turns of a sampled turn) -> anything hashable; turns of one group with equal
        states are compared. By default what was told just before: the prompt, then each observation.
    rewards: (N,), outcomes to take instead of the trajectories' own, such as an estimator is shown by `collate`.
    Raises:  AlignmentError for another number of rewards; BatchError for a turn's reward that no sampled turn comes
             before.
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
    """A reward that stands on a turn is earned by the last one sampled up to it, as `collate` credits it."""
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
    """A turn is named after the first trajectory that has it. Its last one belongs to a trajectory alone: a fork that
    went the same way again, with the same noise, is another leaf."""
    out: list[tuple[Hashable, ...]] = []
    seen: dict[tuple[str, int], list[int]] = {}
    for n, (t, at) in enumerate(zip(trajectories, where, strict=True)):
        names: list[Hashable] = [(n, i) for i in at]
        family = seen.setdefault((t.group, t.chain), [])
        for other in family:  # from the nearest kin all that is shared; the others share less
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
    """The same turn: the same object, or, loaded from disk, one of the same tokens and, if sampled, the same seed."""
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
