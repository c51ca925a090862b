"""Records of sampling: sampling parameters, and the inputs and outputs of engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentfly_kit._display import Displayable
from agentfly_kit.errors import EngineError, SettingsError, check_settings, checks_keywords
from agentfly_kit.types import ImageSpan, Message, Task, ToolCall, check_lengths


@checks_keywords
@dataclass(frozen=True)
class Sampling(Displayable):
    """Sampling parameters of one action.

    Recorded logprobs are computed after temperature scaling and before truncation (top-p, top-k, min-p).

    Args:
        temperature: Divisor of the logits, at least 0. With 0, the most probable token is always chosen (greedy).
        max_tokens: Maximum number of tokens per action; `Agent(max_tokens=)` limits the whole chain.
        top_p: Sample from the smallest set of most probable tokens with at least this total probability, in (0, 1].
        top_k: Sample from the `top_k` most probable tokens; 0 disables top-k.
        min_p: Sample from tokens with at least `min_p` times the probability of the most probable token, in [0, 1].
        stop: Strings that end an action. All sampled tokens are kept, but the text is parsed only up to the string.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limits = {
            "temperature": "of at least 0",
            "max_tokens": "of at least 1",
            "top_p": "above 0 and at most 1",
            "top_k": "of at least 0",
            "min_p": "of at least 0 and at most 1",
        }
        check_settings(self, limits)
        # A single string is accepted, but tuple() would split it into characters.
        stop: Any = self.stop
        texts = (stop,) if isinstance(stop, str) else stop
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise SettingsError(f"stop must be non-empty strings, got {stop!r}")
        object.__setattr__(self, "stop", tuple(texts))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if top-p, top-k or min-p excludes some tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def replace(self, **changes: Any) -> Sampling:
        return replace(self, **changes)


@dataclass(frozen=True)
class Constraint(Displayable):
    """Required form of an action, enforced during sampling.

    Attributes:
        choices: Possible forms. In each, texts and JSON schemas (as JSON) alternate, beginning with a text.
        thinking_end: Tag that ends the thinking before the action; "" if the action begins without thinking.
        body: JSON with the fields of a chat completion request that have the same effect, for servers.
    """

    choices: tuple[tuple[str, ...], ...]
    thinking_end: str = ""
    body: str = "{}"


@dataclass(frozen=True, repr=False)
class TurnRequest(Displayable):
    """Context of a sampling request, for engines that need more than the token ids.

    Attributes:
        task: The task of the chain.
        turn: Index of the action in its chain.
        session: Key under which an engine stores the KV cache of a chain. `engine.release(session)` frees it.
        messages: The conversation so far.
        tools: JSON schemas of the tools that the model may call.
        constraint: Form of the action, for engines that can enforce it.
        images: Spans of the ids that are placeholders of images.
    """

    task: Task
    turn: int
    session: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    constraint: Constraint | None = None
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, repr=False)
class Sample(Displayable):
    """A sampled action. `ids` contains all sampled tokens, including the stop token.

    Attributes:
        ids: Token ids; None for text-only engines.
        logprobs: Logprobs after temperature and before truncation, in nats; None if the engine does not report them.
        entropies: Exact entropies of the distributions to which `logprobs` refer, in nats, one per token.
        stop: Reason why sampling ended: a stop token ("stop"), the limit `Sampling.max_tokens` ("length"), a string
            from `Sampling.stop` ("string"), or an aborted request ("abort").
        versions: Version of the policy that sampled each token.
        kept_mass: Probability mass kept by top-p, top-k, min-p and a constraint at each token; None if none of these is
            used.
        text: Sampled text, set only by engines that return no ids.
        calls: Tool calls, if parsed by the server.
        seconds: Duration of the request.
        alternatives: The most probable tokens at each position as (id, logprob), in descending order of probability;
            None unless the engine records them.
        thinking: Thinking, if separated from `text` by the server.
    """

    ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    entropies: tuple[float, ...] | None
    stop: Literal["stop", "length", "string", "abort"]
    versions: tuple[int, ...] | None
    kept_mass: tuple[float, ...] | None = None
    text: str | None = None
    calls: tuple[ToolCall, ...] | None = None
    seconds: float = 0.0
    alternatives: tuple[tuple[tuple[int, float], ...], ...] | None = None
    thinking: str | None = None

    def __post_init__(self) -> None:
        if self.ids is None:
            return
        check_lengths(self, ("logprobs", "entropies", "versions", "kept_mass", "alternatives"))
        for name in ("logprobs", "entropies", "kept_mass"):
            values = getattr(self, name) or ()
            if not math.isfinite(sum(values)):  # a single such sample would invalidate a whole batch
                index = next((i for i, value in enumerate(values) if not math.isfinite(value)), 0)
                raise EngineError(f"{name} of a Sample must be finite, got {values[index]} at token {index}")


@dataclass(frozen=True)
class Distribution(Displayable):
    """Next-token distribution. `ids`, `texts` and `logprobs` are sorted by probability; `entropy` is in nats."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    entropy: float

    def __repr__(self) -> str:
        head = ", ".join(
            f"{t!r} {math.exp(lp):.3f}" for t, lp in list(zip(self.texts, self.logprobs, strict=True))[:5]
        )
        return f"Distribution({head}{', ...' * (len(self.ids) > 5)}; entropy {self.entropy:.3f} nats)"
