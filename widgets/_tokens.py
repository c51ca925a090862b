"""Extraction of per-token values from trajectories, rollouts, batches and training statistics.

Rows are matched by (trajectory id, token span), never by position, because the rows of a batch and of a rollout may be
ordered differently. A span is a range of token indices in the trajectory.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ._format import count

Floats = npt.NDArray[np.float32]

# --- signals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signal:
    """Name and display style of a per-token quantity.

    Attributes:
        name: The value of `TokenView.signal` that selects this signal.
        label: The name shown on the page.
        scale: "up" draws a bar from the bottom, "down" a bar from the top that is longer for lower values, "around" a
            bar up or down from `middle`, and "flag" a mark on the tokens for which the signal is set.
        unit: The unit of the values, such as "nats".
        middle: The neutral value of an "around" scale.
        fixed: The range of the scale, if it does not depend on the data.
        reach: The maximum distance between `middle` and an end of the scale. All values beyond the ends look the same.
        says: A short explanation for the legend.
        telling: The values that are most informative and listed first: "high", "low", or "far" (from the middle).
    """

    name: str
    label: str
    scale: str = "up"
    unit: str = ""
    middle: float = 0.0
    fixed: tuple[float, float] | None = None
    reach: float = math.inf
    says: str = ""
    telling: str = "high"


# End of the scale for logprobs. If the scale ended at the lowest logprob, one rare token would make all others look
# certain.
_NATS = 3.0

SIGNALS = {
    signal.name: signal
    for signal in (
        Signal(
            "logprob", "logprob", "down", "nats", telling="low", reach=_NATS,
            says="of the sampler, when the token was sampled",
        ),
        Signal("entropy", "entropy", unit="nats", says="of the distribution that the token was sampled from"),
        Signal("advantage", "advantage", "around", telling="far", says="of this token, used by the training step"),
        Signal("reward", "reward", "around", telling="far", says="credited to this token"),
        Signal("return", "return", "around", telling="far"),
        Signal("value", "value", "around", telling="far", says="of the value head"),
        # Ratios cannot be negative, so the scale starts at 0 or above.
        Signal("ratio", "ratio", "around", middle=1, reach=1, telling="far", says="probability now / at sampling"),
        Signal("clipped", "clipped", "flag", says="clipped: no gradient from this token"),
        Signal("kl_reference", "KL to reference", unit="nats", says="k3 estimate"),
        Signal(
            "sampler_gap",
            "sampler gap",
            "around",
            unit="nats",
            telling="far",
            says="trainer logprob − sampler logprob",
        ),
        Signal("logprob_before", "logprob before", "down", "nats", telling="low", reach=_NATS),
        Signal("logprob_after", "logprob after", "down", "nats", telling="low", reach=_NATS),
        Signal("logprob_reference", "logprob of reference", "down", "nats", telling="low", reach=_NATS),
        Signal("weight", "importance weight", "around", middle=1.0, telling="far", says="trainer / sampler"),
        Signal("prob_before", "probability before", fixed=(0.0, 1.0), telling="low"),
        Signal("prob_after", "probability after", fixed=(0.0, 1.0), telling="low"),
        Signal("prob_change", "probability change", "around", telling="far", says="after − before the step"),
    )
}  # fmt: skip
ALIASES = {
    "author": "mask",
    "kind": "mask",
    "clip": "clipped",
    "before": "prob_before",
    "after": "prob_after",
    "kl": "kl_reference",
    "gap": "sampler_gap",
    "logprobs": "logprob",
    "entropies": "entropy",
    "advantages": "advantage",
    "token_rewards": "reward",
    "rewards": "reward",
    "returns": "return",
    "values": "value",
}

# --- text ----------------------------------------------------------------------------------------

_SPECIAL = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_]{2,16}\]")
_MARKS = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥", "\xa0": "⍽"}


def visible(piece: str, limit: int = 120) -> str:
    """Make every invisible or layout-changing character of a token's text visible.

    A space becomes ·, a newline ⏎, a tab ⇥, a non-breaking space ⍽. Control characters, zero-width and bidirectional
    marks, private-use characters and lone surrogates become ‹U+XXXX›. A combining mark without a base character is
    shown on ◌. Literal occurrences of these signs and similar characters also become ‹U+XXXX›, to avoid ambiguity.
    """
    if not piece:
        return "∅"
    out: list[str] = []
    for ch in piece[: limit + 1]:
        category = unicodedata.category(ch)
        if ch in _MARKS:
            out.append(_MARKS[ch])
        elif category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs") or ch in "·⏎␍⇥⍽‹›∅◌":
            out.append(f"‹U+{ord(ch):04X}›")
        elif category in ("Mn", "Me", "Mc") and not out:
            out.append("◌" + ch)
        else:
            out.append(ch)
    if len(piece) > limit:
        out[limit:] = [f"… ({len(piece):,} characters)"]
    return "".join(out)


def flags(piece: str) -> int:
    """Return the sum of flags for a token's text: 1 for a likely special token, 2 for a line end, 4 for blank text."""
    return bool(_SPECIAL.fullmatch(piece)) + 2 * ("\n" in piece) + 4 * (not piece.strip() and bool(piece))


# --- rows ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """Tokens `start` to `start + len(ids)` of one row of a trajectory.

    Attributes:
        id: The trajectory's id, followed by the row's index if the trajectory has several rows.
        task: The task's id.
        chain: The chain's index in its group.
        reward: The trajectory's reward; None if it was not scored.
        stop: The reason why the trajectory ended.
        start: Index of the first token in the trajectory's row.
        ids: Token ids.
        token_texts: The text of each token.
        turn: The turn index of each token.
        turns: (kind, author) of every turn of the trajectory.
        mask: True for tokens sampled by the policy.
        signals: The values of each signal, one per token; NaN where missing.
        alternatives: The recorded alternatives (id, text, logprob) of each token; an empty tuple if no token has any.
        note: A message shown in place of the tokens.
        images: A tuple (first placeholder, last + 1, image) for each span of placeholders.
    """

    id: str
    task: str
    chain: int | None
    reward: float | None
    stop: str
    start: int
    ids: npt.NDArray[np.int64]
    token_texts: tuple[str, ...]
    turn: npt.NDArray[np.int64]
    turns: tuple[tuple[str, str], ...]
    mask: npt.NDArray[np.bool_]
    signals: dict[str, Floats] = field(default_factory=dict)
    alternatives: tuple[tuple[tuple[int, str, float], ...], ...] = ()
    note: str = ""
    images: tuple[tuple[int, int, Any], ...] = ()

    def cells(self, first: int, last: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (first, last + 1, image) for each cell of a range: the placeholders of an image, or one other token."""
        shown = {start: (stop, image) for start, stop, image in self.images}
        i = first
        while i < last:
            after, image = shown.get(i, (i + 1, None))
            yield i, after, image
            i = after

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Tuples (turn, first, last + 1), one per turn, in order. `first` and `last` are token indices in this row."""
        if not len(self.ids):
            return []
        cuts = np.flatnonzero(np.diff(self.turn)) + 1
        edges = [0, *cuts.tolist(), len(self.ids)]
        return [(int(self.turn[a]), a, b) for a, b in pairwise(edges)]

    def rank(self, i: int) -> int | None:
        """Return the rank (from 1) of token `i` among its recorded alternatives, or None if it is not one of them."""
        ids = [id for id, _, _ in self.alternatives[i]] if self.alternatives else []
        return ids.index(int(self.ids[i])) + 1 if int(self.ids[i]) in ids else None

    def holds(self, start: int, stop: int) -> bool:
        """Return True if the row contains all tokens from `start` to `stop` of the trajectory."""
        return self.start <= start < stop <= self.start + len(self.ids)


def _array(values: Any, dtype: Any) -> npt.NDArray[Any]:
    """Convert a tensor, array or list to a NumPy array without importing torch."""
    for name in ("detach", "cpu"):
        values = getattr(values, name)() if hasattr(values, name) else values
    if hasattr(values, "numpy"):
        values = values.float().numpy() if "bfloat16" in str(getattr(values, "dtype", "")) else values.numpy()
    return np.asarray(values).astype(dtype, copy=False)


def is_trajectory(x: Any) -> bool:
    return hasattr(x, "turns") and hasattr(x, "stop") and hasattr(x, "rows")


def _trajectory_rows(t: Any) -> list[Row]:
    """Return one Row per row of the trajectory. If there are several, each `id` ends with the index of the row."""
    if not getattr(t, "exact", True):
        none = np.zeros(0, np.int64)
        return [Row(
            id=t.id, task=t.task.id, chain=t.chain, reward=t.reward, stop=t.stop, start=0, ids=none, token_texts=(),
            turn=none, turns=(), mask=none.astype(bool),
            note="The engine returned only text, so there are no token ids to show.",
        )]  # fmt: skip
    rows = []
    for r in t.rows:
        row = Row(
            id=t.id if len(t.rows) == 1 else f"{t.id} row {r.index}", task=t.task.id, chain=t.chain, reward=t.reward,
            stop=t.stop, start=0, ids=_array(r.ids, np.int64), token_texts=tuple(r.token_texts),
            turn=_array(r.turn_index, np.int64), turns=tuple((turn.kind, turn.author) for turn in t.turns),
            mask=_array(r.action_mask, np.bool_),
            images=tuple((start, start + length, image) for image, start, length in r.images),
        )  # fmt: skip
        row.signals = {"logprob": _array(r.logprobs, np.float32), "entropy": _array(r.entropies, np.float32)}
        if any(getattr(turn, "alternatives", None) for turn in r.turns):
            row.alternatives = tuple(a for turn in r.turns for a in turn.alternatives or ((),) * turn.num_tokens)
        rows.append(row)
    return rows


def _batch_rows(batch: Any, detail: Mapping[str, Any] | None) -> list[Row]:
    from agentfly_kit.errors import AlignmentError

    ids, attention = _array(batch.ids, np.int64), _array(batch.attention, np.bool_)
    mask = _array(batch.mask, np.bool_)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for given, name in (
        ("logprobs", "logprob"), ("advantages", "advantage"), ("token_rewards", "reward"),
        ("returns", "return"), ("values", "value"), ("ref_logprobs", "logprob_reference"),
    ):  # fmt: skip
        values = getattr(batch, given, None)
        if values is not None and not callable(values):
            arrays[name] = _array(values, np.float32)
    for given, values in (detail or {}).items():
        if values is not None:
            arrays[ALIASES.get(given, given)] = _array(values, np.float32)
    before, after = arrays.get("logprob_before"), arrays.get("logprob_after")
    with np.errstate(over="ignore", invalid="ignore"):
        if before is not None:
            arrays["prob_before"] = np.exp(before)
            if "logprob" in arrays:
                arrays.setdefault("sampler_gap", before - arrays["logprob"])
        if after is not None:
            arrays["prob_after"] = np.exp(after)
        if "logprob_reference" in arrays and "kl_reference" not in arrays:
            now = next(x for x in (after, before, arrays.get("logprob")) if x is not None)
            gap = arrays["logprob_reference"] - now
            arrays["kl_reference"] = np.expm1(gap) - gap  # the k3 estimator, as in the training step
        if before is not None and after is not None:
            arrays["prob_change"] = arrays["prob_after"] - arrays["prob_before"]
    rows = []
    which = [int(i) for i in getattr(batch, "row_index", np.zeros(len(ids)))]
    for b, t in enumerate(batch.trajectories):
        here = np.flatnonzero(attention[b])
        whole = _trajectory_rows(t)[which[b]]
        start = _find(whole.ids, ids[b, here])
        if start is None:
            raise AlignmentError(f"row {b} of the batch must be a span of its trajectory {t.id!r}")
        span = slice(start, start + len(here))
        row = Row(
            id=whole.id, task=whole.task, chain=whole.chain, reward=whole.reward, stop=whole.stop, start=start,
            ids=whole.ids[span], token_texts=whole.token_texts[span], turn=whole.turn[span], turns=whole.turns,
            mask=mask[b, here],
            images=tuple((a - start, z - start, image) for a, z, image in whole.images if start <= a < z <= span.stop),
        )  # fmt: skip
        row.signals = {name: values[span] for name, values in whole.signals.items()}
        row.alternatives = whole.alternatives[span]
        # The tensors of a batch have meaningful values only for trained tokens.
        row.signals.update({k: np.where(row.mask, v[b, here], np.float32(np.nan)) for k, v in arrays.items()})
        rows.append(row)
    return rows


def _find(whole: npt.NDArray[np.int64], part: npt.NDArray[np.int64]) -> int | None:
    starts = range(len(whole) - len(part) + 1)
    return next((start for start in starts if np.array_equal(whole[start : start + len(part)], part)), None)


def rows_of(source: Any) -> list[Row]:
    """Return the rows of any supported source: trajectories, a group, a rollout, a batch, Stats or a running chain."""
    if hasattr(source, "detail") and hasattr(source, "batch"):
        if source.batch is None:
            raise ValueError("these Stats contain no batch; call ppo_step(..., detail=True), or pass the batch")
        return _batch_rows(source.batch, source.detail)
    if hasattr(source, "attention") and hasattr(source, "trajectories"):
        return _batch_rows(source, None)
    if is_trajectory(source):
        return _trajectory_rows(source)
    if hasattr(source, "rewind") and callable(source.snapshot):
        return rows_of(source.snapshot())  # the chain is unfinished
    items = getattr(source, "trajectories", source)
    if isinstance(items, Iterable) and not isinstance(items, str | bytes | Mapping):
        found = list(items)
        if all(is_trajectory(t) for t in found):
            return [row for t in found for row in _trajectory_rows(t)]
        if all(hasattr(t, "trajectories") for t in found):
            return [row for t in found for row in rows_of(t)]
    raise TypeError(
        "source must be a Trajectory, a list of them, a Group, a Rollout, a Batch or Stats, "
        f"got {type(source).__name__}"
    )


def some(names: list[str]) -> str:
    """Format the first three names and the number of remaining names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def describe(name: str) -> Signal:
    """Return the Signal with this name. Comparison signals ("… ′", "Δ …") are derived from their base signal."""
    if name in SIGNALS:
        return SIGNALS[name]
    if name.endswith(" ′"):
        base = describe(name[:-2])
        return replace(base, name=name, label=f"{base.label} ′ (compare)", says="")
    if name.startswith("Δ "):
        base = describe(name[2:])
        return Signal(name, f"Δ {base.label}", "around", base.unit, says="compare − source", telling="far")
    return Signal(name, name.replace("_", " "))


def summary(signal: Signal, values: Floats, sampled: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Compute the range of the scale and the numbers in the legend, for the live page and the static HTML."""
    there = values[~np.isnan(values)]
    finite = there[np.isfinite(there)].astype(np.float64)
    out: dict[str, Any] = {
        "name": signal.name, "label": signal.label, "scale": signal.scale, "unit": signal.unit, "says": signal.says,
        "middle": signal.middle, "telling": signal.telling, "n": len(there),
        "missing": int((np.isnan(values) & sampled).sum()), "infinite": len(there) - len(finite),
    }  # fmt: skip
    if len(finite):
        out.update(min=float(finite.min()), max=float(finite.max()), mean=float(finite.mean()))
        # Clip the range at quantiles. Otherwise, one extreme token would make all others look the same. The legend
        # shows the number of clipped values.
        many = len(finite) >= 200
        low, high = np.quantile(finite, (0.01, 0.99)) if many else (finite.min(), finite.max())
        if signal.fixed is not None:
            low, high = signal.fixed
        if signal.scale == "around":
            reach = min(max(abs(low - signal.middle), abs(high - signal.middle)) or 1.0, signal.reach)
            low, high = signal.middle - reach, signal.middle + reach
        elif signal.fixed is None:
            # Bars start at 0 where possible, so that their lengths can be compared.
            low, high = (min(low, 0.0), max(high, 0.0)) if signal.scale == "down" or low >= 0 else (low, high)
            low = max(low, signal.middle - signal.reach)
        out.update(lo=float(low), hi=float(high))
        out["outside"] = int(((finite < low) | (finite > high)).sum())
        if signal.scale == "flag":
            out["set"] = int((finite > 0).sum())
    return out


# --- selection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` (exclusive) of one trajectory, as indices into the trajectory."""

    trajectory: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Selection:
    """Iterable of the token spans selected in the browser; falsy if empty."""

    def __init__(self, spans: Iterable[Span], rows: list[Row]) -> None:
        self.spans = tuple(spans)
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """Number of selected tokens."""
        return sum(len(span) for span in self.spans)

    def to_frame(self) -> Any:
        """Return a data frame with one row per token.

        Its columns are trajectory, token, id, piece, turn, kind, author, mask, and every signal (NaN where missing). If
        alternatives were recorded, there are two more columns: `alternatives`, a list of (text, probability), and
        `rank`, the rank of the token among its alternatives (NaN if it is not among them).
        """
        import pandas as pd

        names = list(dict.fromkeys(name for row in self._rows for name in row.signals))
        records: list[dict[str, Any]] = []
        for span in self.spans:
            row = next(r for r in self._rows if r.id == span.trajectory and r.holds(span.start, span.stop))
            for i in range(span.start - row.start, span.stop - row.start):
                turn = int(row.turn[i])
                record: dict[str, Any] = {"trajectory": row.id, "token": row.start + i, "id": int(row.ids[i])}
                record.update(piece=row.token_texts[i], turn=turn, kind=row.turns[turn][0], author=row.turns[turn][1])
                record.update(mask=bool(row.mask[i]))
                record.update({name: float(values[i]) for name, values in row.signals.items()})
                if row.alternatives:
                    record["alternatives"] = [(text, math.exp(lp)) for _, text, lp in row.alternatives[i]]
                    record["rank"] = row.rank(i)
                records.append(record)
        columns = ["trajectory", "token", "id", "piece", "turn", "kind", "author", "mask", *names]
        columns += ["alternatives", "rank"] if any(row.alternatives for row in self._rows) else []
        return pd.DataFrame(records, columns=columns)

    def __repr__(self) -> str:
        if not self.spans:
            return "Selection(nothing)"
        shown = ", ".join(f"{s.trajectory}[{s.start}:{s.stop}]" for s in self.spans[:4])
        more = f", and {len(self.spans) - 4} more" if len(self.spans) > 4 else ""
        return f"Selection({count(self.tokens, 'token')}: {shown}{more})"
