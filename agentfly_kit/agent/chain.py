"""`Chain`: one trajectory in progress, run to its end or stepped interactively.

Turns form a tree; a chain is the path from the root to one leaf. Every token enters the chain exactly once, as an input
or an output of the engine, and its provenance is recorded at that moment.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentfly_kit import seeds
from agentfly_kit._async.pending_call import cancelling, pending_call, warn_or_log
from agentfly_kit._display import Displayable
from agentfly_kit.agent.budget import BudgetUsage, TokenReservation, reserve_tool_calls
from agentfly_kit.chat.formats import Parsed
from agentfly_kit.errors import AlignmentError, EngineError, LeaseRevoked, SettingsError
from agentfly_kit.tools.context import Context
from agentfly_kit.types import (
    BUDGET_STOPS,
    UNSCORED_STOPS,
    Distribution,
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

if TYPE_CHECKING:
    from agentfly_kit.agent.agent import Agent

# Callback for progress events: (kind, phase, state, turn, detail, call).
Report = Callable[[str, str, str, int, str, str], None]

# Error types of host failures, which the model cannot have caused.
_HOST_ERRORS = frozenset(
    {"PoolTimeout", "PoolClosed", "SandboxError", "LeaseRevoked", "IsolationError", "RemotePoolError", "EngineError"}
)

_sessions = itertools.count()  # numbers of KV cache sessions; never part of a seed


@dataclasses.dataclass(frozen=True)
class ChainKey:
    """Identity of a chain within its run. The seed of a turn is derived from it and the turn's index."""

    purpose: str = "chain"
    rollout: int = 0
    group: str = ""
    chain: int = 0
    fork: str = ""

    @property
    def id(self) -> str:
        return f"{self.group}/{self.chain}{self.fork}"


# Setting one of these attributes notifies the listeners.
_NOTIFY_ON = frozenset({"turn", "stop", "error", "_busy", "_closed", "_trajectory"})


class Chain(Displayable):
    """One trajectory in progress. Create it with `agent.chain(task)`.

    `prepare`, `sample`, `act`, `step`, `force`, `observe` and `compact` return the new turn. Calls that may wait are
    awaited.

    Attributes:
        turn: the current leaf; `chain.turns` is the path to it.
        author: author recorded for sampled turns; by default the agent's name.
        stop, error: why the chain ended; None while it is running.
    """

    def __init__(self, agent: Agent, task: Task, key: ChainKey | None = None) -> None:
        self._listeners: list[Callable[[Chain], object]] = []  # set first, because `__setattr__` reads it
        self.agent = agent
        self.task = task
        self.key = key if key is not None else ChainKey(group=f"chain-0:{task.id}")
        self._seed_stream: tuple[ChainKey, seeds.SeedStream] | None = None
        self._seed_key = self.key  # another chain's key if this chain samples with that chain's seeds
        self.id = self.key.id
        self.author = agent.name
        self.stop: str | None = None
        self.error: Failure | None = None
        self.context = Context(
            task,
            trajectory_id=self.id,
            seed=self._seed(0),
            pools=agent.pools,
            concurrency=agent._concurrency,
        )
        self._gate: Callable[[], Awaitable[None]] | None = None
        self._spawn: Callable[[Chain], None] | None = None
        self._session = f"{self.id}#{next(_sessions)}"
        self._report: Report = lambda *_: None
        self._usages: tuple[BudgetUsage, ...] = ()
        # True once `before_chain` has run, or if there is none.
        self._prepared = agent.before_chain is None
        # True once the engine was asked for a sample.
        self.has_sampled = False
        # Number of events whose start was reported, but not yet their end.
        self._open_reports = 0
        self._started_at = time.perf_counter()
        self._busy = False
        self._closed = False
        self._fork_numbers = itertools.count(1)
        self._tools = tuple(agent.tools.schemas) if agent.tools else ()
        self._trajectory: Trajectory | None = None
        # The trajectory that this chain continues, if made by `agent.chain(trajectory)`.
        self.origin: Trajectory | None = None
        # The key that then determines its seeds.
        self.origin_key: ChainKey | None = None
        self._action_count: tuple[Turn | None, int] = None, 0
        self.turn: Turn = self._make_prompt()

    @classmethod
    def from_trajectory(cls, agent: Agent, trajectory: Trajectory) -> Chain:
        """Create a chain with the turns of a trajectory, positioned at its end, to rewind, fork or continue it.

        The chain uses the seeds of the trajectory where they can be derived again. Then sampling a turn again gives the
        same tokens, if the agent and its engine are unchanged.

        Raises:
            SettingsError: if the agent's prompt differs from the trajectory's, or if the trajectory called tools in a
                sandbox, whose state is not recorded in the turns.
        """
        kept = trajectory.group, trajectory.chain, trajectory.id.removeprefix(f"{trajectory.group}/{trajectory.chain}")
        chain = cls(agent, trajectory.task, ChainKey(group=kept[0], chain=kept[1], fork=f"{kept[2]}~"))
        if not trajectory.turns or trajectory.turns[0].ids != chain.turn.ids:
            raise SettingsError(
                f"{trajectory.id!r} begins with another prompt than this agent writes; give the agent that made it"
            )
        for call in trajectory.tool_calls:
            sandbox_types = agent.tools[call.name].sandbox_types if call.name in agent.tools else ()
            if call.error is None and sandbox_types:
                raise SettingsError(
                    f"{trajectory.id!r} called {call.name!r} in a {sandbox_types[0].__name__}, which is gone; "
                    "agent.chain(task) starts from the beginning"
                )
        leaf: Turn | None = None
        for turn in trajectory.turns:
            leaf = turn if turn.parent is leaf else dataclasses.replace(turn, parent=leaf)
        assert leaf is not None
        chain.turn, chain.stop, chain.error = leaf, trajectory.stop, trajectory.error
        chain.origin = trajectory
        # The key is parsed from the group's name, and used only if it reproduces the trajectory's seed.
        purpose, _, number = kept[0].partition(":")[0].rpartition("-")
        if number.isdigit():
            key = ChainKey(purpose, int(number), *kept)
            own, chain._seed_key = chain._seed_key, key
            if chain._seed(0) != trajectory.seed:
                chain._seed_key = own
        chain.origin_key = chain._seed_key
        return chain

    def watch(
        self,
        report: Report,
        *,
        gate: Callable[[], Awaitable[None]] | None = None,
        spawn: Callable[[Chain], None] | None = None,
        usages: Sequence[BudgetUsage] = (),
    ) -> None:
        """Connect the chain to a rollout.

        Args:
            report: callback for progress events.
            gate: awaited before each `sample` and `act`; a paused rollout waits there.
            spawn: called with each fork that `after_observation` requests, to run it.
            usages: usages of the budgets that the chains share.
        """
        self._report, self._gate, self._spawn, self._usages = report, gate, spawn, tuple(usages)

    def subscribe(self, callback: Callable[[Chain], object]) -> Callable[[], None]:
        """Call `callback` with the chain whenever its state changes, and return a function that unsubscribes.

        The callback runs synchronously, in the thread that makes the change, which may not be complete yet. Schedule
        work there instead of doing it.
        """
        listeners = self._listeners  # a local variable, so that `unsubscribe` does not keep the chain alive
        listeners.append(callback)

        def unsubscribe() -> None:
            if callback in listeners:
                listeners.remove(callback)

        return unsubscribe

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _NOTIFY_ON and self._listeners:
            for listener in list(self._listeners):
                try:
                    listener(self)
                except Exception as error:
                    warnings.warn(f"a listener of {self.id} raised {type(error).__name__}: {error}", stacklevel=2)

    # --- state ---

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns from the prompt to the leaf."""
        return self.turn.path

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids of the current row: the input of the next engine call."""
        return tuple(itertools.chain.from_iterable(turn.ids or () for turn in _turns_in_row(self.turn)))

    @property
    def actions(self) -> int:
        """Number of actions taken. A forced beginning and its sampled continuation count as one action."""
        leaf, count = self._action_count  # cached, because every report reads it
        if leaf is not self.turn:
            count = sum(1 for turn in self.turns if turn.kind in ("action", "forced") and turn.messages)
            self._action_count = self.turn, count
        return count

    @property
    def never_started(self) -> bool:
        """True if a shared budget stopped the chain before its first sample."""
        return self.stop in BUDGET_STOPS and not self.has_sampled and self.turn.kind == "prompt"

    def __repr__(self) -> str:
        where = f"stopped: {self.stop}" if self.stop else f"turn {self.actions} of {self.agent.max_turns}"
        rows = f" in {self.turn.row + 1} rows" if self.turn.row else ""
        return f"Chain({self.id!r}, {where}, {sum(len(t.ids or ()) for t in self.turns)} tokens{rows})"

    def _seed(self, turn: int) -> int:
        if self._seed_stream is None or self._seed_stream[0] is not self._seed_key:
            p = self._seed_key
            shared = (self.agent.seed, p.purpose, p.rollout, self.task.id, p.group)
            stream = seeds.SeedStream(shared, (p.chain, p.fork))
            self._seed_stream = p, stream
        return self._seed_stream[1].for_turn(turn)

    def _make_prompt(self) -> Turn:
        messages = self.agent.opening(self.task)
        if not self._exact:  # the server applies its own template, so the token ids are unknown
            text = "\n".join(str(message["content"]) for message in messages)
            return self._make_turn("prompt", "task", None, messages=messages, text=text)
        ids = self.agent.chat.prompt(messages, self._tools)
        return self._make_turn("prompt", "task", ids, messages=messages)

    def _make_turn(self, kind: Any, author: str, ids: Sequence[int] | None, **fields: Any) -> Turn:
        if ids is not None:
            ids = tuple(ids)
            fields.setdefault("text", self.agent.chat.text(ids))
            fields["token_texts"] = self.agent.chat.token_texts(ids)
        before: Turn | None = getattr(self, "turn", None)
        fields.setdefault("row", before.row if before is not None else 0)
        return Turn(kind=kind, author=author, ids=ids, parent=before, **fields)

    @pending_call
    async def prepare(self) -> Turn:
        """Call the agent's `before_chain` hook, which completes the prompt, and return the last turn.

        The first sample does this too. Call it to see the prompt before sampling, or before `force`.
        """
        with self._exclusive("prepare"):
            self._check_open("prepare")
            return await self._prepare()

    async def _prepare(self) -> Turn:
        if self._prepared:
            return self.turn
        content = await self._call_hook(self.agent.before_chain, self)
        self._prepared = True
        if content:
            if self.turn.kind != "prompt" or self.turn.parent is not None:
                raise SettingsError("before_chain both wrote turns and returned a text; do one of them")
            messages = self._append_to_task(content) if isinstance(content, str) else (*self.turn.messages, *content)
            bare: dict[str, Any] = {"messages": messages, "text": _join_contents(messages)}
            if self._exact:
                ids = self.agent.chat.prompt(messages, self._tools)
                bare |= {"ids": ids, "text": self.agent.chat.text(ids), "token_texts": self.agent.chat.token_texts(ids)}
            self.turn = dataclasses.replace(self.turn, **bare)
        return self.turn

    def _append_to_task(self, text: str) -> tuple[Message, ...]:
        """Return the messages of the first prompt, with the text appended to the last one."""
        *before, last = self.turns[0].messages
        content = last["content"]
        combined: Any = f"{content}\n\n{text}" if content else text
        if not isinstance(content, str):
            combined = [*(content or []), {"type": "text", "text": text}]
        return (*before, {**last, "content": combined})

    # --- sampling ---

    @pending_call
    async def distribution(self, top: int = 20) -> Distribution:
        """Return the `top` most probable next tokens. The chain does not change."""
        with self._exclusive("distribution"):
            await self._prepare()
            async with self.agent._concurrency.requests.slot():
                ids, logprobs, entropy = await self.agent.engine.distribution(self.ids, self.agent.sampling, top=top)
            return Distribution(tuple(ids), self.agent.chat.token_texts(ids), tuple(logprobs), entropy)

    @pending_call
    async def sample(self, greedy: bool = False) -> Turn:
        """Sample one action from the policy and append it. `act` then runs the tools that it calls.

        Args:
            greedy: take the most probable token at each position.
        """
        with self._exclusive("sample"):
            return await self._sample(greedy)

    async def _sample(self, greedy: bool = False) -> Turn:
        self._check_open("sample")
        if not self._prepared:
            await self._prepare()
        if self._pending_calls():
            raise SettingsError(
                "the last action called tools that have not run; await chain.act(), or chain.observe(text)"
            )
        if self.stop == "answered":
            raise SettingsError("the chain has answered; chain.finish() scores it, chain.observe(text) goes on with it")
        agent = self.agent
        index = self.actions
        sampling = agent.sampling.replace(temperature=0.0) if greedy else agent.sampling
        if wanted := agent.chat.format.stop:  # for example "Observation:" in ReAct
            sampling = sampling.replace(stop=tuple(dict.fromkeys((*sampling.stop, *wanted))))
        if agent.max_tokens is not None:
            left = agent.max_tokens - self._action_tokens()
            if left < 1:
                return self._end_before_action("chain_tokens")
            sampling = sampling.replace(max_tokens=min(sampling.max_tokens, left))
        ids = self.ids
        if len(ids) + 1 >= agent.engine.max_length:
            return self._end_before_action("context_full")
        if self._gate is not None:
            await self._gate()
        async with TokenReservation(
            self._usages, min(sampling.max_tokens, agent.engine.max_length - len(ids))
        ) as reservation:
            if reservation.stop is not None:
                return self._end_before_action(reservation.stop)
            if reservation.limited_by is not None:
                sampling = sampling.replace(max_tokens=reservation.tokens)
            async with agent._concurrency.requests.slot():
                self.has_sampled = True
                with self._reporting("turn", "sampling", index) as event:
                    seed = self._seed(index)
                    request = TurnRequest(self.task, index, self._session, self._row_messages(), self._tools)
                    sample = await agent.engine.sample(ids, sampling, seed, request=request)
                    reservation.used = len(sample.ids or ())
                    turn = self._make_action(sample, sampling, seed)
                    if sample.ids is None and turn.ids is not None:
                        reservation.used = len(turn.ids)  # a scripted engine returns text, encoded in `_make_action`
                    self._append_action(turn, sample, sampling.max_tokens, reservation.limited_by)
                    event.detail = turn.text
        return turn

    def _make_action(self, sample: Sample, sampling: Sampling, seed: int) -> Turn:
        """Build the action turn from a sample, keeping the engine's token ids as they are."""
        engine, chat = self.agent.engine, self.agent.chat
        ids, text = sample.ids, sample.text
        if ids is None and engine.tokens == "exact":
            # A scripted engine returns text. Encoding it is safe, because no policy sampled these tokens.
            ids = (*chat.encode(text or ""), chat.stop_ids[0])
        sampled = engine.author == "policy" and sample.logprobs is not None
        if engine.logprobs == "yes" and ids and sample.logprobs is None:
            raise AlignmentError(f"{type(engine).__name__} declares logprobs and gave none")
        author = self.author if engine.author == "policy" else engine.author
        fields: dict[str, Any] = {"text": text or ""} if ids is None else {}
        kept = sample.kept_mass
        if kept is None and sampling.greedy and sample.logprobs is not None:
            kept = tuple(math.exp(lp) for lp in sample.logprobs)  # greedy sampling truncates to one token
        if sample.calls is not None:
            written, calls = self._assistant_message(Parsed(text or "", sample.calls))
        else:
            written, calls = self._parse_action(ids, text, sampling.stop if sample.stop == "string" else ())
        return self._make_turn(
            "action",
            author,
            ids,
            sampled=sampled and ids is not None,
            logprobs=sample.logprobs,
            entropies=sample.entropies,
            kept_mass=kept,
            versions=sample.versions,
            messages=(written,),
            tool_calls=calls,
            stop=sample.stop,
            seed=seed,
            seconds=sample.seconds,
            label=self._next_turn_label(),
            **fields,
        )

    def _parse_action(
        self, ids: Sequence[int] | None, text: str | None, stops: Sequence[str] = ()
    ) -> tuple[Message, tuple[ToolCall, ...]]:
        """Parse an action into the assistant message and its calls. A forced beginning is parsed together with it.

        Args:
            ids: token ids of the action, or None for an engine that returns text only.
            text: text of the action, used if `ids` is None.
            stops: stop strings, if one of them ended the turn. The message is cut before the first; the ids are not.
        """
        chat = self.agent.chat
        forced_ids: list[int] = []
        turn: Turn | None = self.turn
        while turn is not None and turn.kind == "forced" and not turn.messages:
            forced_ids = [*(turn.ids or ()), *forced_ids]
            turn = turn.parent
        # `chat.read` prepends the tag that the prompt leaves open; a text-only engine's prompt may end differently.
        read = chat.format.parse if ids is None else chat.read
        if stops:
            full_text = chat.text(ids) if ids is not None else text or ""
            found = [(at, stop) for stop in stops if (at := full_text.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                parsed = read(chat.text(forced_ids) + full_text[:at], self._tools)
                if parsed.unclosed:  # the stop string itself closes the call
                    parsed = read(chat.text(forced_ids) + full_text[: at + len(stop)], self._tools)
                return self._assistant_message(parsed)
        if ids is None:
            return self._assistant_message(read(chat.text(forced_ids) + (text or ""), self._tools))
        return self._assistant_message(chat.parse([*forced_ids, *ids], self._tools))

    @staticmethod
    def _assistant_message(parsed: Parsed) -> tuple[Message, tuple[ToolCall, ...]]:
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.thinking is not None:
            message["thinking"] = parsed.thinking
        calls = parsed.calls
        if parsed.unclosed:
            # An unclosed call is never run. If the model ended its turn itself, it receives this error as the result;
            # a truncated turn ends the chain anyway.
            broken = ToolCall(f"call-{len(calls)}", "", {}, error=parsed.complaint or "the tool call was not closed")
            calls = (*calls, broken)
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
                if c.error is None
            ]
        return message, calls

    def _append_action(self, turn: Turn, sample: Sample, limit: int, limited_by: str | None) -> None:
        """Make the action the leaf, and set the stop reason if it ends the chain.

        Args:
            turn: the action.
            sample: the sample that it was made of.
            limit: maximum number of tokens that was requested.
            limited_by: stop reason of the budget that set `limit`, if one did.
        """
        self.turn = turn
        agent = self.agent
        if sample.stop == "abort":
            self._end("cancelled")
        elif sample.stop == "length":
            total = agent.max_tokens is not None and self._action_tokens() >= agent.max_tokens
            short = sample.ids is not None and len(sample.ids) < limit
            self._end("context_full" if short else limited_by or ("chain_tokens" if total else "turn_tokens"))
        elif not turn.tool_calls:
            self.stop = "answered"

    def _next_turn_label(self) -> str:
        return f"turn {self.actions + 1} of {self.agent.max_turns}"

    def _action_tokens(self) -> int:
        return sum(len(t.ids or ()) for t in self.turns if t.kind == "action")

    def _pending_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls of the last action that have not run."""
        return self.turn.tool_calls if self.turn.kind in ("action", "forced") else ()

    def _row_messages(self) -> tuple[Message, ...]:
        """Return the messages of the current row."""
        return tuple(m for turn in _turns_in_row(self.turn) for m in turn.messages)

    # --- acting ---

    @pending_call
    async def act(self) -> Turn:
        """Run the tools that the last action called, concurrently, and append their results as an observation."""
        with self._exclusive("act"):
            return await self._act()

    async def _act(self) -> Turn:
        self._check_open("act")
        calls = self._pending_calls()
        if not calls:
            raise SettingsError("there is nothing to run: the last action called no tool; await chain.sample() first")
        if self._gate is not None:
            await self._gate()
        agent = self.agent
        index = self.actions
        self.context.turn = index
        self.context.seed = self._seed(index)
        began = time.perf_counter()
        refused, over = self._limit_calls(calls)
        done = await agent.tools.call_all(
            calls,
            self.context,
            around=lambda call: self._reporting("tool", "tool", index, call.name, call.id),
            refused=refused,
        )
        rewards = [c.result.reward for c in done if c.result is not None and c.result.reward is not None]
        seconds = time.perf_counter() - began
        host = next(
            (c.result.error for c in done if c.result and c.result.error and c.result.error.type in _HOST_ERRORS), None
        )
        if host is None:
            try:
                self.context.check()
            except LeaseRevoked as error:  # in a tool that requested its sandbox from the context itself
                host = Failure.from_exception("pool", error)
        if host is not None:
            self.error = host
            self._end("error")
        elif any(c.result is not None and c.result.env_done for c in done):
            self._end("env_done")
        elif any(c.result is not None and c.result.done for c in done):
            self._end("tool_stopped")
        elif over is not None:
            self._end(over)
        elif self._invalid_streak() >= agent.max_invalid_calls:
            self._end("invalid_call")
        elif index >= agent.max_turns:
            self._end("max_turns")
        # The row contains only tokens that an engine saw, so the last observation of a chain is not encoded.
        turn = self._make_observation(
            "tool", done, encode=self.stop is None, reward=math.fsum(rewards) if rewards else None, seconds=seconds
        )
        if self.stop is None and not turn.ids:
            return self._append_observation(turn)
        self.turn = turn
        return turn

    def _limit_calls(self, calls: Sequence[ToolCall]) -> tuple[dict[int, ToolResult], str | None]:
        """Return results for the calls that exceed a limit, by position, and the stop reason (None if all may run)."""
        costly = [i for i, c in enumerate(calls) if self._reaches_tool(c)]
        granted, over = len(costly), None
        if self.agent.max_tool_calls is not None:
            left = self.agent.max_tool_calls - self._tool_calls_made()
            if left < granted:
                granted, over = max(0, left), "chain_tool_calls"
        shared, shared_over = reserve_tool_calls(self._usages, granted)
        if shared_over is not None:
            granted, over = shared, shared_over
        return {
            i: ToolResult(False, f"{calls[i].name} was not run: there are no tool calls left ({over})")
            for i in costly[granted:]
        }, over

    def _reaches_tool(self, call: ToolCall) -> bool:
        return call.error is None and call.name in self.agent.tools

    def _tool_calls_made(self) -> int:
        """Return the number of calls that reached a tool so far."""
        return sum(self._reaches_tool(c) for turn in self.turns if turn.author == "tool" for c in turn.tool_calls)

    def _make_observation(self, author: str, calls: Sequence[ToolCall], *, encode: bool = False, **fields: Any) -> Turn:
        """Return the results as a turn after the leaf, without making it the leaf.

        Args:
            author: author of the turn.
            calls: the calls with their results.
            encode: add token ids, unless the history must be rendered again.
            **fields: other fields of the turn.
        """
        messages: tuple[Message, ...] = tuple(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": call.result.observation if call.result is not None else "",
            }
            for call in calls
        )
        chat, before = self.agent.chat, self.turn
        if encode and self._exact and not chat.needs_rerender(messages):
            ids: tuple[int, ...] | None = chat.observation_ids(messages, self._tools, after=before.ids or ())
            fields |= {"text": chat.text(ids or ()), "token_texts": chat.token_texts(ids or ())}
        else:
            ids = () if self._exact else None
            fields["text"] = _join_contents(messages)
        return Turn(
            kind="observation",
            author=author,
            ids=ids,
            messages=messages,
            tool_calls=tuple(calls),
            parent=before,
            row=before.row,
            label=self._turn_label(),
            **fields,
        )

    def _append_observation(self, turn: Turn) -> Turn:
        """Encode an observation and make it the leaf.

        If rendering the history again would change earlier token ids, the observation gets none, and a new row starts
        with the re-rendered prompt.
        """
        chat = self.agent.chat
        if self._exact and chat.needs_rerender(turn.messages):
            row = _turns_in_row(turn)
            messages = tuple(m for t in row for m in t.messages)
            ids, before = chat.prompt(messages, self._tools), tuple(i for t in row[:-1] for i in t.ids or ())
            if ids[: len(before)] != before:
                self.turn = turn
                self._start_row(messages, "template")
                return turn
            rest = ids[len(before) :]
            turn = dataclasses.replace(turn, ids=rest, text=chat.text(rest), token_texts=chat.token_texts(rest))
        else:
            turn = self._encode_observation(turn)
        self.turn = turn
        return turn

    def _encode_observation(self, turn: Turn) -> Turn:
        """Return the observation with its token ids, which follow those of its parent."""
        if not self._exact:
            return turn
        after = turn.parent.ids if turn.parent is not None else None
        ids = self.agent.chat.observation_ids(turn.messages, self._tools, after=after or ())
        return dataclasses.replace(
            turn, ids=ids, text=self.agent.chat.text(ids), token_texts=self.agent.chat.token_texts(ids)
        )

    @property
    def _exact(self) -> bool:
        return self.agent.engine.tokens == "exact"

    def _end_before_action(self, why: str) -> Turn:
        """End the chain before an action, and remove the ids of the last observation, which no engine saw."""
        self._drop_observation_ids()
        return self._end(why)

    def _drop_observation_ids(self) -> None:
        if self.turn.kind == "observation" and self._exact:
            self.turn = dataclasses.replace(
                self.turn, ids=(), token_texts=None, text=_join_contents(self.turn.messages)
            )

    def _turn_label(self) -> str:
        return f"turn {self.actions} of {self.agent.max_turns}"

    def _invalid_streak(self) -> int:
        """Return the number of latest consecutive actions whose tool calls were all malformed or unknown."""
        streak = 0
        for turn in reversed(self.turns):
            if turn.kind not in ("action", "forced") or not turn.messages:
                continue
            if not turn.tool_calls or any(c.error is None and c.name in self.agent.tools for c in turn.tool_calls):
                break
            streak += 1
        return streak

    @pending_call
    async def step(self, greedy: bool = False) -> Turn:
        """Sample an action, run the tools that it calls, and return the last turn."""
        with self._exclusive("step"):
            turn = await self._sample(greedy)
            return await self._act() if self.stop is None and self._pending_calls() else turn

    # --- editing ---

    def force(self, content: str | Sequence[int], *, end: bool = True, author: str = "person") -> Turn:
        """Write an action, or the beginning of one, in place of the model. Its tokens have mask 0.

        Args:
            content: text or token ids.
            end: end the action here. If False, the next sample continues it.
            author: author of the turn.

        Raises:
            SettingsError: if the last action is complete, or if `content` is empty or has ids outside the vocabulary.
        """
        self._check_not_busy("force")
        self._check_open("force")
        if not self._prepared:
            raise SettingsError("the environment has not shown its beginning yet; await chain.prepare() before force")
        chat = self.agent.chat
        if self._pending_calls() or self.stop == "answered":
            raise SettingsError(
                "the last action is complete; chain.rewind() first, or answer it with act() or observe()"
            )
        ids = list(chat.encode(content) if isinstance(content, str) else (int(i) for i in content))
        if ids and not 0 <= min(ids) <= max(ids) < len(chat.tokenizer):
            raise SettingsError(
                f"force was given ids from {min(ids)} to {max(ids)}; the vocabulary is 0 to {len(chat.tokenizer) - 1}"
            )
        if end and not (ids and ids[-1] in chat.stop_ids):
            ids.append(chat.stop_ids[0])
        if not ids:
            raise SettingsError("force was given nothing to say; give a text or ids")
        fields: dict[str, Any] = {"label": self._next_turn_label()}
        if end:
            message, calls = self._parse_action(ids, None)
            fields |= {"messages": (message,), "tool_calls": calls, "stop": "stop"}
        turn = self._make_turn("forced", author, ids, **fields)
        self.turn = turn
        if end and not turn.tool_calls:
            self.stop = "answered"
        return turn

    def observe(self, text: str, *, author: str = "person") -> Turn:
        """Append `text` as the observation of the last action: the result of each of its calls, or a user message.

        The text becomes a user message if the action called no tool. If the leaf is already an observation, the text
        is added to it as a user message.

        Raises:
            SettingsError: if there is no action to answer.
        """
        self._check_not_busy("observe")
        self._check_open("observe")
        if self.turn.kind == "observation":
            messages = (*self.turn.messages, {"role": "user", "content": text})
            observation = dataclasses.replace(
                self.turn,
                ids=() if self._exact else None,
                token_texts=None,
                messages=messages,
                text=_join_contents(messages),
            )
            return self._append_observation(observation)
        if self.turn.kind not in ("action", "forced") or not self.turn.messages:
            raise SettingsError("there is no action to answer; sample or force one first")
        calls = [dataclasses.replace(c, result=ToolResult(True, text)) for c in self._pending_calls()]
        turn = self._make_observation(author, calls)
        if not calls:
            turn = dataclasses.replace(turn, messages=({"role": "user", "content": text},), text=text)
        self.stop = None
        return self._append_observation(turn)

    def compact(self, content: str | Sequence[Message], *, author: str = "hook") -> Turn:
        """Close the current row and continue in a new one with a shorter context. Return the new prompt.

        All rows are kept, and their sampled tokens are trained (`trajectory.rows`). An observation after the last
        action loses its token ids, because no engine saw them. A chain that has answered, or whose last turn was
        truncated (stop "context_full" or "turn_tokens"), continues. If no action is left, the chain ends with stop
        "max_turns" instead.

        Args:
            content: a string is appended to the last of the messages of the first prompt; messages replace the whole
                prompt, including the system message. Both keep the tool schemas.
            author: author of the new prompt.

        Raises:
            SettingsError: if tool calls have not run, or an action is unfinished.
        """
        self._check_not_busy("compact")
        self._check_open("compact")
        if not self._prepared:
            raise SettingsError("the first prompt is not whole before the agent's before_chain; await chain.prepare()")
        # Calls of a truncated action never run, so they may be left pending.
        if self._pending_calls() and self.stop not in ("context_full", "turn_tokens"):
            raise SettingsError("the last action called tools that have not run; await chain.act(), or chain.observe()")
        if self.turn.kind == "forced" and not self.turn.messages:
            raise SettingsError("an action is half written (force with end=False); sample its rest, or chain.rewind()")
        if isinstance(content, str):
            messages: tuple[Message, ...] = self._append_to_task(content)
        else:
            messages = tuple(content)
            if not messages or not all({"role", "content"} <= set(m) for m in messages):
                raise SettingsError(
                    f"compact was given {content!r}; give a text, or messages with 'role' and 'content'"
                )
        if self.actions >= self.agent.max_turns:
            return self._end_before_action("max_turns")
        self._drop_observation_ids()
        turn = self._start_row(messages, author)
        self.stop = None
        return turn

    def _start_row(self, messages: tuple[Message, ...], author: str) -> Turn:
        fields: dict[str, Any] = {"messages": messages, "row": self.turn.row + 1, "label": self._turn_label()}
        if self._exact:
            turn = self._make_turn("prompt", author, self.agent.chat.prompt(messages, self._tools), **fields)
        else:
            turn = self._make_turn("prompt", author, None, text=_join_contents(messages), **fields)
        self.turn = turn
        return turn

    def rewind(self, to: Turn | int) -> Turn:
        """Go back to an earlier turn and drop the turns after it from this chain.

        If that turn is an observation that ended the chain, it is encoded now, because an action can follow it.

        Args:
            to: the turn, or its index in `chain.turns`.

        Raises:
            SettingsError: if the turn is not on this chain's path, or if the chain holds a sandbox or tool state,
                which cannot be rewound.
        """
        self._check_not_busy("rewind")
        self._check_open("rewind")
        path = self.turns
        target = path[to] if isinstance(to, int) and -len(path) <= to < len(path) else to
        if isinstance(target, int) or not any(turn is target for turn in path):
            raise SettingsError(f"{target!r} is not on this chain's path; give one of chain.turns, or its index")
        held = self.context.held
        if self.turn is not target and (held or self.context.state):
            what = ", ".join(sandbox_type.__name__ for sandbox_type in held) or "state that its tools keep"
            raise SettingsError(f"this chain cannot go back: it holds {what}, which would not go back with it")
        self.turn = target
        self.stop, self.error, self._trajectory = None, None, None
        if target.kind in ("action", "forced") and target.messages:
            # A truncated turn is not an answer, and its calls are not run.
            self.stop = "turn_tokens" if target.stop == "length" else None if target.tool_calls else "answered"
        elif target.kind == "observation" and target.ids == ():
            self._append_observation(target)  # it ended the chain or its row, so it was never encoded
        return self.turn

    @pending_call
    async def fork(self, *, same_seeds: bool = False) -> Chain:
        """Return a new chain that shares the turns so far and continues independently, in forks of the sandboxes.

        Args:
            same_seeds: sample with the seeds of this chain. Otherwise the fork has its own seeds.

        Raises:
            SandboxError: if a sandbox or the tools' state cannot be forked; the message names it.
        """
        with self._exclusive("fork"):
            self._check_open("fork")
            key = dataclasses.replace(self.key, fork=f"{self.key.fork}.{next(self._fork_numbers)}")
            twin = object.__new__(Chain)
            twin.__dict__.update(self.__dict__, _listeners=[])
            twin.key, twin._seed_key = key, self._seed_key if same_seeds else key
            twin.id = key.id
            twin._session = f"{key.id}#{next(_sessions)}"
            twin._fork_numbers = itertools.count(1)
            twin.context = await self.context.fork(key.id)
            twin._busy, twin._closed, twin._trajectory, twin._open_reports = False, False, None, 0
            return twin

    def snapshot(self) -> Trajectory:
        """Return the chain so far as an unscored trajectory, to inspect its tokens and mask."""
        return self._make_trajectory(None, {}, self.error, self.stop or "cancelled")

    # --- finishing ---

    @pending_call
    async def finish(self) -> Trajectory:
        """Score the chain, release its sandboxes and return the trajectory.

        A chain that has not ended is not scored; its stop reason becomes "cancelled".
        """
        if self._trajectory is not None:
            return self._trajectory
        with self._exclusive("finish"):
            return await self._finish()

    async def _finish(self) -> Trajectory:
        if self._closed:
            raise SettingsError("this chain was closed without a score; agent.chain(task) starts another")
        if self.stop is None:
            self.stop = "cancelled"
        reward: float | None = None
        metrics: dict[str, float] = {}
        try:
            if self.stop not in UNSCORED_STOPS and not self.never_started and self.agent.reward:
                with self._reporting("reward", "scoring", self.actions) as event:
                    scored = await self.agent.reward.score(self.snapshot(), self.context)
                    self._add_turn_rewards(scored.turn_rewards)
                    reward, metrics = scored.reward, scored.metrics
                    if scored.error is not None:
                        self.error = scored.error
                    event.detail = "unscored" if reward is None else f"{reward:g}"
        finally:
            await self.close()
        self._trajectory = self._make_trajectory(reward, metrics, self.error, self.stop)
        return self._trajectory

    def _add_turn_rewards(self, turn_rewards: Any) -> None:
        """Add per-turn rewards to the turns. The path is rebuilt, because turns are immutable."""
        if not turn_rewards:
            return
        path = self.turns
        leaf: Turn | None = None
        for i, turn in enumerate(path):
            extra = turn_rewards.get(i)
            reward = turn.reward if extra is None else (turn.reward or 0.0) + extra
            leaf = dataclasses.replace(turn, reward=reward, parent=leaf)
        assert leaf is not None
        self.turn = leaf

    @pending_call
    async def close(self) -> None:
        """Abandon the chain without scoring it, and release its sandboxes. Idempotent."""
        self._closed = True
        self.agent.engine.release(self._session)
        await self.context.close()

    def _make_trajectory(
        self, reward: float | None, metrics: dict[str, float], error: Failure | None, stop: str
    ) -> Trajectory:
        return Trajectory(
            id=self.id,
            task=self.task,
            group=self.key.group,
            chain=self.key.chain,
            turns=self.turns,
            stop=stop,
            reward=reward,
            metrics=metrics,
            error=error,
            seed=self._seed(0),
            sampling=self.agent.sampling,
            seconds=time.perf_counter() - self._started_at,
            tools=self._tools,
        )

    @pending_call
    async def run(self) -> Trajectory:
        """Run the chain to its end and score it.

        Errors of the engine, the tools or the host are not raised: they end the chain unscored, with `error` set.
        """
        state, detail = "cancelled", ""
        self._report("chain", "start", "waiting", self.actions, "", "")
        try:
            await self._run_to_end()
            trajectory = await self._finish_or_fail()
            state, detail = "failed" if trajectory.error is not None else "done", trajectory.stop
            try:
                if self.agent.after_chain is not None and not self.never_started:
                    await self._call_hook(self.agent.after_chain, self, trajectory)
            except Exception as error:  # the trajectory is finished: an error of this hook does not change it
                warn_or_log(f"after_chain raised {type(error).__name__}: {error}")
            return trajectory
        finally:
            self._report("chain", "end", state, self.actions, detail, "")

    async def _run_to_end(self) -> None:
        began = asyncio.get_running_loop().time()
        own = None if self.agent.timeout is None else began + self.agent.timeout
        deadlines = [(m.deadline, f"{m.name}_seconds") for m in self._usages if m.deadline is not None]
        when, why = min([*deadlines, *([] if own is None else [(own, "timeout")])], default=(None, ""))
        limit = asyncio.timeout_at(when)
        try:
            async with limit:
                while self.stop is None:
                    await self._advance()
        except asyncio.CancelledError as error:
            if cancelling():
                await self.close()
                raise
            # Not a cancellation of this task: something that it awaited was cancelled.
            self.error = Failure.from_exception("chain", error)
            self._end("error")
        except Exception as error:
            if limit.expired():
                self._end(why)
            else:  # includes a TimeoutError from elsewhere, such as a server: an error, not the chain's time limit
                self.error = Failure.from_exception("engine" if isinstance(error, EngineError) else "chain", error)
                self._end("error")

    async def _finish_or_fail(self) -> Trajectory:
        try:
            return await self.finish()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelling():
                raise
            # For example, a pool was closed while in use. The trajectory is kept, with the error.
            self.error = Failure.from_exception("chain", error)
            return self._make_trajectory(None, {}, self.error, "error")

    async def _advance(self) -> None:
        """Run one step, including the agent's hooks."""
        agent = self.agent
        if not self._prepared:
            await self._prepare()
        if agent.before_turn is not None:
            await self._call_hook(agent.before_turn, self)
        # Do not sample if the hook has written the action itself.
        if self.stop is None and not self._pending_calls():
            with self._exclusive("sample"):
                await self._sample()
            if self._context_is_full():
                await self._call_hook(agent.on_context_full, self)
        if self.stop is None and self._pending_calls():
            with self._exclusive("act"):
                await self._act()
            if self.stop is None and agent.after_observation is not None:
                count = await self._call_hook(agent.after_observation, self)
                for _ in range(int(count or 0)):
                    if self._spawn is None:
                        raise SettingsError("after_observation asked for forks of a chain that is not in a rollout")
                    self._spawn(await self.fork())

    def _context_is_full(self) -> bool:
        """Return True if the row is full and compacting it can help.

        A row that the prompt alone fills is excluded, because compacting it would repeat forever.
        """
        return self.stop == "context_full" and len(_turns_in_row(self.turn)) > 1

    @staticmethod
    async def _call_hook(hook: Callable[..., Any] | None, *given: Any) -> Any:
        if hook is None:
            return None
        result = hook(*given)
        return await result if inspect.isawaitable(result) else result

    def _reporting(self, kind: str, state: str, turn: int, detail: str = "", call: str = "") -> _ReportScope:
        """Return a context manager that reports the start and, even after an error, the end."""
        return _ReportScope(self, kind, state, turn, detail, call)

    # --- guards ---

    def _end(self, why: str) -> Turn:
        self.stop = why
        return self.turn

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise SettingsError(f"chain.{call}: this chain is finished; agent.chain(task) starts another")
        going = {"observe": ("answered", "turn_tokens"), "compact": ("answered", "turn_tokens", "context_full")}.get(
            call, ("answered",)
        )
        if self.stop is not None and self.stop not in going and call not in ("rewind", "fork"):
            raise SettingsError(
                f"chain.{call}: the chain was stopped by {self.stop}; chain.finish(), or chain.rewind(to=)"
            )

    def _check_not_busy(self, call: str) -> None:
        if self._busy:
            raise SettingsError(f"chain.{call}: another call on this chain is still running; await it first")

    def _exclusive(self, call: str) -> _ExclusiveCall:
        return _ExclusiveCall(self, call)


def _turns_in_row(turn: Turn) -> list[Turn]:
    """Return the turns of the same row, up to and including `turn`."""
    found = [turn]
    while (before := found[-1].parent) is not None and before.row == turn.row:
        found.append(before)
    return found[::-1]


def _join_contents(messages: Sequence[Message]) -> str:
    return "\n".join(str(m["content"]) for m in messages)


class _ReportScope:
    """Context manager that reports the start and end of an event. Set `detail` inside the block to report it last."""

    __slots__ = ("_call", "_chain", "_kind", "_state", "_turn", "detail")

    def __init__(self, chain: Chain, kind: str, state: str, turn: int, detail: str, call: str) -> None:
        self._chain, self._kind, self._state, self._turn, self._call = chain, kind, state, turn, call
        self.detail = detail

    def __enter__(self) -> _ReportScope:
        self._chain._open_reports += 1
        self._chain._report(self._kind, "start", self._state, self._turn, self.detail, self._call)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        chain = self._chain
        chain._open_reports -= 1
        state = self._state if chain._open_reports else "waiting"
        chain._report(self._kind, "end", state, self._turn, self.detail, self._call)


class _ExclusiveCall:
    """Context manager that refuses concurrent calls on one chain, which would corrupt its history."""

    __slots__ = ("_call", "_chain")

    def __init__(self, chain: Chain, call: str) -> None:
        self._chain, self._call = chain, call

    def __enter__(self) -> None:
        self._chain._check_not_busy(self._call)
        self._chain._busy = True

    def __exit__(self, *_: object) -> None:
        self._chain._busy = False
