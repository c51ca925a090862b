"""A user's function: its source, its fingerprint, and a call that neither blocks the event loop nor loses an exception.

Knows nothing of tools, rewards or chains.
"""

from __future__ import annotations

import asyncio
import dis
import hashlib
import inspect
import sys
import textwrap
import time
import types as pytypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly_kit._async import threads
from agentfly_kit.types import Failure

# --- calling -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one call gave: a value, or an error whose traceback begins in the function, or that it was late."""

    value: Any = None
    error: BaseException | None = None
    timed_out: str = ""
    """"cancelled" (a coroutine) or "abandoned" (a thread, which nothing can stop) when the timeout passed."""
    seconds: float = 0.0


async def call_user_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout: float | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
) -> Outcome:
    """Call it and give back what happened; `convert` is applied to the value, its errors counting as the call's.

    A coroutine function runs on the event loop and is cancelled at the timeout. Any other runs in a daemon thread
    (_async/threads.py), so that it blocks no other chain and a hung one cannot keep the process alive; at the timeout
    it is left.
    Raises:  CancelledError if the caller was cancelled, KeyboardInterrupt. Nothing else.
    """
    start = time.perf_counter()
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
            value, error = await threads.run_off_loop(work, getattr(function, "__func__", function), timeout)
            # A plain wrapper around a coroutine function gives back what is to be awaited.
            awaitable = value if error is None and inspect.isawaitable(value) else None
        if awaitable is not None:
            left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - start))
            limit = asyncio.timeout(left)
            try:
                async with limit:
                    value = convert(await awaitable)
            finally:
                timed_out = "cancelled" if limit.expired() else ""
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        error = cancelled  # the function awaited something that was cancelled; nobody cancelled us
    except threads.CallTimeout:
        return Outcome(timed_out="abandoned", seconds=time.perf_counter() - start)
    except (Exception, SystemExit) as raised:
        error = raised
    seconds = time.perf_counter() - start
    if timed_out and error is not None:
        return Outcome(timed_out=timed_out, seconds=seconds)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return Outcome(value, None if error is None else _trim_traceback(error, function), seconds=seconds)


def _trim_traceback(error: BaseException, function: Callable[..., Any]) -> BaseException:
    """The error with a traceback that begins in the function: the frames above it are ours and say nothing."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def failure_from(where: str, error: BaseException) -> Failure:
    """`Failure.from_exception`, also for an exception whose own text cannot be made."""
    try:
        return Failure.from_exception(where, error)
    except Exception as worse:
        return Failure(where, type(error).__name__, f"(its text cannot be made: {type(worse).__name__})")


# --- what a function is --------------------------------------------------------------------------


def source_of(function: Callable[..., Any]) -> str:
    """Its source text, notebook cells included; a hash of its code where no source is kept (`python -c`, `exec`)."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(inspect.unwrap(function), "__code__", None)
        return (
            f"<no source; code {_digest(_describe_code(code))}>" if code is not None else f"<no source; {function!r}>"
        )


def fingerprint(function: Callable[..., Any], source: str, *more: str) -> str:
    """16 hex digits of what it does: source, constants that it closes over, functions of its module that it calls.

    Only values that cannot change in place count (numbers, texts, tuples): lists, dicts and objects may be state.
    """
    return _digest(source, *more, *_referenced_values(function, set()))


def current_definition(function: Callable[..., Any]) -> Any:
    """What the function's name means now, where it was defined; None if that cannot be known (a local function)."""
    plain = inspect.unwrap(function)
    value: Any = None
    for i, part in enumerate(plain.__qualname__.split(".")):
        value = plain.__globals__.get(part) if i == 0 else vars(value).get(part) if isinstance(value, type) else None
    return value


def _referenced_values(function: Callable[..., Any], seen: set[int]) -> list[str]:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen:
        return []
    seen.add(id(function))
    cells = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False))
    lines = [f"defaults {_stable_repr(function.__defaults__)} {_stable_repr(function.__kwdefaults__)}"]
    for name in sorted(_outer_names(code)):
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__[name]
        except (KeyError, ValueError):  # a builtin or an attribute; a cell not filled yet
            continue
        helper = getattr(value, "function", value)  # a tool or a reward wraps one
        if isinstance(helper, pytypes.FunctionType):
            if helper.__module__ == function.__module__:
                lines += [f"{name} is {source_of(helper)}", *_referenced_values(helper, seen)]
        elif (text := _stable_repr(value)) is not None:
            lines.append(f"{name} = {text}")
    return lines


def _outer_names(code: pytypes.CodeType) -> set[str]:
    """The outer names that it reads; not `co_names`, where `x.answer` looks like a global `answer`."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    nested = (const for const in code.co_consts if isinstance(const, pytypes.CodeType))
    return read.union(code.co_freevars, *map(_outer_names, nested))


def _stable_repr(value: Any) -> str | None:
    """A text that is the same in every process, or None where there is none."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
        return repr(value)
    if isinstance(value, tuple | frozenset):
        parts = [_stable_repr(part) or f"a {type(part).__qualname__}" for part in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return None


def _describe_code(code: pytypes.CodeType) -> str:
    consts = [_describe_code(c) if isinstance(c, pytypes.CodeType) else str(_stable_repr(c)) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _digest(*texts: str) -> str:
    h = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        h.update(f"{len(data)}:".encode() + data)
    return h.hexdigest()


# --- annotations ---------------------------------------------------------------------------------


def type_hints(function: Callable[..., Any], frame: pytypes.FrameType | None) -> dict[str, Any]:
    """Annotations with texts resolved, extras kept. Names that are not global are looked for in the defining frames.

    Raises:  NameError for a name that is found nowhere.
    """
    import typing

    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        # Defined inside a function or a class body, under `from __future__ import annotations`.
        local: dict[str, Any] = {}
        frames = []
        while frame is not None and frame.f_globals is getattr(function, "__globals__", None):
            frames.append(frame)
            frame = frame.f_back
        for outer in reversed(frames):
            local.update(outer.f_locals)
        return typing.get_type_hints(function, localns=local, include_extras=True)


def caller_frame(depth: int) -> pytypes.FrameType | None:
    """The frame `depth` calls above whoever asks."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
