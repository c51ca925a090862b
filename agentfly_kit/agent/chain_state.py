"""`ChainState`, the turns, stop reason, sandboxes and events of a trajectory in progress.

Turns form a tree through their parents; a chain is the path from the root to its last turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from agentfly_kit._async.listeners import Listeners
from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent.budget import nudge_after
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import encode_observation, label, observation_turn, prompt_turn, text_fields
from agentfly_kit.errors import LeaseRevoked, SettingsError
from agentfly_kit.rewards import Score
from agentfly_kit.samples import Constraint
from agentfly_kit.tools.context import Context
from agentfly_kit.trajectories import BUDGET_STOPS, Trajectory
from agentfly_kit.types import Failure, Message, Task, ToolCall, ToolResult, Turn

_sessions = itertools.count()  # numbers of the KV cache sessions; seeds do not depend on them

# Stop reasons, besides "answered", after which `observe` and `compact` may still be called.
_CONTINUES_AFTER = {"observe": ("turn_tokens",), "compact": ("turn_tokens", "context_full")}
# Methods that do not continue the chain and may therefore be called after any stop reason.
_ACCEPTED_ALWAYS = ("rewind", "fork", "finish", "distribution")


class ChainState(Displayable):
    """State of a trajectory in progress, with methods that record turns and events.

    Attributes:
        turn: the last turn of the chain.
        author: author recorded for sampled turns; by default the agent's name.
        stop, error: stop reason and failure of an ended chain, or None.
        busy: whether a method of the chain is running.
        has_sampled: whether a sample has been requested from the engine.
        closed: whether the chain has been finished or abandoned, which releases its sandboxes.
        trajectory: the result of `finish`, or None.
        seed_key: key from which the seeds are derived, which differs from `key` if the chain repeats another chain.
    """

    def __init__(
        self, agent: AgentSettings, task: Task, key: ChainKey | None = None, hooks: ChainHooks | None = None
    ) -> None:
        self.agent = agent
        self.task = task
        self.key = key or ChainKey(group=f"chain-0:{task.id}")
        self.id = self.key.id
        self.hooks = hooks or ChainHooks()
        self.author = agent.name
        self.stop: str | None = None
        self.error: Failure | None = None
        self.busy = False
        self.closed = False
        self.trajectory: Trajectory | None = None
        self.seed_key = self.key
        self.context = Context(
            task,
            trajectory_id=self.id,
            seed=self._seed(0),
            pools=agent.pools,
            run=self.hooks.run,
        )
        self._listeners: Listeners[ChainState] = Listeners(self.id)
        self._session = f"{self.id}#{next(_sessions)}"
        # Whether the hook `before_chain` has run; True if the agent has no such hook.
        self._prepared = agent.before_chain is None
        self.has_sampled = False
        # Number of events that have been reported as started but not as ended.
        self._open_reports = 0
        # The last turn at which tools or a `before_turn` hook may have changed the sandboxes.
        self._context_used_at: Turn | None = None
        self._started_at = time.perf_counter()
        # JSON schemas of the tools in the prompt.
        self._schemas = agent.tools.schemas
        # Constraint on the next action, which a request of a harness may set.
        self._constraint: Constraint | None = None
        self.turn = self._first_turn()

    def subscribe(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call `callback` with the chain after each state change. Return a function that unsubscribes.

        The callback runs synchronously in the thread that makes the change, so it should return quickly.
        """
        return self._listeners.subscribe(callback)

    # --- state ---

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns of the chain, starting with the prompt."""
        return self.turn.path

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids of the current row, which are the input of the next engine call."""
        return tuple(itertools.chain.from_iterable(turn.ids or () for turn in self.turn.row_path))

    @property
    def actions(self) -> int:
        """Number of actions taken. An action whose beginning was set by `Chain.force` counts once."""
        return self.turn.actions

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the last action, if they have not run yet."""
        return self.turn.tool_calls if self.turn.kind in ("action", "forced") else ()

    @property
    def user_due(self) -> bool:
        """True if the last action called no tool and the agent's `user` has not replied to it yet."""
        last = self.turn
        return self.stop is None and self.agent.user is not None and last.completes_action and not last.tool_calls

    @property
    def never_started(self) -> bool:
        """True if a shared budget stopped the chain before its first sample."""
        return self.stop in BUDGET_STOPS and not self.has_sampled and self.turn.kind == "prompt"

    def __repr__(self) -> str:
        where = f"stopped: {self.stop}" if self.stop else label(self.agent, self.actions)
        rows = f" in {self.turn.row + 1} rows" if self.turn.row else ""
        return f"Chain({self.id!r}, {where}, {sum(turn.num_tokens for turn in self.turns)} tokens{rows})"

    def _first_turn(self) -> Turn:
        return prompt_turn(self.agent, self.agent.opening(self.task), "task")

    def _seed(self, turn: int, attempt: int = 0) -> int:
        return self.seed_key.seed(self.agent.seed, self.task.id, turn, attempt)

    @property
    def trajectory_seed(self) -> int:
        """The seed recorded in the trajectory, which is the seed of the first action."""
        return self._seed(0)

    def snapshot(self) -> Trajectory:
        """Return the unfinished chain as an unscored trajectory, for example to inspect its tokens and mask."""
        return self._make_trajectory(self.stop or "cancelled", Score(None))

    def _make_trajectory(self, stop: str, score: Score) -> Trajectory:
        return Trajectory(
            id=self.id,
            task=self.task,
            group=self.key.group,
            chain=self.key.chain,
            turns=self.turns,
            stop=stop,
            reward=score.reward,
            metrics=score.metrics,
            error=self.error,
            seed=self.trajectory_seed,
            sampling=self.agent.sampling,
            seconds=time.perf_counter() - self._started_at,
            tools=self._schemas,
            vocabulary=self.agent.chat.vocabulary if self.agent.exact else None,
        )

    # --- recording turns ---

    def _append(self, turn: Turn, stop: str | None = None) -> Turn:
        """Append a turn. If `stop` is given, the chain ends with this stop reason."""
        self.turn, self.stop = turn, stop
        self._listeners.notify(self)
        return turn

    def _append_action(self, turn: Turn, stop: str | None) -> Turn:
        """Append a sampled action. If the action calls no tool and the chain continues, also append a nudge."""
        self._append(turn, stop)
        if stop is None and not turn.tool_calls and (text := nudge_after(self.agent, turn)) is not None:
            message: Message = {"role": "user", "content": text}
            self._append_observation(observation_turn(self.agent, turn, [message], "nudge"))
        return turn

    def _append_observation(self, turn: Turn) -> Turn:
        """Encode an observation that does not end the chain, and append it; see `encode_observation`."""
        self.agent.check_images(self.task, turn.messages)
        encoded, leaf = encode_observation(self.agent, turn)
        self._append(leaf)
        return encoded

    def _drop_observation_ids(self) -> None:
        """If the last turn is an observation, remove its token ids, because no engine has received them."""
        if self.turn.kind == "observation" and self.agent.exact:
            self._append(dataclasses.replace(self.turn, **text_fields(self.agent, self.turn.messages)), self.stop)

    def _end(self, stop: str, error: Failure | None = None) -> Turn:
        self.error = error or self.error
        return self._append(self.turn, stop)

    def _end_before_action(self, stop: str) -> Turn:
        self._drop_observation_ids()
        return self._end(stop)

    def _host_failure(self, results: Sequence[ToolResult]) -> Failure | None:
        """Return the failure of a pool, sandbox or engine during the tool calls, or None."""
        for result in results:
            if result.error is not None and result.error.host:
                return result.error
        try:
            self.context.check()
        except LeaseRevoked as error:  # raised in a tool that called `context.sandbox`
            return Failure.from_exception("pool", error)
        return None

    # --- guards and events ---

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        """Mark the chain as busy while its method `call` runs. Raise SettingsError if the method is not allowed now."""
        if self.busy:
            raise SettingsError(f"chain.{call}: another call on this chain is still running; await it first")
        if self.closed:
            how = "was closed without a score" if self.trajectory is None else "is finished"
            raise SettingsError(f"chain.{call}: this chain {how}; agent.chain(task) starts another")
        allowed = (None, "answered", *_CONTINUES_AFTER.get(call, ()))
        if self.stop not in allowed and call not in _ACCEPTED_ALWAYS:
            raise SettingsError(
                f"chain.{call}: the chain was stopped by {self.stop}; call chain.finish() or chain.rewind(to=)"
            )
        self.busy = True
        self._listeners.notify(self)
        try:
            yield
        finally:
            self.busy = False
            self._listeners.notify(self)

    @contextmanager
    def _reporting(
        self, kind: str, state: str, turn: int, detail: str = "", call: str = ""
    ) -> Iterator[SimpleNamespace]:
        """Report the start of an event, run the with-block, and report the end. The block may set `event.detail`."""
        event = SimpleNamespace(detail=detail)
        self._open_reports += 1
        self.hooks.report(self.id, kind, "start", state, turn, detail, call)
        try:
            yield event
        except BaseException as error:
            event.detail = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise
        finally:
            self._open_reports -= 1
            after = state if self._open_reports else "waiting"
            self.hooks.report(self.id, kind, "end", after, turn, event.detail, call)

    @pending_call
    async def close(self) -> None:
        """Abandon the chain without scoring it, and release its sandboxes. Idempotent."""
        self.closed = True
        self._listeners.notify(self)
        self.agent.engine.release(self._session)
        await self.context.close()
