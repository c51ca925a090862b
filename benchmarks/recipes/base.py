"""Recipe of a shipped policy: its demonstrations, tokenizer words and training settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agentfly_kit import envs
from agentfly_kit.chat.chat import Chat
from agentfly_kit.tiny import TEMPLATE, demonstration
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message

UNSURE = "I don't know"
# Set as `tokenizer.response_template`, it tells TRL how to read the tool calls of a shipped policy.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}  # fmt: skip


def single_tokens(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words without repetitions and without words of the chat template.

    If template words were added to the tokenizer, environment text could contain template tokens.
    """
    return tuple(word for word in dict.fromkeys(words) if word not in TEMPLATE)


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
        return {split: list(family.rows(count, split, seed)) for split, count in family.splits.items()}

    def sample(self) -> Any:
        """Sample the subject of one demonstration, such as a question. Test tasks are never sampled."""
        raise NotImplementedError

    def sample_unseen(self, draw: Callable[[random.Random], Any], held_out: Collection[str]) -> Any:
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
            messages.append(
                {"role": "assistant", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}
            )
            if observation is not None:
                messages.append({"role": "tool", "name": tool, "tool_call_id": "call-0", "content": observation})
        if answer:
            messages.append({"role": "assistant", "content": answer})
        return demonstration(self.chat, messages, self.tools, self._observations)
