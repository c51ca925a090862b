"""`Chain`, which extends `LoopChain` with methods that edit, rewind or fork a chain."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit.agent.budget import stop_of_complete_action
from agentfly_kit.agent.chain import BaseChain, LoopChain
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import (
    append_text,
    forced_beginning,
    label,
    next_row,
    observation_turn,
    parse_action,
    result_message,
    text_fields,
    token_fields,
)
from agentfly_kit.errors import SettingsError, check_instance
from agentfly_kit.samples import Distribution
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message, Task, ToolResult, Turn, normalize_messages, spans_of


class Chain(LoopChain):
    """Trajectory in progress, created with `agent.chain(task)`. Methods that append a turn return that turn.

    Attributes:
        origin: the trajectory that the chain continues, if it was created by `agent.chain(trajectory)`; otherwise None.
        origin_key: the key from which the seeds of `origin` are derived; None if `origin` is None.
    """

    origin: Trajectory | None = None
    origin_key: ChainKey | None = None
    num_forks = 0  # highest fork number so far

    @classmethod
    def from_trajectory(cls, agent: AgentSettings, trajectory: Trajectory) -> Chain:
        """Create a chain from the turns of a trajectory, to rewind, fork or continue it.

        If the agent is unchanged and the seeds of the trajectory are known, resampling a turn yields the same tokens.

        Raises:
            SettingsError: if the trajectory does not begin with the agent's prompt, or its tools used a sandbox.
        """
        group, number = trajectory.group, trajectory.chain
        fork = trajectory.id.removeprefix(f"{group}/{number}")
        chain = cls(agent, trajectory.task, ChainKey(group=group, chain=number, fork=f"{fork}~"))
        first = trajectory.turns[0] if trajectory.turns else None
        if first is None or (first.ids, first.images) != (chain.turn.ids, chain.turn.images):
            raise SettingsError(
                f"{trajectory.id!r} must begin with the prompt of this agent; use the agent that sampled the trajectory"
            )
        for call in trajectory.tool_calls:
            sandbox_types = agent.tools[call.name].sandbox_types if call.name in agent.tools else ()
            if call.error is None and sandbox_types:
                raise SettingsError(
                    f"{trajectory.id!r} called {call.name!r} in a {sandbox_types[0].__name__}, "
                    "which has been released; agent.chain(task) starts from the beginning"
                )
        leaf: Turn | None = None
        for turn in trajectory.turns:
            leaf = turn if turn.parent is leaf else dataclasses.replace(turn, parent=leaf)
        assert leaf is not None
        chain.turn, chain.stop, chain.error = leaf, trajectory.stop, trajectory.error
        # Parse the seed key from the group id. The key is used only if it reproduces the seed of the trajectory.
        purpose, _, rollout = group.partition(":")[0].rpartition("-")
        if rollout.isdigit():
            key = ChainKey(purpose, int(rollout), group, number, fork)
            if key.seed(agent.seed, trajectory.task.id, 0) == trajectory.seed:
                chain.seed_key = key
        chain.origin, chain.origin_key = trajectory, chain.seed_key
        return chain

    # --- inspecting ---

    @pending_call
    async def distribution(self, top: int = 20) -> Distribution:
        """Return the `top` most probable next tokens, without changing the chain."""
        agent = self.agent
        with self._exclusive("distribution"):
            await self._prepare()
            async with agent._request_slot():
                spans = spans_of(self.turn.row_path)
                options: dict[str, Any] = {"top": top} | ({"images": spans} if spans else {})
                ids, logprobs, entropy = await agent.engine.distribution(self.ids, agent.sampling, **options)
            return Distribution(tuple(ids), agent.chat.token_texts(ids), tuple(logprobs), entropy)

    # --- writing turns ---

    def force(self, content: str | Sequence[int], *, end: bool = True, author: str = "person") -> Turn:
        """Append the given action, or the beginning of one, instead of sampling it. The given tokens have mask 0.

        Args:
            content: text or token ids.
            end: whether `content` ends the action. If False, the next sample continues the action.
            author: author of the turn.

        Raises:
            SettingsError: if the last action is complete, or `content` contains ids outside the vocabulary or
                placeholders of images.
        """
        with self._exclusive("force"):
            self._check_prepared("force")
            agent, chat = self.agent, self.agent.chat
            if self.pending_calls or self.user_due or self.stop == "answered":
                raise SettingsError(
                    "the last action is complete; call chain.act(), chain.observe() or chain.rewind() first"
                )
            ids = list(chat.encode(content) if isinstance(content, str) else map(int, content))
            vocabulary = len(chat.tokenizer)
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                raise SettingsError(
                    f"ids must be in the vocabulary, 0 to {vocabulary - 1}, got ids from {min(ids)} to {max(ids)}"
                )
            if chat.reader is not None and chat.reader.token_id in ids:
                raise SettingsError("content must not contain placeholders of images, which actions cannot have")
            if end and not (ids and ids[-1] in chat.stop_ids):
                ids.append(chat.stop_ids[0])
            fields: dict[str, Any] = {}
            if end:
                message, calls = parse_action(chat, agent.tools.schemas, forced_beginning(self.turn), ids)
                fields = {"messages": (message,), "tool_calls": calls, "stop": "stop"}
            turn = Turn(
                kind="forced",
                author=author,
                parent=self.turn,
                row=self.turn.row,
                label=label(agent, self.actions + 1),
                **token_fields(agent, ids),
                **fields,
            )
            return self._append(turn, stop_of_complete_action(agent, turn) if end else None)

    def observe(self, text: str, *, author: str = "person") -> Turn:
        """Append `text` as the observation of the last action.

        The text becomes the result of each tool call of the action, or a user message if the action called no tool. If
        the last turn is already an observation, the text is added to it as a user message.

        Raises:
            SettingsError: if the chain has no action yet, or `text` is not a string.
        """
        check_instance("text", text, str, "a string")
        with self._exclusive("observe"):
            user: Message = {"role": "user", "content": text}
            if self.turn.kind == "observation":
                messages = (*self.turn.messages, user)
                fields = text_fields(self.agent, messages)
                return self._append_observation(dataclasses.replace(self.turn, messages=messages, **fields))
            if not self.turn.completes_action:
                raise SettingsError("the chain has no complete action yet; sample or force one first")
            calls = [dataclasses.replace(call, result=ToolResult(True, text)) for call in self.pending_calls]
            results = [result_message(call) for call in calls]
            return self._append_observation(observation_turn(self.agent, self.turn, results or [user], author, calls))

    def compact(self, content: str | Sequence[Message], *, author: str = "hook") -> Turn:
        """End the current row and continue in a new row with a shorter context. Return the new prompt.

        All rows are kept in `trajectory.rows` and used for training. The token ids of an observation after the last
        action are removed, because no engine has received them. A chain with the stop reason "answered",
        "context_full" or "turn_tokens" continues, or ends with "max_turns" if this limit is reached.

        Args:
            content: a string, which is appended to the last message of the first prompt, or messages, which replace
                the whole prompt, including the system message. The tool schemas are always kept.
            author: author of the new prompt.

        Raises:
            SettingsError: if tool calls have not run, or `content` is not text.
        """
        with self._exclusive("compact"):
            self._check_prepared("compact")
            # If a truncated action ended the chain, its tool calls never run.
            if self.pending_calls and self.stop is None:
                raise SettingsError("the last tool calls have not run yet; call chain.act() or chain.observe() first")
            messages = append_text(self.turns[0].messages, content) if isinstance(content, str) else content
            messages = normalize_messages(messages, "content of compact")
            if self.actions >= self.agent.max_turns:
                return self._end_before_action("max_turns")
            self._drop_observation_ids()
            return self._append(next_row(self.agent, self.turn, messages, author))

    def _check_prepared(self, call: str) -> None:
        if not self._prepared:
            raise SettingsError(
                f"chain.{call}: the agent's before_chain must complete the prompt first; await chain.prepare()"
            )

    # --- going back and forking ---

    def rewind(self, to: Turn | int) -> Turn:
        """Go back to an earlier turn and remove all later turns from this chain.

        If `to` is an observation that has no token ids, because it ended the chain or a row, it is encoded now.

        Args:
            to: the turn, or its index in `chain.turns`.

        Raises:
            SettingsError: if the turn is not in `chain.turns`, or if tools have run since that turn and the chain holds
                a sandbox or tool state, which cannot be rewound.
        """
        with self._exclusive("rewind"):
            return self._move_to(self._earlier_turn(to, "to"))

    def _earlier_turn(self, to: Turn | int, name: str) -> Turn:
        """Return the turn given by `to`. Raise SettingsError if sandboxes or tool state may have changed since then."""
        path = self.turns
        target = path[to] if isinstance(to, int) and -len(path) <= to < len(path) else to
        if isinstance(target, int) or not any(turn is target for turn in path):
            raise SettingsError(f"{name} must be one of chain.turns, or its index, got {target!r}")
        held = self.context.held
        later = path[next(i for i, turn in enumerate(path) if turn is target) :]
        used = any(turn is self._context_used_at for turn in later)
        if self.turn is not target and used and (held or self.context.state):
            what = ", ".join(sandbox_type.__name__ for sandbox_type in held) or "state that its tools keep"
            raise SettingsError(f"this chain cannot go back: it holds {what}, whose earlier state cannot be restored")
        return target

    def _move_to(self, target: Turn) -> Turn:
        self.error = None
        # A truncated action is not an answer, and its tool calls are not run.
        stop = "turn_tokens" if target.stop == "length" else stop_of_complete_action(self.agent, target)
        self._append(target, stop if target.completes_action else None)
        if target.kind == "observation" and target.ids == ():
            # The target has no ids, because it ended the chain or a row.
            self._append_observation(target)
        return self.turn

    @pending_call
    async def fork(
        self,
        *,
        at: Turn | int | None = None,
        same_seeds: bool = False,
        number: int | None = None,
        queue: bool = True,
    ) -> Chain:
        """Return an independent chain with the same turns and with forks of this chain's sandboxes.

        Args:
            at: the turn after which the fork continues, or its index in `chain.turns`; by default the last turn.
            same_seeds: whether the fork samples with the seeds of this chain instead of its own.
            number: number of the fork, which determines its id and seeds; by default the next number.
            queue: whether to wait for other chains to release sandboxes.

        Raises:
            SettingsError: if tools have run since the turn `at` and the chain holds a sandbox or tool state.
            SandboxError: if a sandbox or the state of the tools cannot be forked.
            PoolTimeout: if no sandbox becomes free in time or, with queue=False, if all sandboxes of a pool are leased.
        """
        with self._exclusive("fork"):
            target = None if at is None else self._earlier_turn(at, "at")
            twin = self._twin(self.num_forks + 1 if number is None else number, same_seeds)
            if target is not None:
                twin._move_to(target)
            twin.context = await self.context.fork(twin.id, queue=queue)
            return twin

    def _twin(self, number: int, same_seeds: bool = False) -> Chain:
        """Return a fork of this chain with the given number, without forking the sandboxes."""
        self.num_forks = max(self.num_forks, number)
        twin = Chain(
            self.agent, self.task, dataclasses.replace(self.key, fork=f"{self.key.fork}.{number}"), self.hooks
        )
        twin.author = self.author
        twin.turn, twin.stop, twin.error = self.turn, self.stop, self.error
        twin.origin, twin.origin_key = self.origin, self.origin_key
        twin.seed_key = self.seed_key if same_seeds else twin.key
        twin._prepared, twin.has_sampled = self._prepared, self.has_sampled
        twin._started_at, twin._context_used_at = self._started_at, self._context_used_at
        return twin

    @pending_call
    async def sample_turns(self, n: int, *, to_end: bool = False) -> Rollout:
        """Draw `n` independent samples of the next action without changing this chain.

        Each sample is drawn in a separate fork, with the id and seeds that `fork` would give it. The sandboxes are
        forked only with `to_end=True`. The samples run concurrently if the pools have enough sandboxes.

        Args:
            n: number of samples.
            to_end: whether to run each sample to the end of the chain, with the agent's hooks, and score it.

        Returns:
            A rollout with one group of `n` trajectories. Without `to_end`, each trajectory ends with the sampled action
            and is unscored, with the stop reason "cancelled" if the chain could continue. Pass a trajectory to
            `append_sample` to add its action to this chain.

        Raises:
            SettingsError: if the next turn cannot be an action.
            SandboxError: if `to_end=True` and a sandbox or the state of the tools cannot be forked.
        """
        with self._exclusive("sample_turns"):
            await self._prepare()
            self._check_action_due()
            began = time.perf_counter()
            forking = asyncio.Lock()
            try:
                async with asyncio.TaskGroup() as group:
                    twins = [self._twin(self.num_forks + 1) for _ in range(n)]
                    jobs = [group.create_task(self._sample_in(twin, to_end, forking)) for twin in twins]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return Rollout.from_trajectories([job.result() for job in jobs], time.perf_counter() - began)

    async def _sample_in(self, twin: Chain, to_end: bool, forking: asyncio.Lock) -> Trajectory:
        try:
            if not to_end:
                await twin._sample(self.agent.sampling)
                return twin.snapshot()
            async with forking:  # prevents a deadlock between forks that each need several sandboxes
                twin.context = await self.context.fork(twin.id)
            return await twin.run()
        finally:
            await twin.close()

    def append_sample(self, sample: Trajectory) -> Turn:
        """Append an action from a trajectory returned by `sample_turns`, as if this chain had sampled it.

        Args:
            sample: a trajectory that starts with the turns of this chain, followed by a sampled action.

        Raises:
            SettingsError: if the chain is not at the turn where `sample` was drawn, or `sample` has no action there.
        """
        with self._exclusive("append_sample"):
            n = len(self.turns)
            same = [(t.ids, t.text) for t in sample.turns[:n]] == [(t.ids, t.text) for t in self.turns]
            if not same or len(sample.turns) == n or sample.turns[n].kind != "action":
                raise SettingsError(f"sample must have the turns of this chain, then an action, got {sample.id!r}")
            ended = len(sample.turns) == n + 1 and sample.stop != "cancelled"
            self.has_sampled = True
            turn = dataclasses.replace(sample.turns[n], parent=self.turn, reward=None)
            return self._append_action(turn, sample.stop if ended else None)


def create_chain(
    agent: AgentSettings, task: Task, key: ChainKey | None = None, hooks: ChainHooks | None = None
) -> BaseChain:
    """Create a `HarnessChain` if the agent has a harness, otherwise a `Chain`."""
    kind: type[BaseChain] = Chain if agent.harness is None else agent.harness.chain_type
    return kind(agent, task, key, hooks)
