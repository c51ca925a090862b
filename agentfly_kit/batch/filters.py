"""Filters that exclude scored trajectories from training.

A filter is a function that returns the reason for exclusion (a string), or None to keep its argument. A filter defined
as `def f(trajectory)` is called with each trajectory, and one defined as `def f(group)` with each group. An excluded
trajectory is treated as unscored. To exclude only the tokens of truncated trajectories from the loss, as in DAPO, use
`collate(truncated="mask")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

from agentfly_kit.errors import SettingsError
from agentfly_kit.trajectories import Group, Trajectory
from agentfly_kit.types import grouped

Filter = Callable[..., str | None]

__all__ = ["drop_reasons", "equal_rewards", "overlong"]


def equal_rewards(group: Group) -> str | None:
    """Exclude groups whose scored rewards are all equal, such as groups with a single scored trajectory.

    Without this filter, the advantages of such a group are exactly 0, but its tokens still count in the denominator of
    a token mean. `TrainConfig(refill=)` samples other groups to replace the excluded ones.

    Source:  DAPO, arXiv 2503.14476, 3.2 ("dynamic sampling").
    """
    scored = {reward for reward in group.rewards if reward is not None}
    return "equal rewards" if len(scored) == 1 else None


def overlong(tokens: int | None = None) -> Filter:
    """Create a filter that excludes long trajectories.

    Args:
        tokens: Maximum number of sampled tokens. With None, trajectories that were cut off by a limit are excluded.
    """

    def check(trajectory: Trajectory) -> str | None:
        if tokens is None:
            return "overlong" if trajectory.truncated else None
        return "overlong" if sum(int(row.action_mask.sum()) for row in trajectory.rows) > tokens else None

    return check


def is_group_filter(filter: Filter) -> bool:
    """Return True for filters of groups, and False for filters of trajectories. Raise SettingsError for others."""
    try:
        required = [p.name for p in inspect.signature(filter).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        required = []
    if required not in (["group"], ["trajectory"]):
        raise SettingsError(
            f"filters: {_name(filter)} must be a function with the single parameter `group` or `trajectory`, got the "
            f"parameters {required}"
        )
    return required == ["group"]


def _name(filter: Filter) -> str:
    return getattr(filter, "__name__", repr(filter))


def drop_reasons(trajectories: Iterable[Trajectory], filters: Sequence[Filter]) -> dict[str, str]:
    """Apply all filters to the scored trajectories. Return the first reason for each excluded trajectory, by id."""
    scored = [t for t in trajectories if t.reward is not None]
    groups = grouped(scored, lambda t: t.group)
    out: dict[str, str] = {}
    for filter, is_for_groups in [(filter, is_group_filter(filter)) for filter in filters]:
        for members in groups.values() if is_for_groups else [[t] for t in scored]:
            argument = Group(members[0].group, tuple(members)) if is_for_groups else members[0]
            reason = filter(argument)
            if reason is None:
                continue
            if not (isinstance(reason, str) and reason):
                raise SettingsError(
                    f"filter {_name(filter)} must return a reason (a non-empty string) or None to keep its argument, "
                    f"got {reason!r} for {argument!r}"
                )
            for t in members:
                out.setdefault(t.id, reason)
    return out
