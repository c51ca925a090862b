"""Exact evaluation of arithmetic expressions: integers, fractions, decimals, powers and roots.

Expressions are parsed, never executed. Anything but arithmetic is rejected, and so are results that are too large.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
from collections.abc import Callable
from typing import Any

_LONGEST = 200
_DIGITS = 400
_POWER = 1000
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
    """Raised for text that is not an exactly computable expression. The message may be shown to a model."""


def value(text: str) -> Any:
    """Return the exact value of an expression as a SymPy number.

    `^` and `**` both mean power; `sqrt(...)`, `pi` and `e` are supported.

    Raises:  NotArithmetic.
    """
    if len(text) > _LONGEST:
        raise NotArithmetic(f"the expression has {len(text)} characters; at most {_LONGEST} are read")
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = text.strip().replace("^", "**").replace("×", "*").replace("−", "-").replace("{", "(").replace("}", ")")
    try:
        tree = ast.parse(text.replace("√", "sqrt"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotArithmetic(f"{text!r} is no arithmetic expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    import sympy

    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if type(node.value) is int:
            return sympy.Integer(node.value)
        return sympy.Rational(repr(node.value))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return sympy.pi if node.id == "pi" else sympy.E
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "sqrt" and len(node.args) == 1 and not node.keywords:
        return _power(_value(node.args[0]), sympy.Rational(1, 2))
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left), _value(node.right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](a, b)
        if isinstance(node.op, ast.Div):
            if b == 0:
                raise NotArithmetic("division by zero")
            return a / b
        if isinstance(node.op, ast.Pow):
            return _power(a, b)
    raise NotArithmetic("only numbers, + - * / ^, brackets, sqrt(), pi and e")


def _power(base: Any, exponent: Any) -> Any:
    if base == 0 and not (exponent.is_positive or exponent == 0):
        raise NotArithmetic("division by zero")
    if base.is_negative and not exponent.is_integer:
        raise NotArithmetic("a root of a negative number")
    if not exponent.is_Rational or abs(exponent) > _POWER:
        raise NotArithmetic(f"the exponent is no fraction from -{_POWER} to {_POWER}")
    digits = max(len(str(abs(part))) for part in base.as_numer_denom())
    if digits * max(1, abs(exponent)) > _DIGITS:
        raise NotArithmetic(f"the result has more than {_DIGITS} digits")
    return base**exponent


def shown(number: Any) -> str:
    """Format a SymPy number as a string that `value` can parse, such as 1/2 or 2*2^(1/2)."""
    import sympy

    text: str = sympy.sstr(number)
    return re.sub(r"sqrt\(([^()]*)\)", lambda m: f"{_bracketed(m[1])}^(1/2)", text).replace("**", "^")


def _bracketed(text: str) -> str:
    return text if re.fullmatch(r"\w+", text) else f"({text})"


def same(a: str, b: str) -> bool | None:
    """Return True if two expressions have the same exact value, such as 2/4 and 1/2 or 8^(1/2) and 2*2^(1/2).

    None if one of them is not arithmetic.
    """
    try:
        difference = value(a) - value(b)
    except NotArithmetic:
        return None
    return bool(difference == 0 or difference.equals(0))


def equivalent(response: str, answer: str) -> bool:
    """Return True if a response is equivalent to the reference answer.

    Exact values are compared first. If one side is not arithmetic, math-verify decides if it is installed
    (`pip install "agentfly_kit[envs]"`); it also understands sets, intervals and LaTeX. Otherwise the strings are
    compared. Responses that could take unbounded time (power towers, factorials, sums and products) are only compared
    as strings.
    """
    exactly = same(response, answer)
    if exactly is not None:
        return exactly
    if response.strip() == answer.strip():
        return True
    if _is_heavy(response):
        return False
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError:
        return False
    # math-verify's timeouts use signals, which work only in the main thread, so they are disabled here; silence its
    # warnings about that.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (answer, response))
        return bool(verify(gold, given, timeout_seconds=None))
    except Exception:  # model output is arbitrary text: one that cannot be parsed counts as wrong
        return False


_LONGEST_LATEX = 500
_HEAVY = re.compile(r"!|factorial|gamma|zeta|\\(?:[a-z]?binom|choose|sum|prod|i*int|oint|lim|big|Gamma)", re.IGNORECASE)


def _is_heavy(text: str) -> bool:
    """Return True if evaluating the text could take long. A running thread cannot be interrupted."""
    if len(text) > _LONGEST_LATEX or _HEAVY.search(text):
        return True
    growth = 1
    for match in re.finditer(r"(?:\^|\*\*|sqrt\s*(?=\[))\s*", text):
        exponent, after = _group(text, match.end())
        if re.search(r"\^|\*\*", exponent) or re.match(r"\s*(?:\^|\*\*)", after):
            return True  # a power tower
        for number in re.findall(r"[0-9]+", exponent):
            growth *= max(1, int(number))
    return growth > 10 * _POWER


_TOKEN = re.compile(r"-?(\\[a-zA-Z]+|[0-9.]+|[a-zA-Z]|)")


def _group(text: str, at: int) -> tuple[str, str]:
    """Split the text from index `at` into its first group and the rest.

    A group is a parenthesized expression, or one number, letter or LaTeX command with its arguments.
    """
    token = _TOKEN.match(text, at)
    assert token is not None
    end = token.end()
    while end < len(text) and text[end] in "{([" and (token[1] == "" or token[1].startswith("\\")):
        depth = 0
        for i in range(end, len(text)):
            depth += (text[i] in "{([") - (text[i] in "})]")
            end = i + 1
            if depth == 0:
                break
        if token[1] == "":
            break
    return text[at:end], text[end:]
