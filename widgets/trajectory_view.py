"""View of a list of trajectories. The selected trajectories are shown side by side."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import traitlets

from agentfly_kit.integrations.html import escape_control_chars
from agentfly_kit.types import text_of

from ._base import Opener, require
from ._chain_code import _named
from ._chain_page import call_state
from ._chains import cell_of, find_in
from ._format import count, escape, number, picture, pictures, sendable, tag
from ._selection import Trajectories
from ._tokens import some
from ._trajectories import (
    SIGNS,
    Entry,
    columns,
    holds,
    last_text,
    outcome_of,
    payload,
    read,
    shared_turns,
    to_entry,
)
from .chain_stepper import ChainStepper
from .token_view import TokenView

# Maximum number of trajectories shown side by side.
_ABREAST = 12
_TEXT = 6000


class TrajectoryView(Opener):
    """View for filtering, sorting and searching trajectories, and for comparing them as chats or turn by turn.

    A note written in the view is stored with `trajectory.annotate`, so it is saved with the rollout.

    Args:
        source: A Rollout, a Group, an Evaluation, a Batch, the Stats of a step, or trajectories.
        batch: A Batch made from the trajectories. Trajectories dropped from the batch get a badge with the reason.
        agent: The agent that produced the trajectories, needed by "open in the stepper".

    Attributes:
        selection: The selected trajectories; `select(ids)` sets them from Python.

    Raises:
        TypeError: If the source has no trajectories.
    """

    stem: ClassVar[str] = "trajectory_view"
    settable: ClassVar[frozenset[str]] = frozenset({"_selected", "_query", "_chat"})
    actions: ClassVar[frozenset[str]] = frozenset({"tokens", "stepper", "code", "leave", "annotate"})

    _about = traitlets.Dict().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    # The selected trajectories, turn by turn.
    _detail = traitlets.Dict().tag(sync=True)
    _query = traitlets.Unicode("").tag(sync=True)
    # Result of the search, with one bit per trajectory.
    _found = traitlets.Dict().tag(sync=True)
    _code = traitlets.Dict().tag(sync=True)
    # Non-empty notes, keyed by trajectory index.
    _notes = traitlets.Dict().tag(sync=True)
    # True to show selected trajectories as chats, False to show them turn by turn.
    _chat = traitlets.Bool(True).tag(sync=True)

    def __init__(self, source: Any, *, batch: Any = None, agent: Any = None) -> None:
        given, self._dropped = read(source, batch)
        self._agent = agent
        self._trajectories = [weakref.ref(t) for t in given]
        self._kept = [to_entry(t) for t in given]
        self._at = {k.id: i for i, k in enumerate(self._kept)}
        about, buffers = payload(self._kept, self._dropped)
        about["agent"] = agent is not None
        super().__init__(source, _about=about, _buffers=buffers)
        self._read_notes()

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
            "tree": shared_turns([(i, self._kept[i].keys) for i in shown]),
        }

    def _column(self, i: int) -> dict[str, Any]:
        k = self._kept[i]
        return {
            "i": i,
            "id": escape_control_chars(k.id, 200),
            "name": escape_control_chars(k.label, 200),
            "question": escape_control_chars(k.question, 300),
            "fields": [[escape_control_chars(x, 60), escape_control_chars(y, 300)] for x, y in k.fields[:8]],
            "actions": k.actions,
            "error": escape_control_chars(k.error, 2000),
            "dropped": escape_control_chars(self._dropped.get(k.id, ""), 500),
            "metrics": [[escape_control_chars(name, 60), number(float(v))] for name, v in k.metrics.items()],
            "reward": None if k.reward is None else number(float(k.reward)),
            "outcome": outcome_of(k, self._dropped),
            "stop": k.stop,
            "seconds": k.seconds,
            "turns": [
                {
                    "kind": kind,
                    "author": escape_control_chars(author, 60),
                    "text": escape_control_chars(text, _TEXT),
                    "n": n,
                    "sampled": sampled,
                    "seconds": seconds,
                    "stop": stop,
                    "reward": None if reward is None else number(float(reward)),
                    "calls": [call_state(call) for call in calls],
                    "messages": [_message(m) for m in messages],
                }
                for kind, author, text, n, sampled, seconds, reward, stop, calls, messages in k.turns
            ],
        }

    # --- search ---

    @traitlets.observe("_query")
    def _search(self, _: Any) -> None:
        needle = self._query.casefold()
        noted = {int(i) for i, note in self._notes.items() if needle in note.casefold()}
        searched = enumerate(self._kept) if needle else ()
        bits = np.array([i in noted or holds(k, needle) for i, k in searched], bool)
        self._found = {
            "query": self._query,
            "n": int(bits.sum()),
            "bits": np.packbits(bits, bitorder="little").tobytes(),
        }

    # --- notes ---

    def _read_notes(self) -> None:
        notes = ((i, getattr(t(), "note", "")) for i, t in enumerate(self._trajectories))
        self._notes = {str(i): escape_control_chars(note, 1000) for i, note in notes if note}

    def _do_annotate(self, value: Any) -> None:
        i, note = value
        self._alive(i).annotate(str(note).strip())
        self._read_notes()

    def _on_first_page(self) -> None:
        self._read_notes()  # notes may have been set in a cell

    # --- buttons ---

    def _alive(self, i: Any) -> Any:
        return require(self._trajectories[int(i)](), f"the rollout of {self._kept[int(i)].id!r}")

    def _do_tokens(self, value: Any) -> None:
        ts = [self._alive(i) for i in (value if isinstance(value, list) else [value])]
        shown = (ts[0], ts[1]) if len(ts) == 2 else (ts, None)
        self._show_below(TokenView(*shown, agent=self._agent))

    def _do_stepper(self, value: Any) -> None:
        self._show_below(ChainStepper(self._agent, self._alive(value)))

    def _do_code(self, value: Any) -> None:
        self._code = {"n": self._code.get("n", 0) + 1, "text": sendable(self.to_code(int(value)))}

    def to_code(self, i: int) -> str:
        """Return code for a cell that retrieves the trajectory at index `i` and continues it as a chain."""
        source = _named(self.record) if self.record is not None else None
        found = find_in(f"{source or 'rollout'}.trajectories", self._kept[i].id)
        return cell_of(self._trajectories[i](), found, self._agent)

    def __repr__(self) -> str:
        c = self._about["counts"]
        return (
            f"TrajectoryView({count(len(self._kept), 'trajectory', 'trajectories')}, "
            f"{c['success']} succeeded, {c['unscored']} unscored)"
        )

    def _static(self) -> str:
        chosen = self._selected or range(min(2, len(self._kept)))
        return _page(self._kept, self._dropped, self._notes, chosen, repr(self))


def _message(message: Any) -> dict[str, Any]:
    return {
        "role": escape_control_chars(str(message.get("role", "?")), 40),
        "content": escape_control_chars(text_of(message), _TEXT),
        "thinking": escape_control_chars(str(message.get("thinking") or ""), _TEXT),
        "images": pictures([message]),
    }


# --- the static form ------------------------------------------------------------------------------


def _page(kept: list[Entry], dropped: dict[str, str], notes: dict[str, str], shown: Sequence[int], title: str) -> str:
    out = [tag("div", tag("b", escape(title)), style="margin:2px 0 6px")]
    noted = {kept[int(i)].id: note for i, note in notes.items()}
    right, left = "text-align:right", "text-align:left"
    wrapped = f"{left};overflow-wrap:anywhere"  # JSON without spaces may be wider than the page

    # For each column: heading, style, and a function that returns the text of an entry's cell.
    cells: list[tuple[str, str, Callable[[Entry], str]]] = [
        ("", f"{left};white-space:nowrap", lambda k: f"{SIGNS[outcome_of(k, dropped)]} {outcome_of(k, dropped)}"),
        *(
            (
                c.label,
                f"{wrapped};min-width:{'13em' if 'fr' in c.widths[1] else '4.5em'}" if c.text else right,
                c.shown,
            )
            for c in columns(kept)
            if c.widths
        ),
        ("actions", right, lambda k: str(k.actions)),
        ("time", right, lambda k: f"{k.seconds:.1f} s"),
        (
            "last text",
            f"{wrapped};min-width:13em",
            lambda k: (f"left out: {dropped[k.id][:100]} · " if k.id in dropped else "") + last_text(k)[:120],
        ),
    ]
    if notes:
        cells.append(("note", f"{wrapped};min-width:4em", lambda k: noted.get(k.id, "")[:120]))
    budget, rows = 60_000, []
    for k in kept[:200]:
        row = "".join(tag("td", escape(escape_control_chars(text(k), 240)), style=style) for _, style, text in cells)
        rows.append(tag("tr", row, title=escape_control_chars(k.id, 200)))
        budget -= len(rows[-1].encode())
        if budget < 0:
            break
    head = "".join(
        tag("th", escape(escape_control_chars(name, 60)), style=style.replace("anywhere", "normal"))
        for name, style, _ in cells
    )
    out.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    if len(rows) < len(kept):
        more = count(len(kept) - len(rows), "trajectory", "trajectories")
        out.append(tag("div", escape(f"Left out of this static view: {more}. Run the cell to see all.")))
    budget = 30_000
    for i in shown:
        k = kept[i]
        lines = [tag("div", escape(escape_control_chars(k.says, 600)))]
        for n, turn in enumerate(k.turns):
            text = tag(
                "span",
                escape(escape_control_chars(turn[2], 1200)),
                style="white-space:pre-wrap;font-family:monospace",
            )
            head = tag("b", escape(f"{n} {turn[0]}")) + escape(f" {turn[1][:60]} ")
            images = (picture(*each) for each in pictures(turn[9]))
            lines.append(tag("div", head, text, *images, style="margin:3px 0;overflow-wrap:anywhere"))
        name = escape(f"{k.question[:80]} · {k.label[:80]}")
        page = f"<details><summary>{name}, turn by turn</summary>{''.join(lines)}</details>"
        budget -= len(page.encode())
        if budget < 0:
            break
        out.append(page)
    return tag("div", *out)
