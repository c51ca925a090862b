"""Read rollouts saved by other projects, so that the views of this package can show them.

The columns of a row determine its layout:

messages, conversations, segments, samples, ...
                               logs of messages; see message_logs.py
prompt, completion             TRL (`log_completions=True`) and results.jsonl of verifiers before 0.2
input, output                  verl (`trainer.rollout_data_dir`)
input_prompt, output_response  SkyRL (`trainer.dump_eval_results`)
traces                         traces.jsonl of verifiers, with token ids
prompt_ids, completion_ids     token ids of any program
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.turns import with_calls
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import AgentFlyError, TaskError
from agentfly_kit.integrations.html import is_number
from agentfly_kit.integrations.message_logs import (
    art_trajectories,
    conversations,
    encoded,
    inspect_samples,
    read_monitor,
)
from agentfly_kit.seeds import digest
from agentfly_kit.tools.tool import ToolSet
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Failure, Message, Task, ToolCall, ToolResult, Turn, text_of

# File to which AgentFly's monitor writes the messages of chains.
_MONITOR = "agent-rollout-trajectory.jsonl"
# Names that programs use for columns with token ids: prompt, completion, mask of sampled tokens, logprobs.
_ID_COLUMNS = (
    ("prompt_ids", "prompt_token_ids"),
    ("completion_ids", "response_ids"),
    ("completion_mask", "response_mask", "loss_mask", "loss_masks"),
    ("logprobs", "rollout_logprobs"),
)
# Columns that become neither metrics of a chain nor fields of its task.
_OTHERS = {
    "step", "example_id", "id", "stop_condition", "stop_reason", "finish_reason", "is_completed", "is_truncated",
    "error", "metrics", "timing",
}  # fmt: skip


def read_rollouts(
    source: Any, *, reward: str | Sequence[str] | None = None, chat: Chat | None = None, tools: Any = ()
) -> Rollout:
    """Read rollouts saved by another project, or a log of messages, for display, analysis or imitation.

    With `chat`, messages are encoded as an agent with this chat would encode them, so that `af.imitate` can train on
    their actions. Otherwise, trajectories without token ids can be shown in `TrajectoryView`, but not in `TokenView`,
    and cannot be trained on. Chains with the same prompt (and the same training step) form a group.

    Args:
        source: A .parquet, .jsonl, .json or .csv file, a folder of .parquet or .jsonl files, or rows in memory: a
            DataFrame, a `datasets.Dataset` or a list of dicts. A row has the columns "prompt" and "completion" (TRL,
            verifiers), "input" and "output" (verl), "input_prompt" and "output_response" (SkyRL), "messages" (OpenAI,
            Anthropic, ART), "conversations" (ShareGPT), "segments" (AgentFly), "samples" (Inspect), "traces"
            (verifiers), or token ids: "prompt_ids" and "completion_ids", optionally with "completion_mask" (1 at
            sampled tokens) and "logprobs", of the same length as "completion_ids". Such rows count as sampled by
            version 0 of the policy; `ppo_step` with a later version needs PPOConfig(max_lag=None). The column "tools"
            contains the tool schemas.
        reward: Column, or columns whose sum is the reward. By default, the reward is the column "reward" or "score". In
            a verifiers trace, it is the weighted sum of the rewards; in a TRL table, which contains no weights, it is
            the sum of all numbers between "completion" and "advantage". Other numbers become metrics, and other values
            become fields of the task.
        chat: Chat of the policy. It encodes messages, and decodes recorded token ids, which `TokenView` otherwise shows
            as numbers. Prompts and outputs that are saved as text are not encoded.
        tools: The agent's tools. Their descriptions are part of the prompts of rows without a column "tools".

    Raises:
        TaskError: If a file cannot be read, a row does not have these columns, or `chat` cannot render a conversation.
            The message names the file and line.
    """
    names = (reward,) if isinstance(reward, str) else None if reward is None else tuple(reward)
    chains: list[Trajectory] = []
    schemas = (tools if isinstance(tools, ToolSet) else ToolSet(tools)).schemas
    count: Counter[str] = Counter()
    for location, row in _rows(source):
        try:
            for record in _records(row, location, chat):
                t = _trajectory(record, names, location, chat, schemas)
                chains.append(replace(t, id=f"{t.group}/{count[t.group]}", chain=count[t.group]))
                count[t.group] += 1
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, AgentFlyError):
                raise
            raise TaskError(
                f"{location}: the row is damaged or has an unsupported layout ({type(error).__name__}: {error})"
            ) from error
    if not chains:
        raise TaskError("source must have at least one row, got none")
    return Rollout.from_trajectories(chains)


def _rows(source: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str | Path):
        yield from task_files.locate_rows(source, "rows")
        return
    path = Path(source).expanduser()
    monitor = path if path.name == _MONITOR else path / _MONITOR
    if monitor.is_file():
        yield from read_monitor(monitor)
        return
    if not path.is_dir():
        if not path.is_file():
            raise TaskError(f"{path}: no such file or folder")
        yield from task_files.read_rows(path)
        return
    # The files of verl and TRL are numbered by step: 2.jsonl precedes 10.jsonl.
    files = sorted(
        (file for file in path.iterdir() if file.suffix in (".parquet", ".jsonl")),
        key=lambda file: [part.zfill(12) for part in re.split(r"(\d+)", file.name)],
    )
    if not files:
        raise TaskError(f"{path} must contain .parquet or .jsonl files, got none")
    for file in files:
        if file.name != "aggregated_results.jsonl":  # this file contains means of a SkyRL evaluation
            yield from task_files.read_rows(file)


# --- layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """One message and its token ids, of which the last `sampled` were sampled by the model."""

    message: Mapping[str, Any]
    action: bool
    ids: tuple[int, ...] | None = None
    sampled: int = 0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Record:
    """One chain: the messages of its rows (`_Node`) and all other columns. `reward` names the columns to sum."""

    rows: list[list[_Node]]
    columns: dict[str, Any]
    task: str
    reward: tuple[str, ...]
    weights: Mapping[str, float]
    fields: Mapping[str, Any]
    author: str = "policy"
    encodable: bool = False


def _records(row: Any, location: str, chat: Chat | None) -> Iterator[_Record]:
    if not isinstance(row, Mapping):
        raise TaskError(f"{location}: a row must be an object, got {row!r:.60}")
    columns = {str(name): task_files.to_python(value) for name, value in row.items()}
    reward: tuple[str, ...] = tuple(name for name in ("reward", "score") if name in columns)[:1]
    if isinstance(columns.get("traces"), list):
        for trace in columns["traces"]:
            yield _trace(trace, columns)
        return
    if isinstance(columns.get("samples"), list):
        for sample in inspect_samples(columns):
            yield from _records(sample, location, chat)
        return
    if isinstance(columns.get("trajectories"), list) and "messages" not in columns:
        for trajectory in art_trajectories(columns):
            yield from _records(trajectory, location, chat)
        return
    encodable = isinstance(columns.get("prompt"), list)
    segments: list[list[Any]] | None = None
    if "prompt" in columns and "completion" in columns:
        names = list(columns)
        if "advantage" in names:
            between = names[names.index("completion") + 1 : names.index("advantage")]
            reward = tuple(name for name in between if is_number(columns[name]))
        prompt, completion = columns.pop("prompt"), columns.pop("completion")
    elif "input" in columns and "output" in columns:
        prompt, completion = columns.pop("input"), columns.pop("output")
        columns["answer"] = columns.pop("gts", None)
    elif columns.get("input_prompt") is not None and columns.get("output_response") is not None:
        prompt, completion = columns.pop("input_prompt"), columns.pop("output_response")
        if isinstance(columns.get("score"), list):  # one reward per token
            columns["score"] = math.fsum(columns["score"])
    elif (segments := conversations(columns, location)) is not None:
        encodable = True
        if "reward" in columns:  # AgentFly records the reward among other values
            reward = ("reward",)
    elif (found := _with_ids(columns, location, chat)) is not None:
        given = columns.get("rewards")  # SkyRL: one, or one per token
        if not reward and isinstance(given, list | int | float):
            reward, columns["reward"] = ("reward",), math.fsum(given if isinstance(given, list) else [given])
        task = _row_name(columns) or digest(json.dumps(found[0]), size=6)
        yield _Record([found[1]], columns, task, reward, {}, {})
        return
    else:
        raise TaskError(
            f"{location}: a row must have the columns 'prompt' and 'completion' (TRL, verifiers), 'input' and 'output' "
            "(verl), 'input_prompt' and 'output_response' (SkyRL), 'messages', 'conversations', 'segments' (AgentFly), "
            "'samples' (Inspect), 'traces' (verifiers), or 'prompt_ids' and 'completion_ids', got "
            f"{', '.join(columns) or 'none'}"
        )
    if segments is None:
        nodes = [_Node(message, False) for message in _as_messages(prompt, "user", location)]
        nodes += [_Node(m, m["role"] == "assistant") for m in _as_messages(completion or [], "assistant", location)]
        rows = [nodes]
    else:
        rows = _with_new_actions([_as_messages(segment, "user", location) for segment in segments])
    yield _Record(rows, columns, _row_name(columns), reward, {}, {}, encodable=encodable)


def _row_name(columns: Mapping[str, Any]) -> str:
    return next((str(columns[name]) for name in ("example_id", "id") if columns.get(name) is not None), "")


def _with_new_actions(segments: Sequence[Sequence[Message]]) -> list[list[_Node]]:
    """Return the nodes of conversations. Messages that repeat those of earlier conversations are not new actions.

    An action is repeated only if it also follows the same message, because different actions may have equal short
    texts.
    """
    marked = any(message.get("trainable") is not None for segment in segments for message in segment)
    known: list[tuple[Message | None, Message]] = []
    rows = []
    for segment in segments:
        pairs = list(zip((None, *segment), segment, strict=False))
        rows.append(
            [
                _Node(
                    m,
                    m["role"] == "assistant"
                    and (before, m) not in known
                    and (not marked or bool(m.get("trainable"))),
                )
                for before, m in pairs
            ]
        )
        known += pairs
    return rows


def _with_ids(columns: dict[str, Any], location: str, chat: Chat | None) -> tuple[list[int], list[_Node]] | None:
    """Remove the columns with token ids, and return the prompt's ids and the parts of the row, or None without ids."""
    names = [next((name for name in names if columns.get(name) is not None), "") for names in _ID_COLUMNS]
    if not names[0] or not names[1]:
        return None
    prompt, ids, mask, logprobs = (columns.pop(name, None) for name in names)
    if any(mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)) for mask in (mask, logprobs)):
        what = " and ".join(name for name in names[2:] if name)
        raise TaskError(f"{location}: {what} must have one entry per id of {names[1]} ({len(ids)})")
    if min(map(operator.index, [*prompt, *ids]), default=0) < 0:
        raise TaskError(f"{location}: {names[0]} and {names[1]} must not contain negative numbers")
    nodes: list[_Node] = []
    start = -len(prompt)  # position relative to the completion
    for sampled, run in groupby([0] * len(prompt) + (mask or [1] * len(ids)), bool):
        end = start + len(list(run))
        part = tuple(map(operator.index, [*prompt, *ids][start + len(prompt) : end + len(prompt)]))
        role = "assistant" if sampled else "tool" if nodes else "user"
        text = f"[{len(part)} token ids]" if chat is None else chat.text(part)
        given = tuple(map(float, logprobs[start:end])) if sampled and logprobs is not None else ()
        nodes.append(_Node({"role": role, "content": text}, sampled, part, len(part) * sampled, given))
        start = end
    return prompt, nodes


def _trace(trace: Any, episode: Mapping[str, Any]) -> _Record:
    """Convert a verifiers trace, which is a forest of messages. Each path from a root to a leaf becomes a row."""
    nodes, task = trace["nodes"], trace["task"]
    parents = [node.get("parent") for node in nodes]
    if any(parent is not None and not 0 <= parent < i for i, parent in enumerate(parents)):
        raise ValueError("the parent of a node must precede it")
    exact = all(node["token_ids"] for node in nodes)
    rows: list[list[_Node]] = []
    seen: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        rows.append([])
        for i in path:
            # A sampled message that is shared by several rows is an action only in the first of these rows.
            action = bool(nodes[i]["sampled"]) and i not in seen
            seen.add(i)
            if not exact:
                rows[-1].append(_Node(nodes[i]["message"], action))
                continue
            ids, mask, logprobs = (tuple(nodes[i][name]) for name in ("token_ids", "mask", "logprobs"))
            if mask != tuple(sorted(mask)) or not len(ids) == len(mask) or sum(mask) != len(logprobs):
                raise ValueError("the last tokens of a node must be sampled, each with a logprob")
            rows[-1].append(_Node(nodes[i]["message"], action, ids, sum(mask), logprobs))
    rewards = {name: given for name, given in trace.get("rewards", {}).items() if given is not None}
    errors = trace.get("errors") or episode.get("errors") or [None]
    fields = {
        name: value for name, value in task["data"].items() if value and name not in ("prompt", "system_prompt")
    }
    columns = dict(trace.get("metrics") or {}) | {name: given["score"] for name, given in rewards.items()}
    columns |= {"stop_condition": trace.get("stop_condition"), "error": errors[-1], "tools": trace.get("tools")}
    name = task.get("key") or task["data"].get("id") or task["data"].get("idx")
    weights = {name: given.get("weight", 1.0) for name, given in rewards.items()}
    return _Record(rows, columns, str(name or ""), tuple(rewards), weights, fields, str(trace["agent"]["name"]))


def _as_messages(given: Any, role: str, location: str) -> list[Message]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if not isinstance(given, list) or not all(isinstance(_get(m, "role"), str) for m in given):
        raise TaskError(f"{location}: a conversation must be a string or a list of messages, got {given!r:.80}")
    return given


def _get(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else None


# --- trajectories --------------------------------------------------------------------------------


def _trajectory(
    record: _Record,
    reward: tuple[str, ...] | None,
    location: str,
    chat: Chat | None,
    schemas: Sequence[dict[str, Any]],
) -> Trajectory:
    columns = record.columns
    names = record.reward if reward is None else reward
    weights = record.weights if reward is None else {}
    numbers = {name: float(value) for name, value in columns.items() if is_number(value) and math.isfinite(value)}
    for name in names:
        if name not in columns or not (columns[name] is None or is_number(columns[name])):
            have = ", ".join(numbers) or "none"
            raise TaskError(f"{location}: the reward column {name!r} must be a number; columns with numbers: {have}")
    scores = [numbers[name] * weights.get(name, 1.0) for name in names if name in numbers]

    turns: list[Turn] = []
    for index, nodes in enumerate(record.rows):
        for turn in _turns(nodes, record.author, chat):
            turns.append(replace(turn, row=index, parent=turns[-1] if turns else None))
    tools = _schemas(columns.get("tools") or columns.get("tool_defs")) or tuple(schemas)
    prompt = list(turns[0].messages) if turns and turns[0].kind == "prompt" else []
    while prompt and prompt[-1]["role"] == "assistant":  # an incomplete answer that the model continues
        prompt.pop()
    if not prompt:
        raise TaskError(f"{location}: a conversation must not begin with an assistant message")
    if chat is not None and record.encodable:
        strange = (
            f"message {i} must be text only to be encoded, got the part {part!r:.60}"
            for nodes in record.rows
            for i, node in enumerate(nodes)
            if isinstance(content := node.message.get("content"), list)
            for part in content
            if _get(part, "text") is None
        )
        if problem := next(strange, ""):
            raise TaskError(f"{location}: {problem}")
        turns = encoded(turns, tools, chat, location)
    other = _OTHERS | {"tools", "tool_defs"} | set(numbers)
    fields = {name: value for name, value in columns.items() if name not in other and value is not None}
    id = record.task or digest(json.dumps(prompt, sort_keys=True), size=6)
    task = Task(id, tuple(prompt), {**record.fields, **fields})
    error = columns.get("error")
    return Trajectory(
        id="",
        task=task,
        group=task.id if columns.get("step") is None else f"step {columns['step']}: {task.id}",
        chain=0,
        turns=tuple(turns),
        stop=_stop(columns),
        reward=math.fsum(scores) if scores else None,
        metrics={name: value for name, value in numbers.items() if name not in _OTHERS | {"reward", "score"}},
        error=None if error is None else _failure(error),
        tools=tools,
    )


def _schemas(given: Any) -> tuple[dict[str, Any], ...]:
    """Return the tool schemas of a row, which may be JSON or in Anthropic's format."""
    schemas = []
    for tool in (_parsed(given) if isinstance(given, str) else given) or ():
        if _get(tool, "input_schema"):
            function = {name: tool[name] for name in ("name", "description") if name in tool}
            tool = {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
        schemas.append(tool)
    return tuple(schemas)


def _failure(error: Any) -> Failure:
    kind = _get(error, "type") or _get(error, "error") or "Error"
    message = _get(error, "message") or _get(error, "error_chain_repr") or error
    return Failure("the recorded rollout", str(kind), str(message), str(_get(error, "traceback") or ""))


def _stop(columns: Mapping[str, Any]) -> str:
    names = ("stop_condition", "stop_reason", "finish_reason")
    condition = str(next((columns[name] for name in names if columns.get(name)), ""))
    if columns.get("error") is not None:
        return "error"
    if condition.startswith("max_turns"):
        return "max_turns"
    if columns.get("is_truncated") or condition == "length" or condition.startswith("max_"):
        return "chain_tokens"
    return "timeout" if condition.endswith("timeout") else "answered"


def _turns(nodes: Sequence[_Node], author: str, chat: Chat | None) -> Iterator[Turn]:
    """Yield the turns of a row. The messages and tokens between two actions form one observation."""
    messages: list[Message] = []
    pending: list[ToolCall] = []
    results: list[ToolCall] = []
    ids: tuple[int, ...] | None = ()
    kind: Any = "prompt"
    for i, node in enumerate((*nodes, None)):
        parts = node.message.get("content") if node is not None and node.ids is not None else None
        if isinstance(parts, list) and any(_get(part, "type") not in ("text", None) for part in parts):
            raise TaskError(f"message {i} has token ids and must contain text only, got an image or another part")
        if node is not None and not node.action:
            message, _ = _message(node.message)
            messages.append(message)
            ids = None if node.ids is None or ids is None else ids + node.ids
            if message["role"] == "tool" and pending:  # TRL records no call ids; results are in call order
                same = (i for i, call in enumerate(pending) if call.id == message.get("tool_call_id"))
                results.append(replace(pending.pop(next(same, 0)), result=ToolResult(True, text_of(message))))
            continue
        if node is not None and node.ids is not None:
            ids = (ids or ()) + node.ids[: len(node.ids) - node.sampled]
        if messages or ids:
            by = "task" if kind == "prompt" else "tool" if results else "harness"
            yield Turn(kind, by, messages=tuple(messages), tool_calls=tuple(results), **_text(chat, ids, messages))
        if node is None:
            return
        message, calls = _message(node.message)
        sampled = None if node.ids is None else node.ids[len(node.ids) - node.sampled :]
        exact: dict[str, Any] = {"sampled": True, "logprobs": node.logprobs, "versions": (0,) * node.sampled}
        exact = exact if node.logprobs else {}  # ids without logprobs can only be shown and imitated
        yield Turn(
            "action", author, messages=(message,), tool_calls=calls,
            **_text(chat, sampled, [message]), **(exact if sampled else {}),
        )  # fmt: skip
        messages, pending, results, ids, kind = [], list(calls), [], () if sampled else None, "observation"


def _text(chat: Chat | None, ids: tuple[int, ...] | None, messages: Sequence[Message]) -> dict[str, Any]:
    if ids is None or chat is None:
        return {"ids": ids, "text": "\n".join(map(text_of, messages))}
    return {"ids": ids, "text": chat.text(ids), "token_texts": chat.token_texts(ids)}


def _message(given: Mapping[str, Any]) -> tuple[Message, tuple[ToolCall, ...]]:
    content = given.get("content")
    if isinstance(content, list):
        texts = [_get(part, "text") for part in content]
        kinds = [f"[{_get(part, 'type')}]" for part in content]  # shown in place of an image
        content = "".join(kind if text is None else str(text) for text, kind in zip(texts, kinds, strict=True))
    message: Message = {"role": given["role"], "content": str(content or "")}
    message |= {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}
    if given.get("reasoning_content"):
        message["thinking"] = str(given["reasoning_content"])
    calls = tuple(_call(call, i) for i, call in enumerate(_parsed(given.get("tool_calls")) or ()))
    return with_calls(message, calls), calls


def _call(given: Any, index: int) -> ToolCall:
    """Return a tool call. In verifiers files, it may be a JSON string, or an object without the key "function"."""
    given = _parsed(given)
    function = _get(given, "function") or given
    if isinstance(function, str):  # as in Inspect logs
        function = {"name": function, "arguments": given.get("arguments")}
    raw = _get(function, "arguments")
    arguments = _parsed(raw)
    id, name = str(_get(given, "id") or f"call-{index}"), str(_get(function, "name") or "")
    if not isinstance(arguments, Mapping):
        return ToolCall(id, name, {}, error="the arguments are not a JSON object", raw=str(raw))
    return ToolCall(id, name, dict(arguments))


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
