"""Functions that create turns: they parse actions and encode prompts and observations."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentfly_kit._async import threads
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.chat.chat import Chat
from agentfly_kit.chat.formats import Parsed
from agentfly_kit.samples import Sample, Sampling
from agentfly_kit.types import (
    Alternatives,
    Message,
    Task,
    ToolCall,
    Turn,
    images_in,
    images_of,
    normalize_messages,
    spans_of,
    text_of,
)

# Messages with more characters than this are encoded in a thread, because they would otherwise delay other chains.
_LONG = 50_000


async def encode_long(messages: Sequence[Mapping[str, Any]], encode: Callable[[], Any]) -> None:
    """Call `encode` in a thread if the messages are long or have images. The chat caches the result for the caller.

    Exceptions are discarded, because they are raised again when the caller encodes the messages itself. If this call is
    cancelled, the thread continues, but nothing waits for it.
    """
    if is_long(messages) or images_of(messages):
        await threads.run_off_loop(encode, None)


def is_long(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if encoding the messages would block the event loop noticeably."""
    return sum(len(text_of(message)) for message in messages) > _LONG


async def warn_about_long_prompt(agent: AgentSettings, tasks: Iterable[Task]) -> None:
    """Warn if the longest prompt of the tasks leaves no room for an action in the context of the engine.

    Only the prompt with the most characters is encoded. If the template rejects this prompt, the chains of its task
    report the error.
    """
    task = max(tasks, key=lambda task: sum(len(text_of(message)) for message in task.messages))
    opening, count = agent.opening(task), 0

    def encode() -> int:
        return len(agent.chat.prompt(opening, agent.tools.schemas))

    await encode_long(opening, encode)
    with contextlib.suppress(Exception):
        count = encode()
    if count + 1 >= (length := agent.engine.max_length):
        warnings.warn(
            f"the prompt of task {task.id!r} has {count:,} tokens, too many for the engine's context of {length:,}: "
            'chains of such tasks end with "context_full" at once; leave out the tasks, or use a longer context',
            stacklevel=2,
        )


def token_fields(agent: AgentSettings, ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields `ids`, `text`, `token_texts` and `images` of a turn with the given token ids."""
    chat, images = agent.chat, images_in(ids)
    text = chat.reader.describe(ids, chat.text) if images else chat.text(ids)
    return {"ids": tuple(ids), "text": text, "token_texts": chat.token_texts(ids), "images": images}


def join_ids(turns: Iterable[Turn], end: int, new: Sequence[int]) -> Sequence[int]:
    """Return the first `end` ids of consecutive turns followed by new ids, with the spans of their images."""
    turns = tuple(turns)
    ids = (*[i for turn in turns for i in turn.ids or ()][:end], *new)
    spans = [span for span in spans_of(turns) if span.start + span.length <= end]
    spans += [span._replace(start=span.start + end) for span in images_in(new)]
    if not spans:
        return ids
    from agentfly_kit.chat.images import ImageIds

    return ImageIds(ids, spans)


def text_fields(agent: AgentSettings, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the same fields as `token_fields`, for a turn whose token ids are unknown or added later."""
    text = "\n".join(map(text_of, messages))
    return {"ids": () if agent.exact else None, "text": text, "token_texts": None, "images": ()}


def label(agent: AgentSettings, action: int) -> str:
    return f"turn {action} of {agent.max_turns}"


# --- actions -------------------------------------------------------------------------------------


def action_turn(
    agent: AgentSettings,
    parent: Turn,
    sample: Sample,
    sampling: Sampling,
    seed: int,
    tools: Sequence[dict[str, Any]],
    author: str,
) -> Turn:
    """Return the turn for a sampled action, with the token ids exactly as the engine returned them.

    The turn is trained on (`sampled=True`) if and only if a policy sampled its tokens and the engine reported their
    logprobs. Apart from `integrations/captured.py`, which imports recorded token ids, no other function creates turns
    with `sampled=True`.

    Args:
        agent: the agent of the chain.
        parent: the turn before the action.
        sample: the sample that the engine returned.
        sampling: settings with which the action was sampled.
        seed: seed with which the action was sampled.
        tools: JSON schemas of the tools in the prompt.
        author: author of the turn, if the engine samples from a policy.
    """
    engine, chat = agent.engine, agent.chat
    if sample.ids is not None:
        tokens = token_fields(agent, sample.ids)
    elif agent.exact:
        # A scripted engine returns text, which can be encoded here because no policy sampled its tokens.
        tokens = token_fields(agent, (*chat.encode(sample.text or ""), chat.stop_ids[0]))
    else:
        tokens = text_fields(agent, [{"content": sample.text or ""}])
    ids = tokens["ids"]
    kept_mass = sample.kept_mass
    if kept_mass is None and sampling.greedy and sample.logprobs is not None:
        kept_mass = tuple(math.exp(lp) for lp in sample.logprobs)  # greedy sampling keeps only the sampled token
    if sample.calls is not None:
        message, calls = assistant_message(Parsed(sample.text or "", sample.calls, sample.thinking))
    else:
        stops = sampling.stop if sample.stop == "string" else ()
        message, calls = parse_action(chat, tools, forced_beginning(parent), ids, sample.text, stops)
        if sample.thinking is not None:
            message = {"thinking": sample.thinking, **message}
    return Turn(
        kind="action",
        author=author if engine.author == "policy" else engine.author,
        sampled=engine.author == "policy" and sample.logprobs is not None and ids is not None,
        logprobs=sample.logprobs,
        entropies=sample.entropies,
        kept_mass=kept_mass,
        constrained=sample.kept_mass is not None and not sampling.truncates,
        alternatives=_with_texts(chat, sample.alternatives),
        versions=sample.versions,
        messages=(message,),
        tool_calls=calls,
        stop=sample.stop,
        seed=seed,
        seconds=sample.seconds,
        parent=parent,
        row=parent.row,
        label=label(agent, parent.actions + 1),
        **tokens,
    )


def _with_texts(
    chat: Chat, alternatives: Sequence[Sequence[tuple[int, float]]] | None
) -> tuple[Alternatives, ...] | None:
    """Add the text of each token to the alternatives recorded by the engine."""
    if alternatives is None:
        return None
    texts = iter(chat.token_texts([id for position in alternatives for id, _ in position]))
    return tuple(tuple((id, next(texts), logprob) for id, logprob in position) for position in alternatives)


def parse_action(
    chat: Chat,
    tools: Sequence[dict[str, Any]],
    forced: Sequence[int],
    ids: Sequence[int] | None,
    text: str | None = None,
    stops: Sequence[str] = (),
) -> tuple[Message, tuple[ToolCall, ...]]:
    """Parse an action and return its assistant message and its tool calls.

    `forced` contains the token ids of the forced beginning of the action, which is parsed together with `ids`, or with
    `text` if the engine returned no ids. If one of the strings in `stops` ended the action, the message excludes it.
    """
    # `chat.read` adds the thinking tag if the prompt ends with one. For a text-only engine, the prompt is unknown.
    read = chat.format.parse if ids is None else chat.read
    beginning = chat.text(forced)
    full_text = beginning + (text or "") if ids is None else chat.text((*forced, *ids))
    found = [(at, stop) for stop in stops if (at := full_text.find(stop, len(beginning))) >= 0]
    if found:
        at, stop = min(found)
        parsed = read(full_text[:at], tools)
        if parsed.unclosed:  # the stop string may be the closing tag of the call
            parsed = read(full_text[: at + len(stop)], tools)
    elif ids is None:
        parsed = read(full_text, tools)
    else:
        parsed = chat.parse((*forced, *ids), tools)
    return assistant_message(parsed)


def assistant_message(parsed: Parsed) -> tuple[Message, tuple[ToolCall, ...]]:
    """Return the message and the tool calls of a parsed action. An unclosed call becomes a call with an error."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.thinking is not None:
        message["thinking"] = parsed.thinking
    calls = parsed.calls
    if parsed.unclosed:
        # The model receives the error as the result of the call, unless the action was truncated and ends the chain.
        broken = ToolCall(f"call-{len(calls)}", "", {}, error=parsed.complaint or "the tool call was not closed")
        calls = (*calls, broken)
    return with_calls(message, calls), calls


def with_calls(message: Message, calls: Sequence[ToolCall]) -> Message:
    """Return the assistant message with its well-formed calls added, in the format of chat templates."""
    functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in calls if call.error is None]
    if not functions:
        return message
    return {**message, "tool_calls": [{"id": id, "type": "function", "function": f} for id, f in functions]}


def forced_beginning(turn: Turn) -> tuple[int, ...]:
    """Return the forced token ids at the beginning of an action after `turn`, or () if nothing was forced."""
    ids: tuple[int, ...] = ()
    before: Turn | None = turn
    while before is not None and before.kind == "forced" and not before.messages:
        ids = (*(before.ids or ()), *ids)
        before = before.parent
    return ids


# --- prompts and observations --------------------------------------------------------------------


def prompt_turn(agent: AgentSettings, messages: Sequence[Message], author: str, **fields: Any) -> Turn:
    """Return a prompt turn, which starts a new row of the chain."""
    messages = normalize_messages(messages, "prompt")
    if agent.exact:
        fields |= token_fields(agent, agent.chat.prompt(messages, agent.tools.schemas))
    else:  # the server applies its own chat template, so the token ids are unknown
        fields |= text_fields(agent, messages)
    return Turn(kind="prompt", author=author, messages=messages, **fields)


def append_text(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return the messages with `text` appended to the content of the last message."""
    *before, last = messages
    content = last["content"]
    if not isinstance(content, str):  # the content consists of parts, some of which are images
        return (*before, {**last, "content": (*content, f"\n\n{text}")})
    return (*before, {**last, "content": f"{content}\n\n{text}" if content else text})


def next_row(agent: AgentSettings, before: Turn, messages: Sequence[Message], author: str) -> Turn:
    """Return the prompt turn that starts a new row of the chain after the turn `before`."""
    return prompt_turn(agent, messages, author, parent=before, row=before.row + 1, label=label(agent, before.actions))


def result_message(call: ToolCall) -> Message:
    """Return the chat message with the result of a tool call."""
    content: Any = call.result.observation if call.result is not None else ""
    if call.result is not None and call.result.images:
        content = (*filter(None, [content]), *call.result.images)
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def with_exception_text(call: ToolCall) -> ToolCall:
    """Return a failed call with the exception message as its observation. Failures of the host are left unchanged."""
    result = call.result
    if result is None or result.error is None or result.error.host:
        return call
    text = f"{call.name} failed: {result.error.type}: {result.error.message[:2000]}"
    return dataclasses.replace(call, result=dataclasses.replace(result, observation=text))


def observation_turn(
    agent: AgentSettings,
    before: Turn,
    messages: Sequence[Message],
    author: str,
    calls: Sequence[ToolCall] = (),
    **fields: Any,
) -> Turn:
    """Return an observation that follows `before`, without token ids, which `encode_observation` adds."""
    return Turn(
        kind="observation",
        author=author,
        messages=tuple(messages),
        tool_calls=tuple(calls),
        parent=before,
        row=before.row,
        label=label(agent, before.actions),
        **text_fields(agent, messages),
        **fields,
    )


def encode_observation(agent: AgentSettings, turn: Turn) -> tuple[Turn, Turn]:
    """Add token ids to an observation. Return the observation and the turn after which the chain continues.

    The chain usually continues from the observation. If re-rendering the history would change earlier token ids, the
    observation gets no ids, and the chain continues from a new row that starts with the re-rendered prompt.
    """
    if not agent.exact:
        return turn, turn
    chat, tools = agent.chat, agent.tools.schemas
    if chat.needs_rerender(turn.messages):
        row = turn.row_path
        messages = [message for t in row for message in t.messages]
        ids = chat.prompt(messages, tools)
        before = tuple(i for t in row[:-1] for i in t.ids or ())
        again = ids[: len(before)]
        if again != before or images_in(again) != spans_of(row[:-1]):
            return turn, next_row(agent, turn, messages, "template")
        ids = ids[len(before) :]
    else:
        after = turn.parent.ids if turn.parent is not None else None
        ids = chat.observation_ids(turn.messages, tools, after=after or ())
    encoded = dataclasses.replace(turn, **token_fields(agent, ids))
    return encoded, encoded


def with_turn_rewards(turns: Sequence[Turn], rewards: dict[int, float]) -> tuple[Turn, ...]:
    """Replace the rewards of all actions with `rewards`, keyed by turn index. Observations keep their rewards."""
    out: list[Turn] = []
    for i, turn in enumerate(turns):
        reward = rewards.get(i) if turn.kind == "action" else turn.reward
        out.append(dataclasses.replace(turn, reward=reward, parent=out[-1] if out else None))
    return tuple(out)


def find_stop(turn: Turn, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the position and the stop string that ended an action, or None."""
    found = [(at, stop) for stop in stops if (at := turn.text.find(stop)) >= 0]
    return min(found) if found and turn.stop == "string" else None
