"""Conversion between messages and token ids: chat templates, tool-call formats, and checks of both."""

from __future__ import annotations

from agentfly_kit.chat.chat import Chat, ChatReport, Drift, check

__all__ = ["Chat", "ChatReport", "Drift", "check"]
