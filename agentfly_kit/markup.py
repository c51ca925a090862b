"""HTML of small tables, as a notebook shows them: inline styles only, readable on a light and on a dark ground.

Knows none of the records. Text is escaped here, and only here: what a model or a tool wrote is never HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEFT = "text-align:left;vertical-align:top"
CODE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


class Code(str):
    """Text for a table's cell, in the font of code, with its lines kept."""


def readable(text: str, limit: int) -> str:
    """Blanks and new lines stay; what cannot be seen, turns its neighbours, or cannot be sent, is its number."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return "".join(ch if ch.isprintable() or ch in "\n\t" else f"‹U+{ord(ch):04X}›" for ch in text)


def escape(text: Any, limit: int = 400) -> str:
    return html.escape(readable(str(text), limit), quote=True)


def cell(value: Any, limit: int = 400) -> str:
    """Numbers stand on the right, text on the left; None is a dash."""
    if value is None:
        return "<td style='text-align:right'>–</td>"
    if isinstance(value, bool):
        return f"<td style='{LEFT}'>{'yes' if value else 'no'}</td>"
    if isinstance(value, int):
        return f"<td style='text-align:right'>{value:,}</td>"
    if isinstance(value, float):
        return f"<td style='text-align:right'>{value:.4g}</td>"
    if isinstance(value, Code):
        return f"<td style='{LEFT}'><code style='{CODE}'>{escape(value, limit)}</code></td>"
    return f"<td style='{LEFT}'>{escape(value, limit)}</td>"


def heading(text: Any) -> str:
    return f"<div style='font-weight:bold;margin:2px 0 4px'>{escape(text, 600)}</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], limit: int = 400) -> str:
    """Rows of cells under a head; "" for no head at all."""
    top = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(cell(value, limit) for value in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def facts(title: Any, pairs: Mapping[str, Any], limit: int = 400) -> str:
    """A heading, and a line a fact."""
    return heading(title) + table((), pairs.items(), limit)


def folded(summary: str, inside: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{inside}</details>"
