"""reasoning_gym: the questions and verifiers of the package of that name, with a calculator.

`tasks(n, split, datasets=("chain_sum", "gcd"))` chooses among its hundred kinds; each answer is scored by the kind's
own verifier, which may give part of the point.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections.abc import Sequence
from typing import Any

from agentfly_kit.envs.calculator import Calculator
from agentfly_kit.envs.family import Family, Move
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.tasks import Tasks
from agentfly_kit.types import Message, Task

DATASETS = ("basic_arithmetic", "chain_sum", "gcd", "lcm", "letter_counting", "spell_backward")
"""What `tasks` takes where it is not told."""


def _package() -> Any:
    with warnings.catch_warnings():  # cellpylib, which it brings, compares with `is`, and Python says so the first time
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


class ReasoningGym(Calculator):
    """The calculator, and the verifier of the question's kind."""

    async def reset(self, task: Task, seed: int) -> None:
        """Raises TaskError for a task of another kind than the package has."""
        await super().reset(task, seed)
        _package()
        from reasoning_gym.factory import DATASETS as known

        name = task.fields.get("dataset")
        if not isinstance(name, str) or name not in known:
            raise TaskError(f"task {task.id!r}: its field dataset={name!r} is none of reasoning_gym's; take `tasks()`")

    def reward(  # type: ignore[override]  # what it asks for is given by name
        self, final: str | None, answer: str, dataset: str, metadata: dict[str, Any], question_text: str
    ) -> float:
        """What its verifier says, from 0 to 1; none of an answer is 0."""
        if final is None:
            return 0.0
        entry = {"question": question_text, "answer": answer, "metadata": metadata}
        return float(_package().get_score_answer_fn(dataset)(answer=final.strip(), entry=entry))


def rows(n: int, split: str, seed: int = 0, datasets: Sequence[str] = DATASETS) -> list[dict[str, Any]]:
    """Rows {"id", "messages", "question", "answer", "dataset", "metadata"}, the kinds in turn; a question is in the
    split that its own text says, and in no other."""
    package = _package()
    from reasoning_gym.factory import DATASETS as known

    for name in datasets:
        if name not in known:
            raise SettingsError(f"reasoning_gym has no dataset {name!r}; it has {', '.join(sorted(known))}")
    if not datasets:
        raise SettingsError(f"datasets=(): give at least one, such as {DATASETS}")
    size = 20 * n + 100
    sources = [iter(package.create_dataset(name, size=size, seed=seed)) for name in datasets]
    mark = "" if seed == 0 else f"{seed}-"
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(found) < n:
        name, source = datasets[len(found) % len(datasets)], sources[len(found) % len(datasets)]
        for item in source:
            question = item["question"]
            mine = (random.Random(f"reasoning_gym split {question}").random() < 0.2) == (split == "test")
            if mine and question not in seen:
                break
        else:
            raise SettingsError(f"the dataset {name!r} has too few different questions for n={n}; ask for fewer")
        seen.add(question)
        found.append(
            {
                "id": f"{name}-{split}-{mark}{len(found):04}",
                "messages": [{"role": "user", "content": question}],
                "question_text": question,
                "answer": str(item["answer"]),
                "dataset": name,
                "metadata": item["metadata"],
            }
        )
    return found


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Knows the answer."""
    return str(task.fields["answer"])


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Says any number."""
    return str(rng.randint(100, 9999))


family = Family(
    name="reasoning_gym",
    what="a hundred kinds of generated questions, each with its own verifier",
    environment=ReasoningGym,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
    max_tokens=256,
    licence="Apache-2.0",
    needs=("reasoning_gym",),
    install='pip install "agentfly_kit[envs]"',
    splits={"train": 256, "test": 64},
)
agent, expert, random_agent = family.agent, family.expert, family.random_agent


def tasks(
    n: int | None = None, split: str | None = None, *, seed: int = 0, datasets: Sequence[str] = DATASETS
) -> Tasks:
    """`n` tasks of a split from these datasets in turn; without a split, both."""

    chosen = dataclasses.replace(family, rows=functools.partial(rows, datasets=tuple(datasets)))
    return chosen.tasks(n, split, seed=seed)
