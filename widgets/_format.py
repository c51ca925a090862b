"""Formatting of numbers and text for views."""

from __future__ import annotations

import html
import json
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly_kit.types import images_of

# Tooltip shown by all views that display success.
SUCCESS_RULE = (
    "A chain succeeds if its metric 'success', recorded by Agent(success=) or a reward, is not 0. Without this metric, "
    "it succeeds if its reward is at least 1."
)


def pack(values: npt.ArrayLike) -> dict[str, bytes]:
    """Encode numbers as float32 bytes and a bit mask of the values that are present. NaN marks a missing value.

    The mask is needed because JSON cannot represent NaN, and a missing number must not become 0.
    """
    array = np.asarray(values, dtype=np.float32).ravel()
    present = ~np.isnan(array)
    return {
        "values": np.where(present, array, np.float32(0)).astype("<f4").tobytes(),
        "present": np.packbits(present, bitorder="little").tobytes(),
    }


def pictures(messages: Any) -> list[list[str]]:
    """Return a pair [source, description] for each image in the messages. The source is "" if there is no preview."""
    return [[image.preview, str(image)] for image in images_of(messages)]


def picture(source: str, text: str) -> str:
    return tag("img", src=source, alt=text, style="max-width:240px;max-height:240px") if source else escape(text)


def number(value: float | None) -> str:
    """Format a number for display. A missing number becomes a dash."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        text = format(_round(value, 4), "f")
        return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
    mantissa, _, exponent = f"{_round(value, 3):.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def _round(value: float, digits: int) -> Decimal:
    """Round to significant digits, with halves rounded up as in JavaScript: 21.125 becomes 21.13, not 21.12."""
    return Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(float(value))


def sparkline(values: npt.ArrayLike, width: int = 24) -> str:
    """Draw a curve as text, from ▁ (lowest) to █ (highest), with a dot where no value is finite.

    Unlike images, text is not removed by sites such as GitHub. Longer curves are averaged to `width` characters.
    """
    array = np.asarray(values, np.float64).ravel()
    parts = [part[np.isfinite(part)] for part in np.array_split(array, max(1, min(width, len(array))))]
    means = [float(part.mean()) if len(part) else np.nan for part in parts]
    low, high = (np.nanmin(means), np.nanmax(means)) if np.isfinite(means).any() else (0.0, 0.0)
    step = (high - low) / 7 or 1.0
    return "".join("·" if np.isnan(mean) else "▁▂▃▄▅▆▇█"[round((mean - low) / step)] for mean in means)


def count(n: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 token", "2,000 tokens"."""
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def tag(name: str, *content: str, **attributes: str) -> str:
    """Return an HTML element. Attributes are escaped; content must be HTML, so pass text through `escape` first."""
    inside = "".join(f' {key}="{html.escape(value, quote=True)}"' for key, value in attributes.items())
    return f"<{name}{inside}>{''.join(content)}</{name}>"


def escape(text: str) -> str:
    """Escape text for HTML. Lone surrogates, which UTF-8 cannot encode, become escape sequences."""
    safe = "".join(f"\\u{ord(ch):04x}" if 0xD800 <= ord(ch) <= 0xDFFF else ch for ch in text)
    return html.escape(safe.replace("\x00", "␀"), quote=True)


def sendable(text: str) -> str:
    """Replace lone surrogates with escape sequences, so that every JSON and UTF-8 encoder accepts the text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_text(value: Any) -> str:
    """Return readable JSON. Non-ASCII characters are escaped only if the value contains lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text == sendable(text) else json.dumps(value, default=str)


def shared_prefix(names: list[str]) -> int:
    """Return the length of the longest common prefix that ends with ":" or "-", such as "rollout-0:calc-"."""
    if len(names) < 2:
        return 0
    first, last = min(names), max(names)  # a common prefix of these two is common to all names
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(first.rfind(":", 0, n), first.rfind("-", 0, n)) + 1
