"""Calls of user functions (tools, rewards and `reset` methods) with time limits. Exceptions are returned as values."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly_kit._async import limits, threads
from agentfly_kit._async.pending_call import cancelling, maybe_await, warn_or_log
from agentfly_kit.tools.inspection import underlying
from agentfly_kit.types import Failure

# Number of seconds for which a coroutine function may block the event loop without a warning.
_BLOCKING_SECONDS = 0.25


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call, either a value or an error. The traceback of an error starts in the called function.

    Attributes:
        value: The return value, or None if the call failed.
        error: The exception, or None. After a timeout, a TimeoutError whose message says whether the call was cancelled
            (coroutines) or abandoned (threads, which cannot be stopped).
        timed_out: Whether the call exceeded its timeout.
        seconds: Duration of the call.
    """

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0


async def call_user_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout: float | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
) -> Outcome:
    """Call a user function and return its result or exception. KeyboardInterrupt and cancellation propagate.

    A coroutine function runs on the event loop and is cancelled after the timeout. If it blocks the event loop, a
    warning is issued, and the time does not count towards the limits of other calls. Any other function runs in a
    daemon thread, which blocks neither other chains nor process exit, and is abandoned after the timeout. `convert` is
    applied to the return value; exceptions that it raises are treated like those of `function`. Sandboxes used by a
    cancelled or timed-out call are replaced when they are released, because the call may still change them.
    """
    start, begun = time.perf_counter(), limits.now()
    value: Any = None
    error: BaseException | None = None
    timed_out = ""

    def work() -> Any:
        got = function(**arguments)
        return got if inspect.isawaitable(got) else convert(got)

    try:
        if inspect.iscoroutinefunction(function):
            awaitable: Any = function(**arguments)
        else:
            value, error = await threads.run_off_loop(work, timeout)
            # A sync wrapper around a coroutine function returns an awaitable.
            awaitable = value if error is None and inspect.isawaitable(value) else None
        if awaitable is not None:
            left = None if timeout is None else timeout - (limits.now() - begun)
            steps = limits.Steps(maybe_await(awaitable))
            try:
                async with limits.time_limit(left) as limit:
                    value = convert(await steps)
            finally:
                timed_out = " and was cancelled" if limit.expired() else ""
                own = str(getattr(function, "__module__", "")).startswith("agentfly_kit.")
                if steps.longest > _BLOCKING_SECONDS and not own:
                    name = getattr(underlying(function), "__qualname__", repr(function))
                    warn_or_log(
                        f"{name} blocked the event loop and all other chains for more than {_BLOCKING_SECONDS:g} s; "
                        "define it with `def`, so that it runs in a thread, or use `await asyncio.to_thread(...)` for "
                        "the slow part"
                    )
            if timeout is not None and steps.blocked > timeout:
                error, timed_out = TimeoutError(), " and blocked the event loop"
    except asyncio.CancelledError as cancelled:
        if cancelling():
            threads.discard()
            raise
        error = cancelled  # only an awaitable inside the function was cancelled, not the caller
    except threads.CallTimeout as expired:
        error, timed_out = expired, " and was abandoned"
        if not expired.begun:
            timed_out = ", because an earlier call is still running"
    except (Exception, SystemExit) as raised:
        error = raised
    seconds = time.perf_counter() - start
    if error is None:
        return Outcome(value, seconds=seconds)
    if timed_out:
        threads.discard()
        return Outcome(None, TimeoutError(f"took longer than {timeout:g} s{timed_out}"), True, seconds)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return Outcome(value, _trim_traceback(error, function), seconds=seconds)


def _trim_traceback(error: BaseException, function: Callable[..., Any]) -> BaseException:
    code = getattr(underlying(function), "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def failure_from(where: str, error: BaseException) -> Failure:
    """Create a `Failure` from an exception, even if the exception's `__str__` method raises."""
    try:
        return Failure.from_exception(where, error)
    except Exception as worse:
        return Failure(where, type(error).__name__, f"(its __str__ raised {type(worse).__name__})")
