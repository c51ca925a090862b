"""Metrics for short answers: exact match, and word-level F1, precision and recall, after SQuAD's normalisation."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentfly_kit.errors import SettingsError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Task fields that may contain the reference answers: one string, or a list of equally valid strings.
FIELDS = ("answers", "golden_answers", "answer")


def normalised(text: str) -> str:
    """Convert a text to lower case, remove punctuation and articles, and collapse whitespace.

    Source: Rajpurkar et al. 2016, SQuAD, arXiv 1606.05250, and its evaluation script.
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(response: str, answers: Iterable[str]) -> float:
    """Return 1 if the response equals one of the answers after normalisation, else 0."""
    response = normalised(response)
    return float(any(response == normalised(answer) for answer in answers))


def f1(response: str, answers: Iterable[str]) -> float:
    """Return the highest word-level F1 score over the answers, counting repeated words.

    If neither the response nor the answer has words, F1, precision and recall are 1. If only one has words, all three
    are 0.
    """
    return _best(response, answers, lambda common, words, expected: 2 * common / (words + expected))


def precision(response: str, answers: Iterable[str]) -> float:
    """Return the highest fraction of the response's words that occur in an answer, counting repeated words."""
    return _best(response, answers, lambda common, words, expected: common / words)


def recall(response: str, answers: Iterable[str]) -> float:
    """Return the highest fraction of an answer's words that occur in the response, counting repeated words.

    A response that contains all words has recall 1, so recall as the only reward leads to long answers.
    """
    return _best(response, answers, lambda common, words, expected: common / expected)


def _best(response: str, answers: Iterable[str], score: Callable[[int, int, int], float]) -> float:
    """Return the maximum of `score(n_common_words, n_response_words, n_answer_words)` over the answers."""
    words = normalised(response).split()
    scores = []
    for answer in answers:
        expected = normalised(answer).split()
        if words and expected:
            common = sum((Counter(words) & Counter(expected)).values())
            scores.append(score(common, len(words), len(expected)))
        else:
            scores.append(float(words == expected))
    return max(scores, default=0.0)


def extract_answer(final: str | None) -> str | None:
    """Return the content of the last <answer> tag, or the whole text if there is no tag; None if `final` is None."""
    if final is None:
        return None
    for part in reversed(final.split("</answer>")[:-1]):  # a regular expression would take quadratic time
        _, tag, inside = part.partition("<answer>")
        if tag:
            return inside.strip()
    return final.strip()


def answers_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reference answers of a task, or raise SettingsError if it has none."""
    for name in FIELDS:
        if name in fields:
            given = fields[name]
            found = given if isinstance(given, list | tuple) else (given,)
            if found and all(isinstance(answer, str | int | float) for answer in found):
                return tuple(map(str, found))
            raise SettingsError(f"{name} must be a string, or a non-empty list of strings, got {given!r}")
    raise SettingsError(f"the task has none of the fields {', '.join(FIELDS)}; add one with the reference answer")
