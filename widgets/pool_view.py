"""Live view of a pool: sandboxes with their owners, the queue, and buttons to take, release, reset or close a sandbox.

The buttons call the pool's own `acquire`, `release` and `recycle`, so the view works with every sandbox class.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import traitlets

from ._base import LiveView, count, escape, sendable, tag
from ._tokens import some
from .chain_stepper import _named

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


class Sandboxes:
    """A snapshot of sandboxes and their leases. Iterating yields one row per sandbox; falsy if empty."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = tuple(rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the sandboxes."""
        return tuple(row["sandbox"] for row in self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to_frame(self) -> Any:
        """Return a data frame with one row per sandbox.

        The columns are sandbox, state, seconds (in this state, NaN if unknown), owner, turn, leases (so far), and hand
        (True if leased with the Take button).
        """
        import pandas as pd

        return pd.DataFrame(list(self._rows), columns=list(_COLUMNS))

    def __repr__(self) -> str:
        return f"Sandboxes({some([f'#{n}' for n in self.numbers]) if self._rows else 'nothing'})"


_COLUMNS = ("sandbox", "state", "seconds", "owner", "turn", "leases", "hand")


class PoolView(LiveView):
    """Live view of a pool, with the queue and one tile per sandbox or one row per owner.

    The view updates at most 10 times per second; `view.refresh()` sends an update immediately. `view.counts` holds the
    numbers last sent. `view.selection` holds the sandboxes selected in the browser and their owners;
    `view.select(3, 4)` selects sandboxes from Python. `view.to_frame()` lists all sandboxes. `view.to_code()` returns
    code for a cell that recreates the view and its selection.

    The Take button leases a sandbox, which cells can then use as `view.held[number]`. Its owner is shown as "by hand".
    The Give back button releases it. Reset and Close work on any sandbox if the pool has a `recycle` method. A chain
    that holds such a sandbox loses it and is not scored. A sandbox leased with Take is reset in place.
    """

    stem: ClassVar[str] = "pool_view"
    settable: ClassVar[frozenset[str]] = frozenset({"_selected"})
    actions: ClassVar[frozenset[str]] = frozenset({"take", "give_back", "reset", "close", "code"})

    _state = traitlets.Dict().tag(sync=True)
    # Numbers of the selected sandboxes. Closed sandboxes remain in the list and are ignored.
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, pool: Any) -> None:
        if not (callable(getattr(pool, "snapshot", None)) and callable(getattr(pool, "subscribe", None))):
            raise TypeError(
                f"pool must be a Pool (an object with snapshot() and subscribe()), got {type(pool).__name__}"
            )
        self._taken: dict[int, Any] = {}  # sandbox number -> lease
        super().__init__(pool, pool.subscribe)
        self.refresh()

    @property
    def held(self) -> dict[int, Any]:
        """Mapping from number to sandbox, for the sandboxes leased with the Take button and not yet released."""
        self._taken = {number: lease for number, lease in self._taken.items() if not lease.released}
        return {number: lease.sandbox for number, lease in self._taken.items()}

    # --- selection ---

    @property
    def selection(self) -> Sandboxes:
        """The current state of the selected sandboxes that still exist, or their last state if the pool is closed."""
        chosen = set(self._selected)
        return Sandboxes([row for row in self._rows() if row["sandbox"] in chosen])

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
                "sandbox": id, "state": name, "seconds": math.nan if age is None else age, "owner": owner,
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
        lease = await self._pool().acquire("by hand", _TAKE_SECONDS)
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
            await self._recycle(number)
        else:
            await sandbox.reset()

    async def _do_close(self, number: Any) -> None:
        if number in self.held:
            lease = self._taken.pop(number)
            await lease.pool.release(lease, reusable=False)
        else:
            await self._recycle(number, close=True)

    async def _recycle(self, number: Any, **how: bool) -> None:
        asked = self._pool().recycle(int(number), **how)
        if inspect.isawaitable(asked):  # the pool is remote
            await asked

    def _pool(self) -> Any:
        if self.record is None:
            raise ValueError("the pool no longer exists")
        return self.record

    def close(self) -> None:
        """Close the view and release the sandboxes leased with the Take button."""
        for lease in list(getattr(self, "_taken", {}).values()):
            if not lease.released and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(asyncio.ensure_future, lease.release())
        super().close()

    def refresh(self) -> None:
        """Send the current state now. If the pool no longer exists, the page keeps the last state and says so."""
        pool = self.record
        if pool is None:
            if self._state:
                self._state = {**self._state, "gone": True}
            return
        self._state = self._seen_now(pool)

    def _seen_now(self, pool: Any) -> dict[str, Any]:
        return _state(pool.snapshot(), self.held.keys(), callable(getattr(pool, "recycle", None)))

    @property
    def counts(self) -> dict[str, int]:
        """The numbers last sent: size, idle, starting, leased, waiting, dead."""
        return dict(self._state.get("counts", {}))

    def __repr__(self) -> str:
        c = self._state.get("counts")
        if c is None:
            return "PoolView()"
        if self._state["closed"]:
            return f"PoolView({self._state['sandbox_type']} closed, size {c['size']})"
        return f"PoolView({self._state['sandbox_type']} {_counts(c)}, size {c['size']})"

    def _static(self) -> str:
        if self.record is not None:
            state = self._seen_now(self.record)
        else:
            state = {**self._state, "gone": True}
        return _page(state)


def _counts(c: dict[str, int]) -> str:
    return f"{c['leased']} leased, {c['idle']} idle, {c['starting']} starting, {c['waiting']} waiting"


def _state(s: Any, taken: Collection[int] = (), recycles: bool = False) -> dict[str, Any]:
    now = getattr(s, "time", None)
    turns = {lease.id: lease.turn for lease in s.leases}
    since = {lease.id: lease.since for lease in s.leases}
    lanes = []
    for box in s.sandboxes:
        began = getattr(box, "since", since.get(box.id))
        turn = turns.get(box.id)
        lanes.append(
            [
                box.id, box.state, None if box.owner is None else sendable(str(box.owner))[:200], box.uses,
                None if now is None or began is None else round(max(0.0, now - began), 2),
                None if turn is None else sendable(str(turn))[:40],
                box.id in taken,
            ]
        )  # fmt: skip
    error = getattr(s, "error", None)
    return {
        "sandbox_type": sendable(str(s.sandbox_type)),
        "isolation": None if s.isolation is None else sendable(str(s.isolation)),
        "counts": {name: int(getattr(s, name)) for name in ("size", "idle", "starting", "leased", "waiting", "dead")},
        "closed": bool(getattr(s, "closed", False)),
        "gone": False,
        "recycles": recycles,
        "error": None if error is None else sendable(str(error))[:500],
        "lanes": lanes,
        "queue": [sendable(str(owner))[:200] for owner in tuple(getattr(s, "waiters", ()))[:_QUEUE]],
    }


def _page(state: dict[str, Any], limit: int = 100) -> str:
    c = state["counts"]
    head = f"{state['sandbox_type']}, isolation {state['isolation'] or 'as available'}: {_counts(c)}, "
    head += f"{c['dead']} died, size {c['size']}"
    head += " · closed" if state["closed"] else ""
    out = [tag("div", tag("b", "PoolView"), escape(f" · {head} (when this was drawn)"), style="margin:2px 0 6px")]
    if state["error"]:
        out.append(tag("div", escape(f"last start failed: {state['error']}")))
    for id, name, owner, uses, age, turn, hand in state["lanes"][:limit]:
        who = f" {owner}{' (by hand, from this view)' if hand else ''}" if owner else ""
        where = f", turn {turn}" if turn is not None else ""
        hint = f"sandbox {id}: {name}{who}{where}, {count(uses, 'lease')}" + (
            "" if age is None else f", for {age:.1f} s"
        )
        out.append(
            tag(
                "span", escape(f"{SIGNS.get(name, '?')} {id} {name}{who[:60]}{where}"), title=hint,
                style=f"display:inline-block;margin:2px;padding:1px 7px;border:1px solid #888888;border-radius:5px;"
                f"background-color:rgba({_TINTS.get(name, '128,128,128')},0.20)",
            )
        )  # fmt: skip
    empty = c["size"] - len(state["lanes"])
    if len(state["lanes"]) > limit:
        out.append(tag("div", f"{len(state['lanes']) - limit} sandboxes are left out of this static form."))
    if empty > 0:
        out.append(tag("div", escape(f"{count(empty, 'place')} not started")))
    if c["waiting"]:
        more = f" and {c['waiting'] - len(state['queue'])} more" if c["waiting"] > len(state["queue"]) else ""
        out.append(tag("div", escape(f"waiting, first to be served first: {', '.join(state['queue'])}{more}")))
    return tag("div", *out, style="line-height:1.6")
