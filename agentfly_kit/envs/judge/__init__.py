"""judge: write signs for a market stall, graded by a judge with a rubric.

The default judge is scripted and needs no model. To judge with a model, pass
options={"judge": af.envs.judge.Judge(af.OpenAIEngine(url, model))}.

`Judge` is also useful outside this family: `judge.reward()` scores the answers of any agent, and `judge.group_reward()`
ranks the answers of a group against each other. To score or rank texts without an agent, use
`await judge.score(task, answer)` and `await judge.rank(task, answers)`.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly_kit.engines.scripted import ScriptedEngine
from agentfly_kit.envs.family import Family, Move, hash_split, row_id, tool_outputs
from agentfly_kit.envs.judge.judging import Criterion, Judge, Judgement, Ranking, Rubric
from agentfly_kit.errors import SettingsError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, text_of

__all__ = ["Criterion", "Judge", "Judgement", "Ranking", "Rubric", "scripted"]

# --- scripted judge ------------------------------------------------------------------------------

# Maps the name of a check to a function that takes a text and an argument and returns a score from 0 to 1.
_CHECKS: dict[str, Callable[[str, Any], float]] = {
    "says": lambda text, word: float(
        re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text, re.IGNORECASE) is not None
    ),
    "avoids": lambda text, word: float(str(word).lower() not in text.lower()),
    "ends": lambda text, mark: float(text.rstrip().endswith(str(mark))),
    "words": lambda text, most: min(1.0, max(0.0, 2 - len(text.split()) / most)) if text.split() else 0.0,
    "lines": lambda text, most: float(0 < len(text.strip().splitlines()) <= most),
}


def scripted(question: Task, attempt: int) -> str:
    """Return the output of a judge that applies each criterion's `check`, such as ["says", "fig"], without a model.

    Use this function as an engine with `ScriptedEngine(scripted)`.

    Raises:  SettingsError for a rubric without checks.
    """
    rows = _checked(question)
    # Extract the answers from the prompt, where they are enclosed in delimiters.
    shown = text_of(question.messages[-1])
    mark = re.findall(r"the mark ([0-9a-f]{16})", text_of(question.messages[0]))[0]
    parts = [html.unescape(part.strip("\n")) for part in shown.split(mark)[1::2]][1:]

    def points(text: str) -> dict[str, float]:
        return {row["name"]: round(10 * _CHECKS[row["check"][0]](text, row["check"][1]), 2) for row in rows}

    if "<scores>" in shown:
        return f"<scores>{json.dumps(points(parts[0]))}</scores>"
    totals = [sum(points(part).values()) for part in parts]
    if "<better>" in shown:
        return f"<better>{'tie' if totals[0] == totals[1] else 1 + totals.index(max(totals))}</better>"
    order = sorted(range(len(totals)), key=lambda i: -totals[i])
    return f"<order>{', '.join(str(i + 1) for i in order)}</order>"


def _checked(task: Task) -> Sequence[Mapping[str, Any]]:
    """Return the rubric of a task, or raise SettingsError if a criterion has no check."""
    rows = task.fields.get("rubric")
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Mapping) and _is_check(row.get("check")) for row in rows
    ):
        raise SettingsError(
            "the scripted judge needs a rubric whose rows have a field 'check', such as ['says', 'fig']; the checks "
            f"are {', '.join(_CHECKS)}"
        )
    return rows


def _is_check(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and given[0] in _CHECKS


# --- the environment -----------------------------------------------------------------------------


class Written:
    """Environment in which an agent writes one text and a judge scores it.

    Args:
        judge: the `Judge` that scores the text; by default a scripted one, which needs no model.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = Judge(ScriptedEngine(scripted)) if judge is None else judge
        self._scripted = judge is None
        self.drafts = 0

    def check_task(self, task: Task) -> None:
        """Raise SettingsError if the task's rubric is missing or invalid."""
        self._judge.rubric_of(task)
        if self._scripted:
            _checked(task)

    async def reset(self, task: Task, seed: int) -> None:
        self.drafts = 0

    @tool
    async def measure(self, text: str) -> str:
        """Count the words and the lines of a draft.

        Args:
            text: the draft.
        """
        self.drafts += 1
        return f"{len(text.split())} words, {len(text.strip().splitlines())} lines"

    async def reward(self, final: str | None, trajectory: Any) -> dict[str, float]:
        """Return the judge's score (0 for a missing answer), the points per criterion, and whether the score is 1.

        Raises:  RewardError, which leaves the chain unscored, if the judge's output cannot be parsed.
        """
        found = await self._judge.scored(trajectory.task, final)
        return {**found, "success": float(found["reward"] >= 1), "drafts": float(self.drafts)}

    async def fork(self, into: Written) -> None:
        into.drafts = self.drafts


# --- tasks ---------------------------------------------------------------------------------------

FRUITS = tuple("apples cherries dates figs grapes kiwis lemons limes melons olives pears plums quinces".split())  # noqa: SIM905
FROM = tuple("Avola Bergen Calais Delft Evora Faro Genoa Huelva Izola Jaffa Kotor Lucca".split())  # noqa: SIM905
ENDS = ("!", ".", "?")
AVOID = ("cheap", "best", "fresh", "sweet")


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "rubric"}. The text of a question determines its split."""
    rng = random.Random(f"judge {split} {seed}")
    found: dict[str, list[dict[str, Any]]] = {}
    while len(found) < n:
        fruit, place, price = rng.choice(FRUITS), rng.choice(FROM), f"{rng.randint(1, 9)}.{rng.randint(10, 99)}"
        most, end, word = rng.randint(6, 12), rng.choice(ENDS), rng.choice(AVOID)
        text = (
            f"Write a sign for a market stall that sells {fruit} from {place} at {price} a kilo: one line of at most "
            f"{most} words that ends with {end} and does without the word {word}. Answer with the sign alone."
        )
        if hash_split(f"judge split {text}") != split:
            continue
        checks = [
            ("fruit", f"It names {fruit}.", ["says", fruit]),
            ("place", f"It names {place}.", ["says", place]),
            ("price", f"It gives the price, {price}.", ["says", price]),
            ("short", f"It has at most {most} words.", ["words", most]),
            ("line", "It is one line.", ["lines", 1]),
            ("end", f"It ends with {end}", ["ends", end]),
            ("manners", f"It does not contain the word {word}.", ["avoids", word]),
        ]
        found.setdefault(text, [{"name": name, "what": what, "check": check} for name, what, check in checks])
    return [
        {"id": row_id("judge", split, seed, i), "question": text, "rubric": rubric}
        for i, (text, rubric) in enumerate(found.items())
    ]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Call the tool `measure` with a text that meets the rubric, then answer with this text."""
    asked = {row["name"]: row["check"][1] for row in task.fields["rubric"]}
    sign = f"{asked['fruit'].capitalize()} from {asked['place']}, {asked['price']}{asked['end']}"
    return sign if tool_outputs(messages) else ("measure", {"text": sign})


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Call the tool `measure` with random words, or answer with them."""
    words = [
        *rng.choices(FRUITS, k=2),
        rng.choice(FROM),
        f"{rng.randint(1, 9)}.{rng.randint(10, 99)}",
        rng.choice(AVOID),
    ]
    text = " ".join(rng.sample(words, rng.randint(2, 5))) + rng.choice(ENDS)
    return ("measure", {"text": text}) if rng.random() < 0.3 else text


family = Family(
    name="judge",
    what="signs for a market stall, graded with a rubric by a scripted judge or by any model",
    environment=Written,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
