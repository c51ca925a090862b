"""`af.ray.workers`: processes on a Ray cluster that run groups of rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from agentfly_kit._async.pending_call import run_in_thread, wait_all, warn_or_log
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.progress import RolloutEvent
from agentfly_kit.agent.request import Gate, GroupResult, GroupResults, RolloutRequest
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.errors import EngineError, SettingsError, check_count
from agentfly_kit.integrations.ray.cluster import VERSION, Processes, connected, describe_node
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Failure

# Maximum number of times that a group is run again because its worker died.
_MAX_RETRIES = 3
# Time in seconds to wait for a worker that Ray restarts, and interval between the attempts to reach it. A cluster that
# replaces a lost node takes a minute or more.
_RESTART_SECONDS, _RETRY_SECONDS = 120.0, 0.5
# Fields of an agent that `_describe` does not compare. The engine is sent separately, `Workers.check` ensures that the
# chat and the pools are unchanged, and the other fields concern only the main process.
_NOT_COMPARED = ("engine", "chat", "pools", "watch", "_semaphores", "_last_handle", "_warned")


def workers(agent: Agent, n: int, *, timeout: float = 300.0, **options: Any) -> Workers:
    """Start `n` processes on the Ray cluster that run groups of rollouts of `agent`.

    Each process has a copy of the agent with a separate engine and separate pools, so sandboxes run on the node of the
    process. Connect to the cluster with `ray.init` first.

    Args:
        agent: The agent. All of its parts must be picklable by Ray, which also pickles functions defined in a notebook.
        n: Number of processes.
        timeout: Time limit for the start of the processes in seconds.
        options: Ray actor options, such as `num_cpus`, `num_gpus` or `runtime_env`. By default, each process takes one
            CPU, and Ray spreads the processes over the nodes.

    Raises:
        SettingsError: If Ray is not connected, a part of the agent cannot be pickled, or the processes cannot start.
    """
    check_count("n", n)
    ray = connected()
    copy = agent.replace(watch=None)
    try:
        sent = ray.put(copy)
    except Exception as error:
        raise SettingsError(f"the agent cannot be sent to workers: {_unpicklable_part(copy) or error}") from error
    return Workers(agent, sent, n, timeout, options)


def _unpicklable_part(agent: Agent) -> str | None:
    """Return a message that names the part of the agent that cannot be pickled, or None if all parts are picklable."""
    from ray import cloudpickle

    for name, value in _parts(agent):
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            return f"its {name} cannot be pickled ({type(error).__name__}: {error})"
    return None


def _parts(agent: Agent) -> Iterator[tuple[str, Any]]:
    for tool in agent.tools:
        yield f"tool {tool.name!r}", tool
    for reward in agent.reward:
        yield f"reward {reward.name!r}", reward
    for pool in agent.pools:
        yield f"pool of {pool.sandbox_type.__name__}", pool
    if isinstance(agent.engine, LocalEngine):
        yield "policy", agent.engine.policy
    for setting in dataclasses.fields(agent):
        yield setting.name, getattr(agent, setting.name)


class _GroupRunner:
    """Ray actor that runs groups in a worker process.

    The agent is an argument of each call, because Ray does not keep the constructor's arguments for a restart.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._running: Agent | None = None
        self._prepared = -1
        self._preparing = asyncio.Lock()

    async def describe(self, sent: list[Any]) -> dict[str, Any]:
        self._agent = self._agent or await sent[0]
        return describe_node()

    async def run_group(self, rollout: int, sent: list[Any], number: int) -> GroupResult:
        """Run a group of a rollout. `sent` contains references to the agent and the rollout's `_Description`."""
        async with self._preparing:
            if rollout != self._prepared:
                agent: Agent = self._agent or await sent[0]
                description: _Description = await sent[1]
                if self._running is not None and "engine" in description.settings:
                    await self._running.engine.close()
                self._agent, self._running = agent, agent.replace(**description.settings)
                self._request = description.request
                if description.weights is not None:
                    policy = agent.engine.policy  # type: ignore[attr-defined]
                    policy.load_state(description.weights, description.version)
                self._prepared = rollout
        assert self._running is not None
        handle = RolloutHandle(self._running, self._request.for_task(number))
        events: list[RolloutEvent] = []
        handle.subscribe(events.append)
        done = await handle
        return GroupResult([key for _, key in handle._planned], done, events)

    async def close(self) -> None:
        """Close the sandboxes of this process."""
        for pool in self._agent.pools if self._agent is not None else ():
            await pool.close()


@dataclasses.dataclass(frozen=True)
class _Description:
    """Arguments of a rollout, agent settings changed since the workers were created, and a LocalEngine's weights."""

    request: RolloutRequest
    settings: dict[str, Any]
    weights: dict[str, Any] | None
    version: int


class Workers(Processes):
    """Processes on a Ray cluster that run the groups of rollouts, created by `af.ray.workers`.

    Pass the object as `agent.rollout(workers=)`, `af.evaluate(workers=)` or `af.train(workers=)`. A group runs in one
    process. If a process or its node dies, its groups run again elsewhere, with the same seeds and at most three times,
    and Ray starts another process. Rollouts on the same workers run one at a time.

    Attributes:
        nodes: Host name and process id of each worker when it started.
    """

    def __init__(self, agent: Agent, sent: Any, n: int, timeout: float, options: dict[str, Any]) -> None:
        import ray

        super().__init__()
        self._agent, self._sent = agent, sent
        self._rollouts = itertools.count()
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        given = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": -1} | options
        runner = ray.remote(**given)(_GroupRunner)
        self._actors = [runner.remote() for _ in range(n)]
        failed = (
            f"a worker did not start; every node needs agentfly_kit {VERSION} and the modules of the agent's tools and "
            "rewards"
        )
        with self._starting(f"{n} workers", timeout, given, failed):
            self._set_nodes(ray.get([actor.describe.remote([sent]) for actor in self._actors], timeout=timeout))

    def __len__(self) -> int:
        return len(self._actors)

    def __repr__(self) -> str:
        return f"Workers({len(self._actors)} Ray actors)" if self._actors else "Workers(closed)"

    def close(self) -> None:
        """Close the sandboxes of the workers and end their processes. Further calls have no effect."""
        import ray

        if self._actors and ray.is_initialized():
            closing = [actor.close.remote() for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=10.0)
        super().close()

    # --- rollouts ---

    def check(self, agent: AgentSettings) -> None:
        """Raise SettingsError if the workers are closed or were created for another engine, chat or pools."""
        if not self._actors:
            raise SettingsError("these workers are closed; af.ray.workers(agent, n) starts new ones")
        mine = self._agent
        # A LocalEngine may have another policy with weights of equal shapes, because the weights are sent with each
        # rollout.
        same_engine = agent.engine is mine.engine or (
            isinstance(agent.engine, LocalEngine)
            and isinstance(mine.engine, LocalEngine)
            and _shapes(agent.engine) == _shapes(mine.engine)
        )
        for name, same in (
            ("engine", same_engine),
            ("chat", agent.chat is mine.chat),
            ("pools", all(a is b for a, b in itertools.zip_longest(agent.pools, mine.pools))),
        ):
            if not same:
                raise SettingsError(
                    f"workers must be created from an agent with the same {name}: af.ray.workers(agent, {len(self)})"
                )

    def _describe(self, agent: AgentSettings, request: RolloutRequest) -> Any:
        """Store the description of a rollout, with the current weights, in Ray and return its reference."""
        import ray

        names = [f.name for f in dataclasses.fields(agent) if f.name not in _NOT_COMPARED]
        changed = {
            name: getattr(agent, name) for name in names if getattr(agent, name) is not getattr(self._agent, name)
        }
        if not isinstance(agent.engine, LocalEngine):
            # Send the engine with each rollout, because training changes attributes such as the version of the weights.
            return ray.put(_Description(request, changed | {"engine": agent.engine}, None, 0))
        policy = agent.engine.policy
        with policy.lock:
            weights = {name: tensor.detach().cpu() for name, tensor in policy.state().items()}
            return ray.put(_Description(request, changed, weights, policy.version))

    async def run_groups(self, agent: AgentSettings, request: RolloutRequest, gate: Gate) -> GroupResults:
        """Run groups of a rollout on the workers; see `GroupWorkers`."""
        import ray

        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            self.check(agent)
            sent = [self._sent, await run_in_thread(self._describe, agent, request)]
            rollout = next(self._rollouts)
            waiting: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
            for number in request.numbers:
                waiting.put_nowait((number, 0))
            results: asyncio.Queue[tuple[int, GroupResult] | Exception] = asyncio.Queue()
            has_died = False

            async def serve(actor: Any, node: str, lane: int) -> None:
                """Run one group at a time on a worker until cancelled, or until the worker cannot be restarted.

                Several such loops run per worker, numbered by `lane`. After any worker has died, only the loops with
                lane 0 continue, so that a group that kills its process does not affect others.
                """
                nonlocal has_died
                while True:
                    number, retries = await waiting.get()
                    await gate()
                    if has_died and lane:
                        waiting.put_nowait((number, retries))
                        return
                    reference = actor.run_group.remote(rollout, sent, number)
                    try:
                        results.put_nowait((number, await reference))
                    except asyncio.CancelledError:
                        ray.cancel(reference)
                        raise
                    except ray.exceptions.RayTaskError as error:
                        results.put_nowait(error.cause if isinstance(error.cause, Exception) else error)
                    except ray.exceptions.RayError as error:  # the worker, its node or its result was lost
                        has_died = True
                        warn_or_log(
                            f"a worker started on {node} died ({type(error).__name__}); its group runs again. If no "
                            f"worker is left, the rollout waits up to {_RESTART_SECONDS:g} s for Ray to restart one"
                        )
                        if retries < _MAX_RETRIES:
                            waiting.put_nowait((number, retries + 1))
                        else:
                            failure = Failure("worker", type(error).__name__, f"{error} (worker started on {node})")
                            results.put_nowait((number, _failed_group(request, number, failure)))
                        if not await _is_reachable(actor, self._sent):
                            return

            # Limit the concurrent groups per worker, so that the groups are distributed over all workers.
            at_once = min(request.groups_at_once(agent), -(-len(request.numbers) // len(self._actors)))
            workers = [*zip(self._actors, self.nodes, strict=True)]
            serving = [asyncio.create_task(serve(*worker, lane)) for lane in range(at_once) for worker in workers]
            try:
                for _ in request.numbers:
                    yield await _next_result(results, serving)
            finally:
                for task in serving:
                    task.cancel()
                await wait_all(serving)


async def _next_result(
    results: asyncio.Queue[tuple[int, GroupResult] | Exception], serving: Sequence[asyncio.Task[None]]
) -> tuple[int, GroupResult]:
    getting = asyncio.ensure_future(results.get())
    try:
        while not getting.done():
            for task in serving:
                if task.done():
                    task.result()  # re-raises the exception if `serve` failed
            left = [task for task in serving if not task.done()]
            if not left:
                raise EngineError(f"all workers died, and Ray restarted none within {_RESTART_SECONDS:g} s")
            await asyncio.wait((getting, *left), return_when=asyncio.FIRST_COMPLETED)
        result = getting.result()
        if isinstance(result, Exception):
            raise result
        return result
    finally:
        getting.cancel()


async def _is_reachable(actor: Any, sent: Any) -> bool:
    """Return True once Ray has restarted a worker; return False if Ray does not restart it in time."""
    import ray

    try:
        async with asyncio.timeout(_RESTART_SECONDS):
            while True:
                try:
                    await actor.describe.remote([sent])
                    return True
                except ray.exceptions.ActorDiedError:
                    return False
                except ray.exceptions.RayError:
                    await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        return False


def _shapes(engine: LocalEngine) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in engine.policy.state().items()}


def _failed_group(request: RolloutRequest, number: int, failure: Failure) -> GroupResult:
    """Return the result of a group whose workers died: unscored chains with stop reason "error"."""
    planned = request.for_task(number).plan()
    chains = [Trajectory(key.id, task, key.group, key.chain, (), "error", error=failure) for task, key in planned]
    events = []
    for chain in chains:
        events += [
            RolloutEvent(0, "chain", "start", chain.id, chain.task.id, 0, "waiting", 0.0),
            RolloutEvent(0, "chain", "end", chain.id, chain.task.id, 0, "failed", 0.0, "error", "", chain),
        ]
    return GroupResult([key for _, key in planned], Rollout.from_trajectories(chains), events)
