"""View of many trajectories as a list, with the selected ones side by side."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import traitlets

from ._base import SUCCESS_RULE, Opener, count, escape, escape_control_chars, number, pack, sendable, shared_prefix, tag
from ._chains import cell_of
from ._selection import Trajectories
from ._tokens import is_trajectory, some
from .chain_stepper import ChainStepper, _call, _named
from .token_view import TokenView

# Maximum number of trajectories shown side by side.
_ABREAST = 12
_TEXT = 6000
OUTCOMES = ("success", "failed", "unscored", "dropped")
SIGNS = {"success": "✓", "failed": "✗", "unscored": "–", "dropped": "⌀"}


@dataclass(frozen=True)
class _Entry:
    """The parts of a trajectory that the view keeps: its numbers and references to its texts, but not its tokens.

    Attributes:
        keys: One key per turn. Equal turns have equal keys, which identifies turns shared by several chains.
    """

    id: str
    task: str
    group: str
    reward: float | None
    success: bool | None
    stop: str
    error: str
    seconds: float
    metrics: dict[str, float]
    says: str
    turns: tuple[tuple[Any, ...], ...]
    keys: tuple[Any, ...]


class TrajectoryView(Opener):
    """View to filter, sort and search trajectories, and to compare selected trajectories side by side, turn by turn.

    Args:
        source: A Rollout, a Group, an Evaluation, a Batch, the Stats of a step, or trajectories.
        batch: A Batch made from the trajectories. Trajectories dropped from the batch get a badge with the reason.
        agent: The agent that produced the trajectories, needed by "open in the stepper".

    Attributes:
        selection: The selected trajectories; `select(ids)` sets them from Python.

    Raises:  TypeError for a source without trajectories.
    """

    stem: ClassVar[str] = "trajectory_view"
    settable: ClassVar[frozenset[str]] = frozenset({"_selected", "_query"})
    actions: ClassVar[frozenset[str]] = frozenset({"tokens", "stepper", "code", "leave"})

    _about = traitlets.Dict().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    # The selected trajectories, turn by turn.
    _detail = traitlets.Dict().tag(sync=True)
    _query = traitlets.Unicode("").tag(sync=True)
    # Search result, with one bit per trajectory.
    _found = traitlets.Dict().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, source: Any, *, batch: Any = None, agent: Any = None) -> None:
        given, dropped = _read(source, batch)
        self._dropped = dropped
        self._agent = agent
        self._trajectories = [weakref.ref(t) for t in given]
        self._kept = [_keep(t) for t in given]
        self._at = {k.id: i for i, k in enumerate(self._kept)}
        about, buffers = _payload(self._kept, given, dropped)
        about["agent"] = agent is not None
        super().__init__(source, _about=about, _buffers=buffers)

    # --- selection ---

    @property
    def selection(self) -> Trajectories:
        """The trajectories selected in the browser, in order of selection."""
        return Trajectories(
            [self._kept[i].id for i in self._selected], [self._trajectories[i]() for i in self._selected]
        )

    def select(self, *trajectories: Any) -> None:
        """Select trajectories, given as objects or ids, and show the selection in the browser."""
        found = []
        for t in trajectories:
            id = t if isinstance(t, str) else getattr(t, "id", None)
            if id not in self._at:
                raise ValueError(f"trajectory {id!r} does not exist; the view has {some([k.id for k in self._kept])}")
            found.append(self._at[id])
        self._selected = found

    @traitlets.validate("_selected")
    def _in_range(self, proposal: Any) -> list[int]:
        chosen = list(dict.fromkeys(int(i) for i in proposal["value"]))
        for i in chosen:
            if not 0 <= i < len(self._kept):
                raise ValueError(f"trajectory must be between 0 and {len(self._kept) - 1}, got {i}")
        return chosen

    @traitlets.observe("_selected")
    def _describe(self, _: Any) -> None:
        shown = self._selected[:_ABREAST]
        self._detail = {
            "of": len(self._selected),
            "columns": [self._column(i) for i in shown],
            "tree": _tree([(i, self._kept[i].keys) for i in shown]),
        }

    def _column(self, i: int) -> dict[str, Any]:
        k = self._kept[i]
        return {
            "i": i,
            "id": escape_control_chars(k.id, 200),
            "says": escape_control_chars(k.says, 600),
            "error": escape_control_chars(k.error, 2000),
            "dropped": escape_control_chars(self._dropped.get(k.id, ""), 500),
            "metrics": [[escape_control_chars(name, 60), number(float(v))] for name, v in k.metrics.items()],
            "reward": None if k.reward is None else number(float(k.reward)),
            "outcome": _outcome(k, self._dropped),
            "stop": k.stop,
            "seconds": k.seconds,
            "turns": [
                {
                    "kind": kind, "author": escape_control_chars(author, 60),
                    "text": escape_control_chars(text, _TEXT), "n": n,
                    "sampled": sampled, "seconds": seconds, "stop": stop,
                    "reward": None if reward is None else number(float(reward)),
                    "calls": [_call(call) for call in calls],
                }
                for kind, author, text, n, sampled, seconds, reward, stop, calls in k.turns
            ],
        }  # fmt: skip

    # --- search ---

    @traitlets.observe("_query")
    def _search(self, _: Any) -> None:
        needle = self._query.casefold()
        bits = np.array([_holds(k, needle) for k in self._kept], bool) if needle else np.zeros(0, bool)
        self._found = {
            "query": self._query,
            "n": int(bits.sum()),
            "bits": np.packbits(bits, bitorder="little").tobytes(),
        }

    # --- buttons ---

    def _alive(self, i: Any) -> Any:
        t = self._trajectories[int(i)]()
        if t is None:
            raise LookupError(f"{self._kept[int(i)].id!r} no longer exists; keep the rollout in a variable")
        return t

    def _do_tokens(self, value: Any) -> None:
        """Show the tokens of one trajectory, or compare the tokens of two."""
        ts = [self._alive(i) for i in (value if isinstance(value, list) else [value])]
        shown = (ts[0], ts[1]) if len(ts) == 2 else (ts, None)
        self._show_below(TokenView(*shown, agent=self._agent))

    def _do_stepper(self, value: Any) -> None:
        if self._agent is None:
            raise ValueError("pass agent= to open chains in the stepper: w.TrajectoryView(rollout, agent=agent)")
        self._show_below(ChainStepper(self._agent, self._alive(value)))

    def _do_code(self, value: Any) -> None:
        self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code(int(value)))}

    def to_code(self, i: int) -> str:
        """Return code for a cell that retrieves the trajectory at index `i` and continues it as a chain."""
        k = self._kept[i]
        t = self._trajectories[i]()
        source = _named(self.record) if self.record is not None else None
        return cell_of(k.id, t, f"{source or 'rollout'}.trajectories", self._agent)

    def __repr__(self) -> str:
        c = self._about["counts"]
        return (
            f"TrajectoryView({count(len(self._kept), 'trajectory').replace('trajectorys', 'trajectories')}, "
            f"{c['success']} succeeded, {c['unscored']} unscored)"
        )

    def _static(self) -> str:
        return _page(self._kept, self._dropped, self._selected or range(min(2, len(self._kept))), repr(self))


# --- reading --------------------------------------------------------------------------------------


def _read(source: Any, batch: Any) -> tuple[list[Any], dict[str, str]]:
    if is_trajectory(source):
        items: Any = [source]
    else:
        if hasattr(source, "detail") and hasattr(source, "batch"):  # Stats of a training step
            if source.batch is None:
                raise ValueError("these Stats hold no batch; call ppo_step(..., detail=True), or pass the rollout")
            source = source.batch
        if hasattr(source, "dropped") and batch is None:
            batch = source
        source = getattr(source, "rollout", None) or source  # for an Evaluation or a training step
        source = getattr(source, "partial", source)  # for a running rollout, the finished trajectories
        items = getattr(source, "trajectories", source)
    try:
        found = list(items)
    except TypeError:
        found = [None]
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


def _keep(t: Any) -> _Entry:
    turns = tuple(
        (
            turn.kind, turn.author, turn.text, None if turn.ids is None else len(turn.ids), turn.sampled, turn.seconds,
            turn.reward, turn.stop, turn.tool_calls,
        )
        for turn in t.turns
    )  # fmt: skip
    return _Entry(
        id=t.id, task=t.task.id, group=t.group, reward=t.reward, success=t.success, stop=t.stop,
        error="" if t.error is None else str(t.error), seconds=t.seconds, metrics=dict(t.metrics), says=t.explain(),
        turns=turns, keys=tuple(hash((turn.kind, turn.author, turn.text, turn.ids)) for turn in t.turns),
    )  # fmt: skip


def _holds(k: _Entry, needle: str) -> bool:
    if needle in k.id.casefold() or needle in k.says.casefold() or needle in k.error.casefold():
        return True
    for turn in k.turns:
        if needle in turn[2].casefold():
            return True
        for call in turn[8]:
            if call.result is not None and needle in call.result.observation.casefold():
                return True
    return False


def _outcome(k: _Entry, dropped: dict[str, str]) -> str:
    if k.id in dropped:
        return "dropped"
    return "unscored" if k.success is None else "success" if k.success else "failed"


def _tree(paths: list[tuple[int, tuple[Any, ...]]], at: int = 0) -> list[dict[str, Any]]:
    """Build the prefix tree of the chains' turns.

    A node stores the first turn, the last turn + 1, the chains that contain these turns, the chains that end at this
    node, and the child nodes.
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
            "then": _tree([(i, keys) for i, keys in same if len(keys) > end], end),
        })  # fmt: skip
    return out


def _texts(texts: list[str]) -> dict[str, bytes]:
    """Encode texts as their concatenation and the byte offsets of the boundaries."""
    data = [text.encode("utf-8", "backslashreplace") for text in texts]
    ends = np.cumsum([0, *(len(d) for d in data)], dtype=np.int64)
    return {"text": b"".join(data), "ends": ends.astype("<i4").tobytes()}


def _codes(values: list[str]) -> tuple[list[str], bytes]:
    names: dict[str, int] = {}
    index = np.array([names.setdefault(v, len(names)) for v in values], "<i4")
    return [escape_control_chars(name, 200) for name in names], index.tobytes()


def _payload(kept: list[_Entry], given: list[Any], dropped: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    outcomes = [_outcome(k, dropped) for k in kept]
    stops, stop = _codes([k.stop for k in kept])
    tasks, task = _codes([k.task for k in kept])
    groups, group = _codes([k.group for k in kept])
    calls = [[call for turn in k.turns if turn[0] == "observation" for call in turn[8]] for k in kept]
    tokens = [
        sum(turn[3] or 0 for turn in k.turns) if all(turn[3] is not None for turn in k.turns) else np.nan for k in kept
    ]
    columns: dict[str, npt.ArrayLike] = {
        "reward": [np.nan if k.reward is None else k.reward for k in kept],
        "actions": [len(t.actions) for t in given],
        "calls": [len(c) for c in calls],
        "failed": [sum(1 for x in c if x.result is not None and not x.result.ok) for c in calls],
        "tokens": tokens,
        "seconds": [k.seconds for k in kept],
        "sampling": [sum(turn[5] for turn in k.turns if turn[0] == "action") for k in kept],
        "tools": [sum(turn[5] for turn in k.turns if turn[0] == "observation") for k in kept],
    }
    names = list(dict.fromkeys(name for k in kept for name in k.metrics))[:12]
    about = {
        "n": len(kept), "stops": stops, "tasks": tasks, "groups": groups,
        "metrics": [escape_control_chars(n, 60) for n in names],
        "counts": {name: outcomes.count(name) for name in OUTCOMES}, "abreast": _ABREAST, "hint": SUCCESS_RULE,
        "prefix": shared_prefix([k.id for k in kept]),
    }  # fmt: skip
    buffers = {
        "columns": {name: pack(values) for name, values in columns.items()},
        "metrics": [pack([k.metrics.get(name, np.nan) for k in kept]) for name in names],
        "outcome": np.array([OUTCOMES.index(o) for o in outcomes], np.uint8).tobytes(),
        "stop": stop, "task": task, "group": group,
        "ids": _texts([escape_control_chars(k.id, 200) for k in kept]),
        "says": _texts([escape_control_chars(_last(k), 160) for k in kept]),
        "why": _texts([dropped.get(k.id, "") or (k.error if k.reward is None else "") for k in kept]),
    }  # fmt: skip
    return about, buffers


def _last(k: _Entry) -> str:
    """Return the text of the last action, as a single line."""
    for turn in reversed(k.turns):
        if turn[0] in ("action", "forced"):
            return " ".join(turn[2].split())
    return "it never acted"


# --- the static form ------------------------------------------------------------------------------


def _page(kept: list[_Entry], dropped: dict[str, str], told: Sequence[int], title: str) -> str:
    out = [tag("div", tag("b", escape(title)), style="margin:2px 0 6px")]
    left, rows = 60_000, []
    left_text = "text-align:left"
    for k in kept[:200]:
        outcome = _outcome(k, dropped)
        reward = "–" if k.reward is None else number(float(k.reward))
        why = dropped.get(k.id, "")
        row = (
            f'<tr><td title="{outcome}">{SIGNS[outcome]}</td><td style="{left_text}">{escape(k.id[:80])}</td>'
            f"<td>{reward}</td>"
            f'<td style="{left_text}">{escape(k.stop)}{escape(f" · left out: {why[:100]}") if why else ""}</td>'
            f"<td>{sum(1 for turn in k.turns if turn[0] == 'action')}</td><td>{k.seconds:.1f} s</td>"
            f'<td style="{left_text}">{escape(escape_control_chars(_last(k), 120))}</td></tr>'
        )
        left -= len(row.encode())
        if left < 0:
            break
        rows.append(row)
    names = ("", "trajectory", "reward", "end", "actions", "time", "said last")
    head = "".join(
        f'<th style="{left_text}">{name}</th>' if name in ("trajectory", "end", "said last") else f"<th>{name}</th>"
        for name in names
    )
    out.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    if len(rows) < len(kept):
        more = count(len(kept) - len(rows), "trajectory").replace("trajectorys", "trajectories")
        out.append(tag("div", escape(f"Left out of this static form: {more}. Run the cell to see all.")))
    left = 30_000
    for i in told:
        k = kept[i]
        lines = [tag("div", escape(escape_control_chars(k.says, 600)))]
        for n, turn in enumerate(k.turns):
            text = tag(
                "span", escape(escape_control_chars(turn[2], 1200)), style="white-space:pre-wrap;font-family:monospace"
            )
            lines.append(
                tag("div", tag("b", escape(f"{n} {turn[0]}")), escape(f" {turn[1][:60]} "), text, style="margin:3px 0")
            )
        page = f"<details><summary>{escape(k.id[:80])}, turn by turn</summary>{''.join(lines)}</details>"
        left -= len(page.encode())
        if left < 0:
            break
        out.append(page)
    return tag("div", *out)
