"""Mutations of Python programs: single-line bugs that change a comparison, an operator, a number or a name.

Source: DeMillo, Lipton and Sayward, "Hints on test data selection", Computer 11 (4), 1978, and the usual operators of
mutation testing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not"),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"),
    ast.Div: ("/", "*"), ast.BitOr: ("|", "&"),
}  # fmt: skip
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "ljust": "rjust",
    "rjust": "ljust",
    "rpartition": "partition",
}


@dataclass(frozen=True)
class Mutation:
    """A change to one line. Lines are numbered from 1. `right` is the original line, and `broken` the mutated one."""

    line: int
    right: str
    broken: str
    kind: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.right.strip()} -> {self.broken.strip()}"


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of a Python source that still compile, in line order.

    Raises:  SyntaxError if `source` is not valid Python.
    """
    lines = source.splitlines()
    found: dict[tuple[int, str], Mutation] = {}
    for kind, line, start, end, new in _edits(ast.parse(source), lines):
        right = lines[line - 1]
        # ast counts columns in UTF-8 bytes.
        data = right.encode()
        broken = (data[:start] + new.encode() + data[end:]).decode()
        if broken == right or (line, broken) in found:
            continue
        try:
            compile("\n".join([*lines[: line - 1], broken, *lines[line:]]), "<mutation>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        found[line, broken] = Mutation(line, right, broken, kind)
    return sorted(found.values(), key=lambda m: (m.line, m.broken))


def _edits(tree: ast.AST, lines: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield each possible mutation as (kind, line, first byte in the line, end byte, replacement text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if type(op) in _COMPARISONS:
                    yield from _between("comparison", left, right, *_COMPARISONS[type(op)], lines)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield from _between("operator", node.left, node.right, *_OPERATORS[type(node.op)], lines)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _between("logic", left, right, old, new, lines)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool) and node.lineno == node.end_lineno:
            number: Any = node.value
            news = (
                [str(not number)]
                if type(number) is bool
                else [str(number + 1), *([str(number - 1)] if number else [])]
            )
            for new in news:
                yield "number", node.lineno, node.col_offset, node.end_col_offset or 0, new
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            yield "negation", node.lineno, node.col_offset, node.operand.col_offset, ""
        elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
            yield "name", node.lineno, node.col_offset, node.end_col_offset or 0, _NAMES[node.id]
        elif isinstance(node, ast.Attribute) and node.attr in _NAMES and node.end_col_offset is not None:
            yield (
                "name",
                node.end_lineno or 0,
                node.end_col_offset - len(node.attr),
                node.end_col_offset,
                _NAMES[node.attr],
            )


def _between(
    kind: str, left: ast.expr, right: ast.expr, old: str, new: str, lines: list[str]
) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield the edit that replaces the operator between two operands on the same line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    line, start = right.lineno, left.end_col_offset
    between = lines[line - 1].encode()[start : right.col_offset].decode()
    # Only parentheses and whitespace can surround the operator.
    match = re.fullmatch(rf"[\s)]*({re.escape(old)})[\s(]*", between)
    if match:
        yield kind, line, start + match.start(1), start + match.end(1), new
