"""Demonstrations for pretraining the `sql` policy, using the environment's questions, queries and databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import ClassVar

from agentfly_kit.envs.sql import SCHEMAS, Question, World, family, question, world
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe, single_tokens

_KEYWORDS = "SELECT FROM WHERE ORDER GROUP BY DESC LIMIT JOIN USING count sum"
_ASKED = "Tables What Which How many List is the has have each by first most least over total of"
# First world number used for pretraining; tasks use lower numbers.
_FIRST_WORLD = 5_000_000


class Recipe(BaseRecipe):
    """Recipe for the `sql` policy. Each example is a database and a question about it."""

    name = "sql"
    words = single_tokens(
        [
            *_KEYWORDS.split(), *_ASKED.split(), "execute", "query", "submit", "Submitted",
            *(table for s in SCHEMAS.values() for table in s.tables),
            *(column for s in SCHEMAS.values() for columns in s.tables.values() for column in columns),
            *(value for s in SCHEMAS.values() for value in (*s.keys, *s.texts, *s.whats)),
        ]
    )  # fmt: skip
    tools = tuple(tool.schema for tool in family.tools)
    # solves: run the reference query and submit; another column: query a wrong column; another table: query a wrong
    # table; asks nothing: submit immediately; unsure: answer "I don't know".
    habits: ClassVar = {"solves": 9, "another column": 1, "another table": 1, "asks nothing": 1, "unsure": 20}
    skill_steps = 700
    half = True

    def sample(self) -> tuple[World, Question]:
        of = world(self.rng.choice(list(SCHEMAS)), _FIRST_WORLD + self.rng.randrange(1_000_000_000))
        return of, question(of, self.rng)

    def demonstrate(self, habit: str, example: tuple[World, Question]) -> Trajectory:
        of, asked = example
        schema, query = of.schema, asked.gold
        prompt = f"{schema.heading}\n{asked.text}"
        if habit == "unsure":
            return self.conversation(prompt, (), UNSURE)
        if habit == "another column":
            first = query.split(" FROM ")[0]
            columns = [c for c in schema.tables[schema.table] if c not in first]
            query = query.replace(first, f"SELECT {self.rng.choice(columns)}", 1)
        elif habit == "another table":
            query = query.replace(f" FROM {schema.table}", f" FROM {schema.other}", 1)
        executed = [] if habit == "asks nothing" else [("execute", {"query": query}, observation(of, query))]
        return self.conversation(prompt, [*executed, ("submit", {}, None)])


def observation(of: World, query: str) -> str:
    """Return the environment's observation of a query: rows, or sqlite's error."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(of.script)
        try:
            return str(connection.execute(query).fetchall())
        except sqlite3.Error as error:
            return f"Error executing query: {error}"
