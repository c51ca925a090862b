"""Selection of the trajectories and authors to train on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

from agentfly_kit.errors import BatchError
from agentfly_kit.types import UNSCORED_STOPS, Trajectory


def as_trajectories(rollout: Any) -> list[Trajectory]:
    """Return the trajectories of a rollout, a trajectory, or an iterable of trajectories as a list.

    Raises:
        BatchError: If it is anything else, or a rollout that has not run.
    """
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


def author_names(authors: str | Sequence[str] | None, trajectories: list[Trajectory]) -> tuple[str, ...]:
    """Convert `authors` to a tuple of names, where () stands for all authors.

    Raises:
        BatchError: If `authors` is empty, or one of them sampled nothing.
    """
    if authors is None:
        return ()
    names = (authors,) if isinstance(authors, str) else tuple(authors)
    sampling = {turn.author for t in trajectories for turn in t.turns if turn.sampled}
    if not names or not sampling.issuperset(names):
        known = ", ".join(map(repr, sorted(sampling))) or "there are none"
        raise BatchError(f"authors must be names of authors whose tokens were sampled ({known}), got {authors!r}")
    return names


def not_sampled(names: tuple[str, ...]) -> str:
    """Return the reason for dropping a row without trained tokens."""
    return f"no token was sampled by {' or '.join(names) or 'a policy'}"


def unusable_reason(
    t: Trajectory, names: tuple[str, ...], truncated: str, allow_truncated_sampling: bool
) -> str | None:
    """Return why a trajectory is left out of the batch, or None if it is kept. The arguments are those of `collate`.

    Raises:
        BatchError: If it has no token ids or an infinite reward, or was sampled greedily or under truncation.
    """
    if not t.exact:
        raise BatchError(f"trajectory {t.id!r} must have token ids to be trained on, but its engine gives text only")
    if t.reward is None:
        ended = t.stop if t.stop in UNSCORED_STOPS else "no reward said a number"
        return f"unscored ({t.error.where if t.error else ended})"
    if not math.isfinite(t.reward):
        raise BatchError(f"the reward of trajectory {t.id!r} must be finite, or None for unscored, got {t.reward}")
    if not any(row.sampled_by(*names).any() for row in t.rows):
        return not_sampled(names)
    # Only greedy or truncated sampling records a kept mass, so such turns were not sampled with these settings.
    sampled = [turn for turn in t.turns if turn.sampled]
    if t.sampling.greedy or (not t.sampling.truncates and any(turn.kept_mass is not None for turn in sampled)):
        raise BatchError(
            f"trajectory {t.id!r} was sampled greedily (temperature 0): its tokens have no probability to learn from; "
            "roll out with temperature > 0 for training"
        )
    if t.sampling.truncates and not allow_truncated_sampling:
        raise BatchError(
            f"trajectory {t.id!r} was sampled under top-p, top-k or min-p ({t.sampling}): the update's ratio would be "
            "wrong by the kept mass; sample from the whole distribution, or correct it and pass "
            "allow_truncated_sampling=True"
        )
    if t.sampling.truncates and any(turn.kept_mass is None for turn in sampled):
        raise BatchError(
            f"trajectory {t.id!r} was sampled under top-p, top-k or min-p, but its engine did not record the kept "
            "mass, so the ratio cannot be corrected; sample from the whole distribution"
        )
    return "truncated" if truncated == "mask" and t.truncated else None
