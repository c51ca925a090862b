"""What every view shares: its source, its static form, its life, and a limit on how often it sends.

A view keeps numbers as bytes and a weak reference to the record they came from: showing a rollout does not keep it
alive. It knows nothing of any one record.
"""

from __future__ import annotations

import asyncio
import html
import inspect
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import numpy as np
import numpy.typing as npt
import traitlets
from ipywidgets import widget_serialization

from agentfly_kit._html import escape_control_chars as escape_control_chars

HERE = Path(__file__).parent
# Bytes of a static form; a notebook of many views stays under a megabyte.
STATIC_LIMIT = 100_000
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


def source(stem: str, suffix: str) -> str:
    """A widget's own source after the shared one: an ES module given as text cannot import a sibling."""
    parts = [HERE / f"_shared.{suffix}", HERE / f"{stem}.{suffix}"]
    return "\n".join(path.read_text(encoding="utf-8") for path in parts if path.exists())


# --- numbers and text on their way to the page ---------------------------------------------------


def pack(values: npt.ArrayLike) -> dict[str, bytes]:
    """float32 bytes and one bit a value that says whether it is there.

    NaN is missing. JSON has no NaN, and a missing number must never become 0 on the way: the bits say what is missing,
    whatever the float holds.
    """
    array = np.asarray(values, dtype=np.float32).ravel()
    present = ~np.isnan(array)
    return {
        "values": np.where(present, array, np.float32(0)).astype("<f4").tobytes(),
        "present": np.packbits(present, bitorder="little").tobytes(),
    }


def number(value: float | None) -> str:
    """A number as every view writes it; a dash for a missing one."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        return np.format_float_positional(value, 4, fractional=False, trim="-").replace("-", "−")
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def count(n: int, noun: str, plural: str = "") -> str:
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


def tag(name: str, *content: str, **attributes: str) -> str:
    """An HTML element. Attributes are escaped here; content is HTML already, so text goes through `escape` first."""
    inside = "".join(f' {key}="{html.escape(value, quote=True)}"' for key, value in attributes.items())
    return f"<{name}{inside}>{''.join(content)}</{name}>"


def escape(text: str) -> str:
    """Text for HTML and for UTF-8: a lone surrogate cannot be sent at all, so it is shown as its number."""
    safe = "".join(f"\\u{ord(ch):04x}" if 0xD800 <= ord(ch) <= 0xDFFF else ch for ch in text)
    return html.escape(safe.replace("\x00", "␀"), quote=True)


def sendable(text: str) -> str:
    """Text that every JSON and UTF-8 encoder on the way takes: lone surrogates become their number."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_text(value: Any) -> str:
    """JSON for people, which can also be sent: half of a surrogate pair is written as its escape."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text == sendable(text) else json.dumps(value, default=str)


def shared_prefix(names: list[str]) -> int:
    """Letters at the beginning of all names that need not be read again and again: "rollout-0:calc-"."""
    if len(names) < 2:
        return 0
    first, last = min(names), max(names)  # what these two share, all share
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(first.rfind(":", 0, n), first.rfind("-", 0, n)) + 1


# --- how often -----------------------------------------------------------------------------------


class Throttle:
    """Calls `send` soon after `schedule`, at most once in `seconds`; after the last one there is always one more call.

    `schedule` may come from any thread, thousands of times a second. In a thread with a running event loop the call is
    made on that loop, where the record can be read without tearing; elsewhere a timer thread makes it.
    """

    def __init__(self, send: Callable[[], None], seconds: float = 0.1) -> None:
        self.send = send
        self.seconds = seconds
        self.sent = 0
        self._lock = threading.Lock()
        self._next = 0.0
        self._planned: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def schedule(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._closed or (self._planned is not None and not self._stuck(now)):
                return
            try:
                loop = asyncio.get_running_loop() if self._planned is None else None
            except RuntimeError:
                loop = None
            delay = max(0.0, self._next - now)
            self._planned, self._loop = now + delay, loop
            if loop is not None:
                loop.call_later(delay, self._fire)
                return
        timer = threading.Timer(delay, self._fire)
        timer.daemon = True
        timer.start()

    def _stuck(self, now: float) -> bool:
        """A loop that was closed, or is kept busy by a blocking cell, will not make the call that was planned on it."""
        loop = self._loop
        if loop is None or self._planned is None:
            return False
        return loop.is_closed() or not loop.is_running() or now > self._planned + 2 * self.seconds + 0.2

    def _fire(self) -> None:
        with self._lock:
            if self._closed or self._planned is None:
                return
            # Cleared before the call: one that comes while sending plans the next one, so the last state is sent.
            self._planned = None
            self._next = time.monotonic() + self.seconds
        self.sent += 1
        self.send()

    def close(self) -> None:
        with self._lock:
            self._closed = True


# --- views ---------------------------------------------------------------------------------------


class Static:
    """The picture of a view without the view: what a notebook shows to a reader who has no kernel."""

    def __init__(self, text: str, page: str) -> None:
        self.text = text
        self.page = page

    def __repr__(self) -> str:
        return f"Static({self.text})"

    def _repr_html_(self) -> str:
        return self.page


class View(anywidget.AnyWidget):
    """Base of the widgets. A subclass sets `stem`, and gives `_static` and `__repr__`.

    `is_open` is true while a page shows the view. Errors in a callback are put on the page (`_notice`) and kept.

    Attributes:
        settable: The traits that a page may set.
        actions: What a page may ask for by `context.ask(name, value)`: the method `_do_<name>(value)`, plain or async.
        is_open: Not synced: set from the pages' own messages.
    """

    stem: ClassVar[str] = ""
    settable: ClassVar[frozenset[str]] = frozenset()
    actions: ClassVar[frozenset[str]] = frozenset()

    is_open = traitlets.Bool(False)
    _notice = traitlets.Unicode("").tag(sync=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "stem" in cls.__dict__:
            cls._esm = source(cls.stem, "js")
            cls._css = source(cls.stem, "css")
        super().__init_subclass__(**kwargs)

    def __init__(self, record: Any = None, **traits: Any) -> None:
        self._pages: set[str] = set()
        self._seen = False
        self._jobs: set[asyncio.Future[Any]] = set()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        try:
            self._record: Callable[[], Any] = weakref.ref(record)
        except TypeError:  # a list or None cannot be referred to weakly, and must not be kept
            self._record = lambda: None
        super().__init__(**traits)
        self.on_msg(self._on_message)

    @property
    def record(self) -> Any:
        """What is shown, or None when nothing else keeps it."""
        return self._record()

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("page"), str):
            return
        message_type, page = content.get("kind"), content["page"]
        if message_type == "set":
            self._set_trait(content.get("name"), content.get("value"))
            return
        if message_type == "do":
            self._handle_action(content.get("name"), content.get("value"))
            return
        if message_type == "open":
            self._pages.add(page)
            self._seen = True
        elif message_type == "close":
            self._pages.discard(page)
        was_open, self.is_open = self.is_open, bool(self._pages)
        if self.is_open and not was_open:
            self._on_first_page()
        elif was_open and not self.is_open:
            self._on_last_page_closed()

    def _set_trait(self, name: Any, value: Any) -> None:
        """A trait that the page set; what Python refuses goes back as it was, and the page says why."""
        if name not in self.settable:
            return
        try:
            # Not sent back where it is as the page put it: the page may have moved on meanwhile.
            with self._lock_property(**{name: value}):
                setattr(self, name, value)
        except (ValueError, TypeError, traitlets.TraitError) as error:
            self._notice = sendable(str(error))
            self.send_state(name)

    def _handle_action(self, name: Any, value: Any) -> None:
        """Do what the page asks, on the loop in which the view was made: messages may arrive in another thread."""
        if name not in self.actions:
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            self._notice = f"{name}: no event loop runs where this view was made; make it in a notebook's cell"
            return
        loop.call_soon_threadsafe(self._run_handler, getattr(self, f"_do_{name}"), value)

    def _run_handler(self, handler: Callable[[Any], Any], value: Any) -> None:
        self._notice = ""
        try:
            result = handler(value)
        except Exception as error:
            self._failed(error)
            return
        if inspect.isawaitable(result):
            self._job(result)

    def _job(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run it beside the cells. It is kept until it ends, and what it raises is shown on the page."""
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._job_ended)
        return job

    def _job_ended(self, job: asyncio.Future[Any]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._notice = sendable(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for job in list(getattr(self, "_jobs", ())):
            job.cancel()
        super().close()

    def _on_first_page(self) -> None:
        """The first page shows the view."""

    def _on_last_page_closed(self) -> None:
        """The last page is gone; one that opens later calls `_on_first_page` again."""

    def _static(self) -> str:
        raise NotImplementedError

    def freeze(self) -> Static:
        """The static form alone: what a saved notebook or a printed page can show. It does not change any more."""
        return Static(repr(self), self._static())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        page = self._static()
        assert len(page.encode()) <= STATIC_LIMIT, f"the static form of {self!r} is over {STATIC_LIMIT:,} bytes"
        live: Any = super()._repr_mimebundle_(**kwargs)
        return {**live[0], "text/html": page}, live[1]

    def _repr_html_(self) -> str | None:
        # ipywidgets takes the bundle of a closed widget away; what stays to be seen is the picture.
        return self._static() if self.comm is None else None


class Opener(View):
    """A view that opens another below itself. That one is closed with this one, or when another takes its place."""

    _below = traitlets.Any(None, allow_none=True).tag(sync=True, **widget_serialization)

    @property
    def opened(self) -> Any:
        """The view that the page shows below this one, or None."""
        return self._below

    def _show_below(self, view: View | None) -> None:
        old, self._below = self._below, view
        if old is not None:
            old.close()

    def _do_leave(self, _: Any) -> None:
        self._show_below(None)

    def close(self) -> None:
        if self._below is not None:
            self._below.close()
        super().close()


class _Listener:
    """What a record calls. Kept by the record alone: `end` may hold the record, and the view must not."""

    def __init__(self, view: LiveView, throttle: Throttle) -> None:
        self.view = weakref.ref(view)
        self.throttle = throttle
        self.end: Callable[[], Any] = lambda: None

    def __call__(self, *_: Any) -> None:
        view = self.view()
        if view is not None and not view.resting:
            self.throttle.schedule()


class LiveView(View):
    """A view of something that changes. `subscribe(callback)` is called once and gives the way to end it.

    The record holds the listener, the listener holds the view weakly, the view holds both weakly: a view that is
    forgotten does not keep a pool's sandboxes open. Nothing is sent while every page that showed the view is closed.
    """

    def __init__(self, record: Any, subscribe: Callable[[Callable[..., None]], Callable[[], Any]] | None) -> None:
        super().__init__(record)
        view_ref = weakref.ref(self)

        def refresh() -> None:
            view = view_ref()
            if view is not None:
                view._refresh_safely()

        throttle = self._throttle = Throttle(refresh)
        listener = _Listener(self, throttle)
        if subscribe is not None:
            listener.end = subscribe(listener)
        # Runs once: when the view is closed, or when it is collected, or when Python ends.
        self._end = weakref.finalize(self, _end, weakref.ref(listener), throttle)

    @property
    def updates(self) -> int:
        """How many changes were sent so far; many events make one."""
        return self._throttle.sent

    @property
    def resting(self) -> bool:
        """It was on a page, and no page shows it now."""
        return self._seen and not self._pages

    def refresh(self) -> None:
        """Send the present state now."""
        raise NotImplementedError

    def _refresh_safely(self) -> None:
        try:
            self.refresh()
        except Exception as error:
            self._failed(error)  # in a timer or a loop's callback nobody would see it

    def _on_first_page(self) -> None:
        self._refresh_safely()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._refresh_safely()  # what is saved with the cell is the state of now, not that of the last update
        return super()._repr_mimebundle_(**kwargs)

    def close(self) -> None:
        end = getattr(self, "_end", None)
        if end is not None:
            end()
        super().close()


def _end(listener: Callable[[], _Listener | None], throttle: Throttle) -> None:
    throttle.close()
    alive = listener()
    if alive is not None:
        alive.end()
