"""`BaseChain` runs a chain to its end and scores it; `LoopChain` is the built-in agent loop.

When tokens are sampled, `turns.action_turn` decides whether they are trained on (mask 1).
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentfly_kit._async.pending_call import cancelling, maybe_await, pending_call, warn_or_log
from agentfly_kit.agent.budget import (
    action_tokens,
    refuse_calls,
    reserve_tokens,
    stop_after_action,
    stop_after_calls,
)
from agentfly_kit.agent.chain_state import ChainState
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import (
    action_turn,
    append_text,
    encode_long,
    encode_observation,
    observation_turn,
    prompt_turn,
    result_message,
    with_exception_text,
    with_turn_rewards,
)
from agentfly_kit.errors import EngineError, SettingsError, check_instance
from agentfly_kit.rewards import Score
from agentfly_kit.samples import Sample, Sampling, TurnRequest
from agentfly_kit.success import record_success
from agentfly_kit.trajectories import UNSCORED_STOPS, Trajectory
from agentfly_kit.types import Failure, Message, ToolCall, Turn, images_of, spans_of


class BaseChain(ChainState):
    """Base class of chains that can be run to their end and scored. Subclasses define how actions are requested."""

    # --- running ---

    @pending_call
    async def run(self) -> Trajectory:
        """Run the chain to its end, with the hooks and time limits of the agent, and score it.

        Exceptions raised by the engine, the host or a hook are not propagated. Such an exception ends the chain, which
        is left unscored, and is recorded in `error`.
        """
        state, detail, trajectory = "cancelled", "", None
        self.hooks.report(self.id, "chain", "start", "waiting", self.actions)
        try:
            await self._run_to_end()
            trajectory = await self._finish_anyway()
            state, detail = "failed" if trajectory.error is not None else "done", trajectory.stop
            try:
                if not self.never_started:
                    await call_hook(self.agent.after_chain, self, trajectory)
            except (
                Exception
            ) as error:  # the trajectory is already finished, so an error of this hook is only reported
                warn_or_log(f"after_chain raised {type(error).__name__}: {error}")
            return trajectory
        finally:
            self.hooks.report(
                self.id, "chain", "end", state, self.actions, detail, result=trajectory or self.snapshot()
            )

    async def _run_to_end(self) -> None:
        # The earliest deadline of the chain and its shared budgets applies.
        deadlines = [(usage.deadline, f"{usage.name}_seconds") for usage in self.hooks.usages]
        if self.agent.timeout is not None:
            deadlines.append((asyncio.get_running_loop().time() + self.agent.timeout, "timeout"))
        when, stop = min(((at, stop) for at, stop in deadlines if at is not None), default=(None, ""))
        limit = asyncio.timeout_at(when)
        try:
            async with limit:
                while self.stop is None:
                    await self._advance()
        except asyncio.CancelledError as error:
            if cancelling():
                await self.close()
                raise
            # An operation that this task awaited was cancelled, but not the task itself.
            self._end("error", Failure.from_exception("chain", error))
        except Exception as error:
            if limit.expired():
                if self.stop is None:  # otherwise, the chain had already ended and was waiting for its group
                    self._end(stop)
            else:  # for example, a TimeoutError raised by a server, which is unrelated to the chain's time limit
                where = "engine" if isinstance(error, EngineError) else "chain"
                self._end("error", Failure.from_exception(where, error))

    @abstractmethod
    async def _advance(self) -> None:
        """Run one step of the chain."""

    async def _finish_anyway(self) -> Trajectory:
        try:
            return await self.finish()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelling():
                raise
            # Record the error in the trajectory instead of raising it, for example if a pool was closed while in use.
            self._end("error", Failure.from_exception("chain", error))
            return self.snapshot()

    # --- sampling ---

    async def _sample(self, sampling: Sampling, attempt: int = 0) -> Turn:
        agent, index, ids = self.agent, self.actions, self.ids
        # End the chain if its token limit or the context length leaves no room for another action.
        left = math.inf if agent.max_tokens is None else agent.max_tokens - action_tokens(self.turn)
        room = agent.engine.max_length - len(ids)
        messages = tuple(m for turn in self.turn.row_path for m in turn.messages)
        if shown := images_of(messages):
            agent.check_images(self.task, messages)
        if left < 1 or room <= 1 or len(shown) > agent.engine.images:
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
            async with agent._request_slot():
                self.has_sampled = True
                with self._reporting("turn", "sampling", index) as event:
                    seed = self._action_seed(attempt)
                    given = (messages, self._schemas, self._constraint, spans_of(self.turn.row_path))
                    request = TurnRequest(self.task, index, self._session, *given)
                    sample = await agent.engine.sample(ids, sampling, seed, request=request)
                    turn = self._action_turn(sample, sampling, seed)
                    reserved.used = turn.num_tokens
                    self._append_action(turn, self._stop_after_action(turn, sampling.max_tokens, reserved.limited_by))
                    event.detail = turn.text
        return turn

    def _action_seed(self, attempt: int) -> int:
        return self._seed(self.actions, attempt)

    def _stop_after_action(self, turn: Turn, limit: int, limited_by: str | None) -> str | None:
        return stop_after_action(self.agent, turn, limit, limited_by)

    def _action_turn(self, sample: Sample, sampling: Sampling, seed: int) -> Turn:
        return action_turn(self.agent, self.turn, sample, sampling, seed, self._schemas, self.author)

    # --- finishing ---

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
            if self.agent.group_reward is None:  # otherwise, the runner completes the score later
                trajectory = complete_score(self.agent, trajectory)
            self.trajectory, self.error = trajectory, trajectory.error
            return self.trajectory


class LoopChain(BaseChain):
    """Chain that runs the built-in agent loop: sample an action, run its tool calls, repeat until the model answers."""

    # --- running ---

    async def _advance(self, sample: Callable[[], Awaitable[Turn]] | None = None) -> None:
        """Run one step of the chain with the agent's hooks. If given, `sample` is called in place of `self.sample`."""
        agent = self.agent
        await self.prepare()
        if agent.before_turn is not None:
            self._context_used_at = self.turn
            await call_hook(agent.before_turn, self)
        # Do not sample if `before_turn` has ended the chain or forced an action.
        if self.stop is None and not self.pending_calls and not self.user_due:
            action = await (sample or self.sample)()
            # Use `action` instead of `self.turn`, because a nudge may already follow the action.
            follows_observation = action.parent is not None and action.parent.kind == "observation"
            if self.hooks.branch is not None and action.kind == "action" and follows_observation:
                await self.hooks.branch(self, action)
            if self._compacting_can_help():
                await call_hook(agent.on_context_full, self)
        if self.stop is None and self.pending_calls:
            await self.act()
        elif self.user_due:
            await self.ask_user()
        else:
            return
        if self.stop is None and (count := await call_hook(agent.after_observation, self)):
            if self.hooks.spawn is None:
                raise SettingsError("after_observation requested forks of a chain that is not in a rollout")
            await self.hooks.spawn(self, count)

    def _compacting_can_help(self) -> bool:
        return self.stop == "context_full" and len(self.turn.row_path) > 1  # there are turns besides the prompt

    # --- preparing ---

    @pending_call
    async def prepare(self) -> Turn:
        """Call the agent's `before_chain` hook, which may extend the prompt, and return the last turn.

        The first `sample` calls the hook automatically. Call `prepare` before `force`, or to inspect the prompt.
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
            old = self.turn.messages
            messages = append_text(old, content) if isinstance(content, str) else (*old, *content)
            self._append(prompt_turn(self.agent, messages, "task"))
        return self.turn

    # --- sampling ---

    @pending_call
    async def sample(self, greedy: bool = False, *, attempt: int = 0) -> Turn:
        """Sample one action from the policy and append it. `act` then runs the tool calls of the action.

        Args:
            greedy: take the most probable token at each position.
            attempt: index that selects the seed. Attempt 0 uses the same seed as a rollout. After `rewind`, pass
                1, 2, ... to sample other actions at the same turn.
        """
        with self._exclusive("sample"):
            await self._prepare()
            self._check_action_due()
            sampling = self.agent.sampling
            return await self._sample(sampling.replace(temperature=0.0) if greedy else sampling, attempt)

    def _check_action_due(self) -> None:
        if self.pending_calls:
            raise SettingsError("the last tool calls have not run yet; call chain.act() or chain.observe(text) first")
        if self.user_due:
            raise SettingsError("the user has not replied yet; await chain.ask_user() or call chain.observe(text)")
        if self.stop == "answered":
            raise SettingsError("the chain has answered; chain.finish() scores it, chain.observe(text) continues it")

    # --- acting ---

    @pending_call
    async def act(self) -> Turn:
        """Run the tool calls of the last action concurrently, and append their results as an observation."""
        with self._exclusive("act"):
            if not self.pending_calls:
                raise SettingsError("there is nothing to run: the last action called no tool; await chain.sample()")
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
            around=lambda call: self._reporting("tool", "tool", self.actions, call.name, call.id),
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

    @pending_call
    async def ask_user(self) -> Turn:
        """Ask the agent's `user` for a reply to the last action, append it as an observation, and return the last turn.

        If the user does not reply, the chain ends with "answered".
        """
        with self._exclusive("ask_user"):
            if self.agent.user is None:
                raise SettingsError("the agent has no user; use agent.replace(user=...)")
            if not self.user_due:
                raise SettingsError("the user can reply only to an action without a tool call")
            await self.hooks.gate()
            reply = await call_hook(self.agent.user, self)
            if reply is None:
                return self._end("answered")
            check_instance("the reply of user", reply, str, "a string or None")
            message: Message = {"role": "user", "content": reply}
            return self._append_observation(observation_turn(self.agent, self.turn, [message], "user"))

    @pending_call
    async def step(self, greedy: bool = False) -> Turn:
        """Sample an action, run its tool calls or get the user's reply, and return the last turn."""
        turn = await self.sample(greedy)
        if self.user_due:
            return await self.ask_user()
        return await self.act() if self.stop is None and self.pending_calls else turn


def complete_score(agent: AgentSettings, trajectory: Trajectory) -> Trajectory:
    """Apply the agent's `success` to a trajectory whose reward, including any group reward, is known."""
    return record_success(trajectory, agent.success)


async def call_hook(hook: Callable[..., Any] | None, *given: Any) -> Any:
    """Call a sync or async hook of the agent and return its result. Return None if `hook` is None."""
    return None if hook is None else await maybe_await(hook(*given))
