"""`Rollout`: finished chains, with summary statistics, data frames, rescoring and comparison."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable, shorten
from agentfly_kit.agent import rollout_io
from agentfly_kit.agent.turns import with_turn_rewards
from agentfly_kit.batch.turn_data import executed_calls
from agentfly_kit.errors import SettingsError, check_choice
from agentfly_kit.rewards import RewardSet
from agentfly_kit.success import SuccessRule, check_success_rule, record_success, sign_flip_test
from agentfly_kit.tools.context import Context
from agentfly_kit.trajectories import UNSCORED_STOPS, Group, Trajectory
from agentfly_kit.types import Task, grouped, images_of

if TYPE_CHECKING:
    import pandas as pd

Pair: TypeAlias = tuple[Trajectory, Trajectory]


class Trajectories(tuple[Trajectory, ...], Displayable):
    """Tuple of trajectories, whose repr shows the first eight."""

    __slots__ = ()

    def __repr__(self) -> str:
        more = [f"and {len(self) - 8} more; rollout.to_frame() has one row for each"] if len(self) > 8 else []
        return "\n".join([*map(repr, self[:8]), *more]) or "()"


@dataclass(frozen=True)
class Rollout(Displayable):
    """Finished chains, grouped by task, in the order of the tasks.

    `rollout.save(path)` writes a file that `Rollout.load(path)` reads. `Run.rollout(step)` loads a rollout
    that was saved during training with `TrainConfig(save_rollouts=True)`.

    Attributes:
        groups: One group per task.
        seconds: Wall-clock time of the rollout.
        not_run: Stop reason, such as "run_tokens", of each chain that a shared budget did not let start, keyed by id.
        forks_refused: Number of requested forks that were not made, for example because no sandbox was free.
        splits: Dict from task id to name of the split, if the tasks of `Agent.rollout` have splits; not saved.
    """

    groups: tuple[Group, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    not_run: dict[str, str] = field(default_factory=dict)
    forks_refused: int = 0
    splits: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def trajectories(self) -> Trajectories:
        return Trajectories(t for group in self.groups for t in group.trajectories)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The distinct tasks of the chains."""
        return tuple({group.task.id: group.task for group in self.groups}.values())

    @property
    def failed(self) -> Rollout:
        """The unscored chains. `await agent.rollout(rollout.failed.tasks)` reruns their tasks."""
        return Rollout.from_trajectories((t for t in self if t.reward is None), self.seconds)

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Rollout: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Rollout:
        if isinstance(index, slice):
            return Rollout.from_trajectories(self.trajectories[index], self.seconds)
        return self.trajectories[index]

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Iterable[Trajectory],
        seconds: float = 0.0,
        not_run: Mapping[str, str] | None = None,
        forks_refused: int = 0,
    ) -> Rollout:
        """Create a rollout by grouping trajectories by `Trajectory.group`, in order of first appearance."""
        by = grouped(trajectories, lambda t: t.group)
        return cls(
            tuple(Group(name, tuple(ts)) for name, ts in by.items()), seconds, dict(not_run or {}), forks_refused
        )

    def with_drop_reasons(self, dropped: Iterable[Any]) -> Rollout:
        """Return a copy in which `Trajectory.dropped` is set to the reasons in `dropped`, usually `batch.dropped`."""
        why = {d.trajectory: d.reason for d in dropped if d.row is None}
        groups = (
            Group(g.id, tuple(t.replace(dropped=why[t.id]) if t.id in why else t for t in g)) for g in self.groups
        )
        return dataclasses.replace(self, groups=tuple(groups)) if why else self

    def summary(self) -> dict[str, float]:
        """Return the mean success and reward of the scored trajectories, and statistics over all trajectories.

        `reward_max` is included only if `success_hint` is not None. `calls` is the mean number of tool calls per chain.
        If chains were forked, `forks` is the number of forks, and `executed` is the total number of tool calls
        that ran, counting a call shared by several chains once.

        Stop reasons are counted by `rollout.to_frame()["stop"].value_counts()`.
        """
        ts = self.trajectories
        scored = [t for t in ts if t.reward is not None]
        rewards = [t.reward for t in scored if t.reward is not None]
        out: dict[str, float] = {"trajectories": len(ts)}
        if self.not_run:
            out["not_run"] = len(self.not_run)
        if self.forks_refused:
            out["forks_refused"] = self.forks_refused
        if scored:
            out["success"] = sum(bool(t.success) for t in scored) / len(scored)
            out["reward"] = sum(rewards) / len(rewards)
        if self.success_hint:
            out["reward_max"] = max(rewards)
        if ts:
            out["unscored"] = 1 - len(scored) / len(ts)
            out["truncated"] = sum(t.truncated for t in ts) / len(ts)
            out["turns"] = sum(len(t.actions) for t in ts) / len(ts)
            out["calls"] = sum(len(t.tool_calls) for t in ts) / len(ts)
            out["seconds"] = self.seconds
            if all(t.exact for t in ts):
                out["tokens"] = sum(int(row.action_mask.sum()) for t in ts for row in t.rows) / len(ts)
            if forks := sum(t.id != f"{t.group}/{t.chain}" for t in ts):
                out["forks"], out["executed"] = forks, executed_calls(ts)
            if any(len(t.rows) > 1 for t in ts):
                out["rows"] = sum(len(t.rows) for t in ts) / len(ts)
        return out

    @property
    def success_hint(self) -> str | None:
        """Advice to set `Agent(success=)`; None if the rewards are equal or reach 1, or a metric is named "success"."""
        rewards = [t.reward for t in self if t.reward is not None]
        if (
            not rewards
            or min(rewards) == max(rewards)
            or max(rewards) >= 1
            or any("success" in t.metrics for t in self)
        ):
            return None
        return _success_hint(max(rewards))

    @property
    def unscored_reason(self) -> str | None:
        """Number of unscored chains with the most common reason, as text; None if all are scored."""
        reasons = Counter(
            str(t.error).splitlines()[0] if t.error else t.stop if t.stop in UNSCORED_STOPS else "no reward"
            for t in self
            if t.reward is None
        )
        if not reasons:
            return None
        reason = shorten(reasons.most_common(1)[0][0], 120)
        return f"{reasons.total()} unscored ({'most often ' if len(reasons) > 1 else ''}{reason})"

    def to_frame(self, kind: Literal["trajectories", "turns", "tokens"] = "trajectories") -> pd.DataFrame:
        """Return a data frame with one row per trajectory, turn or token. Missing numbers are NaN, never 0.

        The column "row" is an index into `trajectory.rows`, and "position" is the index of a token in that row.

        Args:
            kind: "trajectories", "turns" or "tokens".
        """
        import pandas as pd

        check_choice("kind", kind, Literal["trajectories", "turns", "tokens"])
        records = {"trajectories": _trajectory_records, "turns": _turn_records, "tokens": _token_records}[kind]
        return pd.DataFrame(
            [
                {"trajectory": t.id, "task": t.task.id, "chain": t.chain} | record
                for t in self
                for record in records(t)
            ]
        )

    @pending_call
    async def rescore(self, reward: Any, *, success: SuccessRule = None) -> Rollout:
        """Score the same trajectories with another reward, without sampling.

        Args:
            reward: see `Agent(reward=)`.
            success: see `Agent(success=)`.

        Raises:
            SettingsError: if the reward requires a sandbox or environment, because the chains have released theirs.
        """
        rewards = RewardSet(reward)
        check_success_rule(success)
        if rewards.sandbox_types:
            asking = next(r.name for r in rewards if r.sandbox_types)
            raise SettingsError(
                f"the reward {asking!r} requires a {rewards.sandbox_types[0].__name__}, but the chains have "
                f"released theirs; repeat the rollout with this reward, or await {asking}.try_(trajectory)"
            )
        rewards.check(self.tasks)

        async def rescored(t: Trajectory) -> Trajectory:
            if t.stop in UNSCORED_STOPS:
                return t
            async with Context(t.task, trajectory_id=t.id) as context:
                score = await rewards.score(t, context)
            turns = with_turn_rewards(t.turns, score.turn_rewards)
            t = t.replace(reward=score.reward, metrics=dict(score.metrics), error=score.error, turns=turns)
            return record_success(t, success)

        groups = [Group(group.id, tuple([await rescored(t) for t in group])) for group in self.groups]
        return dataclasses.replace(self, groups=tuple(groups))

    def sum_turn_rewards(self) -> Rollout:
        """Return a copy in which turn rewards are added to the reward of their chain, for outcome estimators.

        The success of each chain is unchanged. See `TrainConfig(sum_turn_rewards=)`.
        """

        def summed(t: Trajectory) -> Trajectory:
            earned = [turn.reward for turn in t.turns if turn.reward is not None]
            if not earned:
                return t
            turns = with_turn_rewards([dataclasses.replace(turn, reward=None) for turn in t.turns], {})
            reward = None if t.reward is None else t.reward + math.fsum(earned)
            known = {} if t.success is None else {"success": float(t.success)}
            return t.replace(reward=reward, turns=turns, metrics={**t.metrics, **known})

        return dataclasses.replace(self, groups=tuple(Group(g.id, tuple(map(summed, g))) for g in self.groups))

    def diff(self, other: Rollout) -> RolloutDiff:
        """Compare this rollout with a later rollout of the same tasks, chain by chain."""
        mine, theirs = self._by_chain(), other._by_chain()
        both = [key for key in mine if key in theirs]
        if not both:
            raise SettingsError("other must be a rollout of some of the same tasks, got no task in common")
        return RolloutDiff(tuple((mine[key], theirs[key]) for key in both))

    def _by_chain(self) -> dict[tuple[str, int, str], Trajectory]:
        """Return the trajectories keyed by task id, occurrence of the task, and chain id within the group."""
        seen: Counter[str] = Counter()
        out: dict[tuple[str, int, str], Trajectory] = {}
        for group in self.groups:
            seen[group.task.id] += 1
            out |= {(t.task.id, seen[t.task.id], t.id.removeprefix(t.group)): t for t in group}
        return out

    def save(self, path: str | Path) -> Path:
        """Write the rollout to a .jsonl file atomically.

        Fields of tasks may be JSON values, tuples, sets, bytes, dates, times, decimals, UUIDs and paths, which `load`
        restores, and arrays, which it returns as lists. A time zone is saved as its offset. Each image is written once,
        to the folder `rollout_images` beside the file; a loaded rollout reads images when they are first needed.

        Raises:
            RunError: If a task contains values of other types, or the file cannot be written.
        """
        rollout_io.write(Path(path), self.trajectories, self.seconds, self.not_run, self.forks_refused)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Load a rollout from a file written by `save`."""
        return cls.from_trajectories(*rollout_io.read(Path(path)))

    def __repr__(self) -> str:
        tasks = count_tasks([group.task for group in self.groups], self.splits)
        parts = [f"{tasks}, {len(self)} chain{'s' * (len(self) != 1)}"]
        if (success := self.summary().get("success")) is not None:
            parts.append(f"success {success:.3f}" + (f" ({self.success_hint})" if self.success_hint else ""))
        if self.unscored_reason:
            parts.append(self.unscored_reason)
        if self.not_run:
            parts.append(f"{len(self.not_run)} not run")
        return f"Rollout({', '.join(parts)})"


def count_tasks(tasks: Sequence[Task], splits: Mapping[str, str]) -> str:
    """Return the number of tasks as text, with the number in each split if there are several splits."""
    counts = Counter(splits[task.id] for task in tasks if task.id in splits)
    per_split = f" ({', '.join(f'{n} {name}' for name, n in counts.items())})" if len(counts) > 1 else ""
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)}{per_split}"


def warn_about_success(records: Sequence[Mapping[str, float]]) -> None:
    """After five training steps, warn if the rewards varied but no chain succeeded; see `Rollout.success_hint`."""
    highest = [record["reward_max"] for record in records if "reward_max" in record]
    if len(records) == 5 and highest and not any(record.get("success") for record in records):
        hint = _success_hint(max(highest))
        warnings.warn(f"no chain of the first {len(records)} steps counts as a success: {hint}", stacklevel=4)


def _success_hint(highest: float) -> str:
    return f"rewards reach {highest:.3g}, success needs 1: set Agent(success=)"


def _trajectory_records(t: Trajectory) -> Iterator[dict[str, Any]]:
    yield {
        "reward": math.nan if t.reward is None else t.reward,
        "success": t.success,
        "stop": t.stop,
        "final": t.final,
        "turns": len(t.actions),
        "calls": len(t.tool_calls),
        "failed_calls": sum(1 for c in t.tool_calls if c.result is not None and not c.result.ok),
        "rows": len(t.rows),
        "tokens": sum(map(len, t.rows)) if t.exact else math.nan,
        "action_tokens": sum(int(row.action_mask.sum()) for row in t.rows) if t.exact else math.nan,
        "seconds": t.seconds,
        "error": str(t.error) if t.error else None,
        "dropped": t.dropped,
        "note": t.note,
        **{f"metric_{name}": value for name, value in t.metrics.items()},
    }


def _turn_records(t: Trajectory) -> Iterator[dict[str, Any]]:
    for i, turn in enumerate(t.turns):
        yield {
            "row": turn.row,
            "turn": i,
            "kind": turn.kind,
            "author": turn.author,
            "tokens": math.nan if turn.ids is None else len(turn.ids),
            "text": turn.text,
            "calls": [c.name for c in turn.tool_calls],
            "logprob": math.nan if turn.logprobs is None else math.fsum(turn.logprobs),
            "reward": math.nan if turn.reward is None else turn.reward,
            "stop": turn.stop,
            "seconds": turn.seconds,
        }


def _token_records(t: Trajectory) -> Iterator[dict[str, Any]]:
    for row in t.rows:
        for position, text in enumerate(row.token_texts):
            turn = int(row.turn_index[position])
            yield {
                "row": row.index,
                "position": position,
                "turn": turn,
                "author": t.turns[turn].author,
                "id": int(row.ids[position]),
                "text": text,
                "mask": bool(row.action_mask[position]),
                "logprob": float(row.logprobs[position]),
                "entropy": float(row.entropies[position]),
                "version": int(row.versions[position]),
            }


@dataclass(frozen=True)
class RolloutDiff(Displayable):
    """Comparison of two rollouts. `pairs` holds the earlier and the later trajectory of each chain."""

    pairs: tuple[Pair, ...] = field(repr=False)

    @cached_property
    def scored(self) -> tuple[Pair, ...]:
        """Pairs in which both chains are scored; all counts and rates are computed from such pairs."""
        return tuple(p for p in self.pairs if p[0].success is not None and p[1].success is not None)

    @property
    def gained(self) -> tuple[Pair, ...]:
        """Pairs in which the earlier chain failed and the later chain succeeded."""
        return tuple(p for p in self.scored if p[1].success and not p[0].success)

    @property
    def lost(self) -> tuple[Pair, ...]:
        return tuple(p for p in self.scored if p[0].success and not p[1].success)

    @property
    def success(self) -> tuple[float, float]:
        """Success rates of the earlier and the later rollout over the pairs in `scored`; NaN if there are none."""
        n = len(self.scored) or math.nan
        return sum(bool(a.success) for a, _ in self.scored) / n, sum(bool(b.success) for _, b in self.scored) / n

    @cached_property
    def p_value(self) -> float:
        """Two-sided p-value for the null hypothesis that both rollouts have the same success rate.

        With one chain per task, the test is McNemar's exact test. Otherwise, an exact sign-flip test on the differences
        per task is used, because chains of one task are not independent.
        """
        by_task: Counter[str] = Counter()
        for a, b in self.scored:
            by_task[a.task.id] += bool(b.success) - bool(a.success)
        return sign_flip_test(list(by_task.values()))

    @staticmethod
    def first_difference(a: Trajectory, b: Trajectory) -> int | None:
        """Return the index of the first turn whose text or images differ between `a` and `b`, or None."""
        for i, (x, y) in enumerate(zip(a.turns, b.turns, strict=False)):
            if x.text != y.text or images_of(x.messages) != images_of(y.messages):
                return i
        return None if len(a.turns) == len(b.turns) else min(len(a.turns), len(b.turns))

    def __repr__(self) -> str:
        before, after = self.success
        unscored = len(self.pairs) - len(self.scored)
        return (
            f"RolloutDiff({len(self.pairs)} pairs{f', {unscored} unscored' if unscored else ''}: "
            f"success {before:.3f} -> {after:.3f}, p = {self.p_value:.2g}, "
            f"{len(self.gained)} gained, {len(self.lost)} lost)"
        )
