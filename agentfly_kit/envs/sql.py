"""sql: questions about a database that are answered with queries. Each chain has its own sqlite or DuckDB database.

As in InterCode, an observation is a list of rows (tuples), and the reward measures how well the rows of the last query
agree with those of the task's reference query. The built-in tasks have small generated databases; `load` reads files of
Spider and InterCode. Your own tasks need the field `gold` (a query) and either `script` (SQL statements) or `database`
(a sqlite file).

    af.envs.sql.agent(engine, chat=chat, options={"engine": "duckdb"})
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
import sqlite3
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly_kit import task_files
from agentfly_kit import tasks as task_sets
from agentfly_kit.envs.base import SandboxEnvironment
from agentfly_kit.envs.family import Family, Move, existing_file, first_world, int_field, row_id, tool_outputs
from agentfly_kit.errors import SandboxError, TaskError
from agentfly_kit.sandboxes.settings import forward_signature
from agentfly_kit.sandboxes.sql import SQLSandbox
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

Rows = list[tuple[Any, ...]]

# --- reward --------------------------------------------------------------------------------------


def score(seen: Rows | str | None, wanted: Rows) -> dict[str, float]:
    """Compare the last observation with the expected rows. Return {"reward", "success", "overlap", "order"}.

    Rows are compared as strings: 1 differs from 1.0. An error message, or None for a statement without rows, scores 0.

    overlap  Intersection over union of the two multisets of rows; 1 if both are empty.
    order    Kendall's tau-b between the shared rows in the order seen and in the order expected, or 1 if tau is
             undefined. As in InterCode, tau compares the rows themselves instead of their positions. Reversed rows
             therefore score -1 only if the expected rows are sorted.
    reward   Product of overlap and order, rounded to two digits where tau is defined; may be negative.
    Source:  InterCode, arXiv 2306.14898, and its SQL environment.
    """
    if not isinstance(seen, list):
        return {"reward": 0.0, "success": 0.0, "overlap": 0.0, "order": 0.0}
    have, want = [str(row) for row in seen], [str(row) for row in wanted]
    union = (Counter(have) | Counter(want)).total()
    overlap = reward = (Counter(have) & Counter(want)).total() / union if union else 1.0
    order = tau(*shared(have, want))
    if not math.isnan(order):
        reward = round(order * overlap, 2)
    order = 1.0 if math.isnan(order) else order
    return {"reward": reward, "success": float(reward >= 1), "overlap": overlap, "order": order}


def tau(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return Kendall's tau-b: (concordant pairs - discordant pairs) / sqrt(pairs untied in a * pairs untied in b).

    Shapes:  two sequences of equal length n, each with values that can be ordered.
    Units:   -1 to 1; NaN if all values of one sequence are equal.
    Source:  Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945).
    """
    pairs = sorted(zip(a, b, strict=True))
    every = _pairs(len(pairs))
    ties_a, ties_b, ties_both = _ties(a), _ties(b), _ties(pairs)
    if ties_a == every or ties_b == every:
        return math.nan
    # After sorting by (a, b), the inversions of b are exactly the discordant pairs.
    discordant = 0
    seen: list[Any] = []
    for _, y in pairs:
        at = bisect_right(seen, y)
        discordant += len(seen) - at
        seen.insert(at, y)
    concordant = every - ties_a - ties_b + ties_both - discordant
    found = (concordant - discordant) / math.sqrt(every - ties_a) / math.sqrt(every - ties_b)
    return max(-1.0, min(1.0, found))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


def _ties(values: Sequence[Hashable]) -> int:
    return sum(_pairs(count) for count in Counter(values).values())


def shared(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[str]]:
    """Restrict both sequences to the elements of their multiset intersection, keeping the order of each sequence."""
    common = Counter(a) & Counter(b)
    return _kept(a, common.copy()), _kept(b, common)


def _kept(values: Sequence[str], left: Counter[str]) -> list[str]:
    found = []
    for value in values:
        if left[value] > 0:
            left[value] -= 1
            found.append(value)
    return found


# --- environment ---------------------------------------------------------------------------------


@forward_signature(SQLSandbox, omit=("max_rows",), max_output=2**20)
class SQL(SandboxEnvironment):
    """Environment with a database, which the chain may modify, and the expected rows of the task's reference query.

    Args:
        engine: "sqlite", or "duckdb", which requires the package duckdb.
        seconds: time limit for one query; if it is exceeded, the model sees an error.
        most: maximum number of rows returned by one query.
        **sandbox: further settings of `SQLSandbox`: isolation, memory_mb, disk_mb, ...
    """

    _sandbox: SQLSandbox

    def __init__(self, engine: str = "sqlite", *, seconds: float = 5.0, most: int = 10_000, **sandbox: Any) -> None:
        self._sandbox = SQLSandbox(engine=engine, max_rows=most, **({"max_output": 2**20} | sandbox))
        self._seconds = seconds
        # Result of the last query: rows, an error message, or None for a statement without rows.
        self.observation: Rows | str | None = None
        self.queries: list[str] = []
        self.errors = 0
        # Rows that the task's reference query returns on the unmodified database.
        self.gold: Rows = []
        self.done = False

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the task has no database or no reference query."""
        fields = task.fields
        if not isinstance(fields.get("gold"), str):
            raise TaskError("field 'gold' is missing; it must contain the reference query")
        if "world" in fields and fields.get("db") in SCHEMAS:
            int_field(task, "world")
        elif not isinstance(fields.get("script"), str):
            if "database" not in fields:
                raise TaskError("the task has no database: add a field 'script' (SQL) or 'database' (a sqlite file)")
            if not _file(task).is_file():
                raise TaskError(f"the database {str(_file(task))!r} does not exist")
            if self._sandbox.engine != "sqlite":
                raise TaskError(
                    "field 'database' is a sqlite file, which needs engine='sqlite'; DuckDB needs 'script'"
                )

    async def reset(self, task: Task, seed: int) -> None:
        """Create the task's database and run its reference query. Raise SettingsError or SandboxError if that fails."""
        self.check_task(task)
        self.queries, self.errors, self.observation, self.done = [], 0, "", False
        self.gold = []
        gold = task.fields["gold"]
        await self._fill(task)
        result = await self._sandbox.run(gold, timeout=max(30.0, self._seconds))
        if not result.ok or result.truncated:
            why = result.error or f"more than {self._sandbox.max_rows} rows; raise options={{'most': ...}}"
            raise SandboxError(
                f"the query of task {task.id!r} fails in {self._sandbox.engine}: {why}; query: {gold!r}"
            )
        self.gold = list(result.rows)
        if not re.match(r"[^a-z]*select(?![a-z])", gold.lower()):  # the query may have modified the database
            await self._fill(task)

    async def _fill(self, task: Task) -> None:
        fields = task.fields
        if "world" in fields and fields.get("db") in SCHEMAS:
            await self._sandbox.renew(world(fields["db"], fields["world"]).script)
        elif isinstance(fields.get("script"), str):
            await self._sandbox.renew(fields["script"])
        else:
            await self._sandbox.renew(database=_file(task).read_bytes())

    @tool(max_chars=4096)
    async def execute(self, query: str) -> ToolResult:
        """Run a query on the database and show the resulting rows.

        Args:
            query: one SQL statement.
        """
        self.queries.append(query)
        result = await self._sandbox.run(query, timeout=self._seconds)
        if not result.ok:
            self.observation = f"Error executing query: {result.error}"
        elif result.truncated:
            self.observation = (
                f"Error executing query: more than {self._sandbox.max_rows} rows, or rows that are too long"
            )
        else:
            self.observation = list(result.rows) if result.columns else None
        failed = isinstance(self.observation, str)
        self.errors += failed
        return ToolResult(not failed, str(self.observation))

    @tool
    async def submit(self) -> str:
        """Submit the rows of the last query as the answer."""
        self.done = True
        return "Submitted."

    async def reward(self, final: str | None) -> dict[str, float]:
        """Score the last observation. Without a submission the reward is 0; a final answer counts as a submission.

        Additional metrics: submitted, queries (number of queries) and errors (number of failed queries).
        """
        submitted = self.done or final is not None
        scored = score(self.observation if submitted else None, self.gold)
        return scored | {"submitted": float(submitted), "queries": len(self.queries), "errors": self.errors}

    async def fork(self, into: SQL) -> None:
        """Copy the database to `into`. Raise SandboxError if a transaction is open or there are temporary tables."""
        await self._sandbox.fork(into._sandbox)
        into.queries, into.errors, into.done = list(self.queries), self.errors, self.done
        into.observation, into.gold = self.observation, self.gold


def _file(task: Task) -> Path:
    return Path(str(task.fields["database"]))


# --- generated tasks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Schema:
    """Schema of two tables: items with a text column and two numeric columns, and an attribute of each text.

    `numbers` maps each numeric column to the range (start, stop, step) from which distinct values are sampled.
    """

    table: str
    key: str
    keys: tuple[str, ...]
    text: str
    texts: tuple[str, ...]
    numbers: Mapping[str, Sequence[int]]
    other: str
    what: str
    whats: tuple[str, ...]
    size: int = 8

    @property
    def tables(self) -> dict[str, list[str]]:
        return {self.table: [self.key, self.text, *self.numbers], self.other: [self.text, self.what]}

    @property
    def heading(self) -> str:
        return "Tables: " + ", ".join(f"{name}({', '.join(columns)})" for name, columns in self.tables.items())


# Maps the name in a task's field `db` to the schema of its database.
SCHEMAS = {
    name: Schema(**row | {key: tuple(row[key].split()) for key in ("keys", "texts", "whats")})
    for name, row in task_files.bundled_json("vocabularies", "sql.json").items()
}


@dataclass(frozen=True)
class World:
    """One database instance: a schema filled with generated rows."""

    schema: Schema
    rows: tuple[tuple[Any, ...], ...]
    others: tuple[tuple[str, str], ...]

    @property
    def script(self) -> str:
        s = self.schema
        columns = ", ".join([f"{s.key} TEXT", f"{s.text} TEXT", *(f"{name} INTEGER" for name in s.numbers)])
        values = ", ".join(
            f"('{key}', '{text}', {', '.join(map(str, numbers))})" for key, text, *numbers in self.rows
        )
        others = ", ".join(f"('{text}', '{what}')" for text, what in self.others)
        return (
            f"CREATE TABLE {s.table} ({columns});\nINSERT INTO {s.table} VALUES {values};\n"
            f"CREATE TABLE {s.other} ({s.text} TEXT, {s.what} TEXT);\nINSERT INTO {s.other} VALUES {others};"
        )


@functools.lru_cache(maxsize=4096)
def world(db: str, number: int) -> World:
    """Generate database instance `number` of the schema `db`, deterministically."""
    s = SCHEMAS[db]
    rng = random.Random(f"sql {db} {number}")
    keys = rng.sample(s.keys, s.size)
    columns = [rng.sample(range(low, high, step), s.size) for low, high, step in s.numbers.values()]
    texts = [rng.choice(s.texts) for _ in keys]
    whats = rng.sample(s.whats, len(s.texts))
    return World(s, tuple(zip(keys, texts, *columns, strict=True)), tuple(zip(s.texts, whats, strict=True)))


@dataclass(frozen=True)
class Question:
    """A question in words, the query that answers it, and its difficulty level as in Spider: easy, medium or hard."""

    text: str
    gold: str
    hardness: str


def question(of: World, rng: random.Random) -> Question:
    """Sample a question of one of eight kinds, about values that occur in the database."""
    s = of.schema
    key, text, *_ = rng.choice(of.rows)
    number = rng.choice(list(s.numbers))
    most, order = ("most", " DESC") if rng.random() < 0.5 else ("least", "")
    column = rng.choice([s.text, *s.numbers])
    value = sorted(row[2 + list(s.numbers).index(number)] for row in of.rows)[rng.randrange(2, s.size - 2)]
    every = f"FROM {s.table}"
    given, here = f"{every} WHERE {s.text} = '{text}'", f"{every} WHERE {s.key} = '{key}'"
    sort, join = f"ORDER BY {number}{order}", f"{every} JOIN {s.other} USING ({s.text}) WHERE {s.key} = '{key}'"
    grouped = f"GROUP BY {s.text} ORDER BY {s.text}"
    kinds = [
        ("easy", f"What is the {column} of {key}?", f"SELECT {column} {here}"),
        ("easy", f"Which {s.key} has {s.text} {text}?", f"SELECT {s.key} {given}"),
        ("easy", f"How many {s.table} have {s.text} {text}?", f"SELECT count(*) {given}"),
        ("easy", f"Which {s.key} has {number} over {value}?", f"SELECT {s.key} {every} WHERE {number} > {value}"),
        ("medium", f"Which {s.key} has the {most} {number}?", f"SELECT {s.key} {every} {sort} LIMIT 1"),
        ("medium", f"List each {s.key} by {number}, {most} first.", f"SELECT {s.key} {every} {sort}"),
        (
            "medium",
            f"What is the total {number} of each {s.text}, by {s.text}?",
            f"SELECT {s.text}, sum({number}) {every} {grouped}",
        ),
        ("hard", f"What is the {s.what} of {key}?", f"SELECT {s.what} {join}"),
    ]
    hardness, asked, gold = rng.choice(kinds)
    return Question(asked, gold, hardness)


def rows(n: int, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generate tasks, each with its own database, as rows {"id", "question", "db", "world", "gold", "hardness"}."""
    for i in range(n):
        number = first_world(split, seed) + i
        db = list(SCHEMAS)[i % len(SCHEMAS)]
        asked = question(world(db, number), random.Random(f"sql question {number}"))
        yield {
            "id": row_id("sql", split, seed, i),
            "question": f"{SCHEMAS[db].heading}\n{asked.text}",
            "db": db,
            "world": number,
            "gold": asked.gold,
            "hardness": asked.hardness,
        }


# --- external files ------------------------------------------------------------------------------


def load(
    questions: str | os.PathLike[str], databases: str | os.PathLike[str] | None = None, *, schema: bool = True
) -> Tasks:
    """Load tasks from a file of Spider, BIRD or InterCode, with the databases in a folder.

    Nothing is downloaded; get the files from https://yale-lily.github.io/spider or the projects' pages.

    Args:
        questions: a JSON list of {"question", "query" or "SQL", "db_id"} (Spider, BIRD), or of {"query", "gold", "db"}
            (InterCode). The "evidence" of BIRD is appended to the question, as in BIRD's own prompts.
        databases: folder with NAME/NAME.sqlite or NAME.sqlite for each database; by default the folder `database` next
            to the file.
        schema: prepend the names of tables and columns to each question, as is usual for Spider but not for InterCode.

    Raises:  TaskError for missing files or invalid rows. The message names the file, the row and what is missing.
    """
    path = existing_file(questions, "pass the path of Spider's dev.json or InterCode's ic_spider_dev.json")
    folder = path.parent / "database" if databases is None else Path(databases).expanduser()
    found, missing = [], set()
    for i, (where, given) in enumerate(task_files.read_rows(path)):
        row = _spider(given, where)
        name = row["db"]
        file = next((f for f in (folder / name / f"{name}.sqlite", folder / f"{name}.sqlite") if f.is_file()), None)
        if file is None:
            missing.add(name)
            continue
        if schema:
            row["question"] = f"{_tables(str(file), file.stat().st_mtime_ns)}\n{row['question']}"
        found.append(row | {"id": f"{path.stem}-{i:05}", "database": str(file.resolve())})
    if missing:
        names = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise TaskError(
            f"{folder}: no database for {names}; expected {folder}/NAME/NAME.sqlite as in Spider's archive; otherwise "
            "pass the folder: load(questions, databases)"
        )
    return task_sets.tasks_from(found, name=path.stem)


def _spider(row: Any, where: str) -> dict[str, Any]:
    shape = dict(row) if isinstance(row, Mapping) else {}
    asked, gold, db = (
        (shape.get("query"), shape.get("gold"), shape.get("db"))
        if "gold" in shape
        else (shape.get("question"), shape.get("query", shape.get("SQL")), shape.get("db_id"))
    )
    if not (isinstance(asked, str) and isinstance(gold, str) and isinstance(db, str)):
        have = ", ".join(map(str, shape)) or type(row).__name__
        raise TaskError(
            f'{where}: a row must have "question", "query" (or "SQL") and "db_id" as in Spider, or "query", "gold" and '
            f'"db" as in InterCode; it has {have}'
        )
    if not re.fullmatch(r"[\w.\- ]+", db) or db.startswith("."):
        raise TaskError(f"{where}: {db!r} is not a valid database name")
    evidence = shape.get("evidence")
    if isinstance(evidence, str) and evidence.strip():
        asked = f"{asked}\nEvidence: {evidence.strip()}"
    hardness = shape.get("hardness", shape.get("difficulty"))
    more = {"hardness": hardness} if isinstance(hardness, str) else {}
    return {"question": asked, "gold": gold, "db": db, **more}


@functools.lru_cache(maxsize=512)
def _tables(path: str, changed: int) -> str:
    with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            listed = "SELECT name FROM pragma_table_info(?)"
            columns = {name: [str(column) for (column,) in connection.execute(listed, (name,))] for name in names}
        except sqlite3.DatabaseError as error:
            raise TaskError(f"{path}: not a readable sqlite database ({error})") from None
    return "Tables: " + ", ".join(
        f"{name}({', '.join(columns[name])})" for name in names if not name.startswith("sqlite_")
    )


# --- scripted players ----------------------------------------------------------------------------


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Execute the reference query and submit."""
    return ("submit", {}) if tool_outputs(messages) else ("execute", {"query": task.fields["gold"]})


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Select random columns of a random table, then possibly submit."""
    if tool_outputs(messages) and rng.random() < 0.5:
        return "submit", {}
    db = task.fields.get("db")
    tables = SCHEMAS[db].tables if db in SCHEMAS else {"sqlite_master": ["name", "sql"]}
    table = rng.choice(list(tables))
    columns = rng.sample(tables[table], rng.randint(1, len(tables[table])))
    return "execute", {"query": f"SELECT {', '.join(columns)} FROM {table} LIMIT {rng.randint(1, 9)}"}


family = Family(
    name="sql",
    what="questions about a sqlite or DuckDB database; InterCode's observation and reward; reads Spider's files",
    environment=SQL,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    max_tokens=128,
    size="any number can be generated; `load` reads Spider's files",
    splits={"train": 1000, "test": 256},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
