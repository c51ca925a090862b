"""Demonstrations for the `search` policy: what its warm-up shows it. The encyclopedia is the environment's.

Its world is smaller than a library: a search shows one clause of one text, `af.envs.search.BRIEF`, and every name is
one or two tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import encyclopedia
from agentfly_kit.envs.search import Corpus, Search, snippet
from agentfly_kit.tiny import TEMPLATE, UNSURE, Demonstration, joined
from agentfly_kit.tools.tool import Tool
from agentfly_kit.types import ToolCall

_NAMES = (
    *(*encyclopedia.FIRST, *encyclopedia.LAST, *encyclopedia.TOWNS, *encyclopedia.COUNTRIES),
    *(*encyclopedia.RIVERS, *encyclopedia.COINS, *encyclopedia.TRADES, *encyclopedia.QUALITIES, *encyclopedia.THINGS),
)
_OTHERS = ("What", "the", "is", "of", "Of", "The", *encyclopedia.RELATIONS, *encyclopedia.KINDS)
WORDS = tuple(
    word
    for word in dict.fromkeys(("search", "query", *_NAMES, *_OTHERS, *(f" {word}" for word in (*_NAMES, *_OTHERS))))
    if word not in TEMPLATE
)
"""Each is one token, so that a name in a question, in a call and in a text is the same one. No word of the chat
template is among them: what a template writes as a token of its own, no text may write."""

HABITS = {"solves": 9, "stops early": 2, "forgets": 1, "guesses": 2, "unsure": 18}
"""Of 32 demonstrations of the second phase. It searches hop by hop and tells the last value; it tells the first; it
searches and then says that it does not know; it says any name; it says that it does not know."""

HALF = True
SKILL, SHY = 500, 120

ORIGIN = """\\
# Search tasks

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

Questions of one to three hops over the invented encyclopedia of `agentfly_kit/envs/encyclopedia.py`: none of its
people, works, towns and countries exists. `support` names the articles that the answer takes. No question is in both
splits. Licence: that of the project.
"""

_END = "<|im_end|>"
_SHOWN = range(1000, 1020)
"""The encyclopedias of the warm-up; that of the tasks is none of them, so that no fact of it is learnt by heart."""


class Demonstrator:
    """Writes conversations through the policy's own chat: all ids are those an agent would see."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        assert isinstance(Search.search, Tool)
        self.tools = [Search.search.schema]
        self._observations: dict[str, tuple[int, ...]] = {}

    def shown(self, question: str, world: int, queries: Sequence[str], answer: str) -> Demonstration:
        """Searches for these, one a turn, then answers."""
        chat, corpus = self.chat, Corpus.invented(world)
        parts = [(chat.prompt([{"role": "user", "content": question}], self.tools), False)]
        for query in queries:
            action = chat.encode(chat.format.render_call(ToolCall("call-0", "search", {"query": query})) + _END)
            text = snippet(corpus.documents[corpus.index().find(query, 1)[0]], query)
            parts += [(action, True), (self._observation(text, action), False)]
        return joined(*parts, (chat.encode(answer + _END), True))

    def habit(self, name: str, question: encyclopedia.Question, world: int, rng: random.Random) -> Demonstration:
        """One of `HABITS`."""
        steps = encyclopedia.path(question, world)
        queries, answer = [f"{title} {relation}" for title, relation, _ in steps], steps[-1][2]
        if name in ("unsure", "guesses"):
            queries, answer = [], UNSURE if name == "unsure" else rng.choice(_NAMES)
        elif name == "stops early":
            queries, answer = queries[:1], steps[0][2]
        elif name == "forgets":
            answer = UNSURE
        return self.shown(question.text, world, queries, answer)

    def _observation(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        if text not in self._observations:
            message = {"role": "tool", "name": "search", "tool_call_id": "call-0", "content": text}
            self._observations[text] = self.chat.observation_ids([message], self.tools, after=after)
        return self._observations[text]


def lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Endless batches of 32, of the first phase and of the second. None shows the encyclopedia of the tasks."""
    writer = Demonstrator(chat)
    rng = random.Random(f"search warm-up {seed}")

    def drawn() -> tuple[encyclopedia.Question, int]:
        world = rng.choice(_SHOWN)
        return rng.choice(encyclopedia.questions(world)), world

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit("solves", *drawn(), rng) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, *drawn(), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()
