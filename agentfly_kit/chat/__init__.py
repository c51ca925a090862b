"""Messages to token ids and back: the chat template, tool-call formats, and the check of both."""

from __future__ import annotations

from agentfly_kit.chat.chat import Chat, ChatReport, Drift, check

__all__ = ["Chat", "ChatReport", "Drift", "check"]
