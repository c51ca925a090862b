"""The `Context` that tools and rewards use to access the task, turn, state and sandboxes of their chain.

A context leases sandboxes from the agent's pools and releases them when the chain ends. For single calls,
`temporary_context` creates a context with temporary pools.
"""

from __future__ import annotations

import asyncio
import copy
import typing
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly_kit._async import threads
from agentfly_kit._async.pending_call import wait_all
from agentfly_kit._display import Displayable
from agentfly_kit.errors import LeaseRevoked, SandboxError, SettingsError
from agentfly_kit.pool import environment as environments
from agentfly_kit.pool.calls import call
from agentfly_kit.tools.calling import call_user_function
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.pool.pool import Pool

S = TypeVar("S")


class Fields(Mapping[str, Any]):
    """Task fields of one chain, copied so that changes do not affect other chains of the same task.

    Each field is copied on first access. Values that cannot be copied are shared.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._own:
            value = self._fields[name]
            try:
                self._own[name] = copy.deepcopy(value)
            except Exception:
                self._own[name] = value
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Fields({', '.join(self) or 'none'})"


class Context(Displayable):
    """Task, state and sandboxes of one chain. All sandboxes of a context must be leased in the same event loop.

    Args:
        task: task of the chain.
        trajectory_id: id of the chain's trajectory; the task's id by default.
        turn: current turn, updated by the chain.
        seed: seed of the current turn, updated by the chain.
        pools: pools from which sandboxes are leased.
        run: name of the rollout. Pools use it to alternate between the requests of several rollouts.
    """

    def __init__(
        self,
        task: Task,
        *,
        trajectory_id: str = "",
        turn: int = 0,
        seed: int = 0,
        pools: Sequence[Pool[Any]] = (),
        run: str = "",
    ) -> None:
        self.task = task
        self.fields = Fields(task.fields)
        self.trajectory_id = trajectory_id or task.id
        self.turn = turn
        self.seed = seed
        # Data that tools keep between the turns of this chain.
        self.state: dict[str, Any] = {}
        # Values returned by the `reset` methods of environments, keyed by environment class.
        self.reset_results: dict[type, Any] = {}
        self.pools = tuple(pools)
        self.run = run
        self._leases: dict[Pool[Any], asyncio.Task[Any]] = {}
        self._locks: dict[Pool[Any], asyncio.Lock] = {}
        # Additional arguments for `Pool.acquire`, set by `fork` while it leases sandboxes.
        self._acquire_options: dict[str, Any] = {}
        self._closed = False
        self._close_lock = asyncio.Lock()

    async def sandbox(self, sandbox_type: type[S]) -> S:
        """Return the chain's sandbox of the given class, leased on first use and kept until the context is closed.

        Raises:
            SettingsError: if not exactly one pool matches the class; see `pool`.
            SandboxError: if the context is closed, no sandbox can be started, or an environment cannot be reset.
            PoolTimeout, PoolClosed, LeaseRevoked: if the pool cannot lease a sandbox, or has revoked the lease.
        """
        return typing.cast(S, (await self._lease(self.pool(sandbox_type))).sandbox)

    async def _lease(self, pool: Pool[Any]) -> Any:
        sandbox_type = pool.sandbox_type
        if self._closed:
            raise SandboxError(
                f"the chain {self.trajectory_id!r} has ended, and its {sandbox_type.__name__} was released"
            )
        if pool not in self._leases:
            self._leases[pool] = asyncio.ensure_future(self._acquire(pool))
        acquiring = self._leases[pool]
        if not acquiring.done():
            # With `await acquiring`, cancelling one tool call would cancel the lease that is shared by all calls.
            await asyncio.wait([acquiring])
        if acquiring.cancelled():
            raise SandboxError(
                f"the chain {self.trajectory_id!r} ended while it waited for a {sandbox_type.__name__}"
            )
        if acquiring.exception() is not None and self._leases.get(pool) is acquiring:
            del self._leases[pool]  # so that the next request tries again
        lease = acquiring.result()
        self.check()
        if lease.turn != self.turn:
            lease.turn = self.turn  # shown in the pool's snapshot
        return lease

    async def _acquire(self, pool: Pool[Any]) -> Any:
        lease = await pool.acquire(self.trajectory_id, run=self.run, **self._acquire_options)
        if environments.is_environment(pool.sandbox_type):
            try:
                with threads.using(lease.worker):
                    await self._reset_environment(pool, lease.sandbox)
            except BaseException:
                await pool.release(lease, reusable=False)  # the state after a failed reset is unknown
                raise
        return lease

    async def _reset_environment(self, pool: Pool[Any], environment: Any) -> None:
        sandbox_type = pool.sandbox_type
        given = environments.reset_arguments(sandbox_type, self.task, self.fields)
        outcome = await call_user_function(environment.reset, given, timeout=pool.start_timeout)
        if (error := outcome.error) is not None:
            what = f"{type(error).__name__}: {error}"
            raise SandboxError(f"{sandbox_type.__name__}.reset failed for task {self.task.id!r} ({what})") from error
        self.reset_results[sandbox_type] = outcome.value

    @asynccontextmanager
    async def using(self, sandbox_type: type[S]) -> AsyncIterator[S]:
        """Yield the chain's sandbox of the given class, for exclusive use by one tool call (an async context manager).

        Calls of one turn that use the same sandbox run sequentially, in the order in which the model wrote them.
        """
        pool = self.pool(sandbox_type)
        async with self._locks.setdefault(pool, asyncio.Lock()):
            lease = await self._lease(pool)
            with threads.using(*threads.current(), lease.worker):
                yield lease.sandbox
            self.check()  # discard the result if the sandbox was revoked during the call

    def check(self) -> None:
        """Raise `LeaseRevoked`, with the reason, if a pool has revoked a lease of this chain."""
        for pool, lease in self._leases.items():
            if _is_held(lease) and (reason := lease.result().revoked):
                raise LeaseRevoked(
                    f"the pool revoked the {pool.sandbox_type.__name__} of the chain {self.trajectory_id!r}: {reason}"
                )

    def pool(self, sandbox_type: type) -> Pool[Any]:
        """Return the only pool for the given sandbox class or, if there is none, the only pool for a subclass."""
        exact = [pool for pool in self.pools if pool.sandbox_type is sandbox_type]
        found = exact or [pool for pool in self.pools if issubclass(pool.sandbox_type, sandbox_type)]
        if len(found) == 1:
            return found[0]
        have = ", ".join(pool.sandbox_type.__name__ for pool in self.pools) or "none"
        raise SettingsError(
            f"exactly one pool must provide a {sandbox_type.__name__}, got {len(found)} (pools: {have}); "
            f"pass Agent(pools=[af.Pool({sandbox_type.__name__})])"
        )

    @property
    def held(self) -> dict[type, Any]:
        """Sandboxes that the chain currently leases, keyed by class."""
        return {pool.sandbox_type: lease.result().sandbox for pool, lease in self._leases.items() if _is_held(lease)}

    async def fork(self, trajectory_id: str, *, queue: bool = True) -> Context:
        """Return a context for a new chain, with copies of `state` and `fields` and forks of the held sandboxes.

        Raises:
            SandboxError: if a held sandbox has no method `fork`, or `state` cannot be copied. Nothing is leased in this
                case.
            PoolTimeout: if no sandbox becomes free in time. With queue=False, also if the fork would have to wait for
                another chain to release one.
        """
        # Check all sandboxes and copy the state first, so that nothing needs to be released if the chain cannot fork.
        for sandbox_type, sandbox in self.held.items():
            if not callable(getattr(sandbox, "fork", None)):
                raise SandboxError(
                    f"the chain {self.trajectory_id!r} holds a {sandbox_type.__name__}, which cannot fork (it has no "
                    "fork()); fork the chain before a tool uses this sandbox, or replay the calls in a new chain"
                )
        twin = Context(
            self.task,
            trajectory_id=trajectory_id,
            turn=self.turn,
            seed=self.seed,
            pools=self.pools,
            run=self.run,
        )
        try:
            twin.state = copy.deepcopy(self.state)
        except Exception as error:
            raise SandboxError(
                f"the chain {self.trajectory_id!r} cannot fork: the data that its tools keep in context.state "
                f"({', '.join(self.state)}) cannot be copied ({type(error).__name__}: {error})"
            ) from error
        twin.fields._own = copy.deepcopy(self.fields._own)
        twin.reset_results = dict(self.reset_results)
        # The leases acquired here must not wait in the queue; later leases may.
        if not queue:
            twin._acquire_options = {"queue": False}
        try:
            for pool, lease in list(self._leases.items()):
                if _is_held(lease):
                    other = await twin.sandbox(pool.sandbox_type)
                    await call(lease.result().worker, lease.result().sandbox.fork, other)
        except BaseException:
            await twin.close()
            raise
        twin._acquire_options = {}
        return twin

    async def close(self) -> None:
        """Release all leases, even if this call is cancelled. Concurrent calls of `close` wait for each other."""
        self._closed = True
        failed: list[BaseException] = []
        async with self._close_lock:
            while self._leases:
                pool, acquiring = self._leases.popitem()
                acquiring.cancel()  # no effect if the lease was already acquired
                try:
                    try:
                        await wait_all([acquiring])
                    finally:
                        if _is_held(acquiring):
                            await pool.release(acquiring.result())
                except (Exception, asyncio.CancelledError) as error:  # release the other leases first
                    failed.append(error)
        if failed:
            raise next((error for error in failed if isinstance(error, asyncio.CancelledError)), failed[0])

    async def __aenter__(self) -> Context:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        held = ", ".join(sandbox_type.__name__ for sandbox_type in self.held)
        closed = ", closed" if self._closed else ""
        return f"<Context of {self.trajectory_id!r}, turn {self.turn}, holds {held or 'no sandbox'}{closed}>"


def _is_held(lease: asyncio.Task[Any]) -> bool:
    return lease.done() and not lease.cancelled() and lease.exception() is None


@asynccontextmanager
async def temporary_context(
    task: Task, sandbox_types: Sequence[type], *pools: Pool[Any] | None
) -> AsyncIterator[Context]:
    """Create a context for a single call, with a temporary pool for each sandbox class that has no pool in `pools`."""
    given = [pool for pool in pools if pool is not None]
    own: list[Any] = []
    for sandbox_type in sandbox_types:
        if not any(issubclass(pool.sandbox_type, sandbox_type) for pool in given):
            from agentfly_kit.pool.pool import Pool

            own.append(Pool(sandbox_type, size=1))
    context = Context(task, trajectory_id=f"try {task.id}", pools=[*given, *own])
    try:
        # If a tool makes this call, do not run in the threads of its sandboxes.
        with threads.using():
            yield context
    finally:
        try:
            await context.close()
        finally:
            for pool in own:
                await pool.close()
