"""Recipe of a shipped policy: its demonstrations, tokenizer words and training settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Protocol, TypeVar

from agentfly_kit import envs
from agentfly_kit.chat.chat import Chat
from agentfly_kit.types import Message, Task, ToolCall, Trajectory, Turn

UNSURE = "I don't know"
END = "<|im_end|>"

# ChatML template. Tools are rendered as names with parameter names only, which keeps prompts short.
TEMPLATE = """\
{%- set lead = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if lead or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if lead %}{{ lead.content }}{{ '\\n' if tools }}{% endif -%}
  {%- for tool in tools or [] -%}
    {%- set f = tool.function or tool -%}
    {{- 'Tools: ' if loop.first else ', ' }}{{ f.name }}({{ ((f.parameters or {}).properties or {}) | join(', ') }})
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if lead else messages) -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.role == 'tool' -%}
    {{- '<tool_response>' }}{{ message.content }}{{ '</tool_response>' -}}
  {%- else -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set f = call.function or call -%}
      {{- '<tool_call>{"name":' }}{{ f.name | tojson }}{{ ',"arguments":' -}}
      {{- f.arguments if f.arguments is string else f.arguments | tojson(separators=(',', ':')) -}}
      {{- '}</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""


def demonstration(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    observations: dict[Any, tuple[int, ...]] | None = None,
) -> Trajectory:
    """Encode a conversation as a trajectory whose actions are the assistant's messages, by the author "script".

    Args:
        chat: Chat of the policy.
        messages: The conversation; it ends with an assistant's message or the result of its call.
        tools: JSON schemas of the tools in the prompt.
        observations: Cache of encoded observations, for many conversations of the same chat and tools.
    """
    observations = {} if observations is None else observations
    opening, *rest = (
        (by_assistant, list(some)) for by_assistant, some in groupby(messages, lambda m: m["role"] == "assistant")
    )
    turn = Turn(kind="prompt", author="task", ids=tuple(chat.prompt(opening[1], tools)))
    turns = [turn]
    for by_assistant, some in rest:
        if by_assistant:
            (message,) = some
            functions = [call["function"] for call in message.get("tool_calls", ())]
            calls = [chat.format.render_call(ToolCall("", f["name"], dict(f["arguments"]))) for f in functions]
            ids = tuple(chat.encode("".join([message.get("content", ""), *calls, END])))
            turn = Turn(kind="action", author="script", ids=ids, messages=(message,), stop="stop", parent=turn)
        else:
            key = tuple((m["role"], m.get("name"), m["content"]) for m in some)
            if key not in observations:
                observations[key] = tuple(chat.observation_ids(some, tools, after=turn.ids or ()))
            turn = Turn(kind="observation", author="tool", ids=observations[key], parent=turn)
        turns.append(turn)
    task = Task("demonstration", tuple(opening[1]))
    return Trajectory("demonstration", task, "demonstration", 0, tuple(turns), "answered")


def single_tokens(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words without repetitions and without words of the chat template.

    If template words were added to the tokenizer, environment text could contain template tokens.
    """
    return tuple(word for word in dict.fromkeys(words) if word not in TEMPLATE)


class _Asking(Protocol):
    @property
    def question(self) -> str: ...


A = TypeVar("A", bound=_Asking)


class BaseRecipe:
    """Base class of recipes. The recipe for a policy is the class `Recipe` in the module named after the policy.

    Demonstrations are written with the policy's own chat, so that their token ids are those of real trajectories.

    Attributes:
        name: Name of the policy and of its family in `af.envs`.
        words: Words that get one token each, so that a name has the same token in questions, calls and observations.
        tools: Schemas of the tools.
        habits: Number of demonstrations per batch of 32 in the second phase, by behaviour.
        skill_steps: Training steps of the first phase.
        mixed_steps: Training steps of the second phase.
        skill_batch: Demonstrations per batch in the first phase.
        half: Round the weights to float16 and save them as float16.
    """

    name: ClassVar[str]
    words: ClassVar[Sequence[str]] = ()
    tools: ClassVar[Sequence[dict[str, Any]]]
    habits: ClassVar[Mapping[str, int]]
    skill_steps: ClassVar[int] = 500
    mixed_steps: ClassVar[int] = 150
    skill_batch: ClassVar[int] = 32
    half: ClassVar[bool] = False

    def __init__(self, chat: Chat, seed: int = 0) -> None:
        self.chat = chat
        self.rng = random.Random(f"{self.name} warm-up {seed}")
        self._observations: dict[Any, tuple[int, ...]] = {}

    @classmethod
    def tasks(cls, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
        """Generate the rows of the shipped tasks, by split."""
        family = getattr(envs, cls.name).family
        return {split: family.rows(count, split, seed) for split, count in family.splits.items()}

    def sample(self) -> Any:
        """Sample the subject of one demonstration, such as a question. Test tasks are never sampled."""
        raise NotImplementedError

    def sample_unseen(self, draw: Callable[[random.Random], A], held_out: Collection[str]) -> A:
        """Sample with `draw` until the `question` of the result is not one of the held-out questions."""
        while True:
            example = draw(self.rng)
            if example.question not in held_out:
                return example

    def demonstrate(self, habit: str, example: Any) -> Trajectory:
        """Write a demonstration of one of the `habits` for an example that `sample` returned."""
        raise NotImplementedError

    def batches(self) -> tuple[Iterator[list[Trajectory]], Iterator[list[Trajectory]]]:
        """Return two infinite iterators over batches, one per phase. The first phase uses only correct demonstrations;
        the second uses the proportions in `habits`.
        """
        return self._repeat({"solves": self.skill_batch}), self._repeat(self.habits)

    def _repeat(self, habits: Mapping[str, int]) -> Iterator[list[Trajectory]]:
        while True:
            yield [self.demonstrate(habit, self.sample()) for habit, count in habits.items() for _ in range(count)]

    def conversation(
        self, question: str, calls: Iterable[tuple[str, Mapping[str, Any], str | None]], answer: str = ""
    ) -> Trajectory:
        """Write a conversation.

        Args:
            question: the user's message.
            calls: (tool, arguments, observation) of each action; None if the model does not see the observation.
            answer: the final answer, or "" if there is none.
        """
        messages: list[Message] = [{"role": "user", "content": question}]
        for tool, arguments, observation in calls:
            messages.append({"role": "assistant", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]})
            if observation is not None:
                messages.append({"role": "tool", "name": tool, "tool_call_id": "call-0", "content": observation})
        if answer:
            messages.append({"role": "assistant", "content": answer})
        return demonstration(self.chat, messages, self.tools, self._observations)
