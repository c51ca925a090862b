"""Conversion between messages and token ids: chat templates, tool-call formats, and checks for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfly_kit.chat.chat import Chat

if TYPE_CHECKING:
    from agentfly_kit.chat.drift import Drift
    from agentfly_kit.chat.report import ChatReport, check

__all__ = ["Chat", "ChatReport", "Drift", "check"]


def __getattr__(name: str) -> Any:
    """Load the checks on first use, because agents do not need them."""
    if name not in __all__:
        raise AttributeError(f"agentfly_kit.chat has no {name!r}")
    from agentfly_kit.chat.drift import Drift
    from agentfly_kit.chat.report import ChatReport, check

    return {"ChatReport": ChatReport, "Drift": Drift, "check": check}[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
