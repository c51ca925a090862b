"""Form that calls a tool as a model does, using only the tool's schema and its method `invoke`."""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import traitlets

from ._base import Opener, require
from ._format import count, escape, json_text, number, picture, pictures, sendable, tag
from .chain_stepper import ChainStepper

# Maximum number of results kept.
_KEPT = 50
# Maximum number of characters of an observation that are shown in the static form and on the page.
_SHOWN = 60_000


@dataclass(frozen=True)
class Call:
    """A call made with a form: its number (from 1), arguments, result, and the equivalent line of Python."""

    number: int
    arguments: Any
    result: Any
    code: str


class Calls:
    """Iterable of the calls made with a form; falsy if empty."""

    def __init__(self, tool: str, calls: Sequence[Call]) -> None:
        self.tool = tool
        self._calls = tuple(calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def to_frame(self) -> Any:
        """Return a data frame with one row per call: arguments, the model's observation, and the outcome.

        Missing numbers are NaN.
        """
        import pandas as pd

        rows = [
            {
                "call": c.number, "tool": self.tool, "arguments": json_text(c.arguments), "ok": c.result.ok,
                "observation": c.result.observation, "error": None if c.result.error is None else str(c.result.error),
                "seconds": c.result.seconds, "truncated": c.result.truncated, "done": c.result.done,
                "reward": math.nan if c.result.reward is None else float(c.result.reward), "code": c.code,
            } | {f"metric_{k}": float(v) for k, v in c.result.metrics.items()}
            for c in self._calls
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=None if rows else ["call", "tool", "arguments", "ok", "observation"])

    def __repr__(self) -> str:
        return f"Calls({self.tool}: {', '.join(str(c.number) for c in self) or 'none'})"


class ToolForm(Opener):
    """Form that is built from a tool's schema, calls the tool, and shows the exact text that a model would see.

    `await form.call(expression="2+3")` is equivalent to pressing the button. `form.fill(...)` only fills in the fields.
    `form.result` is the last result, and `form.results` contains all results. `form.selection` is the call shown, by
    default the last; `form.to_code()` returns the call as a line of code. `form.to_frame()` lists all calls.

    Args:
        tool: A Tool, or a function with type annotations and a docstring.
        pool: The pool that provides the tool's sandbox. Without a pool, a sandbox is started for each call and closed
            afterwards. The form has only a weak reference to the pool.
        task: The task that provides the tool's hidden parameters.
        agent: An agent that has this tool, needed by the "Open in a chain" button. The button starts a chain of the
            task with the call in the fields, and shows the chain in a ChainStepper, `form.opened`.

    Attributes:
        draft: The arguments as a JSON string, as a model would write them; not necessarily valid JSON.
        busy: True while a call runs.

    Raises:  ToolSchemaError if the function cannot be converted to a tool.
    """

    stem: ClassVar[str] = "tool_form"
    settable: ClassVar[frozenset[str]] = frozenset({"draft"})
    actions: ClassVar[frozenset[str]] = frozenset({"call", "cancel", "pick", "chain", "leave"})

    draft = traitlets.Unicode("{}").tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    _about = traitlets.Dict().tag(sync=True)
    # The call shown.
    _result = traitlets.Dict().tag(sync=True)
    # For each call kept: [number, abbreviated arguments, ok].
    _calls: traitlets.List[Any] = traitlets.List().tag(sync=True)

    def __init__(self, tool: Any, pool: Any = None, task: Any = None, *, agent: Any = None) -> None:
        from agentfly_kit.tools.tool import Tool
        from agentfly_kit.tools.tool import tool as make
        from agentfly_kit.types import Task

        self.tool: Tool[..., Any] = tool if isinstance(tool, Tool) else make(tool)
        self.tool.require_instance()
        if pool is not None and not callable(getattr(pool, "acquire", None)):
            raise TypeError(f"pool must be an af.Pool, or None for one sandbox per call, got {pool!r}")
        if task is not None and not isinstance(task, Task):
            raise TypeError(f"task must be a Task, such as tasks[0], got {task!r}")
        self._pool = weakref.ref(pool) if pool is not None else None
        self._task = task
        # For each call kept: (arguments, ToolResult), oldest first.
        self.results: list[tuple[Any, Any]] = []
        self._made = 0
        self._picked: int | None = None
        self._agent = agent
        self._call: asyncio.Future[Any] | None = None
        super().__init__(None, _about=_about(self.tool, pool, task) | {"agent": agent is not None})

    # --- calling ---

    async def call(self, **arguments: Any) -> Any:
        """Call the tool as a model does, show the call, and return the ToolResult."""
        self.fill(**arguments)
        return await self._invoke(arguments)

    def fill(self, **arguments: Any) -> None:
        """Fill in the fields without calling the tool."""
        self.draft = json_text(arguments)

    async def _invoke(self, arguments: Any) -> Any:
        from agentfly_kit.tools.context import temporary_context
        from agentfly_kit.types import Task

        pool = None if self._pool is None else require(self._pool(), "the pool")
        task = self._task or Task("try", ({"role": "user", "content": ""},))
        self.busy = True
        try:
            async with temporary_context(task, self.tool.sandbox_types, pool) as context:
                result = await self.tool.invoke(arguments, context)
        finally:
            self.busy = False
        self.results = [*self.results[-_KEPT + 1 :], (arguments, result)]
        self._made += 1
        self.select(self._made)
        return result

    def _show(self, call: Call) -> None:
        result, error = call.result, call.result.error
        self._result = {
            "calls": self._made,
            "number": call.number,
            "arguments": json_text(call.arguments),
            "ok": result.ok,
            "observation": sendable(result.observation[:_SHOWN]),
            "characters": len(result.observation),
            "images": pictures([{"content": result.images}]),
            "seconds": result.seconds,
            "truncated": result.truncated,
            "done": result.done,
            "reward": None if result.reward is None else number(float(result.reward)),
            "metrics": [[sendable(str(k)), number(float(v))] for k, v in result.metrics.items()],
            "error": None if error is None else sendable(f"{error.type}: {error.message}"),
            "traceback": "" if error is None else sendable(error.traceback),
            "code": sendable(call.code),
            "redefined": self.tool.redefined(),
        }
        self._calls = [[c.number, sendable(json_text(c.arguments))[:80], c.result.ok] for c in self._all()]

    async def _do_call(self, value: Any) -> None:
        if self.busy:
            raise RuntimeError("a call is running; cancel it or wait")
        text = str(value)
        self.draft = sendable(text)
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the arguments are not valid JSON, so nothing was called ({error})") from None
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be a JSON object with one entry per argument")
        self._call = asyncio.current_task()
        try:
            await self._invoke(arguments)
        finally:
            self._call = None

    def _do_cancel(self, value: Any) -> None:
        if self._call is not None:
            self._call.cancel()

    # --- selection ---

    def _all(self) -> list[Call]:
        first = self._made - len(self.results) + 1
        return [Call(first + i, a, result, self._line(a)) for i, (a, result) in enumerate(self.results)]

    @property
    def selection(self) -> Calls:
        """The call shown, with its result; empty before the first call."""
        return Calls(self.tool.name, [c for c in self._all() if c.number == self._picked])

    def to_frame(self) -> Any:
        """Return a data frame with one row per call kept, with the columns of `selection.to_frame()`."""
        return Calls(self.tool.name, self._all()).to_frame()

    def select(self, number: int) -> None:
        """Show an earlier call by its number, counted from 1, until the next call is made."""
        found = next((c for c in self._all() if c.number == number), None)
        if found is None:
            raise ValueError(
                f"call {number!r} does not exist; calls {self._made - len(self.results) + 1} to {self._made} are kept"
            )
        self._picked = number
        self._show(found)

    def _do_pick(self, value: Any) -> None:
        self.select(int(value))

    # --- in a chain ---

    def _do_chain(self, value: Any) -> None:
        """Start a chain that makes the tool call of the form, and open it in a ChainStepper."""
        from agentfly_kit.types import Task, ToolCall

        agent = self._agent
        call = ToolCall("call-0", self.tool.name, json.loads(str(value)))
        chain = agent.chain(self._task or Task("try", ({"role": "user", "content": ""},)))
        chain.force(agent.chat.format.render_call(call))
        self._show_below(ChainStepper(chain))

    # --- results ---

    @property
    def result(self) -> Any:
        """The last ToolResult; None before the first call."""
        return self.results[-1][1] if self.results else None

    def to_code(self) -> str:
        """Return the call shown as a line of code. Before the first call, use the arguments in the fields."""
        for call in self.selection:
            return call.code
        try:
            return self._line(json.loads(self.draft))
        except ValueError:
            return self._line({})

    def _line(self, arguments: Any) -> str:
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
    for name, injected in tool._hidden.items():
        if injected.source == "sandbox":
            source = "from the pool" if pool is not None else "a new one for each call"
            asks.append(f"{name}: {injected.sandbox_type.__name__}, {source}")
        elif injected.source == "field":
            there = task is not None and name in task.fields
            lacks = "" if there else ", which has no such field" if task else "; pass task="
            asks.append(f"{name}: from the task{lacks}")
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
    """Summarize a call's outcome in one line."""
    if result["ok"]:
        head = "✓ ok"
    elif result["error"] is None:
        head = "✗ failed, and the model sees the reason"
    else:
        head = "✗ failed with an error: the model sees only that the call failed"
    parts = [head, f"{result['seconds']:.3f} s", count(result["characters"], "character")]
    parts += ["truncated"] if result["truncated"] else []
    parts += ["ends the chain"] if result["done"] else []
    parts += [f"turn reward {result['reward']}"] if result["reward"] is not None else []
    return " · ".join([*parts, *(f"{name} {value}" for name, value in result["metrics"])])


def _page(about: dict[str, Any], result: dict[str, Any]) -> str:
    names = about["parameters"].get("properties", {})
    needed = about["parameters"].get("required", [])
    fields = ", ".join(f"{name}{'' if name in needed else ' (optional)'}" for name in names)
    out = [
        tag("div", tag("b", escape(f"ToolForm {about['name']}")), escape(f" · {about['description'][:600]}")),
        tag("div", escape(f"arguments: {fields or 'none'}")),
    ]
    if not result:
        out.append(tag("div", "No calls yet. Run the cell to use the form."))
        return tag("div", *out, style="line-height:1.5")
    text = result["observation"]
    shown = text[:12_000]
    out.append(tag("div", escape(f"{result['arguments'][:2000]} → {outcome(result)}"), style="margin-top:6px"))
    if result["error"]:
        out.append(tag("div", escape(result["error"][:2000])))
    out.append(
        tag(
            "div", escape(shown) or "(empty)",
            style="white-space:pre-wrap;font-family:monospace;border-left:4px solid #4a9a6a;padding-left:8px",
            title="what the model sees",
        )
    )  # fmt: skip
    out += [picture(*each) for each in result["images"]]
    if len(text) > len(shown):
        out.append(tag("div", f"{len(text) - len(shown):,} characters are left out of this static view."))
    return tag("div", *out, style="line-height:1.5")
