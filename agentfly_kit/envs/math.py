"""math: compute exact values with fractions, powers and roots. The answer may be written in any notation."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

from agentfly_kit.envs import exact
from agentfly_kit.envs.calculator import Calculator, expert_player, random_player
from agentfly_kit.envs.family import Family, hash_split, row_id
from agentfly_kit.envs.verifier import Verifier
from agentfly_kit.tools.context import Context

_LONGEST = 500
# Disable math-verify's time limits, which need signals and thus the main thread, and hide the resulting warnings.
_VERIFY = """
import logging
from math_verify import parse, verify
for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)
gold, given = (parse(f"${text}$", parsing_timeout=None) for text in data)
score = verify(gold, given, timeout_seconds=None)
"""


class MathVerifier(Verifier):
    """Sandbox that runs the package math-verify."""

    module = "math_verify"


class Math(Calculator):
    """Calculator environment whose answers may be written in any equivalent form."""

    reward_sandboxes = (MathVerifier,)

    async def reward(self, final: str | None, answer: str | float, context: Context) -> float:  # type: ignore[override]
        """Return 1 if the final text, or the content of its last `\\boxed{...}`, is equivalent to the answer, else 0.

        Two arithmetic expressions are compared by value, other texts as strings. If such strings differ and the package
        math-verify is installed (`pip install "agentfly_kit[envs]"`), a final text of at most 500 characters is checked
        in a sandbox by math-verify, which also understands sets, intervals and LaTeX.
        """
        if final is None:
            return 0.0
        given, expected = exact.boxed(final), exact.boxed(str(answer))
        same = exact.same(given, expected)
        if same is not None or given.strip() == expected.strip():
            return float(same is not False)
        if len(given) > _LONGEST or importlib.util.find_spec("math_verify") is None:
            return 0.0
        return await (await context.sandbox(MathVerifier)).score(_VERIFY, (expected, given))


_FORMS = (
    "{a}/{b} + {c}/{d}", "{a}/{b} - {c}/{d}", "{a}/{b} * {c}/{d}", "({a}/{b})^2 + {c}", "{a}*{b}^(1/2) + {c}*{b}^(1/2)",
    "({a}^2*{b})^(1/2)", "{a}^3 - {b}^2", "({a} + {b}^(1/2))*({a} - {b}^(1/2))",
)  # fmt: skip


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "answer"}. The text of an expression determines its split."""
    rng = random.Random(f"math {split} {seed}")
    found: dict[str, str] = {}
    while len(found) < n:
        a, b, c, d = (rng.randint(2, 19) for _ in range(4))
        text = rng.choice(_FORMS).format(a=a, b=b, c=c, d=d)
        if hash_split(f"math split {text}") == split:
            found.setdefault(text, exact.shown(exact.value(text)))
    return [
        {"id": row_id("math", split, seed, i), "question": f"What is the exact value of {text}?", "answer": answer}
        for i, (text, answer) in enumerate(found.items())
    ]


family = Family(
    name="math",
    what="exact values of fractions, powers and roots, in any notation: 2/4 or 1/2, 8^(1/2) or 2*2^(1/2)",
    environment=Math,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
    splits={"train": 512, "test": 128},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
