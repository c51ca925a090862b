"""Data of a TrajectoryView, extracted from trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly_kit.integrations.html import escape_control_chars

from ._chains import chain_label, is_hash
from ._format import SUCCESS_RULE, pack, shared_prefix
from ._tokens import is_trajectory

OUTCOMES = ("success", "failed", "unscored", "dropped")
SIGNS = {"success": "✓", "failed": "✗", "unscored": "–", "dropped": "⌀"}
# Maximum number of metrics shown as columns of the list. All metrics are shown for a selected trajectory.
METRICS = 4
# Maximum number of tasks in the menu that selects a task.
_TASKS = 500


@dataclass(frozen=True)
class Entry:
    """Parts of a trajectory that the view keeps: its numbers and references to its texts, but not its tokens.

    Attributes:
        label: The id of the trajectory, or "chain 3" if the id of its task is a hash.
        fields: Names and values of the task's fields, as text.
        turns: (kind, author, text, token count, sampled, seconds, reward, stop reason, calls, messages) of each turn.
        keys: One key per turn. Turns shared by several chains are recognized by their equal keys.
    """

    id: str
    label: str
    task: str
    question: str
    answer: str
    fields: tuple[tuple[str, str], ...]
    group: str
    reward: float | None
    success: bool | None
    stop: str
    error: str
    seconds: float
    metrics: dict[str, float]
    says: str
    actions: int
    turns: tuple[tuple[Any, ...], ...]
    keys: tuple[Any, ...]


def read(source: Any, batch: Any) -> tuple[list[Any], dict[str, str]]:
    if is_trajectory(source):
        items: Any = [source]
    else:
        if hasattr(source, "detail") and hasattr(source, "batch"):  # Stats of a training step
            if source.batch is None:
                raise ValueError("these Stats hold no batch; call ppo_step(..., detail=True), or pass the rollout")
            source = source.batch
        if hasattr(source, "dropped") and batch is None:
            batch = source
        source = getattr(source, "rollout", None) or source  # an Evaluation or a training step has a rollout
        source = getattr(source, "partial", source)  # the finished trajectories of a running rollout
        items = getattr(source, "trajectories", source)
    found: list[Any] = list(items) if isinstance(items, Iterable) else [None]
    if not all(is_trajectory(t) for t in found):
        kind = type(source).__name__
        raise TypeError(f"source must be a Rollout, a Group, an Evaluation, a Batch or trajectories, got {kind}")
    seen: set[str] = set()
    for t in found:
        if t.id in seen:
            raise ValueError(f"ids of trajectories must be unique within a view, got {t.id!r} twice")
        seen.add(t.id)
    dropped = {d.trajectory: d.reason for d in batch.dropped} if batch is not None else {}
    return found, dropped


def to_entry(t: Any) -> Entry:
    turns = tuple(
        (
            turn.kind, turn.author, turn.text, None if turn.ids is None else len(turn.ids), turn.sampled, turn.seconds,
            turn.reward, turn.stop, turn.tool_calls, turn.messages,
        )
        for turn in t.turns
    )  # fmt: skip
    fields = tuple(
        (str(name), value if isinstance(value, str) else repr(value)) for name, value in t.task.fields.items()
    )
    return Entry(
        id=t.id, label=chain_label(t), task=t.task.id, question=_line(t.task.messages[-1]["content"], 300),
        answer=_line(dict(fields).get("answer", ""), 160), fields=fields, group=t.group, reward=t.reward,
        success=t.success, stop=t.stop, error="" if t.error is None else str(t.error), seconds=t.seconds,
        metrics={name: float(value) for name, value in t.metrics.items()}, says=t.explain(), actions=len(t.actions),
        turns=turns, keys=tuple(hash((turn.kind, turn.author, turn.text, turn.ids)) for turn in t.turns),
    )  # fmt: skip


def holds(k: Entry, needle: str) -> bool:
    if any(needle in text.casefold() for text in (k.id, k.question, k.answer, k.says, k.error)):
        return True
    for turn in k.turns:
        if needle in turn[2].casefold():
            return True
        for call in turn[8]:  # the calls of the turn
            if call.result is not None and needle in call.result.observation.casefold():
                return True
    return False


def outcome_of(k: Entry, dropped: dict[str, str]) -> str:
    if k.id in dropped:
        return "dropped"
    return "unscored" if k.success is None else "success" if k.success else "failed"


def shared_turns(paths: list[tuple[int, tuple[Any, ...]]], at: int = 0) -> list[dict[str, Any]]:
    """Build the prefix tree of the chains' turns.

    A node stores the index of its first turn, the index after its last turn, the chains that contain these turns, the
    chains that end at this node, and the child nodes.
    """
    branches: dict[Any, list[tuple[int, tuple[Any, ...]]]] = {}
    out: list[dict[str, Any]] = []
    for i, keys in paths:
        if len(keys) > at:
            branches.setdefault(keys[at], []).append((i, keys))
    for same in branches.values():
        end = at + 1
        while all(len(keys) > end for _, keys in same) and len({keys[end] for _, keys in same}) == 1:
            end += 1
        here = [i for i, keys in same if len(keys) == end]
        out.append({
            "from": at, "to": end, "of": [i for i, _ in same], "ends": here,
            "then": shared_turns([(i, keys) for i, keys in same if len(keys) > end], end),
        })  # fmt: skip
    return out


def _texts(texts: list[str]) -> dict[str, bytes]:
    """Encode texts as one buffer and the byte offsets at which they begin and end."""
    data = [text.encode("utf-8", "backslashreplace") for text in texts]
    ends = np.cumsum([0, *(len(d) for d in data)], dtype=np.int64)
    return {"text": b"".join(data), "ends": ends.astype("<i4").tobytes()}


def _codes(values: list[str]) -> tuple[list[str], bytes]:
    names: dict[str, int] = {}
    index = np.array([names.setdefault(v, len(names)) for v in values], "<i4")
    return [escape_control_chars(name, 200) for name in names], index.tobytes()


def metric_columns(kept: list[Entry], limit: int = METRICS) -> list[str]:
    """Return the metrics shown as columns. "success" and metrics that always equal the reward are omitted."""
    names = dict.fromkeys(name for k in kept for name in k.metrics if name != "success")
    return [name for name in names if any(k.metrics.get(name, k.reward) != k.reward for k in kept)][:limit]


def payload(kept: list[Entry], dropped: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the list as a JSON-compatible dict and as buffers. Each task's texts are included once."""
    outcomes = [outcome_of(k, dropped) for k in kept]
    stops, stop = _codes([k.stop for k in kept])
    _, group = _codes([k.group for k in kept])
    tasks = {k.task: k for k in kept}
    numbers = {id: i for i, id in enumerate(tasks)}
    calls = [[call for turn in k.turns if turn[0] == "observation" for call in turn[8]] for k in kept]
    tokens = [
        sum(turn[3] or 0 for turn in k.turns) if all(turn[3] is not None for turn in k.turns) else np.nan
        for k in kept
    ]
    columns: dict[str, npt.ArrayLike] = {
        "reward": [np.nan if k.reward is None else k.reward for k in kept],
        "actions": [k.actions for k in kept],
        "calls": [len(c) for c in calls],
        "failed": [sum(1 for x in c if x.result is not None and not x.result.ok) for c in calls],
        "tokens": tokens,
        "seconds": [k.seconds for k in kept],
        "sampling": [sum(turn[5] for turn in k.turns if turn[0] == "action") for k in kept],
        "tools": [sum(turn[5] for turn in k.turns if turn[0] == "observation") for k in kept],
    }
    columns_shown = metric_columns(kept)
    names = list(dict.fromkeys([*columns_shown, *(name for k in kept for name in k.metrics)]))[:12]
    about = {
        "n": len(kept), "stops": stops, "num_tasks": len(tasks),
        "metrics": [escape_control_chars(n, 60) for n in names],
        "tasks": [escape_control_chars(_task_name(k), 120) for k in list(tasks.values())[:_TASKS]],
        "shown_metrics": len(columns_shown), "hint": SUCCESS_RULE,
        "counts": {name: outcomes.count(name) for name in OUTCOMES},
        "prefix": shared_prefix([k.label for k in kept]), "answers": any(k.answer for k in kept),
    }  # fmt: skip
    buffers = {
        "columns": {name: pack(values) for name, values in columns.items()},
        "metrics": [pack([k.metrics.get(name, np.nan) for k in kept]) for name in names],
        "outcome": np.array([OUTCOMES.index(o) for o in outcomes], np.uint8).tobytes(),
        "stop": stop, "task": np.array([numbers[k.task] for k in kept], "<i4").tobytes(), "group": group,
        "ids": _texts([escape_control_chars(k.id, 200) for k in kept]),
        "labels": _texts([escape_control_chars(k.label, 200) for k in kept]),
        "questions": _texts([escape_control_chars(k.question, 160) for k in tasks.values()]),
        "answers": _texts([escape_control_chars(k.answer, 80) for k in tasks.values()]),
        "says": _texts([escape_control_chars(last_text(k), 160) for k in kept]),
        "why": _texts([dropped.get(k.id, "") or (k.error if k.reward is None else "") for k in kept]),
    }  # fmt: skip
    return about, buffers


def _task_name(k: Entry) -> str:
    """Return the question of the task, followed by the task's id unless the id is a hash."""
    return k.question[:80] if is_hash(k.task) else f"{k.question[:80]} · {k.task}"


def last_text(k: Entry) -> str:
    """Return the text of the last action, or its tool calls, as a single line."""
    for turn in reversed(k.turns):
        if turn[0] in ("action", "forced"):
            text = " ".join(str(message.get("content") or "") for message in turn[9]) if turn[9] else turn[2]
            return _line(text, 600) or f"calls {', '.join(call.name for call in turn[8])}"
    return "no action"


def _line(text: Any, limit: int) -> str:
    """Return at most `limit` characters of a text as a single line."""
    return " ".join(str(text)[: 4 * limit].split())[:limit]
