"""Display of objects in notebooks and terminals."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
import reprlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

# Interval in seconds at which `show_progress` updates its text.
_PROGRESS_SECONDS = 1.0


class _ShortRepr(reprlib.Repr):
    """Short reprs of nested values, without memory addresses. Arrays and tensors appear as dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel, self.maxdict = 3, 6

    def repr_instance(self, value: Any, level: int) -> str:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            kind = str(value.dtype).removeprefix("torch.")
            return f"{kind} {tuple(value.shape)}" if value.shape else f"{value:g}"
        # Memory addresses would make notebook outputs differ between runs.
        return re.sub(r" at 0x[0-9a-f]+", "", super().repr_instance(value, level))

    repr_Tensor = repr_ndarray = repr_instance  # reprlib finds these methods by type name


_SHORT_REPR = _ShortRepr()


def printable(text: str) -> str:
    """Return text from models and tools in a form that is safe to print. Newlines and tabs are kept.

    Other control characters, which a terminal would interpret, invisible characters, text-direction controls and lone
    surrogates are shown as code points.
    """
    return "".join(ch if ch.isprintable() or ch in "\n\t" else f"‹U+{ord(ch):04X}›" for ch in text)


def shorten(text: str, limit: int) -> str:
    """Truncate a text to `limit` characters, including three dots at the end, if it is longer."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short_repr(value: Any) -> str:
    """Return a repr of at most 403 characters, even for large collections, arrays and objects whose repr fails."""
    return shorten(_SHORT_REPR.repr(value), 403)


def public_values(value: Any) -> dict[str, Any]:
    """Return an object's public attributes or, for a dataclass, the repr fields that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    fields = [(f, getattr(value, f.name, None)) for f in dataclasses.fields(value) if f.repr and f.name[0] != "_"]
    return {f.name: each for f, each in fields if not _is_default(each, f.default)}


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return True
    if isinstance(value, bool | int | float | str | tuple | list | dict):  # other comparisons may be slow or fail
        return (not value and not isinstance(value, bool | int | float)) or value == default
    return value is None


def _bounded(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """Wrap a `__repr__` method to shorten long results, and to use the repr of `Displayable` if it raises."""

    @functools.wraps(method)
    def wrapper(self: Any) -> str:
        try:
            text = method(self)
        except Exception:
            text = Displayable.__repr__(self)
        if len(text) <= 400:
            return text
        lines = text.split("\n", 40)
        return "\n".join(line if len(line) <= 400 else line[:400] + "..." for line in lines[:40])

    return wrapper


def load_html() -> Any:
    """Return the module that defines `to_html`. `__init__.py` sets it, because this layer imports no other."""
    raise NotImplementedError


class Displayable:
    """Base class of objects with a text repr of bounded length and an HTML repr in notebooks.

    The repr of a dataclass with `repr=False` shows the fields that differ from their defaults. The HTML repr is created
    by `agentfly_kit.integrations.html`, which is imported when an object is first displayed.
    """

    __slots__ = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__repr__" in cls.__dict__:
            cls.__repr__ = _bounded(cls.__dict__["__repr__"])  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_SHORT_REPR.repr(value)}" for name, value in public_values(self).items())
        return f"{type(self).__name__}({shown if len(shown) <= 600 else shown[:600] + '...'})"

    def _repr_html_(self) -> str:
        return str(load_html().to_html(self))


def explain_interrupt(error: BaseException, text: str) -> None:
    """Set the message of an interrupt exception, and make IPython show it with the traceback of `user_traceback`.

    The exception is modified rather than replaced, because `asyncio.timeout` in Python 3.11 handles CancelledError
    but not its subclasses.
    """
    error.args = (text,)
    error._render_traceback_ = lambda: user_traceback(error)  # type: ignore[attr-defined]


@contextlib.contextmanager
def show_progress(describe: Callable[[], str], result: Callable[[], str] | None = None) -> Iterator[None]:
    """Context manager that shows a line of text in a notebook or terminal while the block runs, and then removes it.

    Nothing is shown for the first second. The line is not part of the saved outputs of a notebook.

    Args:
        describe: Function that returns the text, such as "loading torch, about 10 s". It is called every second.
        result: Function that returns a text, which replaces the line after a successful block and stays visible.
    """
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    notebook = hasattr(shell, "kernel")
    if not notebook and (sys.stderr is None or not sys.stderr.isatty()):
        yield
        return
    done, shown, display_id = threading.Event(), threading.Event(), uuid.uuid4().hex

    def show(text: str) -> None:
        if notebook:
            data = {"text/plain": text} if text else {}
            shell.display_pub.publish(data, transient={"display_id": display_id}, update=shown.is_set())
        else:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        shown.set()

    def repeat() -> None:
        while not done.wait(_PROGRESS_SECONDS):
            show(describe())

    # Copy the context so that output of the thread appears below the running cell.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(repeat,), daemon=True)
    thread.start()
    last = ""
    try:
        yield
        last = result() if result else ""
    finally:
        done.set()
        thread.join()
        if last or shown.is_set():
            show(last if notebook or not last else f"{last}\n")


class Tensors(dict[str, Any], Displayable):
    """Dict of tensors. The repr shows dtypes and shapes instead of values."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {_SHORT_REPR.repr(value)}" for key, value in self.items()) + "}"


def user_traceback(error: BaseException) -> list[str]:
    """Return IPython's traceback with only the frames of user code, or with all frames after `%xmode Verbose`."""
    import asyncio
    import types
    from pathlib import Path

    import IPython

    modules = (sys.modules["agentfly_kit"], asyncio, IPython)
    hidden = ("<string>", *(str(Path(module.__file__).parent) for module in modules if module.__file__))
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(step)
        step = step.tb_next
    formatter: Any = IPython.get_ipython().InteractiveTB
    kept = None
    for frame in reversed(frames):
        if formatter.mode == "Verbose" or not frame.tb_frame.f_code.co_filename.startswith(hidden):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    lines: list[str] = formatter.structured_traceback(type(error), error, kept, tb_offset=0)
    return lines
