"""The sandboxes of a pool, live: who holds which, since when, who waits; and what a person does to them by hand.

What is selected on the page is in `selection`, a frame of it in `selection.to_frame()`.

Knows no sandbox: what is done is the pool's own `acquire`, `release` and `recycle`.
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

# A sign beside each state's word, so that neither colour nor reading is needed to tell them apart.
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
    """Sandboxes of a pool and their leases, as they were when this was asked for. Empty is false; iterate for rows."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = tuple(rows)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(row["sandbox"] for row in self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to_frame(self) -> Any:
        """A row a sandbox: sandbox, state, seconds in it, owner, turn, leases so far, hand. Missing ages are NaN."""
        import pandas as pd

        return pd.DataFrame(list(self._rows), columns=list(_COLUMNS))

    def __repr__(self) -> str:
        return f"Sandboxes({some([f'#{n}' for n in self.numbers]) if self._rows else 'nothing'})"


_COLUMNS = ("sandbox", "state", "seconds", "owner", "turn", "leases", "hand")


class PoolView(LiveView):
    """A tile a sandbox or a row an owner, and the queue, from the pool's events and `pool.snapshot()`.

    At most 10 updates a second. A sandbox that was taken on the page is marked as held by hand.
    `view.counts` has what was last sent; `view.refresh()` sends now; `view.close()` ends it. `view.selection` has the
    sandboxes that are selected in the browser and who holds them; `view.select(3, 4)` selects from Python;
    `view.to_frame()` has all; `view.to_code()` is the view and its selection as a cell.

    By hand, on the page: Take leases a sandbox, which is then in `view.held[number]` for the next cell; Give back
    returns it. Reset and Close act on any sandbox of a pool with `recycle`; a chain that holds it loses it, and is not
    scored. One that was taken here is reset in place.
    """

    stem: ClassVar[str] = "pool_view"
    settable: ClassVar[frozenset[str]] = frozenset({"_selected"})
    actions: ClassVar[frozenset[str]] = frozenset({"take", "give_back", "reset", "close", "code"})

    _state = traitlets.Dict().tag(sync=True)
    # Numbers of sandboxes. One that ended stays in it, and counts no more.
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)

    def __init__(self, pool: Any) -> None:
        if not (callable(getattr(pool, "snapshot", None)) and callable(getattr(pool, "subscribe", None))):
            raise TypeError(
                f"PoolView shows a Pool (something with snapshot() and subscribe()); got {type(pool).__name__}"
            )
        self._taken: dict[int, Any] = {}  # number of the sandbox -> its lease
        super().__init__(pool, pool.subscribe)
        self.refresh()

    @property
    def held(self) -> dict[int, Any]:
        """The sandboxes that were taken by hand on the page and not given back, by number."""
        self._taken = {number: lease for number, lease in self._taken.items() if not lease.released}
        return {number: lease.sandbox for number, lease in self._taken.items()}

    # --- selection ---

    @property
    def selection(self) -> Sandboxes:
        """The selected sandboxes that there still are, as they are now; when the pool is gone, as they last were."""
        chosen = set(self._selected)
        return Sandboxes([row for row in self._rows() if row["sandbox"] in chosen])

    def to_frame(self) -> Any:
        """All sandboxes, as `selection.to_frame()` has the selected ones."""
        return Sandboxes(self._rows()).to_frame()

    def select(self, *sandboxes: int) -> None:
        """Select sandboxes by their numbers; the browser shows them. None of them: select nothing."""
        there = [row["sandbox"] for row in self._rows()]
        for number in sandboxes:
            if number not in there:
                raise ValueError(f"no sandbox {number!r} here; there are {some([str(n) for n in there]) or 'none yet'}")
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
        """This view and its selection as a cell; `pool` is what the notebook calls the pool."""
        name = (_named(self.record) if self.record is not None else None) or "pool"
        numbers = self.selection.numbers
        chosen = [f"view.select({', '.join(map(str, numbers))})", "view.selection.to_frame()"]
        return "\n".join([f"view = w.PoolView({name})", *(chosen if numbers else ["view.to_frame()"])])

    def _do_code(self, _: Any) -> None:
        self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code())}

    # --- by hand ---

    async def _do_take(self, _: Any) -> None:
        lease = await self._pool().acquire("by hand", _TAKE_SECONDS)
        self._taken[lease.id] = lease
        self.refresh()

    async def _do_give_back(self, number: Any) -> None:
        lease = self._taken.pop(number, None)
        if lease is None:
            raise ValueError(f"sandbox {number} was not taken here")
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
        if inspect.isawaitable(asked):  # of a pool that is elsewhere
            await asked

    def _pool(self) -> Any:
        if self.record is None:
            raise ValueError("the pool is gone")
        return self.record

    def close(self) -> None:
        for lease in list(getattr(self, "_taken", {}).values()):
            if not lease.released and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(asyncio.ensure_future, lease.release())
        super().close()

    def refresh(self) -> None:
        """Send the present state now. When the pool is gone, the last state stays and the page says so."""
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
        """size, idle, starting, leased, waiting, dead: as last sent."""
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
    turns = {lease.sandbox: lease.turn for lease in s.leases}
    since = {lease.sandbox: lease.since for lease in s.leases}
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
