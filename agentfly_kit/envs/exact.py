"""Exact evaluation of arithmetic expressions: integers, fractions, decimals, powers and roots.

Expressions are parsed, never executed. Everything except arithmetic is rejected, as are numbers with more than 400
digits, so the running time of every function is bounded.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_LONGEST = 200
_DIGITS = 400
_POWER = 1000
# Numbers of digits to which irrational values are computed and compared. Both exceed twice _DIGITS, so that values such
# as (1+sqrt(2))^n are distinguished from the nearest integer.
_PRECISION, _COMPARED = 1000, 900
_CONSTANTS = ("pi", "e")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LATEX = (
    (re.compile(r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\\(?:cdot|times)"), "*"),
    (re.compile(r"\\(?:left|right|,|;|!)|\$"), ""),
)


class NotArithmetic(ValueError):
    """Raised for text that is not an expression with an exact value. The message may be shown to a model."""


def value(text: str) -> Any:
    """Return the exact value of an arithmetic expression as a SymPy number.

    `^` and `**` both mean power; `sqrt(...)`, `pi` and `e` are supported.

    Raises:  NotArithmetic for any other text.
    """
    if len(text) > _LONGEST:
        raise NotArithmetic(f"an expression must have at most {_LONGEST} characters, got {len(text)}")
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = text.strip().replace("^", "**").replace("×", "*").replace("−", "-").replace("{", "(").replace("}", ")")
    text = text.replace("√", "sqrt")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotArithmetic(f"{text!r} is not an arithmetic expression") from None
    return _value(tree.body, text)


def _value(node: ast.expr, text: str) -> Any:
    import sympy

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        decimal = Decimal(ast.get_source_segment(text, node) or "")
        if abs(decimal.adjusted()) > _DIGITS:
            raise NotArithmetic(f"a number has more than {_DIGITS} digits")
        return sympy.Rational(Fraction(decimal))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return sympy.pi if node.id == "pi" else sympy.E
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, text)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "sqrt" and len(node.args) == 1 and not node.keywords:
        return _power(_value(node.args[0], text), sympy.Rational(1, 2))
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left, text), _value(node.right, text)
        if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](a, b))
        if isinstance(node.op, ast.Div):
            if _sign(b) == 0:
                raise NotArithmetic("division by zero")
            return _checked(a / b)
        if isinstance(node.op, ast.Pow):
            return _checked(_power(a, b))
    raise NotArithmetic("only numbers, + - * / ^, parentheses, sqrt(), pi and e are supported")


def _checked(number: Any) -> Any:
    import sympy

    if any(max(abs(part.p), part.q) >= 10**_DIGITS for part in number.atoms(sympy.Rational)):
        raise NotArithmetic(f"the result has more than {_DIGITS} digits")
    return number


def _sign(number: Any) -> int:
    """Return the sign of a real number. Unlike SymPy's sign properties, this function always terminates."""
    if not number.is_Rational:
        number = number.evalf(15, maxn=_PRECISION)
        if abs(number) * 10**_COMPARED < 1:
            return 0
    return bool(number > 0) - bool(number < 0)


def _power(base: Any, exponent: Any) -> Any:
    if not exponent.is_Rational or abs(exponent) > _POWER:
        raise NotArithmetic(f"an exponent must be a fraction from -{_POWER} to {_POWER}")
    sign = _sign(base)
    if sign == 0 and exponent < 0:
        raise NotArithmetic("division by zero")
    if sign < 0 and not exponent.is_Integer:
        raise NotArithmetic("roots of negative numbers are not supported")
    digits = max(len(str(abs(part))) for part in base.as_numer_denom())
    if digits * max(1, abs(exponent)) > _DIGITS:
        raise NotArithmetic(f"the result has more than {_DIGITS} digits")
    return base**exponent


def shown(number: Any) -> str:
    """Format a SymPy number as a string that `value` can parse, such as 1/2 or 2*2^(1/2)."""
    import sympy

    text: str = sympy.sstr(number)
    text = re.sub(r"sqrt\((\w+)\)", r"\1^(1/2)", text)
    return re.sub(r"sqrt(\([^()]*\))", r"\1^(1/2)", text).replace("**", "^")


def boxed(text: str) -> str:
    """Return the content of the last `\\boxed{...}` in a text, or the whole text if there is none."""
    _, found, content = text.rpartition("\\boxed{")
    depth = 1
    for end, char in enumerate(content if found else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return content[:end]
    return text


def same(a: str, b: str) -> bool | None:
    """Return True if two expressions have the same value, such as 2/4 and 1/2 or 8^(1/2) and 2*2^(1/2).

    If a text contains `\\boxed{...}`, its content is the expression. Rational values are compared exactly, others to
    900 digits. Returns None if either expression is not arithmetic.
    """
    try:
        one, other = value(boxed(a)), value(boxed(b))
    except NotArithmetic:
        return None
    difference = one - other
    if difference.is_Rational:
        return bool(difference == 0)
    one, other = (number.evalf(_PRECISION) for number in (one, other))
    return bool(abs(one - other) * 10**_COMPARED <= max(1, abs(one), abs(other)))


def equivalent(response: str | None, answer: str | float) -> bool:
    """Return True if a response equals the reference answer. No sandbox is used.

    If a text contains `\\boxed{...}`, its content is compared. Two arithmetic expressions are compared by value, other
    texts as strings. For LaTeX such as sets and intervals, use the reward of `af.envs.math`.
    """
    if response is None:
        return False
    exactly = same(response, str(answer))
    return boxed(response).strip() == boxed(str(answer)).strip() if exactly is None else exactly
