"""Tool-call formats: rendering tool calls to text, and parsing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentfly_kit.chat.formats.bare_json import Llama3, Mistral
from agentfly_kit.chat.formats.base import Format, Parsed
from agentfly_kit.chat.formats.hermes import Hermes
from agentfly_kit.chat.formats.plain import FencedCode, ReAct, Tags
from agentfly_kit.chat.formats.qwen_xml import QwenXML
from agentfly_kit.errors import SettingsError

__all__ = [
    "FencedCode",
    "Format",
    "Hermes",
    "Llama3",
    "Mistral",
    "Parsed",
    "QwenXML",
    "ReAct",
    "Tags",
    "detect_format",
    "get",
]

NAMES = ("action", "code", "hermes", "llama3", "mistral", "qwen3_coder", "react", "search")


def get(name: str | Format) -> Format:
    """Return the format of that name. A `Format` object is returned unchanged.

    Raises:
        SettingsError: for an unknown name.
    """
    if isinstance(name, Format):
        return name
    formats: dict[str, Format] = {
        "action": Tags("action", "action", "act", "action", "observation"),
        "code": FencedCode(),
        "hermes": Hermes(),
        "llama3": Llama3(),
        "mistral": Mistral(),
        "qwen3_coder": QwenXML(),
        "react": ReAct(),
        "search": Tags("search", "search", "search", "query", "information"),
    }
    if not isinstance(name, str) or name not in formats:
        raise SettingsError(
            f"format={name!r} is not known; use one of {', '.join(sorted(formats))}, or a subclass of formats.Format"
        )
    return formats[name]


def reads(format: Format, write: Callable[[str, dict[str, Any]], str]) -> bool:
    """Return True if the format parses a call rendered by `write` completely and correctly."""
    name, arguments = "get_weather", {"city": "Paris, in France"}
    parsed = format.parse(write(name, arguments))
    return [(c.name, c.arguments, c.error) for c in parsed.calls] == [(name, arguments, None)] and not parsed.content


def detect_format(write: Callable[[str, dict[str, Any]], str]) -> Format | None:
    """Return the only format that parses calls as a chat template renders them; None for none or several."""
    found = [format for format in map(get, NAMES) if format.native and reads(format, write)]
    return found[0] if len(found) == 1 else None
