"""`HarnessChain`, a chain whose requests come from a user's function, such as an agent of another framework."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentfly_kit import seeds
from agentfly_kit._async.pending_call import cancelling, pending_call, wait_all, warn_or_log
from agentfly_kit.agent.budget import stop_after_action
from agentfly_kit.agent.chain import BaseChain
from agentfly_kit.agent.conversations import (
    ConversationRow,
    Match,
    Segment,
    find_match,
    message_key,
    plain_messages,
    plain_tools,
    tools_key,
)
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import encode_long, label, text_fields, token_fields
from agentfly_kit.endpoint.endpoint import Endpoint
from agentfly_kit.endpoint.reply import ChainEnded, Reply, ReplyCall, RequestError, validating
from agentfly_kit.errors import ChatTemplateError, SettingsError
from agentfly_kit.samples import Sample, Sampling
from agentfly_kit.tools.calling import Outcome, call_user_function, failure_from
from agentfly_kit.tools.context import Context, Fields
from agentfly_kit.tools.injection import InjectedFunction
from agentfly_kit.tools.results import to_text
from agentfly_kit.types import Failure, Message, Task, ToolCall, ToolResult, Turn, text_of

# Maximum time in seconds to wait for a cancelled harness to clean up.
_CANCEL_SECONDS = 5.0


class Harness(InjectedFunction[..., Any]):
    """Wrapper for the function given as `Agent(harness=)`, which injects its arguments."""

    kind = "harness"
    error_type = SettingsError

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, None, None, ("endpoint", "task", "context"))
        if "endpoint" not in self._parameters:
            raise self._error(
                "a harness must have the parameter 'endpoint', through which it reaches the policy, got "
                f"({', '.join(self._parameters)})"
            )

    @property
    def chain_type(self) -> type[HarnessChain]:
        """Class of the chains that run a harness."""
        return HarnessChain

    def _settings(self) -> str:
        return self.name

    async def run(self, context: Context, endpoint: Any) -> Outcome:
        """Call the harness function with the task of `context`."""
        fields = Fields(context.task.fields)
        async with self._inject(context, fields, endpoint=endpoint, task=context.task) as arguments:
            return await call_user_function(self.function, arguments)


class HarnessChain(BaseChain):
    """Chain for `Agent(harness=)`, whose function requests each action through an endpoint.

    Turns are appended in the order of the requests. Each turn belongs to the row that the request continues, so turns
    of several rows may alternate while the chain runs. In `turns`, they are sorted by row.
    """

    def __init__(
        self, agent: AgentSettings, task: Task, key: ChainKey | None = None, hooks: ChainHooks | None = None
    ) -> None:
        super().__init__(agent, task, key, hooks)
        self._rows: list[ConversationRow] = []
        # Number of actions sampled for each prompt, so that repeated requests get different seeds.
        self._asked: Counter[str] = Counter()
        self._action_key = ""
        # Maps each tool call id sent to the client to the id and name of the call in the chain.
        self._call_ids: dict[str, tuple[str, str]] = {}
        self._in_order = asyncio.Lock()
        self._serving: set[asyncio.Task[Reply]] = set()
        self._limit_reached = asyncio.Event()
        self._base_session = self._session
        self._ordered: tuple[Turn, tuple[Turn, ...]] | None = None

    def _first_turn(self) -> Turn:
        # The messages of the task serve as the prompt until the first request replaces them.
        return Turn(kind="prompt", author="task", messages=self.task.messages, **text_fields(self.agent, ()))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all rows, sorted by row."""
        if self._ordered is None or self._ordered[0] is not self.turn:
            ordered: list[Turn] = []
            for turn in sorted(self.turn.path, key=lambda turn: turn.row):
                before = ordered[-1] if ordered else None
                ordered.append(turn if turn.parent is before else dataclasses.replace(turn, parent=before))
            self._ordered = (self.turn, tuple(ordered))
        return self._ordered[1]

    # --- running ---

    async def _advance(self) -> None:
        """Run the harness until it returns or a limit ends the chain."""
        endpoint = Endpoint(self.reply, self.id, self._warn_once)
        running = asyncio.ensure_future(self.agent.harness.run(self.context, endpoint))
        limit = asyncio.ensure_future(self._limit_reached.wait())
        try:
            await asyncio.wait((running, limit), return_when=asyncio.FIRST_COMPLETED)
            if self.stop is None:
                await self._end_with(running.result())
        finally:
            for task in (limit, running, *self._serving):
                task.cancel()
            await asyncio.wait((running, *self._serving), timeout=_CANCEL_SECONDS)
            if running.done() and not running.cancelled():
                running.exception()  # prevents asyncio's warning about an exception that was never retrieved
            if not running.done():
                warn_or_log(f"the harness of {self.id} did not stop within {_CANCEL_SECONDS:g} s and was abandoned")
            elif running.cancelled() and not inspect.iscoroutinefunction(self.agent.harness.function):
                self._warn_once(
                    "thread",
                    "the harness runs in a thread, which cannot be stopped: it goes on after its chain has ended "
                    f"({self.stop or 'cancelled'}), until its function returns",
                )
            await endpoint.close()

    async def _end_with(self, outcome: Outcome) -> None:
        for task in (serving := list(self._serving)):
            task.cancel()
        await wait_all(serving)
        if self.stop is not None:
            return
        if outcome.error is None:
            try:
                self._answer(None if outcome.value is None else to_text(outcome.value))
                return
            except TypeError as error:  # the returned value cannot be converted to text
                outcome = dataclasses.replace(outcome, error=error)
        assert outcome.error is not None
        host = self._host_failure(()) is not None or getattr(outcome.error, "host", False)
        failure = failure_from("harness", outcome.error)
        # An unexpected output of the model may cause an error in the harness. The chain is then scored, because the
        # policy could otherwise avoid low rewards by causing errors. An error before the first action has other causes.
        self._end("error" if host or failure.host or not self.actions else "harness_failed", failure)

    def _answer(self, text: str | None) -> None:
        """End the chain with the answer `text`, which the harness returned, or the last action if `text` is None."""
        last = self.turns[-1].messages[-1]
        if text is None or (last["role"], text_of(last), last.get("tool_calls")) == ("assistant", text, None):
            self._end("answered")
            return
        message: Message = {"role": "assistant", "content": text}
        row = max(len(self._rows) - 1, 0)
        fields = text_fields(self.agent, (message,))
        self._append(
            Turn(kind="observation", author="harness", messages=(message,), parent=self.turn, row=row, **fields),
            "answered",
        )

    @pending_call
    async def close(self) -> None:
        """Abandon the chain without scoring it, and release its sandboxes. Idempotent."""
        for row in self._rows:
            self.agent.engine.release(f"{self._base_session}/{row.index}")
        await super().close()

    # --- requests ---

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        author: str | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the next action of a conversation. Concurrent requests for a chain are served one at a time.

        If the messages continue a row, its token ids are kept and only the new messages are encoded. If they continue
        an earlier action of a row, a new row starts with the ids up to that action. Otherwise, a new row starts with
        the rendered messages. Each action is trained on only in the row in which it was sampled.

        Args:
            messages: the whole conversation, as in the OpenAI API.
            tools: schemas of the tools that the model may call.
            author: author recorded for the action; by default the agent's name.
            max_tokens: maximum number of tokens; `Sampling.max_tokens` of the agent applies if it is smaller.
            stop: additional stop strings.

        Raises:
            SettingsError, RequestError: if the messages or tools are malformed or contain something other than text.
            ChainEnded: if a limit has ended the chain, or the engine failed. Its attribute `stop` is the stop reason.
        """
        task = asyncio.ensure_future(self._serve(messages, tools, author, max_tokens, tuple(stop)))
        self._serving.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            await wait_all([task])
            if cancelling():
                raise
            raise ChainEnded(self.stop or "cancelled") from None
        finally:
            self._serving.discard(task)

    async def _serve(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        author: str | None,
        max_tokens: int | None,
        stop: tuple[str, ...],
    ) -> Reply:
        async with self._in_order:
            self._check_running()
            sampling = self.agent.sampling
            with validating():
                plain, schemas = plain_messages(messages, self._call_ids), plain_tools(tools)
                sampling = sampling.replace(
                    max_tokens=min(sampling.max_tokens, max_tokens or sampling.max_tokens),
                    stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
                )
            with self._exclusive("reply"):
                try:
                    turn = await self._next_action(plain, schemas, author or self.agent.name, sampling)
                except (asyncio.CancelledError, SettingsError, RequestError, RecursionError):
                    raise  # the request is invalid or too deeply nested; the chain continues
                except Exception as error:
                    # The harness cannot handle errors of the chat template or the engine, so the chain ends.
                    where = "chat" if isinstance(error, ChatTemplateError) else "engine"
                    self._end("error", Failure.from_exception(where, error))
            self._check_running()
            return self._to_reply(turn)

    def _check_running(self) -> None:
        if self.stop is not None or self.closed:
            self._limit_reached.set()
            raise ChainEnded(self.stop or "cancelled", str(self.error) if self.error else "")

    async def _next_action(
        self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...], author: str, sampling: Sampling
    ) -> Turn:
        if self.actions >= self.agent.max_turns:
            return self._end("max_turns")
        await encode_long(messages, lambda: self._encode_ahead(messages, tools))
        row = self._continue_row(messages, tools)
        self._schemas, self.author = tools, author
        self._session = f"{self._base_session}/{row.index}"
        digest = hashlib.blake2b(json.dumps([self.ids, messages if not self.ids else 0]).encode(), digest_size=16)
        self._action_key = digest.hexdigest()
        before = self.turn
        turn = await self._sample(sampling)
        if turn is not before and turn.kind == "action":
            self._asked[self._action_key] += 1
            row.segments.append(Segment((message_key(turn.messages[0]),), len(self.ids), True))
        return turn

    def _encode_ahead(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> None:
        """Encode the messages that `_continue_row` encodes later, without changing the chain."""
        match, chat = find_match(self._rows, messages, tools), self.agent.chat
        new = () if match is None else messages[match.messages :]
        if self.agent.exact and (match is None or chat.needs_rerender(new)):
            chat.prompt(messages, tools, trusted=("system",))
        elif self.agent.exact:
            chat.observation_ids(new, tools)

    def _continue_row(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> ConversationRow:
        """Append the new messages to the row that they continue, or start a new row. Return the row."""
        match = find_match(self._rows, messages, tools)
        if match is None:
            if self._rows and any(message["role"] == "assistant" for message in messages):
                self._warn_once(
                    "rewritten",
                    "the harness sent a history or tools that differ from those of its earlier requests; a new row "
                    "starts there, in which the earlier actions are not trained again",
                )
            return self._start_row(messages, tools)
        new = messages[match.messages :]
        if not new:
            raise SettingsError("messages: the last message must not be the assistant's")
        if self.agent.exact and self.agent.chat.needs_rerender(new):
            return self._start_row(messages, tools)
        row = match.row
        if not match.at_leaf:
            return self._branch(match, new, tools)
        leaf = next(turn for turn in reversed(self.turn.path) if turn.row == row.index)
        turn = self._observation(leaf, new, row.index)
        if self.agent.exact:
            ids = self.agent.chat.observation_ids(new, tools, after=leaf.ids or ())
            turn = dataclasses.replace(turn, **token_fields(self.agent, ids))
        self._append(turn)
        row.segments.append(Segment(tuple(map(message_key, new)), len(self.ids), False))
        return row

    def _start_row(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> ConversationRow:
        agent = self.agent
        if agent.exact:
            fields = token_fields(agent, agent.chat.prompt(messages, tools, trusted=("system",)))
        else:
            fields = text_fields(agent, messages)
        return self._append_row(messages, tools, fields, [Segment(tuple(map(message_key, messages)), 0, False)])

    def _branch(self, match: Match, new: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> ConversationRow:
        """Start a row with the token ids of another row up to the matched action, followed by the messages `new`."""
        agent, row = self.agent, match.row
        path = [turn for turn in self.turn.path if turn.row == row.index]
        history = tuple(message for turn in path for message in turn.messages)[: match.messages]
        fields: dict[str, Any]
        if agent.exact:
            prefix = tuple(i for turn in path for i in turn.ids or ())[: row.segments[match.segments - 1].end]
            fields = token_fields(agent, (*prefix, *agent.chat.observation_ids(new, tools, after=prefix)))
        else:
            fields = text_fields(agent, (*history, *new))
        segments = [*row.segments[: match.segments], Segment(tuple(map(message_key, new)), 0, False)]
        return self._append_row((*history, *new), tools, fields, segments)

    def _append_row(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, Any], ...],
        fields: dict[str, Any],
        segments: list[Segment],
    ) -> ConversationRow:
        row = ConversationRow(len(self._rows), tools_key(tools), segments)
        parent = self.turn if self._rows else None  # the first request replaces the prompt of `_first_turn`
        author = "task" if not self._rows else "harness"
        where = label(self.agent, self.actions)
        turn = Turn(
            kind="prompt", author=author, messages=messages, parent=parent, row=row.index, label=where, **fields
        )
        segments[-1].end = turn.num_tokens
        self._rows.append(row)
        self._append(turn)
        return row

    def _observation(self, leaf: Turn, messages: tuple[Message, ...], row: int) -> Turn:
        """Return an observation with the messages that follow the action `leaf`, such as its tool results."""
        pending = {call.id: call for call in leaf.tool_calls}
        calls: list[ToolCall] = []
        for message in messages:
            call = pending.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
            if call is not None:
                calls.append(dataclasses.replace(call, result=ToolResult(True, text_of(message))))
        return Turn(
            kind="observation",
            author="tool" if all(message["role"] == "tool" for message in messages) else "harness",
            messages=messages,
            tool_calls=tuple(calls),
            parent=self.turn,
            row=row,
            label=label(self.agent, self.actions),
            **text_fields(self.agent, messages),
        )

    # --- actions ---

    def _action_seed(self, attempt: int) -> int:
        """Return a seed that depends on the prompt, but not on the order of concurrent requests."""
        return seeds.derive(self._seed(0), self._action_key, self._asked[self._action_key] + attempt)

    def _action_turn(self, sample: Sample, sampling: Sampling, seed: int) -> Turn:
        """Create the turn of a sampled action. If a tool call is malformed, the whole action is treated as text."""
        turn = super()._action_turn(sample, sampling, seed)
        if any(call.error is not None for call in turn.tool_calls):
            ids = turn.ids or ()
            ids = ids[:-1] if ids and ids[-1] in self.agent.chat.stop_ids else ids
            text = self.agent.chat.text(ids) if self.agent.exact else turn.text
            return dataclasses.replace(turn, messages=({"role": "assistant", "content": text},), tool_calls=())
        return turn

    def _stop_after_action(self, turn: Turn, limit: int, limited_by: str | None) -> str | None:
        stop = stop_after_action(self.agent, turn, limit, limited_by)
        # After an answer or a truncated action, the harness may continue the chain.
        return None if stop in ("answered", "turn_tokens") else stop

    def _to_reply(self, turn: Turn) -> Reply:
        message = turn.messages[0]
        calls = []
        for i, call in enumerate(turn.tool_calls):
            origin = hashlib.blake2b(f"{self.id} {turn.row} {self.actions}".encode(), digest_size=4).hexdigest()
            sent = f"call_{origin}_{i}"
            self._call_ids[sent] = (call.id, call.name)
            calls.append(ReplyCall(sent, call.name, json.dumps(call.arguments, ensure_ascii=False)))
        return Reply(
            text=text_of(message),
            thinking=message.get("thinking"),
            calls=tuple(calls),
            finish="length" if turn.stop == "length" else "tool_calls" if calls else "stop",
            prompt_tokens=len(self.ids) - turn.num_tokens,
            tokens=tuple(zip(turn.token_texts or (), turn.logprobs or (), strict=False)),
            completion_tokens=turn.num_tokens,
        )

    def _warn_once(self, key: str, text: str) -> None:
        """Issue a warning, at most once per agent and key."""
        if f"harness {key}" not in self.agent._warned:
            self.agent._warned.append(f"harness {key}")
            warn_or_log(text)
