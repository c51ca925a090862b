"""Finished chains: `Trajectory`, its token sequences (`Row`), `Group`, and the reasons why chains stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentfly_kit._display import Displayable
from agentfly_kit.errors import AlignmentError
from agentfly_kit.samples import Sampling
from agentfly_kit.types import Failure, ImageSpan, Message, Task, ToolCall, Turn, spans_of, text_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

StopReason: TypeAlias = Literal[
    "answered",  # the model answered without calling a tool
    "env_done",  # the environment ended the episode
    "tool_stopped",  # a tool ended the chain
    "max_turns",  # Agent.max_turns was reached
    "turn_tokens",  # an action was truncated at Sampling.max_tokens
    "chain_tokens",  # the actions of the chain reached a total of Agent.max_tokens
    "chain_tool_calls",  # the next tool call would exceed Agent.max_tool_calls
    "context_full",  # the context length of the model left no room for the next action, or truncated the last one
    "invalid_call",  # Agent.max_invalid_calls consecutive actions made only malformed or unknown calls
    "harness_failed",  # `Agent.harness` raised an error after the first action; see `Trajectory.error`
    "timeout",  # the chain exceeded the wall-clock limit Agent.timeout
    "group_tokens",  # this and the next three: a shared budget of the group, `group_budget=`, was exhausted
    "group_turns",
    "group_tool_calls",
    "group_seconds",
    "run_tokens",  # this and the next three: a shared budget of the rollout, `budget=`, was exhausted
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


@dataclass(frozen=True)
class Row(Displayable):
    """Sequence of token ids, exactly as exchanged with the engine. Training computes logprobs per row.

    `ids`, `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts` and `turn_index` concatenate the values of
    all turns of the row; each has shape (T,).

    Attributes:
        trajectory, index: Id of the trajectory, and index of this row in `Trajectory.rows`.
        turns, start: Turns of the row, and index of the first one in `Trajectory.turns`.
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
        """Concatenate `values(i, turn)` for all turns, with turn index i, to a read-only array, (T,)."""
        import numpy as np

        self._require_ids()
        array = np.asarray([value for i, turn in enumerate(self.turns) for value in values(i, turn)], dtype=dtype)
        array.setflags(write=False)
        return array

    def _require_ids(self) -> None:
        if not self.exact:
            raise AlignmentError(
                f"trajectory {self.trajectory!r} has no token ids, because its engine is text-only; use an engine that "
                "declares tokens='exact'"
            )

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """Token ids."""
        return self._concatenate(lambda _, turn: turn.ids or (), "int64")

    @cached_property
    def images(self) -> tuple[ImageSpan, ...]:
        """Spans of image placeholders in the ids."""
        return spans_of(self.turns)

    @cached_property
    def keys(self) -> npt.NDArray[np.int64]:
        """Token ids, in which the ids of placeholders are replaced by hashes of their images; see `images.row_keys`."""
        if not self.images:
            return self.ids
        from agentfly_kit.images import row_keys

        return row_keys(self.ids, self.images)

    @cached_property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """True at tokens sampled by the policy."""
        return self._concatenate(lambda _, turn: [turn.sampled] * turn.num_tokens, "bool")

    def sampled_by(self, *authors: str) -> npt.NDArray[np.bool_]:
        """Return the mask of tokens that the policy sampled as one of these authors (`Turn.author`), by default any."""
        if not authors:
            return self.action_mask
        return self._concatenate(lambda _, turn: [turn.sampled and turn.author in authors] * turn.num_tokens, "bool")

    def written_by(self, *authors: str) -> npt.NDArray[np.bool_]:
        """Return the mask of tokens in sampled and forced actions of these authors; by default of all authors."""
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
        """Index into `Trajectory.turns` of the turn that contains each token."""
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
        """Chat messages of this row."""
        return tuple(message for turn in self.turns for message in turn.messages)

    def __repr__(self) -> str:
        tokens = f"{len(self)} tokens, {int(self.action_mask.sum())} sampled" if self.exact else "no ids"
        return f"Row({self.index} of {self.trajectory!r}, {len(self.turns)} turns, {tokens})"


def _single_row_view(name: str) -> Any:
    """Create a property of `Trajectory` that reads `name` from the only row, and raises if there are several rows."""

    def view(trajectory: Trajectory) -> Any:
        return getattr(trajectory._only_row(name), name)

    return property(view, doc=getattr(Row, name).__doc__)


@dataclass(frozen=True)
class Trajectory(Displayable):
    """A finished chain: its task, every token with its author, and its reward.

    `rows` contains the token sequences. Most trajectories have only one; see `Turn.row` for the exceptions. `ids`,
    `action_mask`, `logprobs`, `entropies`, `versions`, `token_texts` and `turn_index`, each of shape (T,), are read
    from the only row and raise `AlignmentError` if there are several rows.

    Attributes:
        id: Id of the trajectory, unique within a run.
        task: The task of the chain.
        group, chain: Id of the group (all chains of a task in a rollout), and index of the chain in this group.
        turns: Turns of all rows, in order.
        stop: Reason why the chain ended; see `StopReason`.
        reward: Reward, or None if unscored. Unscored trajectories are excluded from every mean.
        metrics: Numbers reported by the rewards, keyed by name.
        error: Failure that ended the chain or left it unscored, or None.
        seed, sampling: Seed of the chain, and sampling parameters of its actions.
        seconds: Wall-clock time of the chain.
        tools: JSON schemas of the tools in the prompt.
        dropped: Reason why a training step excluded the trajectory, or None.
        note: Comment of the user, set by `annotate`.
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
        """Token sequences of the trajectory, at least one, in order of creation."""
        starts = [i for i, turn in enumerate(self.turns) if i == 0 or turn.row != self.turns[i - 1].row]
        found = zip(starts or [0], [*starts[1:], len(self.turns)], strict=True)
        return tuple(Row(self.id, i, self.turns[a:b], a, self.tools) for i, (a, b) in enumerate(found))

    @property
    def exact(self) -> bool:
        """True if every turn has token ids; turns of text-only engines have none."""
        return all(turn.ids is not None for turn in self.turns)

    def _only_row(self, name: str) -> Row:
        if len(self.rows) > 1:
            raise AlignmentError(
                f"trajectory {self.id!r} has {len(self.rows)} rows, so .{name} is ambiguous; use "
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
                return None if message.get("tool_calls") else text_of(message)
        return None

    @property
    def truncated(self) -> bool:
        return self.stop in TRUNCATED_STOPS

    @property
    def success(self) -> bool | None:
        """Success of the chain, or None if unscored.

        True if `metrics["success"]` is nonzero or, if there is no such metric, if the reward is at least 1.
        """
        if self.reward is None:
            return None
        return bool(self.metrics["success"]) if "success" in self.metrics else self.reward >= 1

    def replace(self, **changes: Any) -> Trajectory:
        return replace(self, **changes)

    def annotate(self, note: str) -> None:
        """Set `note`, the only mutable attribute. `Rollout.save` and `Rollout.to_frame` include it."""
        object.__setattr__(self, "note", note)

    def explain(self) -> str:
        """Return a short description of the chain and its score, in one line or, if it is long, two."""
        calls = self.tool_calls
        did = f"{len(self.actions)} action{'s' * (len(self.actions) != 1)}"
        if calls:
            failed = sum(1 for c in calls if c.result is not None and not c.result.ok)
            did += f" with {len(calls)} tool call{'s' * (len(calls) != 1)}" + (f", {failed} failed" if failed else "")
        end = {
            "answered": f"answered {self.final!r}",
            "error": f"failed: {self.error}",
            "cancelled": "was cancelled",
            "env_done": "was ended by its environment",
        }.get(self.stop, f"was stopped by {self.stop}, without an answer" if self.final is None else self.stop)
        # Leave out a metric that only repeats the reward.
        shown = {name: value for name, value in self.metrics.items() if (name, value) != ("reward", self.reward)}
        if self.reward is not None and shown.get("success") == (self.reward >= 1):
            del shown["success"]
        if [*shown.values()] == [self.reward]:
            shown = {}
        parts = ", ".join(f"{k} {v:g}" for k, v in shown.items())
        if self.reward is None:
            score = "Unscored" + (f": {self.error}" if self.error and self.stop != "error" else "")
        else:
            score = f"Reward {self.reward:g}" + (f" ({parts})" if parts else "")
        wanted = self.task.fields.get("answer")
        answer = f" The task's answer is {wanted!r}." if wanted is not None and self.success is False else ""
        what, score = f"{did.capitalize()}, then the chain {end}.", f"{score}.{answer}"
        # JupyterLab breaks longer lines of printed text anywhere, also inside words.
        return f"{what} {score}" if len(what) + len(score) < 105 else f"{what}\n{score}"

    def __repr__(self) -> str:
        tokens = f"{sum(map(len, self.rows))} tokens" if self.exact else "no ids"
        tokens += f" in {len(self.rows)} rows" if len(self.rows) > 1 else ""
        reward = "unscored" if self.reward is None else f"reward {self.reward:g}"
        return f"Trajectory({self.id!r}, {len(self.actions)} actions, {tokens}, {reward}, {self.stop})"


@dataclass(frozen=True)
class Group(Displayable):
    """All `trajectories` of a task in a rollout. Rewards are compared within a group. `id` is unique within a run."""

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
        return self.trajectories[index]

    def __repr__(self) -> str:
        scored = [r for r in self.rewards if r is not None]
        mean = f"mean reward {sum(scored) / len(scored):.3f}" if scored else "unscored"
        return f"Group({self.id!r}, {len(self)} chains, {mean})"
