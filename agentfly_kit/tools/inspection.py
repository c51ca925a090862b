"""Source code, fingerprints and annotations of user functions and classes."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import re
import sys
import sysconfig
import textwrap
import types as pytypes
import typing
import weakref
from collections.abc import Callable
from typing import Any

from agentfly_kit.seeds import digest

# Source code read when a code object was first seen, keyed by id of the code object
_sources: dict[int, str] = {}


def source_of(function: Callable[..., Any]) -> str:
    """Return the source code of a function or, if it cannot be read, a string with a hash of the bytecode.

    The source is read only once per code object, because the file may change while the old code is still in use. After
    an autoreload, the function has a new code object, for which the source is read again.
    """
    plain = underlying(function)
    code = getattr(plain, "__code__", None)
    if code is None:
        return f"<no source; {function!r}>"
    if id(code) not in _sources:
        try:
            _sources[id(code)] = _read_source(plain, code)
        except (OSError, TypeError, SyntaxError, LookupError):
            _sources[id(code)] = f"<no source; code {digest(_describe_code(code))}>"
        weakref.finalize(code, _sources.pop, id(code)).atexit = False
    return _sources[id(code)]


def _read_source(function: Callable[..., Any], code: pytypes.CodeType) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    if code.co_name == "<lambda>" or re.search(rf"^(async\s+)?def\s+{code.co_name}\b", source, re.MULTILINE):
        return source
    # Find the definition by name, because its line number may be wrong after an autoreload or a change to the file.
    lines = linecache.getlines(code.co_filename)
    node: Any = ast.parse("".join(lines))
    outer = [part for part in function.__qualname__.split(".")[:-1] if part != "<locals>"]
    for name in (*outer, code.co_name):
        node = [child for child in node.body if getattr(child, "name", None) == name][-1]
    first = min(part.lineno for part in (node, *node.decorator_list))
    return textwrap.dedent("".join(inspect.getblock(lines[first - 1 :])))


def code_of(function: Callable[..., Any]) -> str:
    """Return a string that changes only with the code of a function: its source without comments and docstrings.

    Functions of this package are represented by their names, so that runs can be continued with a newer version. Source
    that cannot be parsed on its own, such as the source of some lambdas, is returned unchanged.
    """
    plain = underlying(function)
    if _is_of_package(plain):
        return f"agentfly_kit: {plain.__qualname__}"
    try:
        tree = ast.parse(source_of(plain))
    except SyntaxError:
        return source_of(plain)
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, defined) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def _is_of_package(function: Any) -> bool:
    return isinstance(function, pytypes.FunctionType) and function.__module__.partition(".")[0] == "agentfly_kit"


def function_fingerprint(function: Callable[..., Any], *more: str) -> str:
    """Return a hash (16 hex digits) of a function's code, the constants and user functions that it uses, and `more`.

    User functions are functions defined in the module of `function` or outside installed packages. Constants and
    arguments of a `functools.partial` are included only if they are immutable (numbers, strings, tuples), because
    lists, dicts and objects may hold state.
    """
    if isinstance(function, functools.partial):
        fixed = (function.args, tuple(sorted(function.keywords.items())))
        more = (*more, str([[_stable_repr(value) for value in values] for values in fixed]))
    return digest(code_of(function), *more, *_referenced_values(underlying(function), set()))


def class_source(cls: type) -> str:
    """Return the code of a class and its bases: their methods, and the functions and constants that the methods use.

    Classes that are not user-defined are represented by their names.
    """
    lines: list[str] = []
    seen: set[int] = set()
    for base in cls.__mro__:
        members = sorted(vars(base).items())
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if base.__module__ != "__main__" and not _is_users(base.__module__, file):
            members = [(name, value) for name, value in members if name == "_wraps"]  # see `envs.from_env`
            if base is not cls:
                continue
        lines.append(f"class {base.__qualname__}({', '.join(parent.__qualname__ for parent in base.__bases__)})")
        for name, value in members:
            for part in value if name == "_wraps" else (value,):
                for wrapper in ("function", "fget", "func", "__func__"):  # tools, properties, class methods
                    part = getattr(part, wrapper, part)
                if isinstance(part, type) and name == "_wraps":
                    lines.append(class_source(part))
                elif isinstance(part, pytypes.FunctionType):
                    lines += [code_of(part), *_referenced_values(part, seen)]
                elif not name.startswith("__") and (text := _stable_repr(part)) is not None:
                    lines.append(f"{name} = {text}")
    return "\n".join(lines)


def underlying(function: Any) -> Any:
    """Return the function wrapped by a `functools.partial`, a bound method or a decorator."""
    while isinstance(function, functools.partial) or inspect.ismethod(function) or hasattr(function, "__wrapped__"):
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = function.__func__ if inspect.ismethod(function) else inspect.unwrap(function)
    return function


def current_definition(function: Callable[..., Any]) -> Any:
    """Return the object that the qualified name of a function refers to now, or None for local functions."""
    plain = underlying(function)
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
    outer, attributes = _names_read(code)
    for name in sorted(outer.intersection(cells) if _is_of_package(function) else outer):
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__[name]
        except (KeyError, ValueError):  # a builtin, an attribute, or a closure cell that is still empty
            continue
        if isinstance(value, pytypes.ModuleType):
            if not _is_users(value.__name__, getattr(value, "__file__", None)):
                continue
            helpers = {f"{name}.{attribute}": vars(value).get(attribute) for attribute in sorted(attributes)}
        else:
            helpers = {name: value}
        for label, helper in helpers.items():
            helper = getattr(helper, "function", helper)  # unwrap tools and rewards
            if isinstance(helper, pytypes.FunctionType):
                own = helper.__module__ == function.__module__
                if own or _is_users(helper.__module__, helper.__code__.co_filename):
                    lines += [f"{label} is {code_of(helper)}", *_referenced_values(helper, seen)]
            elif label == name and (text := _stable_repr(value)) is not None:
                lines.append(f"{name} = {text}")
    return lines


def _names_read(code: pytypes.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of the global and closure variables that the code reads, and of the attributes it accesses."""
    outer, attributes = set(code.co_freevars), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            outer.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            for names, inner in zip((outer, attributes), _names_read(const), strict=True):
                names |= inner
    return outer, attributes


_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_users(module: str | None, file: str | None) -> bool:
    """Return True if the module is not part of the standard library, an installed package or this package."""
    top = (module or "").partition(".")[0]
    return file is not None and not file.startswith((*_INSTALLED, "<")) and top != "agentfly_kit"


def _stable_repr(value: Any) -> str | None:
    """Return a representation of an immutable value that is the same in every process, or None for other values."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
        return repr(value)
    if isinstance(value, tuple | frozenset):
        parts = [_stable_repr(part) or f"a {type(part).__qualname__}" for part in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return None


def _describe_code(code: pytypes.CodeType) -> str:
    consts = [_describe_code(c) if isinstance(c, pytypes.CodeType) else str(_stable_repr(c)) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolve annotations, including `Annotated` metadata. Local names are looked up in the calling frames."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        # String annotations may refer to local names of a function or class body that is still being executed.
        local: dict[str, Any] = {}
        frame: pytypes.FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals is getattr(function, "__globals__", None):
                local = frame.f_locals | local
            frame = frame.f_back
        return typing.get_type_hints(function, localns=local, include_extras=True)
