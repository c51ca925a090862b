"""Conversion of message logs of other projects to messages in the format of the OpenAI API, and to token ids.

Layouts, by the columns of a row:

messages              OpenAI, ART, and Anthropic, whose content consists of blocks; the column "system" is the system
                      message
messages_and_choices  ART before it wrote Parquet files; a row with "trajectories" is a group of trajectories
conversations         ShareGPT, with "from" and "value"
segments              AgentFly: one conversation for each context of the agent
name, value           an event of AgentFly's JSONL monitor, whose value is the JSON of segments
samples               a JSON log of Inspect, with one conversation and its scores per sample
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import AgentFlyError, TaskError
from agentfly_kit.integrations.html import is_number
from agentfly_kit.types import Message, Turn, text_of

_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
# Content blocks that become other parts of the same message, or separate messages.
_BLOCKS = {"tool_use", "tool_result", "thinking", "reasoning", "redacted_thinking"}
# Columns that contain or identify a conversation. Metadata of ART and infos of AgentFly may have the same names.
_RESERVED = {"messages", "conversations", "system", "tools", "tool_defs", "id", "example_id", "step", "error"}
# Values of a score in Inspect.
_INSPECT_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}


def conversations(columns: dict[str, Any], location: str) -> list[list[Any]] | None:
    """Remove the conversations from the columns of a row, and return the messages of each, or None if there are none.

    In messages of ART, "trainable" is True if the policy sampled them and False otherwise.
    """
    _unpack(columns)
    segments: list[list[Any]] = []
    if isinstance(columns.get("conversations"), list):
        segments = [[_from_sharegpt(message, location) for message in columns.pop("conversations")]]
    elif isinstance(columns.get("messages_and_choices"), list):
        segments = [[_from_choice(each) for each in columns.pop("messages_and_choices")]]
    elif isinstance(columns.get("messages"), list):
        segments = [columns.pop("messages")]
    elif isinstance(columns.get("segments"), list):
        segments = [list(segment) for segment in columns.pop("segments") if isinstance(segment, list)]
    if not segments:
        return None
    segments = [[m for message in segment for m in _without_blocks(message)] for segment in segments]
    if columns.get("system"):
        segments[0].insert(0, {"role": "system", "content": _join_blocks(columns.pop("system"))})
    return segments


def art_trajectories(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each trajectory of a group of ART."""
    for trajectory in columns["trajectories"]:
        yield {**dict(trajectory), "group_metadata": columns.get("metadata")}


def read_monitor(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) for each chain in a file of AgentFly's JSONL monitor, with the chain's infos.

    The monitor writes the infos of a chain, such as its reward, to a second file, in the same order.
    """
    others = file.with_name("agent-rollout-info.jsonl")
    infos = dict(enumerate(row for _, row in task_files.read_rows(others))) if others.is_file() else {}
    for number, (location, row) in enumerate(task_files.read_rows(file)):
        if isinstance(row, Mapping) and isinstance(info := infos.get(number), Mapping):
            row = {**row, "info": info.get("value")}
        yield location, row


def _unpack(columns: dict[str, Any]) -> None:
    """Replace JSON texts and dicts in rows of ART and AgentFly by separate columns."""
    if str(columns.get("name")).startswith("agent/rollout/") and isinstance(columns.get("value"), str):
        value, info, step = json.loads(columns["value"]), columns.get("info"), columns.get("x")
        columns.clear()
        columns |= {"info": info, "step": step, **(value if isinstance(value, dict) else {"segments": value})}
    if columns.keys().isdisjoint({"segments", "messages_and_choices", "group_index"}):  # row of another project
        return
    for name in ("info", "metadata", "metrics", "reward"):
        given = columns.get(name)
        given = json.loads(given) if isinstance(given, str) and given.startswith("{") else given
        if isinstance(given, dict):
            del columns[name]
            columns |= {key: value for key, value in given.items() if key not in {*columns, *_RESERVED}}


def _from_choice(given: Any) -> Any:
    """Return a message, marked as trainable if it is in a choice, as ART records messages that the policy sampled."""
    if isinstance(given, Mapping) and isinstance(given.get("message"), Mapping):
        return {**given["message"], "trainable": True}
    return {**given, "trainable": False} if isinstance(given, Mapping) else given


def inspect_samples(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row with messages and numbers for each sample of an Inspect log."""
    for sample in columns["samples"]:
        row = dict(sample.get("metadata") or {})
        row["id"], row["messages"] = sample["id"], sample["messages"]
        row["answer"], row["error"] = sample.get("target"), sample.get("error")
        numbers = []
        for name, score in (sample.get("scores") or {}).items():
            value = score["value"]
            row[name] = _INSPECT_VALUES.get(value, value) if isinstance(value, str) else value
            if is_number(row[name]):
                numbers.append(row[name])
        if numbers:
            row["reward"] = sum(numbers) / len(numbers)
        yield row


def _from_sharegpt(given: Any, location: str) -> Message:
    given = given if isinstance(given, Mapping) else {}
    sender, text = given.get("from"), given.get("value")
    if sender not in _SHAREGPT_ROLES:
        raise TaskError(f"{location}: 'from' must be one of {', '.join(_SHAREGPT_ROLES)}, got {sender!r:.60}")
    message: Message = {"role": _SHAREGPT_ROLES[sender], "content": text}
    if sender == "function_call":
        try:
            calls = json.loads(text)
        except (TypeError, ValueError):
            raise TaskError(f"{location}: a function_call must contain JSON, got {text!r:.60}") from None
        if not isinstance(calls, list):
            calls = [calls]
        message |= {"content": "", "tool_calls": calls}
    return message


def _without_blocks(message: Any) -> Iterator[Any]:
    """Yield the messages that result from a message whose content may consist of Anthropic's blocks."""
    content = message.get("content") if isinstance(message, Mapping) else None
    blocks = content if isinstance(content, list) else []
    kinds = [block.get("type") if isinstance(block, Mapping) else None for block in blocks]
    if not _BLOCKS.intersection(kinds):
        yield message
        return
    calls, thoughts, rest = [], [], []
    for kind, block in zip(kinds, blocks, strict=True):
        if kind == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": _join_blocks(block.get("content")),
            }
        elif kind == "tool_use":
            calls.append({"id": block["id"], "function": {"name": block["name"], "arguments": block["input"]}})
        elif kind in ("thinking", "reasoning"):
            thoughts.append(block[kind])
        elif kind != "redacted_thinking":
            rest.append(block)
    if rest or calls or message["role"] == "assistant":
        out = {**message, "content": rest or ""}
        if calls:
            out["tool_calls"] = calls
        if thoughts:
            out["reasoning_content"] = "\n".join(thoughts)
        yield out


def _join_blocks(content: Any) -> Any:
    """Return the content of a tool result or a system message, with a list of text blocks joined."""
    if isinstance(content, list) and all(isinstance(b, Mapping) and "text" in b for b in content):
        return "".join(block["text"] for block in content)
    return content if content is not None else ""


# --- token ids -----------------------------------------------------------------------------------


def encoded(
    turns: Sequence[Turn],
    tools: Sequence[dict[str, Any]],
    chat: Chat,
    location: str,
) -> list[Turn]:
    """Return the turns of a conversation with the token ids that an agent with this chat would produce.

    Actions consist of the text that the chat template renders for the message, and a stop token. No turn is marked as
    sampled.

    Raises:
        TaskError: If the chat cannot render the conversation, a call has no result or invalid arguments, or there is no
            action.
    """
    out: list[Turn] = []
    if all(turn.kind != "action" for turn in turns):
        raise TaskError(f"{location}: to be encoded, a conversation must have a message that the policy sampled")
    try:
        for i, turn in enumerate(turns):
            before = out[-1] if out else None
            row = before.row if before else 0
            history = [m for t in out if t.row == row for m in t.messages]
            if turn.kind == "action":
                ids = _action_ids(chat, history, turn, tools)
            elif turn.kind == "prompt" or chat.needs_rerender(turn.messages):
                if turn.kind == "observation":
                    _require_results(before, turn)
                    turn = replace(turn, kind="prompt", messages=(*history, *turn.messages))
                row = row + 1 if before else 0
                ids = chat.prompt(turn.messages, tools)
            else:
                _require_results(before, turn)
                ids = ()
                # No engine receives the observation after the last action of a row.
                if i + 1 < len(turns) and turns[i + 1].kind != "prompt":
                    ids = chat.observation_ids(turn.messages, tools, after=(before and before.ids) or ())
            if ids:
                turn = replace(turn, text=chat.text(ids), token_texts=chat.token_texts(ids))
            out.append(replace(turn, ids=ids, parent=before, row=row))
    except AgentFlyError as error:
        raise TaskError(f"{location}: the chat cannot encode the conversation: {error}") from error
    return out


def _require_results(before: Turn | None, turn: Turn) -> None:
    if before is None:
        return
    missing = {call.id for call in before.tool_calls} - {call.id for call in turn.tool_calls}
    if missing:
        raise TaskError(f"the calls {', '.join(sorted(missing))} must have results")


def _action_ids(
    chat: Chat,
    history: list[Message],
    turn: Turn,
    tools: Sequence[dict[str, Any]],
) -> tuple[int, ...]:
    (message,) = turn.messages
    for call in turn.tool_calls:
        if call.error is not None:
            raise TaskError(f"the call {call.id} of {call.name} is invalid: {call.error}")
    prompt = chat.template.render(*chat._prepare(history, tools), generate=True)
    whole = chat.template.render(*chat._prepare([*history, message], tools), generate=False)
    text = whole.removeprefix(prompt)
    end, stop = max(((text.rfind(stop), stop) for stop in chat.template.stops()), default=(-1, ""))
    if text == whole:  # the template renders the history differently
        text, end = chat._with_written_calls(message)["content"], -1
        if chat._open_tag:
            text = f"{message.get('thinking') or ''}\n</think>\n\n{text}"
    if end < 0:  # there is no end-of-turn token
        (stop,) = chat.token_texts(chat.stop_ids[:1])
        end = len(text)
    ids = (*chat.encode(text[:end]), *chat.encode(stop))
    parsed = chat.parse(ids, tools)
    wanted = [(call.name, call.arguments) for call in turn.tool_calls]
    found = [(call.name, call.arguments) for call in parsed.calls]
    if parsed.content.strip() != text_of(message).strip() or found != wanted:
        raise TaskError(
            f"an action is rendered as {text[:end]!r:.200}, which would not be parsed as the same message"
        )
    return ids
