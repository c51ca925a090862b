"""`check`, which analyzes a chat template, and its result, `ChatReport`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentfly_kit._display import Displayable
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import ChatTemplateError


@dataclass(frozen=True)
class ChatReport(Displayable):
    """Properties of a chat template, as reported by `check`.

    Attributes:
        name: Name of the tokenizer.
        exact: True if tool results and user messages can be appended without changing earlier text.
        tool_results: "exact", or the reason why tool results cannot be appended.
        user_messages: "exact", or the reason why a user message after an answer cannot be appended.
        tool_role: Role with which tool results are rendered.
        tools: True if the template renders tool schemas; otherwise, the format's instructions are added to the prompt.
        format: Name of the format that parses calls rendered by the template, or "".
        stop: Token that ends an answer.
        stops: All tokens that end an action.
        generation_prompt: Text before the first sampled token. Some templates open or close thinking in it.
        boundary: Text between the last character of an action and the first character of a tool result.
        thinking: Treatment of earlier thinking in rendered history: "kept", "kept until a user speaks", "dropped" or
            "unknown".
        whitespace: Treatment of whitespace around answers in rendered history: "kept" or "trimmed". Rows keep this
            whitespace.
    """

    name: str
    exact: bool
    tool_results: str
    user_messages: str
    tool_role: str
    tools: bool
    format: str
    stop: str
    stops: tuple[str, ...]
    generation_prompt: str
    boundary: str
    thinking: str
    whitespace: str

    def __repr__(self) -> str:
        violations = f"tool: {self.tool_results}; user: {self.user_messages}"
        return f"ChatReport({self.name!r}, {'exact' if self.exact else violations})"


def check(tokenizer: Any, **settings: Any) -> ChatReport:
    """Analyze a chat template.

    Args:
        tokenizer: a tokenizer or a `Chat`.
        **settings: arguments of `Chat`.

    Returns:
        A report, which notebooks show as a table.

    Raises:
        ChatTemplateError: if no `Chat` can be created.
    """
    chat = tokenizer if isinstance(tokenizer, Chat) else Chat(tokenizer, **settings)
    template = chat.template
    tool, user = chat.append_violation("tool"), chat.append_violation("user")
    adapted = chat._adapt_messages(
        [{"role": "tool", "name": "probe", "tool_call_id": "call-0", "content": "qztoolzq"}]
    )
    try:
        boundary = template.text_after_action(adapted).partition("qztoolzq")[0]
    except ChatTemplateError:
        boundary = ""
    return ChatReport(
        name=template.name,
        exact=not tool and not user,
        tool_results=tool or "exact",
        user_messages=user or "exact",
        tool_role="user" if chat._results_as_user else "tool",
        tools=template.shows_tools,
        format=chat.detected_format.name if chat.detected_format else "",
        stop=chat.token_texts(chat.stop_ids)[0],
        stops=chat.token_texts(chat.stop_ids),
        generation_prompt=template.opening(),
        boundary=boundary,
        thinking=template.thinking_kept(),
        whitespace="kept" if template.whitespace_kept() else "trimmed",
    )
