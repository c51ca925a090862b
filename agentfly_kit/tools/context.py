"""What a tool or a reward is handed: the task, the chain's place, its own state, and the sandboxes it holds.

Pools belong to the agent, and the chain closes its context; only `temporary_context`, for one call in a cell, makes its
own.
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

# `facts: FromTask[dict]`: the task's field of that name, hidden from the model.
FromTask: TypeAlias = Annotated[T, _FROM_TASK]

# `browser: FromPool[Browser]`: a lease from the pool of that kind, for a class that does not look like a sandbox.
FromPool: TypeAlias = Annotated[T, _FROM_POOL]


class _Lease(Protocol):
    turn: Any
    revoked: str

    @property
    def sandbox(self) -> Any: ...


class PoolLike(Protocol):
    """What a context needs of `Pool`."""

    @property
    def sandbox_type(self) -> type: ...
    async def acquire(self, *, owner: str, timeout: float | None = ...) -> Any: ...
    async def release(self, lease: Any) -> None: ...


@dataclass(frozen=True)
class Injection:
    """What is handed to a parameter that the model does not see.

    Attributes:
        source
        sandbox_type: The sandbox class.
    """

    source: Literal["sandbox", "context", "field"]
    sandbox_type: type = object


def injection(annotation: Any) -> Injection | None:
    """What this annotation asks for; None if it is an ordinary argument."""
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
    """A copy that a tool may change without changing its siblings' task; what cannot be copied is shared."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


class Fields(Mapping[str, Any]):
    """A chain's own copy of its task's fields, each made at the first look: changes stay within the chain."""

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
    """One chain's surroundings, for its tools and its rewards. Belongs to one event loop, from the first lease on."""

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
        """`timeout` is how long a lease is waited for, in seconds; None leaves it to the pool. `concurrency`: how many
        tools and rewards may run at once. `run`: of which rollout the chain is one; rollouts on one pool take turns.

        The chain moves `turn` and `seed` as it goes.
        """
        self.task = task
        self.fields = Fields(task.fields)
        self.trajectory_id = trajectory_id or task.id
        self.turn = turn
        self.seed = seed
        # The tools' own: whatever they keep between the turns of this chain. It ends with the chain.
        self.state: dict[str, Any] = {}
        # What the `reset` of each environment that the chain holds said, by kind.
        self.reset_results: dict[type, Any] = {}
        self.pools = tuple(pools)
        self.timeout = timeout
        self.concurrency = concurrency
        self.run = run
        self._leases: dict[int, tuple[PoolLike, asyncio.Task[_Lease]]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closing: asyncio.Future[None] | None = None

    async def sandbox(self, sandbox_type: type[S]) -> S:
        """The chain's sandbox of this kind: leased at the first request, the same one until the context is closed.

        Raises:  SettingsError where no pool has the kind; what the pool raises (PoolTimeout, PoolClosed, SandboxError).
        """
        pool = self.pool(sandbox_type)
        if self._closing is not None:
            raise SandboxError(
                f"the chain {self.trajectory_id!r} is over, and its {sandbox_type.__name__} was given back"
            )
        if id(pool) not in self._leases:
            self._leases[id(pool)] = (pool, asyncio.ensure_future(self._acquire(pool)))
        acquiring = self._leases[id(pool)][1]
        # Waited for from outside: a call that is cancelled must not take the lease from the calls that wait beside it.
        await asyncio.wait([acquiring])
        if acquiring.cancelled():
            raise SandboxError(f"the chain {self.trajectory_id!r} ended while it waited for a {sandbox_type.__name__}")
        if acquiring.exception() is not None and self._leases.get(id(pool)) == (pool, acquiring):
            del self._leases[id(pool)]  # the next request may have more luck
        lease = acquiring.result()
        self._check_revoked(sandbox_type, lease)
        if lease.turn != self.turn:
            lease.turn = self.turn  # for whoever looks at the pool: who holds it, and how far they are
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
        """Its episode starts: it is reset for the task."""
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
        """The sandbox for the length of one call: calls of one turn that share it run in the order written."""
        lock = self._locks.setdefault(id(self.pool(sandbox_type)), asyncio.Lock())
        async with lock:
            yield await self.sandbox(sandbox_type)
            self.check()  # what a call said whose sandbox was taken from under it is nothing to go by

    def check(self) -> None:
        """Raises LeaseRevoked if a pool has taken a sandbox from this chain, and why."""
        for pool, lease in self._leases.values():
            if _is_held(lease):
                self._check_revoked(pool.sandbox_type, lease.result())

    def _check_revoked(self, sandbox_type: type, lease: _Lease) -> None:
        if getattr(lease, "revoked", ""):
            raise LeaseRevoked(
                f"the pool took the {sandbox_type.__name__} of the chain {self.trajectory_id!r}: {lease.revoked}"
            )

    def pool(self, sandbox_type: type) -> PoolLike:
        """The pool whose sandboxes are of this kind: the very class first, else a class derived from it."""
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
        """The sandboxes that the chain holds now, by kind."""
        return {pool.sandbox_type: lease.result().sandbox for pool, lease in self._leases.values() if _is_held(lease)}

    async def fork(self, trajectory_id: str) -> Context:
        """A second context in the same state: copies of `state` and `fields`, and forks of the sandboxes held.

        Raises:  SandboxError naming a kind that cannot fork; then nothing is leased.
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
        """Give every lease back; a second call waits for the first. A cancelled caller is cancelled after that."""
        if self._closing is None and not self._leases:
            self._closing = asyncio.get_running_loop().create_future()
            self._closing.set_result(None)
            return
        cancelled: asyncio.CancelledError | None = None
        # Once more if that task was itself cancelled before it had begun, as all are at the end of an event loop.
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
            acquiring.cancel()  # does nothing to one that has its lease
            try:
                # Also when this very task is cancelled, as all are at the end of an event loop.
                await wait_all([acquiring])
            except asyncio.CancelledError as error:
                failed.append(error)
            if not _is_held(acquiring):
                continue
            try:
                await pool.release(acquiring.result())
            except (Exception, asyncio.CancelledError) as error:  # the other leases must go back too
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
    """A pool of the one sandbox that somebody holds already: lent as often as it is asked for, never given back."""

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
    """A context for one call, with a pool of its own for each kind that no pool gives."""
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
