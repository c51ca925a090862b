"""Running a chain to its end, with the hooks of its agent and within its time limits."""

from __future__ import annotations

import asyncio

from agentfly_kit._async.pending_call import cancelling, warn_or_log
from agentfly_kit.agent.chain import BaseChain, call_hook
from agentfly_kit.errors import EngineError, SettingsError
from agentfly_kit.types import Failure, Trajectory


async def run_chain(chain: BaseChain) -> Trajectory:
    """Run a chain to its end and score it; see `Chain.run`."""
    report = chain.hooks.report
    state, detail = "cancelled", ""
    report(chain.id, "chain", "start", "waiting", chain.actions)
    try:
        await _run_to_end(chain)
        trajectory = await _finish(chain)
        state, detail = "failed" if trajectory.error is not None else "done", trajectory.stop
        try:
            if not chain.never_started:
                await call_hook(chain.agent.after_chain, chain, trajectory)
        except Exception as error:  # the trajectory is finished: an error of this hook does not change it
            warn_or_log(f"after_chain raised {type(error).__name__}: {error}")
        return trajectory
    finally:
        report(chain.id, "chain", "end", state, chain.actions, detail)


async def _run_to_end(chain: BaseChain) -> None:
    # The earliest deadline: that of the chain, or of a budget that it shares.
    deadlines = [(usage.deadline, f"{usage.name}_seconds") for usage in chain.hooks.usages]
    if chain.agent.timeout is not None:
        deadlines.append((asyncio.get_running_loop().time() + chain.agent.timeout, "timeout"))
    when, stop = min(((at, stop) for at, stop in deadlines if at is not None), default=(None, ""))
    limit = asyncio.timeout_at(when)
    try:
        async with limit:
            while chain.stop is None:
                await _advance(chain)
    except asyncio.CancelledError as error:
        if cancelling():
            await chain.close()
            raise
        # Not a cancellation of this task: something that it awaited was cancelled.
        chain._end("error", Failure.from_exception("chain", error))
    except Exception as error:
        if limit.expired():
            chain._end(stop)
        else:  # includes a TimeoutError from elsewhere, such as a server: an error, not the chain's time limit
            where = "engine" if isinstance(error, EngineError) else "chain"
            chain._end("error", Failure.from_exception(where, error))


async def _finish(chain: BaseChain) -> Trajectory:
    try:
        return await chain.finish()
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and cancelling():
            raise
        # For example, a pool was closed while in use. The trajectory is kept, with the error.
        chain._end("error", Failure.from_exception("chain", error))
        return chain.snapshot()


async def _advance(chain: BaseChain) -> None:
    """Run one step, including the agent's hooks."""
    agent = chain.agent
    await chain.prepare()
    await call_hook(agent.before_turn, chain)
    # Do not sample if the hook has written the action itself.
    if chain.stop is None and not chain.pending_calls:
        await chain.sample()
        if _context_is_full(chain):
            await call_hook(agent.on_context_full, chain)
    if chain.stop is None and chain.pending_calls:
        await chain.act()
        if chain.stop is None and (count := await call_hook(agent.after_observation, chain)):
            if not isinstance(count, int) or count < 0:
                raise SettingsError(f"after_observation must return a number of forks or None, got {count!r}")
            if chain.hooks.spawn is None:
                raise SettingsError("after_observation requested forks of a chain that is not in a rollout")
            await chain.hooks.spawn(chain, count)


def _context_is_full(chain: BaseChain) -> bool:
    """Return True if the row is full and compacting it can help: if it holds more than its prompt."""
    return chain.stop == "context_full" and len(chain.turn.row_path) > 1
