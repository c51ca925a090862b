"""Immutable records that the other packages exchange: tasks, samples, tool calls, turns, trajectories and groups.

This module does not use torch, tokenize text or perform I/O.

Axis names used in docstrings throughout the package: B rows, T tokens, G group size, V vocabulary size, N trajectories.
Per-token values are indexed by the predicted token: `logprobs[t]` is log p(ids[t] | ids[:t]).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentfly_kit._display import Displayable, printable, shorten
from agentfly_kit.errors import (
    AlignmentError,
    EngineError,
    SettingsError,
    TaskError,
    check_types,
    checks_keywords,
    is_host_failure,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}.
Message: TypeAlias = dict[str, Any]

# JSON schemas of tools, in the format of the OpenAI API.
Schemas: TypeAlias = Sequence[dict[str, Any]]

# The most probable tokens at one position as (id, text, logprob), in descending order of probability.
Alternatives: TypeAlias = tuple[tuple[int, str, float], ...]

TurnKind: TypeAlias = Literal["prompt", "action", "observation", "forced"]

StopReason: TypeAlias = Literal[
    "answered",  # the model answered without calling a tool
    "env_done",  # the environment ended the episode
    "tool_stopped",  # a tool ended the chain
    "max_turns",  # Agent.max_turns was reached
    "turn_tokens",  # one action was truncated at Sampling.max_tokens
    "chain_tokens",  # the actions of the chain reached Agent.max_tokens in total
    "chain_tool_calls",  # the next tool call would exceed Agent.max_tool_calls
    "context_full",  # the model's context length left no room for the next action, or truncated the last one
    "invalid_call",  # the calls of Agent.max_invalid_calls consecutive actions were all malformed or unknown
    "harness_failed",  # `Agent.harness` raised an error after the first action; see `Trajectory.error`
    "timeout",  # the chain exceeded the wall-clock limit Agent.timeout
    "group_tokens",  # this and the next three: the group's shared budget, `group_budget=`, was exhausted
    "group_turns",
    "group_tool_calls",
    "group_seconds",
    "run_tokens",  # this and the next three: the rollout's shared budget, `budget=`, was exhausted
    "run_turns",
    "run_tool_calls",
    "run_seconds",
    "cancelled",  # cancelled by the user or by another asyncio task
    "error",  # a failure that the model did not cause; see `Trajectory.error`
]

# Stop reasons of chains that exhausted a budget shared by their group or rollout.
BUDGET_STOPS = frozenset(
    f"{of}_{what}" for of in ("group", "run") for what in ("tokens", "turns", "tool_calls", "seconds")
)

# Stop reasons of chains that were truncated by a limit.
TRUNCATED_STOPS: frozenset[str] = BUDGET_STOPS | {
    "max_turns", "turn_tokens", "chain_tokens", "chain_tool_calls", "context_full", "timeout",
}  # fmt: skip

# Stop reasons after which no reward is computed, because the model did not cause them.
UNSCORED_STOPS: frozenset[str] = frozenset({"cancelled", "error"})


def _check_lengths(record: Sample | Turn, names: Sequence[str]) -> None:
    """Raise AlignmentError if a per-token field differs in length from `ids`."""
    count = len(record.ids or ())
    for name in names:
        values = getattr(record, name)
        if values is not None and len(values) != count:
            raise AlignmentError(f"{name} must have one entry per id ({count}), got {len(values)}")


# --- inputs --------------------------------------------------------------------------------------


def normalize_messages(
    messages: Iterable[Any], where: str, error: type[Exception] = SettingsError, *, answered: bool = False
) -> tuple[Message, ...]:
    """Return copies of messages in which all content is a string and each tool call has an id and a dict of arguments.

    Text parts are joined without a separator, as in chat templates that accept parts. `error` is raised for malformed
    calls, for content other than text, and, unless `answered` is True, if the last message is from the assistant. The
    error message begins with `where`.
    """
    out: list[Message] = []
    if not isinstance(messages, Iterable) or not (given := tuple(messages)):
        raise error(f"{where} must have at least one message, got {messages!r:.80}")
    for i, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise error(f"{where}: message {i} must be a dict with 'role' and 'content', got {message!r:.80}")
        at = f"{where}: message {i} (role {message['role']!r})"
        calls = message.get("tool_calls")
        content = _join_text(message.get("content"), "" if calls else None, at, error)
        out.append({**message, "content": content})
        if calls:
            out[-1]["tool_calls"] = [_normalize_call(call, k, at, error) for k, call in enumerate(calls)]
    if out[-1]["role"] == "assistant" and not answered:
        raise error(
            f"{where}: the last message must not be the assistant's, because it would become part of the prompt; "
            "remove it (tasks_from and load_tasks with drop_answer=True move it to the field 'answer'), or begin an "
            "action with chain.force(text, end=False)"
        )
    return tuple(out)


def _join_text(content: Any, missing: str | None, at: str, error: type[Exception]) -> str:
    content = missing if content is None else content
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise error(f"{at}: 'content' must be a string or a list of text parts, got {content!r:.80}")
    for part in content:
        given = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        if set(given) != {"type", "text"} or given["type"] != "text" or not isinstance(given["text"], str):
            raise error(
                f"{at}: each part of 'content' must be {{'type': 'text', 'text': ...}}, got {part!r:.80}; prompts hold "
                "text only, so replace other parts with a description"
            )
    return "".join(part["text"] for part in content)


def _normalize_call(call: Any, index: int, at: str, error: type[Exception]) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        arguments = function["arguments"]
        function["arguments"] = arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        valid = isinstance(function["name"], str) and function["name"] != "" and isinstance(arguments, Mapping)
    except (KeyError, TypeError, ValueError, RecursionError):
        valid = False
    if not valid:
        raise error(
            f"{at}: each of 'tool_calls' must be {{'function': {{'name': ..., 'arguments': {{...}}}}}}, with arguments "
            f"as a dict or as the JSON of one, got {call!r:.80}"
        )
    return {**call, "id": str(call.get("id") or f"call-{index}"), "type": "function", "function": function}


@dataclass(frozen=True)
class Task(Displayable):
    """One problem for an agent.

    Attributes:
        id: Name of the task, unique within a set of tasks.
        messages: Initial messages of the chain, at least one. Content given as text parts is joined to one string.
        fields: Named values that rewards and tools can request.

    Raises:
        TaskError: if `id` is empty, a message lacks a role or text content, or the last message is from the assistant.
    """

    id: str
    messages: tuple[Message, ...]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or not isinstance(self.id, str):
            raise TaskError(f"the id of a task must be a non-empty string, got {self.id!r}")
        object.__setattr__(self, "messages", normalize_messages(self.messages, f"task {self.id!r}", TaskError))

    def __repr__(self) -> str:
        text = shorten(self.messages[-1]["content"], 60)
        return f"Task({self.id!r}, {text!r}, fields: {', '.join(self.fields) or 'none'})"


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
        stop: Strings that end an action. All sampled tokens are kept, but the parsed text ends before the string.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        stop: Any = self.stop  # accept a single string, which tuple() would split into characters
        if not isinstance(stop, str | list | tuple):
            raise SettingsError(f"stop must be a string, or a list or tuple of strings, got {stop!r}")
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise SettingsError(f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}")
        if self.max_tokens < 1:
            raise SettingsError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k < 0:
            raise SettingsError(
                "top_p must be above 0 and at most 1, top_k at least 0 (0 disables it), and min_p between 0 and 1, got "
                f"top_p={self.top_p!r}, top_k={self.top_k!r}, min_p={self.min_p!r}"
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise SettingsError(f"stop must hold non-empty strings (an empty one always matches), got {self.stop!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if top-p, top-k or min-p excludes some tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def replace(self, **changes: Any) -> Sampling:
        return replace(self, **changes)


# --- output of engines ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class TurnRequest(Displayable):
    """Context of a sampling request, for engines that need more than the token ids.

    Attributes:
        task: The task of the chain.
        turn: Index of the action in its chain.
        session: Key under which an engine keeps the KV cache of a chain. `engine.release(session)` frees it.
        messages: The conversation so far.
        tools: JSON schemas of the tools that the model may call.
    """

    task: Task
    turn: int
    session: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, repr=False)
class Sample(Displayable):
    """One sampled action. `ids` contains all sampled tokens, including the stop token.

    Attributes:
        ids: Token ids; None for text-only engines.
        logprobs: Logprobs after temperature and before truncation, in nats; None if the engine does not report them.
        entropies: Exact entropies in nats of the distributions to which `logprobs` refer, one per token.
        stop: What ended sampling: a stop token ("stop"), the limit `Sampling.max_tokens` ("length"), a string from
            `Sampling.stop` ("string"), or an abort of the request ("abort").
        versions: Version of the policy that sampled each token.
        kept_mass: Probability mass kept by top-p, top-k and min-p at each token; None without truncation.
        text: Sampled text, set only by engines that return no ids.
        calls: Tool calls, if the server has parsed them.
        seconds: Duration of the request.
        alternatives: The most probable tokens at each position as (id, logprob), in descending order of probability;
            None unless the engine records them.
        thinking: Thinking, if the server has separated it from `text`.
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
            if self.text is None:
                raise EngineError("a Sample must have ids, or text if the engine is text-only; got neither")
            return
        _check_lengths(self, ("logprobs", "entropies", "versions", "kept_mass", "alternatives"))
        for name in ("logprobs", "entropies", "kept_mass"):
            values = getattr(self, name) or ()
            if not math.isfinite(sum(values)):  # one such chain would otherwise spoil a whole batch
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
        head = ", ".join(f"{t!r} {math.exp(lp):.3f}" for t, lp in list(zip(self.texts, self.logprobs, strict=True))[:5])
        more = ", ..." if len(self.ids) > 5 else ""
        return f"Distribution({head}{more}; entropy {self.entropy:.3f} nats)"


# --- failures as values --------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Failure(Displayable):
    """Serializable record of an exception: its `type`, its `message`, and its `traceback` as text.

    Attributes:
        where: Component that failed: "tool calculator", "reward exact", "engine", "pool", ...
        host: Whether the infrastructure failed, not the model; see `errors.is_host_failure`. Not saved to disk.
    """

    where: str
    type: str
    message: str
    traceback: str = ""
    host: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def from_exception(cls, where: str, error: BaseException) -> Failure:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(where, type(error).__name__, str(error), text, is_host_failure(error))

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.type}: {self.message}")


# --- tools ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolResult(Displayable):
    """Result of one tool call. `seconds` is the duration of the call.

    Attributes:
        ok: Whether the call succeeded.
        observation: The exact text shown to the model.
        error: Unexpected failure; None if the call succeeded or the tool raised `ToolError`.
        truncated: Whether the observation was shortened.
        reward: Turn reward given by the tool.
        done, env_done: Whether the tool (`done`) or the environment (`env_done`) ends the chain.
        metrics: Numbers that the tool reported, by name.

    Raises:
        SettingsError: if `observation` is not a string.
    """

    ok: bool
    observation: str
    error: Failure | None = None
    seconds: float = field(default=0.0, compare=False)
    truncated: bool = False
    reward: float | None = None
    done: bool = False
    env_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.observation, str):
            raise SettingsError(f"the observation of a ToolResult must be a string, got {self.observation!r:.80}")

    def __repr__(self) -> str:
        text = shorten(self.observation, 80)
        flags = "".join(f", {name}" for name in ("truncated", "done", "env_done") if getattr(self, name))
        error = f", error={str(self.error)!r}" if self.error else ""
        return f"ToolResult({'ok' if self.ok else 'failed'}, {text!r}{flags}{error})"


@dataclass(frozen=True)
class ToolCall(Displayable):
    """One tool call written by the model.

    Attributes:
        id: Id of the call. The message with the result contains the same id.
        name, arguments: Name of the tool, and arguments of the call.
        result: Result of the call; None before the call has run.
        error: Parse error, which is shown to the model, or None. After a parse error, `name` may be empty.
        raw: Text from which the call was parsed, if the chat format keeps it.
        rerunner: Function to which `rerun` passes this call. It is set by a running chain and not saved to disk.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    result: ToolResult | None = None
    error: str | None = None
    raw: str = ""
    rerunner: Any = field(default=None, repr=False, compare=False)

    def rerun(self) -> Any:
        """Return an awaitable that reruns the tool with the same arguments on a temporary sandbox lease.

        Exceptions of the tool propagate. Calls without a `rerunner`, such as those loaded from disk, raise EngineError.
        """
        if self.rerunner is None:
            raise EngineError(
                f"this call of {self.name!r} cannot be rerun: it was loaded from disk or made in another process, or "
                f"its tool is unknown; "
                f"call the tool directly: await tool.try_(**call.arguments)"
            )
        return self.rerunner(self)

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle the rerunner, because it refers to sandbox pools, which cannot be sent to another process.
        return self.__dict__ | {"rerunner": None}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        shown = f"{self.name}({arguments})" if self.error is None else f"unreadable: {self.error}"
        return printable(f"ToolCall({shown}{'' if self.result is None else f' -> {self.result.observation!r}'})")


# --- turns and trajectories ----------------------------------------------------------------------


@dataclass(frozen=True)
class Turn(Displayable):
    """Tokens of one author, linked to the preceding turn. Turns form a tree, and a chain is a path from root to leaf.

    `sampled` is True if and only if the policy sampled every id of the turn and the engine reported the logprobs.

    Attributes:
        kind: "prompt", "action", "observation" or "forced".
        author: "task" (prompt), "policy", "script", "person", "tool", "hook", or the name of a role.
        ids: Token ids; None for text-only engines.
        logprobs, entropies, kept_mass, versions: Values per id; see `Sample`. Sampled turns have logprobs and versions.
        text: Decoded ids, for display and parsing. The text is never re-encoded.
        token_texts: Text of each token, for token views.
        messages: Content of the turn as chat messages, for rewards, text-only engines and display.
        tool_calls: Tool calls of an action. The following observation has the same calls with their results.
        stop: Reason why the engine stopped sampling an action; see `Sample.stop`.
        reward: Turn reward, credited to the last preceding action token.
        seed: Seed with which the turn was sampled; None if it was not sampled.
        seconds: Duration of the turn.
        label: Position in the chain, for display, such as "turn 3 of 6".
        parent: The preceding turn; None for the first turn of the chain.
        row: Index of the row that contains this turn. A new row starts after compaction, if `Chat(history="rerender")`
            changes earlier tokens, or if a request of a harness does not continue an existing row.
        alternatives: The most probable tokens at each position, recorded by `LocalEngine(policy, alternatives=5)`.
    """

    kind: TurnKind
    author: str
    ids: tuple[int, ...] | None
    sampled: bool = False
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    kept_mass: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    text: str = ""
    token_texts: tuple[str, ...] | None = field(default=None, repr=False)
    messages: tuple[Message, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str | None = None
    reward: float | None = None
    seed: int | None = None
    seconds: float = field(default=0.0, compare=False)
    label: str = field(default="", compare=False)
    parent: Turn | None = field(default=None, repr=False, compare=False)
    row: int = 0
    alternatives: tuple[Alternatives, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Count the actions here, because chains read the number many times per turn.
        before = 0 if self.parent is None else self.parent.actions
        object.__setattr__(self, "_actions", before + self.completes_action)
        if self.ids is None:
            if self.sampled:
                raise AlignmentError("a sampled turn must have ids, got ids=None")
            return
        _check_lengths(self, ("logprobs", "entropies", "kept_mass", "versions", "alternatives", "token_texts"))
        if self.sampled and (self.logprobs is None or self.versions is None):
            raise AlignmentError("a sampled turn must have a logprob and a policy version per id")

    @property
    def path(self) -> tuple[Turn, ...]:
        """This turn and all its predecessors, oldest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return tuple(reversed(turns))

    @property
    def num_tokens(self) -> int:
        """Number of tokens; 0 with text-only engines."""
        return len(self.ids or ())

    def if_sampled(self, values: Sequence[float] | None, missing: float) -> Sequence[float]:
        """Return `values`, or `missing` for each token if `values` is None or the turn was not sampled."""
        return values if self.sampled and values is not None else [missing] * self.num_tokens

    @property
    def row_path(self) -> tuple[Turn, ...]:
        """This turn and its predecessors in the same row, oldest first."""
        return tuple(turn for turn in self.path if turn.row == self.row)

    @property
    def completes_action(self) -> bool:
        """True if the turn completes an assistant message, which a forced prefix alone does not."""
        return self.kind in ("action", "forced") and bool(self.messages)

    @property
    def actions(self) -> int:
        """Number of actions up to and including this turn."""
        count: int = self.__dict__["_actions"]
        return count

    def __repr__(self) -> str:
        text = shorten(self.text, 60)
        count = "no ids" if self.ids is None else f"{len(self.ids)} tokens"
        label = f"{self.label}, " if self.label else ""
        return printable(f"Turn({label}{self.kind} by {self.author}, {count}, {text!r})")


@dataclass(frozen=True)
class Row(Displayable):
    """One sequence of token ids, exactly as exchanged with the engine. Training computes logprobs per row.

    `ids`, `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts` and `turn_index` concatenate the values of
    all turns of the row; each has shape (T,).

    Attributes:
        trajectory, index: Id of the trajectory, and index of this row in `Trajectory.rows`.
        turns, start: Turns of the row, and index of the first of them in `Trajectory.turns`.
        tools: JSON schemas of the tools in the prompt.
    """

    trajectory: str
    index: int
    turns: tuple[Turn, ...]
    start: int = 0
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def exact(self) -> bool:
        """True if every turn has token ids; turns of text-only engines have none."""
        return all(turn.ids is not None for turn in self.turns)

    def _concatenate(self, values: Callable[[int, Turn], Iterable[Any]], dtype: str) -> npt.NDArray[Any]:
        """Return a read-only array (T,) of the concatenated `values(i, turn)`, where i is the index of the turn."""
        import numpy as np

        self._require_ids()
        array = np.asarray([value for i, turn in enumerate(self.turns) for value in values(i, turn)], dtype=dtype)
        array.setflags(write=False)
        return array

    def _require_ids(self) -> None:
        if not self.exact:
            raise AlignmentError(
                f"trajectory {self.trajectory!r} has no token ids, because its engine is text-only; "
                "masks, training and token views need an engine that declares tokens='exact'"
            )

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Token ids."""
        return self._concatenate(lambda _, turn: turn.ids or (), "int64")

    @cached_property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """True at tokens sampled by the policy."""
        return self._concatenate(lambda _, turn: [turn.sampled] * turn.num_tokens, "bool")

    def sampled_by(self, *authors: str) -> npt.NDArray[np.bool_]:
        """Return the mask of tokens that the policy sampled in these roles (`Turn.author`), by default in all roles."""
        if not authors:
            return self.action_mask
        return self._concatenate(lambda _, turn: [turn.sampled and turn.author in authors] * turn.num_tokens, "bool")

    def written_by(self, *authors: str) -> npt.NDArray[np.bool_]:
        """Return the mask of the tokens in sampled and forced actions of these authors, by default of all authors."""
        return self._concatenate(
            lambda _, turn: (
                [turn.kind in ("action", "forced") and turn.author in (authors or (turn.author,))] * turn.num_tokens
            ),
            "bool",
        )

    @cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Logprobs under the sampling policy, in nats; NaN where `action_mask` is False."""
        return self._concatenate(lambda _, turn: turn.if_sampled(turn.logprobs, math.nan), "float32")

    @cached_property
    def entropies(self) -> npt.NDArray[np.float32]:
        """Entropies in nats; NaN where `action_mask` is False or the engine reported none."""
        return self._concatenate(lambda _, turn: turn.if_sampled(turn.entropies, math.nan), "float32")

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """Version of the policy that sampled each token; -1 where `action_mask` is False."""
        return self._concatenate(lambda _, turn: turn.if_sampled(turn.versions, -1), "int64")

    @cached_property
    def turn_index(self) -> npt.NDArray[np.int64]:
        """Index in `Trajectory.turns` of the turn that contains each token."""
        return self._concatenate(lambda i, turn: [self.start + i] * turn.num_tokens, "int64")

    @cached_property
    def kept_mass(self) -> npt.NDArray[np.float32]:
        """Probability mass kept by top-p, top-k and min-p; NaN for tokens not sampled or sampled without truncation."""
        return self._concatenate(lambda _, turn: turn.if_sampled(turn.kept_mass, math.nan), "float32")

    @cached_property
    def token_texts(self) -> tuple[str, ...]:
        """Text of each token; "[id]" if no tokenizer was available."""
        self._require_ids()
        texts = (turn.token_texts or tuple(f"[{i}]" for i in turn.ids or ()) for turn in self.turns)
        return tuple(itertools.chain.from_iterable(texts))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Conversation of this row, as chat messages."""
        return tuple(message for turn in self.turns for message in turn.messages)

    def __repr__(self) -> str:
        tokens = f"{len(self)} tokens, {int(self.action_mask.sum())} sampled" if self.exact else "no ids"
        return f"Row({self.index} of {self.trajectory!r}, {len(self.turns)} turns, {tokens})"


def _single_row_view(name: str) -> Any:
    """Return a property of `Trajectory` that reads `name` from the only row and raises if there are several rows."""

    def view(trajectory: Trajectory) -> Any:
        return getattr(trajectory._only_row(name), name)

    return property(view, doc=getattr(Row, name).__doc__)


@dataclass(frozen=True)
class Trajectory(Displayable):
    """One finished chain: its task, every token with its author, and its reward.

    `rows` contains the token sequences. Most trajectories have only one; `Turn.row` lists the reasons for a new row.
    `ids`, `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts` and `turn_index`, each of shape (T,), are
    read from the only row and raise `AlignmentError` if there are several rows.

    Attributes:
        id: Id of the trajectory, unique within a run.
        task: The task of the chain.
        group, chain: Id of the group (all chains of one task in one rollout), and index of the chain in this group.
        turns: Turns of all rows, in order.
        stop: Reason why the chain ended; see `StopReason`.
        reward: Reward, or None if unscored. Unscored trajectories are excluded from every mean.
        metrics: Numbers that the rewards reported, by name.
        error: Failure that ended the chain or left it unscored, or None.
        seed, sampling: Seed of the chain, and sampling parameters of its actions.
        seconds: Wall-clock time of the chain.
        tools: JSON schemas of the tools in the prompt.
        dropped: Reason why a training step excluded the trajectory, or None.
        note: User's comment, set by `annotate`.
        vocabulary: Fingerprint of the vocabulary of the token ids (`chat.vocabulary`), or None if it is unknown.
    """

    id: str
    task: Task
    group: str
    chain: int
    turns: tuple[Turn, ...]
    stop: str
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: Failure | None = None
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seconds: float = field(default=0.0, compare=False)
    tools: tuple[dict[str, Any], ...] = ()
    dropped: str | None = None
    note: str = field(default="", compare=False)
    vocabulary: str | None = field(default=None, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Token sequences of the trajectory, in the order of creation. There is at least one."""
        starts = [i for i, turn in enumerate(self.turns) if i == 0 or turn.row != self.turns[i - 1].row]
        if [self.turns[i].row for i in starts] != list(range(len(starts))):
            raise AlignmentError(
                f"row indices of the turns of trajectory {self.id!r} must start at 0 and increase by at most 1, "
                f"got {[turn.row for turn in self.turns]}"
            )
        ends = [*starts[1:], len(self.turns)]
        found = zip(starts or [0], ends, strict=True)
        return tuple(Row(self.id, i, self.turns[a:b], a, self.tools) for i, (a, b) in enumerate(found))

    @property
    def exact(self) -> bool:
        """True if every turn has token ids; turns of text-only engines have none."""
        return all(turn.ids is not None for turn in self.turns)

    def _only_row(self, name: str) -> Row:
        if len(self.rows) > 1:
            raise AlignmentError(
                f"trajectory {self.id!r} has {len(self.rows)} rows, so .{name} is ambiguous; use one of its rows: "
                f"trajectory.rows[0].{name}"
            )
        return self.rows[0]

    ids = _single_row_view("ids")
    action_mask = _single_row_view("action_mask")
    logprobs = _single_row_view("logprobs")
    entropies = _single_row_view("entropies")
    versions = _single_row_view("versions")
    turn_index = _single_row_view("turn_index")
    token_texts = _single_row_view("token_texts")

    @property
    def actions(self) -> tuple[Turn, ...]:
        """Turns that complete an assistant message. A forced prefix belongs to the action that follows it."""
        return tuple(turn for turn in self.turns if turn.completes_action)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All tool calls that were run or rejected, in order, with their results."""
        return tuple(call for turn in self.turns if turn.kind == "observation" for call in turn.tool_calls)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of all turns in order, including messages repeated in the prompts of later rows."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def final(self) -> str | None:
        """Text of the final answer, or None if the chain was truncated, failed, or ended with a tool call."""
        if self.stop not in ("answered", "env_done", "tool_stopped"):
            return None
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return None if message.get("tool_calls") else str(message.get("content") or "")
        return None

    @property
    def truncated(self) -> bool:
        return self.stop in TRUNCATED_STOPS

    @property
    def success(self) -> bool | None:
        """Success of the chain, or None if unscored.

        True if `metrics["success"]` is not 0, or, without this metric, if the reward is at least 1.
        """
        if self.reward is None:
            return None
        return bool(self.metrics["success"]) if "success" in self.metrics else self.reward >= 1

    def replace(self, **changes: Any) -> Trajectory:
        return replace(self, **changes)

    def annotate(self, note: str) -> None:
        """Set `note`, the only mutable attribute. `Rollout.save` and `Rollout.to_frame` include it."""
        if not isinstance(note, str):
            raise SettingsError(f"note must be a string, got {note!r:.80}")
        object.__setattr__(self, "note", note)

    def explain(self) -> str:
        """Return a short description of the chain and its score."""
        calls = self.tool_calls
        did = f"{len(self.actions)} action{'s' * (len(self.actions) != 1)}"
        if calls:
            failed = sum(1 for c in calls if c.result is not None and not c.result.ok)
            did += f" with {len(calls)} tool call{'s' * (len(calls) != 1)}" + (f", {failed} failed" if failed else "")
        end = {
            "answered": f"answered {self.final!r}",
            "error": f"failed: {self.error}",
            "cancelled": "was cancelled",
        }.get(self.stop, f"was stopped by {self.stop}, without an answer" if self.final is None else self.stop)
        parts = ", ".join(f"{k} {v:g}" for k, v in self.metrics.items())
        if self.reward is None:
            score = "Unscored" + (f": {self.error}" if self.error and self.stop != "error" else "")
        else:
            score = f"Reward {self.reward:g}" + (f" ({parts})" if parts else "")
        wanted = self.task.fields.get("answer")
        answer = f" The task's answer is {wanted!r}." if wanted is not None and self.success is False else ""
        return f"{did.capitalize()}, then the chain {end}. {score}.{answer}"

    def __repr__(self) -> str:
        tokens = f"{sum(map(len, self.rows))} tokens" if self.exact else "no ids"
        tokens += f" in {len(self.rows)} rows" if len(self.rows) > 1 else ""
        reward = "unscored" if self.reward is None else f"reward {self.reward:g}"
        return f"Trajectory({self.id!r}, {len(self.actions)} actions, {tokens}, {reward}, {self.stop})"


def get_chain(chains: Any, index: int) -> Trajectory:
    """Return the trajectory at `index` in a group or rollout. Error messages include the number of chains."""
    try:
        found: Trajectory = chains.trajectories[operator.index(index)]
    except (IndexError, TypeError) as error:
        what = f"the index of a {type(chains).__name__} must be an integer below its {len(chains)} chains"
        raise type(error)(f"{what}, got {index!r}") from None
    return found


@dataclass(frozen=True)
class Group(Displayable):
    """The `trajectories` of a task in a rollout. Rewards are compared within a group. `id` is unique within a run."""

    id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def task(self) -> Task:
        return self.trajectories[0].task

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(t.reward for t in self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return get_chain(self, index)

    def __repr__(self) -> str:
        scored = [r for r in self.rewards if r is not None]
        mean = f"mean reward {sum(scored) / len(scored):.3f}" if scored else "unscored"
        return f"Group({self.id!r}, {len(self)} chains, {mean})"


def drop_none(value: Any) -> Any:
    """Return a copy of a JSON value without the keys of dicts whose value is None, at every depth."""
    if isinstance(value, dict):
        return {key: drop_none(part) for key, part in value.items() if part is not None}
    return [drop_none(part) for part in value] if isinstance(value, list | tuple) else value
