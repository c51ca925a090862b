"""Scores of a short answer: exact match and F1 after SQuAD's normalisation. Knows no environment."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agentfly_kit.errors import SettingsError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FIELDS = ("answers", "golden_answers", "answer")
"""Where a task may have its right answers: one text, or a list of equally good ones."""


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single blanks.

    Source: Rajpurkar et al. 2016, SQuAD, arXiv 1606.05250, and its evaluation script.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(response: str, answers: Iterable[str]) -> float:
    """1 if it is one of the answers after normalisation, else 0."""
    response = normalised(response)
    return float(any(response == normalised(answer) for answer in answers))


def f1(response: str, answers: Iterable[str]) -> float:
    """The best over the answers of the harmonic mean of precision and recall of words; words count as often as they
    stand there. Where one side has no word at all: 1 if both have none, else 0."""
    return max((_f1(normalised(response).split(), normalised(answer).split()) for answer in answers), default=0.0)


def _f1(response: list[str], answer: list[str]) -> float:
    if not response or not answer:
        return float(response == answer)
    common = sum((Counter(response) & Counter(answer)).values())
    return 2 * common / (len(response) + len(answer))


def extract_answer(final: str | None) -> str | None:
    """What a final text answers: what its last <answer> holds, else all of it; None for no text."""
    if final is None:
        return None
    tagged = _ANSWER.findall(final)
    return (tagged[-1] if tagged else final).strip()


def answers_of(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The right answers of a task.

    Raises:  SettingsError where it has none.
    """
    for name in FIELDS:
        if name in fields:
            given = fields[name]
            found = (given,) if isinstance(given, str | int | float) else tuple(given or ())
            if found and all(isinstance(answer, str | int | float) for answer in found):
                return tuple(map(str, found))
            raise SettingsError(f"{where}: {name}={given!r}: want a text, or a list of at least one text")
    raise SettingsError(f"{where} has none of the fields {', '.join(FIELDS)}; give one to score an answer by")
