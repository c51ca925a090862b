"""Data of a TrajectoryView, extracted from trajectories."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentfly_kit.integrations.html import escape_control_chars
from agentfly_kit.types import grouped, images_of, text_of

from ._chains import chain_label, is_hash
from ._format import SUCCESS_RULE, number, pack, shared_prefix
from ._tokens import is_trajectory

OUTCOMES = ("success", "failed", "unscored", "dropped")
SIGNS = {"success": "✓", "failed": "✗", "unscored": "–", "dropped": "⌀"}
# Maximum number of metrics shown as columns of the list. All metrics are shown for a selected trajectory.
METRICS = 4
# Maximum number of tasks in the menu for selecting a task.
_TASKS = 500


@dataclass(frozen=True)
class Entry:
    """The parts of a trajectory that the view keeps: numbers and references to texts, but no tokens.

    Attributes:
        label: The id of the trajectory, or a name such as "chain 3" if the id of its task is a hash.
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
                raise ValueError("these Stats contain no batch; call ppo_step(..., detail=True), or pass the rollout")
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
    if repeated := [id for id, times in Counter(t.id for t in found).items() if times > 1]:
        raise ValueError(f"ids of trajectories must be unique within a view, got {repeated[0]!r} twice")
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
        id=t.id, label=chain_label(t), task=t.task.id, question=_line(text_of(t.task.messages[-1]), 300),
        answer=_line(dict(fields).get("answer", ""), 160), fields=fields, group=t.group, reward=t.reward,
        success=t.success, stop=t.stop, error="" if t.error is None else str(t.error), seconds=t.seconds,
        metrics={name: float(value) for name, value in t.metrics.items()}, says=t.explain(), actions=len(t.actions),
        turns=turns, keys=tuple(
            hash((turn.kind, turn.author, turn.text, turn.ids, images_of(turn.messages))) for turn in t.turns
        ),
    )  # fmt: skip


def holds(k: Entry, needle: str) -> bool:
    texts = [k.id, k.question, k.answer, k.says, k.error]
    for _, _, text, *_, calls, _ in k.turns:
        texts += [text, *(call.result.observation for call in calls if call.result is not None)]
    return any(needle in text.casefold() for text in texts)


def outcome_of(k: Entry, dropped: dict[str, str]) -> str:
    if k.id in dropped:
        return "dropped"
    return "unscored" if k.success is None else "success" if k.success else "failed"


def shared_turns(paths: list[tuple[int, tuple[Any, ...]]], at: int = 0) -> list[dict[str, Any]]:
    """Build the prefix tree of the chains' turns.

    A node stores the index of its first turn, the index after its last turn, the chains that contain these turns, the
    chains that end at this node, and the child nodes.
    """
    out: list[dict[str, Any]] = []
    going_on = [path for path in paths if len(path[1]) > at]
    for same in grouped(going_on, lambda path: path[1][at]).values():
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
    """Return the distinct values in alphabetical order, and the index of each input value among them, as bytes."""
    names = {name: i for i, name in enumerate(sorted(set(values)))}
    index = np.array([names[v] for v in values], "<i4")
    return [escape_control_chars(name, 200) for name in names], index.tobytes()


def _sum_seconds(k: Entry, kind: str) -> float:
    return float(sum(turn[5] for turn in k.turns if turn[0] == kind))


def _calls(k: Entry) -> list[Any]:
    return [call for turn in k.turns if turn[0] == "observation" for call in turn[8]]


@dataclass(frozen=True)
class Column:
    """Column of the list, or a hidden number used for sorting the list.

    Attributes:
        key: Name of the column in the buffers; its cells have the class "afk-c-" + key.
        label: Heading, and name in the menu of sort orders.
        value: Function of an entry that returns a number or a text; None if it is missing.
        widths: CSS widths in a wide view, below 760 and below 360 pixels. A column is hidden where its width is "".
            Without widths, the column is never shown.
        text: Maximum number of characters of a text (half as many in the static form); 0 for numbers, which are aligned
            right.
        sortable: True if a click on the heading sorts by the column.
        hint: Tooltip of the heading.
        optional: True to leave the column out if its values are empty.
    """

    key: str
    label: str
    value: Callable[[Entry], Any]
    widths: tuple[str, ...] = ()
    text: int = 0
    sortable: bool = True
    hint: str = ""
    optional: bool = False

    def shown(self, k: Entry) -> str:
        """Return the text of a cell in the static form."""
        return str(self.value(k))[: self.text // 2] if self.text else number(self.value(k))

    def pack(self, kept: list[Entry]) -> dict[str, bytes]:
        """Encode the values of all entries. Equal texts are included once, in alphabetical order."""
        if not self.text:
            return pack([np.nan if (value := self.value(k)) is None else value for k in kept])
        texts, index = _codes([escape_control_chars(self.value(k), self.text) for k in kept])
        return _texts(texts) | {"index": index}


COLUMNS = (
    Column("question", "question", lambda k: k.question, ("minmax(0, 1fr)",) * 3, text=160, sortable=False),
    Column("expected", "expected", lambda k: k.answer, ("minmax(64px, 0.3fr)", "70px", ""), text=120, sortable=False,
           hint="the field answer of the task", optional=True),
    Column("reward", "reward", lambda k: k.reward, ("60px", "52px", "52px")),
    Column("stop", "stop reason", lambda k: k.stop, ("94px", "80px", ""), text=80, sortable=False),
    Column("actions", "actions", lambda k: k.actions),
    Column("calls", "calls", lambda k: len(_calls(k))),
    Column("failed", "failed calls", lambda k: sum(c.result is not None and not c.result.ok for c in _calls(k))),
    Column("tokens", "tokens", lambda k: None if None in (n := [turn[3] for turn in k.turns]) else sum(n)),
    Column("seconds", "seconds", lambda k: k.seconds),
    Column("sampling", "sampling time", lambda k: _sum_seconds(k, "action")),
    Column("tools", "tool time", lambda k: _sum_seconds(k, "observation")),
)  # fmt: skip


def columns(kept: list[Entry]) -> list[Column]:
    """Return `COLUMNS`, with columns for metrics inserted after the reward. Only the first `METRICS` of them are shown.

    "success" and metrics that always equal the reward are not shown.
    """
    every = dict.fromkeys(name for k in kept for name in k.metrics)
    shown = [n for n in every if n != "success" and any(k.metrics.get(n, k.reward) != k.reward for k in kept)][
        :METRICS
    ]
    metrics = [
        Column(
            f"m{i}", escape_control_chars(name, 60), functools.partial(_metric, name),
            ("72px", "" if i else "60px", "") if i < len(shown) else (),
        )
        for i, name in enumerate(list(dict.fromkeys([*shown, *every]))[:12])
    ]  # fmt: skip
    found = [column for c in COLUMNS for column in ([c, *metrics] if c.key == "reward" else [c])]
    return [c for c in found if not c.optional or any(map(c.value, kept))]


def _metric(name: str, k: Entry) -> float | None:
    return k.metrics.get(name)


def payload(kept: list[Entry], dropped: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the list: a dict that can be encoded as JSON, and a dict of buffers."""
    outcomes = [outcome_of(k, dropped) for k in kept]
    stops, stop = _codes([k.stop for k in kept])
    _, group = _codes([k.group for k in kept])
    tasks = {k.task: k for k in kept}
    numbers = {id: i for i, id in enumerate(tasks)}
    about = {
        "n": len(kept), "stops": stops, "num_tasks": len(tasks),
        "columns": [
            {name: getattr(c, name) for name in ("key", "label", "widths", "text", "sortable", "hint")}
            for c in columns(kept)
        ],
        # The id of a task is shown unless it is a hash.
        "tasks": [
            escape_control_chars(k.question[:80] + ("" if is_hash(k.task) else f" · {k.task}"), 120)
            for k in list(tasks.values())[:_TASKS]
        ],
        "hint": SUCCESS_RULE, "counts": {name: outcomes.count(name) for name in OUTCOMES},
        "prefix": shared_prefix([k.label for k in kept]),
    }  # fmt: skip
    buffers = {
        "columns": {c.key: c.pack(kept) for c in columns(kept)},
        "outcome": np.array([OUTCOMES.index(o) for o in outcomes], np.uint8).tobytes(),
        "stop": stop, "task": np.array([numbers[k.task] for k in kept], "<i4").tobytes(), "group": group,
        "ids": _texts([escape_control_chars(k.id, 200) for k in kept]),
        "labels": _texts([escape_control_chars(k.label, 200) for k in kept]),
        "says": _texts([escape_control_chars(last_text(k), 160) for k in kept]),
        "why": _texts([dropped.get(k.id, "") or (k.error if k.reward is None else "") for k in kept]),
    }  # fmt: skip
    return about, buffers


def last_text(k: Entry) -> str:
    """Return the text of the last action, or its tool calls, as a single line."""
    for turn in reversed(k.turns):
        if turn[0] in ("action", "forced"):
            text = " ".join(text_of(message) for message in turn[9]) if turn[9] else turn[2]
            return _line(text, 600) or f"calls {', '.join(call.name for call in turn[8])}"
    return "no action"


def _line(text: Any, limit: int) -> str:
    """Return at most `limit` characters of a text as a single line."""
    return " ".join(str(text)[: 4 * limit].split())[:limit]
