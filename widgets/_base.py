"""Base classes of the widgets. They load JavaScript, render static HTML and limit the rate of updates.

A view stores numbers as bytes and has only a weak reference to the displayed record, so it does not keep a rollout
alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import sys
import uuid
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anywidget
import traitlets
from ipywidgets import widget_serialization
from ipywidgets.widgets.widget import _instances

from ._format import sendable
from ._saved import WIDGET_MIME, current_cell, forget_output, is_headless, update_after_each_cell
from ._throttle import Throttle

Found = TypeVar("Found")

HERE = Path(__file__).parent
# Maximum size of a view's static HTML in bytes. It keeps notebooks with many views below one megabyte.
STATIC_LIMIT = 100_000
# Minimum number of seconds between two updates of the picture saved in a notebook.
_PICTURE_SECONDS = 2.0


def source(stem: str, suffix: str) -> str:
    """Return the shared source and the source of the widget `stem` as one text, because widgets cannot import files."""
    parts = [HERE / f"_shared.{suffix}", HERE / f"{stem}.{suffix}"]
    return "\n".join(path.read_text(encoding="utf-8") for path in parts if path.exists())


def require(found: Found | None, what: str) -> Found:
    """Return an object to which a view has only a weak reference. Raise LookupError if it no longer exists."""
    if found is None:
        raise LookupError(f"{what} no longer exists; keep it in a variable")
    return found


class Static:
    """Static HTML form of a view, which a notebook can show without a kernel."""

    def __init__(self, text: str, page: str) -> None:
        self.text = text
        self.page = page

    def __repr__(self) -> str:
        return f"Static({self.text})"

    def _repr_html_(self) -> str:
        return self.page


# The view whose action is running. Views that the action creates belong to the same notebook cell.
_acting: contextvars.ContextVar[View | None] = contextvars.ContextVar("acting", default=None)


def _marimo_cell() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that creates a context manager for re-entering the current marimo cell, if there is one.

    A click may create a view while no cell is running. Without this context manager, marimo 0.25 then raises an
    AssertionError, because it registers the source of a widget with the running cell.
    """
    runtime: Any = sys.modules.get("marimo._runtime.context")
    context = runtime and runtime.safe_get_context()
    if context is None or context.cell_id is None or not hasattr(context, "with_cell_id"):
        return contextlib.nullcontext
    return functools.partial(context.with_cell_id, context.cell_id)


class View(anywidget.AnyWidget):
    """Base class of the widgets. Subclasses set `stem` and implement `_static` and `__repr__`.

    Errors raised in a callback are shown on the page through `_notice`.

    A view is closed when no references to it are left. A displayed view stays alive until the cells that displayed it
    run again, so that pages opened later can show it.

    Attributes:
        settable: The traits that the browser page may set.
        actions: The actions that the page may request with `context.ask(name, value)`. An action calls the method
            `_do_<name>(value)`, which may be async.
        is_open: True while at least one page shows the view. This is not a synced trait.
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
        self._display_ids: list[str] = []
        # Pairs (cell, id of the execution that displayed the view) for the outputs that contain the view; see
        # `current_cell`.
        self._cells: set[tuple[str, str]] = set()
        self._replaced = False  # True if all outputs that contained the view were replaced
        # True if the cell that displayed the view was run by a program without a page, such as nbclient.
        self._headless = False
        # True if the view has changed since its picture was last written to an output or sent to a page.
        self._picture_stale = False
        view = weakref.ref(self)
        self._picture_throttle = Throttle(lambda: _call(view, "_update_picture"), _PICTURE_SECONDS)
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        try:
            self._record: Callable[[], Any] = weakref.ref(record)
        except TypeError:  # lists and None do not support weak references
            self._record = lambda: None
        opener = _acting.get()
        self._in_own_cell: Callable[[], contextlib.AbstractContextManager[Any]] = (
            _marimo_cell() if opener is None else opener._in_own_cell
        )
        with self._in_own_cell():
            super().__init__(**traits)
        for widget in (self, self.layout):  # ipywidgets would keep view and layout alive until closed
            widget.comm.on_msg(functools.partial(_call, weakref.ref(widget), "_handle_msg"))
        self._release()
        self.on_msg(functools.partial(_call, view, "_on_message"))
        self.observe(functools.partial(_call, view, "_mark_changed"))

    def _hold(self) -> None:
        """Keep the view alive for pages that are opened later, unless the outputs of the view were replaced."""
        if not self._replaced:
            _instances.update({widget.model_id: widget for widget in (self, self.layout)})

    def _release(self) -> None:
        for widget in (self, self.layout):
            _instances.pop(widget.model_id, None)

    def _forget_runs_before(self, cell: str, run: str) -> None:
        """Release the view if it was displayed only by runs of `cell` before the run with the id `run`."""
        left = {each for each in self._cells if each[0] != cell or each[1] == run}
        if self._cells and not left:
            self._replaced = True
            self._release()
            forget_output(self)
        self._cells = left

    @property
    def record(self) -> Any:
        """The record shown, or None if it has been garbage-collected."""
        return self._record()

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("page"), str):
            return
        message_type, page = content.get("kind"), content["page"]
        if message_type == "set":
            self._set_trait(content.get("name"), content.get("value"), page)
        elif message_type == "do":
            self._handle_action(content.get("name"), content.get("value"), content.get("n"))
        elif message_type == "open":
            self._pages.add(page)
            self._seen = True
            self._hold()
        elif message_type == "close":
            self._pages.discard(page)
        was_open, self.is_open = self.is_open, bool(self._pages)
        if self.is_open and not was_open:
            self._on_first_page()
        elif was_open and not self.is_open:
            self._on_last_page_closed()

    def _set_trait(self, name: Any, value: Any, page: str) -> None:
        """Set a trait as requested by the page. If the value is rejected, keep the old value and show the error."""
        if name not in self.settable:
            return
        try:
            # Do not send an accepted value back, because the page may have changed it in the meantime.
            with self._lock_property(**{name: value}):
                setattr(self, name, value)
            if len(self._pages) > 1:  # other browsers may show the view
                self.send({"kind": "set", "page": page, "name": name, "value": self.get_state([name])[name]})
        except (ValueError, TypeError, traitlets.TraitError) as error:
            self._notice = sendable(str(error))
            self.send_state(name)

    def _handle_action(self, name: Any, value: Any, click: Any = None) -> None:
        """Run an action on the event loop in which the view was created, since messages may arrive on another thread.

        The message id `click` is sent back when the action begins, to tell the page that the kernel responds.
        """
        if name not in self.actions:
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            self._notice = (
                f"{name}: no event loop was running when the view was created; create it in a notebook cell"
            )
            return
        loop.call_soon_threadsafe(self._run_handler, getattr(self, f"_do_{name}"), value, click)

    def _run_handler(self, handler: Callable[[Any], Any], value: Any, click: Any) -> None:
        if click is not None and self.comm is not None:
            self.send({"kind": "begun", "click": click})
        self._notice = ""
        _acting.set(self)
        try:
            result = handler(value)
        except Exception as error:
            self._failed(error)
        else:
            if inspect.isawaitable(result):
                self._job(result)

    def _job(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run `work` as a task, keep the task alive until it is done, and show any exception on the page."""
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
        if hasattr(self, "_picture_throttle"):
            self._update_picture()
            self._picture_throttle.close()
        layout = self.layout if self.comm is not None else None
        super().close()
        if layout is not None:
            layout.close()

    def _on_first_page(self) -> None:
        """Override this to act when a page opens the view while no other page shows it."""

    def _after_cell(self) -> None:
        """Override this to act after each cell."""

    def _on_last_page_closed(self) -> None:
        """Override this to act when the last page that shows the view is closed."""

    def _static(self) -> str:
        raise NotImplementedError

    def freeze(self) -> Static:
        """Return the current static form of the view, for saved notebooks and printed pages."""
        return Static(repr(self), self._static())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- the picture in a saved notebook ---

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        page = self._static()
        assert len(page.encode()) <= STATIC_LIMIT, f"the static form of {self!r} is over {STATIC_LIMIT:,} bytes"
        if self.comm is None:  # the view is closed
            return {"text/plain": repr(self), "text/html": page}, {}
        self._hold()
        live: Any = super()._repr_mimebundle_(**kwargs)
        data = {**live[0], "text/html": page}
        if self._headless:
            data.pop(WIDGET_MIME, None)
        # `keepPictures` in _shared.js uses this metadata to find the view's outputs, save them as pictures, and restore
        # the live view if its kernel is still running.
        return data, {**live[1], "agentfly_kit": {"view": self.model_id}}

    def _repr_html_(self) -> str | None:
        return self._static() if self.comm is None else None

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not self._display_ids:
            update_after_each_cell(self)
        self._cells.add(current_cell())
        self._replaced = False
        # Use a new id for each output, because an output with a used id would replace the earlier outputs.
        self._display_ids.append(uuid.uuid4().hex)
        self._picture_stale = False
        self._headless = is_headless()
        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True, display_id=self._display_ids[-1])  # type: ignore[no-untyped-call]

    def _mark_changed(self, _: Any = None) -> None:
        if self._display_ids:
            self._picture_stale = True
            if self._pages:
                self._picture_throttle.schedule()

    def _update_picture(self) -> None:
        """Update the picture saved in the notebook if the view has changed. On an error, keep the last picture."""
        # Pages that showed the view and are closed may be opened again.
        if not self._picture_stale or self.comm is None or (self._seen and not self._pages):
            return
        self._picture_stale = False
        try:
            if self._pages or not self._headless:
                # Let the page save the picture. If the output were updated, JupyterLab would show the view twice.
                self.send({"kind": "picture", "view": self.model_id, "html": self._static()})
            else:
                # No page shows the view. Update the outputs, which are saved by the program that runs the notebook.
                from IPython.display import display

                data, metadata = self._repr_mimebundle_()
                for each in self._display_ids:
                    display(data, metadata=metadata, raw=True, display_id=each, update=True)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._failed(error)  # for example, because the run folder was removed


def _call(view_ref: Callable[[], Any], method: str, *arguments: Any) -> None:
    view = view_ref()
    if view is not None:
        getattr(view, method)(*arguments)


class Opener(View):
    """View that can show a second view below itself. The second view is closed together with this view."""

    _below = traitlets.Any(None, allow_none=True).tag(sync=True, **widget_serialization)

    @property
    def opened(self) -> Any:
        """The view shown below this one, or None."""
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
    """Callback for changes of a record. Views must not refer to it, because its function `end` refers to the record."""

    def __init__(self, view: LiveView, throttle: Throttle) -> None:
        self.view = weakref.ref(view)
        self.throttle = throttle
        self.end: Callable[[], Any] = lambda: None

    def __call__(self, *_: Any) -> None:
        view = self.view()
        if view is not None and not view.resting:
            self.throttle.schedule()
            view._picture_stale = bool(view._display_ids)


class LiveView(View):
    """A view of a changing record. `subscribe(callback)` is called once and must return a function to unsubscribe.

    The view has only weak references to the record and to the listener registered with it, so a view never keeps a
    pool's sandboxes open. Updates stop while all pages that showed the view are closed.
    """

    def __init__(self, record: Any, subscribe: Callable[[Callable[..., None]], Callable[[], Any]] | None) -> None:
        super().__init__(record)
        throttle = self._throttle = Throttle(functools.partial(_call, weakref.ref(self), "_refresh_safely"))
        listener = _Listener(self, throttle)
        if subscribe is not None:
            listener.end = subscribe(listener)
        # `_end` runs once, when the view is closed or garbage-collected, or when Python exits.
        self._end = weakref.finalize(self, _end, weakref.ref(listener), throttle)

    @property
    def updates(self) -> int:
        """Number of updates sent so far. One update may cover many events."""
        return self._throttle.sent

    @property
    def resting(self) -> bool:
        """True if a page has shown the view before but no page shows it now."""
        return self._seen and not self._pages

    def refresh(self) -> None:
        """Send the current state to the page immediately."""
        raise NotImplementedError

    def _refresh_safely(self) -> None:
        try:
            self.refresh()
        except Exception as error:
            self._failed(error)  # an exception in a timer or loop callback would not be shown

    def _on_first_page(self) -> None:
        self._refresh_safely()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._refresh_safely()  # ensures that the cell's output contains the current state
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
