"""Tools given as source code, which is parsed with `ast` and executed only in the sandbox of the chain."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Union

from agentfly_kit.errors import ToolSchemaError
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.tools.schema import REQUIRED, Arguments, Parameter, parse_docstring

MAX_SOURCE = 64_000

_PLAIN: dict[str, Any] = {
    "str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "Any": Any,
}  # fmt: skip
# Program that calls the tool in the sandbox. It defines only the global name `_call_tool`, so the model's variables are
# kept.
_PROGRAM = """\
def _call_tool():
    import __future__, json
    scope = {{"__name__": "tool"}}
    exec(compile({source!r}, "<tool {name}>", "exec", __future__.annotations.compiler_flag), scope)
    result = scope[{name!r}](**json.loads({arguments!r}))
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, separators=(",", ":")))
_call_tool()
"""


@dataclass(frozen=True)
class Written:
    """Source code of a function, with the name, description and JSON schema parsed from it."""

    source: str
    name: str
    description: str
    schema: dict[str, Any]
    timeout: float = 10.0


def parse_source(source: str, timeout: float = 10.0) -> Written:
    """Parse the source code of one function without executing it.

    Raises:
        ToolSchemaError: if the source is not a single function with types and descriptions.
    """
    if not isinstance(source, str) or len(source) > MAX_SOURCE:
        given = f"{len(source):,} characters" if isinstance(source, str) else type(source).__name__
        raise ToolSchemaError(f"source must be a string of at most {MAX_SOURCE:,} characters, got {given}")
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ToolSchemaError(f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ToolSchemaError(f"source must be Python code, got {type(error).__name__}: {error}") from None
    # Other statements would be executed when the function is defined in the sandbox, outside the call.
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            raise _error(
                node,
                "source must be one function defined with `def`, without other statements; put imports inside it",
            )
    if len(body) != 1:
        where = body[1] if body else ast.Pass(lineno=1)
        raise _error(where, f"source must define exactly one function, got {len(body)}")
    function = body[0]
    assert isinstance(function, ast.FunctionDef)
    if function.decorator_list:
        raise _error(function.decorator_list[0], "the function must not have decorators")
    # Models pass all arguments by name.
    signature = function.args
    for special in (*signature.posonlyargs, signature.vararg, signature.kwarg):
        if special is not None:
            raise _error(special, f"parameter {special.arg!r} must accept a keyword argument; remove /, * and **")
    description, documented = parse_docstring(ast.get_docstring(function), function.name)
    if not description:
        raise _error(function, "the function must have a docstring")
    # Defaults belong to the last positional parameters.
    positional = [REQUIRED] * (len(signature.args) - len(signature.defaults)) + list(signature.defaults)
    defaults = [*positional, *(REQUIRED if node is None else node for node in signature.kw_defaults)]
    parameters = [
        Parameter(p.arg, _annotation(p, p.annotation), default if default is REQUIRED else _literal(default))
        for p, default in zip((*signature.args, *signature.kwonlyargs), defaults, strict=True)
    ]
    arguments = Arguments(function.name, parameters, documented)
    return Written(source, function.name, description, arguments.schema, timeout)


def _error(node: Any, text: str) -> ToolSchemaError:
    return ToolSchemaError(f"line {node.lineno}: {text}")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        raise _error(node, f"a default must be a literal, got {ast.unparse(node):.80}") from None


def _annotation(owner: ast.arg, node: ast.expr | None) -> Any:
    """Convert the syntax tree of an annotation to a type, without evaluating it."""
    if node is None:
        raise _error(owner, f"parameter {owner.arg!r} must have a type, for example {owner.arg}: str")
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in _PLAIN:
        return _PLAIN[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_annotation(owner, node.left), _annotation(owner, node.right)]  # noqa: UP007
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        of = node.value.id
        if of == "Literal" and len(values) == len(parts) and all(isinstance(v, str | int | None) for v in values):
            return Literal[tuple(values)]
        if of == "Optional" and len(parts) == 1:
            return Union[_annotation(owner, parts[0]), None]  # noqa: UP007
        if of == "Union":
            return Union[tuple(_annotation(owner, part) for part in parts)]  # noqa: UP007
        if of == "list" and len(parts) == 1:
            return list[_annotation(owner, parts[0])]  # type: ignore[misc]
        if of == "dict" and len(parts) == 2 and _annotation(owner, parts[0]) is str:
            return dict[str, _annotation(owner, parts[1])]  # type: ignore[misc]
    raise _error(
        node, f"parameter {owner.arg!r} must have a type made of str, int, float, bool, list, dict, Any, Literal and "
        f"unions, got {ast.unparse(node):.80}",
    )  # fmt: skip


def sandboxed(written: Written) -> Callable[..., Any]:
    """Create a function that runs the source code of `written` in the chain's sandbox with the given arguments."""
    source, name, timeout = written.source, written.name, written.timeout  # part of the fingerprint

    async def call(sandbox: PythonSandbox, **arguments: Any) -> SandboxResult:
        program = _PROGRAM.format(source=source, name=name, arguments=json.dumps(arguments))
        return await sandbox.run(program, timeout=timeout)

    return call
