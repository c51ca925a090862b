"""sql: the reward, isolation of databases, hostile queries, and files of Spider, BIRD and InterCode."""

import itertools
import json
import math
import random
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import errors
import pytest
from waiting import GUARD

import agentfly_kit as af

SCRIPT = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'z');"
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"


def task(gold: str = "SELECT b FROM t ORDER BY a", script: str = SCRIPT, **fields: Any) -> af.Task:
    return af.Task("t", ({"role": "user", "content": "?"},), {"gold": gold, "script": script, **fields})


async def played(of: af.envs.sql.SQL, *queries: str, **given: Any) -> dict[str, float]:
    """Return the reward after these queries and a submission."""
    await of.reset(task(**given), 0)
    for query in queries:
        await af.envs.sql.SQL.execute.function(of, query)  # type: ignore[attr-defined]
    await af.envs.sql.SQL.submit.function(of)  # type: ignore[attr-defined]
    return await of.reward(None)


@pytest.fixture(params=["sqlite", "duckdb"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- the reward


def pairs_tau(a: list[str], b: list[str]) -> float:
    """Compute tau-b by its definition, over all pairs."""
    signs = [
        ((a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j]))
        for i, j in itertools.combinations(range(len(a)), 2)
    ]
    left, right = sum(x != 0 for x, _ in signs), sum(y != 0 for _, y in signs)
    return sum(x * y for x, y in signs) / math.sqrt(left * right) if left and right else math.nan


@pytest.mark.parametrize(
    ("seen", "wanted", "reward"),
    [
        ([], [], 1.0), ([(1,)], [], 0.0), ([], [(1,)], 0.0), ([(1,)], [(1,)], 1.0), ([(1,)], [(1.0,)], 0.0),
        ([(1,), (2,)], [(1,), (2,)], 1.0), ([(2,), (1,)], [(1,), (2,)], -1.0),
        ([(1,), (2,), (3,)], [(1,), (2,)], 0.67), ([(1,), (1,)], [(1,)], 0.5), ([(1,), (1,)], [(1,), (1,)], 1.0),
        # The shared rows are 1 2 3 and 2 1 3, of which two of three pairs agree (tau 1/3); the overlap is 3 of 4 rows.
        ([(1,), (2,), (3,), (9,)], [(2,), (1,), (3,)], 0.25),
        ([("a", None)], [("a", None)], 1.0), ([("ä", "日本")], [("ä", "日本")], 1.0),
        # rows are ordered as strings: '(10,)' is less than '(9,)'
        ([(9,), (10,)], [(9,), (10,)], 1.0),
        ("Error executing query: no such table: t", [], 0.0), (None, [], 0.0), ("", [], 0.0),
        ([(i,) for i in range(1000)], [(7,)], 0.001),  # all rows at once
    ],
)  # fmt: skip
def test_worked_cases(seen: Any, wanted: Any, reward: float) -> None:
    got = af.envs.sql.score(seen, wanted)
    assert (got["reward"], got["success"]) == (pytest.approx(reward), float(reward == 1))


def test_tau_of_long_sequences_is_that_of_every_pair() -> None:
    rng = random.Random(21)
    for n in (0, 1, 2, 3, 50, 300):
        a, b = ([str(rng.randrange(40)) for _ in range(n)] for _ in range(2))
        assert af.envs.sql.tau(a, b) == pytest.approx(pairs_tau(a, b), nan_ok=True)
    many = [str(i) for i in range(10_000)]
    assert af.envs.sql.tau(many, many) == pytest.approx(1.0)
    assert af.envs.sql.tau(range(10_000), range(10_000, 0, -1)) == pytest.approx(-1.0)
    assert af.envs.sql.shared(["a", "b", "a", "c"], ["c", "a"]) == (["a", "c"], ["c", "a"])
    assert Counter(af.envs.sql.shared(["a", "a"], ["a", "a", "a"])[1]) == {"a": 2}


# ---- the environment


async def test_what_is_shown_and_what_is_scored(closed_later: Any, engine: str) -> None:
    of = closed_later(af.envs.sql.SQL(engine=engine))
    assert (await played(of, "SELECT b FROM t ORDER BY a"))["reward"] == 1
    assert of.observation == [("x",), ("y",), ("z",)]
    assert (await played(of, "SELECT b FROM t ORDER BY a DESC"))["reward"] == -1
    got = await played(of, "SELECT nope FROM t", "SELECT b FROM t ORDER BY a LIMIT 2")
    assert (got["reward"], got["queries"], got["errors"], got["submitted"]) == (0.67, 2, 1, 1)
    got = await played(of, "SELECT b FROM t ORDER BY a", "SELEKT")  # the last counts
    assert got["reward"] == 0
    assert str(of.observation).startswith("Error executing query: ")
    assert (await played(of))["reward"] == 0
    assert (await played(of, ""))["success"] == 0
    assert (await played(of, "SELECT 'x' AS ü", gold="SELECT 'x' AS a"))["reward"] == 1
    assert (await played(of, "SELECT b FROM t WHERE a > 9", gold="SELECT b FROM t WHERE a > 5"))["reward"] == 1


async def test_only_submitted_rows_are_scored_and_an_answer_submits(closed_later: Any) -> None:
    of = closed_later(af.envs.sql.SQL())
    await of.reset(task(), 0)
    shown = await af.envs.sql.SQL.execute.function(of, "SELECT b FROM t ORDER BY a")  # type: ignore[attr-defined]
    assert (shown.ok, shown.observation) == (True, "[('x',), ('y',), ('z',)]")
    assert (await of.reward(None))["reward"] == 0
    assert (await of.reward("That is it."))["reward"] == 1


async def test_an_emptied_database_does_not_change_the_expected_rows(closed_later: Any, engine: str) -> None:
    """The reference query runs before the chain, which could otherwise delete the rows that the query returns."""
    of = closed_later(af.envs.sql.SQL(engine=engine))
    assert (await played(of, "DELETE FROM t", "SELECT b FROM t ORDER BY a"))["reward"] == 0
    assert of.observation == []
    assert (await played(of, "DROP TABLE t", "SELECT 1 WHERE 1 = 0"))["reward"] == 0
    assert (await played(of, "SELECT b FROM t ORDER BY a"))["reward"] == 1  # the next chain has them again
    # a reference query that modifies the database does not affect the chain
    assert (await played(of, "SELECT b FROM t ORDER BY a", gold="DELETE FROM t"))["reward"] == 0
    assert of.observation == [("x",), ("y",), ("z",)]


async def test_hostile_queries_are_reported_and_do_not_affect_the_next_chain(
    closed_later: Any, engine: str, tmp_path: Path
) -> None:
    of = closed_later(af.envs.sql.SQL(engine=engine, seconds=0.1))
    there = tmp_path / "there.db"
    for query in (
        ENDLESS, f"ATTACH '{there}' AS other", "SELECT load_extension('x')", f"COPY t TO '{there}'",
        f"VACUUM INTO '{there}'", "SELEC\u200bT 1", "'); --", "SELECT * FROM t; SELECT",
    ):  # fmt: skip
        assert (await played(of, query))["reward"] == 0, query
        assert str(of.observation).startswith("Error executing query: "), query
        of._seconds = GUARD
    assert not there.exists()
    for query in (
        "DROP TABLE t",
        "CREATE TABLE marker (x INTEGER)",
        "CREATE TEMP TABLE marker2 (x INTEGER)",
        "BEGIN",
    ):
        await played(of, query)
    for name in ("marker", "marker2"):
        await played(of, f"SELECT * FROM {name}")
        assert str(of.observation).startswith("Error executing query: "), name
    assert (await played(of, "SELECT b FROM t ORDER BY a"))["reward"] == 1


async def test_too_many_rows_are_an_error_for_the_model(closed_later: Any) -> None:
    of = closed_later(af.envs.sql.SQL(most=2))
    assert (await played(of, "SELECT b FROM t", gold="SELECT 1"))["reward"] == 0
    assert of.observation == "Error executing query: more than 2 rows, or rows that are too long"
    await errors.check(
        lambda: of.reset(task(), 0), af.errors.SandboxError, "more than 2 rows; raise options={'most': ...}"
    )


async def test_a_fork_has_a_copy_of_the_database() -> None:
    chain = af.envs.sql.agent(af.ScriptedEngine(["."]), chat=af.envs.family.small_chat(), size=2).chain(task())
    await chain.prepare()
    one = await chain.context.sandbox(af.envs.sql.SQL)
    await af.envs.sql.SQL.execute.function(one, "DELETE FROM t WHERE a = 1")  # type: ignore[attr-defined]
    twin = await chain.fork()
    other = await twin.context.sandbox(af.envs.sql.SQL)
    assert other is not one and other.queries == one.queries and other.gold == [("x",), ("y",), ("z",)]
    await af.envs.sql.SQL.execute.function(one, "DELETE FROM t")  # type: ignore[attr-defined]
    await af.envs.sql.SQL.execute.function(other, "SELECT b FROM t ORDER BY a")  # type: ignore[attr-defined]
    assert other.observation == [("y",), ("z",)]
    for each in (chain, twin):
        await each.finish()


async def test_failing_queries_and_scripts_are_named(closed_later: Any) -> None:
    of = closed_later(af.envs.sql.SQL())
    for wrong, error, words in (
        (
            task(gold="SELECT nope FROM t"),
            af.errors.SandboxError,
            "the query of task 't' fails in sqlite: no such column: nope",
        ),
        (task(script="CREATE TABEL t"), af.errors.SettingsError, "the script of this SQLSandbox failed"),
    ):
        await errors.check(lambda: of.reset(wrong, 0), error, words)
    assert (await played(of, "SELECT b FROM t ORDER BY a"))["reward"] == 1  # the next task is not affected


def test_a_missing_duckdb_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "duckdb" else find(name, *a))
    errors.check(
        lambda: af.envs.sql.SQL(engine="duckdb"),
        af.errors.SettingsError,
        'needs duckdb; type: pip install "agentfly_kit[sql]"',
    )


# ---- its tasks


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """A folder with the layout of Spider's archive."""
    for name in ("pets", "odd"):
        folder = tmp_path / "database" / name
        folder.mkdir(parents=True)
        with closing(sqlite3.connect(folder / f"{name}.sqlite")) as connection:
            connection.executescript(
                "CREATE TABLE pet (id int primary key, name varchar(20), weight real, born bool, note text);"
                "INSERT INTO pet VALUES (1, 'Rex''s', 2.5, 1, NULL), (2, 'Tom', 3, 'unknown', x'00ff'), (3, 'Ü', NULL, 0, '');"  # noqa: E501
            )
    rows = [
        {"db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pet", "query_toks": []},
        {
            "db_id": "odd",
            "question": "Whose weight?",
            "query": "SELECT name FROM pet WHERE weight > 1 ORDER BY weight",
        },
    ]
    (tmp_path / "dev.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


async def test_spiders_files_load_and_are_solved(spider: Path) -> None:
    tasks = af.envs.sql.load(spider / "dev.json")
    assert (len(tasks), tasks[0].fields["gold"]) == (2, "SELECT count(*) FROM pet")
    assert tasks[0].messages[-1]["content"] == "Tables: pet(id, name, weight, born, note)\nHow many pets?"
    expert = await af.evaluate(af.envs.sql.expert(size=2), tasks)
    assert (expert.success, expert.metrics["queries"]) == (1, 1), [t.error for t in expert.rollout]
    await errors.check(
        lambda: af.evaluate(af.envs.sql.expert(options={"engine": "duckdb"}, size=2), tasks),
        af.errors.TaskError,
        "a sqlite file, which needs engine='sqlite'",
    )


def test_rows_of_bird_and_intercode_load_with_evidence(spider: Path) -> None:
    bird = {
        "question_id": 195, "db_id": "pets", "question": "How many are heavy?", "evidence": "heavy means weight > 2.8",
        "SQL": "SELECT count(*) FROM pet WHERE weight > 2.8", "difficulty": "simple",
    }  # fmt: skip
    intercode = {"query": bird["question"], "db": "pets", "gold": bird["SQL"]} | {
        name: bird[name] for name in ("question_id", "evidence", "SQL", "difficulty")
    }
    (spider / "bird.json").write_text(json.dumps([bird, intercode, bird | {"evidence": ""}]), encoding="utf-8")
    one, other, bare = af.envs.sql.load(spider / "bird.json", schema=False)
    for task in (one, other):
        assert task.messages[-1]["content"] == "How many are heavy?\nEvidence: heavy means weight > 2.8"
        assert (task.fields["gold"], task.fields["hardness"]) == (bird["SQL"], "simple")
    assert bare.messages[-1]["content"] == "How many are heavy?"


def test_invalid_files_are_named(spider: Path) -> None:
    errors.check(
        lambda: af.envs.sql.load(spider / "nowhere.json"),
        af.errors.TaskError,
        "nowhere.json: no such file; pass the path of Spider's dev.json",
    )
    for content, words in [
        ("{", "bad.json:1: not JSON"),
        ("{}", "bad: rows must contain at least one task"),
        (
            '[{"question": "?", "query": "SELECT 1"}]',
            r'bad\.json, row 0: a row must have "question".*it has question, query',
        ),
        ('["x"]', r"bad\.json, row 0: a row must have .*it has str"),
        ('[{"question": "?", "query": "SELECT 1", "db_id": "../x"}]', "not a valid database name"),
        (
            '[{"question": "?", "query": "SELECT 1", "db_id": "cars"}]',
            r"no database for cars; expected .*NAME/NAME\.sqlite",
        ),
    ]:
        (spider / "bad.json").write_text(content, encoding="utf-8")
        errors.check(lambda: af.envs.sql.load(spider / "bad.json"), af.errors.TaskError, re.compile(words))
    (spider / "database" / "pets" / "pets.sqlite").write_text("no database, but long enough to be read as one" * 9)
    errors.check(
        lambda: af.envs.sql.load(spider / "dev.json"),
        af.errors.TaskError,
        "pets.sqlite: not a readable sqlite database",
    )
