"""The pictures of docs/gallery.md: made here from real rollouts and runs of the shipped policy, to be looked at.

They are written to build/gallery; after a change of a view copy them to docs/images/gallery.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import browser
import pytest

WHY_NOT = browser.missing()
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "images" / "gallery"
MADE = ROOT / "build" / "gallery"
SETUP = (
    f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    + """
import agents
import agentfly_kit as af
from agentfly_kit import widgets as w

tasks = af.load_tasks("calculator")

def start(seed):
    policy = af.tiny.policy("calculator")
    agent = af.Agent(
        af.LocalEngine(policy), chat=policy.chat, tools=[agents.calculator], reward=agents.exact, max_turns=4, seed=seed
    )
    return policy, agent

runs = []
for seed, lr in ((0, 1.5e-4), (1, 6e-5)):
    policy, agent = start(seed)
    config = af.TrainConfig(
        steps=16, tasks_per_step=8, group_size=8, lr=lr, evaluate_every=5, save_rollouts=True, seed=seed
    )
    run = af.train(agent, policy, tasks.train, config, eval_tasks=tasks.test[:64])
    await run
    runs.append(run)

policy, agent = start(4)
rollout = await agent.rollout(tasks.train[:8], group_size=4)
mixed = [g for g in rollout.groups if len({t.reward for t in g}) > 1]
called = next(t for t in rollout.trajectories if t.tool_calls)
stats = af.ppo_step(
    policy, af.adamw(policy, lr=3e-4), af.collate(mixed[0], advantages=af.advantages.grpo), epochs=2, detail=True
)

@af.reward
def tried(trajectory, final: str | None, answer: str) -> float:
    return 1.0 if final == answer else 0.25 if trajectory.tool_calls else 0.0

pool = af.Pool(af.PythonSandbox, size=4, isolation="none")
held = [await pool.acquire(owner=f"calculator-train-000{i}/{i}") for i in range(3)]
held.append(await pool.acquire(owner="a person", hand=True))
import asyncio
waiting = [asyncio.ensure_future(pool.acquire(owner=f"calculator-train-0007/{i}")) for i in range(2)]
await asyncio.sleep(0.3)
for task in tasks.train[:40]:
    chain = agent.chain(task)
    await chain.sample()
    if chain.turn.tool_calls:
        break
await chain.act()
"""
)
SHOTS = {
    "token_view": "w.TokenView(stats, signal='ratio')",
    "token_view_mask": "w.TokenView(called)",
    "pool_view": "w.PoolView(pool)",
    "train_view": "two = w.TrainView(*runs, names=['lr 1.5e-4', 'lr 6e-5'])\ntwo.step = 4\nawait two.open_step(4)\ntwo",
    "tool_form": "form = w.ToolForm(agents.calculator)\nawait form.call(expression='3*(4+5)')\nform",
    "reward_form": "scores = w.RewardForm(tried, rollout)\nawait scores.score()\nscores",
    "trajectory_view": (
        "many = w.TrajectoryView(rollout, agent=agent)\nmany.select(*[t.id for t in mixed[0]][:2])\nmany"
    ),
    "rollout_view": (
        "seen = agent.rollout(tasks.train[8:20], group_size=4, max_concurrency=8)\nlanes = w.RolloutView(seen)\n"
        "going = asyncio.ensure_future(seen._wait())\n"
        "while sum(c.state == 'done' for c in seen.snapshot().chains) < 20:\n    await asyncio.sleep(0.01)\n"
        "seen.pause()\nlanes.pick(seen.partial.trajectories[0])\nlanes"
    ),
    "chain_stepper": "stepper = w.ChainStepper(chain)\nstepper",
}
NARROW = ("token_view", "pool_view", "train_view")


def names() -> set[str]:
    return {f"{name}-{theme}.png" for name in SHOTS for theme in ("light", "dark")} | {
        f"{name}-narrow.png" for name in NARROW
    }


def test_the_gallery_has_its_pictures() -> None:
    shown = set(re.findall(r"images/gallery/([\w.-]+)", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")))
    assert shown == names() == {path.name for path in KEPT.glob("*.png")}
    assert sum(path.stat().st_size for path in KEPT.glob("*.png")) < 2_000_000


@pytest.mark.real
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_pictures_for_the_gallery(notebook: Any) -> None:
    nb = notebook(SETUP, *SHOTS.values(), size=(1060, 2400))
    nb.command("application:toggle-left-area")
    nb.run(wait=False)
    nb.finish(240)
    page = nb.page
    MADE.mkdir(parents=True, exist_ok=True)
    page.wait_for_function("(n) => document.querySelectorAll('.afk').length >= n", arg=len(SHOTS))

    def shoot(name: str, end: str) -> None:
        cell = page.locator(".jp-Notebook .jp-Cell").nth(1 + list(SHOTS).index(name))
        view = cell.locator(".afk").first
        view.scroll_into_view_if_needed()
        page.wait_for_timeout(250)
        view.screenshot(path=MADE / f"{name}-{end}.png")

    for theme in ("Light", "Dark"):
        nb.theme(theme)
        page.wait_for_timeout(400)
        for name in SHOTS:
            shoot(name, theme.lower())
    nb.theme("Light")
    page.set_viewport_size({"width": 520, "height": 3400})  # a view that is cut is no picture
    page.wait_for_timeout(500)
    for name in NARROW:
        shoot(name, "narrow")
    assert names() == {path.name for path in MADE.glob("*.png")}
