"""The word problems of notebook 21: the test split shares no sentence with the train split."""

import json
import re
from importlib.resources import files

from recipes import word_problems

import agentfly_kit as af


def sentences(rows):
    names = "|".join(name for names in word_problems._PEOPLE.values() for name in names)
    masked = (
        re.sub(rf"\b({names})\b", "NAME", re.sub(r"\d+", "NUMBER", row.messages[-1]["content"])) for row in rows
    )
    return {sentence for text in masked for sentence in re.split(r"(?<=[.?])\s+", text)}


def test_the_splits_share_no_sentence_and_are_as_generated():
    tasks = af.load_tasks("word_problems")
    train, test = sentences(tasks.train), sentences(tasks.test)
    assert not train & test
    assert len(train) >= 80 and len(test) >= 25
    for split, rows in word_problems.tasks(0).items():
        lines = (
            files("agentfly_kit._data")
            .joinpath("word_problems", f"{split}.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        assert [json.loads(line) for line in lines] == rows
        assert all(int(number) <= 999 for row in rows for number in re.findall(r"\d+", row["question"]))
