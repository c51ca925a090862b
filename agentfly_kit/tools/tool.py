"""Tools: functions with a schema that the model can call, and sets of tools that execute its calls.

There is no registry: an agent keeps the tool objects it was given, even if a later notebook cell reuses their names.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
import types as pytypes
import typing
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from agentfly_kit._async.pending_call import PendingCall, pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.errors import TaskError, ToolError, ToolSchemaError
from agentfly_kit.tools import function as functions
from agentfly_kit.tools.context import Context, Injection, PoolLike, injection, temporary_context
from agentfly_kit.tools.schema import REQUIRED, Arguments, Parameter, description_in, parse_docstring
from agentfly_kit.types import Task, ToolCall, ToolResult

P = ParamSpec("P")
R = TypeVar("R")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_NOT_GIVEN: Any = object()


class Tool(Displayable, Generic[P, R]):
    """Function that the model can call, created by `@tool`. Calling it calls the function.

    `schema` is what the model sees; it omits hidden parameters. `try_` runs one call as the model would see it.
    `fingerprint` changes with the source code, the constants it uses, and the schema.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        timeout: float | None = 60.0,
        max_chars: int | None = 8192,
        frame: pytypes.FrameType | None = None,
    ) -> None:
        _check_function(function)
        self.function = function
        self.name = name if name is not None else function.__name__
        self.timeout = timeout
        self.max_chars = max_chars
        self.source = functions.source_of(function)
        if not _NAME.fullmatch(self.name):
            raise ToolSchemaError(
                f"the name of a tool must consist of letters, digits, _ and -, got {self.name!r}; "
                "choose one: @af.tool(name=...)"
            )
        if timeout is not None and not timeout > 0:
            raise ToolSchemaError(f"{self.name}: timeout={timeout!r} must be above 0 seconds, or None for no limit")
        if max_chars is not None and max_chars < 1:
            raise ToolSchemaError(f"{self.name}: max_chars={max_chars!r} must be at least 1, or None for no limit")
        self.description, self._arguments, self._hidden, self._method = _signature(self.name, function, frame)
        self._instance: Any = None
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__doc__, self.__module__, self.__wrapped__ = function.__doc__, function.__module__, function

    # --- as the function ---

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self._bound()
        if inspect.iscoroutinefunction(function):
            # Like a coroutine, but a missing await raises a clear error.
            return typing.cast(R, PendingCall(f"{self.name}(...)", lambda: function(*args, **kwargs)))
        return function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool[..., R]:
        """Bind a tool created from a method to the instance on which it is accessed, as for methods."""
        if instance is None or not self._method:
            return self
        bound = copy.copy(self)
        bound._instance = instance
        return bound

    def _bound(self) -> Callable[..., R]:
        if self._instance is not None:
            return pytypes.MethodType(self.function, self._instance)
        return self.function

    # --- properties ---

    @property
    def schema(self) -> dict[str, Any]:
        """Copy of the JSON schema: {"type": "function", "function": {"name", "description", "parameters"}}."""
        return copy.deepcopy(
            {
                "type": "function",
                "function": {
                    "name": self.name,
                    "description": self.description,
                    "parameters": self._arguments.schema,
                },
            }
        )

    @property
    def fingerprint(self) -> str:
        settings = f"{self.name} {self.timeout} {self.max_chars} {json.dumps(self.schema)}"
        return functions.fingerprint(self.function, self.source, settings)

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the tool requires, and for which the agent needs pools."""
        return tuple(
            dict.fromkeys(injected.sandbox_type for injected in self._hidden.values() if injected.source == "sandbox")
        )

    @property
    def task_fields(self) -> tuple[str, ...]:
        """Task fields that the tool requires (`FromTask` parameters without a default)."""
        optional = inspect.signature(self.function).parameters
        return tuple(
            name
            for name, injected in self._hidden.items()
            if injected.source == "field" and optional[name].default is REQUIRED
        )

    def redefined(self) -> bool:
        """Return True if a later notebook cell has redefined the tool with different source code."""
        now = functions.current_definition(self.function)
        return isinstance(now, Tool) and now.function is not self.function and now.fingerprint != self.fingerprint

    def __repr__(self) -> str:
        hidden = f", hidden: {', '.join(self._hidden)}" if self._hidden else ""
        unbound = ", unbound method" if self._method and self._instance is None else ""
        return f"<Tool {self.name}{self._arguments.signature}{hidden}{unbound}>"

    # --- calls of the model ---

    @pending_call
    async def try_(
        self, /, *positional: Any, task: Any = _NOT_GIVEN, pool: Any = _NOT_GIVEN, **arguments: Any
    ) -> ToolResult:
        """Run one call interactively and return its result as the model would see it.

        Arguments are validated, the sandbox lease is temporary, and failures become text. If the tool itself has an
        argument named `task` or `pool`, the value is passed to the tool.

        Args:
            *positional: visible arguments by position.
            task: task that provides the fields for `FromTask` parameters.
            pool: pool that provides the sandbox; without it, a sandbox is started for this call and then closed.
            **arguments: visible arguments by name.

        Raises:
            TypeError: for too many or duplicate arguments.
            ToolSchemaError: for a method without an instance.
        """
        visible = list(self._arguments.parameters)
        if len(positional) > len(visible):
            raise TypeError(
                f"{self.name} takes {self._arguments.signature}, got {len(positional)} positional arguments"
            )
        for name, value in zip(visible, positional, strict=False):
            if name in arguments:
                raise TypeError(f"{self.name} got {name!r} twice")
            arguments[name] = value
        if task is not _NOT_GIVEN and "task" in visible:
            arguments["task"], task = task, _NOT_GIVEN
        if pool is not _NOT_GIVEN and "pool" in visible:
            arguments["pool"], pool = pool, _NOT_GIVEN
        task = _placeholder_task() if task in (_NOT_GIVEN, None) else task
        async with temporary_context(
            task, self.sandbox_types, () if pool in (_NOT_GIVEN, None) else (pool,)
        ) as context:
            return await self.invoke(arguments, context)

    async def invoke(self, arguments: Mapping[str, Any], context: Context, *, raising: bool = False) -> ToolResult:
        """Run one call and return its result. Exceptions of the tool become failed results, or propagate if `raising`.

        Raises:
            CancelledError: if the caller was cancelled.
            KeyboardInterrupt: always propagates.
            ToolSchemaError: for a method without an instance.
        """
        self.require_instance()
        where = f"tool {self.name}"
        try:
            values, complaint = self._arguments.validate(arguments)
            if complaint:
                text, truncated = self._truncate(_replace_lone_surrogates(complaint))
                return ToolResult(False, text, truncated=truncated)
            async with AsyncExitStack() as stack:
                values |= await self._inject(context, stack)
                # acquired after the sandbox, so that waiting for one does not occupy a slot
                async with context.concurrency.tools.slot():
                    outcome = await functions.call_user_function(
                        self._bound(), values, timeout=self.timeout, convert=self._checked_result
                    )
        except Exception as error:  # from the pool, the task or a validator of an argument type, not from the function
            if raising:
                raise
            return ToolResult(False, f"{self.name} failed.", functions.failure_from(where, error))
        if outcome.timed_out:
            text = f"{self.name} took longer than {self.timeout:g} s and was {outcome.timed_out}."
            return ToolResult(False, text, seconds=outcome.seconds)
        if outcome.error is not None:
            if raising:
                raise outcome.error
            if isinstance(outcome.error, ToolError):
                text, truncated = self._truncate(_replace_lone_surrogates(str(outcome.error)))
                return ToolResult(False, text, seconds=outcome.seconds, truncated=truncated)
            # No details for the model: it cannot fix the tool, and a traceback may leak the answer.
            found = functions.failure_from(where, outcome.error)
            return ToolResult(False, f"{self.name} failed.", found, seconds=outcome.seconds)
        result: ToolResult = outcome.value
        return replace(result, seconds=outcome.seconds)

    async def _inject(self, context: Context, stack: AsyncExitStack) -> dict[str, Any]:
        values: dict[str, Any] = {}
        # Leased in a fixed global order, so that two calls that need the same two sandboxes cannot deadlock.
        for name, injected in sorted(self._hidden.items(), key=lambda item: item[1].sandbox_type.__qualname__):
            if injected.source == "context":
                values[name] = context
            elif injected.source == "sandbox":
                values[name] = await stack.enter_async_context(context.using(injected.sandbox_type))
            elif name in context.fields:
                values[name] = context.fields[name]
            elif name in self.task_fields:
                raise TaskError(_missing_field_message(f"tool {self.name}", name, context.task))
        return values

    def _checked_result(self, value: Any) -> ToolResult:
        result = value if isinstance(value, ToolResult) else _to_tool_result(value)
        text, truncated = self._truncate(_replace_lone_surrogates(result.observation))
        return replace(result, observation=text, truncated=truncated or result.truncated)

    def _truncate(self, text: str) -> tuple[str, bool]:
        if self.max_chars is None or len(text) <= self.max_chars:
            return text, False
        return f"{text[: self.max_chars]}\n[cut: the first {self.max_chars} of {len(text)} characters]", True

    def require_instance(self) -> None:
        """Check that a tool created from a method is bound to an instance.

        Raises:
            ToolSchemaError: if it was accessed on the class.
        """
        if self._method and self._instance is None:
            owner = self.__qualname__.rpartition(".")[0].rpartition(".")[2]
            raise ToolSchemaError(
                f"{self.__qualname__} is a method without an instance; "
                f"use the tool of an instance: {owner}(...).{self.__name__}"
            )


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *, name: str | None = None, timeout: float | None = 60.0, max_chars: int | None = 8192
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = 60.0,
    max_chars: int | None = 8192,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Turn a function into a tool: `@tool`, or `@tool(name=..., timeout=...)`. It stays callable as before.

    Every parameter needs a type and a description, in the docstring or as `Annotated[int, "..."]`. Parameters annotated
    with a sandbox class (leased for the chain), `FromTask[...]` (a task field) or `Context` are injected, and hidden
    from the model.

    A sync function runs in a thread, a coroutine function on the event loop. A method becomes a tool of its instance,
    which all chains share; keep the state of a chain in `context.state` or in a sandbox.

    Args:
        function: the function to decorate.
        name: name shown to the model; the function's name by default.
        timeout: limit in seconds for one call of the function, or None.
        max_chars: maximum length of the observation in characters, or None.

    Raises:
        ToolSchemaError: names the function and the parameter.
    """
    frame = functions.caller_frame(1)

    def decorate(function: Callable[P, R]) -> Tool[P, R]:
        return Tool(function, name=name, timeout=timeout, max_chars=max_chars, frame=frame)

    return decorate if function is None else decorate(function)


# --- sets of tools -------------------------------------------------------------------------------


class ToolSet(Displayable, Sequence[Tool[..., Any]]):
    """Immutable collection of the tools of one agent, indexed by position or name. Plain functions become tools.

    Raises:
        ToolSchemaError: if two tools have the same name, or one is a method without an instance.
    """

    def __init__(self, tools: Iterable[Tool[..., Any] | Callable[..., Any]] = ()) -> None:
        if isinstance(tools, Tool) or not isinstance(tools, Iterable):
            raise ToolSchemaError(f"tools={tools!r} must be a list of tools: [{getattr(tools, 'name', '...')}]")
        self._tools = tuple(t if isinstance(t, Tool) else tool(t) for t in tools)
        self._by_name = {t.name: t for t in self._tools}
        for t in self._tools:
            t.require_instance()
            if self._by_name[t.name] is not t:
                raise ToolSchemaError(f"two tools are named {t.name!r}; rename one: @af.tool(name=...)")
        # Schemas passed to the chat template, in order.
        self.schemas: tuple[dict[str, Any], ...] = tuple(t.schema for t in self._tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the tools require."""
        return tuple(dict.fromkeys(sandbox_type for t in self._tools for sandbox_type in t.sandbox_types))

    @property
    def fingerprint(self) -> str:
        return " ".join(f"{t.name}={t.fingerprint}" for t in self._tools)

    def redefined(self) -> tuple[str, ...]:
        """Return the names of tools that a later notebook cell has redefined; this set still runs the old ones."""
        return tuple(t.name for t in self._tools if t.redefined())

    def check(self, tasks: Task | Iterable[Task]) -> None:
        """Check that every task has the fields that the tools require.

        Raises:
            TaskError: for the first task that lacks one.
        """
        for task in [tasks] if isinstance(tasks, Task) else tasks:
            for t in self._tools:
                for name in t.task_fields:
                    if name not in task.fields:
                        raise TaskError(_missing_field_message(f"tool {t.name}", name, task))

    async def call(self, call: ToolCall, context: Context) -> ToolResult:
        """Run one call of the model. Malformed calls and unknown names give failed results, not exceptions."""
        if call.error is not None:
            return ToolResult(False, call.error)
        if call.name not in self._by_name:
            known = f"the tools are: {', '.join(self.names)}" if self._tools else "there are no tools"
            return ToolResult(False, f"there is no tool named {call.name[:80]!r}; {known}")
        return await self._by_name[call.name].invoke(call.arguments, context)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        context: Context,
        *,
        around: Callable[[ToolCall], AbstractContextManager[Any]] = lambda _: nullcontext(),
        refused: Mapping[int, ToolResult] = MappingProxyType({}),
    ) -> tuple[ToolCall, ...]:
        """Run the calls of one turn concurrently.

        Calls that share a sandbox run in the order written, so that their effects are deterministic.

        Args:
            calls: the calls, in the order written.
            context: context of the chain.
            around: returns a context manager that is entered when a call starts and exited when it ends or fails.
            refused: results of calls that must not run, by position.

        Returns:
            The calls in the same order, with their results.
        """

        async def one(position: int, call: ToolCall) -> ToolResult:
            if position in refused:
                return refused[position]
            with around(call):
                return await self.call(call, context)

        if len(calls) == 1:
            results = [await one(0, calls[0])]
        else:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(i, call)) for i, call in enumerate(calls)]
            results = [task.result() for task in running]
        return tuple(
            replace(call, result=result, rerunner=self._rerunner(call, context))
            for call, result in zip(calls, results, strict=True)
        )

    def _rerunner(self, call: ToolCall, context: Context) -> Rerun | None:
        known = self._by_name.get(call.name) if call.error is None else None
        # Weak references: a trajectory kept in a notebook must not keep the sandboxes of an unused pool alive.
        return None if known is None else Rerun(known, context.task, tuple(map(weakref.ref, context.pools)))

    @overload
    def __getitem__(self, key: int | str) -> Tool[..., Any]: ...
    @overload
    def __getitem__(self, key: slice) -> ToolSet: ...
    def __getitem__(self, key: int | str | slice) -> Tool[..., Any] | ToolSet:
        if isinstance(key, str):
            if key not in self._by_name:
                raise KeyError(f"no tool named {key!r}; the tools are: {', '.join(self.names) or 'none'}")
            return self._by_name[key]
        return ToolSet(self._tools[key]) if isinstance(key, slice) else self._tools[key]

    def __contains__(self, item: object) -> bool:
        return item in self._by_name if isinstance(item, str) else item in self._tools

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"<ToolSet {', '.join(self.names) or 'empty'}>"


@dataclass(frozen=True)
class Rerun:
    """Callable that runs the same tool again on a temporary sandbox lease. Pickles as None."""

    tool: Tool[..., Any]
    task: Task
    pools: tuple[weakref.ref[PoolLike], ...]

    def __call__(self, call: ToolCall) -> Awaitable[ToolResult]:
        return PendingCall(f"{self.tool.name}.rerun()", lambda: self._run(call))

    async def _run(self, call: ToolCall) -> ToolResult:
        pools = [pool for ref in self.pools if (pool := ref()) is not None]
        async with temporary_context(self.task, self.tool.sandbox_types, pools) as context:
            return await self.tool.invoke(call.arguments, context, raising=True)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_rerun, ()


def _no_rerun() -> None:
    return None


def _placeholder_task() -> Task:
    return Task("none", ({"role": "user", "content": ""},))


# --- function signatures --------------------------------------------------------------------------


def _check_function(function: Any) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(function, Tool):
        raise ToolSchemaError(f"{function.name} is already a tool; decorate the function only once")
    if isinstance(function, staticmethod | classmethod):
        raise ToolSchemaError("put @staticmethod above @af.tool, not below it; a classmethod cannot be a tool")
    if inspect.ismethod(function):
        raise ToolSchemaError(f"{name} is a method of an instance; put @af.tool above its `def` in the class instead")
    if not inspect.isfunction(function):
        raise ToolSchemaError(f"{name} must be a function defined with `def`; wrap it in one, with types and docstring")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolSchemaError(f"{name} is a generator; a tool must return one result")


def _signature(
    owner: str, function: Callable[..., Any], frame: pytypes.FrameType | None
) -> tuple[str, Arguments, dict[str, Injection], bool]:
    """Return (description, visible arguments, injected parameters, True for a method)."""
    description, documented = parse_docstring(function)
    try:
        annotations = functions.type_hints(function, frame)
    except Exception as error:
        raise ToolSchemaError(
            f"{owner}: an annotation cannot be resolved ({error}); define or import it before the function, "
            "and not only under TYPE_CHECKING"
        ) from None
    parameters = list(inspect.signature(function).parameters.values())
    outer = function.__qualname__.rpartition(".")[0]  # "", "Class", "maker.<locals>" or "maker.<locals>.Class"
    method = bool(parameters) and parameters[0].name == "self" and bool(outer) and not outer.endswith("<locals>")
    visible: list[Parameter] = []
    hidden: dict[str, Injection] = {}
    for parameter in parameters[1:] if method else parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            raise ToolSchemaError(f"{owner}: {star}{name} cannot be described in a schema; name each parameter")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSchemaError(
                f"{owner}: parameter {name!r} is positional-only, but a model passes names; remove the /"
            )
        if name not in annotations:
            raise ToolSchemaError(f"{owner}: parameter {name!r} has no type; annotate it, for example {name}: str")
        injected = injection(annotations[name])
        if injected is not None:
            hidden[name] = injected
            continue
        text = description_in(annotations[name]) or documented.get(name)
        if not text:
            others = [other for other in documented if other not in inspect.signature(function).parameters]
            hint = f" (it describes {', '.join(map(repr, others))}, not in the signature)" if others else ""
            raise ToolSchemaError(
                f"{owner}: parameter {name!r} has no description{hint}; add to the docstring\n"
                f"    Args:\n        {name}: description for the model"
            )
        visible.append(Parameter(name, annotations[name], text, parameter.default))
    if not description:
        raise ToolSchemaError(f'{owner}: no description; add a docstring, for example """Return the current time."""')
    return description, Arguments(owner, visible), hidden, method


def _missing_field_message(who: str, name: str, task: Task) -> str:
    have = ", ".join(task.fields) or "none"
    return f"{who} requires the field {name!r}, which task {task.id!r} does not have (its fields: {have})"


# --- observations --------------------------------------------------------------------------------


def _to_tool_result(value: Any) -> ToolResult:
    """Convert a return value to a result: strings unchanged, None as "", everything else as compact JSON."""
    from agentfly_kit.sandboxes.result import SandboxResult

    if isinstance(value, SandboxResult):
        return ToolResult(value.ok, value.text, truncated=value.truncated)
    return ToolResult(True, _to_text(value))


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the value of a string enum, not its name
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(value, inf_nan_mode="constants", bytes_mode="utf8", fallback=_json_fallback)
    # Dates, paths and enum members are single strings: shown without quotes, like a returned str.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _json_fallback(value: Any) -> Any:
    """Convert arrays to lists, and other objects that define `__str__` or `__repr__` to strings."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    if not any("__str__" in vars(c) or "__repr__" in vars(c) for c in type(value).__mro__[:-1]):
        raise TypeError(
            f"a tool returned a {type(value).__qualname__}, which has no string representation; "
            "return a str, number or JSON value"
        )
    return str(value)


def _replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be tokenized, by the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text
