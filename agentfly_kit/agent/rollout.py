"""Rollouts: summary statistics, data frames, rescoring and comparison. `rollout_io.py` stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent import rollout_io
from agentfly_kit.agent.turns import with_turn_rewards
from agentfly_kit.errors import SettingsError
from agentfly_kit.rewards import RewardSet
from agentfly_kit.tools.context import Context
from agentfly_kit.types import UNSCORED_STOPS, Group, Trajectory

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rollout(Displayable):
    """Finished chains grouped by task, in the order of the tasks.

    Attributes:
        groups: One group per task.
        seconds: Wall-clock time of the rollout.
        not_run: Stop reasons (`run_tokens`, ...) of chains that a shared budget prevented from starting, by id.
    """

    groups: tuple[Group, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(t for group in self.groups for t in group.trajectories)

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @classmethod
    def from_trajectories(
        cls, trajectories: Iterable[Trajectory], seconds: float = 0.0, not_run: Mapping[str, str] | None = None
    ) -> Rollout:
        """Group trajectories by their `group`, keeping the order in which groups first appear."""
        by: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            by.setdefault(t.group, []).append(t)
        return cls(tuple(Group(name, tuple(ts)) for name, ts in by.items()), seconds, dict(not_run or {}))

    def with_drop_reasons(self, dropped: Iterable[Any]) -> Rollout:
        """Return a copy in which trajectories excluded from a batch carry the reason.

        Use as `rollout.with_drop_reasons(batch.dropped)`.
        """
        why = {d.trajectory: d.reason for d in dropped if d.row is None}
        if not why:
            return self
        groups = (
            Group(g.id, tuple(t.replace(dropped=why[t.id]) if t.id in why else t for t in g)) for g in self.groups
        )
        return Rollout(tuple(groups), self.seconds)

    # --- numbers ---

    def summary(self) -> dict[str, float]:
        """Return mean success and reward of the scored trajectories, and means and fractions over all."""
        ts = self.trajectories
        scored = [t for t in ts if t.reward is not None]
        out: dict[str, float] = {"trajectories": len(ts)}
        if self.not_run:
            out["not_run"] = len(self.not_run)
        if scored:
            out["success"] = sum(bool(t.success) for t in scored) / len(scored)
            out["reward"] = sum(t.reward for t in scored if t.reward is not None) / len(scored)
        if ts:
            out["unscored"] = 1 - len(scored) / len(ts)
            out["truncated"] = sum(t.truncated for t in ts) / len(ts)
            out["turns"] = sum(len(t.actions) for t in ts) / len(ts)
            out["calls"] = sum(len(t.tool_calls) for t in ts) / len(ts)
            out["seconds"] = self.seconds
            if all(t.exact for t in ts):
                out["tokens"] = sum(int(row.action_mask.sum()) for t in ts for row in t.rows) / len(ts)
            if any(len(t.rows) > 1 for t in ts):
                out["rows"] = sum(len(t.rows) for t in ts) / len(ts)
        return out

    # --- frames ---

    def to_frame(self, kind: Literal["trajectories", "turns", "tokens"] = "trajectories") -> pd.DataFrame:
        """Return a data frame with one line per trajectory, turn or token. Missing numbers are NaN, never 0.

        Column "row" is the index of the row of the trajectory, and "position" that of a token in its row.

        Args:
            kind: "trajectories", "turns" or "tokens".

        Raises:
            SettingsError: for another kind.
        """
        import pandas as pd

        if kind not in ("trajectories", "turns", "tokens"):
            raise SettingsError(f"to_frame({kind!r}): kind must be 'trajectories', 'turns' or 'tokens'")
        rows: list[dict[str, Any]] = []
        for t in self.trajectories:
            head = {"trajectory": t.id, "task": t.task.id, "chain": t.chain}
            if kind == "trajectories":
                rows.append(head | self._trajectory_row(t))
            elif kind == "turns":
                rows.extend(head | row for row in self._turn_rows(t))
            else:
                rows.extend(head | row for row in self._token_rows(t))
        return pd.DataFrame(rows)

    @staticmethod
    def _trajectory_row(t: Trajectory) -> dict[str, Any]:
        return {
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
        } | {f"metric_{k}": v for k, v in t.metrics.items()}

    @staticmethod
    def _turn_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
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

    @staticmethod
    def _token_rows(t: Trajectory) -> Iterator[dict[str, Any]]:
        for row in t.rows:
            views = (
                row.ids,
                row.token_texts,
                row.action_mask,
                row.logprobs,
                row.entropies,
                row.versions,
                row.turn_index,
            )
            for position, (i, piece, mask, logprob, entropy, version, turn) in enumerate(zip(*views, strict=True)):
                yield {
                    "row": row.index,
                    "position": position,
                    "turn": int(turn),
                    "author": t.turns[int(turn)].author,
                    "id": int(i),
                    "text": piece,
                    "mask": bool(mask),
                    "logprob": float(logprob),
                    "entropy": float(entropy),
                    "version": int(version),
                }

    # --- rescoring and comparison ---

    @pending_call
    async def rescore(self, reward: Any) -> Rollout:
        """Score the same trajectories with another reward, without sampling.

        Raises:
            SettingsError: if the reward requires a sandbox or environment. Those of the chains have been released, and
                a fresh one is not in the same state.
        """
        rewards = RewardSet(reward)
        if rewards.sandbox_types:
            asking = next(r.name for r in rewards if r.sandbox_types)
            raise SettingsError(
                f"the reward {asking!r} requires a {rewards.sandbox_types[0].__name__}, but those of the chains are "
                f"released; roll out again with this reward, or await {asking}.try_(trajectory) in a fresh sandbox"
            )
        rewards.check([group.task for group in self.groups])
        groups = []
        for group in self.groups:
            scored = []
            for t in group.trajectories:
                if t.stop in UNSCORED_STOPS:
                    scored.append(t)
                    continue
                async with Context(t.task, trajectory_id=t.id) as context:
                    score = await rewards.score(t, context)
                turns = with_turn_rewards(t.turns, score.turn_rewards)
                scored.append(
                    t.replace(reward=score.reward, metrics=dict(score.metrics), error=score.error, turns=turns)
                )
            groups.append(Group(group.id, tuple(scored)))
        return Rollout(tuple(groups), self.seconds, self.not_run)

    def diff(self, other: Rollout) -> RolloutDiff:
        """Compare with another rollout of the same tasks, chain by chain.

        Raises:
            SettingsError: if the rollouts have no task in common.
        """
        mine, theirs = self._by_chain(), other._by_chain()
        both = [key for key in mine if key in theirs]
        if not both:
            raise SettingsError("the rollouts have no task in common; roll out the same tasks with both agents")
        return RolloutDiff(tuple((mine[key], theirs[key]) for key in both))

    def _by_chain(self) -> dict[tuple[str, int, str], Trajectory]:
        """Index the trajectories by task id, occurrence of the task (tasks may repeat), and position in the group."""
        seen: dict[str, int] = {}
        out: dict[tuple[str, int, str], Trajectory] = {}
        for group in self.groups:
            count = seen[group.task.id] = seen.get(group.task.id, 0) + 1
            out |= {(t.task.id, count, t.id.removeprefix(t.group)): t for t in group}
        return out

    # --- disk ---

    def save(self, path: str | Path) -> Path:
        """Write the rollout to a .jsonl file, atomically.

        Raises:
            RunError: if a trajectory has fields that JSON cannot represent; names the trajectory.
        """
        rollout_io.write(Path(path), self.trajectories, self.seconds, self.not_run)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Read a file written by `save`.

        Raises:
            RunError: if the file cannot be read; names the file and line.
        """
        return cls.from_trajectories(*rollout_io.read(Path(path)))

    def __repr__(self) -> str:
        n = self.summary()
        success = f", success {n['success']:.3f}" if "success" in n else ", unscored"
        missing = f", {len(self.not_run)} not run" if self.not_run else ""
        return f"Rollout({len(self.groups)} tasks, {len(self)} chains{success}{missing})"


@dataclass(frozen=True)
class RolloutDiff(Displayable):
    """Comparison of two rollouts, as pairs (before, after) of the same task and chain."""

    pairs: tuple[tuple[Trajectory, Trajectory], ...] = field(repr=False)

    @property
    def gained(self) -> tuple[tuple[Trajectory, Trajectory], ...]:
        """Pairs that succeed after but not before."""
        return tuple(p for p in self.pairs if p[1].success and not p[0].success)

    @property
    def lost(self) -> tuple[tuple[Trajectory, Trajectory], ...]:
        return tuple(p for p in self.pairs if p[0].success and not p[1].success)

    @property
    def success(self) -> tuple[float, float]:
        """Success rates before and after, over the pairs in which both are scored."""
        scored = [p for p in self.pairs if p[0].success is not None and p[1].success is not None]
        n = max(1, len(scored))
        return sum(bool(a.success) for a, _ in scored) / n, sum(bool(b.success) for _, b in scored) / n

    def to_frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "task": a.task.id,
                    "chain": a.chain,
                    "before": math.nan if a.reward is None else a.reward,
                    "after": math.nan if b.reward is None else b.reward,
                    "final_before": a.final,
                    "final_after": b.final,
                    "calls_before": len(a.tool_calls),
                    "calls_after": len(b.tool_calls),
                    "first_difference": self.first_difference(a, b),
                }
                for a, b in self.pairs
            ]
        )

    @staticmethod
    def first_difference(a: Trajectory, b: Trajectory) -> int | None:
        """Return the index of the first turn whose text differs; None if all are equal."""
        for i, (x, y) in enumerate(zip(a.turns, b.turns, strict=False)):
            if x.text != y.text:
                return i
        return None if len(a.turns) == len(b.turns) else min(len(a.turns), len(b.turns))

    def __repr__(self) -> str:
        before, after = self.success
        return (
            f"RolloutDiff({len(self.pairs)} pairs: success {before:.3f} -> {after:.3f}, "
            f"{len(self.gained)} gained, {len(self.lost)} lost)"
        )
