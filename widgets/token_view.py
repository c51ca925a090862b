"""View of the tokens of trajectories, a batch or a training step, coloured by a signal."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import traitlets

from ._base import View, require
from ._format import count, number, pack, sendable
from ._token_compare import compare_rows
from ._token_page import page
from ._tokens import (
    ALIASES,
    SIGNALS,
    Row,
    Selection,
    Span,
    describe,
    flags,
    is_trajectory,
    rows_of,
    some,
    summary,
    visible,
)

# Maximum number of previews of images in a view. A notebook may save them, at up to 40 kB each.
_PREVIEWS = 128


class TokenView(View):
    """View of tokens coloured by a signal.

    Click, shift-click or drag to select tokens, or move with the arrow keys. `view.selection` contains the selected
    tokens. The placeholders of an image are shown as a single cell with a thumbnail of the image.

    Args:
        source: A Trajectory, a sequence of trajectories, a Group, Rollout or Batch, or Stats with detail=True.
        compare: A second source, matched by (trajectory id, token span). Its values are marked with ′, differences with
            Δ.
        signal: The signal that colours the tokens, one of `view.signals`.
        agent: The agent that produced the trajectories, needed by the "step by hand" button. The button opens a chain
            with the turns of the trajectory in a ChainStepper, `view.stepper`.

    Raises:  TypeError for any other source; ValueError if the source does not have the signal.
    """

    stem: ClassVar[str] = "token_view"
    settable: ClassVar[frozenset[str]] = frozenset({"signal", "_selected"})
    actions: ClassVar[frozenset[str]] = frozenset({"code", "stepper"})

    signal = traitlets.Unicode("mask").tag(sync=True)
    # Rows, turns, distinct token texts and legend numbers. The values of the tokens are in `_buffers`.
    _about = traitlets.Dict().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)
    # Selected tokens as [row, first, last + 1], with indices into the tokens of the row.
    _selected: traitlets.List[Any] = traitlets.List().tag(sync=True)
    _code = traitlets.Unicode("").tag(sync=True)
    # Model id of the ChainStepper shown below.
    _child = traitlets.Unicode("").tag(sync=True)

    def __init__(self, source: Any, compare: Any = None, *, signal: str = "mask", agent: Any = None) -> None:
        rows = rows_of(source)
        notes: list[str] = []
        parts: dict[int, int] = {}
        if compare is not None:
            rows, notes, parts = compare_rows(rows, rows_of(compare))
        self._rows = rows
        about, buffers = _payload(rows, notes, parts)
        self._agent = agent
        self._stepper: Any = None
        about["agent"] = agent is not None
        self._signals = ["mask", *(each["name"] for each in about["signals"])]
        self._trajectories = [_weak(t) for t in _trajectories(source)]
        super().__init__(source, signal=signal, _about=about, _buffers=buffers)

    @traitlets.validate("signal")
    def _known(self, proposal: Any) -> str:
        name = ALIASES.get(proposal["value"], proposal["value"])
        if name not in self._signals:
            raise ValueError(
                f"signal must be one of {', '.join(self._signals)} for this source, got {proposal['value']!r}. "
                "Advantages and returns require a Batch; ratio, clipped, before and after require the Stats of "
                "ppo_step(..., detail=True)"
            )
        return str(name)

    @traitlets.validate("_selected")
    def _in_range(self, proposal: Any) -> list[list[int]]:
        spans = []
        for span in proposal["value"]:
            row, first, last = (int(x) for x in span)
            if not (0 <= row < len(self._rows) and 0 <= first < last <= len(self._rows[row].ids)):
                raise ValueError(f"tokens {first} to {last} of row {row} do not exist")
            spans.append([row, first, last])
        return spans

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals available for this source."""
        return tuple(self._signals)

    @property
    def tokens(self) -> int:
        """Number of tokens shown."""
        return sum(len(row.ids) for row in self._rows)

    @property
    def selection(self) -> Selection:
        """The tokens selected in the browser, as trajectory ids and token spans; `.to_frame()` returns their values."""
        chosen = [(self._rows[r], first, last) for r, first, last in self._selected]
        return Selection(
            [Span(row.id, row.start + first, row.start + last) for row, first, last in chosen], self._rows
        )

    def to_frame(self) -> Any:
        """Return a data frame with one row per token shown, with the columns of `selection.to_frame()`."""
        spans = [Span(row.id, row.start, row.start + len(row.ids)) for row in self._rows if len(row.ids)]
        return Selection(spans, self._rows).to_frame()

    def select(self, trajectory: str, start: int, stop: int | None = None) -> None:
        """Select tokens from Python and show them in the browser.

        Args:
            trajectory: The trajectory's id.
            start: Index of the first token in the trajectory.
            stop: Index after the last token; None to select a single token.

        Raises:  ValueError if the view does not show these tokens.
        """
        stop = start + 1 if stop is None else stop
        for r, row in enumerate(self._rows):
            if row.id == trajectory and row.holds(start, stop):
                self._selected = [[r, start - row.start, stop - row.start]]
                return
        raise ValueError(
            f"tokens {start} to {stop} of {trajectory!r} are not in this view; it has the rows "
            f"{some([r.id for r in self._rows])}"
        )

    def clear(self) -> None:
        """Clear the selection."""
        self._selected = []

    def to_code(self) -> str:
        """Return code for a cell that recreates the view and its selection. The data must be in a variable `source`."""
        view = f"view = w.TokenView(source, signal={self.signal!r})"
        span = next(iter(self.selection), None)
        if span is None:
            return f"{view}\nview"
        return "\n".join((
            view,
            f"view.select({span.trajectory!r}, {span.start}, {span.stop})",
            "view.selection.to_frame()",
            f"one = next(t for t in view.trajectories if t.id == {span.trajectory!r})",
            "chain = agent.chain(one)  # with its turns; w.ChainStepper(chain) continues by hand",
        ))  # fmt: skip

    def _do_code(self, value: Any) -> None:
        self._code = sendable(self.to_code())

    def _do_stepper(self, value: Any) -> None:
        from .chain_stepper import ChainStepper

        row = self._rows[int(value)]
        found = require(next((t for t in self.trajectories if t.id == row.id), None), f"the rollout of {row.id}")
        self._child = ""
        if self._stepper is not None:
            self._stepper.close()
        self._stepper = ChainStepper(self._agent, found)
        self._child = self._stepper.model_id

    @property
    def stepper(self) -> Any:
        """The ChainStepper opened below this view, or None."""
        return self._stepper

    def close(self) -> None:
        """Close the view and its stepper."""
        if getattr(self, "_stepper", None) is not None:
            self._stepper.close()
        super().close()

    @property
    def trajectories(self) -> tuple[Any, ...]:
        """The displayed trajectories that still exist. The view does not keep trajectories alive."""
        return tuple(t for t in (ref() for ref in self._trajectories) if t is not None)

    def __repr__(self) -> str:
        return f"TokenView({count(len(self._rows), 'row')}, {count(self.tokens, 'token')})"

    def _static(self) -> str:
        return page(self._rows, self._about, self.signal, repr(self))


def _weak(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None


def _trajectories(source: Any) -> list[Any]:
    if is_trajectory(source):
        return [source]
    items = getattr(getattr(source, "batch", None) or source, "trajectories", source)
    try:
        return [t for t in items if is_trajectory(t)]
    except TypeError:
        return []


def _payload(rows: list[Row], notes: list[str], parts: dict[int, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    vocabulary: dict[str, int] = {}
    pictures = list(dict.fromkeys(image for row in rows for _, _, image in row.images))
    if (hidden := len(pictures) - _PREVIEWS) > 0:
        notes = [*notes, f"{hidden} of {len(pictures)} different images are not shown but described"]
    pieces = [vocabulary.setdefault(piece, len(vocabulary)) for row in rows for piece in row.token_texts]
    mask = np.concatenate([row.mask for row in rows]) if rows else np.zeros(0, bool)
    names = [*SIGNALS, *dict.fromkeys(name for row in rows for name in row.signals if name not in SIGNALS)]
    summaries, columns = [], {}
    for name in names:
        if not any(name in row.signals for row in rows):
            continue
        values = np.concatenate([row.signals.get(name, np.full(len(row.ids), np.nan, np.float32)) for row in rows])
        if name not in ("logprob", "entropy", "advantage") and np.isnan(values).all():
            continue
        # Missing values are counted only at tokens sampled by the policy, because signals do not apply to other tokens.
        summaries.append(summary(describe(name), values, mask))
        columns[name] = pack(values)
    authors: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for turn, first, last in row.spans:
            tally = authors.setdefault(row.turns[turn], [0, 0])
            tally[0] += last - first
            tally[1] += int(row.mask[first:last].sum())
    about = {
        "total": sum(len(row.ids) for row in rows),
        "rows": [
            {
                "id": sendable(row.id), "task": sendable(row.task), "chain": row.chain, "start": row.start,
                "reward": None if row.reward is None else number(float(row.reward)), "stop": row.stop,
                "n": len(row.ids), "sampled": int(row.mask.sum()), "note": row.note, "parts": parts.get(r),
                "turns": [[turn, *row.turns[turn], first, last] for turn, first, last in row.spans],
                "images": [[first, last, pictures.index(image)] for first, last, image in row.images],
            }
            for r, row in enumerate(rows)
        ],
        "vocabulary": [[visible(piece), flags(piece)] for piece in vocabulary],
        "pictures": [[image.preview if i < _PREVIEWS else "", str(image)] for i, image in enumerate(pictures)],
        "signals": summaries,
        "authors": [[kind, sendable(author), n, on] for (kind, author), (n, on) in authors.items()],
        "notes": [sendable(note) for note in notes],
    }  # fmt: skip
    buffers = {
        "piece": np.asarray(pieces, "<i4").tobytes(),
        "id": (np.concatenate([row.ids for row in rows]) if rows else np.zeros(0)).astype("<i4").tobytes(),
        "mask": np.packbits(mask, bitorder="little").tobytes(),
        "columns": columns,
    }
    if width := max((len(each) for row in rows for each in row.alternatives), default=0):
        about["alternatives"], buffers["alternatives"] = width, _pack_alternatives(rows, width, vocabulary)
        about["vocabulary"] = [[visible(piece), flags(piece)] for piece in vocabulary]
    return about, buffers


def _pack_alternatives(rows: list[Row], width: int, vocabulary: dict[str, int]) -> dict[str, Any]:
    """Pack `width` ids, logprobs and text indices per token. New texts are added to `vocabulary`."""
    total = sum(len(row.ids) for row in rows)
    ids, pieces = np.full((total, width), -1, "<i4"), np.zeros((total, width), "<i4")
    logprobs = np.full((total, width), np.nan, np.float32)
    at = 0
    for row in rows:
        for i, alternatives in enumerate(row.alternatives):
            for k, (id, text, logprob) in enumerate(alternatives):
                ids[at + i, k], pieces[at + i, k] = id, vocabulary.setdefault(text, len(vocabulary))
                logprobs[at + i, k] = logprob
        at += len(row.ids)
    return {"id": ids.tobytes(), "piece": pieces.tobytes(), "logprob": pack(logprobs)}
