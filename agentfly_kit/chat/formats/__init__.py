"""Tool-call formats, which render tool calls as text and parse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentfly_kit.chat.formats.base import Format, Parsed
from agentfly_kit.chat.formats.markup import GLM4, LFM2, Gemma4, QwenXML
from agentfly_kit.chat.formats.native import DeepSeek, GptOss, Hermes, Llama3, Mistral
from agentfly_kit.chat.formats.plain import FencedCode, ReAct, Tags
from agentfly_kit.errors import SettingsError

__all__ = [
    "GLM4", "LFM2", "DeepSeek", "FencedCode", "Format", "Gemma4", "GptOss", "Hermes", "Llama3", "Mistral", "Parsed",
    "QwenXML", "ReAct", "Tags", "detect_format", "get",
]  # fmt: skip

_FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Tags("action", "action", "act", "action", "observation"),
        FencedCode(),
        DeepSeek("deepseek_v3", fenced=True),
        DeepSeek("deepseek_v31", fenced=False),
        Gemma4(),
        GLM4(),
        GptOss(),
        Hermes(),
        LFM2(),
        Llama3(),
        Mistral(),
        QwenXML(),
        ReAct(),
        Tags("search", "search", "search", "query", "information"),
    )
}
NAMES = tuple(_FORMATS)
NATIVE = tuple(format for format in _FORMATS.values() if format.native)


def get(name: str | Format) -> Format:
    """Return the format with the given name. A `Format` object is returned unchanged."""
    if isinstance(name, Format):
        return name
    if name not in NAMES:
        raise SettingsError(
            f"format must be one of {', '.join(NAMES)}, or a subclass of formats.Format, got {name!r}"
        )
    return _FORMATS[name]


def detect_format(write: Callable[[str, dict[str, Any]], str]) -> Format | None:
    """Return the native format that parses a call rendered by `write`, or None if there is not exactly one."""
    name, arguments = "get_weather", {"city": "Paris, in France"}
    text = write(name, arguments)
    found = []
    for format in NATIVE:
        parsed = format.parse(text)
        calls = [(call.name, call.arguments, call.error) for call in parsed.calls]
        if calls == [(name, arguments, None)] and not parsed.content:
            found.append(format)
    return found[0] if len(found) == 1 else None
