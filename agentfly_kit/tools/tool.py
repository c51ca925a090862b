"""`Tool`, a function with a JSON schema that the model can call, and `ToolSet`, which runs tool calls.

There is no registry: an agent keeps its tool objects even if a later notebook cell reuses their names.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
import types as pytypes
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from agentfly_kit._async.pending_call import PendingCall, pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.errors import ToolError, ToolSchemaError, check_choice, check_count
from agentfly_kit.tools.calling import Outcome, call_user_function, failure_from
from agentfly_kit.tools.context import Context, temporary_context
from agentfly_kit.tools.injection import FunctionSet, InjectedFunction
from agentfly_kit.tools.inspection import underlying
from agentfly_kit.tools.results import fit_result, to_result
from agentfly_kit.tools.schema import Arguments, parse_docstring
from agentfly_kit.types import Task, ToolCall, ToolResult

if TYPE_CHECKING:
    from agentfly_kit.pool.pool import Pool

P = ParamSpec("P")
R = TypeVar("R")
Describe: TypeAlias = Literal["required", "optional"]
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_NOT_GIVEN: Any = object()


class Tool(Displayable, InjectedFunction[P, R]):
    """Function that the model can call, created by `@tool`. It can also be called like the original function.

    `schema` describes the tool to the model, without hidden parameters. `try_` returns the result that the model would
    see. `fingerprint` is a hash of the source code, the constants and functions that it uses, and the schema.
    """

    kind = "tool"
    error_type = ToolSchemaError
    # Source code of a tool created by `from_source`; None for other tools.
    written: str | None = None

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        timeout: float | None = 60.0,
        max_chars: int | None = 8192,
        describe: Describe = "required",
        description: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(function, name, timeout, open_arguments=schema is not None)
        check_count("max_chars", max_chars, optional=True)
        check_choice("describe", describe, Describe)
        self.max_chars = max_chars
        self._instance: Any = None
        # Mutable defaults, which are copied for each call.
        self._defaults = {n: p.default for n, p in self._parameters.items() if type(p.default).__hash__ is None}
        if not _NAME.fullmatch(self.name):
            raise ToolSchemaError(
                f"the name of a tool must consist of letters, digits, _ and -, got {self.name!r}; "
                "choose another name: @af.tool(name=...)"
            )
        plain = underlying(self.function)
        # If `__call__` has no docstring, use the class docstring. `getdoc` would return the docstring of
        # `type.__call__`.
        is_object = plain.__name__ == "__call__" and not plain.__doc__
        own = inspect.getdoc(type(getattr(self.function, "__self__", None)) if is_object else plain)
        documentation, documented = parse_docstring(own, self.name)
        self.description = documentation if description is None else description
        if schema is not None:
            self._arguments = Arguments.from_schema(self.name, schema)
        else:
            visible = [p for p in self._parameters.values() if p.name not in self._hidden]
            self._arguments = Arguments(self.name, visible, documented, describe == "optional")
        if not self.description and describe == "required":
            raise self._error('the function must have a docstring, for example\n\n    """Return the current time."""')

    @classmethod
    def from_schema(
        cls,
        name: str,
        schema: Mapping[str, Any],
        call: Callable[..., Any],
        *,
        description: str | None = None,
        timeout: float | None = 60.0,
        max_chars: int | None = 8192,
    ) -> Tool[..., Any]:
        """Create a tool from a JSON schema instead of type annotations.

        The names and types of the arguments are checked against the schema before `call(**arguments)` runs. Other
        constraints are not checked. Arguments that the model omits are not passed.

        Args:
            name: name shown to the model.
            schema: JSON schema of the arguments, or {"type": "function", "function": {...}} as in a request.
            call: callable that receives the arguments by name. Parameters annotated with a sandbox class,
                `FromTask[...]` or `Context` are injected.
            description: description shown to the model; by default the description in the schema, or the docstring of
                `call`.
            timeout: time limit for one call in seconds, or None.
            max_chars: maximum length of the observation in characters, or None.

        Raises:
            ToolSchemaError: if `schema` does not describe an object, or if `call` is not a function.
        """
        if isinstance(schema, Mapping) and isinstance(given := schema.get("function"), Mapping):
            description = given.get("description") if description is None else description
            schema = given.get("parameters", {})
        return cls(
            call, name=name, timeout=timeout, max_chars=max_chars, describe="optional", description=description,
            schema=schema,
        )  # fmt: skip

    @classmethod
    def from_source(
        cls, source: str, *, name: str | None = None, timeout: float = 10.0, max_chars: int | None = 8192
    ) -> Tool[..., Any]:
        """Create a tool from the source code of one function, which runs only in the chain's `PythonSandbox`.

        This process only parses the source and never executes it. The function needs a docstring, and its parameters
        need descriptions and types: str, int, float, bool, list, dict, Literal and unions of these. The
        function is defined again before each call, because other code in the sandbox may have replaced it.

        Args:
            source: source code of the function, at most 64,000 characters. Imports must be inside the function.
            name: name shown to the model; the function's name by default.
            timeout: time limit for one call in seconds.
            max_chars: maximum length of the observation in characters, or None.

        Raises:
            ToolSchemaError: if `source` is not a function of this form. The error message contains the line number.
        """
        from agentfly_kit.tools.source import parse_source, sandboxed

        written = parse_source(source, timeout)
        made = cls(
            sandboxed(written), name=written.name if name is None else name, timeout=timeout + 110,
            max_chars=max_chars, schema=written.schema, description=written.description,
        )  # fmt: skip
        made.written = source
        return made

    # --- methods ---

    def __get__(self, instance: Any, owner: type | None = None) -> Tool[..., R]:
        if instance is None or not self._method:
            return self
        bound = copy.copy(self)
        bound._instance = instance
        return bound

    def _bound(self) -> Callable[..., R]:
        return self.function if self._instance is None else pytypes.MethodType(self.function, self._instance)

    def require_instance(self) -> None:
        """Raise `ToolSchemaError` if the tool is an unbound method."""
        if self._method and self._instance is None:
            owner = self.__qualname__.rpartition(".")[0].rpartition(".")[2]
            raise ToolSchemaError(
                f"{self.__qualname__} is a method, which must be bound to an instance; use {owner}(...).{self.__name__}"
                f", which all chains share, or af.envs.agent({owner}, ...), which creates an instance for each chain"
            )

    # --- properties ---

    @property
    def schema(self) -> dict[str, Any]:
        """Copy of the tool's JSON schema: {"type": "function", "function": {"name", "description", "parameters"}}."""
        parameters = copy.deepcopy(self._arguments.schema)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    @property
    def source(self) -> str:
        """Source code of the tool."""
        return super().source if self.written is None else self.written

    def _settings(self) -> str:
        return f"{self.name} {self.timeout} {self.max_chars} {json.dumps(self.schema)}"

    @property
    def content(self) -> tuple[str, int | None]:
        """Fingerprint and, for a bound method, `id()` of the instance, for comparison in `ToolSet.__eq__`."""
        instance = self._instance if self._instance is not None else getattr(self.function, "__self__", None)
        return self.fingerprint, None if instance is None else id(instance)

    def __repr__(self) -> str:
        hidden = f", hidden: {', '.join(self._hidden)}" if self._hidden else ""
        unbound = ", unbound method" if type(self) is Tool and self._method and self._instance is None else ""
        return f"<Tool {self.name}{self._arguments.signature}{hidden}{unbound}>"

    # --- model calls --------

    @pending_call
    async def try_(
        self, /, *positional: Any, task: Any = _NOT_GIVEN, pool: Any = _NOT_GIVEN, **arguments: Any
    ) -> ToolResult:
        """Call the tool interactively and return the result as the model would see it.

        Arguments are validated, sandboxes are leased temporarily, and failures become text. If the tool has a visible
        parameter named `task` or `pool`, the argument with this name is passed to the tool instead.

        Args:
            *positional: arguments of visible parameters, by position.
            task: task that provides the fields for `FromTask` parameters.
            pool: pool that provides the sandbox. By default, a sandbox is started for this call and then closed.
            **arguments: arguments of visible parameters, by name.
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
        if "task" in visible and task is not _NOT_GIVEN:
            arguments["task"], task = task, _NOT_GIVEN
        if "pool" in visible and pool is not _NOT_GIVEN:
            arguments["pool"], pool = pool, _NOT_GIVEN
        if task in (_NOT_GIVEN, None):
            task = Task("none", ({"role": "user", "content": ""},))
        pools = () if pool is _NOT_GIVEN else (pool,)
        async with temporary_context(task, self.sandbox_types, *pools) as context:
            return await self.invoke(arguments, context)

    async def invoke(self, arguments: Mapping[str, Any], context: Context, *, raising: bool = False) -> ToolResult:
        """Call the tool and return its result. Exceptions become failed results or, if `raising` is True, propagate.

        Cancellation, KeyboardInterrupt, and the ToolSchemaError for an unbound method always propagate.
        """
        self.require_instance()
        try:
            values, problem = self._arguments.validate(arguments)
            if problem:
                return fit_result(ToolResult(False, problem, ran=False), self.max_chars)
            async with self._inject(context, context.fields) as injected:
                outcome = await call_user_function(
                    self._bound(),
                    copy.deepcopy(self._defaults) | values | injected,
                    timeout=self.timeout,
                    convert=lambda value: fit_result(to_result(value), self.max_chars),
                )
        except Exception as raised:  # raised by a pool or an argument validator, or for a missing task field
            outcome = Outcome(error=raised)
        error, seconds = outcome.error, outcome.seconds
        if outcome.timed_out:
            return ToolResult(False, f"{self.name} {error}.", seconds=seconds)
        if error is None:
            result: ToolResult = outcome.value
            return replace(result, seconds=seconds)
        if raising:
            raise error
        if isinstance(error, ToolError):
            return fit_result(ToolResult(False, str(error), seconds=seconds), self.max_chars)
        # Hide the details from the model, which cannot fix the tool and might find the answer in a traceback.
        return ToolResult(False, f"{self.name} failed.", failure_from(f"tool {self.name}", error), seconds)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = 60.0,
    max_chars: int | None = 8192,
    describe: Describe = "required",
    description: str | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = 60.0,
    max_chars: int | None = 8192,
    describe: Describe = "required",
    description: str | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Decorator that turns a function into a tool, as `@tool` or `@tool(name=..., timeout=...)`.

    Bound methods, `functools.partial` objects and objects with a `__call__` method can be tools as well. Arguments
    fixed by a partial are hidden from the model.

    Every parameter needs a type and a description, in the docstring or as `Annotated[int, "..."]`. Parameters annotated
    with a sandbox class (leased for the chain), `FromTask[...]` (a task field) or `Context` are injected and hidden
    from the model. If the model writes null for an argument whose type does not allow None, the default is used. Each
    call receives its own copy of a mutable default.

    A sync function runs in a thread, and a coroutine function on the event loop.

    State that persists across the turns of a chain belongs in an environment: a class with a method `reset`, whose
    tools are methods. `af.envs.agent(MyClass, ...)` leases an instance to each chain, so that the methods can keep
    state in `self`; see `af.envs.base`. In contrast, a tool `MyClass().method` is bound to one instance, which all
    chains share.

    Args:
        function: the function to decorate.
        name: name shown to the model; the function's name by default.
        timeout: time limit for one call of the function in seconds, or None.
        max_chars: maximum length of the observation in characters, or None.
        describe: "required", or "optional" to allow missing descriptions of the function and its parameters.
        description: description shown to the model; by default the description in the docstring.

    Raises:
        ToolSchemaError: if no schema can be generated. The error message names the function and the parameter.
    """

    def decorate(function: Callable[P, R]) -> Tool[P, R]:
        return Tool(
            function, name=name, timeout=timeout, max_chars=max_chars, describe=describe, description=description
        )

    return decorate if function is None else decorate(function)


class ToolSet(Displayable, FunctionSet[Tool[..., Any]]):
    """Immutable collection of the tools of one agent, indexed by position or name. Plain functions become tools.

    `schemas` is passed to the chat template. Names must be unique, and methods must be bound to an instance.
    """

    def __init__(self, tools: Iterable[Tool[..., Any] | Callable[..., Any]] = ()) -> None:
        if isinstance(tools, Tool) or not isinstance(tools, Iterable):
            raise ToolSchemaError(f"tools must be a list of tools, got {tools!r}")
        super().__init__(t if isinstance(t, Tool) else tool(t) for t in tools)
        for t in self:
            t.require_instance()
        self.schemas: tuple[dict[str, Any], ...] = tuple(t.schema for t in self)

    async def call(self, call: ToolCall, context: Context) -> ToolResult:
        """Run a tool call. Malformed calls and calls of unknown tools return a failed result."""
        if call.error is not None:
            return ToolResult(False, call.error, ran=False)
        if call.name not in self._by_name:
            known = f"the tools are: {', '.join(self.names)}" if self.names else "there are no tools"
            return ToolResult(False, f"there is no tool named {call.name[:80]!r}; {known}", ran=False)
        return await self._by_name[call.name].invoke(call.arguments, context)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        context: Context,
        *,
        around: Callable[[ToolCall], AbstractContextManager[Any]] = lambda _: nullcontext(),
        refused: Mapping[int, ToolResult] = MappingProxyType({}),
    ) -> tuple[ToolCall, ...]:
        """Run the calls of one turn concurrently, and return them with their results.

        Calls that share a sandbox run sequentially in the given order, so that their effects are deterministic.

        Args:
            calls: the calls, in the order in which the model wrote them.
            context: context of the chain.
            around: function that returns a context manager in which each call runs.
            refused: results of calls that must not run, keyed by index in `calls`.
        """

        started = [self._call_one(call, context, around, refused.get(i)) for i, call in enumerate(calls)]
        if len(calls) == 1:
            results = [await started[0]]
        else:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(call) for call in started]
            results = [task.result() for task in running]
        # Use weak references, so that a stored trajectory does not keep an unused pool and its sandboxes alive.
        pools = tuple(map(weakref.ref, context.pools))
        known = [None if call.error is not None else self._by_name.get(call.name) for call in calls]
        return tuple(
            replace(call, result=result, rerunner=function and Rerun(function, context.task, pools))
            for call, result, function in zip(calls, results, known, strict=True)
        )

    async def _call_one(
        self,
        call: ToolCall,
        context: Context,
        around: Callable[[ToolCall], AbstractContextManager[Any]],
        refused: ToolResult | None,
    ) -> ToolResult:
        if refused is not None:
            return refused
        with around(call):
            return await self.call(call, context)

    def add(self, tool: Tool[..., Any] | Callable[..., Any]) -> ToolSet:
        """Return a set with `tool` added at the end. The name of the tool must not occur in this set."""
        return ToolSet([*self, tool])

    def revise(self, tool: Tool[..., Any] | Callable[..., Any]) -> ToolSet:
        """Return a set in which `tool` replaces the tool with the same name, at the same position.

        Raises:
            KeyError: if the set has no tool of this name.
        """
        new = tool if isinstance(tool, Tool) else Tool(tool)
        old = self[new.name]
        return ToolSet(new if each is old else each for each in self)

    def remove(self, name: str) -> ToolSet:
        """Return a set without the tool of the given name.

        Raises:
            KeyError: if the set has no tool of this name.
        """
        old = self[name]
        return ToolSet(each for each in self if each is not old)

    def __eq__(self, other: object) -> bool:
        """Return True if both sets have tools with the same fingerprints and instances, in the same order."""
        if not isinstance(other, ToolSet):
            return NotImplemented
        return [t.content for t in self] == [t.content for t in other]

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"<ToolSet {', '.join(self.names) or 'empty'}>"


@dataclass(frozen=True)
class Rerun:
    """Callable that reruns a tool call in a temporarily leased sandbox. Pickling replaces it with None."""

    tool: Tool[..., Any]
    task: Task
    pools: tuple[weakref.ref[Pool[Any]], ...]

    def __call__(self, call: ToolCall) -> Awaitable[ToolResult]:
        return PendingCall(f"{self.tool.name}.rerun()", lambda: self._run(call))

    async def _run(self, call: ToolCall) -> ToolResult:
        pools = (ref() for ref in self.pools)
        async with temporary_context(self.task, self.tool.sandbox_types, *pools) as context:
            return await self.tool.invoke(call.arguments, context, raising=True)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
