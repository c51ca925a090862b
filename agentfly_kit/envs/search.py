"""search: questions of one to three hops over an encyclopedia that can be searched (HotpotQA, Search-R1).

The corpus that ships is invented, so that nothing of it was ever read before; a corpus of yours is a list of texts, or
a file of them. Retrieval is BM25, or by vectors where an embedding model is given. The reward is exact match after
SQuAD's normalisation (`metric="f1"` for F1); both are in the metrics.

    agent = af.envs.search.agent(policy, options={"topk": 3})
    agent = af.envs.search.agent(engine, chat=af.Chat(tokenizer, format="search"))      # Search-R1's tags
    mine = af.envs.search.Corpus.load("wiki.jsonl")
    agent = af.envs.search.agent(policy, options={"corpus": mine, "dense": "folder of an embedding model"})
    tasks = af.tasks_from([{"question": "Who wrote it?", "answers": ["Ann Bell", "A. Bell"]}])
"""

from __future__ import annotations

import functools
import json
import random
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from agentfly_kit.envs import encyclopedia, qa
from agentfly_kit.envs.family import Family, Move, tool_outputs
from agentfly_kit.envs.retrieval import Embed, Index, VectorIndex, WordIndex, embedding, words
from agentfly_kit.errors import SettingsError, ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

Metric = Literal["em", "f1"]

BRIEF: dict[str, Any] = {"brief": True, "topk": 1}
"""How the policy that ships was taught to search: `agent(af.tiny.policy("search"), options=BRIEF)`."""


@dataclass(frozen=True)
class Document:
    """One text that can be found."""

    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Corpus:
    """Documents and their indexes. Each index is made once, when it is first asked for."""

    def __init__(self, documents: Iterable[Document | str | Mapping[str, Any]], *, name: str = "yours") -> None:
        self.name = name
        self.documents = tuple(_document(given, f"document {i} of {name}") for i, given in enumerate(documents))
        if not self.documents:
            raise SettingsError(f"the corpus {name!r} is empty: give at least one text")
        self._indexes: dict[Any, Index] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """From a .jsonl file: a row has `contents` (Search-R1's: a title in quotes, a line break, the text), or `text`
        and perhaps `title`.

        Raises:  SettingsError naming file and line.
        """
        file = Path(path).expanduser()
        if not file.exists():
            raise SettingsError(
                f"{file}: no such file; give a .jsonl file whose rows have 'contents', or 'title' and 'text'. Without "
                "one there is the invented encyclopedia: leave corpus= out. Nothing is downloaded"
            )
        found = []
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise SettingsError(f"{file}:{number}: not JSON ({error}); want one object a line") from None
                    found.append(_document(row, f"{file}:{number}"))
        return cls(found, name=str(file))

    @staticmethod
    def invented(world: int = 0) -> Corpus:
        """The encyclopedia that ships, or another of its kind."""
        return _invented(world)

    def index(self, dense: str | Path | Embed | None = None) -> Index:
        """BM25, or by the vectors of `dense`; see `retrieval.embedding`."""
        key = dense if dense is None or callable(dense) else str(dense)
        with self._lock:
            if key not in self._indexes:
                texts = [document.contents for document in self.documents]
                self._indexes[key] = WordIndex(texts) if dense is None else VectorIndex(texts, embedding(dense))
            return self._indexes[key]

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self.documents)} documents)"


@functools.lru_cache(32)
def _invented(world: int) -> Corpus:
    found = [Document(entry.title, entry.text) for entry in encyclopedia.entries(world).values()]
    return Corpus(found, name=f"encyclopedia {world}")


@functools.lru_cache(2)
def _loaded(path: str) -> Corpus:
    return Corpus.load(path)


def _document(given: Any, where: str) -> Document:
    if isinstance(given, Document):
        return given
    if isinstance(given, str):
        return Document("", given)
    if isinstance(given, Mapping):
        if isinstance(given.get("contents"), str):
            title, _, text = given["contents"].partition("\n")
            return Document(title.strip().strip('"'), text) if text else Document("", title)
        if isinstance(given.get("text"), str):
            return Document(str(given.get("title") or ""), given["text"])
    raise SettingsError(f"{where}: want a text, or an object with 'contents', or with 'title' and 'text'")


class Search:
    """One question, and a corpus to search.

    corpus  a `Corpus`, a path, or texts; None for the encyclopedia that ships
    topk    documents that a search shows
    dense   an embedding: a function from texts to vectors, or the folder of a transformers model. None is BM25
    metric  which score is the reward, "em" or "f1"
    brief   a search shows snippets, without "Doc 1(Title: ...)": of each text the clause that shares most words with
            the query, words of the title aside; for small models
    """

    def __init__(
        self,
        corpus: Corpus | str | Path | Iterable[Any] | None = None,
        *,
        topk: int = 3,
        dense: str | Path | Embed | None = None,
        metric: Metric = "em",
        brief: bool = False,
    ) -> None:
        if isinstance(corpus, str | Path):
            corpus = _loaded(str(corpus))
        elif corpus is not None and not isinstance(corpus, Corpus):
            corpus = Corpus(corpus)
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise SettingsError(f"topk={topk!r}: want at least 1 document")
        if metric not in get_args(Metric):
            raise SettingsError(f"metric={metric!r}: want 'em' or 'f1'")
        self._given, self._topk, self._dense, self._metric, self._brief = corpus, topk, dense, metric, brief

    def reset(self, task: Task, seed: int) -> None:
        self.answers = qa.answers_of(task.fields, f"task {task.id}")
        self.support: tuple[str, ...] = tuple(task.fields.get("support") or ())
        """Titles of the documents that the answer takes, where the task says so."""
        world = task.fields.get("world", 0)
        if self._given is None and (isinstance(world, bool) or not isinstance(world, int)):
            raise SettingsError(f"task {task.id}: world={world!r}: want the number of an encyclopedia")
        self.corpus = Corpus.invented(world) if self._given is None else self._given
        self.index = self.corpus.index(self._dense)
        self.queries: list[str] = []
        self.seen: list[str] = []
        """Titles of what was shown."""

    @tool
    def search(self, query: str) -> str:
        """Search the encyclopedia.

        Args:
            query: what to look for.
        """
        if not query.strip():
            raise ToolError("give a query")
        self.queries.append(query)
        found = [self.corpus.documents[i] for i in self.index.find(query, self._topk)]
        self.seen += [document.title for document in found]
        if not found:
            return "nothing found"
        if self._brief:
            return "\n".join(snippet(document, query) for document in found)
        return "\n".join(f'Doc {i}(Title: "{d.title}") {d.text}' for i, d in enumerate(found, 1))

    def reward(self, final: str | None) -> dict[str, float]:
        """Of what the last <answer> holds, or of the whole text: `em` and `f1`; no answer is 0. The stages: `answered`,
        how often it `searched`, and `found`, the share of the needed documents that it was shown."""
        response = qa.extract_answer(final)
        em, f1 = (
            (0.0, 0.0) if response is None else (qa.exact_match(response, self.answers), qa.f1(response, self.answers))
        )
        scores = {"reward": em if self._metric == "em" else f1, "success": em, "em": em, "f1": f1}
        scores |= {"answered": float(response is not None), "searched": float(len(self.queries))}
        if self.support:
            scores["found"] = sum(title in self.seen for title in self.support) / len(self.support)
        return scores

    async def fork(self, into: Search) -> None:
        into.__dict__.update(self.__dict__)
        into.queries, into.seen = list(self.queries), list(self.seen)


def snippet(document: Document, query: str) -> str:
    """The clause of the text that shares most words with the query, those of the title aside; all of it for none."""
    wanted = set(words(query)) - set(words(document.title))
    clauses = re.split(r"[.,;]\s+(?:and )?", document.text.rstrip("."))
    best = max(clauses, key=lambda clause: len(wanted & set(words(clause))))
    return best if wanted & set(words(best)) else document.text


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"id", "question", "answer", "support", "world"}; every fifth question of the encyclopedia is the test's."""
    every = encyclopedia.questions(seed)
    chosen = [q for i, q in enumerate(every) if (i % 5 == 4) == (split == "test")]
    if n > len(chosen):
        raise SettingsError(
            f"n={n}: the encyclopedia has {len(chosen)} questions for {split!r}; ask for fewer, or for another "
            "encyclopedia: seed=1"
        )
    mark = "" if seed == 0 else f"{seed}-"
    found = []
    for i, question in enumerate(chosen[:n]):
        steps = encyclopedia.path(question, seed)
        found.append(
            {
                "id": f"search-{split}-{mark}{i:04}",
                "question": question.text,
                "answer": steps[-1][2],
                "support": [title for title, _, _ in steps],
                "world": seed,
            }
        )
    return found


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Knows the encyclopedia: it searches for each thing on the way, and answers."""
    way = [*task.fields["support"], task.fields["answer"]]
    at = len(tool_outputs(messages))
    return way[-1] if at == len(way) - 1 else ("search", {"query": way[at]})


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Searches for words of the question, or says any title or word of the encyclopedia."""
    entries = list(encyclopedia.entries(task.fields["world"]).values())
    if rng.random() < 0.5:
        return rng.choice(rng.choice(entries).facts)[1]
    return "search", {"query": rng.choice(str(task.messages[-1]["content"]).split())}


family = Family(
    name="search",
    what="questions of one to three hops over a corpus to search, invented or yours; exact match and F1",
    environment=Search,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    size="1,200 train and 300 test ship; your own rows and corpus are read",
    needs=("bm25s",),
    install="pip install bm25s",
    splits={"train": 1200, "test": 300},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
