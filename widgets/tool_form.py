"""A form that calls a tool as the model would. Knows nothing of the tool but its schema and `invoke`."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import Any, ClassVar

import traitlets

from ._base import View, count, escape, json_text, number, sendable, tag

_KEPT = 50
"""Results that are kept."""
_SHOWN = 60_000
"""Characters of an observation in the static form and on the page."""


class ToolForm(View):
    """Fields from the tool's schema, a call, and exactly the text that the model would see.

    tool: a Tool, or a function with types and a docstring. task: a Task, for what the tool takes from it. pool: where
    its sandbox comes from; without one a sandbox is started for each call and closed after it. Of a pool it keeps no
    more than a weak reference, so that it is closed when nobody else has it.

    `await form.call(expression="2+3")` is the button; `form.result` and `form.results` are what came back;
    `form.fill(...)` fills the fields; `form.to_code()` gives the last call as a cell.
    Raises:  ToolSchemaError for a function that is no tool yet and cannot be one.
    """

    stem: ClassVar[str] = "tool_form"
    settable: ClassVar[frozenset[str]] = frozenset({"draft"})
    doable: ClassVar[frozenset[str]] = frozenset({"call", "cancel"})

    draft = traitlets.Unicode("{}").tag(sync=True)
    """The arguments as the model would write them: a JSON text, which need not be valid."""
    busy = traitlets.Bool(False).tag(sync=True)
    _about = traitlets.Dict().tag(sync=True)
    _result = traitlets.Dict().tag(sync=True)

    def __init__(self, tool: Any, pool: Any = None, task: Any = None) -> None:
        from agentfly_kit.tools import Tool
        from agentfly_kit.tools import tool as make
        from agentfly_kit.types import Task

        self.tool: Tool[..., Any] = tool if isinstance(tool, Tool) else make(tool)
        self.tool.need_instance()
        if pool is not None and not callable(getattr(pool, "acquire", None)):
            raise TypeError(f"pool={pool!r}: give an af.Pool, or None for a sandbox a call")
        if task is not None and not isinstance(task, Task):
            raise TypeError(f"task={task!r}: give a Task, such as tasks[0]")
        self._pool = weakref.ref(pool) if pool is not None else None
        self._task = task
        self.results: list[tuple[Any, Any]] = []
        """(arguments, ToolResult) of the last calls, oldest first."""
        self._call: asyncio.Future[Any] | None = None
        super().__init__(None, _about=_about(self.tool, pool, task))

    # --- calling ---

    async def call(self, **arguments: Any) -> Any:
        """Call the tool as the model would, and show it. Gives the ToolResult."""
        self.fill(**arguments)
        return await self._invoke(arguments)

    def fill(self, **arguments: Any) -> None:
        """Put these into the fields. Nothing is called."""
        self.draft = json_text(arguments)

    async def _invoke(self, arguments: Any) -> Any:
        from agentfly_kit.context import throwaway
        from agentfly_kit.types import Task

        pool = None if self._pool is None else self._pool()
        if self._pool is not None and pool is None:
            raise RuntimeError("the pool is gone: keep it in a variable, and run the cell of this form again")
        task = self._task or Task("try", ({"role": "user", "content": ""},))
        self.busy = True
        try:
            async with throwaway(task, self.tool.sandbox_kinds, () if pool is None else (pool,)) as context:
                result = await self.tool.invoke(arguments, context)
        finally:
            self.busy = False
        self.results = [*self.results[-_KEPT + 1 :], (arguments, result)]
        self._show(arguments, result)
        return result

    def _show(self, arguments: Any, result: Any) -> None:
        error = result.error
        self._result = {
            "calls": self._result.get("calls", 0) + 1,
            "arguments": json_text(arguments),
            "ok": result.ok,
            "observation": sendable(result.observation[:_SHOWN]),
            "characters": len(result.observation),
            "seconds": result.seconds,
            "truncated": result.truncated,
            "done": result.done,
            "reward": None if result.reward is None else number(float(result.reward)),
            "metrics": [[sendable(str(k)), number(float(v))] for k, v in result.metrics.items()],
            "error": None if error is None else sendable(f"{error.type}: {error.message}"),
            "traceback": "" if error is None else sendable(error.traceback),
            "code": sendable(self.to_code()),
            "redefined": self.tool.redefined(),
        }

    async def _do_call(self, value: Any) -> None:
        if self.busy:
            raise RuntimeError("a call is running; cancel it, or wait for its end")
        text = str(value)
        self.draft = sendable(text)
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise ValueError(f"these arguments are no JSON, so nothing was called ({error})") from None
        if not isinstance(arguments, dict):
            raise ValueError("arguments are a JSON object: a name and a value for each, in braces")
        self._call = asyncio.current_task()
        try:
            await self._invoke(arguments)
        finally:
            self._call = None

    def _do_cancel(self, value: Any) -> None:
        if self._call is not None:
            self._call.cancel()

    # --- what came back ---

    @property
    def result(self) -> Any:
        """The last ToolResult; None before the first call."""
        return self.results[-1][1] if self.results else None

    def to_code(self) -> str:
        """The last call as a line for a cell; before the first call that of the fields."""
        if self.results:
            arguments = self.results[-1][0]
        else:
            try:
                arguments = json.loads(self.draft)
            except ValueError:
                arguments = {}
        given = [f"{k}={v!r}" if k.isidentifier() else f"**{{{k!r}: {v!r}}}" for k, v in dict(arguments).items()]
        more = [f"{name}={name}" for name, has in (("pool", self._pool), ("task", self._task)) if has is not None]
        return f"await {self.tool.__name__}.try_({', '.join([*given, *more])})"

    def __repr__(self) -> str:
        return f"ToolForm({self.tool.name}, {count(self._result.get('calls', 0), 'call')})"

    def _static(self) -> str:
        return _page(self._about, self._result)


def _about(tool: Any, pool: Any, task: Any) -> dict[str, Any]:
    schema = tool.schema["function"]
    asks = []
    for name, ask in tool._hidden.items():
        if ask.what == "sandbox":
            source = "from the pool" if pool is not None else "a new one for each call"
            asks.append(f"{name}: {ask.kind.__name__}, {source}")
        elif ask.what == "field":
            there = task is not None and name in task.fields
            asks.append(f"{name}: from the task" + ("" if there else ", which has none" if task else ": give task="))
        else:
            asks.append(f"{name}: the context")
    return {
        "name": sendable(tool.name),
        "description": sendable(schema["description"]),
        "parameters": json.loads(sendable(json_text(schema["parameters"]))),
        "schema": sendable(json.dumps(tool.schema, indent=2, ensure_ascii=False)),
        "hidden": [sendable(text) for text in asks],
        "timeout": tool.timeout,
        "max_chars": tool.max_chars,
    }


def outcome(result: dict[str, Any]) -> str:
    """What happened, in a line."""
    if result["ok"]:
        head = "✓ ok"
    elif result["error"] is None:
        head = "✗ failed, and the model is told why"
    else:
        head = "✗ failed on our side: the model is told only that it failed"
    parts = [head, f"{result['seconds']:.3f} s", count(result["characters"], "character")]
    parts += ["truncated"] if result["truncated"] else []
    parts += ["ends the chain"] if result["done"] else []
    parts += [f"turn reward {result['reward']}"] if result["reward"] is not None else []
    return " · ".join([*parts, *(f"{name} {value}" for name, value in result["metrics"])])


def _page(about: dict[str, Any], result: dict[str, Any]) -> str:
    head = tag("div", tag("b", escape(f"ToolForm {about['name']}")), escape(f" · {about['description'][:600]}"))
    names = about["parameters"].get("properties", {})
    needed = about["parameters"].get("required", [])
    fields = ", ".join(f"{name}{'' if name in needed else ' (optional)'}" for name in names)
    out = [head, tag("div", escape(f"arguments: {fields or 'none'}"))]
    if not result:
        out.append(tag("div", "Not called yet. Run the cell to use the form."))
        return tag("div", *out, style="line-height:1.5")
    text = result["observation"]
    shown = text[:12_000]
    out.append(tag("div", escape(f"{result['arguments'][:2000]} → {outcome(result)}"), style="margin-top:6px"))
    if result["error"]:
        out.append(tag("div", escape(result["error"][:2000])))
    out.append(
        tag(
            "div", escape(shown) or "(an empty text)",
            style="white-space:pre-wrap;font-family:monospace;border-left:4px solid #4a9a6a;padding-left:8px",
            title="what the model sees",
        )
    )  # fmt: skip
    if len(text) > len(shown):
        out.append(tag("div", f"{len(text) - len(shown):,} characters are left out of this static form."))
    return tag("div", *out, style="line-height:1.5")
