"""`RolloutHandle`, which runs many chains concurrently and can pause or stop them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from agentfly_kit._async import threads
from agentfly_kit._async.gc_pause import relaxed_gc
from agentfly_kit._async.interrupts import keep_interruptible
from agentfly_kit._async.pending_call import Handle, cancelling, wait_all, warn_or_log
from agentfly_kit._display import Displayable, explain_interrupt, show_progress
from agentfly_kit.agent.budget import BudgetUsage
from agentfly_kit.agent.chain import call_hook, complete_score
from agentfly_kit.agent.chain_editing import Chain, create_chain
from agentfly_kit.agent.progress import ChainHooks, ChainKey, Progress, RolloutEvent, RolloutSnapshot
from agentfly_kit.agent.request import GroupResult, GroupWorkers, RolloutRequest
from agentfly_kit.agent.rollout import Rollout, count_tasks
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import encode_long, prompt_turn, warn_about_long_prompt
from agentfly_kit.errors import NotAwaited, PoolTimeout, RewardError
from agentfly_kit.trajectories import UNSCORED_STOPS, Group, Trajectory
from agentfly_kit.types import Failure, Task, Turn

if TYPE_CHECKING:
    from agentfly_kit.agent.branching import BranchGroup

_rollouts = itertools.count(1)
_FORK_RETRY_SECONDS = 0.05  # interval between attempts to fork a chain while no sandbox is free


class RolloutHandle(Handle[Rollout], Displayable):
    """Handle for a rollout: await it to get the `Rollout`, or use `async for` to get trajectories as they finish.

    The rollout starts when its handle is awaited or iterated. Up to `max_concurrency` chains run concurrently. The
    `Rollout` keeps the order of the tasks. See `Agent.rollout` for the arguments.

    Attributes:
        partial: The chains that have finished so far, as a `Rollout`.
        total: Number of chains, including the forks so far. With `branch`, the number of chains in all complete groups.
    """

    def __init__(
        self,
        agent: AgentSettings,
        request: RolloutRequest,
        workers: GroupWorkers | None = None,
        progress: bool = False,
    ) -> None:
        request.check(agent, workers)
        self.agent = agent
        self._request = request
        self._remote = workers  # None if this process runs the groups
        self._shows_bar = progress
        self._bar: Any = None
        self._name = f"rollout {next(_rollouts)}"
        self._planned = request.plan()
        self._progress = Progress()
        for task, key in self._planned:
            self._progress.add(key, task)
        self._run_usage = None if request.budget is None else BudgetUsage(request.budget, "run")
        limit = request.group_budget
        self._group_usages = {} if limit is None else {k.group: BudgetUsage(limit, "group") for _, k in self._planned}
        # Task and key of each chain that has not started, with the chain itself if it is a fork.
        self._queue: deque[tuple[Task, ChainKey, Chain | None]] = deque()
        # With `branch`: `_unbegun` has the task and first key of each group that has not begun; `_branching` maps the
        # ids of all other groups to the groups.
        self._unbegun = deque([(t, key) for t, key in self._planned if key.chain == 0] if request.branch else [])
        # With `branch`: number of further groups that may begin now.
        self._num_free = request.groups_at_once(agent) if request.branch else 0
        self._branching: dict[str, BranchGroup] = {}
        self._forks_refused = 0
        # `_running` contains the chains in progress, and `_forking` those that are waiting for sandboxes to fork.
        self._running: set[Any] = set()
        self._forking: set[Any] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._running_workers = 0
        self._done: dict[str, Trajectory] = {}
        self._not_run: dict[str, str] = {}
        self._readers: list[asyncio.Queue[Trajectory | None]] = []
        self._task: asyncio.Task[Rollout] | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._stopping = False

    # --- observing and control ---

    @property
    def total(self) -> int:
        if self._request.branch is None:
            return len(self._planned)
        return len(self._request.numbers) * self._request.group_size

    @property
    def partial(self) -> Rollout:
        """The finished chains so far, in the order of the tasks."""
        done = [self._done[key.id] for _, key in self._planned if key.id in self._done]
        not_run = {key.id: self._not_run[key.id] for _, key in self._planned if key.id in self._not_run}
        rollout = Rollout.from_trajectories(done, self._progress.seconds, not_run, self._forks_refused)
        return dataclasses.replace(rollout, splits=self._request.splits)

    def find(self, id: str) -> Trajectory | None:
        """Return a finished chain, or the turns so far of a running one, with the stop "running"; otherwise None."""
        running = next((chain for chain in self._running if chain.id == id), None)
        return self._done.get(id) if running is None else running.snapshot().replace(stop=running.stop or "running")

    def snapshot(self) -> RolloutSnapshot:
        """Return the current state of every chain. A snapshot is cheap enough to be taken several times per second."""
        waiting = {
            owner for pool in self.agent.pools if hasattr(pool, "snapshot") for owner in pool.snapshot().waiters
        }
        chains = [self._progress.chain_state(key, self._done, self._not_run, waiting) for _, key in self._planned]
        return RolloutSnapshot(self._state(), self._progress.seconds, tuple(chains))

    def _state(self) -> str:
        if self._task is None:
            return "not started"
        if not self._task.done():
            return "stopping" if self._stopping else "running" if self._unpaused.is_set() else "paused"
        if self._task.cancelled():
            return "stopped" if self._stopping else "interrupted"
        return "done" if self._task.exception() is None else "failed"

    def subscribe(self, callback: Callable[[RolloutEvent], object]) -> Callable[[], None]:
        """Call `callback` with every event, in order, on the event loop. Return a function that unsubscribes."""
        return self._progress.listeners.subscribe(callback)

    def pause(self) -> None:
        """Pause every chain before its next action or tool call. Actions and calls in progress are completed."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Continue a paused rollout."""
        self._unpaused.set()

    def stop(self) -> None:
        """Cancel the unfinished chains. Awaiting the handle then returns the finished chains."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()

    def __repr__(self) -> str:
        what = f"rollout of {count_tasks(self._request.tasks, self._request.splits)} x {self._request.group_size}"
        if self._task is None:
            return f"<{what} has not run: write `await` before it>"
        missing = f", {len(self._not_run)} not run" if self._not_run else ""
        return f"<{what}, {len(self._done)} of {self.total} chains done{missing}, {self._state()}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Rollout, name):
            raise NotAwaited(
                f"this rollout is a handle and has no .{name}; write (await run).{name}, or run.partial.{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- awaiting ---

    async def _wait(self) -> Rollout:
        task = self._start()
        try:
            with keep_interruptible():
                return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if self._stopping and task.done() and not cancelling():
                return self.partial
            # The awaiting task was cancelled, for example by an interrupt, so stop the rollout.
            task.cancel()
            await wait_all([task])
            self._explain(error)
            raise

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
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
        except asyncio.CancelledError as error:
            self._explain(error)
            raise
        except GeneratorExit:  # the caller's loop ended early, for example by `break`
            self._stopping = self._stopping or self._readers == [finished]
            raise
        finally:
            self._readers.remove(finished)
            if not self._readers:  # the last reader has stopped iterating
                task.cancel()
                await wait_all([task])

    def _explain(self, error: asyncio.CancelledError) -> None:
        explain_interrupt(
            error,
            f"the rollout was interrupted: {len(self._done)} of {self.total} chains have finished and are kept in "
            "agent.last_run.partial. To run all chains, call agent.rollout again with the same arguments; the finished "
            "ones will be the same",
        )

    def _start(self) -> asyncio.Task[Rollout]:
        if self._task is None:
            self.agent._last_handle[:] = [self]
            self._progress.start()
            if self.agent.watch is not None:
                try:
                    self.agent.watch(self)
                except Exception as error:
                    warn_or_log(f"Agent(watch=) raised {type(error).__name__}: {error}")
            self._task = asyncio.get_running_loop().create_task(self._run(), name="agentfly-rollout")
            self._task.add_done_callback(lambda _: self._notify_readers(None))
            if self._stopping:
                self._task.cancel()
        return self._task

    def _notify_readers(self, trajectory: Trajectory | None) -> None:
        for reader in self._readers:
            reader.put_nowait(trajectory)

    # --- running ---

    async def _run(self) -> Rollout:
        # If a tool starts this rollout, it must not run in the threads of that tool's sandboxes.
        watched = self._shows_bar or self.agent.watch is not None or bool(self._progress.listeners)
        line = show_progress(lambda: f"{len(self._done)} of {self.total} chains finished")
        with relaxed_gc(), threads.using(), contextlib.nullcontext() if watched else line:
            if self.agent.exact and self.agent.harness is None and self._remote is None:
                await warn_about_long_prompt(self.agent, self._request.tasks)
            await self._run_chains()
        if self.agent.group_reward is not None and self._remote is None:  # remote workers have added the group reward
            async with asyncio.TaskGroup() as comparing:
                for group in self.partial.groups:
                    comparing.create_task(self._add_group_reward(group))
        return self.partial

    async def _run_chains(self) -> None:
        if self._remote is not None:
            self._unbegun.clear()
        elif self._request.branch is None:
            self._queue.extend((task, key, None) for task, key in self._planned)
        if self._run_usage is not None:
            self._run_usage.start()
        if self._shows_bar:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self.total, desc="chains", unit="chain")
        try:
            if self._remote is not None:
                results = self._remote.run_groups(self.agent, self._request, self._unpaused.wait)
                async with contextlib.aclosing(results):
                    async for number, result in results:
                        self._add_group(self._request.tasks[number], result)
            self._begin_groups()
            for _ in range(len(self._queue)):
                self._add_worker()
            # Await the asyncio tasks one by one, because asyncio.wait would scan all of them whenever one finishes. The
            # list grows during the loop if chains fork.
            for worker in self._workers:
                await worker
        except GeneratorExit:  # garbage-collected after the event loop was closed, so nothing can be awaited
            self._workers.clear()
            self._queue.clear()
            raise
        finally:
            # Wait for the cancelled asyncio tasks, which may first have to complete the release of a sandbox. Close the
            # forks that have not run, because they hold forked sandboxes.
            closing = [asyncio.ensure_future(fork.close()) for _, _, fork in self._queue if fork is not None]
            self._unbegun.clear()
            for worker in self._workers:
                worker.cancel()
            try:
                await wait_all([*self._workers, *closing])
            finally:
                self._progress.end()
                if self._bar is not None:
                    self._bar.close()

    def _add_worker(self) -> None:
        """Start another asyncio task if chains are queued and the limits on concurrency allow it."""
        # With more running chains than slots in the engine, chains would evict each other's KV cache, which is slower
        # and changes the last bits of the logprobs.
        slots = getattr(self.agent.engine, "slots", self._request.max_concurrency)
        if self._queue and self._running_workers < min(self._request.max_concurrency, slots):
            self._running_workers += 1
            self._workers.append(asyncio.create_task(self._work(), name=f"agentfly-chain-{len(self._workers)}"))

    async def _work(self) -> None:
        try:
            while self._queue:
                task, key, fork = self._queue.popleft()
                try:
                    await self._run_chain(task, key, fork)
                except Exception:
                    self._chain_ended(key)  # otherwise, the group would wait for this chain
                    raise
                self._chain_ended(key)
        finally:
            self._running_workers -= 1

    async def _run_chain(self, task: Task, key: ChainKey, fork: Chain | None) -> None:
        """Run a chain, or record the stop reason if a budget prevents it from starting."""
        usages = tuple(u for u in (self._group_usages.get(key.group), self._run_usage) if u is not None)
        for usage in usages:
            usage.start()
        stop = next((stop for usage in usages if (stop := usage.exhausted())), None)
        if stop is None:
            group = self._branching.get(key.group)
            branch = None if group is None else group.branch
            hooks = ChainHooks(self._progress.report, self._unpaused.wait, self._spawn, branch, usages, self._name)
            try:
                if fork is None and self.agent.harness is None:
                    opening = self.agent.opening(task)
                    await encode_long(opening, lambda: prompt_turn(self.agent, opening, "task"))
                chain = fork or create_chain(self.agent, task, key, hooks)
            except Exception as error:  # for example, the chat template rejects the task's messages
                self._finished(self._failed_trajectory(task, key, error))
            else:
                self._running.add(chain)
                try:
                    trajectory = await chain.run()
                finally:
                    self._running.discard(chain)
                if chain.never_started:
                    stop = trajectory.stop
                else:
                    self._finished(trajectory)
        elif fork is not None:
            await fork.close()  # releases the forked sandboxes
        if stop is not None:
            self._not_run[key.id] = stop
        if self._bar is not None:
            self._bar.update()

    async def _spawn(self, chain: Chain, count: int) -> None:
        """Fork a chain `count` times. If a pool has no sandbox for a fork, wait until another chain releases one."""
        self._forking.add(chain)
        try:
            for _ in range(count):
                number = chain.num_forks + 1
                while True:
                    try:
                        await self._fork(chain, number=number)
                    except PoolTimeout as error:
                        if self._can_release(chain):
                            await asyncio.sleep(_FORK_RETRY_SECONDS)
                            continue
                        self._refuse_fork(chain, error)
                    break
        finally:
            self._forking.discard(chain)

    def _can_release(self, chain: Chain) -> bool:
        """Return True if a sandbox of a class that `chain` uses can become free while `chain` waits."""
        snapshots = {pool.sandbox_type: pool.snapshot() for pool in chain.context.pools}
        used = [snapshots[sandbox_type] for sandbox_type in chain.context.held]
        waiting = {owner for snapshot in snapshots.values() for owner in snapshot.waiters}
        others = {other.id for other in self._running - self._forking} - waiting
        # A sandbox that is not leased is being started or reset for another chain, which will release it later.
        return any(pool.leased < pool.size or others & {box.owner for box in pool.leases} for pool in used)

    async def _fork(self, chain: Chain, at: Turn | None = None, number: int | None = None) -> None:
        """Fork a chain and queue the fork. Raise PoolTimeout if all sandboxes of a pool are leased."""
        fork = await chain.fork(at=at, number=number, queue=False)
        self._add_chain(fork.task, fork.key, fork)

    async def _fork_in_group(self, chain: Chain, at: Turn) -> bool:
        """Fork a chain of a `BranchGroup`. Return False on failure, for example if all sandboxes are leased."""
        try:
            await self._fork(chain, at)
        except Exception as error:
            self._refuse_fork(chain, error)
            return False
        return True

    def _refuse_fork(self, chain: Chain, error: Exception) -> None:
        """Count a fork that could not be made, and warn about the first one."""
        self._forks_refused += 1
        if self._forks_refused == 1:
            warn_or_log(f"the chain {chain.id!r} was not forked: {error}")

    def _add_chain(self, task: Task, key: ChainKey, fork: Chain | None = None) -> None:
        """Queue a fork or an additional chain, and insert it at its position in the group."""
        before = [i for i, (_, k) in enumerate(self._planned) if k.group == key.group and k.position < key.position]
        self._planned.insert(before[-1] + 1, (task, key))
        self._progress.add(key, task)
        self._queue.append((task, key, fork))
        self._add_worker()

    # --- branching ---

    def _begin_groups(self) -> None:
        """Begin as many groups as possible such that all their chains run concurrently, as `BranchGroup` requires."""
        while self._unbegun and self._num_free:
            from agentfly_kit.agent.branching import BranchGroup

            assert self._request.branch is not None
            self._num_free -= 1
            task, first = self._unbegun.popleft()
            group = BranchGroup(
                self._request.branch,
                self._request.group_size,
                functools.partial(self._begin_chain, task, first),
                self._fork_in_group,
                self._end_group,
            )
            self._branching[first.group] = group
            group.begin(self._request.branch.num_initial(self._request.group_size))

    def _begin_chain(self, task: Task, first: ChainKey, index: int) -> None:
        assert self._request.branch is not None
        key = dataclasses.replace(first, chain=index)
        if index < self._request.branch.num_initial(self._request.group_size):  # initial chains are already listed
            self._queue.append((task, key, None))
            self._add_worker()
        else:
            self._add_chain(task, key)

    def _chain_ended(self, key: ChainKey) -> None:
        if key.group in self._branching:
            self._branching[key.group].ended()

    def _end_group(self) -> None:
        self._num_free += 1
        self._begin_groups()

    def _failed_trajectory(self, task: Task, key: ChainKey, error: Exception) -> Trajectory:
        """Report a chain that could not be created, and return a trajectory without turns."""
        self._progress.report(key.id, "chain", "start", "waiting", 0)
        failure = Failure.from_exception("chat", error)
        trajectory = Trajectory(key.id, task, key.group, key.chain, (), "error", error=failure)
        self._progress.report(key.id, "chain", "end", "failed", 0, "error", result=trajectory)
        return trajectory

    def _finished(self, trajectory: Trajectory) -> None:
        self._done[trajectory.id] = trajectory
        self._notify_readers(trajectory)

    def _add_group(self, task: Task, result: GroupResult) -> None:
        """Add the chains and events of a group that was run by a worker."""
        group = result.keys[0].group
        places = [i for i, (_, key) in enumerate(self._planned) if key.group == group]
        self._planned[places[0] : places[-1] + 1] = [(task, key) for key in result.keys]
        for key in result.keys:
            self._progress.add(key, task)
        began = self._progress.seconds - result.rollout.seconds
        for e in result.events:
            self._progress.report(
                e.trajectory, e.kind, e.phase, e.state, e.turn, e.detail, e.call, e.result, began + e.time
            )
        self._not_run |= result.rollout.not_run
        self._forks_refused += result.rollout.forks_refused
        for trajectory in result.rollout:
            self._finished(trajectory.replace(task=task))
        if self._bar is not None:
            self._bar.update(len(result.keys))

    async def _add_group_reward(self, group: Group) -> None:
        """Add the result of `group_reward` to the rewards of a group. If the hook raises, the group is unscored."""
        numbers: list[float | None] = [None] * len(group)
        failure = Failure("group_reward", "RewardError", "it returned None")
        try:
            numbers = _checked_numbers(await call_hook(self.agent.group_reward, group), len(group))
        except Exception as error:
            failure = Failure.from_exception("group_reward", error)
        for t, number in zip(group, numbers, strict=True):
            if t.stop in UNSCORED_STOPS:
                continue
            own = t.reward if self.agent.reward else 0.0
            if number is None:
                self._done[t.id] = t.replace(reward=None, error=t.error or failure)
            else:
                total = None if own is None else own + number
                t = t.replace(reward=total, metrics={**t.metrics, "group_reward": number})
                self._done[t.id] = complete_score(self.agent, t)


def _checked_numbers(values: Any, count: int) -> list[float | None]:
    numbers = [None if value is None else float(value) for value in values]
    if len(numbers) != count or not all(number is None or math.isfinite(number) for number in numbers):
        raise RewardError(
            f"group_reward must return a finite number, or None for unscored, for each of {count} chains, got {numbers}"
        )
    return numbers
