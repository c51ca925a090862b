"""RolloutView without a browser: states of the chains, update rate, and buttons."""

import asyncio
import gc
import json
import time
from typing import Any

import agents
import numpy as np
import pytest
from agentfly_kit.widgets.rollout_view import RESULTS, _rate
from views import check_static, click, gated, leaves, press, sent, show, started, unpack
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w


def states(view: Any) -> list[str]:
    """Return the states of the chains, with the result in place of the state "done"."""
    return [RESULTS[i] for i in np.frombuffer(view._buffers["state"], np.uint8)]


async def test_a_snapshot_says_what_every_chain_does() -> None:
    gate = asyncio.Event()

    @af.tool
    async def wait(sandbox: agents.Box) -> str:
        """Wait."""
        await gate.wait()
        return "done"

    call = agents.call(name="wait").replace('"expression":"1+1"', "")
    async with af.Pool(agents.Box, size=1) as pool:
        run = agents.played([call, "42"], tools=[wait], pools=[pool]).rollout(agents.tasks(3), max_concurrency=2)
        before = run.snapshot()
        assert (before.state, before.seconds, before.count("queued")) == ("not started", 0.0, 3)
        view = w.RolloutView(run)
        assert "not started" in repr(view)
        task = asyncio.ensure_future(run._wait())
        await until(lambda: [c.state for c in run.snapshot().chains] == ["tool", "sandbox", "queued"])
        now = run.snapshot()
        assert (now.state, now.chains[0].detail, now.chains[0].turn) == ("running", "wait", 1)
        assert 0 <= now.chains[0].since <= now.seconds
        await until(lambda: states(view) == ["tool", "sandbox", "queued"])
        run.pause()
        assert run.snapshot().state == "paused"
        run.resume()
        gate.set()
        rollout = await task
        last = run.snapshot()
        assert [last.state, *(c.state for c in last.chains)] == ["done"] * 4
        assert [c.reward for c in last.chains] == [t.reward for t in rollout]
        assert last.chains[0].detail == "answered"
        await until(lambda: view._about["state"] == "done")
        assert view._about["left"] is None


async def test_calls_side_by_side_are_in_a_tool_until_the_last_ends() -> None:
    gate, ended = asyncio.Event(), asyncio.Event()

    @af.tool
    async def slow() -> str:
        """Slow."""
        await gate.wait()
        return "s"

    @af.tool
    async def quick() -> str:
        """Quick."""
        ended.set()
        return "q"

    both = "".join(agents.call(name=n).replace('"expression":"1+1"', "") for n in ("slow", "quick"))
    run = agents.played([both, "42"], tools=[slow, quick]).rollout(agents.tasks(1))
    task = asyncio.ensure_future(run._wait())
    await ended.wait()
    await asyncio.sleep(0.05)
    assert (run.snapshot().chains[0].state, run.snapshot().chains[0].detail) == ("tool", "slow, quick")
    gate.set()
    await task


async def test_the_buttons_pause_resume_and_stop() -> None:
    agent = gated([agents.call(), "42"], 10)
    engine = agent.engine
    run = agent.rollout(agents.tasks(1), group_size=200, max_concurrency=4)
    view = w.RolloutView(run)
    show(view)
    task = asyncio.ensure_future(run._wait())
    await until(lambda: view.counts["done"] > 1 and run.snapshot().count("sampling") == 4 and len(engine.given) == 10)
    click(view, "pause")
    await until(lambda: view._about["state"] == "paused")
    engine.gate.set()
    await until(lambda: run.snapshot().count("waiting") == 4)
    asked = len(engine.given)
    await asyncio.sleep(0.1)
    assert len(engine.given) == asked and run.snapshot().state == "paused" and "paused" in repr(run)
    engine.free, done = asked + 10, run.snapshot().count("done")
    engine.gate.clear()
    click(view, "resume")
    await until(lambda: view.counts["done"] > done)
    assert view._about["rate"] is not None
    await press(view, "stop")
    engine.gate.set()
    rollout = await task
    assert 0 < len(rollout) < 200
    await until(lambda: view._about["state"] == "stopped")
    assert view.counts["done"] == len(rollout) and view.counts["queued"] > 0 and view._notice == ""


async def test_1024_chains_stay_within_the_budget_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly_kit.widgets.rollout_view._WINDOW", 0.2)  # seconds over which the rate is measured
    run = agents.played([agents.call(), "42"]).rollout(agents.tasks(16), group_size=64, max_concurrency=256)
    view = w.RolloutView(run)
    show(view)
    began, before = time.monotonic(), view.updates
    rollout = await run
    seconds = time.monotonic() - began
    await until(lambda: view._about["state"] == "done")
    assert len(rollout) == view.counts["done"] == 1024
    assert (view.updates - before) / seconds <= 10 + 2 / seconds
    state = sent(view)
    assert sum(map(len, leaves(state["_buffers"]))) < 20_000
    assert len(json.dumps(state["_about"])) < 2000
    np.testing.assert_allclose(unpack(view._buffers["reward"]), [t.reward for t in rollout])
    check_static(view)


@pytest.mark.parametrize(
    ("a_second", "said"),
    [
        (50.9231, "50.9 chains a second"), (12345.6, "12,300 chains a second"), (1.0, "1 chain a second"),
        (0.99999, "1 chain a second"), (0.09321, "5.59 chains a minute"), (1 / 60, "1 chain a minute"),
        (0.001, "3.6 chains a hour"), (1e-6, "0.0036 chains a hour"),
    ],
)  # fmt: skip
def test_a_rate_has_the_digits_that_people_read(a_second: float, said: str) -> None:
    assert _rate(a_second) == said.replace("a hour", "an hour")


async def test_a_run_that_is_gone() -> None:
    run = agents.scripted(["42"]).rollout(agents.tasks(1))
    view = w.RolloutView(run)
    gc.disable()  # the view must not be part of a reference cycle with the run
    try:
        del run
        await until(lambda: view._about["gone"] is True)
    finally:
        gc.enable()
    click(view, "pause")
    await until(lambda: "the run no longer exists" in view._notice)


async def test_a_view_that_is_closed_in_the_middle_leaves_the_run_alone() -> None:
    run = agents.scripted([agents.call(), "42"], latency=0.01).rollout(
        agents.tasks(1), group_size=40, max_concurrency=4
    )
    views = [w.RolloutView(run), w.RolloutView(run)]
    for view in views:
        show(view)
    task = asyncio.ensure_future(run._wait())
    await until(lambda: views[0].counts["done"] > 2)
    views[0].close()
    sent_before = views[0].updates
    assert len(await task) == 40
    await until(lambda: views[1].counts["done"] == 40)
    assert views[0].updates == sent_before
    assert run._progress.listeners
    views[1].close()
    assert not run._progress.listeners
    assert isinstance(views[1]._repr_html_(), str)


async def test_a_training_run_shows_the_rollout_of_its_step(tmp_path: Any) -> None:
    run = started(tmp_path / "run", 1000)
    view = w.RolloutView(run)
    assert repr(view) == "RolloutView(no chains yet)"
    show(view)
    seen = []
    view.observe(lambda change: seen.append(change["new"]["step"]), "_about")
    training = asyncio.ensure_future(run)
    await until(lambda: any(seen) and sum(view.counts.values()) > 0)
    click(view, "stop")
    await training
    assert len(run.records) < 1000
    # The chains of the last rollout stay visible with their results, even if it was shorter than the update interval.
    await until(lambda: view._about["state"] == "stopped")
    assert view._about["step"] == f"step {len(run.records)} of 1000"
    assert view.counts["done"] == view._about["total"] > 0
    check_static(view)


async def test_a_view_opened_after_the_training_shows_its_last_rollout() -> None:
    run = await started(None, 2)
    view = w.RolloutView(run)
    assert (view._about["step"], view._about["state"]) == ("step 2 of 2", "done")
    assert view.counts["done"] == view._about["total"] == 4


async def test_chains_are_opened_from_their_lanes() -> None:
    gate = asyncio.Event()

    @af.tool
    async def wait() -> str:
        """Wait."""
        await gate.wait()
        return "w"

    waits = agents.call(name="wait").replace('"expression":"1+1"', "")
    agent = agents.played(
        lambda task, turn: waits if task.id == agents.tasks(2)[1].id and not turn else "42", tools=[wait]
    )
    run = agent.rollout(agents.tasks(2))
    view = w.RolloutView(run)
    show(view)
    task = asyncio.ensure_future(run._wait())
    await until(lambda: view.counts["done"] == 1 and view.counts["tool"] == 1)
    over, going = (view._names[i] for i in sorted((0, 1), key=lambda i: states(view)[i] == "tool"))
    await press(view, "chain_tokens", "g/9")
    assert "g/9 has not started" in view._notice and len(view.selection) == 0
    await press(view, "chain_tokens", over)
    assert (view._notice, view.opened.trajectories[0].id) == ("", over)
    assert list(view.selection.to_frame()["trajectory"]) == [over]
    await press(view, "chain_stepper")
    assert isinstance(view.opened, w.ChainStepper) and view.opened.chain.agent is agent
    await press(view, "chain_code")
    assert f"run.find({over!r})" in view._cell["text"]
    await press(view, "chain_tokens", going)
    assert view._notice == "" and view.opened.trajectories[0].stop == "running"
    before, signal = view.opened.tokens, view.opened.signals[-1]
    view.opened.signal, view.opened._selected = signal, [[0, 1, 3]]
    gate.set()
    rollout = await task
    await until(lambda: view.opened.trajectories[0].stop == "answered")
    assert view.opened.tokens > before and (view.opened.signal, view.opened._selected) == (signal, [[0, 1, 3]])
    assert view.opened.trajectories[0] is next(t for t in rollout if t.id == going)
    await press(view, "chain_stepper")
    found: dict[str, Any] = {"agent": agent, "run": run}
    exec(view._cell["text"], found)
    assert found["trajectory"] is next(t for t in rollout if t.id == over)
    stepper = view.opened
    await press(view, "chain_leave")
    assert view.opened is None and stepper.comm is None and not view.selection


async def test_results_of_finished_chains_are_distinguished_and_failed_ones_run_again(tmp_path: Any) -> None:
    tasks = agents.tasks(4)
    wanted = {task.id: reward for task, reward in zip(tasks, (1.0, 0.0, 0.4, None), strict=True)}

    @af.reward
    def graded(trajectory: af.Trajectory) -> float:
        reward = wanted[trajectory.task.id]
        if reward is None:
            raise ValueError("no answer to compare with")
        return reward

    agent = agents.scripted(["42"]).replace(reward=graded)
    run = agent.rollout(tasks)
    view = w.RolloutView(run)
    rollout = await run
    view.refresh()
    assert states(view) == ["succeeded", "done", "done", "failed"]
    assert view.counts["done"] == 3 and view.counts["failed"] == 1 and "succeeded" not in view.counts
    assert view._about["rewards"] == [0.0, 1.0]
    hint = view._about["hint"]
    assert hint == "1 chain has no reward. To run their tasks again: `await agent.rollout(run.partial.failed.tasks)`"
    text = check_static(view).text
    assert all(words in text for words in (hint, "✓ 1 succeeded", "○ 2 no success", "✕ 1 failed"))
    assert [t.reward for t in rollout] == [1.0, 0.0, 0.4, None]
    wanted[tasks[3].id] = 1.0
    again = await eval(hint.split("`")[1].removeprefix("await "), {"agent": agent, "run": run})
    assert [(t.task.id, t.reward) for t in again] == [(tasks[3].id, 1.0)]


async def test_an_interrupted_rollout_says_where_its_chains_are() -> None:
    run = gated([agents.call(), "42"], 6).rollout(agents.tasks(1), group_size=100, max_concurrency=4)
    view = w.RolloutView(run)
    assert view._about["hint"] == "Not started: `await run` starts it."
    show(view)
    going = asyncio.ensure_future(run._wait())
    await until(lambda: view.counts["done"] > 1)
    going.cancel()
    await asyncio.wait([going])
    await until(lambda: view._about["state"] == "interrupted")
    assert "The finished chains are kept in run.partial" in view._about["hint"]
    assert view._about["left"] is None
    assert "interrupted" in check_static(view).text
