"""`BaseChain`: one trajectory in progress. It samples actions, runs tool calls, records turns and scores the result.

Turns form a tree; a chain is the path from the root to one leaf. At sampling time, `_action_turn` decides which
tokens are trained on (mask 1). Apart from `integrations/captured.py`, which imports recorded token ids, no other
function creates turns with `sampled=True`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from agentfly_kit._async.listeners import Listeners
from agentfly_kit._async.pending_call import maybe_await, pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent.budget import (
    action_tokens,
    refuse_calls,
    reserve_tokens,
    stop_after_action,
    stop_after_calls,
)
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import (
    append_text,
    assistant_message,
    encode_long,
    encode_observation,
    forced_beginning,
    label,
    observation_turn,
    parse_action,
    prompt_turn,
    result_message,
    text_fields,
    token_fields,
    with_exception_text,
    with_turn_rewards,
)
from agentfly_kit.chat.formats import Parsed
from agentfly_kit.errors import AlignmentError, LeaseRevoked, SettingsError, check_count
from agentfly_kit.rewards import Score
from agentfly_kit.success import record_success
from agentfly_kit.tools.context import Context
from agentfly_kit.types import (
    BUDGET_STOPS,
    UNSCORED_STOPS,
    Alternatives,
    Failure,
    Message,
    Sample,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnRequest,
)

_sessions = itertools.count()  # numbers the KV cache sessions; seeds do not depend on it

# Stop reasons, besides "answered", after which `observe` and `compact` may still be called.
_CONTINUES_AFTER = {"observe": ("turn_tokens",), "compact": ("turn_tokens", "context_full")}
# Methods that do not continue the chain and may therefore be called after any stop reason.
_ACCEPTED_ALWAYS = ("rewind", "fork", "finish", "distribution")


class BaseChain(Displayable):
    """Base class of `Chain`, which represents one trajectory in progress.

    Attributes:
        turn: the current leaf, which is the last of `chain.turns`.
        author: author recorded for sampled turns; by default the agent's name.
        stop, error: stop reason and failure of an ended chain, or None.
        busy: whether a method of the chain is running.
        has_sampled: whether a sample was requested from the engine.
        closed: whether the chain was finished or abandoned and its sandboxes were released.
        trajectory: the result of `finish`, or None.
        seed_key: key from which the seeds are derived. It differs from `key` if the chain repeats another chain.
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
            concurrency=agent._concurrency,
            run=self.hooks.run,
        )
        self._listeners: Listeners[BaseChain] = Listeners(self.id)
        self._session = f"{self.id}#{next(_sessions)}"
        # Whether the hook `before_chain` has run; True if the agent has no such hook.
        self._prepared = agent.before_chain is None
        self.has_sampled = False
        # Number of events whose start has been reported but whose end has not.
        self._open_reports = 0
        # The last turn at which tools or a `before_turn` hook may have changed the sandboxes.
        self._context_used_at: Turn | None = None
        self._started_at = time.perf_counter()
        # JSON schemas of the tools in the prompt.
        self._schemas = agent.tools.schemas
        self.turn = self._first_turn()

    def subscribe(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call `callback` with the chain after each state change. Return a function that unsubscribes.

        The callback runs synchronously in the thread that makes the change, so it should return quickly.
        """
        return self._listeners.subscribe(callback)

    # --- state ---

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns from the prompt to the leaf."""
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

    def _action_seed(self, attempt: int) -> int:
        """Return the seed of the next action."""
        return self._seed(self.actions, attempt)

    # --- recording turns ---

    def _append(self, turn: Turn, stop: str | None = None) -> Turn:
        """Append a turn, which becomes the leaf. If `stop` is given, the chain ends with this stop reason."""
        self.turn, self.stop = turn, stop
        self._listeners.notify(self)
        return turn

    def _append_action(self, turn: Turn, stop: str | None) -> Turn:
        """Append a sampled action and, if it calls no tool and the chain continues, `agent.nudge` as a message."""
        self._append(turn, stop)
        if stop is None and not turn.tool_calls and self.agent.nudge is not None:
            message: Message = {"role": "user", "content": self.agent.nudge}
            self._append_observation(observation_turn(self.agent, turn, [message], "nudge"))
        return turn

    def _append_observation(self, turn: Turn) -> Turn:
        """Encode and append an observation after which the chain continues; see `encode_observation`."""
        encoded, leaf = encode_observation(self.agent, turn)
        self._append(leaf)
        return encoded

    def _drop_observation_ids(self) -> None:
        """If the last turn is an observation, remove its token ids, because no engine has received them."""
        if self.turn.kind == "observation" and self.agent.exact:
            fields = text_fields(self.agent, self.turn.messages)
            self._append(dataclasses.replace(self.turn, **fields), self.stop)

    def _end(self, stop: str, error: Failure | None = None) -> Turn:
        """End the chain, and return the last turn."""
        self.error = error or self.error
        return self._append(self.turn, stop)

    def _end_before_action(self, stop: str) -> Turn:
        self._drop_observation_ids()
        return self._end(stop)

    # --- preparing ---

    @pending_call
    async def prepare(self) -> Turn:
        """Call the agent's `before_chain` hook, which may extend the prompt, and return the last turn.

        The first `sample` does this automatically. Call `prepare` to inspect the prompt before `sample` or `force`.
        """
        with self._exclusive("prepare"):
            return await self._prepare()

    async def _prepare(self) -> Turn:
        if self._prepared:
            return self.turn
        content = await call_hook(self.agent.before_chain, self)
        self._prepared = True
        if content:
            if self.turn.parent is not None:
                raise SettingsError("before_chain must not return content for a chain that has already begun")
            if isinstance(content, str):
                messages = append_text(self.turn.messages, content)
            elif isinstance(content, Sequence) and all(isinstance(message, Mapping) for message in content):
                messages = (*self.turn.messages, *content)
            else:
                raise SettingsError(f"before_chain must return a string, a list of messages or None, got {content!r}")
            self._append(prompt_turn(self.agent, messages, "task"))
        return self.turn

    # --- sampling ---

    @pending_call
    async def sample(self, greedy: bool = False, *, attempt: int = 0) -> Turn:
        """Sample one action from the policy and append it. `act` then runs the tool calls of the action.

        Args:
            greedy: take the most probable token at each position.
            attempt: index that selects the seed. Attempt 0 samples the same action as a rollout. After `rewind`, pass
                1, 2, ... to sample other actions at the same turn.
        """
        check_count("attempt", attempt, 0)
        with self._exclusive("sample"):
            await self._prepare()
            self._check_action_due()
            sampling = self.agent.sampling
            return await self._sample(sampling.replace(temperature=0.0) if greedy else sampling, attempt)

    def _check_action_due(self) -> None:
        if self.pending_calls:
            raise SettingsError(
                "the tool calls of the last action have not run yet; call chain.act() or chain.observe(text) first"
            )
        if self.stop == "answered":
            raise SettingsError("the chain has answered; chain.finish() scores it, chain.observe(text) continues it")

    async def _sample(self, sampling: Sampling, attempt: int = 0) -> Turn:
        agent, index, ids = self.agent, self.actions, self.ids
        # End the chain if its token limit or the context leaves no room for another action.
        left = math.inf if agent.max_tokens is None else agent.max_tokens - action_tokens(self.turn)
        room = agent.engine.max_length - len(ids)
        if left < 1 or room <= 1:
            return self._end_before_action("chain_tokens" if left < 1 else "context_full")
        if left < sampling.max_tokens:
            sampling = sampling.replace(max_tokens=int(left))
        if stops := agent.chat.format.stop:  # for example "Observation:" in ReAct
            sampling = sampling.replace(stop=tuple(dict.fromkeys((*sampling.stop, *stops))))
        await self.hooks.gate()
        async with reserve_tokens(self.hooks.usages, min(sampling.max_tokens, room)) as reserved:
            if reserved.stop is not None:
                return self._end_before_action(reserved.stop)
            if reserved.limited_by is not None:
                sampling = sampling.replace(max_tokens=reserved.tokens)
            async with agent._concurrency.requests.slot():
                self.has_sampled = True
                with self._reporting("turn", "sampling", index) as event:
                    seed = self._action_seed(attempt)
                    messages = tuple(m for turn in self.turn.row_path for m in turn.messages)
                    request = TurnRequest(self.task, index, self._session, messages, self._schemas)
                    sample = await agent.engine.sample(ids, sampling, seed, request=request)
                    turn = self._action_turn(sample, sampling, seed)
                    reserved.used = turn.num_tokens
                    self._append_action(turn, self._stop_after_action(turn, sampling.max_tokens, reserved.limited_by))
                    event.detail = turn.text
        return turn

    def _stop_after_action(self, turn: Turn, limit: int, limited_by: str | None) -> str | None:
        return stop_after_action(self.agent, turn, limit, limited_by)

    def _action_turn(self, sample: Sample, sampling: Sampling, seed: int) -> Turn:
        """Return the turn of a sampled action, with the unchanged token ids from the engine.

        The turn is trained on (`sampled=True`) if and only if a policy sampled its tokens and the engine reported their
        logprobs.
        """
        engine, chat, tools = self.agent.engine, self.agent.chat, self._schemas
        if sample.ids is not None:
            tokens = token_fields(self.agent, sample.ids)
        elif self.agent.exact:
            # A scripted engine returns text, which can be encoded here because no policy sampled its tokens.
            tokens = token_fields(self.agent, (*chat.encode(sample.text or ""), chat.stop_ids[0]))
        else:
            tokens = text_fields(self.agent, [{"content": sample.text or ""}])
        ids = tokens["ids"]
        if engine.logprobs == "yes" and ids and sample.logprobs is None:
            raise AlignmentError(f"{type(engine).__name__} must return logprobs, because it declares logprobs='yes'")
        kept_mass = sample.kept_mass
        if kept_mass is None and sampling.greedy and sample.logprobs is not None:
            kept_mass = tuple(math.exp(lp) for lp in sample.logprobs)  # the probability of the only token kept
        if sample.calls is not None:
            message, calls = assistant_message(Parsed(sample.text or "", sample.calls, sample.thinking))
        else:
            stops = sampling.stop if sample.stop == "string" else ()
            message, calls = parse_action(chat, tools, forced_beginning(self.turn), ids, sample.text, stops)
            if sample.thinking is not None:
                message = {"thinking": sample.thinking, **message}
        return Turn(
            kind="action",
            author=self.author if engine.author == "policy" else engine.author,
            sampled=engine.author == "policy" and sample.logprobs is not None and ids is not None,
            logprobs=sample.logprobs,
            entropies=sample.entropies,
            kept_mass=kept_mass,
            alternatives=self._with_texts(sample.alternatives),
            versions=sample.versions,
            messages=(message,),
            tool_calls=calls,
            stop=sample.stop,
            seed=seed,
            seconds=sample.seconds,
            parent=self.turn,
            row=self.turn.row,
            label=label(self.agent, self.actions + 1),
            **tokens,
        )

    def _with_texts(
        self, alternatives: Sequence[Sequence[tuple[int, float]]] | None
    ) -> tuple[Alternatives, ...] | None:
        """Add the text of each token to the alternatives recorded by the engine."""
        if alternatives is None:
            return None
        texts = iter(self.agent.chat.token_texts([id for position in alternatives for id, _ in position]))
        return tuple(tuple((id, next(texts), logprob) for id, logprob in position) for position in alternatives)

    # --- acting ---

    @pending_call
    async def act(self) -> Turn:
        """Run the tool calls of the last action concurrently, and append their results as an observation."""
        with self._exclusive("act"):
            if not self.pending_calls:
                raise SettingsError(
                    "there is nothing to run: the last action called no tool; await chain.sample() first"
                )
            return await self._act(self.pending_calls)

    async def _act(self, calls: Sequence[ToolCall]) -> Turn:
        await self.hooks.gate()
        index = self.actions
        self._context_used_at = self.turn
        self.context.turn = index
        self.context.seed = self._seed(index)
        began = time.perf_counter()
        refused, over_limit = refuse_calls(self.agent, self.turn, calls, self.hooks.usages)
        done = await self.agent.tools.call_all(
            calls,
            self.context,
            around=self._reporting_call,
            refused=refused,
        )
        if self.agent.show_exceptions:
            done = [with_exception_text(call) for call in done]
        results = [call.result for call in done if call.result is not None]
        rewards = [result.reward for result in results if result.reward is not None]
        turn = observation_turn(
            self.agent,
            self.turn,
            [result_message(call) for call in done],
            "tool",
            done,
            reward=math.fsum(rewards) if rewards else None,
            seconds=time.perf_counter() - began,
        )
        self.error = self._host_failure(results)
        stop = "error" if self.error is not None else stop_after_calls(self.agent, self.turn, results, over_limit)
        # A row contains only tokens that an engine received, so the last observation of a chain is not encoded.
        if stop is not None:
            return self._append(turn, stop)
        await encode_long(turn.messages, lambda: encode_observation(self.agent, turn))
        return self._append_observation(turn)

    def _host_failure(self, results: Sequence[ToolResult]) -> Failure | None:
        """Return the failure of a pool, sandbox or engine that occurred during the tool calls, or None."""
        for result in results:
            if result.error is not None and result.error.host:
                return result.error
        try:
            self.context.check()
        except LeaseRevoked as error:  # raised in a tool that called `context.sandbox`
            return Failure.from_exception("pool", error)
        return None

    @pending_call
    async def step(self, greedy: bool = False) -> Turn:
        """Sample an action, run its tool calls, and return the last turn."""
        turn = await self.sample(greedy)
        return await self.act() if self.stop is None and self.pending_calls else turn

    # --- finishing ---

    def snapshot(self) -> Trajectory:
        """Return the unfinished chain as an unscored trajectory, for example to inspect its tokens and mask."""
        return self._make_trajectory(self.stop or "cancelled", Score(None))

    @pending_call
    async def finish(self) -> Trajectory:
        """Score the chain, release its sandboxes and return the trajectory.

        A chain that has not ended is left unscored, with the stop reason "cancelled".
        """
        if self.trajectory is not None:
            return self.trajectory
        with self._exclusive("finish"):
            if self.stop is None:
                self._end("cancelled")
            score = Score(None)
            try:
                if self.stop not in UNSCORED_STOPS and not self.never_started and self.agent.reward:
                    with self._reporting("reward", "scoring", self.actions) as event:
                        score = await self.agent.reward.score(self.snapshot(), self.context)
                        if score.turn_rewards:
                            self.turn = with_turn_rewards(self.turns, score.turn_rewards)[-1]
                        self.error = score.error or self.error
                        event.detail = "unscored" if score.reward is None else f"{score.reward:g}"
            finally:
                await self.close()
            trajectory = self._make_trajectory(self.stop or "", score)
            if self.agent.group_reward is None:  # otherwise, success is recorded after the group reward is added
                trajectory = record_success(trajectory, self.agent.success)
            self.trajectory, self.error = trajectory, trajectory.error
            return self.trajectory

    @pending_call
    async def close(self) -> None:
        """Abandon the chain without scoring it, and release its sandboxes. Idempotent."""
        self.closed = True
        self._listeners.notify(self)
        self.agent.engine.release(self._session)
        await self.context.close()

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

    def _reporting_call(self, call: ToolCall) -> AbstractContextManager[SimpleNamespace]:
        return self._reporting("tool", "tool", self.actions, call.name, call.id)


async def call_hook(hook: Callable[..., Any] | None, *given: Any) -> Any:
    """Call a sync or async hook of the agent and return its result; do nothing if `hook` is None."""
    return None if hook is None else await maybe_await(hook(*given))
