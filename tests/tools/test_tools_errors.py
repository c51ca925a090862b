"""Errors of tools, sets of tools, contexts and MCP servers: definitions and arguments that are rejected."""

import threading
import typing
from typing import Annotated, Any

import errors
from agents import chat
from test_context import GUESS_TASK, TASK, Box, FakePool, ForkingBox, Guess, OtherBox
from test_source import one
from test_tools import Counter, add, calculator

import agentfly_kit as af
from agentfly_kit.errors import SandboxError, SettingsError, TaskError, ToolSchemaError
from agentfly_kit.tools import builtin as toolbox


def silent(n: Annotated[int, "a"]) -> str:
    return ""


def yields(n: Annotated[int, "a"]) -> Any:
    """Do."""
    yield n


def defined(signature: str) -> Any:
    """Return a function with the given parameters, whose docstring describes `a` and `b`."""
    names: dict[str, Any] = {"threading": threading, "typing": typing}
    exec(f"def f({signature}):\n    'Do.\\n\\nArgs:\\n    a: one\\n    b: other'", names)
    return names["f"]


UNBOUND = "Counter.step is a method, which must be bound to an instance; use Counter(...).step"


test_errors = errors.rejected(
    (lambda: af.tool(defined("a")), ToolSchemaError, "f: parameter 'a' must have a type, for example a: str"),
    (lambda: af.tool(defined("c: int")), ToolSchemaError,
     "f: parameter 'c' must have a description (the docstring describes 'a', 'b'); add to the docstring\n\n"
     "    Args:\n        c: description"),
    (lambda: af.tool(defined("c: int")), ToolSchemaError, "@af.tool(describe='optional')"),
    (lambda: af.tool(defined("*a: int")), ToolSchemaError,
     "f: parameter 'a' must accept a keyword argument, got a variadic positional"),
    (lambda: af.tool(defined("**a: int")), ToolSchemaError,
     "f: parameter 'a' must accept a keyword argument, got a variadic keyword"),
    (lambda: af.tool(defined("a: int, /")), ToolSchemaError,
     "f: parameter 'a' must accept a keyword argument, got a positional-only"),
    (lambda: af.tool(defined("a: threading.Thread")), ToolSchemaError,
     "f: parameter 'a' must have a type with a JSON schema, got threading.Thread"),
    (lambda: af.tool(defined("a: typing.Callable[[int], int]")), ToolSchemaError,
     "f: parameter 'a' must have a type with a JSON schema"),
    (lambda: af.tool(defined("a: float = float('inf')")), ToolSchemaError,
     "f: the default of parameter 'a' must be a JSON value of its type, got inf"),
    (lambda: af.tool(defined("a: 'Nowhere'")), ToolSchemaError,
     "f: annotations must be resolvable, got NameError: name 'Nowhere' is not defined"),
    (lambda: af.tool(silent), ToolSchemaError,
     'silent: the function must have a docstring, for example\n\n    """Return the current time."""'),
    (lambda: af.tool(yields), ToolSchemaError, "a tool must return one result, got the generator yields"),
    (lambda: af.tool(len), ToolSchemaError, "a tool must be a function defined with `def`, got len; use a"),
    (lambda: af.tool(dict), ToolSchemaError, "got dict; af.envs.agent(Class, ...) turns"),
    (lambda: af.tool(add), ToolSchemaError, "add is already a tool"),
    (lambda: af.tool(3), ToolSchemaError, "got 3"),
    (lambda: af.tool("text"), ToolSchemaError, "got 'text'"),
    (lambda: af.tool(int), ToolSchemaError, "got int"),
    *((lambda name=name: af.tool(name=name)(add.function), ToolSchemaError, "must consist of letters")
      for name in ("", "two words", "9lives", "ä", "x" * 65)),
    (lambda: af.ToolSet([Counter.step]), ToolSchemaError, UNBOUND),
    (lambda: Counter.step.try_(by=1), ToolSchemaError, UNBOUND),
    (lambda: add.try_(1, 2, 3), TypeError, "got 3 positional arguments"),
    *((lambda schema=schema: af.Tool.from_schema("weather", schema, lambda **given: given), ToolSchemaError, "weather:")
      for schema in (None, [], {"type": "string"}, {"properties": []}, {"properties": {"a": 3}},
                     {"properties": {"a": {"default": object()}}})),
    (lambda: af.ToolSet([add, af.tool(name="add")(calculator.function)]), ToolSchemaError,
     "names of tools must be unique, got 'add' twice"),
    (lambda: af.ToolSet(add), ToolSchemaError, "tools must be a list of tools, got <Tool add"),
    (lambda: af.ToolSet([add]).add(add), ToolSchemaError, "unique"),
    (lambda: af.ToolSet([add]).revise(calculator), KeyError, "calculator"),
    (lambda: af.ToolSet([add]).remove("calculator"), KeyError, "calculator"),
)  # fmt: skip


test_errors_of_sources_name_the_line = errors.rejected(
    *((lambda source=source: af.Tool.from_source(source), ToolSchemaError, text) for source, text in (
        (3, "source must be a string"),
        ("x" * 1_000_000, "at most 64,000 characters, got 1,000,000"),
        ("", "exactly one function, got 0"),
        ("def f(:", "line 1: "),
        ("def f():\0 pass", "source"),
        ("(" * 5000, "line 1"),
        ("import os\n" + one("pass"), "line 1: source must be one function"),
        ("open('x', 'w')", "line 1: source must be one function"),
        ("class f:\n    pass", "line 1: source must be one function"),
        ("async def f():\n    pass", "line 1: source must be one function"),
        (one("pass") + one("pass"), "line 4: source must define exactly one function, got 2"),
        ("def f():\n    pass", "line 1: the function must have a docstring"),
        ("@print\n" + one("pass"), "line 1: the function must not have decorators"),
        (one("pass", "a"), "line 1: parameter 'a' must have a type"),
        (one("pass", "a: int"), "parameter 'a' must have a description"),
        (one("pass", "a: os.system('x')"), "line 1: parameter 'a' must have a type made of"),
        (one("pass", "a: Path"), "got Path"),
        (one("pass", "a: Literal[f()]"), "must have a type made of"),
        (one("pass", "a: int = f()"), "line 1: a default must be a literal"),
        (one("pass", "*a"), "line 1: parameter 'a' must accept a keyword argument"),
        (one("pass", "**a"), "line 1: parameter 'a' must accept a keyword argument"),
    )),
)  # fmt: skip


def sandbox_of(wanted: type, *provided: type) -> Any:
    return af.Context(TASK, pools=[FakePool(each) for each in provided]).sandbox(wanted)


def holding(**state: Any) -> af.Context:
    context = af.Context(TASK, trajectory_id="a")
    context.state.update(state)
    return context


async def connect(server: Any, **settings: Any) -> None:
    async with toolbox.mcp(server, **settings):
        pass


test_errors_of_contexts_and_servers = errors.rejected(
    (lambda: sandbox_of(ForkingBox, OtherBox), SettingsError,
     "exactly one pool must provide a ForkingBox, got 0 (pools: OtherBox); pass Agent(pools=[af.Pool(ForkingBox)])"),
    (lambda: sandbox_of(Box, Box, Box), SettingsError, "exactly one pool must provide a Box, got 2"),
    (lambda: holding(game=[1], lock=threading.Lock()).fork("b"), SandboxError,
     "keep in context.state (game, lock) cannot be copied (TypeError"),
    (lambda: af.envs.agent(Guess, af.ScriptedEngine(["7"]), chat=chat(), size=1).rollout([GUESS_TASK, TASK]), TaskError,
     "Guess.reset requires the field 'target', which task 't' does not have (its fields: answer, lock"),
)  # fmt: skip
