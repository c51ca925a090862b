"""Metrics for short answers: exact match and F1 after SQuAD's normalisation."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agentfly_kit.errors import SettingsError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Task fields that may contain the reference answers: one string, or a list of equally good strings.
FIELDS = ("answers", "golden_answers", "answer")


def normalised(text: str) -> str:
    """Convert to lower case, remove punctuation and articles, and collapse whitespace.

    Source: Rajpurkar et al. 2016, SQuAD, arXiv 1606.05250, and its evaluation script.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(response: str, answers: Iterable[str]) -> float:
    """Return 1 if the response equals one of the answers after normalisation, else 0."""
    response = normalised(response)
    return float(any(response == normalised(answer) for answer in answers))


def f1(response: str, answers: Iterable[str]) -> float:
    """Return the highest word-level F1 score over the answers, counting repeated words.

    If one side has no words, the score is 1 if both have none, else 0.
    """
    return max((_f1(normalised(response).split(), normalised(answer).split()) for answer in answers), default=0.0)


def _f1(response: list[str], answer: list[str]) -> float:
    if not response or not answer:
        return float(response == answer)
    common = sum((Counter(response) & Counter(answer)).values())
    return 2 * common / (len(response) + len(answer))


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
    raise SettingsError(f"it has none of the fields {', '.join(FIELDS)}; add one with the reference answer")
