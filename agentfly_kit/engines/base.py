"""What every engine offers and declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from agentfly_kit.errors import EngineError
from agentfly_kit.types import Sample, Sampling, TurnRequest


class Engine(ABC):
    """Samples one action at a time. Many calls run at once; each is independent of the others' presence."""

    tokens: Literal["exact", "none"] = "exact"
    """Whether `Sample.ids` are the very ids that were sampled."""
    logprobs: Literal["yes", "no"] = "yes"
    reproducible: bool = False
    """Whether the same ids, sampling and seed give the same sample whatever else runs."""
    author: str = "policy"
    """Who wrote the tokens. Only "policy" tokens are trained."""

    @property
    def version(self) -> int:
        """The policy version that samples now."""
        return 0

    @property
    def max_length(self) -> int:
        """Tokens of context, prompt and action together."""
        return 1 << 30

    @abstractmethod
    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        """Continue `ids` until a stop token, a stop text or `sampling.max_tokens`.

        request: what a scripted or text-only engine needs, and the session whose KV may be kept between turns.
        Raises:  EngineError if the engine failed or cannot hold the ids.
        """

    async def distribution(self, ids: Sequence[int], sampling: Sampling, *, top: int = 20) -> tuple[Any, Any, float]:
        """The `top` most probable next ids, their logprobs, and the entropy of the whole distribution, in nats."""
        raise EngineError(f"{type(self).__name__} cannot show a distribution; use LocalEngine")

    async def update(self, policy: Any) -> None:
        """Sample from these weights from now on."""
        raise EngineError(f"{type(self).__name__} has no weights to update; train with LocalEngine or VLLMEngine")

    def release(self, session: str) -> None:  # noqa: B027 - an engine without KV has nothing to do
        """The chain ended: whatever was kept for it may go."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # no address: what a notebook shows stays the same

    async def close(self) -> None:  # noqa: B027
        """Stop everything that runs. An engine may be used again after it."""
