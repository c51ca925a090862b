"""A user's function: its source, its fingerprint, and a call that neither blocks the event loop nor loses an exception.

Knows nothing of tools, rewards or chains.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import dis
import hashlib
import inspect
import itertools
import os
import sys
import textwrap
import threading
import time
import types as pytypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from agentfly_kit.types import Failure

T = TypeVar("T")
_count = itertools.count(1)

# --- calling -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one call gave: a value, or an error whose traceback begins in the function, or that it was late."""

    value: Any = None
    error: BaseException | None = None
    late: str = ""
    """"cancelled" (a coroutine) or "abandoned" (a thread, which nothing can stop) when the timeout passed."""
    seconds: float = 0.0


async def run(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout: float | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
) -> Outcome:
    """Call it and give back what happened; `convert` is applied to the value, its errors counting as the call's.

    A coroutine function runs on the event loop and is cancelled at the timeout. Any other runs in a daemon thread of
    its own, so that it blocks no other chain and a hung one cannot keep the process alive; at the timeout it is left.
    Raises:  CancelledError if the caller was cancelled, KeyboardInterrupt. Nothing else.
    """
    start = time.perf_counter()
    threaded = not inspect.iscoroutinefunction(function)
    value: Any = None
    error: BaseException | None = None
    limit = asyncio.timeout(timeout)

    def work() -> Any:
        got = function(**arguments)
        return got if inspect.isawaitable(got) else convert(got)

    try:
        async with limit:
            if threaded:
                value, error = await _in_thread(work)
                if error is None and inspect.isawaitable(value):  # a plain wrapper around a coroutine function
                    threaded = False
                    value = convert(await value)
            else:
                value = convert(await function(**arguments))
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        error = cancelled  # the function awaited something that was cancelled; nobody cancelled us
    except (Exception, SystemExit) as raised:
        error = raised
    seconds = time.perf_counter() - start
    if limit.expired() and error is not None:
        return Outcome(late="abandoned" if threaded else "cancelled", seconds=seconds)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return Outcome(value, None if error is None else _own(error, function), seconds=seconds)


async def _in_thread(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(outcome: tuple[T | None, BaseException | None]) -> None:
        if not future.done():
            future.set_result(outcome)

    def body() -> None:
        # A pair, because a future refuses StopIteration and a SystemExit would end the loop.
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (context.run(work), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed while an abandoned call ran on
            loop.call_soon_threadsafe(deliver, outcome)

    _on_a_thread(body)
    return await future


# Threads that wait for a next call. A new thread for every call cost more than most calls. A call that never ends keeps
# its thread, and the next call gets another.
_idle: list[SimpleQueue[Callable[[], None]]] = []
_threads: set[threading.Thread] = set()
_idle_lock = threading.Lock()
_IDLE_SECONDS = 2.0
_END_SECONDS, _END_TICKS = 0.25, 40
_ended = False


def _after_fork() -> None:
    """The child has none of these threads."""
    _idle.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def _on_a_thread(job: Callable[[], None]) -> None:
    with _idle_lock:
        queue = _idle.pop() if _idle else None
    if queue is None:
        queue = SimpleQueue()
        if not _threads:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        threading.Thread(target=_serve, args=(queue,), name=f"agentfly-call-{next(_count)}", daemon=True).start()
    queue.put(job)


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    thread = threading.current_thread()
    _threads.add(thread)
    try:
        while True:
            try:
                job = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                with _idle_lock:
                    if queue in _idle:
                        _idle.remove(queue)
                        return
                continue  # it was taken just now: a call is on its way
            job()
            del job  # what the call held is not held by a waiting thread
            with _idle_lock:
                if _ended:
                    return
                _idle.append(queue)
    finally:
        _threads.discard(thread)


def _end_all() -> None:
    """Python ends. A thread that comes out of C++ (torch, say) after that aborts the process, so all are told to go.

    One that is in Python, or comes back to it, goes at once. One that waits for something, or will not go, is left.
    """
    global _ended
    _ended = True
    with _idle_lock:
        while _idle:
            _idle.pop().put(sys.exit)
    left = [thread for thread in _threads if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for _ in range(_END_TICKS):
        spent, until = time.process_time(), time.monotonic() + _END_SECONDS
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread for thread in left if thread.is_alive()]
        if not left or time.process_time() - spent < 0.02 * _END_SECONDS:
            return  # what is left computes nothing: it waits


def _own(error: BaseException, function: Callable[..., Any]) -> BaseException:
    """The error with a traceback that begins in the function: the frames above it are ours and say nothing."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def failure(where: str, error: BaseException) -> Failure:
    """`Failure.of`, also for an exception whose own text cannot be made."""
    try:
        return Failure.of(where, error)
    except Exception as worse:
        return Failure(where, type(error).__name__, f"(its text cannot be made: {type(worse).__name__})")


# --- what a function is --------------------------------------------------------------------------


def source_of(function: Callable[..., Any]) -> str:
    """Its source text, notebook cells included; a hash of its code where no source is kept (`python -c`, `exec`)."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(inspect.unwrap(function), "__code__", None)
        return f"<no source; code {_digest(_code(code))}>" if code is not None else f"<no source; {function!r}>"


def fingerprint(function: Callable[..., Any], source: str, *more: str) -> str:
    """16 hex digits of what it does: source, constants that it closes over, functions of its module that it calls.

    Only values that cannot change in place count (numbers, texts, tuples): lists, dicts and objects may be state.
    """
    return _digest(source, *more, *_surroundings(function, set()))


def current(function: Callable[..., Any]) -> Any:
    """What the function's name means now, where it was defined; None if that cannot be known (a local function)."""
    plain = inspect.unwrap(function)
    value: Any = None
    for i, part in enumerate(plain.__qualname__.split(".")):
        value = plain.__globals__.get(part) if i == 0 else vars(value).get(part) if isinstance(value, type) else None
    return value


def _surroundings(function: Callable[..., Any], seen: set[int]) -> list[str]:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen:
        return []
    seen.add(id(function))
    cells = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False))
    lines = [f"defaults {_constant(function.__defaults__)} {_constant(function.__kwdefaults__)}"]
    for name in sorted(_names(code)):
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__[name]
        except (KeyError, ValueError):  # a builtin or an attribute; a cell not filled yet
            continue
        helper = getattr(value, "function", value)  # a tool or a reward wraps one
        if isinstance(helper, pytypes.FunctionType):
            if helper.__module__ == function.__module__:
                lines += [f"{name} is {source_of(helper)}", *_surroundings(helper, seen)]
        elif (text := _constant(value)) is not None:
            lines.append(f"{name} = {text}")
    return lines


def _names(code: pytypes.CodeType) -> set[str]:
    """The outer names that it reads; not `co_names`, where `x.answer` looks like a global `answer`."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    nested = (const for const in code.co_consts if isinstance(const, pytypes.CodeType))
    return read.union(code.co_freevars, *map(_names, nested))


def _constant(value: Any) -> str | None:
    """A text that is the same in every process, or None where there is none."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
        return repr(value)
    if isinstance(value, tuple | frozenset):
        parts = [_constant(part) or f"a {type(part).__qualname__}" for part in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return None


def _code(code: pytypes.CodeType) -> str:
    consts = [_code(c) if isinstance(c, pytypes.CodeType) else str(_constant(c)) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _digest(*texts: str) -> str:
    h = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        h.update(f"{len(data)}:".encode() + data)
    return h.hexdigest()


# --- annotations ---------------------------------------------------------------------------------


def hints(function: Callable[..., Any], frame: pytypes.FrameType | None) -> dict[str, Any]:
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


def frame_of_caller(depth: int) -> pytypes.FrameType | None:
    """The frame `depth` calls above whoever asks."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
