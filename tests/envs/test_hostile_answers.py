"""Every text that a model can write is scored, in bounded time: answers, arguments of tools, and judges' outputs."""

import ast
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentfly_kit as af
from agentfly_kit.envs import qa, retrieval
from agentfly_kit.envs.alfworld import official
from agentfly_kit.envs.alfworld.house import House

INSTALLED = [
    name for name in af.envs.FAMILIES if not getattr(af.envs, name).family.missing and name != "scienceworld"
]
LONG = 100_000

ANSWERS = (
    "", " \n\t", "\x00", "\ud800", "\u202e\u0661\u0662", "nan", "inf", "-Infinity", "1e999", "1e999999999",
    "0x" + "f" * 150, "9**9**9", "9^9^9^9", "(x+y+z+w)^{999}", "\\frac{" * 60 + "1" + "}{2}" * 60,
    "\\sqrt{" * 80 + "2" + "}" * 80,
    "(10^8)!", "\\prod_{n=1}^{10^9} n", "\\binom{10^9}{10^8}", "\\int_0^1 x^{x^{x^x}} dx",
    "(1+2^(1/2)+3^(1/2)+5^(1/2)+7^(1/2))^99", "*".join(["9^399"] * 30), "(" + "*".join(["9^399"] * 20) + ")^2",
    "(2^(1/2)+3^(1/2)-(5+2*6^(1/2))^(1/2))^(1/2)", "1/(2^(1/2)+3^(1/2)-(5+2*6^(1/2))^(1/2))",
    "+".join(f"{p}^(1/{p})" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)), "__import__('os').system('true')",
    "1" * 10 * LONG, "(" * LONG, "[" * LONG, "{" * LONG, "$" * LONG, "a[" * LONG, "<answer>" * LONG, "</answer>" * LONG,
    "```\n" * LONG, "-" * LONG + "1", "'" * LONG, '"', '"unbalanced', '{"a":' * LONG, "'); DROP TABLE t; --",
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c",
    "8/8/8/8/8/8/8/8 w - - 0 1", "e2e4e5e6", "e8=K", " " * LONG + "e.p.", "x" + " " * LONG + "x",
)  # fmt: skip


@contextlib.asynccontextmanager
async def episode(name: str, **options: Any) -> AsyncIterator[tuple[Any, af.Context]]:
    """Yield an environment that was reset to a task, and a context with pools of what the reward requires."""
    of = getattr(af.envs, name)
    quick = [af.Pool(af.envs.math.MathVerifier, size=1, cpu_seconds=0.3)] if name == "math" else []
    agent = of.expert(options=options, size=1, pools=quick)
    async with contextlib.AsyncExitStack() as stack:
        for pool in agent.pools:
            await stack.enter_async_context(pool)
        context = await stack.enter_async_context(af.Context(of.tasks(1, "test")[0], pools=agent.pools))
        yield await context.sandbox(of.family.environment), context


# These families run a sandbox for each answer, which takes seconds.
SLOW = ("reasoning_gym", "math", "code", "repo")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in INSTALLED]
)
async def test_every_answer_is_scored(name: str) -> None:
    reward = af.envs.reward(getattr(af.envs, name).family.environment)
    assert reward is not None
    async with episode(name) as (_, context):
        for answer in ANSWERS:
            score = await reward.score(SimpleNamespace(task=context.task, final=answer, turns=()), context)  # type: ignore[arg-type]
            assert score.error is None, (answer[:60], score.error)
            assert score.reward is not None and score.reward < 1, answer[:60]


ARGUMENTS = ("", "\x00", "\ud800", "1e999", "9**9**9", "(" * LONG, "a[" * LONG, "x" + " " * LONG + "x", "../" * 2000,
             "*".join(["9^399"] * 30), "(a+)+$", "'; DROP TABLE t; --", "while True: pass")  # fmt: skip


@pytest.mark.parametrize("name", INSTALLED)
async def test_no_argument_of_a_tool_fails_its_chain(name: str) -> None:
    options = {"code": {"seconds": 0.5}, "sql": {"seconds": 0.5}, "repo": {"seconds": 0.5},
               "competition": {"seconds": 0.5}}.get(name, {})  # fmt: skip
    async with episode(name, **options) as (environment, context):
        for tool in getattr(af.envs, name).family.tools:
            parameters = tool.schema["function"]["parameters"]["properties"]
            texts = [key for key, what in parameters.items() if what.get("type") == "string"]
            for argument in ARGUMENTS if texts else ():
                environment.done = False
                result = await tool.invoke(dict.fromkeys(texts, argument), context)
                assert result.error is None, (tool.name, argument[:60], result.error)


# Number of regular expressions of each module. Every function that applies one to text of a model is in READERS.
PATTERNS = {
    "alfworld/house.py": 1, "alfworld/official.py": 3, "chess/board.py": 2, "code.py": 1, "exact.py": 6,
    "harbor.py": 4, "judge/__init__.py": 2, "judge/judging.py": 7, "qa.py": 1, "repo/__init__.py": 1,
    "repo/grading.py": 1, "repo/mutation.py": 1, "retrieval.py": 1, "search/__init__.py": 1, "sql.py": 2,
    "webshop/__init__.py": 1, "webshop/catalogue.py": 1, "webshop/scoring.py": 2,
}  # fmt: skip
SESSION = SimpleNamespace(
    _state=SimpleNamespace(admissible_commands=(), feedback=""),
    _env=SimpleNamespace(step=lambda command: (SESSION._state, 0, False)), commands=[],
)  # fmt: skip
SHOP = af.envs.webshop.WebShopText()
READERS: dict[str, Callable[[str], Any]] = {
    "alfworld": House({}).do,
    "alfworld, official": lambda text: official.Session.do(SESSION, text),  # type: ignore[arg-type]
    "chess": lambda text: af.envs.chess.read(af.envs.chess.from_fen(af.envs.chess.board.START), text),
    "code": af.envs.code.code_in,
    "exact": lambda text: af.envs.exact.same(text, "1"),
    "judge": lambda text: af.envs.judge._CHECKS["says"](text, "fig"),
    "judging": af.envs.judge.judging.escaped,
    "judging, scores": lambda text: af.envs.judge.judging.read_scores(
        text, af.envs.judge.Rubric.from_spec({"a": "x"})
    ),
    "judging, lines": lambda text: af.envs.judge.judging.read_scores(
        f"<scores>{text}</scores>", af.envs.judge.Rubric.from_spec({"a": "x"})
    ),
    "judging, choice": af.envs.judge.judging.read_choice,
    "judging, order": lambda text: af.envs.judge.judging.read_order(f"<order>{text}</order>", 2),
    "qa": lambda text: qa.exact_match(qa.extract_answer(text) or "", ["x"]),
    "retrieval": retrieval.words,
    "webshop": SHOP.act,
}
REPEATED = (
    "a[", "a", " ", "a ", "the ", "<", "<answer>", "<think>", "<scores>", "<order>", "<better>1", "```\n", "```", "[",
    "[A", '"', "a:", ":", ",", "1/", "0", ".", " e.p.", "put a in ", "go to ", "(", "\\frac{", "\\boxed{", "\n",
)  # fmt: skip


def test_every_regular_expression_is_listed() -> None:
    folder, found = Path(af.envs.__file__).parent, {}
    for path in sorted(folder.rglob("*.py")):
        calls = [
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        used = [name for name in calls if re.fullmatch(r"re\.(?!escape)\w+", name)]
        if used:
            found[path.relative_to(folder).as_posix()] = len(used)
    assert found == PATTERNS


@pytest.mark.parametrize("reader", READERS)
async def test_texts_are_read_in_linear_time(reader: str) -> None:
    await SHOP.reset(af.envs.webshop.tasks(1, "test")[0], 0)

    def seconds(text: str) -> float:
        began = time.process_time()
        READERS[reader](text)
        return time.process_time() - began

    for part in REPEATED:
        text = part * (LONG // len(part))
        if seconds(text + "!") < 0.01:  # quadratic time would be seconds
            continue
        pairs = ((seconds(text[: LONG // 8] + "!"), seconds(text + "!")) for _ in range(20))
        assert any(long < 24 * short + 0.01 for short, long in pairs), (
            part
        )  # quadratic time would be 64 times as much
