"""search: metrics, retrieval, users' corpora and invalid input."""

import json
import re
import string
from pathlib import Path
from typing import Any

import errors
import numpy
import pytest

import agentfly_kit as af
from agentfly_kit.envs import qa, retrieval
from agentfly_kit.envs.search import Corpus, Document, Search, agent, encyclopedia, snippet


def task(answers: Any = "Paris", **fields: Any) -> af.Task:
    return af.Task("t", ({"role": "user", "content": "Where?"},), {"answers": answers} | fields)


def ready(
    corpus: Any = ("Paris is in France.", "Oslo is in Norway."), given: af.Task | None = None, **options: Any
) -> Any:
    of = Search(corpus, **options)
    of.reset(given or task(), 0)
    return of


# ---- the scores


@pytest.mark.parametrize(
    ("said", "answers", "em", "f1"),
    [
        ("Paris", ["Paris"], 1, 1), ("the  PARIS.", ["paris"], 1, 1), ("Paris, France", ["Paris"], 0, 2 / 3),
        ("Paris", ["Lyon", "Paris"], 1, 1), ("Lyon", ["Paris"], 0, 0), ("", ["Paris"], 0, 0), ("the", [""], 1, 1),
        ("the", ["a"], 1, 1), ("", ["the"], 1, 1), ("!?", ["Paris"], 0, 0),
        ("Paris Paris Paris", ["Paris"], 0, 1 / 2), ("Paris Lyon Nice Lille", ["Paris"], 0, 2 / 5),
        ("an apple a day", ["apple day"], 1, 1), ("theatre", ["atre"], 0, 0), ("U.S.A.", ["USA"], 1, 1),
        ("well-known", ["wellknown"], 1, 1), ("Zürich", ["zürich"], 1, 1), ("Zurich", ["Zürich"], 0, 0),
        ("ＰＡＲＩＳ", ["Paris"], 0, 0), ("北京", ["北京"], 1, 1), ("İ", ["i̇"], 1, 1), ("1,000", ["1000"], 1, 1),
        ("New York City", ["New York"], 0, 4 / 5), ("«Paris»", ["Paris"], 0, 0), ("3.5", ["35"], 1, 1),
    ],
)  # fmt: skip
def test_answers_are_scored_as_squad_does(said: str, answers: list[str], em: float, f1: float) -> None:
    assert (qa.exact_match(said, answers), qa.f1(said, answers)) == (em, pytest.approx(f1))


@pytest.mark.parametrize(
    ("said", "precision", "recall"),
    [("z q y", 2 / 3, 2 / 3), ("x", 1, 1 / 3), ("y y", 1 / 2, 1 / 3), ("w x v y u z", 1 / 2, 1), ("", 0, 0)],
)
def test_precision_and_recall_count_words(said: str, precision: float, recall: float) -> None:
    found = qa.precision(said, ["x y z"]), qa.recall(said, ["x y z"]), qa.recall(said, [])
    assert found == pytest.approx((precision, recall, 0))


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("I think <answer> Paris </answer>", "Paris"), ("<answer>Lyon</answer> no, <answer>Paris</answer>", "Paris"),
        ("Paris", "Paris"), ("<answer>Paris", "<answer>Paris"), ("", ""), (None, None),
    ],
)  # fmt: skip
def test_the_answer_is_the_content_of_the_last_tag(said: str | None, answer: str | None) -> None:
    assert qa.extract_answer(said) == answer


def test_rewards_of_a_chain() -> None:
    of = ready()
    names = ("reward", "success", "em", "f1", "answered", "searched")
    assert of.reward(None) == dict.fromkeys(names, 0.0)
    of.search("france")
    assert of.reward("Paris!") == dict.fromkeys(names, 1.0)
    every = " ".join(dict(encyclopedia.entries(0)))  # answer spam: all titles at once
    assert of.reward(every)["reward"] == 0.0
    soft = ready(metric="f1")
    assert [soft.reward("Paris in France")[name] for name in names[:2]] == [pytest.approx(0.5), 0.0]
    assert soft.reward(every + " Paris")["reward"] < 0.02
    two = ready(given=task(support=["Paris", "Rome"]), corpus=[{"title": "Paris", "text": "in France"}])
    assert two.reward("x")["found"] == 0.0
    two.search("paris")
    assert two.reward("x")["found"] == 0.5


# ---- retrieval


def test_words_find_texts_best_first_and_nothing_finds_nothing() -> None:
    index = retrieval.WordIndex(["red fox", "the red red fox", "blue whale", "", "red fox"])
    assert set(index.find("red", 9)) == {0, 1, 4}
    assert index.find("fox", 9)[:2] == [0, 4]  # equal scores keep the order of the texts; the longer text follows
    assert index.find("whales", 3) == [2]
    assert index.find("the", 3) == index.find("", 3) == index.find("unheard", 3) == index.find("ß∂", 3) == []
    assert index.find("red " * 10_000, 1) == [1]
    assert [len(index.find("red", k)) for k in (1, 2, 3)] == [1, 2, 3]


def letters(texts: list[str]) -> Any:
    return numpy.array([[text.lower().count(c) for c in string.ascii_lowercase] for text in texts], dtype=float)


def test_vectors_find_by_cosine(tmp_path: Path) -> None:
    calls = []

    def embed(texts: list[str]) -> Any:
        calls.append(len(texts))
        return letters(texts)

    corpus = Corpus([f"{c}{c} {c}" for c in "abcdef"])
    for _ in range(3):  # an index is made once, however many chains there are
        of = ready(corpus, dense=embed, topk=2)
    assert calls == [6]
    assert of.search("eeee").startswith('Doc 1(Title: "") ee e\nDoc 2')
    for wrong, said in [
        (lambda texts: [1.0] * len(texts), r"returned shape \(2,\) for 2 texts; it must be \(2, d\)"),
        (lambda texts: letters(texts)[:1], r"shape \(1, 26\) for 2 texts"),
        (lambda texts: letters(texts) * numpy.nan, "NaN or infinite"),
    ]:
        errors.check(lambda: ready(dense=wrong), af.errors.SettingsError, re.compile(said))
    errors.check(
        lambda: ready(dense=tmp_path / "nowhere"),
        af.errors.SettingsError,
        re.compile(r"a function or a folder with a model, got '.*nowhere'; type: hf download"),
    )


def test_a_transformers_model_embeds_by_the_mean_of_its_states(tmp_path: Path) -> None:
    """Vectors do not depend on the other texts of a batch."""
    af.tiny.policy("calculator").save(tmp_path / "model")
    embed = retrieval.embedding(tmp_path / "model")
    texts = ["What is 1+2?", "I don't know", "What is 1+3, and what is 4*5?"]
    together, alone = embed(texts), [embed([t])[0] for t in texts]
    assert together.shape == (3, 96)
    for a, b in zip(together, alone, strict=True):
        assert numpy.allclose(a, b, atol=1e-4)
    of = ready(texts, dense=str(tmp_path / "model"), topk=1)
    assert of.search("I don't know") == 'Doc 1(Title: "") I don\'t know'


def test_a_snippet_is_the_clause_that_fits_the_query() -> None:
    article = Document("Rome", "Rome is a town. Of Rome, the river is Tiber, and the country is Italy.")
    assert snippet(article, "Rome river") == "the river is Tiber"
    assert snippet(article, "country of Rome?") == "the country is Italy"
    assert snippet(article, "Rome") == snippet(article, "Rome mayor") == article.text
    of = ready([{"title": article.title, "text": article.text}, "nothing"], brief=True, topk=1)
    assert of.search("Rome RIVER") == "the river is Tiber"


# ---- corpora and bad input


async def test_your_own_corpus_and_questions(tmp_path: Path) -> None:
    file = tmp_path / "wiki.jsonl"
    rows = [
        {"id": "0", "contents": '"Rome"\nRome lies on the Tiber.'},
        {"title": "Bonn", "text": "Bonn lies on the Rhine."},
        {"contents": "no title at all"},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    corpus = Corpus.load(file)
    assert [d.title for d in corpus.documents] == ["Rome", "Bonn", ""]
    of = ready(str(file), topk=1)
    assert of.search("Tiber") == 'Doc 1(Title: "Rome") Rome lies on the Tiber.'
    assert of.search("ocean") == "nothing found"
    errors.check(lambda: of.search(" "), af.ToolError, "the query must not be empty")
    mine = af.tasks_from([{"question": "On what does Rome lie?", "golden_answers": ["Tiber", "the river Tiber"]}])
    texts = ["<search>Rome</search>", "so <answer>The Tiber</answer>"]
    tagged = agent(
        af.ScriptedEngine(texts), chat=af.Chat(af.envs.family.small_chat().tokenizer, format="search"),
        options={"corpus": corpus, "topk": 1},
    )  # fmt: skip
    (t,) = (await tagged.rollout(mine)).trajectories
    assert (t.reward, t.stop, t.metrics["searched"]) == (1.0, "answered", 1.0)
    assert '<information>Doc 1(Title: "Rome") Rome lies on the Tiber.</information>' in "".join(
        turn.text for turn in t.turns
    )


def test_invalid_corpora_and_questions_are_named(tmp_path: Path) -> None:
    for row, error, words in (
        ('{"text": ', af.errors.TaskError, "bad.jsonl:3: not JSON"),
        (
            '{"body": "b"}',
            af.errors.SettingsError,
            "bad.jsonl:3: a document must be a string or an object with 'contents'",
        ),
    ):
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n' + row, encoding="utf-8")
        errors.check(lambda: Corpus.load(tmp_path / "bad.jsonl"), error, words)


# ---- the encyclopedia, and chains over it


def test_every_article_is_the_first_that_its_title_finds() -> None:
    corpus = Corpus.invented()
    for i, document in enumerate(corpus.documents):
        assert corpus.index().find(document.title, 1) == [i]
