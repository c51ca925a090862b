"""Live view of a pool's sandboxes, owners, queue and events, with buttons to take, release, reset or close a sandbox.

The buttons call the pool's own `acquire`, `release` and `recycle`, so the view works with every sandbox class.
"""

from __future__ import annotations

import asyncio
import base64
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import traitlets

from ._base import LiveView, require
from ._chain_code import _named
from ._format import count, escape, sendable, tag
from ._tokens import some

# One symbol per state, so that states can be distinguished without colour.
SIGNS = {"leased": "●", "idle": "○", "starting": "◐", "resetting": "◑", "closing": "✕"}
_TINTS = {
    "leased": "40,120,220",
    "idle": "40,160,90",
    "starting": "200,150,20",
    "resetting": "150,90,200",
    "closing": "200,60,50",
}
_QUEUE = 50
_TAKE_SECONDS = 30.0
_HISTORY_SECONDS = 60.0
_EVENTS = 30
# Kinds of pool events that are always listed. Other events are listed if they have a reason, such as "used 10 times".
_LISTED = {"died", "start failed", "expired", "recycled", "refused", "cancelled", "pool closed"}
_REASONED = {"resetting", "closing"}
_views: weakref.WeakSet[PoolView] = weakref.WeakSet()


class Sandboxes(tuple[dict[str, Any], ...]):
    """A snapshot of sandboxes and their leases. Iteration yields one row per sandbox; an empty snapshot is falsy."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the sandboxes."""
        return tuple(row["sandbox"] for row in self)

    def to_frame(self) -> Any:
        """Return a data frame with one row per sandbox.

        The columns are sandbox, state, seconds (in this state), owner, turn, leases (so far), and hand
        (True if leased with the Take button).
        """
        import pandas as pd

        return pd.DataFrame(list(self), columns=list(_COLUMNS))

    def __repr__(self) -> str:
        return f"Sandboxes({some([f'#{n}' for n in self.numbers]) if self else 'nothing'})"


_COUNTS = ("size", "idle", "starting", "resetting", "leased", "waiting", "recycled", "dead", "failed_starts")
_COLUMNS = ("sandbox", "state", "seconds", "owner", "turn", "leases", "hand")


class PoolView(LiveView):
    """Live view of a pool: its queue, recent activity, and one tile per sandbox or one row per owner or event.

    The view updates at most 10 times per second; `view.refresh()` sends an update immediately. `view.counts` contains
    the counts last sent to the page. `view.selection` contains the sandboxes selected in the browser and their owners;
    `view.select(3, 4)` selects sandboxes from Python. `view.to_frame()` lists all sandboxes. `view.to_code()` returns
    code for a cell that recreates the view and its selection.

    The Take button leases a sandbox, which cells can then use as `view.held[number]`. The owner is shown as "you".
    If the pool has several sandboxes, at least one stays available to a running rollout. The Release button releases a
    taken sandbox. The Reset and Close buttons work on any sandbox. A chain whose sandbox is reset or closed is not
    scored. Resetting a taken sandbox keeps its lease.

    All views of one pool share the history, the events and the taken sandboxes.
    """

    stem: ClassVar[str] = "pool_view"
    settable: ClassVar[frozenset[str]] = frozenset({"_selected", "_tab"})
    actions: ClassVar[frozenset[str]] = frozenset({"take", "give_back", "reset", "close", "code"})

    _state = traitlets.Dict().tag(sync=True)
    _tab = traitlets.Enum(("sandboxes", "owners", "events"), "sandboxes").tag(sync=True)
    # Points of the last minute, [seconds ago, leased, starting, idle, size], sent when a page opens.
    _history: traitlets.List[Any] = traitlets.List().tag(sync=True)
    # Numbers of the selected sandboxes. Closed sandboxes remain in the list and are ignored.
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, pool: Any) -> None:
        if not (callable(getattr(pool, "snapshot", None)) and callable(getattr(pool, "subscribe", None))):
            raise TypeError(f"pool must be a Pool, got {type(pool).__name__}")
        other = next((view for view in _views if view.record is pool), None)
        self._taken: dict[int, Any] = {} if other is None else other._taken  # sandbox number -> lease
        self._taking = 0
        # History points (monotonic seconds, leased, starting, idle, size), and events with their times of receipt.
        self._points: deque[tuple[float, ...]] = deque(maxlen=600) if other is None else other._points
        self._log: deque[tuple[float, Any]] = deque(maxlen=_EVENTS) if other is None else other._log
        super().__init__(pool, lambda listener: pool.subscribe(_logging(self._log, listener)))
        _views.add(self)
        self._tab = "sandboxes" if other is None else other._tab
        weakref.finalize(pool, _refresh_soon, weakref.ref(self), self._loop).atexit = False
        self.refresh()

    @property
    def held(self) -> dict[int, Any]:
        """Dict from number to sandbox, for the sandboxes that were leased with the Take button and not yet released."""
        for number in [number for number, lease in self._taken.items() if lease.released]:
            self._taken.pop(number, None)
        return {number: lease.sandbox for number, lease in self._taken.items()}

    # --- selection ---

    @property
    def selection(self) -> Sandboxes:
        """The current state of the selected sandboxes that still exist, or their last state if the pool is closed."""
        return Sandboxes([row for row in self._rows() if row["sandbox"] in self._selected])

    def to_frame(self) -> Any:
        """Return a data frame with one row per sandbox, with the columns of `selection.to_frame()`."""
        return Sandboxes(self._rows()).to_frame()

    def select(self, *sandboxes: int) -> None:
        """Select sandboxes by number and highlight them in the browser. Without arguments, clear the selection."""
        there = [row["sandbox"] for row in self._rows()]
        for number in sandboxes:
            if number not in there:
                raise ValueError(
                    f"sandbox {number!r} does not exist; the pool has {some([str(n) for n in there]) or 'none yet'}"
                )
        self.refresh()
        self._selected = list(sandboxes)

    @traitlets.validate("_selected")
    def _numbers(self, proposal: Any) -> list[int]:
        return list(dict.fromkeys(int(number) for number in proposal["value"]))

    def _rows(self) -> list[dict[str, Any]]:
        state = self._state if self.record is None else self._seen_now(self.record)
        return [
            {
                "sandbox": id, "state": name, "seconds": age, "owner": owner,
                "turn": turn, "leases": uses, "hand": hand,
            }
            for id, name, owner, uses, age, turn, hand in sorted(state.get("lanes", []))
        ]  # fmt: skip

    def to_code(self) -> str:
        """Return code for a cell that recreates the view and its selection."""
        name = (_named(self.record) if self.record is not None else None) or "pool"
        numbers = self.selection.numbers
        chosen = [f"view.select({', '.join(map(str, numbers))})", "view.selection.to_frame()"]
        return "\n".join([f"view = w.PoolView({name})", *(chosen if numbers else ["view.to_frame()"])])

    def _do_code(self, _: Any) -> None:
        self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code())}

    # --- buttons ---

    async def _do_take(self, _: Any) -> None:
        pool = self._pool()
        size = pool.snapshot().size
        if len(self.held) + self._taking >= max(1, size - 1):
            raise ValueError(f"at most {max(1, size - 1)} of {size} sandboxes can be taken; release one first")
        self._taking += 1
        try:
            lease = await pool.acquire("you", _TAKE_SECONDS)
        finally:
            self._taking -= 1
        self._taken[lease.id] = lease
        self.refresh()

    async def _do_give_back(self, number: Any) -> None:
        lease = self._taken.pop(number, None)
        if lease is None:
            raise ValueError(f"sandbox {number} was not leased in this view")
        await lease.release()

    async def _do_reset(self, number: Any) -> None:
        sandbox = self.held.get(number)
        if sandbox is None:
            self._pool().recycle(int(number))
        else:
            await sandbox.reset()

    async def _do_close(self, number: Any) -> None:
        if number in self.held:
            lease = self._taken.pop(number)
            await lease.pool.release(lease, reusable=False)
        else:
            self._pool().recycle(int(number), close=True)

    def _pool(self) -> Any:
        return require(self.record, "the pool")

    def close(self) -> None:
        """Close the view. Closing the last view of a pool releases the sandboxes leased with the Take button."""
        _views.discard(self)
        taken = getattr(self, "_taken", {})
        shared = any(view._taken is taken for view in _views)
        for lease in [] if shared else list(taken.values()):
            if not lease.released and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(asyncio.ensure_future, lease.release())
        super().close()

    def refresh(self) -> None:
        """Send the current state immediately. If the pool no longer exists, mark the last state as outdated."""
        pool = self.record
        if pool is None:
            if self._state:
                self._state = {**self._state, "gone": True}
            return
        self._state = self._seen_now(pool)
        c = self._state["counts"]
        numbers = c["leased"], c["starting"] + c["resetting"], c["idle"], c["size"]
        if not self._points or self._points[-1][1:] != numbers:
            self._points.append((time.monotonic(), *numbers))

    def _seen_now(self, pool: Any) -> dict[str, Any]:
        state = _state(pool.snapshot(), self.held.keys())
        now = time.monotonic()
        return state | {"events": [_event(now - at, event) for at, event in reversed(self._log)]}

    def _on_message(self, widget: Any, content: Any, buffers: Any) -> None:
        super()._on_message(widget, content, buffers)
        if isinstance(content, dict) and content.get("kind") == "open":
            now = time.monotonic()
            self._history = [[round(now - at, 2), *numbers] for at, *numbers in self._points]

    def _on_last_page_closed(self) -> None:
        # The view is not updated while no page shows it. Record the gap in the history.
        self._points.append((time.monotonic(), 0, 0, 0, 0))

    @property
    def counts(self) -> dict[str, int]:
        """The counts last sent to the page: size, idle, starting, resetting, leased, waiting and others."""
        return dict(self._state.get("counts", {}))

    def __repr__(self) -> str:
        c = self._state.get("counts")
        if c is None:
            return "PoolView()"
        if self._state["closed"]:
            return f"PoolView({self._state['sandbox_type']} closed, size {c['size']})"
        return f"PoolView({self._state['sandbox_type']} {_counts(c)}, size {c['size']})"

    def _static(self) -> str:
        state = {**self._state, "gone": True} if self.record is None else self._seen_now(self.record)
        return _page(state, self._points)


def _logging(log: deque[tuple[float, Any]], listener: Callable[..., None]) -> Callable[[Any], None]:
    """Return a callback that adds each notable event to `log` once, even if several views share the log."""

    def received(event: Any) -> None:
        listed = event.kind in _LISTED or (event.kind in _REASONED and event.detail)
        if listed and not (log and log[-1][1].sequence >= event.sequence):
            log.append((time.monotonic(), event))
        listener(event)

    return received


def _refresh_soon(view_ref: Callable[[], Any], loop: asyncio.AbstractEventLoop | None) -> None:
    """Refresh a view on its event loop. This is called from any thread when the view's pool is garbage-collected."""
    view = view_ref()
    if view is not None and view.comm is not None and loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(view._refresh_safely)


def _event(age: float, event: Any) -> list[Any]:
    owner = None if event.owner is None else sendable(str(event.owner))[:200]
    kind = {"closing": "closed", "resetting": "reset"}.get(event.kind, event.kind)
    return [round(age, 1), event.sandbox, kind, owner, sendable(str(event.detail))[:300]]


def _counts(c: dict[str, int]) -> str:
    resetting = f"{c['resetting']} resetting, " if c["resetting"] else ""
    return f"{c['leased']} leased, {c['idle']} idle, {c['starting']} starting, {resetting}{c['waiting']} waiting"


def _state(s: Any, taken: Collection[int] = ()) -> dict[str, Any]:
    lanes = [
        [
            box.id, box.state, None if box.owner is None else sendable(str(box.owner))[:200], box.uses,
            round(max(0.0, s.time - box.since), 2), None if box.turn is None else sendable(str(box.turn))[:40],
            box.id in taken,
        ]
        for box in s.sandboxes
    ]  # fmt: skip
    return {
        "sandbox_type": sendable(str(s.sandbox_type)),
        "isolation": None if s.isolation is None else sendable(str(s.isolation)),
        "counts": {name: getattr(s, name) for name in _COUNTS},
        "closed": s.closed,
        "gone": False,
        "error": None if s.error is None else sendable(s.error)[:500],
        "lanes": lanes,
        "queue": [
            [sendable(str(owner))[:200], round(seconds, 2)]
            for owner, seconds in zip(s.waiters[:_QUEUE], s.waiting_seconds[:_QUEUE], strict=True)
        ],
    }


def _page(state: dict[str, Any], points: Sequence[tuple[float, ...]], limit: int = 100) -> str:
    c = state["counts"]
    if state["closed"]:
        now = f"closed, size {c['size']}"
    else:
        now = f"isolation {state['isolation'] or 'as available'}: {_counts(c)}, size {c['size']}"
        now += " (when this was saved)" if not state["gone"] else " (its last state; the pool no longer exists)"
    out = [tag("div", tag("b", "PoolView"), escape(f" · {state['sandbox_type']}, {now}"), style="margin:2px 0 6px")]
    out += _timeline(points)
    totals = f"recycled {c['recycled']:,} times, {c['dead']:,} died, {count(c['failed_starts'], 'failed start')}"
    out.append(tag("div", escape(totals)))
    if state["error"]:
        out.append(tag("div", escape(f"last start failed: {state['error']}")))
    for id, name, owner, uses, age, turn, hand in state["lanes"][:limit]:
        who = f" {owner}{' (by hand, from this view)' if hand else ''}" if owner else ""
        where = "" if turn is None else f", turn {turn}" if turn[:1].isdigit() else f", {turn}"
        hint = f"sandbox {id}: {name}{who}{where}, {count(uses, 'lease')}, for {age:.1f} s"
        out.append(
            tag(
                "span", escape(f"{SIGNS.get(name, '?')} #{id} {name}{who[:60]}{where}"), title=hint,
                style="display:inline-block;max-width:100%;overflow-wrap:anywhere;margin:2px;padding:1px 7px;"
                f"border:1px solid #888888;border-radius:5px;"
                f"background-color:rgba({_TINTS.get(name, '128,128,128')},0.20)",
            )
        )  # fmt: skip
    empty = c["size"] - len(state["lanes"])
    if len(state["lanes"]) > limit:
        out.append(tag("div", f"{len(state['lanes']) - limit} sandboxes are left out of this static view."))
    if empty > 0 and not state["closed"]:
        out.append(tag("div", escape(f"{count(empty, 'sandbox', 'sandboxes')} not started")))
    if c["waiting"]:
        names = ", ".join(f"{owner} ({seconds:.1f} s)" for owner, seconds in state["queue"])
        more = f" and {c['waiting'] - len(state['queue'])} more" if c["waiting"] > len(state["queue"]) else ""
        out.append(tag("div", escape(f"waiting, served in this order: {names}{more}")))
    for _, id, kind, owner, detail in state["events"][:8]:
        where = "" if id is None else f" sandbox {id}"
        text = f"{kind}{where}{f', {owner}' if owner else ''}{f': {detail}' if detail else ''}"
        out.append(tag("div", escape(text)))
    return tag("div", "\n".join(out), style="line-height:1.6")


def _timeline(points: Sequence[tuple[float, ...]]) -> list[str]:
    """Draw the fractions of leased, starting and idle sandboxes in the last minute of the history."""
    points = [point for point in points if points[-1][0] - point[0] <= _HISTORY_SECONDS]
    if len(points) < 3:
        return []
    start, seconds = points[0][0], 1.05 * (points[-1][0] - points[0][0])
    drawn = points[:: 1 + len(points) // 100]
    rects = []
    for (at, *numbers, size), (until, *_) in pairwise([*drawn, (start + seconds,)]):
        top = 0.0
        for name, n in zip(("leased", "starting", "idle"), numbers, strict=True):
            height = 40 * n / size if size else 0.0
            if height:
                x, width = 600 * (at - start) / seconds, 600 * (until - at) / seconds
                rects.append(
                    f'<rect x="{x:.1f}" y="{40 - top - height:.1f}" width="{width:.2f}" height="{height:.1f}" '
                    f'fill="rgba({_TINTS[name]},{0.3 if name == "idle" else 0.75})"/>'
                )
            top += height
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="40" viewBox="0 0 600 40">'
        f'{"".join(rects)}<rect width="600" height="40" fill="none" stroke="#888888"/></svg>'
    )
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    text = (
        f"{seconds:.1f} s: shares of sandboxes that were leased (blue), starting (yellow) and idle (green); "
        f"at most {max(point[1] for point in points)} leased at once"
    )
    return [tag("img", src=source, alt=text, style="max-width:100%"), tag("div", escape(text))]
