"""How a tool call is written in text and parsed back. A format knows text only: no tokens, no tools, no models."""

from __future__ import annotations

from agentfly_kit.errors import SettingsError
from agentfly_kit.formats.base import Format, Parsed
from agentfly_kit.formats.hermes import Hermes

__all__ = ["Format", "Hermes", "Parsed", "get"]


def get(name: str | Format) -> Format:
    """The format of that name; a format object (yours, say) is given back as it is."""
    if not isinstance(name, str):
        return name
    formats: dict[str, Format] = {"hermes": Hermes()}
    if name not in formats:
        raise SettingsError(
            f"format={name!r} is not known; give one of {', '.join(sorted(formats))}, or an object with parse(text)"
        )
    return formats[name]
