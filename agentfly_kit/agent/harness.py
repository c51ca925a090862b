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
from agentfly_kit._async import threads
from agentfly_kit._async.pending_call import cancelling, pending_call, wait_all, warn_or_log
from agentfly_kit.agent.budget import stop_after_action
from agentfly_kit.agent.chain import BaseChain
from agentfly_kit.agent.conversations import (
    ConversationRow,
    Match,
    Segment,
    find_match,
    message_key,
    plain_tools,
    read_messages,
    tools_key,
)
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import encode_long, find_stop, join_ids, label, text_fields, token_fields
from agentfly_kit.endpoint.endpoint import Endpoint
from agentfly_kit.endpoint.reply import ChainEnded, Reply, ReplyCall, ReplyOptions, RequestError, validating
from agentfly_kit.errors import ChatTemplateError, SettingsError
from agentfly_kit.samples import Sample, Sampling
from agentfly_kit.tools.calling import Outcome, call_user_function, failure_from
from agentfly_kit.tools.context import Context, Fields
from agentfly_kit.tools.injection import InjectedFunction
from agentfly_kit.tools.results import to_text
from agentfly_kit.types import Failure, Message, Task, ToolCall, ToolResult, Turn, images_of, spans_of, text_of

# Maximum time in seconds to wait for a cancelled harness to clean up.
_CANCEL_SECONDS = 5.0
# Value of `ConversationRow.tools` for rows that begin with text or ids instead of messages.
_PLAIN = "plain"


class Harness(InjectedFunction[..., Any]):
    """Wrapper that injects the arguments of the function given as `Agent(harness=)`."""

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
    """Chain for `Agent(harness=)`. The harness requests each action through an endpoint.

    Turns are appended in the order of the requests. Each turn belongs to the row that the request continues, so turns
    of several rows may alternate while the chain runs. The property `turns` sorts the turns by row.
    """

    def __init__(
        self, agent: AgentSettings, task: Task, key: ChainKey | None = None, hooks: ChainHooks | None = None
    ) -> None:
        super().__init__(agent, task, key, hooks)
        self._rows: list[ConversationRow] = []
        # Number of actions sampled for each prompt, so that repeated requests get different seeds.
        self._asked: Counter[str] = Counter()
        self._action_key = ""
        # True if the prompt of the current request is text or ids, so that the action is not parsed.
        self._is_plain = False
        # Maps each tool call id sent to the client to the id and name of the call in the chain.
        self._call_ids: dict[str, tuple[str, str]] = {}
        self._in_order = asyncio.Lock()
        self._serving: set[asyncio.Task[tuple[Turn, Reply]]] = set()
        self._limit_reached = asyncio.Event()
        self._given_up: Outcome | None = None  # if a harness repeats requests that are refused
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
        endpoint = Endpoint(self.reply, self.count_tokens, self.id, self._warn_once, self._give_up)
        running = asyncio.ensure_future(self.agent.harness.run(self.context, endpoint))
        limit = asyncio.ensure_future(self._limit_reached.wait())
        try:
            await asyncio.wait((running, limit), return_when=asyncio.FIRST_COMPLETED)
            if self.stop is None:
                await self._end_with(self._given_up or running.result())
        finally:
            for task in (limit, running, *self._serving):
                task.cancel()
            try:
                await asyncio.wait((running, *self._serving), timeout=_CANCEL_SECONDS)
            finally:  # also runs if this task is cancelled again, because a server would keep listening
                await wait_all([asyncio.ensure_future(endpoint.close())])
            if running.done() and not running.cancelled():
                running.exception()  # prevents asyncio's warning about an exception that was never retrieved
            if not running.done():
                warn_or_log(f"the harness of {self.id} did not stop within {_CANCEL_SECONDS:g} s and was abandoned")
            elif running.cancelled() and not inspect.iscoroutinefunction(self.agent.harness.function):
                self._warn_once(
                    "thread",
                    "the harness runs in a thread, which cannot be stopped, so it continues after its chain has ended "
                    f"({self.stop or 'cancelled'}), until its function returns",
                )

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

    def _give_up(self, reason: str) -> None:
        """End the chain, because the harness repeats requests that are refused."""
        self._given_up = self._given_up or Outcome(error=RequestError(reason))
        self._limit_reached.set()

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
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), options: ReplyOptions | None = None
    ) -> Reply:
        """Sample the next action of a conversation. Concurrent requests for a chain are served one at a time.

        If the messages continue a row, its token ids are kept and only the new messages are encoded. If the messages
        continue an earlier action of a row, a new row starts with the ids up to that action. Otherwise, a new row
        starts with the rendered messages. Each action is trained on only in the row in which it was sampled.

        Args:
            messages: the whole conversation, as in the OpenAI API.
            tools: schemas of the tools that the model may call.
            options: prompt, author, limits and constraints.

        Raises:
            SettingsError, RequestError: if the messages or tools are malformed, or the engine does not read the images.
            ChainEnded: if a limit has ended the chain, or the engine failed. The exception's `stop` is the stop reason.
        """
        task = asyncio.ensure_future(self._serve(messages, tools, options or ReplyOptions()))
        self._serving.add(task)
        try:
            return (await task)[1]
        except asyncio.CancelledError:
            task.cancel()
            await wait_all([task])
            if cancelling():
                answered = not task.cancelled() and task.exception() is None
                if answered and task.result()[0] is self.turn and self.stop is None and not self.closed:
                    # The action was recorded in this pass of the event loop, and no client will receive it.
                    self._asked[self._action_key] -= 1
                    self._rows[self.turn.row].segments.pop()
                    self._append(self.turn.parent or self.turn)
                raise
            raise ChainEnded(self.stop or "cancelled") from None
        finally:
            self._serving.discard(task)

    async def _serve(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], options: ReplyOptions
    ) -> tuple[Turn, Reply]:
        async with self._in_order:
            self._check_running()
            sampling = self.agent.sampling
            plain: tuple[Message, ...] = ()
            with validating():
                if options.prompt is None:
                    plain = await read_messages(self.agent, self.task, messages, self._call_ids)
                schemas = plain_tools(tools)
                sampling = sampling.replace(
                    max_tokens=min(sampling.max_tokens, options.max_tokens or sampling.max_tokens),
                    stop=tuple(dict.fromkeys((*sampling.stop, *options.stop))),
                )
            with self._exclusive("reply"):
                try:
                    turn = await self._next_action(plain, schemas, options, sampling)
                except (asyncio.CancelledError, SettingsError, RequestError, RecursionError):
                    raise  # the request is invalid or too deeply nested; the chain continues
                except Exception as error:
                    # The harness cannot handle errors of the chat template or the engine, so the chain ends.
                    where = "chat" if isinstance(error, ChatTemplateError) else "engine"
                    self._end("error", Failure.from_exception(where, error))
            self._check_running()
            return turn, self._to_reply(turn, sampling.stop)

    async def count_tokens(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> int:
        """Return the number of tokens in the prompt that `reply` would use; 0 with a text-only engine."""
        self._check_running()
        with validating():
            plain, schemas = await read_messages(self.agent, self.task, messages, self._call_ids), plain_tools(tools)
        await encode_long(plain, lambda: self._count_tokens(plain, schemas))
        return self._count_tokens(plain, schemas)

    def _check_running(self) -> None:
        if self.stop is not None or self.closed:
            self._limit_reached.set()
            raise ChainEnded(self.stop or "cancelled", str(self.error) if self.error else "")

    async def _next_action(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, Any], ...],
        options: ReplyOptions,
        sampling: Sampling,
    ) -> Turn:
        if self.actions >= self.agent.max_turns:
            return self._end("max_turns")
        self._constraint = None
        if options.must_call is not None or options.schema is not None:
            from agentfly_kit.agent.constraint import find_constraint

            self._constraint = await find_constraint(self.agent, tools, options, self._warn_once)
        self._is_plain = options.prompt is not None
        if options.prompt is None:
            await encode_long(messages, lambda: self._count_tokens(messages, tools))
            row = self._continue_row(messages, tools)
        else:
            row = self._continue_ids(await threads.call(self._encode_prompt, options.prompt))
        self._schemas, self.author = tools, options.author or self.agent.name
        self._session = f"{self._base_session}/{row.index}"
        self._action_key = self._prompt_key(messages)
        before = self.turn
        turn = await self._sample(sampling)
        if turn is not before and turn.kind == "action":
            self._asked[self._action_key] += 1
            row.segments.append(Segment((message_key(turn.messages[0]),), len(self.ids), True))
        return turn

    def _count_tokens(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> int:
        """Encode messages, so that `_continue_row` finds the result in a cache, and count the token ids."""
        match, chat = find_match(self._rows, messages, tools), self.agent.chat
        new = () if match is None else messages[match.messages :]
        if not self.agent.exact:
            return 0
        if match is None or chat.needs_rerender(new):
            return len(chat.prompt(messages, tools, trusted=("system",)))
        prefix = self._row_ids(match.row)[: match.end]
        return len(prefix) + len(chat.observation_ids(new, tools, after=prefix))

    def _row_ids(self, row: ConversationRow) -> tuple[int, ...]:
        return tuple(i for turn in self.turn.path if turn.row == row.index for i in turn.ids or ())

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
            raise SettingsError("messages: the last message must not be an assistant message")
        if self.agent.exact and self.agent.chat.needs_rerender(new):
            return self._start_row(messages, tools)
        row = match.row
        if not match.at_leaf:
            return self._branch(match, new, tools)
        leaf = self._leaf(row)
        turn = self._observation(leaf, new, row.index)
        if self.agent.exact:
            ids = self.agent.chat.observation_ids(new, tools, after=leaf.ids or ())
            turn = dataclasses.replace(turn, **token_fields(self.agent, ids))
        self._append(turn)
        row.segments.append(Segment(tuple(map(message_key, new)), len(self.ids), False))
        return row

    def _leaf(self, row: ConversationRow) -> Turn:
        return next(turn for turn in reversed(self.turn.path) if turn.row == row.index)

    def _encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a prompt without messages. As in other servers, text begins with the BOS token."""
        chat, engine = self.agent.chat, self.agent.engine
        if not self.agent.exact:
            raise RequestError("/completions requires an engine with token ids; use /chat/completions")
        if not isinstance(prompt, str):
            limit = engine.vocab_size or len(chat.tokenizer)
            if not prompt or not 0 <= min(prompt) <= max(prompt) < limit:
                raise RequestError(f"'prompt' must have at least one id, from 0 to {limit - 1}, got {prompt!r:.80}")
            return tuple(prompt)
        begin, ids = tuple(chat.tokenizer("")["input_ids"]), chat.encode(prompt)
        if not (begin or ids):
            raise RequestError("'prompt' must have at least one token, got an empty text")
        return ids if ids[: len(begin)] == begin else (*begin, *ids)

    def _continue_ids(self, ids: tuple[int, ...]) -> ConversationRow:
        """Continue the longest row without messages whose ids are a prefix of `ids`, or start a row. Return the row."""
        rows = [row for row in self._rows if row.tools == _PLAIN and ids[: len(found := self._row_ids(row))] == found]
        row = max(rows, key=lambda row: len(self._row_ids(row)), default=None)
        fields = token_fields(self.agent, ids if row is None else ids[len(self._row_ids(row)) :])
        messages: tuple[Message, ...] = ({"role": "user", "content": fields["text"]},)
        if row is None:
            return self._append_row(messages, _PLAIN, fields, [Segment((), 0, False)])
        self._append(dataclasses.replace(self._observation(self._leaf(row), messages, row.index), **fields))
        return row

    def _start_row(self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> ConversationRow:
        agent = self.agent
        if agent.exact:
            fields = token_fields(agent, agent.chat.prompt(messages, tools, trusted=("system",)))
        else:
            fields = text_fields(agent, messages)
        segments = [Segment(tuple(map(message_key, messages)), 0, False)]
        return self._append_row(messages, tools_key(tools), fields, segments)

    def _branch(self, match: Match, new: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> ConversationRow:
        """Start a row with the token ids of another row up to the matched action, followed by the messages `new`."""
        agent, row = self.agent, match.row
        path = [turn for turn in self.turn.path if turn.row == row.index]
        history = tuple(message for turn in path for message in turn.messages)[: match.messages]
        fields: dict[str, Any]
        if agent.exact:
            ids = agent.chat.observation_ids(new, tools, after=self._row_ids(row)[: match.end])
            fields = token_fields(agent, join_ids(path, match.end, ids))
        else:
            fields = text_fields(agent, (*history, *new))
        segments = [*row.segments[: match.segments], Segment(tuple(map(message_key, new)), 0, False)]
        return self._append_row((*history, *new), tools_key(tools), fields, segments)

    def _append_row(
        self,
        messages: tuple[Message, ...],
        tools: str,
        fields: dict[str, Any],
        segments: list[Segment],
    ) -> ConversationRow:
        row = ConversationRow(len(self._rows), tools, segments)
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
                result = ToolResult(True, text_of(message), images=images_of([message]))
                calls.append(dataclasses.replace(call, result=result))
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

    def _prompt_key(self, messages: Sequence[Message]) -> str:
        """Return a digest of the prompt of the next action. Images are represented by their own digests."""
        shown = [span.image.digest for span in spans_of(self.turn.row_path)]
        text = json.dumps([self.ids, 0 if self.ids else messages, *shown], default=lambda image: image.digest)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _action_seed(self, attempt: int) -> int:
        """Return a seed that depends on the prompt, but not on the order of concurrent requests."""
        return seeds.derive(self._seed(0), self._action_key, self._asked[self._action_key] + attempt)

    def _action_turn(self, sample: Sample, sampling: Sampling, seed: int) -> Turn:
        """Create the turn of a sampled action. If a tool call is malformed, the whole action is treated as text."""
        turn = super()._action_turn(sample, sampling, seed)
        if self._is_plain or any(call.error is not None for call in turn.tool_calls):
            ids = turn.ids or ()
            ids = ids[:-1] if ids and ids[-1] in self.agent.chat.stop_ids else ids
            text = self.agent.chat.text(ids) if self.agent.exact else turn.text
            if self._is_plain and (found := find_stop(turn, sampling.stop)):
                text = text[: found[0]]
            return dataclasses.replace(turn, messages=({"role": "assistant", "content": text},), tool_calls=())
        return turn

    def _stop_after_action(self, turn: Turn, limit: int, limited_by: str | None) -> str | None:
        stop = stop_after_action(self.agent, turn, limit, limited_by)
        # After an answer or a truncated action, the harness may continue the chain.
        return None if stop in ("answered", "turn_tokens") else stop

    def _to_reply(self, turn: Turn, stops: Sequence[str]) -> Reply:
        message = turn.messages[0]
        found = find_stop(turn, stops)
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
            stop_string=found[1] if found else None,
            prompt_tokens=len(self.ids) - turn.num_tokens,
            prompt_ids=self.ids[: len(self.ids) - turn.num_tokens],
            ids=turn.ids or (),
            tokens=tuple(zip(turn.token_texts or (), turn.logprobs or (), strict=False)),
            completion_tokens=turn.num_tokens,
        )

    def _warn_once(self, key: str, text: str) -> None:
        """Issue a warning, at most once per agent and key."""
        if f"harness {key}" not in self.agent._warned:
            self.agent._warned.append(f"harness {key}")
            warn_or_log(text)
