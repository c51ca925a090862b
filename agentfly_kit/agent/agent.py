"""`Agent`: the settings of an agent. `RolloutHandle`: many of its chains, run concurrently.

A rollout starts when its handle is awaited. Up to `max_concurrency` chains run concurrently and independently, and the
trajectories are returned in the order of the tasks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentfly_kit._async.concurrency import ConcurrencyLimits
from agentfly_kit._async.gc_pause import relaxed_gc
from agentfly_kit._async.interrupts import keep_interruptible
from agentfly_kit._async.pending_call import cancelling, wait_all, warn_or_log
from agentfly_kit._display import Displayable
from agentfly_kit.agent.budget import Budget, BudgetUsage
from agentfly_kit.agent.chain import Chain, ChainKey, Report
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import NotAwaited, RewardError, SettingsError, TaskError
from agentfly_kit.rewards import RewardSet
from agentfly_kit.tools.tool import ToolSet
from agentfly_kit.types import UNSCORED_STOPS, Failure, Group, Message, RolloutEvent, Sampling, Task, Trajectory


@dataclass(frozen=True, eq=False)
class Agent(Displayable):
    """Settings of an agent: its engine, chat format, tools, rewards, limits and hooks. Immutable.

    Hooks may be sync or async.

    Args:
        engine: Engine that samples the actions.
        chat: Converts between messages and token ids, for the model behind the engine.
        tools: Tools or plain functions; stored as a `ToolSet`.
        reward: A reward, a list of rewards (combined as their weighted sum), or None to leave chains unscored. Stored
            as a `RewardSet`.
        system: System message placed before the messages of each task, or None.
        max_turns: Maximum number of actions per chain.
        max_tokens: Maximum number of sampled tokens per chain, or None for no limit. `Sampling.max_tokens` limits one
            action.
        max_tool_calls: Maximum number of tool calls per chain, or None for no limit. Malformed and unknown calls are
            not counted. Calls over the limit are not run.
        max_invalid_calls: Number of consecutive actions with only malformed or unknown tool calls that ends a chain.
        timeout: Time limit per chain in seconds, including waiting, or None for no limit.
        sampling: Sampling settings of each action.
        pools: One pool or several, which lend the sandboxes that the tools and the reward request.
        max_concurrent_requests: Maximum number of concurrent engine requests over all chains of this agent, or None for
            no limit.
        max_concurrent_tools: Maximum number of concurrent tool calls, or None for no limit. A waiting call keeps its
            sandbox; its timeout starts when it runs.
        max_concurrent_rewards: Maximum number of concurrent reward calls, or None for no limit.
        seed: Seed from which the seeds of all chains are derived.
        name: Author recorded for sampled turns.
        before_chain: Called with the chain before its first action, also for a chain that is stepped interactively. The
            string or messages that it returns are appended to the prompt, for example the first view of an environment.
        before_turn: Called with the chain before each action of a rollout. It may write the action with
            `chain.force(text, author="hook")`, or start a new row with `chain.compact(summary)`.
        after_observation: Called with the chain after each tool result of a rollout that an action follows. Returns the
            number of forks to run from there.
        on_context_full: Called with the chain, in a rollout, if the context has no room for the next action or has
            truncated the last one. If it calls `chain.compact(...)`, the chain continues; otherwise it ends with
            "context_full".
        after_chain: Called with each finished chain of a rollout and its trajectory.
        group_reward: Called with each group after all chains of a rollout have ended, for rewards that compare chains.
            Returns one number per chain, in order, which is added to its reward; None leaves the chain unscored.
    """

    engine: Engine
    chat: Chat
    tools: Any = ()
    reward: Any = None
    system: str | None = None
    max_turns: int = 8
    max_tokens: int | None = None
    max_tool_calls: int | None = None
    max_invalid_calls: int = 3
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    pools: Sequence[Any] = ()
    max_concurrent_requests: int | None = None
    max_concurrent_tools: int | None = None
    max_concurrent_rewards: int | None = None
    seed: int = 0
    name: str = "policy"
    before_chain: Callable[[Chain], Any] | None = None
    before_turn: Callable[[Chain], Any] | None = None
    after_observation: Callable[[Chain], Any] | None = None
    on_context_full: Callable[[Chain], Any] | None = None
    after_chain: Callable[[Chain, Trajectory], Any] | None = None
    group_reward: Callable[[Group], Any] | None = None
    _last_handle: list[Any] = field(default_factory=list, repr=False, compare=False)
    _warned: list[str] = field(default_factory=list, repr=False, compare=False)
    _concurrency: ConcurrencyLimits = field(default_factory=ConcurrencyLimits, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Engine):
            raise SettingsError(f"engine={self.engine!r}: give an engine, such as af.LocalEngine(policy)")
        if not isinstance(self.chat, Chat):
            raise SettingsError(f"chat={self.chat!r}: give a Chat, such as policy.chat or af.Chat(tokenizer)")
        tools = self.tools if isinstance(self.tools, ToolSet) else ToolSet(self.tools)
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "reward", RewardSet(self.reward))
        pools = (self.pools,) if hasattr(self.pools, "acquire") else tuple(self.pools)
        object.__setattr__(self, "pools", pools)
        concurrent = ("max_concurrent_requests", "max_concurrent_tools", "max_concurrent_rewards")
        for name in ("max_turns", "max_invalid_calls", "max_tokens", "max_tool_calls", *concurrent):
            value = getattr(self, name)
            may_be_none = name not in ("max_turns", "max_invalid_calls")
            if not (isinstance(value, int) and value >= 1) and not (value is None and may_be_none):
                raise SettingsError(f"{name}={value!r}: give at least 1{', or None' if may_be_none else ''}")
        limits = tuple(getattr(self, name) for name in concurrent)
        if self._concurrency.counts != limits:
            object.__setattr__(self, "_concurrency", ConcurrencyLimits(*limits))
        if self.timeout is not None and not self.timeout > 0:
            raise SettingsError(f"timeout={self.timeout!r}: give seconds above 0, or None for no limit")
        if not isinstance(self.sampling, Sampling):
            raise SettingsError(f"sampling={self.sampling!r}: give an af.Sampling(temperature=1.0, max_tokens=64)")
        sandbox_types = (*tools.sandbox_types, *self.reward.sandbox_types)
        for sandbox_type in dict.fromkeys(sandbox_types):
            if not any(issubclass(pool.sandbox_type, sandbox_type) for pool in pools):
                raise SettingsError(
                    f"a tool or the reward asks for a {sandbox_type.__name__} and no pool has it; "
                    f"pools=[af.Pool({sandbox_type.__name__}, size=8)]"
                )

    def replace(self, **changes: Any) -> Agent:
        """Return a copy of the agent with some settings changed."""
        return dataclasses.replace(self, _last_handle=[], _warned=[], _concurrency=ConcurrencyLimits(), **changes)

    def __repr__(self) -> str:
        tools = ", ".join(self.tools.names) or "no tools"
        reward = f", reward {' + '.join(self.reward.names)}" if self.reward else ", no reward"
        return f"Agent({tools}{reward}, {self.max_turns} turns, {self.engine!r})"

    @property
    def last_run(self) -> RolloutHandle:
        """Handle of the last rollout started. After an interrupt, `last_run.partial` holds the finished chains."""
        if not self._last_handle:
            raise SettingsError("this agent has not rolled anything out yet; await agent.rollout(tasks)")
        run: RolloutHandle = self._last_handle[0]
        return run

    def opening(self, task: Task) -> tuple[Message, ...]:
        """Return the messages that start each chain of a task: the system message, if any, then the task's messages."""
        return task.messages if self.system is None else ({"role": "system", "content": self.system}, *task.messages)

    def chain(self, task: Task | Trajectory) -> Chain:
        """Create a chain to step interactively.

        The chain keeps the sandboxes that it uses until `chain.finish()` or `chain.close()`, or until the pool revokes
        them (`max_lease`, `pool.recycle`).

        Args:
            task: the task of the chain. A trajectory is continued from its end; see `Chain.from_trajectory`.
        """
        if isinstance(task, Trajectory):
            self._check_tasks([task.task])
            return Chain.from_trajectory(self, task)
        self._check_tasks([task])
        return Chain(self, task)

    def rollout(
        self,
        tasks: Iterable[Task] | Task,
        group_size: int = 1,
        *,
        max_concurrency: int = 64,
        budget: Budget | None = None,
        group_budget: Budget | None = None,
        index: int = 0,
        purpose: str = "rollout",
        progress: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> RolloutHandle:
        """Run `group_size` chains of each task concurrently. The rollout starts when the returned handle is awaited.

        Args:
            tasks: the tasks, or a single one.
            group_size: number of chains per task.
            max_concurrency: maximum number of chains that run concurrently.
            budget: shared limits of all chains, or None.
            group_budget: shared limits of the chains of each group, or None.
            index: part of every seed. The same `index` and `purpose` give the same trajectories if the engine is
                deterministic.
            purpose: part of every seed.
            progress: show a progress bar.
            share: (i, n) runs every n-th task, starting with the i-th, as one of n processes. Names and seeds do not
                depend on it.
        """
        return RolloutHandle(
            self, tasks, group_size, max_concurrency, index, purpose, progress, budget, group_budget, share
        )

    def _check_tasks(self, tasks: Sequence[Task]) -> None:
        """Check that the tools and rewards fit the tasks, and warn once about each one that was redefined."""
        self.tools.check(tasks)
        self.reward.check(tasks)
        for name in (*self.tools.redefined(), *self.reward.redefined()):
            if name not in self._warned:
                self._warned.append(name)
                warnings.warn(
                    f"this agent still has the {name!r} from before it was defined again; "
                    f"agent.replace(tools=[...], reward=...) takes the new one",
                    stacklevel=4,
                )


_rollouts = itertools.count(1)


class ChainState(NamedTuple):
    """State of one chain of a rollout.

    Attributes:
        trajectory: Id of the trajectory.
        task: Id of the task.
        state: queued, waiting, sampling, sandbox (waiting for one), tool, scoring; done, failed, cancelled.
        turn: Number of actions taken when this state began.
        since: Seconds from the start of the rollout to the beginning of this state.
        detail: Names of the running tools, or the stop reason.
        reward: Reward of the finished chain; None if it is unfinished or unscored.
    """

    trajectory: str
    task: str
    state: str
    turn: int
    since: float
    detail: str
    reward: float | None


@dataclass(frozen=True)
class RolloutSnapshot:
    """State of a rollout at one moment.

    Attributes:
        state: not started, running, paused, stopping; done, stopped, failed.
        seconds: Time since the start of the rollout, or its duration if it has ended.
        chains: State of each chain, in the order of the tasks.
    """

    state: str
    seconds: float
    chains: tuple[ChainState, ...] = field(repr=False)

    def count(self, *states: str) -> int:
        """Return the number of chains in any of these states."""
        return sum(1 for chain in self.chains if chain.state in states)


class _ChainProgress:
    """State of a chain, updated from its events. Concurrent tool calls count as one state until the last one ends."""

    __slots__ = ("calls", "detail", "since", "state", "task", "trajectory", "turn")

    def __init__(self, trajectory: str, task: str) -> None:
        self.trajectory, self.task = trajectory, task
        self.state, self.turn, self.since, self.detail, self.calls = "queued", 0, 0.0, "", 0

    def update(self, kind: str, phase: str, state: str, turn: int, detail: str, seconds: float) -> None:
        self.turn = turn
        if kind == "tool":
            self.calls += 1 if phase == "start" else -1
            if phase == "end" and self.calls > 0:
                return
        if kind == "tool" and phase == "start" and self.calls > 1:
            self.detail = f"{self.detail}, {detail}"
            return
        self.state, self.since = state, seconds
        self.detail = detail if (kind == "tool" and phase == "start") or kind == "chain" else ""


class RolloutHandle(Displayable):
    """Handle of a rollout. `await` it for the `Rollout`, or iterate with `async for` over trajectories as they finish.

    `pause()`, `resume()` and `stop()` control the rollout, `snapshot()` returns the current state of every chain, and
    `subscribe()` reports every change of a chain, in order.

    Attributes:
        partial: The chains that have finished so far, as a `Rollout`.
    """

    def __init__(
        self,
        agent: Agent,
        tasks: Iterable[Task] | Task,
        group_size: int,
        max_concurrency: int,
        index: int,
        purpose: str,
        progress: bool,
        budget: Budget | None = None,
        group_budget: Budget | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        given = [tasks] if isinstance(tasks, Task) else list(tasks)
        if not given:
            raise TaskError("there is no task to roll out; give at least one")
        for task in given:
            if not isinstance(task, Task):
                raise TaskError(f"{task!r} is no Task; make tasks of rows with af.tasks_from(rows)")
        if group_size < 1 or max_concurrency < 1:
            raise SettingsError(f"group_size={group_size}, max_concurrency={max_concurrency}: both are at least 1")
        for name, limit in (("budget", budget), ("group_budget", group_budget)):
            if limit is not None and not isinstance(limit, Budget):
                raise SettingsError(f"{name}={limit!r}: give an af.Budget(tokens=, turns=, tool_calls=, seconds=)")
            if limit is not None and limit.tokens is not None and agent.engine.tokens != "exact":
                raise SettingsError(f"{name}={limit}: this engine gives text only, whose tokens nobody here can count")
        agent._check_tasks(given)
        if agent.engine.tokens == "exact":
            # Render the first prompt, so that a template that rejects every task raises here. A template error of a
            # later task is recorded in that task's trajectories.
            agent.chat.prompt(agent.opening(given[0]), agent.tools.schemas)
        self.agent = agent
        self.group_size = group_size
        self.max_concurrency = max_concurrency
        self._progress = progress
        self._name = f"rollout {next(_rollouts)}"
        seen: dict[str, int] = {}
        self._planned: list[tuple[Task, ChainKey]] = []
        for number, task in enumerate(given):
            count = seen[task.id] = seen.get(task.id, 0) + 1
            if number % share[1] != share[0]:
                continue
            # A task that occurs twice makes two groups with different seeds.
            group = f"{purpose}-{index}:{task.id}" + (f"~{count}" if count > 1 else "")
            for chain in range(group_size):
                self._planned.append((task, ChainKey(purpose, index, group, chain)))
        # Number of chains, including the forks that hooks have requested so far.
        self.total = len(self._planned)
        self._tasks = len(given)
        self._run_usage = None if budget is None else BudgetUsage(budget, "run")
        self._group_usages = (
            {} if group_budget is None else {p.group: BudgetUsage(group_budget, "group") for _, p in self._planned}
        )
        self._not_run: dict[str, str] = {}
        self._done: dict[str, Trajectory] = {}
        self._queue: deque[tuple[Task, ChainKey] | Chain] = deque()
        self._listeners: list[Callable[[RolloutEvent], None]] = []
        self._sequence = 0
        self._events: deque[RolloutEvent] = deque()
        self._dispatching = False
        self._task: asyncio.Task[Rollout] | None = None
        self._unpaused: asyncio.Event | None = None
        self._paused = False
        self._stopping = False
        self._started_at = 0.0
        self._ended_at = 0.0
        self._readers: list[asyncio.Queue[Trajectory | None]] = []
        self._chain_progress: dict[str, _ChainProgress] = {
            key.id: _ChainProgress(key.id, task.id) for task, key in self._planned
        }

    # --- observing and control ---

    @property
    def partial(self) -> Rollout:
        """The finished chains so far, in the order of the tasks."""
        done = [self._done[key.id] for _, key in self._planned if key.id in self._done]
        not_run = {key.id: self._not_run[key.id] for _, key in self._planned if key.id in self._not_run}
        return Rollout.from_trajectories(done, self._seconds(), not_run)

    def snapshot(self) -> RolloutSnapshot:
        """Return the current state of every chain. Cheap enough to call several times per second."""
        waiting_owners = {
            owner for pool in self.agent.pools if hasattr(pool, "snapshot") for owner in pool.snapshot().waiters
        }
        done = self._done
        chains = []
        for id, progress in self._chain_progress.items():
            trajectory = done.get(id)
            state, detail = progress.state, progress.detail
            if id in self._not_run:  # a budget was exhausted before the chain started
                state, detail = "cancelled", self._not_run[id]
            elif id in waiting_owners and state in ("tool", "scoring"):
                state = "sandbox"
            reward = None if trajectory is None else trajectory.reward
            chains.append(ChainState(id, progress.task, state, progress.turn, progress.since, detail, reward))
        running = self._task
        if running is None:
            state = "not started"
        elif not running.done():
            state = "stopping" if self._stopping else "paused" if self._paused else "running"
        elif running.cancelled():
            state = "stopped"
        else:
            state = "done" if running.exception() is None else "failed"
        return RolloutSnapshot(state, self._seconds(), tuple(chains))

    def _seconds(self) -> float:
        return (self._ended_at or time.perf_counter()) - self._started_at if self._started_at else 0.0

    def subscribe(self, callback: Callable[[RolloutEvent], None]) -> Callable[[], None]:
        """Call `callback` on the event loop with every event, in order, and return a function that unsubscribes.

        A callback that raises is removed with a warning.
        """
        listeners = self._listeners  # a local variable, so that `unsubscribe` does not keep the handle alive
        listeners.append(callback)

        def unsubscribe() -> None:
            if callback in listeners:
                listeners.remove(callback)

        return unsubscribe

    def pause(self) -> None:
        """Pause every chain before its next action or tool call. Running ones finish."""
        self._paused = True
        if self._unpaused is not None:
            self._unpaused.clear()

    def resume(self) -> None:
        """Continue a paused rollout."""
        self._paused = False
        if self._unpaused is not None:
            self._unpaused.set()

    def stop(self) -> None:
        """Cancel the unfinished chains. Awaiting the handle then returns the finished ones."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()

    def __repr__(self) -> str:
        what = f"rollout of {self._tasks} tasks x {self.group_size}"
        if self._task is None:
            return f"<{what} has not run: write `await` before it>"
        state = "done" if self._task.done() else "paused" if self._paused else "running"
        missing = f", {len(self._not_run)} not run" if self._not_run else ""
        return f"<{what}, {len(self._done)} of {self.total} chains done{missing}, {state}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Rollout, name):
            raise NotAwaited(
                f"this rollout is a handle and has no .{name}; write (await run).{name}, or run.partial.{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- running ---

    def __await__(self) -> Generator[Any, Any, Rollout]:
        return self._wait().__await__()

    async def _wait(self) -> Rollout:
        task = self._start()
        try:
            with keep_interruptible():
                return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._stopping and task.done() and not cancelling():
                return self.partial
            # The awaiting task was cancelled, for example by an interrupt. Do not leave the rollout running.
            await self._cancel_and_wait(task)
            raise

    async def __aiter__(self) -> Any:
        finished: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        for known in self._done.values():
            finished.put_nowait(known)
        self._readers.append(finished)
        task = self._start()
        if task.done():
            finished.put_nowait(None)
        try:
            while (trajectory := await finished.get()) is not None:
                yield trajectory
            if not self._stopping:
                await task
        finally:
            self._readers.remove(finished)
            if not self._readers:  # the last reader has stopped iterating
                await self._cancel_and_wait(task)

    @staticmethod
    async def _cancel_and_wait(task: asyncio.Task[Any]) -> None:
        task.cancel()
        await wait_all([task])
        if not task.cancelled():
            task.exception()

    def _start(self) -> asyncio.Task[Rollout]:
        if self._task is None:
            self.agent._last_handle[:] = [self]
            self._unpaused = asyncio.Event()
            if not self._paused:
                self._unpaused.set()
            self._started_at = time.perf_counter()
            self._task = asyncio.get_running_loop().create_task(self._run(), name="agentfly-rollout")
            self._task.add_done_callback(lambda _: self._notify_readers(None))
            if self._stopping:
                self._task.cancel()
        return self._task

    def _notify_readers(self, trajectory: Trajectory | None) -> None:
        for reader in self._readers:
            reader.put_nowait(trajectory)

    async def _run(self) -> Rollout:
        with relaxed_gc(min(self.max_concurrency, self.total)):
            return await self._run_chains()

    async def _run_chains(self) -> Rollout:
        self._queue = deque(self._planned)
        if self._run_usage is not None:
            self._run_usage.start()
        bar = self._make_progress_bar()
        # More chains than the engine has slots would evict each other's KV cache, which is slower and changes the last
        # bits of the logprobs.
        count = min(self.max_concurrency, getattr(self.agent.engine, "slots", self.max_concurrency))
        workers: set[asyncio.Task[None]] = set()
        all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_worker_done(worker: asyncio.Task[None]) -> None:
            # One callback per worker, because asyncio.wait would scan all workers each time one finishes.
            if all_done.done():
                return
            if worker.cancelled():
                all_done.cancel()
            elif (error := worker.exception()) is not None:
                all_done.set_exception(error)
            else:
                workers.discard(worker)
                if not workers:
                    all_done.set_result(None)

        def start_worker() -> None:
            if len(workers) < count:
                worker = asyncio.create_task(self._run_worker(bar, spawn), name=f"agentfly-chain-{len(workers)}")
                workers.add(worker)
                worker.add_done_callback(on_worker_done)

        def spawn(fork: Chain) -> None:
            key = fork.key
            at = max(i for i, (_, p) in enumerate(self._planned) if (p.group, p.chain) == (key.group, key.chain))
            self._planned.insert(at + 1, (fork.task, key))  # after the last chain with its group and number
            self._chain_progress[key.id] = _ChainProgress(key.id, fork.task.id)
            # Restore the order of `_planned`.
            self._chain_progress = {p.id: self._chain_progress[p.id] for _, p in self._planned}
            self.total += 1
            self._queue.append(fork)
            start_worker()

        try:
            for _ in range(min(count, len(self._queue))):
                start_worker()
            if workers:
                await all_done
        except GeneratorExit:  # collected after its event loop was closed, so nothing can be cancelled or awaited
            workers.clear()
            self._queue.clear()
            raise
        finally:
            if not all_done.get_loop().is_closed():
                all_done.cancel()
            for worker in workers:
                worker.cancel()
            # Wait for the workers, because one cancelled while releasing a sandbox completes the release first.
            # Close the forks that never ran, because they hold forked sandboxes.
            closing = [asyncio.ensure_future(item.close()) for item in self._queue if isinstance(item, Chain)]
            try:
                await wait_all([*workers, *closing])
            finally:
                for task in (*workers, *closing):
                    if not task.cancelled():
                        task.exception()  # mark as retrieved; the first error is raised to the awaiting task
                self._ended_at = time.perf_counter()
                if bar is not None:
                    bar.close()
        if self.agent.group_reward is not None:
            async with asyncio.TaskGroup() as comparing:
                for group in self.partial.groups:
                    comparing.create_task(self._add_group_reward(group))
        return self.partial

    async def _add_group_reward(self, group: Group) -> None:
        """Add the result of `group_reward` to the rewards of a group. If it raises, the group is unscored."""
        given: list[Any] = [None] * len(group)
        failure: Failure | None = None
        try:
            assert self.agent.group_reward is not None
            said = self.agent.group_reward(group)
            given = list(await said if inspect.isawaitable(said) else said)
            if len(given) != len(group):
                raise RewardError(
                    f"group_reward gave {len(given)} numbers for {len(group)} chains; give one each, or None"
                )
            given = [None if number is None else float(number) for number in given]
            if not all(number is None or math.isfinite(number) for number in given):
                raise RewardError(f"group_reward gave {given}; want finite numbers, or None for unscored")
        except Exception as error:
            given = [None] * len(group)
            failure = Failure.from_exception("group_reward", error)
        for t, number in zip(group, given, strict=True):
            if t.stop in UNSCORED_STOPS:
                continue
            own = t.reward if self.agent.reward else 0.0
            total = None if own is None or number is None else own + number
            metrics = t.metrics if number is None else {**t.metrics, "group_reward": number}
            why = failure or (Failure("group_reward", "RewardError", "it gave None") if number is None else None)
            self._done[t.id] = t.replace(reward=total, metrics=metrics, error=t.error or why)

    async def _run_worker(self, bar: Any, spawn: Callable[[Chain], None]) -> None:
        while self._queue:
            item = self._queue.popleft()
            key = item.key if isinstance(item, Chain) else item[1]
            usages = [m for m in (self._group_usages.get(key.group), self._run_usage) if m is not None]
            for usage in usages:
                usage.start()
            why = next((stop for usage in usages if (stop := usage.exhausted)), None)
            if why is None:
                trajectory, ran = await self._run_chain(item, spawn, usages)
                if ran:
                    self._done[key.id] = trajectory
                    self._notify_readers(trajectory)
                else:
                    why = trajectory.stop
            elif isinstance(item, Chain):
                await item.close()  # the fork holds forked sandboxes
            if why is not None:
                self._not_run[key.id] = why
            if bar is not None:
                bar.update()

    async def _run_chain(
        self, item: tuple[Task, ChainKey] | Chain, spawn: Callable[[Chain], None], usages: Sequence[BudgetUsage]
    ) -> tuple[Trajectory, bool]:
        if isinstance(item, Chain):
            chain = item
        else:
            task, key = item
            try:
                chain = Chain(self.agent, task, key)
            except Exception as error:  # for example, the chat template rejects the task's messages
                failure = Failure.from_exception("chat", error)
                report = self._reporter(key.id, task.id)
                report("chain", "start", "waiting", 0, "", "")
                report("chain", "end", "failed", 0, "error", "")
                return Trajectory(key.id, task, key.group, key.chain, (), "error", error=failure), True
        chain.context.run = self._name
        chain.watch(self._reporter(chain.id, chain.task.id), gate=self._wait_if_paused, spawn=spawn, usages=usages)
        trajectory = await chain.run()
        return trajectory, not chain.never_started

    async def _wait_if_paused(self) -> None:
        if self._unpaused is not None and not self._unpaused.is_set():
            await self._unpaused.wait()

    def _reporter(self, trajectory: str, task: str) -> Report:
        progress = self._chain_progress[trajectory]

        def report(kind: Any, phase: Any, state: Any, turn: int, detail: str, call: str) -> None:
            seconds = time.perf_counter() - self._started_at
            progress.update(kind, phase, state, turn, detail, seconds)
            if not self._listeners:
                return
            self._sequence += 1
            self._events.append(
                RolloutEvent(self._sequence, kind, phase, trajectory, task, turn, state, seconds, detail, call)
            )
            self._dispatch_events()

        return report

    def _dispatch_events(self) -> None:
        """Deliver events to all listeners one at a time, including events that a listener causes itself."""
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._events:
                event = self._events.popleft()
                for listener in list(self._listeners):
                    try:
                        listener(event)
                    except (Exception, asyncio.CancelledError) as error:
                        self._remove_listener(listener, error)
        finally:
            self._dispatching = False

    def _remove_listener(self, listener: Callable[[RolloutEvent], None], error: BaseException) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
        warn_or_log(f"a listener of a rollout raised {type(error).__name__}: {error}; it hears no more")

    def _make_progress_bar(self) -> Any:
        if not self._progress:
            return None
        from tqdm.auto import tqdm

        return tqdm(total=self.total, desc="chains", unit="chain")
