"""`Context`: what tools and rewards can access of their chain (task, turn, state and sandboxes), and its injection.

Pools belong to the agent, and a chain closes its context. Only `temporary_context`, used for single calls, creates and
closes pools itself.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import typing
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from agentfly_kit._async.concurrency import ConcurrencyLimits
from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.errors import LeaseRevoked, SandboxError, SettingsError
from agentfly_kit.pool import environment as environments
from agentfly_kit.tools import function as functions
from agentfly_kit.types import Task

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class _Marker:
    description: str

    def __repr__(self) -> str:
        return self.description


_FROM_TASK = _Marker("from the task")
_FROM_POOL = _Marker("from a pool")

# `facts: FromTask[dict]` injects the task's field of that name. The model does not see the parameter.
FromTask: TypeAlias = Annotated[T, _FROM_TASK]

# `browser: FromPool[Browser]` injects a sandbox from the pool of that class. It is needed only for a class that is not
# recognized as a sandbox because it lacks `run` or `close`.
FromPool: TypeAlias = Annotated[T, _FROM_POOL]


class _Lease(Protocol):
    turn: Any
    revoked: str

    @property
    def sandbox(self) -> Any: ...


class PoolLike(Protocol):
    """Protocol of the pools of a context: the part of `Pool` that it uses."""

    @property
    def sandbox_type(self) -> type: ...
    async def acquire(self, *, owner: str, timeout: float | None = ...) -> Any: ...
    async def release(self, lease: Any) -> None: ...


@dataclass(frozen=True)
class Injection:
    """Source of the value of a parameter that the model does not see.

    Attributes:
        source: "sandbox", "context" or "field" (a field of the task).
        sandbox_type: The sandbox class, if `source` is "sandbox".
    """

    source: Literal["sandbox", "context", "field"]
    sandbox_type: type = object


def injection(annotation: Any) -> Injection | None:
    """Return the injection that an annotation requests, or None for an argument that the model gives."""
    if typing.get_origin(annotation) is Annotated:
        if _FROM_TASK in annotation.__metadata__:
            return Injection("field")
        inner = typing.get_args(annotation)[0]
        if _FROM_POOL in annotation.__metadata__:
            return Injection("sandbox", typing.get_origin(inner) or inner)
        return injection(inner)
    if inspect.isclass(annotation):
        if issubclass(annotation, Context):
            return Injection("context")
        if all(callable(getattr(annotation, name, None)) for name in ("run", "close")):
            return Injection("sandbox", annotation)
    return None


def copy_or_share(value: Any) -> Any:
    """Return a deep copy, so that changes do not affect other chains of the task. Uncopyable values are shared."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


class Fields(Mapping[str, Any]):
    """A chain's own copy of the fields of its task. Each field is copied on first access."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._own:
            self._own[name] = copy_or_share(self._fields[name])
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Fields({', '.join(self) or 'none'})"


class Context:
    """The task, state and sandboxes of one chain, for its tools and rewards.

    A context is bound to one event loop from its first lease on.
    """

    def __init__(
        self,
        task: Task,
        *,
        trajectory_id: str = "",
        turn: int = 0,
        seed: int = 0,
        pools: Sequence[PoolLike] = (),
        timeout: float | None = None,
        concurrency: ConcurrencyLimits = ConcurrencyLimits(),  # noqa: B008 - it never changes
        run: str = "",
    ) -> None:
        """Create the context of a chain.

        Args:
            task: task of the chain.
            trajectory_id: id of the chain's trajectory; the task's id by default.
            turn: current turn. The chain updates it.
            seed: seed of the current turn. The chain updates it.
            pools: pools that lend the sandboxes.
            timeout: maximum time to wait for a lease in seconds; None uses the pool's `acquire_timeout`.
            concurrency: limits on concurrent tools and rewards.
            run: name of the rollout that the chain belongs to. A pool serves rollouts in turn.
        """
        self.task = task
        self.fields = Fields(task.fields)
        self.trajectory_id = trajectory_id or task.id
        self.turn = turn
        self.seed = seed
        # Free for tools to keep data in between the turns of this chain.
        self.state: dict[str, Any] = {}
        # Return value of each environment's `reset`, by environment class.
        self.reset_results: dict[type, Any] = {}
        self.pools = tuple(pools)
        self.timeout = timeout
        self.concurrency = concurrency
        self.run = run
        self._leases: dict[int, tuple[PoolLike, asyncio.Task[_Lease]]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closing: asyncio.Future[None] | None = None

    async def sandbox(self, sandbox_type: type[S]) -> S:
        """Return the chain's sandbox of this class. It is leased on first use and kept until the context is closed.

        Raises:
            SettingsError: if not exactly one pool matches the class; see `pool`.
            SandboxError: if the context is closed, no sandbox can be started, or resetting an environment fails.
            PoolTimeout: if no sandbox becomes free in time.
            PoolClosed: if the pool is closed.
            LeaseRevoked: if the pool has revoked the lease.
        """
        pool = self.pool(sandbox_type)
        if self._closing is not None:
            raise SandboxError(
                f"the chain {self.trajectory_id!r} is over, and its {sandbox_type.__name__} was given back"
            )
        if id(pool) not in self._leases:
            self._leases[id(pool)] = (pool, asyncio.ensure_future(self._acquire(pool)))
        acquiring = self._leases[id(pool)][1]
        # Wait without awaiting the task itself, so that cancelling one call does not cancel the lease for other calls.
        await asyncio.wait([acquiring])
        if acquiring.cancelled():
            raise SandboxError(f"the chain {self.trajectory_id!r} ended while it waited for a {sandbox_type.__name__}")
        if acquiring.exception() is not None and self._leases.get(id(pool)) == (pool, acquiring):
            del self._leases[id(pool)]  # let the next request try again
        lease = acquiring.result()
        self._check_revoked(sandbox_type, lease)
        if lease.turn != self.turn:
            lease.turn = self.turn  # shown in the pool's snapshot
        return typing.cast(S, lease.sandbox)

    async def _acquire(self, pool: PoolLike) -> _Lease:
        turns: dict[str, Any] = (
            {"run": self.run} if self.run and "run" in inspect.signature(pool.acquire).parameters else {}
        )
        lease: _Lease = await pool.acquire(owner=self.trajectory_id, timeout=self.timeout, **turns)
        if environments.is_environment(pool.sandbox_type):
            try:
                await self._reset_environment(pool.sandbox_type, lease.sandbox)
            except BaseException:
                await pool.release(lease)
                raise
        return lease

    async def _reset_environment(self, sandbox_type: type, environment: Any) -> None:
        """Start an episode by resetting the environment for the task."""
        given = environments.reset_arguments(environment, self.task)
        outcome = await functions.call_user_function(
            environment.reset, given, timeout=self.timeout, convert=lambda value: value
        )
        if outcome.timed_out:
            raise SandboxError(
                f"{sandbox_type.__name__}.reset took longer than {self.timeout:g} s for task {self.task.id!r}"
            )
        if outcome.error is not None:
            what = f"{type(outcome.error).__name__}: {outcome.error}"
            raise SandboxError(
                f"{sandbox_type.__name__}.reset failed for task {self.task.id!r} ({what})"
            ) from outcome.error
        self.reset_results[sandbox_type] = outcome.value

    @asynccontextmanager
    async def using(self, sandbox_type: type[S]) -> AsyncIterator[S]:
        """Async context manager that gives exclusive use of the sandbox for one call.

        Calls of one turn that share a sandbox run one after another, in the order in which the model wrote them.
        """
        lock = self._locks.setdefault(id(self.pool(sandbox_type)), asyncio.Lock())
        async with lock:
            yield await self.sandbox(sandbox_type)
            self.check()  # discard the result if the sandbox was revoked during the call

    def check(self) -> None:
        """Check that no lease of this chain was revoked.

        Raises:
            LeaseRevoked: if a pool has revoked one; the message names the reason.
        """
        for pool, lease in self._leases.values():
            if _is_held(lease):
                self._check_revoked(pool.sandbox_type, lease.result())

    def _check_revoked(self, sandbox_type: type, lease: _Lease) -> None:
        if getattr(lease, "revoked", ""):
            raise LeaseRevoked(
                f"the pool took the {sandbox_type.__name__} of the chain {self.trajectory_id!r}: {lease.revoked}"
            )

    def pool(self, sandbox_type: type) -> PoolLike:
        """Return the pool of this sandbox class, or else the pool of a subclass.

        Raises:
            SettingsError: if no pool or several pools match.
        """
        exact = [pool for pool in self.pools if pool.sandbox_type is sandbox_type]
        for found in (exact, [pool for pool in self.pools if issubclass(pool.sandbox_type, sandbox_type)]):
            if len(found) > 1:
                raise SettingsError(f"{len(found)} pools give a {sandbox_type.__name__}; keep one: Agent(pools=[...])")
            if found:
                return found[0]
        have = ", ".join(pool.sandbox_type.__name__ for pool in self.pools) or "none"
        raise SettingsError(
            f"no pool gives a {sandbox_type.__name__} (pools here: {have}); give the agent one: "
            f"Agent(pools=[af.Pool({sandbox_type.__name__})])"
        )

    @property
    def held(self) -> dict[type, Any]:
        """The sandboxes that the chain holds, by class."""
        return {pool.sandbox_type: lease.result().sandbox for pool, lease in self._leases.values() if _is_held(lease)}

    async def fork(self, trajectory_id: str) -> Context:
        """Return a context in the same state, with copies of `state` and `fields` and forks of the held sandboxes.

        Args:
            trajectory_id: id of the new chain's trajectory.

        Raises:
            SandboxError: if a held sandbox has no `fork`, or `state` cannot be copied; then nothing is leased.
        """
        for sandbox_type, sandbox in self.held.items():
            if not callable(getattr(sandbox, "fork", None)):
                raise SandboxError(
                    f"the chain {self.trajectory_id!r} holds a {sandbox_type.__name__}, which "
                    f"cannot fork (it has no fork()); "
                    "fork before its first use, or replay the calls in a new chain"
                )
        twin = Context(
            self.task,
            trajectory_id=trajectory_id,
            turn=self.turn,
            seed=self.seed,
            pools=self.pools,
            timeout=self.timeout,
            concurrency=self.concurrency,
            run=self.run,
        )
        try:
            twin.state = copy.deepcopy(self.state)
        except Exception as error:
            raise SandboxError(
                f"the chain {self.trajectory_id!r} cannot fork: what its tools keep in context.state "
                f"({', '.join(self.state)}) cannot be copied ({type(error).__name__}: {error})"
            ) from error
        twin.fields._own = copy.deepcopy(self.fields._own)
        twin.reset_results = dict(self.reset_results)
        try:
            for sandbox_type, sandbox in self.held.items():
                done = sandbox.fork(await twin.sandbox(sandbox_type))
                if inspect.isawaitable(done):
                    await done
        except BaseException:
            await twin.close()
            raise
        return twin

    async def close(self) -> None:
        """Release every lease. A second call waits for the first. If cancelled, finish before raising."""
        if self._closing is None and not self._leases:
            self._closing = asyncio.get_running_loop().create_future()
            self._closing.set_result(None)
            return
        cancelled: asyncio.CancelledError | None = None
        # Try again if the closing task was cancelled before it began, as happens when an event loop shuts down.
        while True:
            if self._closing is None or (self._closing.cancelled() and self._leases):
                self._closing = asyncio.ensure_future(self._release_all())
            if self._closing.done():
                break
            try:
                await asyncio.wait([self._closing])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if not self._closing.cancelled():
            self._closing.result()

    async def _release_all(self) -> None:
        failed: list[BaseException] = []
        for pool, acquiring in self._leases.values():
            acquiring.cancel()  # no effect if the lease was already acquired
            try:
                # `wait_all` completes even if this task is cancelled, as happens when an event loop shuts down.
                await wait_all([acquiring])
            except asyncio.CancelledError as error:
                failed.append(error)
            if not _is_held(acquiring):
                continue
            try:
                await pool.release(acquiring.result())
            except (Exception, asyncio.CancelledError) as error:  # release the other leases first
                failed.append(error)
        self._leases.clear()
        if failed:
            raise failed[0]

    async def __aenter__(self) -> Context:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        held = ", ".join(sandbox_type.__name__ for sandbox_type in self.held)
        closed = ", closed" if self._closing is not None else ""
        return f"<Context of {self.trajectory_id!r}, turn {self.turn}, holds {held or 'no sandbox'}{closed}>"


def _is_held(lease: asyncio.Task[_Lease]) -> bool:
    return lease.done() and not lease.cancelled() and lease.exception() is None


class SingleSandboxPool:
    """A pool that lends one existing sandbox any number of times and leaves closing it to the caller."""

    def __init__(self, sandbox_type: type, sandbox: Any) -> None:
        self.sandbox_type = sandbox_type
        self.sandbox = sandbox
        self.turn: object = None

    async def acquire(self, *, owner: str, timeout: float | None = None) -> SingleSandboxPool:
        return self

    async def release(self, lease: Any) -> None: ...


@asynccontextmanager
async def temporary_context(
    task: Task, sandbox_types: Sequence[type], pools: Sequence[PoolLike]
) -> AsyncIterator[Context]:
    """Create a context for a single call, with a temporary pool for each sandbox class that `pools` lack."""
    own: list[Any] = []
    for sandbox_type in sandbox_types:
        if not any(issubclass(pool.sandbox_type, sandbox_type) for pool in pools):
            from agentfly_kit.pool.pool import Pool

            own.append(Pool(sandbox_type, size=1))
    context = Context(task, trajectory_id=f"try {task.id}", pools=[*pools, *own])
    try:
        yield context
    finally:
        try:
            await context.close()
        finally:
            for pool in own:
                await pool.close()
