"""Tools: schemas, conversion of arguments and results, failures, timeouts, injected parameters and fingerprints."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import enum
import functools
import linecache
import pickle
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import errors
import numpy as np
import pydantic
import pytest
import typing_extensions
from pydantic import Field
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit._async import limits

TASK = af.Task(
    "t", ({"role": "user", "content": "2+3"},), {"answer": "5", "facts": {"Ann": "Oslo"}, "expression": "trap"}
)


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Address(pydantic.BaseModel):
    """Where somebody lives."""

    street: str = Field(description="with the number")
    title: str = "none"


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Window(typing_extensions.TypedDict):
    left: int
    right: typing_extensions.NotRequired[int]


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    return str(eval(expression, {"__builtins__": {}}))


@af.tool
def add(a: Annotated[int, "the first"], b: Annotated[int, "the second"] = 1) -> int:
    """Add."""
    return a + b


def context(task: af.Task = TASK) -> af.Context:
    return af.Context(task, trajectory_id="chain")


def call(name: str, **arguments: Any) -> af.ToolCall:
    return af.ToolCall("call-0", name, arguments)


def parameters(t: af.Tool[..., Any]) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", t.schema["function"]["parameters"])


@pytest.mark.parametrize(
    "arguments",
    [
        "Args:\n    a: the number,\n        over two lines\n    b (str): the text\n\nReturns:\n    nothing much",
        "Parameters\n----------\na : int\n    the number,\n    over two lines\nb : str\n    the text",
        ":param a: the number,\n    over two lines\n:param b: the text\n:returns: nothing much",
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_descriptions_come_from_the_docstring(arguments: str) -> None:
    def function(a: int, b: str) -> str:
        return ""

    function.__doc__ = f"Do it.\n\nIn two steps, carefully.\n\n{arguments}"
    made = af.tool(function)
    assert made.schema["function"]["description"] == "Do it.\n\nIn two steps, carefully."
    assert parameters(made)["properties"] == {
        "a": {"type": "integer", "description": "the number, over two lines"},
        "b": {"type": "string", "description": "the text"},
    }


INTEGER, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


@pytest.mark.parametrize(
    ("annotation", "schema", "given", "got"),
    [
        (int | None, {"anyOf": [INTEGER, NULL]}, None, None),
        (Optional[str], {"anyOf": [TEXT, NULL]}, "x", "x"),  # noqa: UP045
        (list[str], {"type": "array", "items": TEXT}, ["a"], ["a"]),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1}, {"a": 1.0}),
        (Literal["x", "y"], {"type": "string", "enum": ["x", "y"]}, "y", "y"),
        (Literal["x"], {"type": "string", "const": "x"}, "x", "x"),
        (Unit, {"type": "string", "enum": ["c", "f"]}, "f", Unit.FAHRENHEIT),
        (Point, object_of("x", x=INTEGER, y=INTEGER | {"default": 0}), {"x": 3}, Point(3)),
        (
            Address,
            object_of("street", street=TEXT | {"description": "with the number"}, title=TEXT | {"default": "none"}),
            {"street": "A 1", "title": "Dr"},
            Address(street="A 1", title="Dr"),
        ),
        (
            list[Window] | None,
            {"anyOf": [{"type": "array", "items": object_of("left", left=INTEGER, right=INTEGER)}, NULL]},
            [{"left": 1, "right": 2}],
            [{"left": 1, "right": 2}],
        ),
        (bool, {"type": "boolean"}, True, True),
        (float, {"type": "number"}, 1, 1.0),
        (datetime.date, {"type": "string", "format": "date"}, "2024-02-29", datetime.date(2024, 2, 29)),
        (tuple[int, int], None, [1, 2], (1, 2)),
        (set[int], None, [1, 1], {1}),
        (Any, {}, {"free": 1}, {"free": 1}),
        (Annotated[int, Field(ge=0, le=9)], {"type": "integer", "minimum": 0, "maximum": 9}, 9, 9),
    ],
)
async def test_schemas_and_values_of_types(annotation: Any, schema: Any, given: Any, got: Any) -> None:
    seen: list[Any] = []

    def probe(x: Any) -> None:
        """Look at x.

        Args:
            x: anything
        """
        seen.append(x)

    probe.__annotations__["x"] = annotation
    made = af.tool(probe)
    entry = parameters(made)["properties"]["x"]
    assert entry.pop("description") == "anything"
    if schema is not None:
        assert entry == schema
    assert "$ref" not in str(entry)
    assert (await made.try_(x=given)).ok
    assert seen == [got] and type(seen[0]) is type(got)


async def test_schemas_of_recursive_types_and_of_classes_with_the_same_name() -> None:
    def f(a: Any, b: Any) -> str:
        """Two."""
        return f"{a.x} {b.name}"

    f.__annotations__.update(a=Annotated[Tree, "the tree"], b=Annotated[Tree | None, "another"])
    schema = parameters(af.tool(f))
    assert schema["properties"]["a"] == {"$ref": "#/$defs/Tree", "description": "the tree"}
    (tree,) = schema["$defs"].values()
    assert tree["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    other = dataclasses.make_dataclass("Point", [("name", str)])
    f.__annotations__.update(a=Annotated[Point, "one"], b=Annotated[other, "two"])
    made = af.tool(f)
    assert [list(entry["properties"]) for entry in parameters(made)["properties"].values()] == [["x", "y"], ["name"]]
    assert (await made.try_(a={"x": 1}, b={"name": "n"})).observation == "1 n"


async def test_defaults_and_names_reserved_by_pydantic() -> None:
    @af.tool(describe="optional")
    def f(
        json: Annotated[int, "count"] = 3,
        schema: Annotated[Unit, "unit"] = Unit.CELSIUS,
        model_config: Annotated[Point | None, "where"] = None,
    ) -> str:
        return f"{json} {schema.value} {model_config}"

    made = parameters(f)
    defaults = [(name, entry.get("default", "none")) for name, entry in made["properties"].items()]
    assert "required" not in made and defaults == [("json", 3), ("schema", "c"), ("model_config", "none")]
    assert (await f.try_(schema="f")).observation == "3 f None"


async def test_null_means_the_default_and_a_mutable_default_is_not_shared() -> None:
    """Members of the kind: fields of nested objects, tools with a schema (below), task fields, and `reset`.

    Not changed: a parameter whose type admits None receives it, and a required one refuses it.
    """

    @af.tool(describe="optional")
    def f(
        a: int = None,  # type: ignore[assignment]  # noqa: RUF013
        b: int | None = 5,
        xs: list[int] = [],  # noqa: B006
        p: Point = Point(0),  # noqa: B008
        seen: af.FromTask[list[int]] = [],  # noqa: B006
    ) -> str:
        xs.append(1)
        seen.append(1)
        p.x += 1
        return f"{a} {b} {xs} {p.x},{p.y} {seen}"

    assert f._arguments.signature.startswith("(a: integer = null, b: ")
    for given in ({}, {"a": None, "xs": None}, {"p": None}):
        assert (await f.try_(**given)).observation == "None 5 [1] 1,0 [1]"
    assert (await f.try_(b=None, p={"x": 3, "y": None})).observation == "None None [1] 4,0 [1]"
    for name, refused in (("p.x", await f.try_(p={"x": None})), ("a", await add.try_(a=None))):
        assert f"{name}: input should be a valid integer (got None)" in refused.observation


def test_descriptions_may_be_given_or_missing() -> None:
    @af.tool(describe="optional")
    def add(a: int, b: Annotated[int, "the second"] = 1) -> int:
        return a + b

    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "description": "the second", "default": 1},
                },
                "required": ["a"],
            },
        },
    }
    given = af.tool(description="Sum of two.", describe="optional")(add.function)
    assert given.schema["function"]["description"] == "Sum of two."


async def test_tool_is_callable_like_its_function() -> None:
    assert (calculator("2+3"), add(2, b=3), calculator.__name__) == ("5", 5, "calculator")
    assert calculator.__doc__ is not None and repr(add) == "<Tool add(a: integer, b: integer = 1)>"

    @af.tool
    async def later(x: Annotated[int, "a number"]) -> int:
        """Wait."""
        await asyncio.sleep(0)
        return x + 1

    assert await later(4) == 5 and "write `await later(...)`" in repr(later(4))

    @af.tool(describe="optional")
    def wrapper() -> Any:
        return later.function(4)

    for made in (wrapper, af.tool(functools.partial(later.function, x=4))):
        assert (await made.try_()).observation == "5"


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @af.tool(describe="optional")
    def step(self, by: Annotated[int, "how far"]) -> int:
        self.count += by
        return self.count

    @staticmethod
    @af.tool
    def double(n: Annotated[int, "a number"]) -> int:
        """Double it."""
        return 2 * n


async def test_methods_are_bound_to_their_instance() -> None:
    first, second = Counter(), Counter()
    assert first.step(2) == 2
    assert (await first.step.try_(by=3)).observation == "5"
    assert (await second.step.try_(by=1)).observation == "1"
    assert list(parameters(first.step)["properties"]) == ["by"]
    done = await af.ToolSet([first.step, Counter.double]).call_all(
        [call("step", by=1), call("double", n=4)], context()
    )
    assert [c.result.observation for c in done if c.result] == ["6", "8"]


class Opaque:
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Spoken:
    def __str__(self) -> str:
        return "spoken"


@dataclasses.dataclass
class Photo:
    data: bytes
    note: str = "n"


class TextEnum(str, enum.Enum):  # noqa: UP042  # its str() is its name, not its value
    A = "a"


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
HIDDEN, HIDDEN_JPEG = "[image image/png, 264 bytes, not shown]", "[image image/jpeg, 3 bytes, not shown]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"), (5, "5"), (True, "true"), (0.5, "0.5"), (None, ""), (float("nan"), "NaN"),
        ([1, "é"], '[1,"é"]'), ({"a": None, "b": (1, 2)}, '{"a":null,"b":[1,2]}'), (Point(1, 2), '{"x":1,"y":2}'),
        (Address(street="A"), '{"street":"A","title":"none"}'), (Unit.CELSIUS, "c"), (TextEnum.A, "a"),
        (b"caf\xc3\xa9", "café"), (datetime.date(2024, 2, 29), "2024-02-29"), (Path("a/b"), "a/b"),
        (np.int64(3), "3"), (np.float32(0.5), "0.5"), (np.arange(3), "[0,1,2]"), ({"n": np.float64(0.5)}, '{"n":0.5}'),
        (Spoken(), "spoken"), ("half \ud83d pair", "half � pair"),
        (PNG, HIDDEN), (bytearray(PNG), HIDDEN), (memoryview(b"\xff\xd8\xff"), HIDDEN_JPEG),
        (b"caf\xc3\xa9 \xff", "[binary data, 7 bytes, not shown]"), (PNG_URL, HIDDEN),
        (f"![]({PNG_URL}) is `data:text/plain;base64,aGk=`", f"![]({HIDDEN}) is `data:text/plain;base64,aGk=`"),
        ([{"image": PNG, "n": 2}, (b"ok",)], f'[{{"image":"{HIDDEN}","n":2}},["ok"]]'),
        (Photo(PNG), f'{{"data":"{HIDDEN}","note":"n"}}'), (af.ToolResult(True, PNG_URL), HIDDEN),
        ({"image_url": {"url": PNG_URL}}, f'{{"image_url":{{"url":"{HIDDEN}"}}}}'),
    ],
)  # fmt: skip
async def test_return_values(value: Any, text: str) -> None:
    """Binary data is described, except in the output of `python`, `shell` and `sql`: the model may want to see it."""

    @af.tool(describe="optional")
    def give() -> Any:
        return value

    result = await give.try_()
    assert result == af.ToolResult(True, text)
    result.observation.encode()


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": Opaque()}, "TypeError: a tool returned a Opaque, which has no string representation"),
        (calculator.function, "TypeError: a tool returned a function, which has no string representation"),
        (CIRCULAR, "ValueError: Circular reference"),
        (Unspeakable(), "RuntimeError: no words"),
        (
            af.ToolResult(True, "", reward=float("nan")),
            "TypeError: the reward of a ToolResult must be a finite number or",
        ),
        (
            af.ToolResult(True, "", reward="1"),
            "TypeError: the reward of a ToolResult must be a finite number or None",
        ),  # type: ignore[arg-type]
    ],
)
async def test_return_value_that_cannot_be_converted_fails(value: Any, message: str) -> None:
    @af.tool(describe="optional")
    def give() -> Any:
        return value

    result = await give.try_()
    assert result.observation == "give failed."
    assert str(result.error).startswith(f"tool give: {message}") and " at 0x" not in str(result.error)


async def test_results_are_returned_unchanged_and_long_ones_are_cut() -> None:
    @af.tool(max_chars=5, describe="optional")
    def give(n: Annotated[int, "length"], done: Annotated[bool, "how"] = False) -> Any:
        if n == 0:
            raise af.ToolError("no such city: Atlantis")
        text = "0123456789"[:n]
        return af.ToolResult(False, text, reward=0.5, done=True, metrics={"m": 1.0}) if done else text

    whole = af.ToolResult(False, "01234", reward=0.5, done=True, metrics={"m": 1.0})
    cut = "01234\n[truncated: the first 5 of 6 characters]"
    assert await give.try_(n=5) == af.ToolResult(True, "01234")
    assert await give.try_(n=5, done=True) == whole
    assert await give.try_(n=6) == af.ToolResult(True, cut, truncated=True)
    assert await give.try_(n=6, done=True) == dataclasses.replace(whole, observation=cut, truncated=True)
    assert (await give.try_(n=0)).observation == "no su\n[truncated: the first 5 of 22 characters]"
    assert await af.tool(max_chars=None, describe="optional")(give.function).try_(n=0) == af.ToolResult(
        False, "no such city: Atlantis"
    )


async def test_arguments_are_coerced_and_invalid_ones_are_observations() -> None:
    assert [(await trial).observation for trial in (add.try_(a="2", b=3.0), add.try_(2, 3))] == ["5", "5"]
    assert await add.try_(a="two", c=1) == af.ToolResult(
        False,
        "add was not run: a: input should be a valid integer, unable to parse string as an integer (got 'two'); "
        "c is not a parameter. It takes (a: integer, b: integer = 1)",
        ran=False,
    )
    assert "a is missing" in (await add.try_()).observation
    flood = await add.try_(a=1, **{f"x{i}": 1 for i in range(2000)})
    assert flood.truncated and len(flood.observation) < 8300


async def cancelled_elsewhere() -> str:
    other = asyncio.ensure_future(asyncio.sleep(10))
    other.cancel()
    await other
    return "never"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "error",
    [ValueError("5"), SystemExit(3), asyncio.CancelledError("5"), TimeoutError("5"), StopIteration(), Unspeakable()],
)
async def test_other_exceptions_are_recorded_as_failures(error: BaseException, asynchronous: bool) -> None:
    """The failure has a traceback, the model sees only that the tool failed, and concurrent calls are unaffected."""

    @af.tool(describe="optional")
    def fail() -> str:
        raise error

    @af.tool(name="fail", describe="optional")
    async def fail_async() -> str:
        await asyncio.sleep(0)
        return await cancelled_elsewhere() if isinstance(error, asyncio.CancelledError) else fail()

    tools = af.ToolSet([fail_async if asynchronous else fail, add])
    failed, fine = [c.result for c in await tools.call_all([call("fail"), call("add", a=1, b=1)], context())]
    assert fine == af.ToolResult(True, "2")
    assert (failed.ok, failed.observation) == (False, "fail failed.")
    expected = RuntimeError if asynchronous and isinstance(error, StopIteration) else type(error)
    assert (failed.error.type, failed.error.where) == (expected.__name__, "tool fail")
    if expected not in (Unspeakable, RuntimeError):  # frames of this package are removed
        assert "in fail" in failed.error.traceback and "function.py" not in failed.error.traceback


async def test_keyboard_interrupt_and_cancellation_propagate() -> None:
    @af.tool(describe="optional")
    def interrupted() -> str:
        raise KeyboardInterrupt

    began = asyncio.Event()

    @af.tool(describe="optional")
    async def waits() -> None:
        began.set()
        await asyncio.Event().wait()

    await errors.check(lambda: interrupted.invoke({}, context()), KeyboardInterrupt)
    task = asyncio.create_task(waits.invoke({}, context()))
    await began.wait()
    task.cancel()
    await errors.check(lambda: task, asyncio.CancelledError)


async def test_calls_of_one_turn_run_concurrently() -> None:
    barrier = threading.Barrier(4, timeout=GUARD)

    @af.tool(timeout=GUARD, describe="optional")
    def meet(i: Annotated[int, "which"]) -> int:
        barrier.wait()  # passes only if all four run at once
        return i

    done = await af.ToolSet([meet]).call_all(
        [af.ToolCall(f"call-{i}", "meet", {"i": i}) for i in range(4)], context()
    )
    assert [(c.id, c.result.observation) for c in done if c.result] == [(f"call-{i}", str(i)) for i in range(4)]


async def test_coroutine_is_cancelled_at_its_timeout() -> None:
    cancelled = asyncio.Event()

    @af.tool(timeout=0.02, describe="optional")
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    result = await slow.try_()
    # A timeout is not a failure of the host.
    assert result == af.ToolResult(False, "slow took longer than 0.02 s and was cancelled.")
    assert cancelled.is_set() and result.seconds >= 0.02


async def test_a_blocked_event_loop_is_charged_only_to_the_call_that_blocks_it() -> None:
    """Innocent calls: a coroutine, a wrapper around one, and a thread that waits for the event loop.

    Looked at: rewards, `reset` and programs of harnesses are called by the same function. Constructors, `start` and
    `close` of environments run in threads.
    """
    limit, ended = 0.3, asyncio.Event()
    loop = asyncio.get_running_loop()

    @af.tool(timeout=limit, describe="optional")
    async def waits() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
        await ended.wait()

    @af.tool(timeout=limit, describe="optional")
    def wraps() -> Any:
        return waits.function()

    @af.tool(timeout=limit, describe="optional")
    def asks() -> None:
        asyncio.run_coroutine_threadsafe(ended.wait(), loop).result()

    @af.tool(timeout=limit, describe="optional")
    async def blocks() -> None:
        await asyncio.sleep(0)
        time.sleep(3 * limit)  # noqa: ASYNC251
        ended.set()

    with pytest.warns(UserWarning, match=r"blocks blocked the event loop and all other chains for more") as warned:
        *innocent, blocking = await asyncio.gather(waits.try_(), wraps.try_(), asks.try_(), blocks.try_())
    assert [result.observation for result in innocent] == ["", "", ""] and len(warned) == 1
    assert blocking.observation == "blocks took longer than 0.3 s and blocked the event loop."


async def test_a_call_whose_thread_waits_for_a_cpu_does_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @af.tool(timeout=0.1, describe="optional")
    async def preempted() -> str:
        time.sleep(0.4)  # noqa: ASYNC251
        return "done"

    monkeypatch.setattr(limits, "_waiting_seconds", time.perf_counter)
    assert (await preempted.try_()).observation == "done"


ENDING = """
import asyncio, os, sys, threading, time
import torch
from agentfly_kit.tools.tool import tool
busy = set()

@tool(timeout=None)
def endless(kind: str, number: int) -> str:
    \"\"\"Never return.

    Args:
        kind: what it does meanwhile.
        number: which one it is.
    \"\"\"
    busy.add(number)
    while kind == "wait":
        time.sleep(3600)
    while kind == "python":
        pass
    a = torch.randn(64, 64)
    while kind == "torch":
        a = torch.tanh(a @ a)
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass

async def go():
    kinds = ["wait", "python", "torch", "torch", "torch", "keeps on"]
    tasks = [asyncio.ensure_future(endless.try_(kind=kind, number=i)) for i, kind in enumerate(kinds)]
    while len(busy) < len(tasks):
        await asyncio.sleep(0.01)
    sys.exit(7) if closes_loop else 1 / 0

for closes_loop in (True, False):
    if os.fork() == 0:
        if closes_loop:
            asyncio.run(go())
        asyncio.new_event_loop().run_until_complete(go())
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.real
def test_interpreter_can_exit_while_tools_compute() -> None:
    """A thread that returned from torch after the interpreter had ended aborted the process."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=GUARD)
    assert done.stdout == "7\n1\n", done.stderr
    assert done.stderr.strip().splitlines()[-1] == "ZeroDivisionError: division by zero", done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@af.tool(describe="optional")
def lookup(person: Annotated[str, "who"], facts: af.FromTask[dict[str, str]], context: af.Context) -> str:
    context.state["asked"] = context.state.get("asked", 0) + 1
    return f"{facts[person]} {context.state['asked']} {context.trajectory_id}"


async def test_task_fields_and_context_are_hidden_and_injected() -> None:
    assert list(parameters(lookup)["properties"]) == ["person"]
    assert repr(lookup) == "<Tool lookup(person: string), hidden: facts, context>"
    here = context()
    for asked in (1, 2):
        assert (await lookup.invoke({"person": "Ann"}, here)).observation == f"Oslo {asked} chain"
    assert (await lookup.try_(person="Ann", task=TASK)).ok
    refused = await lookup.invoke({"person": "Ann", "facts": {"Ann": "Rome"}}, context())
    assert "facts is not a parameter" in refused.observation
    # A field of the task does not replace an argument of the same name.
    assert TASK.fields["expression"] == "trap"
    assert (await calculator.invoke({"expression": "2+3"}, context())).observation == "5"
    assert "expression is missing" in (await calculator.invoke({}, context())).observation

    @af.tool(describe="optional")
    def note(task: Annotated[str, "what to do"], pool: Annotated[str, "where"] = "") -> str:
        return task + pool

    assert (await note.try_(task="wash", pool="city")).observation == "washcity"


async def test_missing_field_is_a_failure_unless_it_has_a_default() -> None:
    @af.tool(describe="optional")
    def with_default(colour: af.FromTask[str] = "red") -> str:
        return colour

    assert (await with_default.invoke({}, context())).observation == "red"
    bare = af.Task("bare", TASK.messages, {"fact": 1})
    result = await lookup.invoke({"person": "Ann"}, context(bare))
    words = (
        "tool lookup requires the field 'facts', which task 'bare' does not have (its fields: fact); "
        "did you mean 'fact'?; rename the parameter or give it a default"
    )
    assert result.error.message == words
    errors.check(lambda: af.ToolSet([lookup, with_default]).check([TASK, bare]), af.errors.TaskError, words)
    af.ToolSet([lookup, with_default]).check([TASK])


class FakeBox:
    """Class with `run` and `close`, which is recognized as a sandbox."""

    opened: typing.ClassVar[list[FakeBox]] = []

    def __init__(self) -> None:
        self.log: list[str] = []
        self.closed = False
        FakeBox.opened.append(self)

    async def run(self, code: str, timeout: float = 5.0) -> str:
        self.log.append(f"{code}>")
        await asyncio.sleep(0.005)
        self.log.append(f"<{code}")
        return f"{code}: {len(self.log)}"

    async def close(self) -> None:
        self.closed = True


@af.tool(describe="optional")
async def execute(code: Annotated[str, "what"], sandbox: FakeBox) -> str:
    if code == "bad":
        raise ArithmeticError("from inside")
    return await sandbox.run(code)


async def test_try_uses_a_temporary_sandbox() -> None:
    FakeBox.opened.clear()
    assert (list(parameters(execute)["properties"]), execute.sandbox_types) == (["code"], (FakeBox,))
    assert [(await execute.try_(code="a")).observation for _ in range(2)] == ["a: 2", "a: 2"]
    assert [box.closed for box in FakeBox.opened] == [True, True]
    assert "Agent(pools=[af.Pool(FakeBox)])" in str((await execute.invoke({"code": "a"}, context())).error)


async def test_calls_that_share_a_sandbox_run_in_order() -> None:
    FakeBox.opened.clear()
    async with af.Pool(FakeBox, size=2) as pool:
        here = af.Context(TASK, trajectory_id="chain", pools=[pool])
        calls = [call("execute", code=c) for c in "abc"]
        done = await af.ToolSet([execute, add]).call_all([*calls, call("add", a=1)], here)
        assert [c.result.observation for c in done if c.result] == ["a: 2", "b: 4", "c: 6", "2"]
        assert (len(FakeBox.opened), FakeBox.opened[0].log) == (1, ["a>", "<a", "b>", "<b", "c>", "<c"])
        await here.close()
        assert pool.snapshot().leased == 0


async def test_unknown_and_malformed_calls_are_observations() -> None:
    tools = af.ToolSet([calculator, add])
    unknown, unreadable = await tools.call_all(
        [call("calculate", x=1), af.ToolCall("call-1", "", {}, error="the tool call is not valid JSON")], context()
    )
    assert unknown.result == af.ToolResult(
        False, "there is no tool named 'calculate'; the tools are: calculator, add", ran=False
    )
    assert unreadable.result == af.ToolResult(False, "the tool call is not valid JSON", ran=False)
    assert (await af.ToolSet().call(call("x"), context())).observation.endswith("there are no tools")
    assert await tools.call_all([], context()) == ()


def test_tool_sets() -> None:
    twice = af.Tool(add.function, name="twice")
    tools = af.ToolSet([calculator, add, twice])
    assert tools.names == ("calculator", "add", "twice")
    assert tools["add"] is add and tools[0] is calculator and tools[1:].names == ("add", "twice")
    assert tools.schemas == tuple(t.schema for t in tools)
    assert "add" in tools  # type: ignore[comparison-overlap]
    assert add in tools
    assert repr(tools) == "<ToolSet calculator, add, twice>"
    # Sets are changed by copies and compared by content.
    start = af.ToolSet([calculator, add])
    more = start.add(twice)
    assert more == tools and start.names == ("calculator", "add")
    assert more.remove("twice") == start and more != start and hash(more.remove("twice")) == hash(start)
    revised = start.revise(af.Tool(add.function, name="calculator"))
    assert revised.names == start.names and revised != start
    assert revised.revise(calculator) == start
    assert af.ToolSet([add, calculator]) != start, "the order is that of the prompt"
    assert af.ToolSet([Shop(3).price]) != af.ToolSet([Shop(4).price]), "other instances are other tools"
    shop = Shop(3)
    assert af.ToolSet([shop.price]) == af.ToolSet([shop.price])


async def test_rerun_raises_the_exception_of_the_tool() -> None:
    pool = af.Pool(FakeBox, size=1)
    here = af.Context(TASK, trajectory_id="chain", pools=[pool])
    calls = [
        call("execute", code="a"), call("execute", code="bad"), call("nothing"), call("calculator", expression="2+3"),
    ]  # fmt: skip
    done = await af.ToolSet([execute, calculator]).call_all(calls, here)
    await here.close()
    assert (await done[0].rerun()).observation == "a: 2"
    with pytest.raises(ArithmeticError, match="from inside") as caught:
        await done[1].rerun()
    assert caught.traceback[-1].name == "execute"
    await errors.check(done[2].rerun, Exception, "its tool is unknown")
    assert (await done[3].rerun()).observation == "5"
    assert pool.snapshot().leased == 0
    await pool.close()
    kept = pickle.loads(pickle.dumps(done[3]))
    assert kept == done[3]
    assert kept.rerunner is None


def cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: with its own file name, and its source in linecache."""
    file = f"<cell {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names


CELL = '''
from typing import Annotated
from agentfly_kit.tools.tool import tool
LIMIT = 3
def helper(x):
    return x + 1
@tool
def f(x: Annotated[int, "n"]) -> int:
    """Do."""
    return helper(x) * LIMIT
'''


async def test_redefined_tool_is_used_by_new_sets_only() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    old = cell(CELL, names)["f"]
    tools = af.ToolSet([old, calculator])
    assert "return helper(x) * LIMIT" in old.source
    assert tools.redefined() == ()
    assert af.ToolSet([af.tool(timeout=9)(old.function)]).redefined() == ()  # the same function with other settings
    assert cell(CELL, names)["f"].fingerprint == old.fingerprint  # the same source gives the same fingerprint
    assert tools.redefined() == ()
    new = cell(CELL.replace("* LIMIT", "- LIMIT"), names)["f"]
    assert tools.redefined() == ("f",)
    assert (await tools.call(call("f", x=1), context())).observation == "6"  # the old set keeps the old tool
    assert (await af.ToolSet([new]).call(call("f", x=1), context())).observation == "-1"


NESTED = CELL.replace("helper(x) * LIMIT", "(lambda: helper(x) * LIMIT)()")
ATTRIBUTE = CELL.replace("helper(x) * LIMIT", "x.real") + "real = 1\n"


@pytest.mark.parametrize(
    ("source", "old", "new", "same"),
    [
        (CELL, "* LIMIT", "- LIMIT", False),
        (CELL, "LIMIT = 3", "LIMIT = 4", False),
        (CELL, "return x + 1", "return x + 2", False),
        (CELL, '"n"', '"number"', False),
        (CELL, "@tool", "@tool(timeout=9)", False),
        (NESTED, "LIMIT = 3", "LIMIT = 4", False),
        (ATTRIBUTE, "real = 1", "real = 2", True),  # the name of an attribute, not of the variable
        (CELL, "LIMIT = 3", "LIMIT = 3\nUNRELATED = 1", True),
    ],
)
def test_fingerprint_changes_with_the_behaviour(source: str, old: str, new: str, same: bool) -> None:
    before = cell(source, {"__name__": "__main__"})["f"].fingerprint
    assert (cell(source.replace(old, new), {"__name__": "__main__"})["f"].fingerprint == before) is same


def test_fingerprint_without_source_is_stable_across_processes() -> None:
    code = CELL.replace("LIMIT = 3", "LIMIT = frozenset('abcdefgh')") + "\nprint(f.fingerprint, f.source[:10])"
    command = [sys.executable, "-c", code]
    seen = {
        subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert "<no source" in seen.pop()
    found = []
    for source in (CELL, CELL.replace("* LIMIT", "- LIMIT")):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "<nowhere>", "exec"), names)
        found.append(names["f"].fingerprint)
    assert found[0] != found[1]


# --- any callable ---------------------------------------------------------------------------------


class Shop:
    """Prices of a shop."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def price(self, amount: Annotated[int, "how many"]) -> int:
        """Return the price."""
        return amount * self.factor

    def __call__(self, amount: Annotated[int, "how many"]) -> int:
        return amount + self.factor


async def test_methods_partials_and_objects_are_tools() -> None:
    tools = af.ToolSet([Shop(3).price, functools.partial(add.function, b=5), Shop(4)])
    assert tools.names == ("price", "add", "Shop")
    assert (await tools["price"].try_(amount=2)).observation == "6"
    assert (await tools["add"].try_(a=2)).observation == "7"
    assert (await tools["Shop"].try_(amount=2)).observation == "6"
    assert tools["Shop"].schema["function"]["description"] == "Prices of a shop."
    assert list(parameters(tools["add"])["properties"]) == ["a"], "the model must not change what the partial fixes"
    assert not (await tools["add"].try_(a=2, b=1)).ok
    assert af.tool(functools.partial(add.function, b=5)).fingerprint == tools["add"].fingerprint
    assert af.tool(functools.partial(add.function, b=6)).fingerprint != tools["add"].fingerprint

    def closure(factor: int) -> str:
        @af.tool(describe="optional")
        def times(x: Annotated[int, "n"]) -> int:
            return x * factor

        return times.fingerprint

    assert closure(2) == closure(2) != closure(3)


# --- schemas --------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {
        "city-name": {"type": "string"}, "days": {"type": ["integer", "null"]}, "unit": {"enum": ["c", "f"]},
        "points": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["city-name"],
}  # fmt: skip


async def test_a_tool_from_a_schema_checks_the_types_and_passes_what_was_given() -> None:
    weather = af.Tool.from_schema("weather", CITY, lambda **given: given, description="Return the weather.")
    assert parameters(weather) == CITY
    assert (await weather.try_(**{"city-name": "Oslo"})).observation == '{"city-name":"Oslo"}'
    assert (await weather.try_(**{"city-name": "Oslo", "points": None})).observation == '{"city-name":"Oslo"}'
    assert (await weather.try_(**{"city-name": "Oslo", "points": [1, 2.5]})).ok
    for wrong in ({}, {"city-name": 3}, {"city-name": "a", "unit": "k"}, {"city-name": "a", "x": 1},
                  {"city-name": "a", "points": ["x"]}):  # fmt: skip
        result = await weather.try_(**wrong)
        assert not (result.ok or result.ran) and "weather was not run" in result.observation, wrong
    whole = {"type": "function", "function": {"name": "w", "description": "Weather.", "parameters": CITY}}
    assert af.Tool.from_schema("weather", whole, lambda **given: given).description == "Weather."

    def guess(context: af.Context, **arguments: Any) -> str:
        return f"{context.task.id} {arguments['number']}"

    made = af.Tool.from_schema("guess", {"properties": {"number": {"type": "integer"}}}, guess)
    assert (await made.try_(number=2)).observation == "none 2"
