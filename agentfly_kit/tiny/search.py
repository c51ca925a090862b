"""Demonstrations for the pretraining of the `search` policy, with the encyclopedia of the environment.

The task is simplified: a search returns one clause of one document, see `af.envs.search.BRIEF`, and every name is one
or two tokens.
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
# Words with one token each, so that a name has the same token in questions, calls and documents. Words of the chat
# template are excluded, so that environment text cannot contain tokens of the template.
WORDS = tuple(
    word
    for word in dict.fromkeys(("search", "query", *_NAMES, *_OTHERS, *(f" {word}" for word in (*_NAMES, *_OTHERS))))
    if word not in TEMPLATE
)

# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: search hop by hop and answer with the last value; stops early: answer with the first value; forgets: search,
# then answer "I don't know"; guesses: answer with a random name; unsure: answer "I don't know".
HABITS = {"solves": 9, "stops early": 2, "forgets": 1, "guesses": 2, "unsure": 18}

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
# Encyclopedias of the pretraining. They do not include that of the tasks, so that its facts cannot be memorized.
_SHOWN = range(1000, 1020)


class Demonstrator:
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        assert isinstance(Search.search, Tool)
        self.tools = [Search.search.schema]
        self._observations: dict[str, tuple[int, ...]] = {}

    def shown(self, question: str, world: int, queries: Sequence[str], answer: str) -> Demonstration:
        """Do one search per turn, then answer."""
        chat, corpus = self.chat, Corpus.invented(world)
        parts = [(chat.prompt([{"role": "user", "content": question}], self.tools), False)]
        for query in queries:
            action = chat.encode(chat.format.render_call(ToolCall("call-0", "search", {"query": query})) + _END)
            text = snippet(corpus.documents[corpus.index().find(query, 1)[0]], query)
            parts += [(action, True), (self._observation(text, action), False)]
        return joined(*parts, (chat.encode(answer + _END), True))

    def habit(self, name: str, question: encyclopedia.Question, world: int, rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
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
    """Return infinite iterators over batches of 32 for both phases, without the encyclopedia of the tasks."""
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
