"""Load the code submitted to a Grader and answer the requests of the tests.

This file runs after base.py, values.py and grading_data.py in the same namespace.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .base import CALLS, home
from .grading_data import dump_json, format_traceback
from .values import decode, encode


class Submission:
    """The submitted module, and the objects to which the tests refer by number."""

    name = ""
    text = ""
    objects: dict[int, Any] = {}  # noqa: RUF012
    numbers: dict[int, int] = {}  # noqa: RUF012


def keep_object(value: Any) -> Any:
    if isinstance(value, tuple):  # a named tuple
        return encode(tuple(value), keep_object)
    number = Submission.numbers.setdefault(id(value), len(Submission.objects) + 1)
    Submission.objects[number] = value  # keeps the object alive, so that its id is not reused
    return {"$object": [number, type(value).__name__[:80]]}


def get_object(tagged: dict[str, Any]) -> Any:
    return Submission.objects[tagged["$object"][0]]


def add_exit() -> None:
    """Add `exit` and `quit` to the builtins, because `site`, which defines them, is not loaded here."""
    for name in ("exit", "quit"):
        if not hasattr(builtins, name):
            setattr(builtins, name, sys.exit)


def load(source: str, module: str) -> dict[str, Any]:
    """Run a submission as a module of the given name. Return the error, if any."""
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
        return {"value": encode(next(value), keep_object)}
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
    """Answer a request that a test has sent to the submission."""
    request = json.loads(question)
    try:
        if request["op"] == "import":
            name = request["on"]
            value = sys.modules[name] if name == Submission.name else importlib.import_module(name)
            return dump_json({"value": keep_object(value)})
        on = get_object({"$object": request["on"]})
        if request["op"] == "next":
            return dump_json(_next(on))
        args = decode(request["args"], get_object)
        named = {name: decode(each, get_object) for name, each in request["named"].items()}
        return dump_json({"value": encode(OPERATIONS[request["op"]](on, *args, **named), keep_object)})
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
    """Run a submission as a whole program with the given standard input. Return the error, if any."""
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


CALLS |= {"load": load, "answer": answer, "program": program}
