"""SQLSandbox: typed rows, limits, no access to other files, resets and forks."""

import asyncio
import datetime
import decimal
import itertools
import re
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import errors
import pytest
from calls import each
from test_sandbox_python import nothing_left  # noqa: F401  (nothing_left is a fixture)
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit.sandboxes import sql

SCRIPT = "CREATE TABLE people (name TEXT, age INTEGER); INSERT INTO people VALUES ('Ada', 36), ('Bo', NULL);"
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
ENGINES = ["sqlite", "duckdb"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_rows_and_text(level: str, engine: str):
    async with af.SQLSandbox(engine=engine, isolation=level, script=SCRIPT) as sandbox:
        result = await sandbox.run("SELECT * FROM people ORDER BY name")
        assert (result.columns, result.rows, result.ok) == (("name", "age"), (("Ada", 36), ("Bo", None)), True)
        assert result.text == "name | age\n-----+-----\nAda  | 36\nBo   | NULL\n(2 rows)"
        assert repr(result).startswith("SQLResult(columns=('name', 'age'), rows=(('Ada', 36), ('Bo', None))")
        result = await sandbox.run("SELECT nope FROM people")
        assert not result.ok and "nope" in (result.error or "") and result.rows == () and not result.died
        await sandbox.run("UPDATE people SET age = 1")
        await sandbox.run("CREATE TABLE t2 (x INTEGER); INSERT INTO t2 VALUES (1); INSERT INTO t2 VALUES (2)")
        several = "SELECT sum(x) FROM t2; SELECT sum(age) FROM people"
        statements = (several, "BEGIN; DELETE FROM t2", "ROLLBACK", "SELECT count(*) FROM t2", "SELECT ';', 'a;b'")
        rows = await each("rows", sandbox, *statements)
        assert [rows[0], *rows[3:]] == [((2,),), ((2,),), ((";", "a;b"),)]
        assert (await sandbox.run("")).ok or engine == "duckdb"


async def test_sqlite_counts_changes():
    async with af.SQLSandbox(script=SCRIPT) as sandbox:
        result = await sandbox.run("UPDATE people SET age = 1; DELETE FROM people WHERE name = 'Bo'")
        assert (result.changed, result.text) == (3, "done: 3 rows changed")
        assert (await sandbox.run("CREATE INDEX i ON people (name)")).text == "done"
        values = "SELECT 1, 1.5, 'é', x'00ff', NULL, 9223372036854775807, -1e999"
        assert (await sandbox.run(values)).rows == ((1, 1.5, "é", b"\0\xff", None, 2**63 - 1, float("-inf")),)


async def test_duckdb_has_types():
    async with af.SQLSandbox(engine="duckdb") as sandbox:
        result = await sandbox.run(
            "SELECT 1.50::DECIMAL(8,2), DATE '2024-02-03', TIMESTAMP '2024-02-03 04:05:06', "
            "INTERVAL 2 DAY, TIME '01:02:03', "
            "[1, NULL, 3], {'a': 1, 'b': [DATE '2024-01-01']}, true, 170141183460469231731687303715884105727::HUGEINT, "
            "uuid '12345678-1234-5678-1234-567812345678', '\\xAA'::BLOB, MAP {'k': 1}"
        )
        assert (result.error, result.types[1]) == (None, "DATE")
        assert result.rows == ((
            decimal.Decimal("1.50"), datetime.date(2024, 2, 3), datetime.datetime(2024, 2, 3, 4, 5, 6),
            datetime.timedelta(days=2), datetime.time(1, 2, 3), [1, None, 3],
            {"a": 1, "b": [datetime.date(2024, 1, 1)]}, True, 2**127 - 1,
            uuid.UUID("12345678-1234-5678-1234-567812345678"), b"\xaa", {"k": 1},
        ),)  # fmt: skip


async def test_rows_and_values_have_limits(level: str, engine: str):
    async with af.SQLSandbox(engine=engine, isolation=level, max_rows=3, max_output=1000) as sandbox:
        await sandbox.run("CREATE TABLE t (x INTEGER); INSERT INTO t VALUES (1), (2), (3)")
        result = await sandbox.run("SELECT x FROM t")
        assert (len(result.rows), result.truncated, result.ok) == (3, False, True)
        await sandbox.run("INSERT INTO t VALUES (4)")
        result = await sandbox.run("SELECT x FROM t")
        assert (len(result.rows), result.truncated, result.ok) == (3, True, True)
        assert result.text.endswith("(3 rows shown)\n[truncated; use LIMIT, WHERE or fewer columns to see the rest]")
        wide = "replace(printf('%900s', 'x'), ' ', 'a')" if engine == "sqlite" else "repeat('a', 900)"
        result = await sandbox.run(f"SELECT {wide} FROM t")
        assert result.truncated and len(result.rows[0][0]) == 256
        assert (await sandbox.run("DROP TABLE t")).ok


async def test_a_timeout_interrupts_the_query_and_keeps_the_database(level: str, engine: str, never_killed: None):
    async with af.SQLSandbox(engine=engine, isolation=level, script=SCRIPT) as sandbox:
        insert = f"INSERT INTO people SELECT 'x', n FROM ({ENDLESS.replace('count(*)', 'n')})"
        for statement in (ENDLESS, insert):
            result = await sandbox.run(statement, timeout=0.1)
            assert (result.timed_out, result.limit, result.died) == (True, "time", False)
            assert result.text == "stopped: time limit of 0.1 s exceeded"
            assert (await sandbox.run("SELECT count(*) FROM people")).rows == ((2,),)


async def test_memory_has_a_limit(engine: str):
    async with af.SQLSandbox(engine=engine, memory_mb=128, script=SCRIPT) as sandbox:
        if engine == "sqlite":
            query = ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 100) "
                     "SELECT length(group_concat(hex(zeroblob(4000000)))) FROM c")  # fmt: skip
        else:
            query = "SELECT length(string_agg(repeat('x', 1000000) || range::VARCHAR, ',')) FROM range(2000)"
        assert not (await sandbox.run(query)).ok
        assert (await sandbox.run("SELECT count(*) FROM people")).rows == ((2,),)


# --- other files ----------------------------------------------------------------------------------

OUT = {
    "sqlite": [
        "ATTACH '{secret}' AS s", "ATTACH DATABASE 'file:{secret}?mode=ro' AS s", "ATTACH '{new}' AS s",
        "VACUUM INTO '{new}'", "SELECT load_extension('{secret}')", "PRAGMA temp_store_directory = '{folder}'",
        "SELECT readfile('{secret}')", "SELECT writefile('{new}', 'x')",
        "CREATE VIRTUAL TABLE t USING csv(filename='{secret}')",
        "SELECT edit('x', 'cat {secret}')",
    ],
    "duckdb": [
        "ATTACH '{secret}' AS s", "ATTACH '{new}' AS s", "COPY people TO '{new}'", "COPY people FROM '{secret}'",
        "SELECT * FROM read_csv('{secret}')", "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM read_blob('{secret}')",
        "SELECT * FROM '{secret}'", "SELECT * FROM glob('{folder}/*')", "EXPORT DATABASE '{new}'", "LOAD '{secret}'",
        "INSTALL httpfs", "SET enable_external_access = true", "SET temp_directory = '{folder}'",
        "RESET lock_configuration",
        "SET allowed_directories = ['{folder}']", "IMPORT DATABASE '{folder}'", "SELECT * FROM sniff_csv('{secret}')",
        "CREATE SECRET s (TYPE s3)", "SET secret_directory = '{folder}'", "PRAGMA enable_logging('x')",
    ],
}  # fmt: skip


async def test_no_statement_accesses_another_file(engine: str, tmp_path: Path):
    """Use isolation="none", where only the database engine prevents such access."""
    folder = tmp_path / "host"
    folder.mkdir()
    with sqlite3.connect(folder / "secret.db") as secret:
        secret.execute("CREATE TABLE s (x)")
        secret.execute("INSERT INTO s VALUES ('the secret of the host')")
    secret.close()
    (folder / "s.csv").write_text("the secret of the host\n")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    async with af.SQLSandbox(engine=engine, isolation="none", script=SCRIPT) as sandbox:
        for query, name in itertools.product(OUT[engine], ("secret.db", "s.csv")):
            text = query.format(secret=folder / name, new=folder / "new", folder=folder)
            result = await sandbox.run(text)
            assert "the secret of the host" not in repr(result.rows) + str(result.error)
            if not text.startswith(("CREATE SECRET", "PRAGMA enable_logging")):
                assert not result.ok, f"{text} was let through"
        assert (await sandbox.run("SELECT count(*) FROM people")).rows == ((2,),)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# --- initial state, cancellation, forks -----------------------------------------------------------


async def test_every_chain_gets_its_own_copy(level: str, engine: str, tmp_path: Path):
    file = tmp_path / "given.db"
    if engine == "sqlite":
        with sqlite3.connect(file) as made:
            made.execute("CREATE TABLE t (x)")
            made.execute("INSERT INTO t VALUES (1)")
        made.close()
    else:
        import duckdb

        with duckdb.connect(str(file)) as made:
            made.execute("CREATE TABLE t AS SELECT 1 AS x")
    before = file.read_bytes()
    async with af.SQLSandbox(
        engine=engine, isolation=level, database=file, script="INSERT INTO t VALUES (2)"
    ) as sandbox:
        assert (await sandbox.run("SELECT x FROM t ORDER BY x")).rows == ((1,), (2,))
        await sandbox.run("CREATE TABLE marker (m INTEGER); CREATE VIEW marker2 AS SELECT 1; DELETE FROM t")
        last = "PRAGMA user_version = 7" if engine == "sqlite" else "BEGIN"
        await sandbox.run(f"CREATE TEMP TABLE marker3 (m INTEGER); {last}")
        await sandbox.reset()
        assert (await sandbox.run("SELECT x FROM t ORDER BY x")).rows == ((1,), (2,))
        if engine == "sqlite":
            names = "SELECT name FROM sqlite_master UNION ALL SELECT name FROM sqlite_temp_master"
            assert (await sandbox.run("PRAGMA user_version")).rows == ((0,),)
        else:
            views = "SELECT view_name FROM duckdb_views() WHERE NOT internal"
            names = f"SELECT table_name FROM duckdb_tables() UNION ALL {views}"
        assert (await sandbox.run(names)).rows == (("t",),)
    assert file.read_bytes() == before


def test_duckdb_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sql.importlib.util, "find_spec", lambda name: None)
    errors.check(lambda: af.SQLSandbox(engine="duckdb"), af.errors.SettingsError, 'pip install "agentfly_kit[sql]"')
    af.SQLSandbox()


async def test_a_script_that_fails_raises_settings_error():
    sandbox = af.SQLSandbox(script="CREATE TABL x")
    await errors.check(sandbox.start, af.errors.SettingsError, 'the script of this SQLSandbox failed: near "TABL"')
    await sandbox.close()
    pool = af.Pool(af.SQLSandbox, size=1, script="CREATE TABL x")
    await errors.check(pool.acquire, af.errors.SandboxError, "the script of this SQLSandbox failed")
    await pool.close()


async def test_a_cancelled_query_is_interrupted(level: str, engine: str, never_killed: None):
    async with af.SQLSandbox(engine=engine, isolation=level, script=SCRIPT) as sandbox:
        for seconds in (0.0, 0.002, 0.1):
            running = asyncio.create_task(sandbox.run(ENDLESS))
            await asyncio.sleep(seconds)
            running.cancel()
            await errors.check(lambda: running, asyncio.CancelledError)
            assert (await sandbox.run("SELECT count(*) FROM people")).rows == ((2,),)


async def test_a_fork_is_a_copy(level: str, engine: str):
    def make() -> af.SQLSandbox:
        return af.SQLSandbox(engine=engine, isolation=level, script=SCRIPT)

    async with make() as one, make() as two:
        await one.run("INSERT INTO people VALUES ('Cy', 3)")
        await two.run("CREATE TABLE other (x INTEGER)")
        await one.fork(two)
        assert (await two.run("SELECT name FROM people ORDER BY name")).rows == (("Ada",), ("Bo",), ("Cy",))
        assert not (await two.run("SELECT * FROM other")).ok
        await two.run("DELETE FROM people")
        assert (await one.run("SELECT count(*) FROM people")).rows == ((3,),)
        refusals = {"BEGIN": "a transaction is open", "ROLLBACK; CREATE TEMP TABLE x (y INTEGER)": "temporary tables"}
        for statement, text in refusals.items():
            await one.run(statement)
            await errors.check(
                lambda: one.fork(two), af.errors.SandboxError, re.compile(f"SQLSandbox cannot fork: .*{text}")
            )
        assert (await two.run("SELECT count(*) FROM people")).rows == ((2,),)
    other = af.SQLSandbox(engine="duckdb" if engine == "sqlite" else "sqlite")
    text = f"into must be a SQLSandbox with engine {engine!r}, got {other.engine!r}"
    await errors.check(lambda: one.fork(other), af.errors.SandboxError, text)


async def test_the_builtin_tool():
    good, bad = [await af.toolbox.sql.try_(query=query) for query in ("SELECT 1 AS one", "SELEC 1")]
    assert (good.ok, good.observation) == (True, "one\n---\n1\n(1 row)")
    assert (bad.ok, bad.observation) == (False, 'near "SELEC": syntax error')


def test_invalid_values_from_inside():
    reply = {"columns": ["x"], "types": [None], "more": False, "cut": False, "changed": None}
    for value in (
        {"$no such": 1}, {"$decimal": "x"}, {"$uuid": 3}, {"$date": "x"}, {"$": 1}, {"$bytes": 1, "$int": "2"},
        {"$bytes": "?"}, {"$timedelta": [10**30]}, {"$dict": [[{}, 1]]}, {"$set": [[]]}, {"$int": "x"},
    ):  # fmt: skip
        errors.check(
            lambda: af.SQLSandbox()._read_answer(reply | {"rows": [[value]]}),
            (TypeError, ValueError, ArithmeticError),
        )


async def test_another_database_in_the_same_process(engine: str, tmp_path: Path):
    async with af.SQLSandbox(engine=engine, script=SCRIPT) as sandbox:
        pid = (await sandbox._execute("import os; os.getpid()", GUARD)).value
        changes = ("INSERT INTO people VALUES ('Cy', 1)", "CREATE TEMP TABLE mine (x INTEGER)", "BEGIN")
        assert await each("ok", sandbox, *changes) == [True] * 3
        await sandbox.renew("CREATE TABLE other (x INTEGER); INSERT INTO other VALUES (7)")
        assert (await sandbox.run("SELECT x FROM other")).rows == ((7,),)
        assert await each("ok", sandbox, "SELECT * FROM people", "SELECT * FROM mine") == [False] * 2
        await sandbox.renew()
        assert not (await sandbox.run("SELECT x FROM other")).ok
        await errors.check(
            lambda: sandbox.renew("CREATE TABEL x"), af.errors.SettingsError, "the script of this SQLSandbox failed"
        )
        if engine == "sqlite":
            with closing(sqlite3.connect(tmp_path / "own.db")) as own:
                own.executescript("CREATE TABLE own (x INTEGER); INSERT INTO own VALUES (1);")
            await sandbox.renew("INSERT INTO own VALUES (2)", database=(tmp_path / "own.db").read_bytes())
            assert (await sandbox.run("SELECT sum(x) FROM own")).rows == ((3,),)
        assert (await sandbox._execute("import os; os.getpid()", GUARD)).value == pid
        await sandbox.reset()  # restores the initial database
        assert (await sandbox.run("SELECT count(*) FROM people")).rows == ((2,),)
    await errors.check(sandbox.renew, af.errors.SandboxError, "closed")
