"""Rollouts: summary statistics, data frames, comparison, and storage.

A rollout is stored as JSONL: a header, then one trajectory per line. `load(save(x)) == x`, and files are written
atomically.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent.turns import with_turn_rewards
from agentfly_kit.errors import RunError, SettingsError
from agentfly_kit.rewards import RewardSet
from agentfly_kit.tools.context import Context
from agentfly_kit.types import UNSCORED_STOPS, Failure, Group, Sampling, Task, ToolCall, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = "agentfly_kit.rollout"
# Version 2 adds trajectories with several rows; rollouts with single rows only are still written as version 1.
_VERSION = 2


# --- records to JSON and back --------------------------------------------------------------------


def _json_fallback(value: Any) -> Any:
    """Convert NumPy scalars and arrays to numbers and lists; raise TypeError for all other types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def dump_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_json_fallback, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates can only be written as escapes
            text = json.dumps(value, separators=(",", ":"), default=_json_fallback, allow_nan=False)
        return text
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{where} cannot be saved as JSON: {error}; use strings, numbers, lists and dicts in fields and metrics"
        ) from error


@functools.cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind))


def _non_default_fields(record: Any, leave: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    out = {}
    kind: Any = type(record)
    for name, default in _defaults(kind):
        value = getattr(record, name)
        # Compare types too, so that 0 and False count as different.
        if value is not default and (type(value) is not type(default) or value != default) and name not in leave:
            out[name] = value
    return out


def _failure_to_json(failure: Failure) -> dict[str, str]:
    return {"where": failure.where, "type": failure.type, "message": failure.message, "traceback": failure.traceback}


def _result_to_json(result: ToolResult) -> dict[str, Any]:
    out = _non_default_fields(result)
    if result.error is not None:
        out["error"] = _failure_to_json(result.error)
    return {"observation": result.observation} | out


def _call_to_json(call: ToolCall) -> dict[str, Any]:
    out = {"id": call.id, "name": call.name, "arguments": call.arguments} | _non_default_fields(call, ("rerunner",))
    if call.result is not None:
        out["result"] = _result_to_json(call.result)
    return out


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    out = _non_default_fields(turn, ("parent", "token_texts", "tool_calls"))
    out = {"place" if name == "label" else name: value for name, value in out.items()}
    if turn.ids is not None and turn.token_texts is None:
        out["pieces"] = None  # mark the absence: the header may hold texts of the same ids from other turns
    if turn.tool_calls:
        out["tool_calls"] = [_call_to_json(call) for call in turn.tool_calls]
    return out


def _trajectory_to_json(t: Trajectory) -> dict[str, Any]:
    out = _non_default_fields(t, ("task", "turns", "sampling", "error", "chain", "seed"))
    out |= {"task": vars(t.task), "chain": t.chain, "seed": t.seed, "sampling": vars(t.sampling)}
    out["turns"] = [_turn_to_json(turn) for turn in t.turns]
    if t.error is not None:
        out["error"] = _failure_to_json(t.error)
    return out


def _call_from_json(data: dict[str, Any]) -> ToolCall:
    result = data.pop("result", None)
    if result is not None:
        error = result.pop("error", None)
        result = ToolResult(**result, error=Failure(**error) if error else None)
    return ToolCall(**data, result=result)


def _trajectory_from_json(data: dict[str, Any], token_texts: dict[int, str]) -> Trajectory:
    task = data.pop("task")
    error = data.pop("error", None)
    turns: list[Turn] = []
    for raw in data.pop("turns"):
        for name in ("ids", "logprobs", "entropies", "kept_mass", "versions", "messages"):
            if raw.get(name) is not None:
                raw[name] = tuple(raw[name])
        raw["label"] = raw.pop("place", "")
        if raw["ids"] is not None and "pieces" not in raw:
            raw["token_texts"] = tuple(token_texts.get(i, f"[{i}]") for i in raw["ids"])
        raw.pop("pieces", None)
        calls = tuple(_call_from_json(call) for call in raw.pop("tool_calls", ()))
        turns.append(Turn(**raw, tool_calls=calls, parent=turns[-1] if turns else None))
    sampling = data.pop("sampling")
    return Trajectory(
        **data | {"tools": tuple(data.get("tools", ()))},
        task=Task(task["id"], tuple(task["messages"]), task["fields"]),
        turns=tuple(turns),
        error=Failure(**error) if error else None,
        sampling=Sampling(**sampling | {"stop": tuple(sampling["stop"])}),
    )


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Any]:
    """Write a text file atomically: under a temporary name, which is then renamed.

    Raises:
        RunError: if the file cannot be written; an existing file is left unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}); an existing file is unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


# --- a rollout -----------------------------------------------------------------------------------


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
        rewards = RewardSet.coerce(reward)
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
        path = Path(path)
        token_texts: dict[int, str] = {}
        for t in self.trajectories:
            for turn in t.turns:
                if turn.ids is not None and turn.token_texts is not None:
                    token_texts.update(zip(turn.ids, turn.token_texts, strict=True))
        several = any(turn.row for t in self.trajectories for turn in t.turns)
        header = {
            "format": _FORMAT,
            "version": _VERSION if several else 1,
            "seconds": self.seconds,
            "pieces": token_texts,
        }
        if self.not_run:
            header["not_run"] = self.not_run
        with atomic_write(path) as file:
            file.write(dump_json(header, "the header") + "\n")
            for t in self.trajectories:
                file.write(dump_json(_trajectory_to_json(t), f"trajectory {t.id!r}") + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Rollout:
        """Read a file written by `save`.

        Raises:
            RunError: if the file cannot be read; names the file and line.
        """
        path = Path(path)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        number = 1
        try:
            header = json.loads(lines[0])
            if header.get("format") != _FORMAT:
                raise RunError(f"{path} is not a saved rollout; give a file written by Rollout.save")
            if header["version"] > _VERSION:
                raise RunError(f"{path} was written by a newer version ({header['version']} > {_VERSION}); upgrade")
            token_texts = {int(k): v for k, v in header["pieces"].items()}
            not_run = dict(header.get("not_run", {}))
            found = []
            for line in lines[1:]:
                number += 1
                if line:
                    found.append(_trajectory_from_json(json.loads(line), token_texts))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path}:{number} is damaged: {type(error).__name__}: {error}") from error
        return cls.from_trajectories(found, header["seconds"], not_run)

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
