"""`Evidence`, the facts that the checks of `diagnose` need, and functions that compare texts and numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.batch import Batch
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task, ToolResult, Turn, grouped, images_of, text_of

# Result of a check: sentence, number and effect of the finding, or None if there is nothing to report.
Result: TypeAlias = tuple[str, float, float] | None
# Difference between the logprobs of engine and policy, in nats, above which both cannot have the same weights.
OTHER_MODEL = 5.0
# Upper bound of the token ids of models with a small vocabulary, such as the shipped policies.
_SMALL_VOCABULARY = 5000
# A word of at least three letters.
_WORD = re.compile(r"[^\W\d_]{3,}")
# Names of task fields that usually contain the reference answer.
_ANSWERS = ("answer", "answers", "gold", "solution", "target", "expected", "ground_truth", "label")


@dataclass(frozen=True)
class Evidence:
    """Arguments of `diagnose`, with facts about the chains as cached properties.

    Attributes:
        rollout: The rollout, which may be empty.
        batch: The batch collated from the rollout, if known.
        stats: The statistics of the update, if known.
        numbers: The scalar statistics of the update, from `stats` or else from the last record.
        records: The records of all steps so far, oldest first.
    """

    rollout: Rollout
    batch: Batch | None
    stats: Stats | None
    numbers: Mapping[str, float]
    records: tuple[Mapping[str, float], ...]

    @property
    def chains(self) -> tuple[Trajectory, ...]:
        return self.rollout.trajectories

    @cached_property
    def scored(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.chains if t.reward is not None)

    @cached_property
    def rewards(self) -> npt.NDArray[np.float64]:
        return np.array([t.reward for t in self.scored], dtype=float)

    @cached_property
    def groups(self) -> tuple[tuple[Trajectory, ...], ...]:
        """Scored chains of each group. Groups with fewer than two such chains are left out.

        Chains whose tokens are known and not sampled, such as those of a scripted player, are left out, too.
        """
        kept = [t for t in self.scored if not t.exact or any(turn.sampled for turn in t.turns)]
        return tuple(tuple(group) for group in grouped(kept, lambda t: t.group).values() if len(group) > 1)

    @cached_property
    def flat_groups(self) -> tuple[tuple[Trajectory, ...], ...]:
        """Groups whose chains have the same reward but do not all succeed."""
        equal = (group for group in self.groups if len({t.reward for t in group}) == 1)
        return tuple(group for group in equal if not all(t.success for t in group))

    @cached_property
    def actions(self) -> tuple[Turn, ...]:
        return tuple(turn for t in self.chains for turn in t.actions)

    @cached_property
    def results(self) -> tuple[ToolResult, ...]:
        """Results of tool calls that could be parsed and that name an existing tool."""
        calls = ((tool_names(t), call) for t in self.chains for call in t.tool_calls if call.error is None)
        return tuple(call.result for known, call in calls if call.result is not None and call.name in known)

    @cached_property
    def uncertainty(self) -> float:
        """Mean entropy of the sampled tokens, or mean -logprob if no entropies are recorded; NaN without tokens."""
        sampled = (turn for turn in self.actions if turn.sampled)
        values = [v for turn in sampled for v in (turn.entropies or [-x for x in turn.logprobs or ()])]
        return float(np.mean(values)) if values else math.nan

    @cached_property
    def components(self) -> dict[str, tuple[float, ...]]:
        """Values of metrics, except success and reward, that all scored chains have; empty with fewer than 8 chains."""
        names = set.intersection(*(set(t.metrics) for t in self.scored)) if len(self.scored) >= 8 else set()
        return {name: tuple(t.metrics[name] for t in self.scored) for name in sorted(names - {"success", "reward"})}

    @cached_property
    def right(self) -> npt.NDArray[np.bool_]:
        """Mask of scored chains that are right: the answer contains the reference or, if unknown, the chain succeeds.

        If no answer contains its reference, the field is assumed to contain something else, such as a query.
        """
        stated = {t.id for t, final, answer in self.answered if states(final, answer)}
        known = self.references if stated else {}
        return np.array([t.id in stated if t.task.id in known else bool(t.success) for t in self.scored])

    @cached_property
    def references(self) -> dict[str, str]:
        """Reference answers keyed by task id, for tasks with a known reference."""
        return {t.task.id: answer for t in self.chains if (answer := reference(t.task))}

    @cached_property
    def answered(self) -> tuple[tuple[Trajectory, str, str], ...]:
        """Chains that answered a task with a known reference, as (chain, answer, reference)."""
        known = self.references
        return tuple((t, t.final, known[t.task.id]) for t in self.chains if t.final and t.task.id in known)

    @cached_property
    def starts(self) -> dict[str, set[tuple[str, ...]]]:
        """Texts and images before the first action of any author, keyed by task id."""
        out: dict[str, set[tuple[str, ...]]] = {}
        for t in self.chains:
            turns = itertools.takewhile(lambda turn: not turn.completes_action, t.turns)
            messages = [m for turn in turns for m in turn.messages]
            out.setdefault(t.task.id, set()).add((*map(repr, images_of(messages)), *map(text_of, messages)))
        return out

    @cached_property
    def prompt_words(self) -> tuple[tuple[str, bool], ...]:
        """Words of all tasks' messages, each with True if it is split into letters, which a small model cannot read.

        Empty for models with a large vocabulary.
        """
        if any(id >= _SMALL_VOCABULARY for t in self.chains for turn in t.turns for id in turn.ids or ()):
            return ()
        prompts = {t.task.id: t for t in self.chains if t.turns}
        return tuple(itertools.chain.from_iterable(map(_split_words, prompts.values())))

    @cached_property
    def first_results(self) -> dict[tuple[str, tuple[str, ...]], set[str]]:
        """Results of the first three tool calls of each chain, keyed by task id and all calls up to this one."""
        out: dict[tuple[str, tuple[str, ...]], set[str]] = {}
        for t in self.chains:
            calls: tuple[str, ...] = ()
            for call in t.tool_calls[:3]:
                calls = (*calls, f"{call.name} {sorted(call.arguments.items())}")
                if call.error is None and call.result is not None and call.result.error is None:
                    key = t.task.id, calls
                    out.setdefault(key, set()).add(
                        "\n".join([call.result.observation, *map(repr, call.result.images)])
                    )
        return out

    @cached_property
    def foreign(self) -> int:
        """Number of chains with token ids outside the vocabulary of the chat or the engine."""
        return sum(
            # A chat shows an unknown id as "[id]", and an engine rejects a prompt that contains one.
            any(
                text == f"[{i}]" for x in t.actions for i, text in zip(x.ids or (), x.token_texts or (), strict=False)
            )
            or (t.error is not None and t.error.where == "engine" and "exceed the vocabulary" in t.error.message)
            for t in self.chains
        )

    def within_groups(self, values: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Subtract from the value of each scored chain the mean of its group."""
        return centered(values, [t.group for t in self.scored])


def tool_names(t: Trajectory) -> set[str]:
    """Return the names of the tools shown to the model or, if these are not recorded, of the called tools."""
    return {schema["function"]["name"] for schema in t.tools} or {call.name for call in t.tool_calls}


def reference(task: Task) -> str | None:
    """Return the reference answer of a task, or None if no field is known to contain one."""
    values = (task.fields.get(name) for name in _ANSWERS)
    return next((str(v).strip() or None for v in values if isinstance(v, str | int | float)), None)


def is_numeric_answer(final: str, task: Task) -> bool:
    """Return True if the reference answer is a number instead of a text, and the final answer is this number."""
    value = next((task.fields[name] for name in _ANSWERS if task.fields.get(name) is not None), None)
    try:
        return isinstance(value, int | float) and Fraction(final.strip()) == Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return False


def _split_words(t: Trajectory) -> Iterator[tuple[str, bool]]:
    """Yield each word of a task's messages, with True if its tokens have fewer than two letters on average."""
    words = {word for m in t.task.messages for word in _WORD.findall(text_of(m))}
    tokens = t.turns[0].token_texts or ()
    ends = set(itertools.accumulate(map(len, tokens)))
    for found in _WORD.finditer("".join(tokens)):
        if (word := found.group()) in words:
            yield word, 1 + len(ends.intersection(range(found.start() + 1, found.end()))) > len(word) / 2


def most_common(texts: Sequence[str]) -> str:
    text = " ".join(Counter(texts).most_common(1)[0][0].split())
    return repr(text if len(text) <= 100 else text[:97] + "...")


def contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?!\w|\.\d)", text) is not None


def states(final: str | None, answer: str) -> bool:
    """Return True if a final answer contains the reference or is the same number."""
    final, answer = (re.sub(r"(?<=\d),(?=\d{3})", "", text or "").casefold().strip() for text in (final, answer))
    try:
        return Fraction(final) == Fraction(answer)
    except (ValueError, ZeroDivisionError):
        return contains(final, answer)


def unrelated(final: str, answer: str) -> bool:
    """Return True if a final answer does not state the reference and has no word in common with it."""
    words = [set(re.findall(r"\w+", text.casefold())) for text in (final, answer)]
    return not states(final, answer) and words[0].isdisjoint(words[1])


def centered(values: Sequence[Any] | npt.NDArray[Any], keys: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Subtract the mean of the values with the same key from each value."""
    out = np.array(values, dtype=float)
    for indices in grouped(range(len(keys)), keys.__getitem__).values():
        out[indices] -= out[indices].mean()
    return out


def correlation(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    """Return the correlation coefficient, or 0 if a variance is 0."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) and min(x.var(), y.var()) > 1e-12 else 0.0
