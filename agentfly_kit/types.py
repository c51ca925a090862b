"""The words: frozen records that pass between the stages. No torch, no text processing, no I/O.

Axis letters, used in every docstring of the package: B rows, T tokens, G group, V vocabulary, N trajectories.
Everything per token is indexed by the predicted token: `logprobs[t]` is log p(ids[t] | ids[:t]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentfly_kit import _html
from agentfly_kit.errors import AlignmentError, EngineError, SettingsError, TaskError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Message: TypeAlias = dict[str, Any]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}."""

TurnKind: TypeAlias = Literal["prompt", "action", "observation", "forced"]

StopReason: TypeAlias = Literal[
    "answered",  # the model wrote an answer and called no tool
    "env_done",  # the environment says that the episode is over
    "tool_stopped",  # a tool asked for the end
    "max_turns",  # the agent's limit of actions was reached
    "turn_tokens",  # one action reached Sampling.max_tokens and was cut
    "chain_tokens",  # the chain's actions reached Agent.max_tokens together
    "chain_tool_calls",  # the chain wanted to call more tools than Agent.max_tool_calls
    "context_full",  # the next prompt does not fit the model
    "invalid_call",  # several malformed or unknown tool calls in a row
    "timeout",  # the chain's own wall clock
    "group_tokens",  # the chains of its group had used up `group_budget=`: tokens, turns, tool calls, seconds
    "group_turns",
    "group_tool_calls",
    "group_seconds",
    "run_tokens",  # all chains of the rollout had used up `budget=`
    "run_turns",
    "run_tool_calls",
    "run_seconds",
    "cancelled",  # a person or another task stopped it
    "error",  # our fault: host, pool, server or code; `Trajectory.error` says which
]

BUDGET_STOPS: frozenset[str] = frozenset(
    f"{whose}_{what}" for whose in ("group", "run") for what in ("tokens", "turns", "tool_calls", "seconds")
)
"""Stop reasons of a budget that a chain shares with others."""

TRUNCATED_STOPS: frozenset[str] = BUDGET_STOPS | {
    "max_turns", "turn_tokens", "chain_tokens", "chain_tool_calls", "context_full", "timeout",
}  # fmt: skip
"""Stop reasons that cut a chain which would have gone on."""

UNSCORED_STOPS: frozenset[str] = frozenset({"cancelled", "error"})
"""Stop reasons after which no reward is computed: they are not the model's doing."""


def _read_only_array(values: Any, dtype: str) -> npt.NDArray[Any]:
    import numpy as np

    array = np.asarray(values, dtype=dtype)
    array.setflags(write=False)
    return array


# --- what goes in --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One question: the messages that open the chain, and fields that rewards and tools may ask for by name."""

    id: str
    messages: tuple[Message, ...]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or not isinstance(self.id, str):
            raise TaskError(f"a task needs an id that is a non-empty text; got {self.id!r}")
        messages = tuple(self.messages)
        if not messages:
            raise TaskError(f"task {self.id!r} has no messages; give at least one user message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise TaskError(f"task {self.id!r}: message {i} needs 'role' and 'content'; got {message!r}")
        object.__setattr__(self, "messages", messages)

    def __repr__(self) -> str:
        text = str(self.messages[-1]["content"])
        text = text if len(text) <= 60 else text[:57] + "..."
        return f"Task({self.id!r}, {text!r}, fields: {', '.join(self.fields) or 'none'})"

    def _repr_html_(self) -> str:
        content = _html.table(
            ("role", "content"), ((m["role"], _html.Code(str(m["content"]))) for m in self.messages), 2000
        )
        kept = {
            name: _html.Code(value if isinstance(value, str) else repr(value)) for name, value in self.fields.items()
        }
        fields = _html.details(f"fields: {', '.join(self.fields)}", _html.table((), kept.items()), is_open=True)
        return _html.heading(f"Task {self.id}") + content + (fields if self.fields else "")


@dataclass(frozen=True)
class Sampling:
    """How an engine samples one turn. Logprobs are those after temperature and before any truncation."""

    temperature: float = 1.0
    max_tokens: int = 256
    """Tokens of one action; the chain's own limit is `Agent(max_tokens=)`."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end a turn. The last sampled token stays whole; only the parser cuts the text."""

    def __post_init__(self) -> None:
        stop: Any = self.stop  # a text alone is what people type; as a tuple it would be its letters
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise SettingsError(f"temperature={self.temperature!r}: give a finite number >= 0 (0 is greedy)")
        if self.max_tokens < 1:
            raise SettingsError(f"max_tokens={self.max_tokens!r}: give at least 1")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k < 0:
            raise SettingsError(
                f"top_p={self.top_p!r}, top_k={self.top_k!r}, min_p={self.min_p!r}: "
                "want 0 < top_p <= 1, top_k >= 0 (0 is off), 0 <= min_p <= 1"
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise SettingsError(f"stop={self.stop!r}: give texts that are not empty (an empty one is in every text)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def replace(self, **changes: Any) -> Sampling:
        return replace(self, **changes)


# --- what an engine gives ------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnRequest:
    """Beside the ids: what a text-only or scripted engine needs to know, and the key of the KV that may be kept."""

    task: Task
    turn: int
    """Index of the action within its chain, from 0."""
    session: str
    """The chain's name; KV held under it is dropped by `engine.release(session)`."""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """One sampled action. Ids are never trimmed: a sampled stop token is the last id and counts."""

    ids: tuple[int, ...] | None
    """None from an engine that gives only text."""
    logprobs: tuple[float, ...] | None
    """After temperature, before truncation, in nats; None where the engine gives none."""
    entropies: tuple[float, ...] | None
    """Exact entropy of the same distribution, in nats."""
    stop: Literal["stop", "length", "string", "abort"]
    versions: tuple[int, ...] | None
    """The policy version behind each token."""
    kept_mass: tuple[float, ...] | None = None
    """Probability that top-p, top-k, min-p kept, a token; None when nothing was cut."""
    text: str | None = None
    """Only from engines without tokens."""
    calls: tuple[ToolCall, ...] | None = None
    """Beside `text`: the tool calls, where the server took them apart itself."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.ids is None:
            if self.text is None:
                raise EngineError("a Sample needs ids, or text where the engine gives no ids; got neither")
            return
        for name in ("logprobs", "entropies", "versions", "kept_mass"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise AlignmentError(f"a Sample of {len(self.ids)} ids came with {len(values)} {name}; want one each")


@dataclass(frozen=True)
class Distribution:
    """The next-token distribution before anything is sampled, most probable first."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    entropy: float
    """Of the whole distribution, in nats."""

    def __repr__(self) -> str:
        head = ", ".join(f"{t!r} {math.exp(lp):.3f}" for t, lp in list(zip(self.texts, self.logprobs, strict=True))[:5])
        more = ", ..." if len(self.ids) > 5 else ""
        return f"Distribution({head}{more}; entropy {self.entropy:.3f} nats)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:right'>{i}</td><td><code>{_html.escape(repr(t))}</code></td>"
            f"<td style='text-align:right'>{math.exp(lp):.4f}</td></tr>"
            for i, t, lp in zip(self.ids, self.texts, self.logprobs, strict=True)
        )
        return (
            "<table><thead><tr><th>id</th><th>token</th><th>probability</th></tr></thead>"
            f"<tbody>{rows}</tbody></table><p>entropy {self.entropy:.3f} nats</p>"
        )


# --- failures as values --------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """An exception as data: it survives saving, and it does not keep frames alive."""

    where: str
    """"tool calculator", "reward exact", "engine", "pool", ..."""
    type: str
    message: str
    traceback: str = ""

    @classmethod
    def from_exception(cls, where: str, error: BaseException) -> Failure:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(where, type(error).__name__, str(error), text)

    def __str__(self) -> str:
        return f"{self.where}: {self.type}: {self.message}"


# --- tools ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolResult:
    """What one call gave: `observation` is exactly the text that the model is shown."""

    ok: bool
    observation: str
    error: Failure | None = None
    """None when ok, and when the tool itself told the model (`ToolError`); else our fault, with its traceback."""
    seconds: float = field(default=0.0, compare=False)
    truncated: bool = False
    reward: float | None = None
    """A turn reward that the tool gave."""
    done: bool = False
    """The tool ends the chain."""
    env_done: bool = False
    """The environment says that the episode is over, which ends the chain too."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        text = self.observation if len(self.observation) <= 80 else self.observation[:77] + "..."
        flags = "".join(f", {name}" for name in ("truncated", "done", "env_done") if getattr(self, name))
        error = f", error={str(self.error)!r}" if self.error else ""
        return f"ToolResult({'ok' if self.ok else 'failed'}, {text!r}{flags}{error})"


@dataclass(frozen=True)
class ToolCall:
    """One call that the model wrote. `result` is set once it ran; `error` says why it could not be read."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: ToolResult | None = None
    error: str | None = None
    """The parser's complaint, told to the model, when the text was no call; `name` may then be empty."""
    raw: str = ""
    rerunner: Any = field(default=None, repr=False, compare=False)
    """Set by a live chain: `call -> awaitable`, so that `rerun` can call the very tool that ran; lost on disk."""

    def rerun(self) -> Any:
        """Await it: call the tool again with the same arguments, on a throw-away lease; what it raises is raised."""
        if self.rerunner is None:
            raise EngineError(
                f"this call of {self.name!r} has no tool behind it (it was loaded from disk, or its name was unknown); "
                f"call the tool yourself: await tool.try_(**call.arguments)"
            )
        return self.rerunner(self)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        shown = f"{self.name}({arguments})" if self.error is None else f"unreadable: {self.error}"
        return f"ToolCall({shown}{'' if self.result is None else f' -> {self.result.observation!r}'})"

    def _repr_html_(self) -> str:
        return _html.table(_CALL_COLUMNS, [_call_row(self)], 2000) + _tracebacks([self])


_CALL_COLUMNS = ("call", "arguments", "", "result", "seconds")


def _call_row(call: ToolCall) -> tuple[Any, ...]:
    result = call.result
    state = "unreadable" if call.error else "not run" if result is None else "ok" if result.ok else "failed"
    state += ", cut" if result is not None and result.truncated else ""
    content = call.error or ("" if result is None else result.observation)
    arguments = ", ".join(f"{k}={v!r}" for k, v in call.arguments.items())
    return (
        call.name or "?",
        _html.Code(arguments),
        state,
        _html.Code(content),
        None if result is None else result.seconds,
    )


def _tracebacks(calls: Sequence[ToolCall]) -> str:
    """Of what was our fault: a click away."""
    failed = [(c.name, c.result.error) for c in calls if c.result is not None and c.result.error is not None]
    return "".join(
        _html.details(f"{name}: {error}", f"<pre>{_html.escape(error.traceback or str(error), 4000)}</pre>")
        for name, error in failed[:5]
    )


# --- turns and trajectories ----------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A node of the tree: some tokens by one author, and the turn they follow. A chain is the path from a leaf.

    `sampled` is provenance, set where the token is made: true if and only if this policy sampled every id of the turn.
    """

    kind: TurnKind
    author: str
    """"task" (prompt), "policy", "script", "person", "tool", "hook"; roles have their own names."""
    ids: tuple[int, ...] | None
    """None from a text-only engine."""
    sampled: bool = False
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    kept_mass: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    text: str = ""
    """A view of the ids, for people and parsers; never encoded again."""
    token_texts: tuple[str, ...] | None = field(default=None, repr=False)
    """The text of each id alone, for token views; shared strings, so it costs a pointer a token."""
    messages: tuple[Message, ...] = ()
    """What the turn says as chat messages: for rewards, text-only engines and people."""
    tool_calls: tuple[ToolCall, ...] = ()
    """On an action: the calls that it wrote. On the observation after it: the same calls with their results."""
    stop: str | None = None
    """Why the engine stopped an action: stop, length, string, abort."""
    reward: float | None = None
    """A turn reward; it is credited to the last action token before it."""
    seed: int | None = None
    seconds: float = field(default=0.0, compare=False)
    label: str = field(default="", compare=False)
    """Where it stands in its chain: "turn 3 of 6"."""
    parent: Turn | None = field(default=None, repr=False, compare=False)
    row: int = 0
    """Which of its chain's rows it stands in: a compaction, or a history that is rendered anew, begins the next one."""

    def __post_init__(self) -> None:
        if self.ids is None:
            if self.sampled:
                raise AlignmentError("a turn without ids cannot be marked as sampled")
            return
        count = len(self.ids)
        for values in (self.logprobs, self.entropies, self.kept_mass, self.versions, self.token_texts):
            if values is not None and len(values) != count:
                names = ("logprobs", "entropies", "kept_mass", "versions", "token_texts")
                name = next(name for name in names if getattr(self, name) is values)
                raise AlignmentError(f"a turn of {count} ids has {len(values)} {name}; want one each")
        if self.sampled and (self.logprobs is None or self.versions is None):
            raise AlignmentError("a sampled turn needs a logprob and a policy version for each id")

    @property
    def path(self) -> tuple[Turn, ...]:
        """This turn and all before it, oldest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return tuple(reversed(turns))

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        count = "no ids" if self.ids is None else f"{len(self.ids)} tokens"
        label = f"{self.label}, " if self.label else ""
        return f"Turn({label}{self.kind} by {self.author}, {count}, {text!r})"


@dataclass(frozen=True)
class Row:
    """One sequence of token ids, exactly as the engine was given them and gave them: what an update sees at once.

    `ids`, `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts`, `turn_index` are views of its turns, (T,)
    each.
    """

    trajectory: str
    """Of which it is a row, by id."""
    index: int
    """Which of the trajectory's rows, from 0."""
    turns: tuple[Turn, ...]
    start: int = 0
    """Index in `trajectory.turns` of its first turn."""
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def exact(self) -> bool:
        """Whether every turn has ids; a text-only engine gives none."""
        return all(turn.ids is not None for turn in self.turns)

    def _require_ids(self) -> None:
        if not self.exact:
            raise AlignmentError(
                f"trajectory {self.trajectory!r} came from an engine that gives text only: it has no token ids. "
                "Use an engine that declares tokens='exact' for masks, training and token views"
            )

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        self._require_ids()
        return _read_only_array([i for turn in self.turns for i in turn.ids or ()], "int64")

    @cached_property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """True where this policy sampled the token."""
        self._require_ids()
        return _read_only_array([turn.sampled for turn in self.turns for _ in turn.ids or ()], "bool")

    def sampled_by(self, *authors: str) -> npt.NDArray[np.bool_]:
        """True where this policy sampled the token in the name of one of these authors: the mask of some of its roles.

        Without any, `action_mask`.
        """
        self._require_ids()
        if not authors:
            return self.action_mask
        return _read_only_array(
            [turn.sampled and turn.author in authors for turn in self.turns for _ in turn.ids or ()], "bool"
        )

    @cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Behaviour logprobs in nats; NaN where the mask is 0."""
        return self._per_token("logprobs")

    @cached_property
    def entropies(self) -> npt.NDArray[np.float32]:
        """In nats; NaN where the mask is 0 or the engine gave none."""
        return self._per_token("entropies")

    @cached_property
    def token_texts(self) -> tuple[str, ...]:
        """The text of each token alone; the id in brackets where no tokenizer was at hand."""
        self._require_ids()
        return tuple(
            piece
            for turn in self.turns
            for piece in (turn.token_texts if turn.token_texts is not None else [f"[{i}]" for i in turn.ids or ()])
        )

    @cached_property
    def turn_index(self) -> npt.NDArray[np.int64]:
        """Which of the trajectory's `turns` each token belongs to."""
        self._require_ids()
        return _read_only_array([self.start + i for i, turn in enumerate(self.turns) for _ in turn.ids or ()], "int64")

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """Policy version behind each token; -1 where the mask is 0."""
        self._require_ids()
        out: list[int] = []
        for turn in self.turns:
            n = len(turn.ids or ())
            out.extend(turn.versions if turn.sampled and turn.versions is not None else [-1] * n)
        return _read_only_array(out, "int64")

    def _per_token(self, name: str) -> npt.NDArray[np.float32]:
        self._require_ids()
        out: list[float] = []
        for turn in self.turns:
            values = getattr(turn, name) if turn.sampled else None
            out.extend(values if values is not None else [math.nan] * len(turn.ids or ()))
        return _read_only_array(out, "float32")

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the engine was told and said in this row, as chat messages."""
        return tuple(message for turn in self.turns for message in turn.messages)

    def __repr__(self) -> str:
        tokens = f"{len(self)} tokens, {int(self.action_mask.sum())} sampled" if self.exact else "no ids"
        return f"Row({self.index} of {self.trajectory!r}, {len(self.turns)} turns, {tokens})"


@dataclass(frozen=True, eq=True)
class Trajectory:
    """One finished chain: what was asked, every token with its author, and how it was scored.

    `rows` are its sequences of token ids: one, unless a compaction or a history rendered anew began another. `ids`,
    `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts`, `turn_index` are those of the only row, with one
    length T; where there are several they raise and name `rows`.
    """

    id: str
    """Unique within a run: rows, frames and widgets are joined by it."""
    task: Task
    group: str
    """Chains of one task in one rollout share it."""
    chain: int
    """Index in its group, from 0."""
    turns: tuple[Turn, ...]
    """Of all rows, in order."""
    stop: str
    reward: float | None = None
    """None is unscored: left out of every mean, never 0.0."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: Failure | None = None
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seconds: float = field(default=0.0, compare=False)
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas that were in the prompt."""
    dropped: str | None = None
    """Why a training step left it out; None where it was trained on, or where no step has seen it."""

    # --- tokens ---

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Its sequences of token ids, in the order in which they were made; one at least.

        Raises:  AlignmentError if the turns' `row` do not count up from 0.
        """
        starts = [i for i, turn in enumerate(self.turns) if i == 0 or turn.row != self.turns[i - 1].row]
        if [self.turns[i].row for i in starts] != list(range(len(starts))):
            raise AlignmentError(
                f"trajectory {self.id!r} has turns in the rows {[turn.row for turn in self.turns]}; rows are counted "
                "from 0, and each is finished before the next begins"
            )
        ends = [*starts[1:], len(self.turns)]
        found = zip(starts or [0], ends, strict=True)
        return tuple(Row(self.id, i, self.turns[a:b], a, self.tools) for i, (a, b) in enumerate(found))

    @property
    def exact(self) -> bool:
        """Whether every turn has ids; a text-only engine gives none."""
        return all(turn.ids is not None for turn in self.turns)

    def _only_row(self, name: str) -> Row:
        if len(self.rows) > 1:
            raise AlignmentError(
                f"trajectory {self.id!r} has {len(self.rows)} rows, so there is no one .{name}; take those of a row: "
                f"trajectory.rows[0].{name}"
            )
        return self.rows[0]

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._only_row("ids").ids

    @property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """True where this policy sampled the token."""
        return self._only_row("action_mask").action_mask

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Behaviour logprobs in nats; NaN where the mask is 0."""
        return self._only_row("logprobs").logprobs

    @property
    def entropies(self) -> npt.NDArray[np.float32]:
        """In nats; NaN where the mask is 0 or the engine gave none."""
        return self._only_row("entropies").entropies

    @property
    def token_texts(self) -> tuple[str, ...]:
        """The text of each token alone; the id in brackets where no tokenizer was at hand."""
        return self._only_row("token_texts").token_texts

    @property
    def turn_index(self) -> npt.NDArray[np.int64]:
        """Which of `turns` each token belongs to."""
        return self._only_row("turn_index").turn_index

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """Policy version behind each token; -1 where the mask is 0."""
        return self._only_row("versions").versions

    # --- what happened ---

    @property
    def actions(self) -> tuple[Turn, ...]:
        """Turns that complete an assistant's message; a forced beginning belongs to the action after it."""
        return tuple(turn for turn in self.turns if turn.kind in ("action", "forced") and turn.messages)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Every call that ran or was refused, in order, with its result."""
        return tuple(call for turn in self.turns if turn.kind == "observation" for call in turn.tool_calls)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, in the order of the turns; what a later row's prompt repeats is there again."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def final(self) -> str | None:
        """Text of the last answer; None if the chain never answered (cut, failed, or still calling tools)."""
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
        """`metrics["success"]` if a reward gave one, else reward >= 1; None if unscored."""
        if self.reward is None:
            return None
        return bool(self.metrics["success"]) if "success" in self.metrics else self.reward >= 1

    def replace(self, **changes: Any) -> Trajectory:
        return replace(self, **changes)

    def explain(self) -> str:
        """Why it got its reward, in a sentence or two."""
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

    def _repr_html_(self) -> str:
        colours = {"prompt": "#8884", "action": "#2a82", "observation": "#28c2", "forced": "#c822"}
        several, left = len(self.rows) > 1, f"<th style='{_html.LEFT}'>"
        rows = "".join(
            f"<tr><td style='{_html.RIGHT}'>{i}</td>{f'<td>{turn.row}</td>' if several else ''}"
            f"<td style='{_html.LEFT}'>{turn.kind}</td>"
            f"<td style='{_html.LEFT}'>{_html.escape(turn.author)}</td>"
            f"<td style='{_html.RIGHT}'>{'–' if turn.ids is None else len(turn.ids)}</td>"
            f"<td style='text-align:left;background:{colours[turn.kind]}'><code style='white-space:pre-wrap'>"
            f"{_html.escape(turn.text)}</code></td></tr>"
            for i, turn in enumerate(self.turns)
        )
        return (
            f"<p><b>{_html.escape(self.id)}</b>: {_html.escape(self.explain())}</p>"
            f"<table><thead><tr><th></th>{'<th>row</th>' if several else ''}{left}kind</th>{left}author</th>"
            f"<th>tokens</th>{left}text</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>" + _tracebacks(self.tool_calls)
        )


@dataclass(frozen=True)
class Group:
    """The chains of one task in one rollout: rewards are compared within it."""

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

    def __repr__(self) -> str:
        scored = [r for r in self.rewards if r is not None]
        mean = f"mean reward {sum(scored) / len(scored):.3f}" if scored else "unscored"
        return f"Group({self.id!r}, {len(self)} chains, {mean})"

    def _repr_html_(self) -> str:
        rows = ((t.chain, t.reward, t.stop, len(t.actions), t.explain()) for t in self.trajectories[:50])
        more = f"<p>and {len(self) - 50} more</p>" if len(self) > 50 else ""
        return _html.heading(self) + _html.table(("chain", "reward", "end", "actions", "why"), rows) + more


# --- events and progress -------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutEvent:
    """One change of a chain. `state` is what the chain does from now on.

    All events of a rollout come in the order of `sequence`, without gaps. Of one chain they nest: every start is
    followed by its own end, also where something failed or was cancelled; a chain's own are its first and its last.
    """

    sequence: int
    kind: Literal["chain", "turn", "tool", "reward"]
    phase: Literal["start", "end"]
    trajectory: str
    task: str
    turn: int
    state: Literal["waiting", "sampling", "tool", "scoring", "done", "failed", "cancelled"]
    time: float
    """Seconds since the rollout started."""
    detail: str = ""
    """Of a turn's end its text, of a tool its name, of a chain's end its stop reason; of what failed, how."""
    call: str = ""
    """Of a tool event: the call's id. The calls of one action run side by side."""


# --- one optimisation step -----------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """What one `ppo_step` did. Means over action tokens unless a field says otherwise."""

    loss: float
    policy_loss: float
    approx_kl: float
    """Mean of k3(new, old), nats a token, on the last epoch's forward: over the tokens that were run. Rows without
    signal are not (see `dropped_groups`), so it is what the others moved; `target_kl` runs every row, and has the mean
    over all tokens."""
    clip_fraction: float
    """Share of action tokens whose clip binds, given the advantage's sign, on the last epoch's forward."""
    entropy: float
    """Exact, at the sampling temperature, nats a token."""
    grad_norm: float
    """Mean over updates of the norm before clipping."""
    value_loss: float = math.nan
    kl_reference: float = math.nan
    """To the reference policy, of the kind that was asked for, nats a token."""
    explained_variance: float = math.nan
    ratio_max: float = math.nan
    effective_sample_size: float = math.nan
    """Share of the sample that is left after `correction=` weighed it: of tokens, or of rows."""
    sampler_gap: float = math.nan
    """Largest |engine logprob - trainer logprob| before the first update: over up to eight rows of the batch with
    old_logprobs="auto", and over all of them where they were recomputed; NaN with "engine"."""
    reward_mean: float = math.nan
    reward_std: float = math.nan
    advantage_mean: float = math.nan
    unscored: float = 0.0
    """Share of trajectories without a reward."""
    truncated: float = 0.0
    updates: int = 0
    rows: int = 0
    tokens: int = 0
    """Action tokens trained on, an epoch."""
    dropped_groups: int = 0
    """Groups without signal that were left out, exactly."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Trajectories that were not trained on, by reason: unscored, truncated, or what a filter said."""
    stopped_early: bool = False
    lr: float = math.nan
    seconds: float = field(default=0.0, compare=False)
    phases: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    """Seconds a phase: old, forward, backward, optimizer."""
    detail: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """With detail=True: (B, T) float32 arrays on the batch's rows: logprob before and after, ratio, ..."""
    batch: Any = field(default=None, compare=False, repr=False)

    def scalars(self) -> dict[str, float]:
        """The scalar fields, as JSON can hold them; NaN ones are left out."""
        out: dict[str, float] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool | int | float) and not (isinstance(value, float) and math.isnan(value)):
                out[name] = value
        return out

    def _repr_html_(self) -> str:
        numbers = self.scalars()
        headline = {name: numbers[name] for name in _HEADLINE_STATS if name in numbers}
        title = f"Stats of a step (updates: {self.updates}, rows: {self.rows}, tokens: {self.tokens:,})"
        whole = _html.table(("stat", "value"), numbers.items())
        return (
            _html.heading(title)
            + _html.table(tuple(headline), [headline.values()])
            + _html.details("all numbers", whole)
        )


_HEADLINE_STATS = (
    "loss",
    "approx_kl",
    "clip_fraction",
    "entropy",
    "grad_norm",
    "ratio_max",
    "sampler_gap",
    "reward_mean",
)
"""What a person looks at first."""
