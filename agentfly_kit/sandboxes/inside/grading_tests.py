"""Run the tests of a Grader. Each use of the submission becomes a request to the submission's interpreter.

This file runs after base.py, values.py and grading_data.py in the same namespace.
"""

from __future__ import annotations

import ast
import builtins
import json
import queue
import sys
import threading
import types
import unittest
from collections.abc import Iterator
from typing import Any

from .base import CALLS
from .grading_data import dump_json, format_traceback
from .values import decode, encode

BUILTINS = frozenset([*dir(builtins), "exit", "quit"])


class SubmissionError(Exception):
    """Raised when the submission exits or raises an exception that is not built in."""


def ask_submission(op: str, on: Any, *args: Any, **named: Any) -> Any:
    """Make a request to the submission, from the thread of a test, and re-raise its exception, if any."""
    Tests.has_asked = True
    question = {
        "op": op, "on": on, "args": [encode(each, keep_proxy) for each in args],
        "named": {name: encode(each, keep_proxy) for name, each in named.items()},
    }  # fmt: skip
    Tests.out.put({"ask": dump_json(question)})
    reply = json.loads(Tests.back.get())
    if "raised" in reply:
        name, own, text = str(reply["raised"][0]), str(reply["raised"][1]), str(reply.get("text"))
        kind: Any = getattr(builtins, name, None)
        raised: Exception = SubmissionError(f"{own}: {text}")
        # Re-raise built-in exceptions, except exits and StopIteration, which would silently end an all() in the test.
        is_builtin = isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        if is_builtin and kind not in (StopIteration, StopAsyncIteration):
            try:
                raised = kind(text)
            except TypeError:  # the class needs more arguments, as UnicodeDecodeError does
                pass
        raised.__notes__ = [f"in the submission: {str(reply.get('where'))[-2000:]}"]
        raise raised
    if op == "next":
        return (True, None) if "end" in reply else (False, decode(reply["value"], get_proxy))
    return decode(reply["value"], get_proxy)


def get_proxy(tagged: dict[str, Any]) -> Proxy:
    return Proxy(tagged.get("$object"))


def keep_proxy(value: Any) -> Any:
    if isinstance(value, tuple):  # a named tuple
        return encode(tuple(value), keep_proxy)
    if isinstance(value, Proxy):
        return {"$object": object.__getattribute__(value, "_reference")}
    raise TypeError(f"arguments must be data or objects of the submission, got a {type(value).__name__}")


class Proxy:
    """A proxy for an object in the submission's process."""

    def __init__(self, reference: Any) -> None:
        if not (isinstance(reference, list) and len(reference) == 2 and isinstance(reference[0], int)):
            raise ValueError("not a reference to an object of the submission")
        object.__setattr__(self, "_reference", reference)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return ask_submission("getattr", self._reference, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask_submission("setattr", self._reference, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return ask_submission("call", self._reference, *args, **named)

    def __getitem__(self, key: Any) -> Any:
        return ask_submission("getitem", self._reference, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask_submission("setitem", self._reference, key, value)

    def __delitem__(self, key: Any) -> None:
        ask_submission("delitem", self._reference, key)

    def __len__(self) -> int:
        return int(ask_submission("len", self._reference))

    def __contains__(self, key: Any) -> bool:
        return bool(ask_submission("contains", self._reference, key))

    def __bool__(self) -> bool:
        return bool(ask_submission("bool", self._reference))

    def __str__(self) -> str:
        return str(ask_submission("str", self._reference))

    def __repr__(self) -> str:
        return f"<a {self._reference[1]} of the submission's>"

    def __iter__(self) -> Iterator[Any]:
        iterator = ask_submission("iter", self._reference)
        if not isinstance(iterator, Proxy):
            raise TypeError(f"iter() of {self!r} must return an iterator, got {iterator!r}")
        while True:
            end, value = ask_submission("next", iterator._reference)
            if end:
                return
            yield value

    def __eq__(self, other: object) -> Any:
        raise TypeError(
            f"{self!r} must not be compared, because its own code decides the result; compare data, such as str(...)"
        )

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class RemoteModule(types.ModuleType):
    """A proxy for a module of the submission, for the tests to import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask_submission("getattr", ask_submission("import", self.__name__)._reference, name)


class Tests:
    """State of the tests' interpreter: the namespace after the setup, and queues to the thread of the running test."""

    name = ""
    names: tuple[str, ...] = ()
    space: dict[str, Any] = {}  # noqa: RUF012
    has_asked = False
    out: queue.SimpleQueue[Any] = queue.SimpleQueue()
    back: queue.SimpleQueue[str] = queue.SimpleQueue()


def prepare(module: str, names: list[str], modules: list[str]) -> None:
    Tests.name, Tests.names = module, tuple(names)
    for each in [module, *modules]:
        parts = each.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            sys.modules[path] = found = RemoteModule(path)
            found.__path__ = []
            if depth > 1:
                sys.modules[".".join(parts[: depth - 1])].__dict__[parts[depth - 1]] = found
    Tests.space = {"__name__": "tests", "__builtins__": builtins}


def begin(text: str, setup: bool) -> dict[str, Any]:
    """Run a test, or the setup, until its first request to the submission or its end."""
    name = "<setup>" if setup else "<test>"
    try:
        tree = ast.parse(text, name)
        code = compile(tree, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"broken": f"{type(error).__name__}: {error}"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    space = Tests.space if setup else dict(Tests.space)
    # Import undefined names from the submission, and also the names in `Tests.names`, which may be built-in names.
    wanted = sorted((used - BUILTINS - space.keys()) | (used & set(Tests.names)))
    Tests.has_asked = False
    Tests.out, Tests.back = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=test, args=(code, space, wanted, text, name), daemon=True).start()
    return Tests.out.get()  # type: ignore[no-any-return]


def resume(answer: str) -> dict[str, Any]:
    """Pass an answer to the test, and run it until its next request or its end."""
    Tests.back.put(answer)
    return Tests.out.get()  # type: ignore[no-any-return]


def test(code: Any, space: dict[str, Any], wanted: list[str], text: str, name: str) -> None:
    error = None
    try:
        if wanted:
            module = ask_submission("import", Tests.name)
            for each in wanted:
                try:
                    space[each] = ask_submission("getattr", module._reference, each)
                except AttributeError:
                    continue  # the test raises NameError where it uses the name
        Tests.has_asked = False
        before = set(space)
        exec(code, space)
        for each in [each for each in space if each not in before]:
            value = space[each]
            if isinstance(value, types.FunctionType) and each.startswith("test_"):
                value()
            elif isinstance(value, type) and issubclass(value, unittest.TestCase):
                report = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(report)
                for _, why in [*report.errors, *report.failures]:
                    raise AssertionError(why)
    except BaseException as failure:
        error = format_traceback(failure, text, name)
    Tests.out.put({"end": error, "asked": Tests.has_asked})


CALLS |= {"prepare": prepare, "begin": begin, "resume": resume}
