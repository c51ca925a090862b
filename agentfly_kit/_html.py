"""HTML for small tables in notebooks, with inline styles only, readable in light and dark themes.

All text is escaped here and nowhere else, so that the output of models and tools is never interpreted as HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEFT = "text-align:left;vertical-align:top"
RIGHT = "text-align:right;vertical-align:top"
CODE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


class Code(str):
    """Text of a table cell in monospace, with line breaks preserved."""


def escape_control_chars(text: str, limit: int) -> str:
    """Truncate to `limit` characters, and replace all non-printable characters except newline and tab by code points.

    This covers invisible characters, text-direction controls and surrogates, which cannot be encoded.
    """
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return "".join(ch if ch.isprintable() or ch in "\n\t" else f"‹U+{ord(ch):04X}›" for ch in text)


def escape(text: Any, limit: int = 400) -> str:
    return html.escape(escape_control_chars(str(text), limit), quote=True)


def cell(value: Any, limit: int = 400) -> str:
    """Return a table cell: numbers right-aligned, text left-aligned, and a dash for None and NaN."""
    if value is None or (isinstance(value, float) and value != value):
        return f"<td style='{RIGHT}'>–</td>"
    if isinstance(value, bool):
        return f"<td style='{LEFT}'>{'yes' if value else 'no'}</td>"
    if isinstance(value, int):
        return f"<td style='{RIGHT}'>{value:,}</td>"
    if isinstance(value, float):
        return f"<td style='{RIGHT}'>{value:.4g}</td>"
    if isinstance(value, Code):
        return f"<td style='{LEFT}'><code style='{CODE}'>{escape(value, limit)}</code></td>"
    return f"<td style='{LEFT}'>{escape(value, limit)}</td>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def heading(text: Any) -> str:
    return f"<div style='font-weight:bold;margin:2px 0 4px'>{escape(text, 600)}</div>"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]], limit: int = 400) -> str:
    """Return a table with headings aligned like their columns; an empty `head` gives a table without headings."""
    cells = [list(row) for row in rows]
    right = [any(_is_number(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    top = "".join(
        f"<th style='text-align:{'right' if aside else 'left'}'>{escape(name)}</th>"
        for name, aside in zip(head, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(cell(value, limit) for value in row)}</tr>" for row in cells)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def definition_table(title: Any, pairs: Mapping[str, Any], limit: int = 400) -> str:
    """Return a heading and a table with one row per name and value; all values, including numbers, are left-aligned."""
    formatted = {
        k: f"{v:,}" if _is_number(v) and isinstance(v, int) else f"{v:.4g}" if _is_number(v) else v
        for k, v in pairs.items()
    }
    return heading(title) + table((), formatted.items(), limit)


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"
