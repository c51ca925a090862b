"""The static form of a TokenView: HTML that is shown without a kernel, even in an untrusted notebook."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._format import count, escape, number, sendable, tag
from ._tokens import Row, visible

# The colours are translucent, so that text stays readable in light and dark themes.
_KINDS = {
    "action": "background-color:rgba(40,120,220,0.25)",
    "prompt": "border-bottom:1px dotted #888888",
    "observation": "background-color:rgba(40,160,90,0.14);border-bottom:1px dashed #4a9a6a",
    "forced": "background-color:rgba(200,150,20,0.18);border-bottom:2px dashed #a08020",
}
# Number of rows that are expanded. All others are collapsed to keep the page short, and expand on a click.
_OPEN_ROWS = 4
_BLUE, _ORANGE = "40,120,220", "220,110,30"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def page(rows: list[Row], about: dict[str, Any], signal: str, title: str) -> str:
    """Return HTML with inline styles only, because untrusted notebooks strip style sheets and scripts."""
    summary = next((each for each in about["signals"] if each["name"] == signal), None)
    out = [
        tag("div", tag("b", escape(title)), escape(f" · {_legend_line(about, summary)}"), style="margin:2px 0 6px"),
        tag("div", escape(_text_legend(summary)), style="display:none"),
        *(tag("div", escape(note), style="font-style:italic") for note in about["notes"]),
    ]
    left = 78_000
    if summary is not None and (telling := _telling(rows, signal, summary)):
        table = "".join(
            f"<tr><td>{escape(row.id)}</td><td>{row.start + i}</td><td><code>"
            f"{escape(visible(row.token_texts[i]))}</code>"
            f"</td><td>{number(float(row.signals[signal][i]))}</td>{_alternatives(row, i)}</tr>"
            for row, i in telling
        )
        more = "<th>most probable here</th>" if any(row.alternatives for row, _ in telling) else ""
        words = {"low": "lowest", "high": "highest", "far": f"farthest from {number(summary['middle'])}"}
        head = escape(f"{words[summary['telling']]} {summary['label']}")
        out.append(
            f"<details><summary>{len(telling)} most informative tokens: {head}</summary><table><thead><tr>"
            f"<th>trajectory</th><th>token</th><th>piece</th><th>{escape(summary['label'])}</th>{more}</tr></thead><tbody>{table}</tbody></table></details>"
        )
    shown = rows_shown = 0
    shown_rows: list[str] = []
    for row in rows:
        if left <= 0:
            break
        parts = [tag("div", tag("b", escape(row.id)), escape(_row_line(row)), style="margin-top:8px")]
        if row.note:
            parts.append(tag("div", escape(row.note)))
        for turn, first, last in row.spans:
            kind, author = row.turns[turn]
            text, used, n = _turn_html(row, first, last, signal, summary, left, kind)
            left -= used + 260
            shown += n
            tokens = tag("span", text, style="white-space:pre-wrap;font-family:monospace")
            parts.append(
                tag(
                    "div",
                    tag("b", escape(f"{turn} {kind}")),
                    escape(f" {author} "),
                    tokens,
                    style="margin:2px 0;line-height:1.7",
                )
            )
            if left <= 0:
                break
        rows_shown += 1
        shown_rows.append("".join(parts))
    out += shown_rows[:_OPEN_ROWS]
    if folded := shown_rows[_OPEN_ROWS:]:
        out.append(f"<details><summary>{count(len(folded), 'more row')}</summary>{''.join(folded)}</details>")
    total = about["total"]
    if shown < total:
        gone = f"{count(total - shown, 'token')} of {total:,}" + (
            f" and {count(len(rows) - rows_shown, 'row')} of {len(rows)}" if rows_shown < len(rows) else ""
        )
        out.append(
            tag(
                "div",
                escape(f"Left out of this static view: {gone}. Run the cell to see all."),
                style="margin-top:8px",
            )
        )
    return tag("div", *out, style="line-height:1.5")


def _turn_html(
    row: Row, first: int, last: int, signal: str, summary: dict[str, Any] | None, left: int, kind: str
) -> tuple[str, int, int]:
    """Return the HTML of one turn (at most `left` bytes), its size in bytes, and the number of tokens shown."""
    style = _KINDS.get(kind, "")
    if summary is None or not row.mask[first:last].any():
        # No token of the turn has a value to show, so the whole turn becomes a single HTML element.
        text, n, inside = "", 0, False
        for i, after, image in row.cells(first, last):
            if summary is None and inside != row.mask[i]:
                inside = not inside
                text += _unstyled("⟦" if inside else "⟧")
            text += _line(row.token_texts[i]) if image is None else _thumbnail(image, after - i, left - len(text))
            n += after - i
            if len(text) > min(left, 20_000):
                text += " …"
                break
        text += _unstyled("⟧") if inside else ""
        on = int(row.mask[first:last].sum())
        title = f"{count(last - first, 'token')} by {row.turns[int(row.turn[first])][1]}, mask {1 if on else 0}"
        html = tag("span", text, style=style, title=sendable(title))
        return html, len(html.encode()), n
    values = row.signals.get(signal)
    out, size, n = [], 0, 0
    for i, after, image in row.cells(first, last):
        value = float("nan") if values is None else float(values[i])
        shade = _shade(value, summary) if row.mask[i] else "border-bottom:1px dotted #888888"
        hint = f"{summary['label']} {number(value)}" if not np.isnan(value) else f"{summary['label']} missing"
        piece = f'<span style="{shade}" title="{escape(hint)}">{_line(row.token_texts[i])}</span>'
        if image is not None:
            piece = _thumbnail(image, after - i, left - size)
        if row.mask[i]:
            piece += _unstyled(_raised(value, summary))
        size += len(piece.encode())
        if size > left:
            break
        out.append(piece)
        n += after - i
    return "".join(out), size, n


def _thumbnail(image: Any, tokens: int, left: int) -> str:
    """Return HTML of an image with its size and number of tokens; the image is left out if it exceeds `left` bytes."""
    title = f"{image}, {count(tokens, 'token')}"
    if not image.preview or len(image.preview) > left:
        return escape(title)
    return tag(
        "img",
        src=image.preview,
        alt=title,
        title=title,
        style="max-height:48px;max-width:120px;vertical-align:middle",
    )


def _line(piece: str) -> str:
    """Return the text of a token as HTML that allows line breaks before the characters that represent spaces."""
    return re.sub("·+", r"<wbr>\g<0>", escape(visible(piece, 400) + ("\n" if "\n" in piece else "")))


def _unstyled(text: str) -> str:
    """Return HTML that is visible only if inline styles, and therefore all colours, are removed, as on GitHub."""
    return f'<span style="display:none">{text}</span>' if text else ""


def _raised(value: float, summary: dict[str, Any]) -> str:
    """Return a superscript digit that shows the position of a value on its scale, as the colour of `_shade` does."""
    if np.isnan(value):
        return "ˣ"
    if summary["scale"] == "flag":
        return "ꜝ" if value > 0 else ""
    share, up = fraction(value, summary)
    level = round(9 * share)
    sign = "" if summary["scale"] != "around" or not level else "⁺" if up else "⁻"
    return sign + _RAISED[level]


def _text_legend(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "⟦ ⟧ enclose tokens with mask 1, which the policy sampled. All other tokens have mask 0."
    label, unit = summary["label"], f" {summary['unit']}" if summary["unit"] else ""
    if summary["scale"] == "flag":
        return f"ꜝ after a token: {label}. ˣ: missing."
    elif "lo" not in summary:
        marks = f"no token has a finite {label}"
    else:
        lo, hi, middle = (number(summary[name]) + unit for name in ("lo", "hi", "middle"))
        marks = f"⁰ to ⁹ after a token: {label} from {lo} to {hi}"
        if summary["scale"] == "around":
            marks = f"⁻⁹ to ⁺⁹ after a token: {label} from {lo} to {hi}, ⁰ is {middle}"
        elif summary["scale"] == "down":
            marks = f"⁰ to ⁹ after a token: {label} from {hi} down to {lo}"
    return f"{marks}. ˣ: missing. Tokens without a mark were not sampled."


def _alternatives(row: Row, i: int) -> str:
    """Return a table cell with the three most probable tokens at a position, if they were recorded."""
    if not row.alternatives:
        return ""
    best = (
        f"<code>{escape(visible(text))}</code> {100 * math.exp(lp):.1f} %" for _, text, lp in row.alternatives[i][:3]
    )
    return f"<td>{', '.join(best)}</td>"


def _shade(value: float, summary: dict[str, Any]) -> str:
    if np.isnan(value):
        return "border:1px dotted #888888"
    if summary["scale"] == "flag":
        return f"background-color:rgba({_ORANGE},0.45);border-bottom:3px solid #c87830" if value > 0 else ""
    share, up = fraction(value, summary)
    # The underline shows the same value as the tint, for readers who cannot distinguish colours.
    line = round(share * 4)
    colour, border = (_BLUE, "solid #2878dc") if up else (_ORANGE, "double #c87830")
    under = f";border-bottom:{line}px {border}" if line else ""
    return f"background-color:rgba({colour},{0.4 * share:.2f}){under}"


def fraction(value: float, summary: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the distance of a value from the middle of its scale (0 to 1), and True if it is above the middle."""
    lo, hi = summary.get("lo", 0.0), summary.get("hi", 1.0)
    if np.isinf(value):
        full = summary["scale"] == "around" or (value > 0) == (summary["scale"] == "up")
        return float(full), bool(value > 0)
    if summary["scale"] == "around":
        reach = hi - summary["middle"]
        return min(1.0, abs(value - summary["middle"]) / reach) if reach > 0 else 0.0, bool(
            value >= summary["middle"]
        )
    share = min(1.0, max(0.0, (value - lo) / (hi - lo))) if hi > lo else 1.0
    return (1.0 - share, False) if summary["scale"] == "down" else (share, True)


def _telling(rows: list[Row], signal: str, summary: dict[str, Any], n: int = 8) -> list[tuple[Row, int]]:
    found = [
        (row, int(i)) for row in rows if signal in row.signals for i in np.flatnonzero(~np.isnan(row.signals[signal]))
    ]
    keys = {
        "low": lambda v: v,
        "high": lambda v: -v,
        "far": lambda v: -abs(v - summary["middle"]),
    }
    return sorted(found, key=lambda at: keys[summary["telling"]](float(at[0].signals[signal][at[1]])))[:n]


def _legend_line(about: dict[str, Any], summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "; ".join(
            f"{kind} by {author}: {count(n, 'token')}, mask {'1' if on == n else '0' if not on else f'1 on {on}'}"
            for kind, author, n, on in about["authors"]
        )
    unit = f" {summary['unit']}" if summary["unit"] else ""
    if "min" not in summary:
        return f"{summary['label']}: missing on all {count(summary['missing'], 'sampled token')}"
    missing = f"; missing on {summary['missing']} sampled" if summary["missing"] else ""
    return (
        f"{summary['label']}: {number(summary['min'])} to {number(summary['max'])}{unit}, "
        f"mean {number(summary['mean'])}, on {count(summary['n'], 'token')}{missing}"
    )


def _row_line(row: Row) -> str:
    reward = "unscored" if row.reward is None else f"reward {number(float(row.reward))}"
    at = f" · from token {row.start}" if row.start else ""
    return f" · {reward} · {row.stop} · {count(len(row.ids), 'token')}, {int(row.mask.sum())} trained{at}"
