"""Every family: its expert solves it, the random player does not, and concurrent chains do not affect each other."""

import asyncio
import dataclasses
import inspect
import json
import os
import random
import re
import sys
from typing import Any

import errors
import pytest

import agentfly_kit as af
from agentfly_kit.envs import exact

APART = {"scienceworld"}  # needs a Java process per chain; see test_env_scienceworld.py


def ready() -> list[str]:
    return [name for name in af.envs.FAMILIES if not getattr(af.envs, name).family.missing and name not in APART]


FEWER = {"alfworld": 12, "code": 24, "competition": 16, "repo": 2, "sql": 16, "webshop": 32}
"""Number of tasks of families whose chains are slow; 64, or all tasks, of the others."""


@pytest.mark.parametrize("name", ready())
async def test_the_expert_succeeds_and_the_random_player_does_not(name: str) -> None:
    of = getattr(af.envs, name)
    tasks = of.tasks(fewer(name), "test")
    # Chains of the family repo run tests with time limits, which would expire if more chains than cores ran at once.
    most = 2 if name == "repo" else 64
    expert = await af.evaluate(of.expert(), tasks, max_concurrency=most)
    luck = await af.evaluate(of.random_agent(), tasks, max_concurrency=most)
    assert expert.success >= 0.98 and luck.success <= of.family.chance, (expert, luck)
    assert expert.unscored == luck.unscored == 0


async def seen(names: list[str], concurrency: int) -> dict[str, Any]:
    """Return the fingerprint of the tasks, and the summary and texts of the random agent, for each family."""
    found = {}
    for name in names:
        of = getattr(af.envs, name)
        tasks = of.tasks(6, "test")
        evaluation = await af.evaluate(of.random_agent(), tasks, max_concurrency=concurrency)
        texts = [[turn.text for turn in t.turns] for t in evaluation.rollout.trajectories]
        found[name] = {"tasks": tasks.fingerprint, "numbers": evaluation.summary(), "texts": texts}
    return found


@pytest.mark.long
async def test_the_same_seed_gives_the_same_evaluation_in_another_process() -> None:
    """The other process has another hash seed, so another order of sets, and another number of concurrent chains."""
    code = "import asyncio, json\nfrom typing import Any\nimport agentfly_kit as af\n" + inspect.getsource(seen)
    code += f"print(json.dumps(asyncio.run(seen({ready()}, 3))))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        env=os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    here, there = await asyncio.gather(seen(ready(), 64), process.communicate())
    other = json.loads(there[0])
    for name, one in here.items():
        assert json.loads(json.dumps(one)) == other[name], name


@pytest.mark.parametrize("name", ready())
def test_tasks_are_reproducible_and_splits_disjoint(name: str) -> None:
    of = getattr(af.envs, name)
    n = min(2 if name == "chess" else 40, *of.family.splits.values())  # puzzles are found by search
    tasks = of.tasks(n)  # raises if both splits contain the same task
    assert tasks.splits == {"train": n, "test": n}
    assert tasks == of.tasks(n)
    assert tasks.fingerprint != of.tasks(n, seed=1).fingerprint
    assert tuple(of.tasks(n, "test")) == tuple(tasks.test)
    assert [t.messages for t in of.tasks(n // 2, "test")] == [t.messages for t in tasks.test[: n // 2]]
    for wrong, words in (
        ({"split": "dev"}, "split must be 'train' or 'test', or None for both, got 'dev'"),
        ({"n": 0}, "n must be an integer of at least 1 and at most 1000000 or None, got 0"),
        *(({"seed": seed}, "seed must be an integer of at least 0, got") for seed in (-1, 1.5, "x", True)),
    ):
        errors.check(lambda: of.tasks(**{"n": 1} | wrong), af.errors.SettingsError, words)


def test_list_describes_every_family() -> None:
    table = af.envs.list()
    assert list(table.index) == list(af.envs.FAMILIES)
    assert list(table.columns) == ["what", "tools", "needs", "size", "licence", "installed"]
    assert table.map(bool).all(axis=None) and table.loc["lookup", "tools"] == "lookup"
    assert set(table.loc[ready(), "installed"]) == {"yes"}
    missing = dataclasses.replace(
        af.envs.lookup.family, name="x", needs=("not_there",), install="pip install not-there"
    )
    errors.check(missing.tasks, af.errors.SettingsError, "af.envs.x needs not_there; type: pip install not-there")


@pytest.mark.long
async def test_reasoning_gym_is_scored_by_its_own_verifiers() -> None:
    of = af.envs.reasoning_gym
    tasks = of.tasks(40, "test", datasets=("chain_sum", "countdown", "gcd", "spell_backward"))
    assert (await af.evaluate(of.expert(), tasks)).success >= 0.98
    assert (await af.evaluate(of.random_agent(), tasks)).success <= 0.05
    errors.check(lambda: of.tasks(1, "test", datasets=("chess",)), af.errors.SettingsError, "no dataset 'chess'")


# ---- lookup


async def test_a_look_up_reports_unknown_people_and_facts() -> None:
    (look,) = af.envs.tools(af.envs.lookup.Lookup)
    task = af.envs.lookup.tasks(1, "train")[0]
    name = next(iter(af.envs.lookup.store(task.fields["world"])))
    assert (await look.try_(of=name, what="city", task=task)).observation in af.envs.lookup.CITIES
    assert (await look.try_(of="Nobody", what="city", task=task)).observation == "no such person"
    assert (await look.try_(of=name, what="shoe", task=task)).observation == "no such fact"


# ---- exact arithmetic


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("2/4", "1/2", True), ("8^(1/2)", "2*2^(1/2)", True), ("0.5", "1/2", True), ("0.1+0.2", "0.3", True),
        ("(1+sqrt(2))^2", "3+2*sqrt(2)", True), ("2^-1", "1/2", True), ("-3^2", "-9", True), ("1/3", "0.333", False),
        ("\\frac{2}{4}", "1/2", True), ("$\\sqrt{8}$", "2\\sqrt{2}", None), ("2/3", "3/2", False),
        ("pi", "3.14", False), ("so \\boxed{42}", "42", True), ("\\boxed{1} or \\boxed{\\frac{1}{2}}.", "0.5", True),
        ("\\boxed{42", "42", None), ("42 \\boxed{7}", "42", False), ("\\boxed{x}", "\\boxed{y}", None),
        ("seven", "7", None), ("1/0", "1", None), ("__import__('os')", "1", None), ("9^9^9", "1", None),
        ("2^100000", "1", None), ("(-1)^(1/2)", "1", None), ("0^-1", "1", None), ("1" * 300, "1", None),
        ("(" * 150 + ")" * 50, "1", None), ("1 if 1 else 2", "1", None), ("True", "1", None), ("", "1", None),
    ],
)  # fmt: skip
def test_same_compares_values(a: str, b: str, equal: bool | None) -> None:
    assert exact.same(a, b) is equal and exact.equivalent(a, b) is bool(equal)
    if equal is not None:
        assert exact.same(b, a) is equal
    assert exact.equivalent("set \\boxed{ {1,2} }", "{1,2}") and not exact.equivalent(None, "")


def test_shown_values_can_be_parsed() -> None:
    for text, shown in {"8^(1/2)": "2*2^(1/2)", "2/4": "1/2", "3*(4+5)": "27", "(2+3^(1/2))^(1/2)": None}.items():
        got = exact.shown(exact.value(text))
        assert shown in (None, got)
        assert exact.same(got, text), got


async def test_other_notations_are_compared_by_math_verify_in_a_sandbox() -> None:
    task = af.Task("t", ({"role": "user", "content": "?"},))
    async with af.Pool(af.envs.math.MathVerifier, size=1) as pool, af.Context(task, pools=[pool]) as context:
        for said, answer, right in [
            ("2/4", "1/2", 1), ("x+1", "1+x", 1), ("{2,1}", "{1,2}", 1), ("[1,2]", "(1,2)", 0), ("1/0", "1/0", 1),
            ("$\\sqrt{8}$", "2\\sqrt{2}", 1), ("1/2", "x+1", 0), ("seven", "7", 0), ("", "7", 0),
            ("so \\boxed{\\{2,1\\}}" + "!" * 500, "{1,2}", 1),
            ("1/2 or 2/3", "1/2", 0), ("1,2,3,4,5,6,7,8,9", "7", 0), ("0.30000000000000001", "0.3", 0),
        ]:  # fmt: skip
            assert await af.envs.math.Math().reward(said, answer, context) == right, (said, answer)


# ---- what holds for all


def fewer(name: str) -> int:
    return min(FEWER.get(name, 64), *getattr(af.envs, name).family.splits.values())


@pytest.mark.parametrize("name", ready())
async def test_concurrent_chains_do_not_affect_each_other(name: str) -> None:
    """Concurrent chains give the same texts as one chain after another in a single environment."""
    of = getattr(af.envs, name)
    tasks = of.tasks(fewer(name), "train")
    together = await of.random_agent(size=8).rollout(tasks, max_concurrency=64)
    alone = await of.random_agent(size=1).rollout(tasks, max_concurrency=1)
    for one, other in zip(together.trajectories, alone.trajectories, strict=True):
        assert [turn.text for turn in one.turns] == [turn.text for turn in other.turns]
        assert (one.reward, one.metrics, one.stop) == (other.reward, other.metrics, other.stop), (
            one.error or other.error
        )


def played(of: Any, play: Any = lambda task, messages, rng: "x", **settings: Any) -> af.Agent:
    """Return an agent of a family with another scripted player."""
    agent: af.Agent = dataclasses.replace(of.family, expert_player=play).expert(**settings)
    return agent


def garbage(what: dict[str, Any]) -> Any:
    return {"integer": -(10**9), "number": 1e300, "boolean": "perhaps", "array": []}.get(
        what.get("type", ""), "\u2042 ' ; --"
    )


@pytest.mark.parametrize("name", ready())
async def test_invalid_actions_are_reported_and_do_not_affect_other_chains(name: str) -> None:
    of = getattr(af.envs, name)
    tasks = of.tasks(3, "test")
    tool = of.family.tools[0]
    schema = tool.schema["function"]["parameters"]["properties"]
    moves: list[Any] = [
        ("no_such_tool", {"x": 1}), (tool.name, {"no_such_argument": 1}),
        (tool.name, {name: garbage(what) for name, what in schema.items()}), "\u2042",
    ]  # fmt: skip

    def plays(task: af.Task, messages: Any, rng: random.Random) -> Any:
        if task.id != tasks[1].id:
            return of.family.expert_player(task, messages, rng)
        return moves[min(3, sum(m["role"] == "assistant" for m in messages))]

    good, bad, also = (await played(of, plays).rollout(tasks)).trajectories
    assert good.success and also.success, good.error or also.error
    assert (bad.error, bad.success) == (None, False), bad.explain()
    first, second = bad.tool_calls[:2]
    for call, word in ((first, "no_such_tool"), (second, "no_such_argument")):
        assert call.result is not None and not call.result.ok
        assert word in call.result.observation


@pytest.mark.parametrize("name", ready())
async def test_invalid_tasks_are_rejected_before_anything_runs(name: str) -> None:
    of = getattr(af.envs, name)
    good = of.tasks(1, "test")[0]
    agent = played(of)
    agent.rollout([good])
    optional = {"kind", "size", "support", "hardness", "code", "test_setup_code", "solution", "failing"}
    required = set(good.fields) - optional - ({"world"} if name == "search" else set())
    for field in required if name != "chess" else {"fen", "mate"}:
        fields = {key: value for key, value in good.fields.items() if key != field}
        if name == "chess" and field == "mate":
            fields.pop("solution")
        for wrong in (fields, good.fields | {field: {1, 2}}):
            errors.check(
                lambda: agent.rollout([good, dataclasses.replace(good, id="bad", fields=wrong)]),
                af.errors.TaskError,
                "'bad'",
            )
    assert list(inspect.signature(of.family.environment.reset).parameters) == ["self", "task", "seed"]


@pytest.mark.parametrize("name", ready())
async def test_a_fork_continues_from_the_same_state_or_raises(name: str) -> None:
    of = getattr(af.envs, name)
    chain = of.expert().chain(of.tasks(1, "test")[0])
    await chain.prepare()
    await chain.step()
    if chain.stop is not None:
        assert (await chain.finish()).success
        return
    try:
        twin = await chain.fork()
    except af.errors.SandboxError as error:
        await chain.close()
        assert of.family.environment.__name__ in str(error)  # noqa: PT017
        return
    for each in (twin, chain):
        while each.stop is None:
            await each.step()
        assert (await each.finish()).success


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("lookup", {}, "field 'world' is missing; it must be an integer of at least 0"),
        ("lookup", {"world": {"x": 1}, "answer": "x"}, "field 'world' is {'x': 1}; it must be an integer"),
        ("lookup", {"world": 1, "answer": ["Oslo"]}, "answer must be a string, got ['Oslo'] (list)"),
        ("lookup", {"world": 1, "answer": 7}, "answer must be a string, got 7 (int)"),
        ("webshop", {"world": [1], "goal": 1}, "field 'world' is [1]; it must be an integer"),
        ("alfworld", {"game": {"x": 1}}, "field 'game' is {'x': 1}; it must be an integer"),
        ("alfworld", {"game": 1, "size": ["small"]}, "size must be one of 'small', 'full', got ['small']"),
        ("calculator", {"answer": {"x": 1}}, "answer must be a string or a number, got {'x': 1} (dict)"),
        ("code", {"test_list": "assert f(1)"}, "test_list must be a list such as ['assert f(1) == 2']"),
        ("judge", {"rubric": [{"name": "a", "what": "b", "check": ["says"]}]}, "rows have a field 'check'"),
        ("search", {"answer": "x", "support": "Rome"}, "field 'support' must be a list of titles, got 'Rome'"),
        ("search", {"answers": []}, "answers must be a string, or a non-empty list of strings, got []"),
        ("chess", {"fen": "here", "mate": 0}, "field 'mate' is 0; it must be an integer of at least 1"),
        ("chess", {"fen": "here", "mate": 1}, "'here' is not a valid position"),
        ("chess", {"fen": af.envs.chess.board.START, "solution": ["e2e5"]}, "'e2e5' is not a legal move"),
        ("repo", {"bugs": {"x": 1}}, "`bugs` must be a list of objects"),
        ("repo", {}, "the task has nothing to repair: add the field `bugs`"),
        ("scienceworld", {}, "unknown kind 'None'"),
        ("scienceworld", {"kind": "melt", "variation": 30}, "invalid variation 30; melt has variations 0 to 29"),
        ("sql", {"gold": "SELECT 1"}, "the task has no database: add a field 'script'"),
        ("sql", {"gold": "SELECT 1", "database": "nowhere.sqlite"}, "'nowhere.sqlite' does not exist"),
        ("sql", {"script": "SELECT 1"}, "field 'gold' is missing"),
        ("competition", {"competition": "stocks", "world": 1}, "field 'competition' must be one of 'slope', 'tide'"),
        ("competition", {"competition": "slope"}, "field 'world' is missing"),
        ("math", {"answer": None}, "answer must be a string or a number, got None (NoneType)"),
        ("desk", {}, "field 'world' is missing; it must be an integer of at least 0"),
        ("shapes", {"answer": 2}, "answer must be a string, got 2 (int)"),
        ("shapes", {"answer": "2"}, "the messages of the task must have one image, got 0"),
    ],
)
async def test_invalid_fields_are_named(name: str, fields: Any, words: str) -> None:
    of = getattr(af.envs, name)
    if of.family.missing:
        pytest.skip(f"not installed: {', '.join(of.family.missing)}")
    agent = played(of)
    errors.check(
        lambda: agent.rollout([af.Task("bad", ({"role": "user", "content": "?"},), fields)]),
        af.errors.TaskError,
        re.compile(f"'bad'.*{re.escape(words)}"),
    )


async def test_an_answer_may_be_a_number() -> None:
    for name in ("calculator", "math"):
        of = getattr(af.envs, name)
        task = af.Task("7", ({"role": "user", "content": "What is 3+4?"},), {"answer": 7})
        agent = played(of, lambda task, messages, rng: "14/2", size=1)
        (t,) = (await agent.rollout([task])).trajectories
        assert t.success, t.error


async def test_evaluations_contain_the_metrics() -> None:
    evaluation = await af.evaluate(af.envs.judge.expert(), af.envs.judge.tasks(8, "test"))
    assert min(evaluation.metrics["short"], evaluation.metrics["manners"]) > 0, evaluation.metrics
