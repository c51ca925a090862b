"""The inner sides of a Grader: the submission, which answers requests, and the tests, which make them.

This file runs after base.py in the same namespace, in each of two interpreters that are not connected: the host relays
requests and answers between them as JSON. These contain only data, or numbers of objects that stay in the submission's
process. Therefore no code of the submission, such as its `==`, ever runs in the process of the tests.
"""

from __future__ import annotations

import ast
import base64
import builtins
import importlib
import io
import json
import linecache
import os
import queue
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from .base import CALLS, Refused, home

LONGEST = 2**22  # maximum characters of one request or answer
BUILTINS = frozenset([*dir(builtins), "exit", "quit"])


# --- serialization -------------------------------------------------------------------------------


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON. `keep` encodes any object that is not data, or raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list):
        return [pack(each, keep) for each in list(value)]
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(each, keep)] for key, each in list(value.items())]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(each, keep) for each in list(value)]}
    return keep(value)


def unpack(value: Any, found: Callable[[Any], Any]) -> Any:
    """Decode a value encoded by `pack`. `found` returns the object for a reference made by `keep`.

    Raises:  ValueError, TypeError or RecursionError for input that `pack` cannot have written.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [unpack(each, found) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no data")
    ((tag, inner),) = value.items()
    if tag == "int":
        return int(inner, 16)
    if tag == "float":
        return float.fromhex(inner)
    if tag == "complex":
        return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
    if tag == "bytes":
        return base64.b64decode(inner)
    if tag == "dict":
        return {unpack(key, found): unpack(each, found) for key, each in inner}
    if tag in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](unpack(each, found) for each in inner)
    if tag == "object":
        return found(inner)
    raise ValueError("no data")


def dump_json(message: Any) -> str:
    text = json.dumps(message)
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters of data; at most {LONGEST} cross at once")
    return text


def format_traceback(error: BaseException, text: str, own: str) -> str:
    """Format a traceback, starting at the first frame of the given source text."""
    linecache.cache[own] = (len(text), None, text.splitlines(keepends=True), own)
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != own:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip("\n")[-4000:]


# --- the submission ------------------------------------------------------------------------------


class Submission:
    """The submitted module, and its objects that the tests refer to by number."""

    name = ""
    text = ""
    objects: dict[int, Any] = {}  # noqa: RUF012
    numbers: dict[int, int] = {}  # noqa: RUF012


def keep_object(value: Any) -> dict[str, Any]:
    number = Submission.numbers.setdefault(id(value), len(Submission.objects) + 1)
    Submission.objects[number] = value  # keeps the object alive, so that its id is not reused
    return {"object": [number, type(value).__name__[:80]]}


def get_object(reference: Any) -> Any:
    return Submission.objects[reference[0]]


def add_exit() -> None:
    """Add `exit` and `quit` to the builtins, because `site`, which defines them, is not loaded here."""
    for name in ("exit", "quit"):
        if not hasattr(builtins, name):
            setattr(builtins, name, sys.exit)


def load(source: str, module: str) -> dict[str, Any]:
    """Run a submission as a module of the given name. Return its error, if any."""
    made = types.ModuleType(module)
    sys.modules[module] = made
    Submission.name, Submission.text = module, source
    add_exit()
    try:
        exec(compile(source, f"<{module}>", "exec", dont_inherit=True), made.__dict__)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        return {"error": format_traceback(error, source, f"<{module}>")}
    return {"error": None}


def _next(value: Any) -> Any:
    try:
        return {"value": pack(next(value), keep_object)}
    except StopIteration:
        return {"end": True}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda value, *args, **named: value(*args, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda value, key: value[key],
    "setitem": lambda value, key, new: value.__setitem__(key, new),
    "delitem": lambda value, key: value.__delitem__(key),
    "len": len,
    "iter": iter,
    "contains": lambda value, key: key in value,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def answer(question: str) -> str:
    """Answer one request of the tests, in the submission's process."""
    if not Submission.name:
        raise Refused("nothing was submitted to this interpreter")
    request = json.loads(question)
    try:
        if request["op"] == "import":
            name = request["on"]
            value = sys.modules[name] if name == Submission.name else importlib.import_module(name)
            return dump_json({"value": keep_object(value)})
        on = get_object(request["on"])
        if request["op"] == "next":
            return dump_json(_next(on))
        args = unpack(request["args"], get_object)
        named = {name: unpack(each, get_object) for name, each in request["named"].items()}
        value = OPERATIONS[request["op"]](on, *args, **named)
        return dump_json({"value": pack(value, keep_object)})
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return dump_json(
            {
                "raised": [names[0], type(error).__name__],
                "text": str(error)[:2000],
                "where": format_traceback(error, Submission.text, f"<{Submission.name}>"),
            }
        )


def program(source: str, stdin: str) -> dict[str, Any]:
    """Run a submission as a whole program with the given standard input. Return its error, if any."""
    path = os.path.join(home(), ".stdin")
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(stdin)
    descriptor = os.open(path, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    os.unlink(path)
    sys.stdin = sys.__stdin__ = io.open(0, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]  # noqa: SIM115, UP020
    add_exit()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    except MemoryError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"error": f"it exited with {str(error.code)[:1000]!r}"}
    except Exception as error:
        return {"error": format_traceback(error, source, "<program>")}
    return {"error": None}


# --- the tests -----------------------------------------------------------------------------------


class SubmissionError(Exception):
    """The submission raised an exception that is not a built-in one, or exited."""


def ask_submission(op: str, on: Any, *args: Any, **named: Any) -> Any:
    """Make a request to the submission, from the thread of a test, and re-raise its exception, if any."""
    Tests.has_asked = True
    question = {
        "op": op, "on": on, "args": [pack(each, keep_proxy) for each in args],
        "named": {name: pack(each, keep_proxy) for name, each in named.items()},
    }  # fmt: skip
    Tests.out.put({"ask": dump_json(question)})
    reply = json.loads(Tests.back.get())
    if "raised" in reply:
        name, own, text = str(reply["raised"][0]), str(reply["raised"][1]), str(reply.get("text"))
        kind: Any = getattr(builtins, name, None)
        raised: Exception = SubmissionError(f"{own}: {text}")
        # A StopIteration would silently end an all() or map() in the test, and an exit must not end the test.
        is_builtin = isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        if is_builtin and kind not in (StopIteration, StopAsyncIteration):
            try:
                raised = kind(text)
            except TypeError:  # UnicodeDecodeError needs five arguments
                pass
        raised.__notes__ = [f"in the submission: {str(reply.get('where'))[-2000:]}"]
        raise raised
    if op == "next":
        return (True, None) if "end" in reply else (False, unpack(reply["value"], Proxy))
    return unpack(reply["value"], Proxy)


def keep_proxy(value: Any) -> dict[str, Any]:
    if isinstance(value, Proxy):
        return {"object": object.__getattribute__(value, "_reference")}
    raise TypeError(f"a {type(value).__name__} cannot be handed to the submission: it gets data, and what is its own")


class Proxy:
    """A proxy for an object in the submission's process."""

    def __init__(self, reference: Any) -> None:
        if not (isinstance(reference, list) and len(reference) == 2 and isinstance(reference[0], int)):
            raise ValueError("no object")
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
            raise TypeError("the submission's iterator is none")
        while True:
            end, value = ask_submission("next", iterator._reference)
            if end:
                return
            yield value

    def __eq__(self, other: object) -> Any:
        raise TypeError(f"{self!r}: its == is what the submission says it is; compare data, such as str(...) of it")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class RemoteModule(types.ModuleType):
    """A proxy for a module of the submission, for the tests to import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask_submission("getattr", ask_submission("import", self.__name__)._reference, name)


class Tests:
    """The namespace left by the setup, and the queues to the thread of the running test."""

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
    """Run a test, or the setup, up to its first request or its end."""
    name = "<setup>" if setup else "<test>"
    try:
        tree = ast.parse(text, name)
        code = compile(tree, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"broken": f"{type(error).__name__}: {error}"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    space = Tests.space if setup else dict(Tests.space)
    # Names without another definition come from the submission; built-in names do only if listed in `names`.
    wanted = sorted((used - BUILTINS - space.keys()) | (used & set(Tests.names)))
    Tests.has_asked = False
    Tests.out, Tests.back = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=test, args=(code, space, wanted, text, name), daemon=True).start()
    return Tests.out.get()  # type: ignore[no-any-return]


def resume(answer: str) -> dict[str, Any]:
    """Pass an answer to the test, and run it up to its next request or its end."""
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
                    continue  # raises NameError where it is used
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


CALLS.update(load=load, answer=answer, program=program, prepare=prepare, begin=begin, resume=resume)
