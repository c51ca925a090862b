"""Base class of tools and rewards, which injects arguments into user functions based on their annotations."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

from agentfly_kit._async.pending_call import PendingCall
from agentfly_kit.errors import AgentFlyError, TaskError, check_value, suggest_keyword
from agentfly_kit.tools.context import Context
from agentfly_kit.tools.inspection import current_definition, function_fingerprint, source_of, type_hints, underlying
from agentfly_kit.types import Task

# Names that reward functions of other libraries use for the final answer.
_NAMES_OF_FINAL = (
    "prediction",
    "predicted",
    "pred",
    "response",
    "output",
    "answer_text",
    "final_answer",
    "completion",
)

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Injection:
    """Source of an injected value: "sandbox", "context", "field" (a task field), or a name such as "trajectory"."""

    source: str
    sandbox_type: type = object


# `facts: FromTask[dict]` injects the task field "facts". The parameter is hidden from the model.
FromTask: TypeAlias = Annotated[T, Injection("field")]

# `browser: FromPool[Browser]` injects a sandbox from the pool for `Browser`. Classes with the methods `run` and `close`
# are recognized as sandboxes without `FromPool`.
FromPool: TypeAlias = Annotated[T, Injection("sandbox")]


def injection(annotation: Any) -> Injection | None:
    """Return the injection requested by an annotation, or None if there is none."""
    if typing.get_origin(annotation) is Annotated:
        inner = annotation.__origin__
        for extra in annotation.__metadata__:
            if isinstance(extra, Injection):
                return (
                    replace(extra, sandbox_type=typing.get_origin(inner) or inner)
                    if extra.source == "sandbox"
                    else extra
                )
        return injection(inner)
    if inspect.isclass(annotation):
        if issubclass(annotation, Context):
            return Injection("context")
        if all(callable(getattr(annotation, name, None)) for name in ("run", "close")):
            return Injection("sandbox", annotation)
    return None


class InjectedFunction(Generic[P, R]):
    """Base class of `Tool` and `Reward`: a user function with injected arguments. Instances can be called like the
    function.

    Attributes:
        function: The decorated function.
        name: Name of the tool or reward.
        timeout: Time limit for one call of the function, in seconds, or None.
        task_fields: Names of the task fields that are injected into parameters without a default.
    """

    kind: ClassVar[str]
    error_type: ClassVar[type[AgentFlyError]]
    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[P, R],
        name: str | None,
        timeout: float | None,
        injected_names: Collection[str] | None = None,
        *,
        open_arguments: bool = False,
    ) -> None:
        """Determine which parameters of the function are injected.

        A parameter whose annotation requests an injection is always injected. If `injected_names` is given, all other
        parameters are injected too: listed parameters receive the value of the same name, and all others a task field.
        With `open_arguments`, the function may accept `**arguments`, because a schema defines the names and types.
        """
        shown = getattr(function, "__qualname__", repr(function))
        if isinstance(function, InjectedFunction):
            raise self.error_type(f"{function.name} is already a {function.kind}; decorate the function only once")
        own_name = ""
        ready = inspect.isroutine(function) or inspect.isclass(function) or isinstance(function, functools.partial)
        if self.kind == "tool" and callable(function) and not ready:
            own_name = type(function).__name__
            function = typing.cast(Any, function).__call__  # the method of a callable object
        plain = underlying(function) if self.kind == "tool" else function
        if not inspect.isfunction(plain):
            stateful = inspect.isclass(function) or own_name
            remedy = (
                "af.envs.agent(Class, ...) turns the methods of a class into tools" if stateful else "use a wrapper"
            )
            raise self.error_type(f"a {self.kind} must be a function defined with `def`, got {shown}; {remedy}")
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            raise self.error_type(f"a {self.kind} must return one result, got the generator {shown}")
        functools.update_wrapper(self, plain, updated=())
        self.function = function
        self.name: str = name if name is not None else own_name or plain.__name__
        check_value("timeout", timeout, "float | None", "above 0")
        self.timeout = timeout
        source_of(function)  # read the source now, because the file may change later
        self._injected_names = injected_names or ()
        try:
            annotations = type_hints(plain)
        except Exception as error:
            raise self._error(
                f"annotations must be resolvable, got {type(error).__name__}: {error}; define or import the name "
                "before the function, and not only under TYPE_CHECKING"
            ) from None
        fixed = function.keywords if isinstance(function, functools.partial) else {}
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in fixed]
        # "", "Class", "maker.<locals>" or "maker.<locals>.Class"
        outer = plain.__qualname__.rpartition(".")[0]
        # A function is a method if it is defined in a class body and its first parameter is `self`.
        self._method = bool(parameters) and parameters[0].name == "self" and outer != "" and not outer.endswith(">")
        if parameters and parameters[0].name == "self" and not self._method:
            raise self._error(
                "'self' must be a parameter of methods only; remove it, or define the function in a class"
            )
        # All parameters by name, with resolved annotations. `_hidden` contains the injected ones.
        self._parameters: dict[str, inspect.Parameter] = {}
        self._hidden: dict[str, Injection] = {}
        for p in parameters[1:] if self._method else parameters:
            if open_arguments and p.kind is p.VAR_KEYWORD:
                continue
            if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                raise self._error(
                    f"parameter {p.name!r} must accept a keyword argument, got a {p.kind.description} parameter; "
                    f"name each parameter, and remove / and *{self._injectable()}"
                )
            self._parameters[p.name] = p.replace(annotation=annotations.get(p.name, p.empty))
            injected = injection(annotations.get(p.name))
            if injected is None and injected_names is not None:
                injected = Injection(p.name if p.name in injected_names else "field")
            if injected is not None:
                self._hidden[p.name] = injected
        # Reject reward functions written for TRL or verifiers, which have parameters with these names.
        for name in ("completion", "completions", "prompts"):
            if self._injected_names and name in self._hidden and not set(self._injected_names) & set(self._hidden):
                raise self._error(f"{name!r} is a parameter of rewards of TRL or verifiers{self._injectable()}")
        self.task_fields = tuple(
            n
            for n, i in self._hidden.items()
            if i.source == "field" and self._parameters[n].default is inspect.Parameter.empty
        )

    def _error(self, text: str) -> AgentFlyError:
        return self.error_type(f"{self.name}: {text}")

    def _injectable(self) -> str:
        """Return the part of an error message that lists the allowed parameters of a reward, or "" for a tool."""
        if not self._injected_names:
            return ""
        text = f"; parameters can be {', '.join(self._injected_names)}, a sandbox, or a field of the task"
        if self.kind == "reward":
            text += ". A reward function written for TRL or verifiers can be passed as af.trl.reward(function)"
        return text

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self._bound()
        if inspect.iscoroutinefunction(function):
            # A PendingCall behaves like a coroutine, but raises a clear error if it is not awaited.
            return typing.cast(R, PendingCall(f"{self.name}(...)", lambda: function(*args, **kwargs)))
        return function(*args, **kwargs)

    def _bound(self) -> Callable[..., R]:
        return self.function

    def _settings(self) -> str:
        """Return the settings that are part of the fingerprint."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """Source code of the function as currently loaded."""
        return source_of(self.function)

    @property
    def fingerprint(self) -> str:
        """Hash of the source code, the constants and functions that it uses, and the settings."""
        return function_fingerprint(self.function, self._settings())

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the function requires. The agent needs a pool for each of them."""
        return tuple(dict.fromkeys(i.sandbox_type for i in self._hidden.values() if i.source == "sandbox"))

    def redefined(self) -> bool:
        """Return True if the function has since been redefined with different code, for example in a notebook."""
        now = current_definition(self.function)
        return (
            isinstance(now, InjectedFunction)
            and now.function is not self.function
            and now.fingerprint != self.fingerprint
        )

    def check(self, tasks: Iterable[Task]) -> None:
        """Raise `TaskError` if a task lacks a required field."""
        for task in tasks:
            for name in self.task_fields:
                if name not in task.fields:
                    have = ", ".join(task.fields) or "none"
                    also = f"; also available: {', '.join(self._injected_names)}" if self._injected_names else ""
                    hint = suggest_keyword(name, (*self._injected_names, *task.fields))
                    if self.kind == "reward" and name in _NAMES_OF_FINAL:
                        hint = "; did you mean 'final'?"
                    if self.kind == "reward" and name in ("prompt", "state", "info"):
                        also += "; for a reward function of verifiers use af.trl.reward(function)"
                    raise TaskError(
                        f"{self.kind} {self.name} requires the field {name!r}, which task {task.id!r} does not have "
                        f"(its fields: {have}{also}){hint}; rename the parameter or give it a default"
                    )
                value = task.fields[name]
                if self._parameters[name].annotation is str and isinstance(value, int | float):
                    raise TaskError(
                        f"{self.kind} {self.name}: the field {name!r} of task {task.id!r} must be a str, as annotated, "
                        f"got {value!r}; use str(...) when you create the tasks, or change the annotation"
                    )

    @asynccontextmanager
    async def _inject(
        self, context: Context, fields: Mapping[str, Any], **values: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the injected arguments, with exclusive use of the sandboxes. `values` are other injectable values."""
        self.check([context.task])
        values["context"] = context
        sandbox_types = {n: i.sandbox_type for n, i in self._hidden.items() if i.source == "sandbox"}
        empty: AbstractAsyncContextManager[dict[str, Any]] = nullcontext({})
        async with _hold(context, sandbox_types) if sandbox_types else empty as sandboxes:
            arguments: dict[str, Any] = {}
            for name, injected in self._hidden.items():
                if injected.source == "sandbox":
                    arguments[name] = sandboxes[name]
                elif injected.source != "field":
                    arguments[name] = values[injected.source]
                elif name in fields:
                    arguments[name] = fields[name]
            yield arguments


@asynccontextmanager
async def _hold(context: Context, sandbox_types: Mapping[str, type]) -> AsyncIterator[dict[str, Any]]:
    """Yield the context's sandboxes of the given classes while holding them exclusively."""
    async with AsyncExitStack() as stack:
        # Acquire sandboxes in a fixed global order, so that calls that need the same sandboxes cannot deadlock.
        yield {
            name: await stack.enter_async_context(context.using(sandbox_type))
            for name, sandbox_type in sorted(sandbox_types.items(), key=lambda item: item[1].__qualname__)
        }


F = TypeVar("F", bound=InjectedFunction[..., Any])


class FunctionSet(Sequence[F]):
    """Immutable collection of tools or rewards with unique names, indexed by position or name."""

    def __init__(self, functions: Iterable[F]) -> None:
        self._functions = tuple(functions)
        self._by_name: dict[str, F] = {}
        for function in self._functions:
            if function.name in self._by_name:
                raise function.error_type(
                    f"names of {function.kind}s must be unique, got {function.name!r} twice; rename one: "
                    f"@af.{function.kind}(name=...)"
                )
            self._by_name[function.name] = function

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, in order."""
        return tuple(self._by_name)

    @property
    def sandbox_types(self) -> tuple[type, ...]:
        """Sandbox classes that the functions require."""
        return tuple(dict.fromkeys(sandbox_type for f in self for sandbox_type in f.sandbox_types))

    def redefined(self) -> tuple[str, ...]:
        """Return the names of functions that have since been redefined. The set still contains the old definitions."""
        return tuple(f.name for f in self if f.redefined())

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise `TaskError` if a task lacks a field that one of the functions requires."""
        for function in self:
            function.check(tasks)

    @overload
    def __getitem__(self, key: int | str) -> F: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | str | slice) -> F | Self:
        if isinstance(key, slice):
            return type(self)(self._functions[key])
        return self._functions[key] if isinstance(key, int) else self._by_name[key]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._by_name)

    def __contains__(self, item: object) -> bool:
        return item in (self._by_name if isinstance(item, str) else self._functions)

    def __len__(self) -> int:
        return len(self._functions)
