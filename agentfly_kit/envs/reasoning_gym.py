"""reasoning_gym: questions and verifiers of the reasoning_gym package, with a calculator tool.

`tasks(n, split, datasets=("chain_sum", "gcd"))` selects from more than one hundred datasets. Each answer is scored by
the dataset's own verifier, which may give partial credit.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

from agentfly_kit.envs.calculator import Calculator
from agentfly_kit.envs.family import Family, Move, hash_split, row_id
from agentfly_kit.envs.verifier import Verifier
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.tools.context import Context
from agentfly_kit.types import Message, Task

# Default datasets of `tasks`.
DATASETS = ("basic_arithmetic", "chain_sum", "gcd", "lcm", "letter_counting", "spell_backward")


def _package() -> Any:
    # Python warns that the dependency cellpylib compares literals with `is`.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


_LONGEST = 20_000
_VERIFY = """
import reasoning_gym
dataset, answer, entry = data
score = reasoning_gym.get_score_answer_fn(dataset)(answer=answer, entry=entry)
"""


class ReasoningVerifier(Verifier):
    """Sandbox for the verifiers of reasoning_gym, some of which evaluate the answer as Python code."""

    module = "reasoning_gym"


class ReasoningGym(Calculator):
    """Environment with a calculator tool, in which the verifier of the question's dataset scores the answer."""

    reward_sandboxes = (ReasoningVerifier,)

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the dataset does not exist or another field has the wrong type."""
        _package()
        from reasoning_gym.factory import DATASETS as known

        for name, kind in {"dataset": str, "answer": str, "question_text": str, "metadata": dict}.items():
            if not isinstance(task.fields.get(name), kind):
                raise TaskError(f"field {name!r} must be a {kind.__name__}, got {task.fields.get(name)!r:.100}")
        if task.fields.get("dataset") not in known:
            raise TaskError(f"reasoning_gym has no dataset {task.fields.get('dataset')!r}")

    async def reward(  # type: ignore[override]  # parameters are filled by name
        self,
        final: str | None,
        answer: str,
        dataset: str,
        metadata: dict[str, Any],
        question_text: str,
        context: Context,
    ) -> float:
        """Return the verifier's score for the final text, from 0 to 1. A missing or very long answer scores 0."""
        if final is None or len(final) > _LONGEST:
            return 0.0
        entry = {"question": question_text, "answer": answer, "metadata": metadata}
        verifier = await context.sandbox(ReasoningVerifier)
        return min(1.0, max(0.0, await verifier.score(_VERIFY, (dataset, final.strip(), entry))))


def rows(n: int, split: str, seed: int = 0, datasets: Sequence[str] = DATASETS) -> list[dict[str, Any]]:
    """Generate rows {"id", "messages", "question_text", "answer", "dataset", "metadata"} from each dataset in turn.

    The text of a question determines its split, so the splits are disjoint.
    """
    package = _package()
    from reasoning_gym.factory import DATASETS as known

    for name in datasets:
        if name not in known:
            raise SettingsError(f"reasoning_gym has no dataset {name!r}; it has {', '.join(sorted(known))}")
    sources = [iter(package.create_dataset(name, size=20 * n + 100, seed=seed)) for name in datasets]
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(found) < n:
        name, source = datasets[len(found) % len(datasets)], sources[len(found) % len(datasets)]
        for item in source:
            question = item["question"]
            if hash_split(f"reasoning_gym split {question}") == split and question not in seen:
                break
        else:
            return found  # a dataset has no further questions
        seen.add(question)
        found.append(
            {
                "id": row_id(name, split, seed, len(found)),
                "messages": [{"role": "user", "content": question}],
                "question_text": question,
                "answer": str(item["answer"]),
                "dataset": name,
                "metadata": item["metadata"],
            }
        )
    return found


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Answer with the reference answer."""
    return str(task.fields["answer"])


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Answer with a random number."""
    return str(rng.randint(100, 9999))


family = Family(
    name="reasoning_gym",
    what="generated questions from a hundred datasets, each with its own verifier",
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
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
