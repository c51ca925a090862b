"""search: questions of one to three hops, answered by searching an encyclopedia (as in HotpotQA and Search-R1).

The included corpus is fictional, so that no model has seen it in pretraining. You can also use your own corpus, a list
of texts or a file. Retrieval uses BM25, or vectors if an embedding model is given. The reward is exact match after
SQuAD's normalisation, or F1 with `metric="f1"`; the metrics contain both.

    agent = af.envs.search.agent(policy, options={"topk": 3})
    agent = af.envs.search.agent(engine, chat=af.Chat(tokenizer, format="search"))      # Search-R1's tags
    mine = af.envs.search.Corpus.load("wiki.jsonl")
    agent = af.envs.search.agent(policy, options={"corpus": mine, "dense": "folder of an embedding model"})
    tasks = af.tasks_from([{"question": "Who wrote it?", "answers": ["Ann Bell", "A. Bell"]}])
"""

from __future__ import annotations

import functools
import random
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentfly_kit import task_files
from agentfly_kit._display import Displayable
from agentfly_kit.envs import qa
from agentfly_kit.envs.family import Family, Move, existing_file, int_field, row_id, tool_outputs
from agentfly_kit.envs.retrieval import Embed, Index, VectorIndex, WordIndex, embedding, words
from agentfly_kit.envs.search import encyclopedia
from agentfly_kit.errors import SettingsError, TaskError, ToolError, check_choice, check_count
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, text_of

Metric = Literal["em", "f1"]

# Environment options with which the shipped policy was trained: `agent(af.tiny.policy("search"), options=BRIEF)`.
BRIEF: dict[str, Any] = {"brief": True, "topk": 1}


@dataclass(frozen=True, repr=False)
class Document(Displayable):
    """One document of a corpus."""

    title: str
    text: str

    @property
    def contents(self) -> str:
        """The text to index: the title, if there is one, followed by the document's text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Corpus(Displayable):
    """Documents and their indexes. Each index is built once, on first use."""

    def __init__(self, documents: Iterable[Document | str | Mapping[str, Any]], *, name: str = "yours") -> None:
        self.name = name
        self.documents = tuple(_document(given, f"document {i} of {name}") for i, given in enumerate(documents))
        if not self.documents:
            raise SettingsError(f"the corpus {name!r} is empty; it must have at least one document")
        self._indexes: dict[Any, Index] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Load a corpus from a .jsonl, .json or .parquet file.

        A row has the fields `title` (optional) and `text`, or the field `contents` of Search-R1: the title in quotes, a
        line break, and the text.

        Raises:  SettingsError or TaskError, with the file and line, for invalid data.
        """
        file = existing_file(path, "its rows must have 'contents', or 'title' and 'text'")
        return cls([_document(row, where) for where, row in task_files.read_rows(file)], name=str(file))

    @staticmethod
    @functools.lru_cache(32)
    def invented(world: int = 0) -> Corpus:
        """Generate fictional encyclopedia number `world` and return it as a corpus. `world=0` is the default corpus."""
        found = [Document(entry.title, entry.text) for entry in encyclopedia.entries(world).values()]
        return Corpus(found, name=f"encyclopedia {world}")

    def index(self, dense: str | Path | Embed | None = None) -> Index:
        """Return the BM25 index or, with `dense`, an index of embedding vectors; see `retrieval.embedding`."""
        key = dense if dense is None or callable(dense) else str(dense)
        with self._lock:
            if key not in self._indexes:
                texts = [document.contents for document in self.documents]
                self._indexes[key] = WordIndex(texts) if dense is None else VectorIndex(texts, embedding(dense))
            return self._indexes[key]

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self.documents)} documents)"


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
    raise SettingsError(f"{where}: a document must be a string or an object with 'contents', or 'title' and 'text'")


class Search:
    """Environment with one question and a corpus to search.

    Args:
        corpus: a `Corpus`, a path, or texts; by default the included encyclopedia.
        topk: number of documents per search.
        dense: an embedding function from strings to vectors, or the folder of a transformers model. By default, BM25 is
            used instead.
        metric: the score used as the reward, "em" or "f1".
        brief: for small models, show only a snippet of each document instead of "Doc 1(Title: ...)" and its text. The
            snippet is the clause that shares the most words with the query, not counting words of the title.
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
        check_count("topk", topk)
        check_choice("metric", metric, Metric)
        self._given, self._topk, self._dense, self._metric, self._brief = corpus, topk, dense, metric, brief

    def check_task(self, task: Task) -> None:
        """Raise TaskError or SettingsError if a field has the wrong type, or there is no reference answer."""
        qa.answers_of(task.fields)
        if self._given is None and "world" in task.fields:
            int_field(task, "world")
        support = task.fields.get("support") or ()
        if not isinstance(support, list | tuple):
            raise TaskError(f"field 'support' must be a list of titles, got {support!r:.100}")

    def reset(self, task: Task, seed: int) -> None:
        self.answers = qa.answers_of(task.fields)
        # Titles of the documents needed for the answer, if the task lists them.
        self.support: tuple[str, ...] = tuple(task.fields.get("support") or ())
        if self._given is not None:
            self.corpus = self._given
        else:
            self.corpus = Corpus.invented(int_field(task, "world") if "world" in task.fields else 0)
        self.index = self.corpus.index(self._dense)
        self.queries: list[str] = []
        # Titles of the documents shown so far.
        self.seen: list[str] = []

    @tool
    def search(self, query: str) -> str:
        """Search the encyclopedia.

        Args:
            query: the search terms.
        """
        if not query.strip():
            raise ToolError("the query must not be empty")
        self.queries.append(query)
        found = [self.corpus.documents[i] for i in self.index.find(query, self._topk)]
        self.seen += [document.title for document in found]
        if not found:
            return "nothing found"
        if self._brief:
            return "\n".join(snippet(document, query) for document in found)
        return "\n".join(f'Doc {i}(Title: "{d.title}") {d.text}' for i, d in enumerate(found, 1))

    def reward(self, final: str | None) -> dict[str, float]:
        """Score the last <answer> tag, or the whole final text, with `em` and `f1`. A missing answer scores 0.

        Additional metrics: `answered`, `searched` (number of searches) and `found` (fraction of the needed documents
        that were shown).
        """
        response = qa.extract_answer(final)
        em, f1 = (
            (0.0, 0.0)
            if response is None
            else (qa.exact_match(response, self.answers), qa.f1(response, self.answers))
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
    """Return the clause of the document that shares the most words with the query, not counting words of the title.

    Return the whole text if no clause shares a word.
    """
    wanted = set(words(query)) - set(words(document.title))
    clauses = re.split(r"[.,;]\s+(?:and )?", document.text.rstrip("."))
    best = max(clauses, key=lambda clause: len(wanted & set(words(clause))))
    return best if wanted & set(words(best)) else document.text


def rows(n: int, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "answer", "support", "world"}. Every fifth question is a test task."""
    chosen = [q for i, q in enumerate(encyclopedia.questions(seed)) if (i % 5 == 4) == (split == "test")]
    for i, question in enumerate(chosen[:n]):
        steps = encyclopedia.path(question, seed)
        yield {
            "id": row_id("search", split, seed, i),
            "question": question.text,
            "answer": steps[-1][2],
            "support": [title for title, _, _ in steps],
            "world": seed,
        }


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Search for each document that the answer requires, one per turn, then answer."""
    way = [*task.fields["support"], task.fields["answer"]]
    at = len(tool_outputs(messages))
    return way[-1] if at == len(way) - 1 else ("search", {"query": way[at]})


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Search for a random word of the question, or answer with a random value from the encyclopedia."""
    entries = list(encyclopedia.entries(task.fields["world"]).values())
    if rng.random() < 0.5:
        return rng.choice(rng.choice(entries).facts)[1]
    return "search", {"query": rng.choice(text_of(task.messages[-1]).split())}


family = Family(
    name="search",
    what="questions of one to three hops over a searchable corpus, fictional or your own; exact match and F1",
    environment=Search,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    size="1,200 train and 300 test tasks included; your own rows and corpus can be used",
    needs=("bm25s",),
    install='pip install "agentfly_kit[envs]"',
    splits={"train": 1200, "test": 300},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
