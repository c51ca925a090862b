"""Abstract base class of the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from agentfly_kit._display import Displayable
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import EngineError, SettingsError, check_instance
from agentfly_kit.samples import Constraint, Sample, Sampling, TurnRequest
from agentfly_kit.types import ImageSpan, Task, images_in


class Engine(Displayable, ABC):
    """Base class for engines, which sample one action per call.

    Calls may run concurrently and do not affect each other's results.

    Attributes:
        tokens: "exact" if `Sample.ids` contains the ids that were sampled, "none" if the engine returns only text.
        logprobs: "yes" if samples have logprobs, else "no".
        entropies: "yes" if samples have entropies, else "no".
        reproducible: True if the same ids, sampling settings and seed give the same sample regardless of concurrent
            requests.
        author: Author of the sampled tokens: "policy" if they can be trained on, otherwise for example "script".
        vocab_size: Number of tokens in the vocabulary; None if unknown.
        remote: True if the weights are on servers, which other processes may share.
        images: Maximum number of images in the messages of a request; 0 if the engine reads text only.
        image_obstacle: Reason why the engine reads text only; "" if it reads images or gives no reason.
    """

    tokens: Literal["exact", "none"] = "exact"
    logprobs: Literal["yes", "no"] = "yes"
    entropies: Literal["yes", "no"] = "yes"
    reproducible: bool = False
    author: str = "policy"
    vocab_size: int | None = None
    remote: bool = False
    images: int = 0
    image_obstacle: str = ""

    @property
    def max_length(self) -> int:
        """Context length in tokens, including prompt and action."""
        return 1 << 30

    @abstractmethod
    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        """Continue `ids` until a stop token, a stop string or `sampling.max_tokens`.

        Args:
            ids: Token ids of the prompt.
            sampling: Temperature, truncation and limits.
            seed: Seed of the sampling noise.
            request: Task, turn and messages, for scripted and text-only engines, and the session of the chain, for
                engines that keep its KV cache between turns.

        Raises:
            EngineError: If the engine failed or the ids exceed the context length.
        """

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise EngineError if a prompt leaves no space for an action, or contains ids outside the vocabulary."""
        if len(ids) >= self.max_length:
            raise EngineError(f"{len(ids)} ids leave no space for an action in a context of {self.max_length} tokens")
        if self.vocab_size and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise EngineError(
                f"ids must be from 0 to {self.vocab_size - 1}, got {min(ids)} to {max(ids)}; encode the prompt with "
                "the tokenizer of the policy"
            )

    async def distribution(
        self, ids: Sequence[int], sampling: Sampling, *, top: int = 20, images: Sequence[ImageSpan] = ()
    ) -> tuple[Any, Any, float]:
        """Return the `top` most probable next ids, their logprobs, and the entropy of the full distribution in nats.

        `images` contains the spans of ids that are placeholders of images.
        """
        raise EngineError(f"{type(self).__name__} does not support distribution(); use LocalEngine")

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprob in nats, at temperature 1, of each id after the first, given the ids before it."""
        raise EngineError(
            f"{type(self).__name__} cannot score given ids; use policy.score, VLLMEngine or OpenAIEngine"
        )

    async def check_teacher(self, chat: Chat, length: int) -> None:
        """Raise SettingsError unless this engine can score `length` ids from the tokenizer of `chat`."""
        raise SettingsError(f"teacher must be a Policy, a VLLMEngine, or an OpenAIEngine for vLLM, got {self!r}")

    def constraint_obstacle(self) -> str:
        """Return the reason why the engine does not enforce `TurnRequest.constraint`, or "" if it does."""
        return f"{type(self).__name__} cannot constrain sampling; use LocalEngine or VLLMEngine"

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise SettingsError if the engine enforces constraints but not this one."""

    async def update(self, policy: Any) -> None:
        """Use the weights of `policy` for all further sampling."""
        raise EngineError(f"{type(self).__name__} has no weights to update; train with LocalEngine or VLLMEngine")

    def release(self, session: str) -> None:
        """Release the state of a chain that has ended, such as its KV cache. `session` identifies the chain."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # no memory address, so that notebook outputs are stable

    async def close(self) -> None:
        """Stop all running work and release resources. A closed VLLMEngine must be started again before further use."""


def chat_for(engine: Engine, chat: Chat | None, caller: str) -> Chat | None:
    """Return `chat` or, by default, that of the engine's policy. Raise SettingsError if a required chat is missing."""
    check_instance("engine", engine, Engine, "an engine, such as af.OpenAIEngine(base_url, model)")
    chat = getattr(getattr(engine, "policy", None), "chat", None) if chat is None else chat
    if chat is None and engine.tokens == "exact" and engine.author == "policy":
        raise SettingsError(f"{engine!r} requires token ids: pass {caller}(..., chat=af.Chat(tokenizer))")
    return chat


async def sample_text(
    engine: Engine, chat: Chat | None, question: Task, sampling: Sampling, seed: int, turn: int = 0
) -> str:
    """Sample a reply to the messages of a task outside any chain, and return the text of the reply."""
    session = f"{question.id} {seed}"
    try:
        ids = () if chat is None else chat.prompt(question.messages)
        request = TurnRequest(question, turn, session, question.messages, images=images_in(ids))
        sample = await engine.sample(ids, sampling, seed, request=request)
    finally:
        engine.release(session)
    return sample.text or "" if sample.ids is None or chat is None else str(chat.parse(sample.ids).content)


def check_scorer(scorer: Chat, max_length: int, chat: Chat, needed: int, name: str = "teacher") -> None:
    """Raise SettingsError if a scorer's vocabulary is not that of `chat` or its context is shorter than `needed`."""
    if scorer.vocabulary != chat.vocabulary:
        raise SettingsError(
            f"{name} must have the vocabulary of the policy, whose token ids it scores, got a different "
            f"vocabulary of {len(scorer.tokenizer)} tokens; the policy has {len(chat.tokenizer)}"
        )
    if max_length < needed:
        raise SettingsError(
            f"{name} must have a context of at least {needed} tokens, like the engine, got {max_length}"
        )
