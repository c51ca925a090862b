"""Filters: which scored chains are not trained on, and why. They see trajectories and groups, and no tensor.

A filter is a function of one thing that gives a reason (a text) or None for "keep": `def f(trajectory)` is asked of
each chain, `def f(group)` of each group, whose chains then leave together. What a filter takes out is as good as
unscored: no advantage counts it, nor does any loss term or denominator. To keep a chain in its group's mean and only
its tokens out of the loss, as DAPO does with overlong answers, there is `truncated="mask"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentfly_kit.errors import SettingsError
from agentfly_kit.types import Group, Trajectory

Filter = Callable[..., str | None]

__all__ = ["drop_reasons", "equal_rewards", "overlong", "tool_errors"]


def equal_rewards(group: Group) -> str | None:
    """Groups whose scored rewards are all one number: they say nothing of which chain was better.

    A group with a single scored chain is one. Without this filter such a group gets advantages of exactly 0 and still
    counts in the denominator of a token mean.
    Source:  DAPO, arXiv 2503.14476, "dynamic sampling". `TrainConfig(refill=)` samples other groups in their place.
    """
    scored = {reward for reward in group.rewards if reward is not None}
    return "equal rewards" if len(scored) == 1 else None


def overlong(tokens: int | None = None) -> Filter:
    """Chains with more sampled tokens than `tokens`, or, with None, chains that a limit cut."""
    if tokens is not None and tokens < 1:
        raise SettingsError(f"overlong({tokens}): give at least 1 token, or None for chains that a limit cut")

    def check(trajectory: Trajectory) -> str | None:
        if tokens is None:
            return "overlong" if trajectory.truncated else None
        return "overlong" if sum(int(row.action_mask.sum()) for row in trajectory.rows) > tokens else None

    return check


def tool_errors(share: float = 0.0) -> Filter:
    """Chains in which more than `share` of the tool calls failed; 0 is any."""
    if not 0 <= share < 1:
        raise SettingsError(f"tool_errors({share}): give a share from 0 to below 1")

    def check(trajectory: Trajectory) -> str | None:
        calls = [c.result for c in trajectory.tool_calls if c.result is not None]
        failed = sum(not result.ok for result in calls)
        return "tool errors" if calls and failed > share * len(calls) else None

    return check


def is_group_filter(filter: Filter) -> bool:
    """Whether a filter is asked of groups; a chain's is asked of trajectories. The parameter's name says it.

    Raises:  SettingsError for anything but a function of one `group` or one `trajectory`.
    """
    try:
        wanted = [p.name for p in inspect.signature(filter).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        wanted = []
    if wanted not in (["group"], ["trajectory"]):
        name = getattr(filter, "__name__", repr(filter))
        raise SettingsError(
            f"the filter {name} takes {', '.join(wanted) or 'nothing that could be read'}; give a function of one "
            "`group` or one `trajectory` that returns a reason or None, such as af.filters.equal_rewards or "
            "af.filters.overlong(512)"
        )
    return wanted == ["group"]


def drop_reasons(trajectories: Iterable[Trajectory], filters: Sequence[Filter]) -> dict[str, str]:
    """Trajectory id -> why it is left out. Each filter sees all scored chains; the first reason stands.

    Raises:  SettingsError naming the filter, if one gives anything but a text or None.
    """
    kinds = [(each, is_group_filter(each)) for each in filters]
    scored = [t for t in trajectories if t.reward is not None]
    members: dict[str, list[Trajectory]] = {}
    for t in scored:
        members.setdefault(t.group, []).append(t)
    out: dict[str, str] = {}
    for each, grouped in kinds:
        if grouped:
            for name, ts in members.items():
                reason = _checked_reason(each, Group(name, tuple(ts)))
                if reason is not None:
                    out = {t.id: reason for t in ts} | out
        else:
            for t in scored:
                reason = _checked_reason(each, t)
                if reason is not None:
                    out.setdefault(t.id, reason)
    return out


def _checked_reason(filter: Filter, given: Any) -> str | None:
    reason = filter(given)
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    name = getattr(filter, "__name__", repr(filter))
    raise SettingsError(
        f"the filter {name} gave {reason!r} for {given!r}; give a text, the reason why "
        "it is left out, or None to keep it"
    )
