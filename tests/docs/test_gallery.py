"""Make the pictures of docs/gallery.md from real rollouts and training runs of the shipped policy.

The pictures are written to build/gallery. After changing a view, copy them to docs/images/gallery. Pictures of other
objects are written to build/screenshots. `make moving-picture` records the picture of README.md.
"""

import re
from pathlib import Path
from typing import Any

import browser
import pytest
from paths import ROOT, TESTS

WHY_NOT = browser.missing()
KEPT = ROOT / "docs" / "images" / "gallery"
MADE = ROOT / "build" / "gallery"
OTHERS = ROOT / "build" / "screenshots"
SETUP = (
    f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
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
    policy,
    af.adamw(policy, lr=3e-4),
    af.collate(mixed[0], advantages=af.advantages.grpo),
    af.PPOConfig(epochs=2),
    detail=True,
)

@af.reward
def tried(trajectory, final: str | None, answer: str) -> float:
    return 1.0 if final == answer else 0.25 if trajectory.tool_calls else 0.0

import asyncio

pool = af.Pool(af.PythonSandbox, size=6, isolation="none")

async def busy():
    '''Ups and downs, then all are held and two wait.'''
    held = []
    for n in (2, 5, 3, 6, 1, 4, 2, 6):
        for lease in held[n:]:
            await lease.release()
        held = held[:n]
        held += [await pool.acquire(owner=f"calculator-train-000{i}/{i % 4}") for i in range(len(held), min(n, 5))]
        await asyncio.sleep(1.5)
    held.append(await pool.acquire(owner="a person"))
    for i, lease in enumerate(held[:5]):
        lease.turn = i % 3
    keep.extend(held + [asyncio.ensure_future(pool.acquire(owner=f"calculator-train-0007/{i}")) for i in range(2)])

keep = []

for task in tasks.train[:40]:
    chain = agent.chain(task)
    await chain.sample()
    if chain.turn.tool_calls:
        break
await chain.act()

class Desk:
    "One of the few places where the slow calculator can be used."
    async def run(self): ...
    async def reset(self): ...
    async def close(self): ...

gate, desks, calls = asyncio.Event(), af.Pool(Desk, size=3), []

def slow():
    @af.tool
    async def calculator(expression: str, desk: Desk) -> str:
        '''Evaluate an arithmetic expression.

        Args:
            expression: for example "3*(4+5)".
        '''
        calls.append(expression)
        if len(calls) > 12:
            await gate.wait()
        return str(eval(expression))
    return calculator

objects = {
    "Task": tasks.train[0], "Trajectory": called, "Rollout": rollout, "Batch": stats.batch, "Stats": stats,
    "Tool": agents.calculator, "Reward": tried, "Pool": pool, "Agent": agent, "Policy": policy,
    "Run": af.Run(runs[0].path), "training run": runs[0], "Tasks": tasks, "Group": rollout.groups[0], "chain": chain,
    "tools": agent.tools, "diff": rollout.diff(rollout),
}
"""
)
SHOTS = {
    "token_view": "ratios = w.TokenView(stats, signal='ratio', agent=agent)\nratios",
    "token_view_mask": "w.TokenView(called)",
    "pool_view": "places = w.PoolView(pool)\nworking = asyncio.ensure_future(busy())\nplaces",
    "train_view": "two = w.TrainView(*runs, names=['lr 1.5e-4', 'lr 6e-5'])\ntwo.step = 4\nawait two.open_step(4)\ntwo",
    "tool_form": (
        "form = w.ToolForm(agents.calculator, agent=agent)\nawait form.call(expression='3*(4+')\n"
        "await form.call(expression='3*(4+5)')\nform"
    ),
    "reward_form": "scores = w.RewardForm(tried, rollout)\nawait scores.score()\nscores",
    "trajectory_view": (
        "many = w.TrajectoryView(rollout, agent=agent)\nmany.select(*[t.id for t in mixed[0]][:2])\nmany"
    ),
    "rollout_view": (
        "seen = agent.replace(tools=[slow()], pools=[desks]).rollout(tasks.train[8:20], group_size=4, "
        "max_concurrency=12)\nlanes = w.RolloutView(seen)\ngoing = asyncio.ensure_future(seen._wait())\n"
        "while len(calls) < 15:\n    await asyncio.sleep(0.01)\n"
        "await asyncio.sleep(1)\nlanes.pick(seen.partial.trajectories[0])\nlanes"
    ),
    "chain_stepper": "stepper = w.ChainStepper(chain)\nstepper",
}
OBJECTS = "for name, thing in objects.items():\n    print(name)\n    display(thing)"
SIZES = {"": (1060, 2400), "-narrow": (520, 3400)}  # large enough to show all views completely


def names() -> set[str]:
    return {f"{name}{size}-{theme}.png" for name in SHOTS for size in SIZES for theme in ("light", "dark")}


def test_the_gallery_has_its_pictures() -> None:
    shown = set(re.findall(r"images/gallery/([\w.-]+)", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")))
    assert shown == names() == {path.name for path in KEPT.glob("*.png")}
    assert sum(path.stat().st_size for path in KEPT.glob("*.png")) < 2_000_000


@pytest.mark.soak
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_pictures_for_the_gallery(notebook: Any) -> None:
    from PIL import Image

    nb = notebook(SETUP, *SHOTS.values(), OBJECTS, size=SIZES[""])
    nb.without_sidebar()
    nb.run(wait=False)
    nb.finish()
    page = nb.page
    MADE.mkdir(parents=True, exist_ok=True)
    OTHERS.mkdir(parents=True, exist_ok=True)
    for old in MADE.glob("*.png"):
        old.unlink()
    page.wait_for_function("(n) => document.querySelectorAll('.afk').length >= n", arg=len(SHOTS))
    nb.wait_python("working.done()", True)
    page.locator(".afk-poolview .afk-tile").nth(1).click()
    page.locator(".afk-tokenview .afk-tokens").first.focus()
    page.keyboard.press("n")  # show the values of one token
    page.get_by_label("Order").select_option("longest")
    page.evaluate("() => document.activeElement.blur()")

    def keep(where: Any, path: Path) -> None:
        where.screenshot(path=path)
        few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
        few.save(path, optimize=True)

    for size, (width, height) in SIZES.items():
        for theme in ("Light", "Dark"):
            page.set_viewport_size({"width": width, "height": height})
            nb.theme(theme)
            page.wait_for_timeout(500)
            for name in SHOTS:
                cell = page.locator(".jp-Notebook .jp-Cell").nth(1 + list(SHOTS).index(name))
                view = cell.locator(".afk").first
                view.scroll_into_view_if_needed()
                page.mouse.move(0, 0)
                page.wait_for_timeout(150)
                keep(view, MADE / f"{name}{size}-{theme.lower()}.png")
                # The view does not overflow horizontally.
                assert view.evaluate("(x) => x.scrollWidth - x.clientWidth") <= 0, (name, size)
            shown = page.locator(".jp-Notebook .jp-Cell").nth(1 + len(SHOTS))
            page.set_viewport_size({"width": width, "height": 6000})
            shown.scroll_into_view_if_needed()
            page.wait_for_timeout(300)
            keep(shown, OTHERS / f"objects{size}-{theme.lower()}.png")
    assert names() == {path.name for path in MADE.glob("*.png")}
    nb.execute("gate.set()\nawait going")
