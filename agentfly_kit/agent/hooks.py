"""Predefined agent hooks: a sliding window of steps, a summary of a full context, and a user simulated by a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentfly_kit import seeds
from agentfly_kit.agent.turns import append_text
from agentfly_kit.engines.base import Engine, chat_for, sample_text
from agentfly_kit.errors import check_count, checks_keywords
from agentfly_kit.samples import Sampling
from agentfly_kit.types import Message, Task, images_of, text_of

__all__ = ["simulated_user", "sliding_window", "summarize"]


def sliding_window(steps: int) -> Callable[[Any], None]:
    """Create a `before_turn` hook that shows the model only the first prompt and the last `steps` steps.

    A step is an action and the observation that follows it. Each action after the first is sampled in a new row,
    which limits the row length. `TrainConfig(row_credit=)` sets how the rows of a chain share its advantage.

    Args:
        steps: Number of steps to show. With 0, only the last observation is appended to the first prompt.

    Raises:
        SettingsError: If `steps` is negative.
    """
    check_count("steps", steps, 0)

    def before_turn(chain: Any) -> None:
        if chain.turn.kind != "observation":
            return
        shown: list[list[Message]] = []
        for turn in chain.turns:
            if turn.completes_action:
                shown.append(list(turn.messages))
            elif turn.kind == "observation" and shown:
                shown[-1] += turn.messages
        opening = list(chain.turns[0].messages)
        if steps == 0 and images_of(chain.turn.messages):
            last = [{"role": "user", "content": message["content"]} for message in chain.turn.messages]
            chain.compact([*opening, *last], author="window")
        elif steps == 0:
            chain.compact("\n".join(map(text_of, chain.turn.messages)), author="window")
        else:
            chain.compact([*opening, *(m for step in shown[-steps:] for m in step)], author="window")

    return before_turn


@checks_keywords
def summarize(
    instruction: str = "Summarize the findings so far for someone who continues without this conversation.",
    *,
    tokens: int = 256,
    rows: int = 8,
) -> Callable[[Any], Awaitable[None]]:
    """Create an `on_context_full` hook with which the policy summarizes the context and continues from the summary.

    The summary is an action in a new row. The summary is trained on like other actions and counts towards `max_turns`.
    The row of the summary begins with the first prompt of the chain, the end of the conversation as text, and the
    instruction. The next row begins with the first prompt and the text of the summary; tool calls in the summary do not
    run.

    Args:
        instruction: Instruction to write the summary.
        tokens: Number of tokens of the context length that are reserved for the summary.
        rows: Maximum number of rows per chain. A chain that would need more rows ends with "context_full".

    Raises:
        SettingsError: If `tokens` or `rows` is below 1.
    """
    check_count("tokens", tokens)
    check_count("rows", rows)

    async def on_context_full(chain: Any) -> None:
        chat, limit = chain.agent.chat, chain.agent.engine.max_length
        text = "\n".join(text_of(m) for turn in chain.turn.row_path[1:] for m in turn.messages)
        prompt = len(chat.prompt(append_text(chain.turns[0].messages, instruction), chain.agent.tools.schemas))
        room = limit - tokens - prompt - 8  # a few tokens for the separators
        if chain.turn.row + 2 >= rows or room < 1:
            return
        kept = chat.text(chat.encode(text)[-room:])
        chain.compact(f"{kept}\n\n{instruction}")
        if chain.stop is not None:
            return
        summary = await chain.sample()
        if summary.kind == "action" and chain.stop in (None, "answered", "turn_tokens", "context_full"):
            # Only the text of the summary is used: its calls do not run, and no nudge follows it.
            chain._append(summary, "answered")
            said = [i for i in summary.ids if i not in chat.stop_ids]
            chain.compact(text_of(summary.messages[0]) or chat.text(said))

    return on_context_full


@checks_keywords
def simulated_user(
    engine: Engine,
    instructions: str | Callable[[Task], str],
    *,
    chat: Any = None,
    end: str = "###STOP###",
    sampling: Sampling | None = None,
) -> Callable[[Any], Awaitable[str | None]]:
    """Create a function for `Agent(user=)` that lets a model write the user's replies.

    The model sees the conversation with exchanged roles: it writes the user's messages, beginning with those of the
    task, and the agent's texts are its input. The model sees neither tool calls nor their results.

    Args:
        engine: Engine of the model that plays the user.
        instructions: Text about what the user knows and wants, or a function that returns such a text for a task.
        chat: `af.Chat` of the engine's model; by default that of the engine's policy.
        end: Text with which the model ends the conversation. A reply that is empty or contains this text is not sent to
            the agent.
        sampling: Sampling settings of each reply; by default temperature 1 and at most 256 tokens.

    Raises:
        SettingsError: If `engine` needs token ids and there is no `chat`.
    """
    chat, sampling = chat_for(engine, chat, "simulated_user"), sampling or Sampling(max_tokens=256)

    async def user(chain: Any) -> str | None:
        text = instructions if isinstance(instructions, str) else instructions(chain.task)
        messages: list[Message] = [
            {"role": "system", "content": _USER.format(end=end, instructions=text)},
            {"role": "user", "content": "Hello! How can I help you?"},
        ]
        for turn in chain.turns:
            if turn.kind == "prompt" and turn.row > 0:
                continue  # the prompt of a later row repeats or summarizes earlier turns
            for message in turn.messages:
                if message["role"] in _EXCHANGED and not message.get("tool_calls"):
                    messages.append({"role": _EXCHANGED[message["role"]], "content": text_of(message)})
        question = Task(f"user of {chain.id}", tuple(messages), chain.task.fields)
        seed = seeds.derive(chain.trajectory_seed, "user", chain.actions)
        replies = sum(turn.author == "user" for turn in chain.turns)
        reply = (await sample_text(engine, chat, question, sampling, seed, replies)).strip()
        return None if not reply or end in reply else reply

    return user


_EXCHANGED = {"user": "assistant", "assistant": "user"}
_USER = (
    "You are a user who talks to an assistant. Write only the user's next message. When you have what you want, or the "
    "assistant cannot give it to you, write {end}\n\n{instructions}"
)
