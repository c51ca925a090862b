"""Demonstrations for the pretraining of the `sql` policy, with questions, queries and databases of the environment."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import base
from agentfly_kit.envs.sql import SCHEMAS, SQL, Question, World, question, world
from agentfly_kit.tiny import TEMPLATE, UNSURE, Demonstration, joined
from agentfly_kit.types import ToolCall

_KEYWORDS = "SELECT FROM WHERE ORDER GROUP BY DESC LIMIT JOIN USING count sum"
_ASKED = "Tables What Which How many List is the has have each by first most least over total of"
# Words with one token each, so that a name has the same token in questions, queries and rows. Words of the chat
# template are excluded, so that environment text cannot contain tokens of the template.
WORDS = tuple(
    word
    for word in dict.fromkeys(
        [
            *_KEYWORDS.split(), *_ASKED.split(), "execute", "query", "submit", "Submitted",
            *(table for s in SCHEMAS.values() for table in s.tables),
            *(column for s in SCHEMAS.values() for columns in s.tables.values() for column in columns),
            *(value for s in SCHEMAS.values() for value in (*s.keys, *s.texts, *s.whats)),
        ]
    )
    if word not in TEMPLATE
)  # fmt: skip

HALF = True
SKILL = 700

# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: run the reference query and submit; another column: query a wrong column; another table: query a wrong table;
# asks nothing: submit immediately; unsure: answer "I don't know".
HABITS = {"solves": 9, "another column": 1, "another table": 1, "asks nothing": 1, "unsure": 20}

ORIGIN = """\
# SQL tasks

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

Each task has a small database of its own, made from `db` and the number in `world`: two tables of one of three kinds.
`gold` is the query whose rows are wanted, `hardness` as Spider says. A restricted grammar: eight kinds of question. No
world is in both splits. Licence: that of the project.
"""

TOOLS = [tool.schema for tool in base.tools(SQL)]
# First world of the pretraining; the numbers of the tasks are lower.
_SHOWN = 5_000_000


class Demonstrator:
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def shown(self, of: World, asked: Question, queries: Sequence[str], last: str | None) -> Demonstration:
        """Run one query per turn, then answer `last`, or submit if it is None."""
        chat = self.chat
        prompt = [{"role": "user", "content": f"{of.schema.told}\n{asked.text}"}]
        parts = [(chat.prompt(prompt, TOOLS), False)]
        for query in queries:
            action = self._call("execute", {"query": query})
            message = {"role": "tool", "name": "execute", "tool_call_id": "call-0", "content": observation(of, query)}
            parts += [(action, True), (chat.observation_ids([message], TOOLS, after=action), False)]
        end = self._call("submit", {}) if last is None else chat.encode(last + "<|im_end|>")
        return joined(*parts, (end, True))

    def habit(self, name: str, of: World, asked: Question, rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
        if name in ("unsure", "asks nothing"):
            return self.shown(of, asked, [], UNSURE if name == "unsure" else None)
        query = asked.gold
        if name == "another column":
            first = query.split(" FROM ")[0]
            columns = [c for c in of.schema.tables[of.schema.table] if c not in first]
            query = query.replace(first, f"SELECT {rng.choice(columns)}", 1)
        elif name == "another table":
            query = query.replace(f" FROM {of.schema.table}", f" FROM {of.schema.other}", 1)
        return self.shown(of, asked, [query], None)

    def _call(self, name: str, arguments: dict[str, str]) -> tuple[int, ...]:
        return self.chat.encode(self.chat.format.render_call(ToolCall("call-0", name, arguments)) + "<|im_end|>")


def observation(of: World, query: str) -> str:
    """Return the environment's observation of a query: rows, or sqlite's error."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(of.script)
        try:
            return str(connection.execute(query).fetchall())
        except sqlite3.Error as error:
            return f"Error executing query: {error}"


def lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Return infinite iterators over batches of 32 for both phases, without worlds of tasks."""
    writer = Demonstrator(chat)
    rng = random.Random(f"sql warm-up {seed}")

    def drawn() -> tuple[World, Question]:
        of = world(rng.choice(list(SCHEMAS)), _SHOWN + rng.randrange(1_000_000_000))
        return of, question(of, rng)

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit("solves", *drawn(), rng) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, *drawn(), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()
