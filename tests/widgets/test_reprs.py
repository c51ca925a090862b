"""Notebook display of all public objects: a stable repr, and HTML in which all text is escaped."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agents
import pytest
from views import NASTY, Page, started

import agentfly_kit as af
from agentfly_kit.integrations import html as _html

TAGS = {"div", "p", "b", "code", "pre", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "span"}
BOLD = "<script>alert('x')</script><b onclick=x>"


def page(thing: Any) -> Page:
    """Parse the HTML of an object after checking its size, tags and colours, and that its repr contains no address."""
    assert not re.search(r"0x[0-9a-f]{6,}", repr(thing)), repr(thing)
    text = thing._repr_html_()
    assert len(text.encode("utf-8")) < 100_000
    assert not re.search(r"0x[0-9a-f]{6,}", text), text
    found = Page(text)
    assert found.tags <= TAGS, found.tags - TAGS
    assert found.attributes <= {"style", "title", "open"}
    # Opaque colours would be unreadable in one of the two themes.
    for colour in re.findall(r"(?:color|background(?:-color)?):\s*(#[0-9a-f]+|rgba?\([^)]*\))", text):
        assert len(colour) in (5, 9) or colour.startswith("rgba"), colour
    return found


async def test_agents_tools_and_handles() -> None:
    agent = agents.agent(engine=agents.Played([agents.call(), "42"]), chat=agents.chat(), system=BOLD)
    for thing, words in (
        (agent, ["calculator", "max_turns"]),
        (agents.calculator, ["Evaluate an arithmetic expression.", "expression"]),
        (agent.tools, ["calculator"]),
        (agents.exact, ["of the task"]),
        (agent.reward, ["exact"]),
        (agents.shipped(), ["parameters"]),
    ):
        text = page(thing).text
        assert all(word in text for word in words), text
    run = agent.rollout(agents.tasks(2), group_size=2)
    assert "queued" in page(run).text
    rollout = await run
    assert "done" in page(run).text
    for shown in (rollout, rollout.groups[0], agent.chain(agents.tasks()[0])):
        page(shown)
    async with af.Pool(agents.Box, size=2) as pool, pool.lease(owner=BOLD):
        assert "leased" in page(pool).text


async def test_a_training_run_shows_its_last_steps(tmp_path: Path) -> None:
    run = started(tmp_path / "run", 2)
    assert "no steps yet" in page(run).text
    await run
    assert "seconds" in page(run).text
    page(af.Run(tmp_path / "run"))


def test_drop_reasons_are_escaped_and_stats_are_short() -> None:
    chains = [agents.trajectory(None, [[("task", 1), ("policy", 1)]], name=f"t/{i}", reward=0.5) for i in range(2)]
    batch = af.collate(chains, filters=[lambda trajectory: BOLD if trajectory.chain else None])
    assert batch.dropped and "left out" in page(batch).text
    assert BOLD in page(batch).text
    shown = page(af.Stats(0.1, 0.2, math.nan, 0.0, 1.5, 0.5)).text
    assert "grad_norm" in shown and "nan" not in shown
    assert "–" in _html.table(("a",), [[math.nan]]), "missing is a dash"


ANYTHING = "".join(text for text in NASTY if len(text) < 100) + BOLD + "z" * 100_000


def any_policy() -> af.Policy:
    policy = agents.random_policy()
    policy.model.__class__ = type(BOLD + "\u202e" + "x" * 50_000, (type(policy.model),), {})
    policy.chat.tokenizer.name_or_path = ANYTHING
    return policy


def any_run(folder: Path, **numbers: Any) -> af.Run:
    folder = folder / f"{BOLD.replace('/', '')}\u202e{'x' * 150}"
    folder.mkdir()
    (folder / "steps.jsonl").write_text(json.dumps({"step": 1, **numbers}) + "\n")
    return af.Run(folder)


@pytest.mark.parametrize(
    "of",
    [
        lambda folder: af.Stats(
            0.1, 0.2, math.nan, math.inf, -1.5, 0.5, dropped={ANYTHING: 3}, phases={ANYTHING: 0.1}
        ),
        lambda folder: any_policy(),
        lambda folder: any_run(folder, success=0.5, **{ANYTHING: 1.0}),
        lambda folder: any_run(folder, success=ANYTHING, reward=[ANYTHING], entropy={ANYTHING: 1}),
        lambda folder: any_run(folder, success=None, reward=math.nan, turns=1e300, seconds=10**40),
    ],
    ids=["stats", "policy", "run", "texts for numbers", "no numbers"],
)
def test_numbers_and_names_may_be_anything(of: Callable[[Path], Any], tmp_path: Path) -> None:
    found = page(of(tmp_path))
    assert all(c.isprintable() or c in "\n\t" for c in found.text)
    assert len(found.text) < 5_000


async def test_a_diff_shows_which_chains_changed_and_where() -> None:
    tasks = agents.tasks(3)
    answers = {task.id: task.fields["answer"] for task in tasks}
    before = await agents.played(["0"]).rollout(tasks)
    after = await agents.played(lambda task, turn: [answers[task.id], "0", "0"][tasks.index(task)]).rollout(tasks)
    diff = before.diff(after)
    assert len(diff.gained) == 1
    text = page(diff).text
    assert all(words in text for words in (tasks[0].id, "turn 1", answers[tasks[0].id]))
    assert {row.count("<td") for row in diff._repr_html_().split("<tr>")[1:]} == {2}, (
        "texts beside each other are narrow"
    )
    assert tasks[1].id not in text
    assert "no chain changed its outcome" in page(before.diff(before)).text
    assert "Reward 0" in before.trajectories[0].explain()
    assert repr(answers[tasks[0].id]) in before.trajectories[0].explain()  # the expected answer
