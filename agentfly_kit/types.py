"""Immutable records that make up a conversation: tasks, messages, tool calls and turns.

Related records are in `samples` (inputs and outputs of engines) and `trajectories` (finished chains). None of these
modules uses torch, tokenizes text or performs I/O.

Axis names in docstrings throughout the package: B rows, T tokens, G group size, V vocabulary size, N trajectories.
Per-token values are indexed by the predicted token: `logprobs[t]` is log p(ids[t] | ids[:t]).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from agentfly_kit._display import Displayable, printable, shorten
from agentfly_kit.errors import AlignmentError, EngineError, SettingsError, TaskError, check_instance, is_host_failure

T = TypeVar("T")
K = TypeVar("K")

# Chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}. The content of a message with
# images is a tuple of strings and `Image` objects; `text_of` reads either.
Message: TypeAlias = dict[str, Any]

# JSON schemas of tools, in the format of the OpenAI API.
Schemas: TypeAlias = Sequence[dict[str, Any]]

# The most probable tokens at one position as (id, text, logprob), in descending order of probability.
Alternatives: TypeAlias = tuple[tuple[int, str, float], ...]

TurnKind: TypeAlias = Literal["prompt", "action", "observation", "forced"]


class ImageSpan(NamedTuple):
    """An `Image` and its `length` placeholder ids, which begin at index `start` in the ids of the turn or row.

    Spans are distinguished by their positions: an image that occurs twice has two spans.
    """

    image: Any
    start: int
    length: int


def is_image(value: Any) -> bool:
    """Return True for an `Image`, an image of Pillow and a matplotlib figure, without importing their packages."""
    modules = {"agentfly_kit.images", "PIL.Image", "matplotlib.figure"}
    return not modules.isdisjoint(kind.__module__ for kind in type(value).__mro__)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text, in which "[image 640 x 480]" stands for an image."""
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(map(str, content or ()))


def images_of(messages: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the images in normalized messages, in order. An image that occurs twice is returned twice."""
    contents = (m["content"] for m in messages if not isinstance(m.get("content") or "", str))
    return tuple(part for content in contents for part in content if not isinstance(part, str))


def first_image(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the position of the first normalized message with an image, such as "message 0 (from 'user')", or ""."""
    with_images = ((i, m) for i, m in enumerate(messages) if not isinstance(m.get("content") or "", str))
    # A tool result has the name of the tool.
    return next((f"message {i} (from {m.get('name') or m['role']!r})" for i, m in with_images), "")


def check_lengths(record: Any, names: Sequence[str]) -> None:
    """Raise AlignmentError if the length of a per-token field of a Sample or Turn differs from that of `ids`."""
    count = len(record.ids or ())
    for name in names:
        values = getattr(record, name)
        if values is not None and len(values) != count:
            raise AlignmentError(f"{name} must have one entry per id ({count}), got {len(values)}")


def normalize_messages(
    messages: Iterable[Any], where: str, error: type[Exception] = SettingsError, *, answered: bool = False
) -> tuple[Message, ...]:
    """Return copies of messages in which all content has the same form and each tool call has an id and a dict of
    arguments.

    Content without images becomes a string: text parts are joined without a separator, as in chat templates that accept
    parts. Content with images becomes a tuple of strings and `Image` objects. `error` is raised for malformed calls,
    for other content, for invalid images and, unless `answered` is True, if the last message is an assistant message.
    The error message begins with `where`.
    """
    out: list[Message] = []
    if not isinstance(messages, Iterable) or not (given := tuple(messages)):
        raise error(f"{where} must have at least one message, got {messages!r:.80}")
    for i, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise error(f"{where}: message {i} must be a dict with 'role' and 'content', got {message!r:.80}")
        at = f"{where}: message {i} (role {message['role']!r})"
        calls = message.get("tool_calls")
        out.append({**message, "content": _join_parts(message.get("content"), "" if calls else None, at, error)})
        if calls:
            out[-1]["tool_calls"] = [_normalize_call(call, k, at, error) for k, call in enumerate(calls)]
    if out[-1]["role"] == "assistant" and not answered:
        raise error(
            f"{where}: the last message must not be an assistant message, because it would become part of the prompt; "
            "remove it (tasks_from and load_tasks with drop_answer=True move it to the field 'answer'), or begin an "
            "action with chain.force(text, end=False)"
        )
    return tuple(out)


def _join_parts(content: Any, missing: str | None, at: str, error: type[Exception]) -> str | tuple[Any, ...]:
    content = missing if content is None else content
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise error(f"{at}: 'content' must be a string or a list of text and image parts, got {content!r:.80}")
    parts: list[Any] = []
    for part in content:
        part = _to_part(part, at, error)
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts[0] if isinstance(parts[0], str) and len(parts) == 1 else tuple(parts)


def _to_part(part: Any, at: str, error: type[Exception]) -> Any:
    if isinstance(part, str):
        return part
    given = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    if set(given) == {"type", "text"} and given["type"] == "text" and isinstance(given["text"], str):
        return given["text"]
    kind = given.get("type")
    if set(given) != {"type", kind} or kind not in ("image", "image_url"):
        if not is_image(part):
            raise error(
                f"{at}: each part of 'content' must be {{'type': 'text', 'text': ...}}, {{'type': 'image_url', "
                f"'image_url': {{'url': 'data:image/png;base64,...'}}}} or an image, got {part!r:.80}"
            )
        kind = None
    from agentfly_kit import images

    try:
        return images.from_part(given[kind]) if kind else images.Image(part)
    except SettingsError as problem:
        raise error(f"{at}: {problem}") from problem


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
    """A problem to be solved by an agent.

    Attributes:
        id: Id of the task, unique within a set of tasks.
        messages: Initial messages of the chain, at least one. The content of each is a string or a list of parts:
            strings, images, and the parts of the OpenAI API. `normalize_messages` describes the stored form.
        fields: Named values that rewards and tools can request.

    Raises:
        TaskError: if `id` is empty, a message lacks a role or valid content, or the last one is an assistant message.
    """

    id: str
    messages: tuple[Message, ...]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or not isinstance(self.id, str):
            raise TaskError(f"the id of a task must be a non-empty string, got {self.id!r}")
        object.__setattr__(self, "messages", normalize_messages(self.messages, f"task {self.id!r}", TaskError))

    def __repr__(self) -> str:
        text = shorten(text_of(self.messages[-1]), 60)
        return f"Task({self.id!r}, {text!r}, fields: {', '.join(self.fields) or 'none'})"


@dataclass(frozen=True, repr=False)
class Failure(Displayable):
    """Serializable record of an exception: its `type`, its `message`, and its `traceback` as text.

    Attributes:
        where: Component that failed: "tool calculator", "reward exact", "engine", "pool", ...
        host: Whether the infrastructure caused the failure; see `errors.is_host_failure`. It is not saved to disk.
    """

    where: str
    type: str
    message: str
    traceback: str = ""
    host: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def from_exception(cls, where: str, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(where, type(error).__name__, str(error), text, is_host_failure(error))

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.type}: {self.message}")


@dataclass(frozen=True)
class ToolResult(Displayable):
    """Result of a tool call. `seconds` is the duration of the call.

    Attributes:
        ok: Whether the call succeeded.
        observation: The exact text shown to the model.
        error: Unexpected failure; None if the call succeeded or the tool raised `ToolError`.
        truncated: Whether the observation was truncated.
        reward: Turn reward given by the tool.
        done, env_done: Whether the tool (`done`) or the environment (`env_done`) ends the chain.
        metrics: Numbers reported by the tool, keyed by name.
        ran: False if the call reached no tool, because it was malformed, named an unknown tool, had invalid arguments,
            exceeded a limit, or was made after the end of an episode.
        images: Images shown to the model after the text: any values that `Image` accepts. If the engine cannot read
            images, they end the chain with an error.

    Raises:
        SettingsError: if `observation` is not a string, or an image is invalid.
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
    ran: bool = True
    images: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_instance("the observation of a ToolResult", self.observation, str, "a string")
        if self.images:
            from agentfly_kit.images import Image

            object.__setattr__(self, "images", tuple(map(Image, self.images)))

    def __repr__(self) -> str:
        text = shorten(" ".join([self.observation, *map(str, self.images)]).strip(), 80)
        flags = "".join(f", {name}" for name in ("truncated", "done", "env_done") if getattr(self, name))
        error = f", error={str(self.error)!r}" if self.error else ""
        return f"ToolResult({'ok' if self.ok else 'failed'}, {text!r}{flags}{error})"


@dataclass(frozen=True)
class ToolCall(Displayable):
    """A tool call written by the model.

    Attributes:
        id: Id of the call. The message with the result contains the same id.
        name, arguments: Name of the tool, and arguments of the call, which are JSON values.
        result: Result of the call; None until the call has run.
        error: Parse error, which is shown to the model, or None. After a parse error, `name` may be empty. A call that
            is not closed has one.
        raw: Text from which the call was parsed, if the chat format keeps it.
        rerunner: Function to which `rerun` passes this call. It is set by the running chain and not saved to disk.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    result: ToolResult | None = None
    error: str | None = None
    raw: str = ""
    rerunner: Any = field(default=None, repr=False, compare=False)

    def rerun(self) -> Any:
        """Return an awaitable that reruns the tool with the same arguments in a temporarily leased sandbox.

        Exceptions of the tool propagate. Calls without a `rerunner`, such as those loaded from disk, raise EngineError.
        """
        if self.rerunner is None:
            raise EngineError(
                f"this call of {self.name!r} cannot be rerun here, because its tool is unknown; use "
                "await tool.try_(**call.arguments)"
            )
        return self.rerunner(self)

    def __getstate__(self) -> dict[str, Any]:
        # Do not pickle the rerunner, because it refers to sandbox pools, which cannot be sent to another process.
        return self.__dict__ | {"rerunner": None}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        shown = f"{self.name}({arguments})" if self.error is None else f"unreadable: {self.error}"
        return printable(f"ToolCall({shown}{'' if self.result is None else f' -> {self.result.observation!r}'})")


@dataclass(frozen=True)
class Turn(Displayable):
    """Tokens of one author, linked to the preceding turn. Turns form a tree in which each chain is a path.

    `sampled` is True if and only if the policy sampled every id of the turn and the engine reported the logprobs.

    Attributes:
        kind: "prompt", "action", "observation" or "forced": a whole action with messages, or the beginning of the next
            action, without.
        author: "task" (prompt), "policy", "script", "person", "tool", "hook", or the name of a role.
        ids: Token ids; None for text-only engines.
        logprobs, entropies, kept_mass, versions: Per-token values; see `Sample`. Sampled turns have logprobs and
            versions.
        text: Decoded ids, for display and parsing, which are never re-encoded.
        token_texts: Text of each token, for token views.
        messages: Content of the turn as chat messages, for rewards, text-only engines and display. An action has one,
            with "content", "thinking" if there is any, and "tool_calls".
        tool_calls: Tool calls of an action. The following observation has the same calls with their results.
        stop: Reason why the engine stopped sampling an action; see `Sample.stop`.
        reward: Turn reward, credited to the last preceding action token.
        seed: Seed with which the turn was sampled; None if it was not sampled.
        seconds: Duration of the turn.
        label: Position in the chain, for display, such as "turn 3 of 6".
        parent: The preceding turn; None for the first turn of the chain.
        row: Index of the row that contains this turn. A new row starts after compaction, if `Chat(history="rerender")`
            changes earlier tokens, or if a request of a harness does not continue an existing row.
        constrained: Whether a tool choice or response format excluded tokens, in addition to `Sampling`.
        alternatives: The most probable tokens at each position, recorded by `LocalEngine(policy, alternatives=5)`.
        images: Spans of the ids that are placeholders of images.
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
    constrained: bool = False
    alternatives: tuple[Alternatives, ...] | None = field(default=None, repr=False)
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        # Count the actions here, because chains read their number many times per turn.
        before = 0 if self.parent is None else self.parent.actions
        object.__setattr__(self, "_actions", before + self.completes_action)
        if self.sampled and None in (self.ids, self.logprobs, self.versions):
            raise AlignmentError("a sampled turn must have ids, with a logprob and a policy version per id")
        if self.ids is not None:
            check_lengths(self, ("logprobs", "entropies", "kept_mass", "versions", "alternatives", "token_texts"))

        for span in self.images:
            if not 0 <= span.start < span.start + span.length <= self.num_tokens:
                raise AlignmentError(
                    f"spans of images must lie within the {self.num_tokens} ids of the turn, got {span}"
                )

    @property
    def path(self) -> tuple[Turn, ...]:
        """This turn and all its predecessors, oldest first, including those before a fork or a compaction."""
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
        """Return `values`, or `missing` for every token if `values` is None or the turn was not sampled."""
        return values if self.sampled and values is not None else [missing] * self.num_tokens

    @property
    def row_path(self) -> tuple[Turn, ...]:
        """This turn and its predecessors in the same row, oldest first."""
        return tuple(turn for turn in self.path if turn.row == self.row)

    @property
    def completes_action(self) -> bool:
        """True if the turn completes an assistant message. A forced prefix alone does not."""
        return self.kind in ("action", "forced") and bool(self.messages)

    @property
    def actions(self) -> int:
        """Number of actions up to and including this turn."""
        return int(self.__dict__["_actions"])

    def __repr__(self) -> str:
        text = shorten(self.text, 60)
        count = "no ids" if self.ids is None else f"{len(self.ids)} tokens"
        label = f"{self.label}, " if self.label else ""
        return printable(f"Turn({label}{self.kind} by {self.author}, {count}, {text!r})")


def spans_of(turns: Iterable[Turn]) -> tuple[ImageSpan, ...]:
    """Return the spans of consecutive turns, with indices into the concatenated ids."""
    spans: list[ImageSpan] = []
    count = 0
    for turn in turns:
        spans += [span._replace(start=count + span.start) for span in turn.images]
        count += turn.num_tokens
    return tuple(spans)


def images_in(ids: Sequence[int]) -> tuple[ImageSpan, ...]:
    """Return the image spans in token ids encoded by a chat."""
    found: tuple[ImageSpan, ...] = getattr(ids, "images", ())
    return found


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return lists of the items with the same `key(item)`, in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def drop_none(value: Any) -> Any:
    """Return a copy of a JSON value without dict entries whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: drop_none(part) for key, part in value.items() if part is not None}
    return [drop_none(part) for part in value] if isinstance(value, list | tuple) else value
