"""HTML of small tables, as a notebook shows them: inline styles only, readable on a light and on a dark ground.

Knows none of the records. Text is escaped here, and only here: what a model or a tool wrote is never HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEFT = "text-align:left;vertical-align:top"
RIGHT = "text-align:right;vertical-align:top"
CODE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


class Code(str):
    """Text for a table's cell, in the font of code, with its lines kept."""


def escape_control_chars(text: str, limit: int) -> str:
    """Blanks and new lines stay; what cannot be seen, turns its neighbours, or cannot be sent, is its number."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return "".join(ch if ch.isprintable() or ch in "\n\t" else f"‹U+{ord(ch):04X}›" for ch in text)


def escape(text: Any, limit: int = 400) -> str:
    return html.escape(escape_control_chars(str(text), limit), quote=True)


def cell(value: Any, limit: int = 400) -> str:
    """Numbers stand on the right, text on the left; what is missing, None or NaN, is a dash."""
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
    """Rows of cells under a head, which stands as its column does; an empty head is none at all."""
    cells = [list(row) for row in rows]
    right = [any(_is_number(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    top = "".join(
        f"<th style='text-align:{'right' if aside else 'left'}'>{escape(name)}</th>"
        for name, aside in zip(head, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(cell(value, limit) for value in row)}</tr>" for row in cells)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def definition_table(title: Any, pairs: Mapping[str, Any], limit: int = 400) -> str:
    """A heading, and a line a fact. Numbers stand where the other facts do: no two are to be added up."""
    formatted = {
        k: f"{v:,}" if _is_number(v) and isinstance(v, int) else f"{v:.4g}" if _is_number(v) else v
        for k, v in pairs.items()
    }
    return heading(title) + table((), formatted.items(), limit)


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"
