"""judge: signs for a market stall, judged by a rubric. A scripted judge needs no model; any engine can take its place,
as options={"judge": af.envs.judge.Judge(af.OpenAIEngine(url, model))}.

`Judge` is of use beside this family: `judge.reward()` scores any agent's answers, `judge.group_reward()` ranks those of
a group against each other, `await judge.score(task, answer)` and `await judge.rank(task, answers)` do so in a cell.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly_kit.engines.scripted import ScriptedEngine
from agentfly_kit.envs.family import Family, Move, tool_outputs
from agentfly_kit.envs.judging import Criterion, Judge, Judgement, Ranking, Rubric
from agentfly_kit.errors import SettingsError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

__all__ = ["Criterion", "Judge", "Judgement", "Ranking", "Rubric", "scripted"]

# --- a judge that keeps to its rubric ------------------------------------------------------------

_CHECKS: dict[str, Callable[[str, Any], float]] = {
    "says": lambda text, word: float(
        re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text, re.IGNORECASE) is not None
    ),
    "avoids": lambda text, word: float(str(word).lower() not in text.lower()),
    "ends": lambda text, mark: float(text.rstrip().endswith(str(mark))),
    "words": lambda text, most: min(1.0, max(0.0, 2 - len(text.split()) / most)) if text.split() else 0.0,
    "lines": lambda text, most: float(0 < len(text.strip().splitlines()) <= most),
}
"""What a criterion's field `check` may be: (text, argument) -> 0 to 1."""


def scripted(question: Task, attempt: int) -> str:
    """For `ScriptedEngine(scripted)`: applies each criterion's `check`, such as ["says", "fig"], to what is shown."""
    rows = question.fields.get("rubric")
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) and row.get("check") for row in rows):
        raise SettingsError("the scripted judge needs a rubric of rows with a field 'check', such as ['says', 'fig']")
    # As a model would, it reads only what stands between the marks.
    shown = str(question.messages[-1]["content"])
    mark = re.findall(r"the mark ([0-9a-f]{16})", str(question.messages[0]["content"]))[0]
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


# --- the environment -----------------------------------------------------------------------------


class Written:
    """One text, and who judges it.

    judge    a Judge; without one, the scripted one.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = Judge(ScriptedEngine(scripted)) if judge is None else judge
        self.drafts = 0

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
        """The judge's score, from 0 to 1, and its points by criterion. Success is full points; no answer is 0.

        Raises:  RewardError, which leaves the chain unscored, for a judge that says nothing readable.
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
    """Rows {"id", "question", "rubric"}; a question is in the split that its own text says, and in no other."""
    rng = random.Random(f"judge {split} {seed}")
    found: dict[str, list[dict[str, Any]]] = {}
    while len(found) < n:
        fruit, place, price = rng.choice(FRUITS), rng.choice(FROM), f"{rng.randint(1, 9)}.{rng.randint(10, 99)}"
        most, end, word = rng.randint(6, 12), rng.choice(ENDS), rng.choice(AVOID)
        text = (
            f"Write a sign for a market stall that sells {fruit} from {place} at {price} a kilo: one line of at most "
            f"{most} words that ends with {end} and does without the word {word}. Answer with the sign alone."
        )
        if (random.Random(f"judge split {text}").random() < 0.2) != (split == "test"):
            continue
        checks = [
            ("fruit", f"It names {fruit}.", ["says", fruit]),
            ("place", f"It names {place}.", ["says", place]),
            ("price", f"It gives the price, {price}.", ["says", price]),
            ("short", f"It has at most {most} words.", ["words", most]),
            ("line", "It is one line.", ["lines", 1]),
            ("end", f"It ends with {end}", ["ends", end]),
            ("manners", f"It does without the word {word}.", ["avoids", word]),
        ]
        found.setdefault(text, [{"name": name, "what": what, "check": check} for name, what, check in checks])
    mark = "" if seed == 0 else f"{seed}-"
    return [
        {"id": f"judge-{split}-{mark}{i:04}", "question": text, "rubric": rubric}
        for i, (text, rubric) in enumerate(found.items())
    ]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Says what the rubric asks for, and measures it first."""
    asked = {row["name"]: row["check"][1] for row in task.fields["rubric"]}
    sign = f"{asked['fruit'].capitalize()} from {asked['place']}, {asked['price']}{asked['end']}"
    return sign if tool_outputs(messages) else ("measure", {"text": sign})


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Words by luck."""
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
    what="signs for a market stall, judged by a rubric: by a script, or by any model as judge",
    environment=Written,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
