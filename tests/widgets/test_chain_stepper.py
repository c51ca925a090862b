"""ChainStepper without a browser: it changes the chain object of the cell, and its code reproduces the chain."""

import asyncio
import gc
import json
import random
import sys
import weakref
from typing import Any

import agents
import errors
import pytest
from agentfly_kit.widgets._chain_code import code as chain_code
from views import NASTY, check_static, click, gated, hide, press, sent, show
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w


async def again(code: str, **names: Any) -> af.Chain:
    """Run code as a cell and return its `chain`."""
    names |= {"af": af}
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    exec(f"async def cell():\n{lines}    return chain\n", names)
    chain: af.Chain = await names["cell"]()
    return chain


def same(a: af.Chain, b: af.Chain) -> None:
    one, two = ([(t.ids, t.sampled, t.kind) for t in chain.turns] for chain in (a, b))
    assert (one, a.stop) == (two, b.stop)


async def test_code_contains_the_names_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, tasks = agents.agent(seed=3), list(agents.tasks(2))
    for name, value in (("mine", agent), ("given", tasks)):
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    view = w.ChainStepper(agent, tasks[1])
    await press(view, "sample")
    wanted = ["chain = mine.chain(given[1])", "await chain.sample()"]
    assert view.to_code().splitlines() == wanted
    monkeypatch.setattr(af.LocalEngine, "reproducible", False)
    assert view.to_code().splitlines() == ["# this engine does not guarantee the same samples", *wanted]


async def test_clicks_move_the_chain_that_the_cell_holds() -> None:
    chain = agents.agent(seed=3).chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    assert view.chain is chain
    await press(view, "sample", True)
    assert chain.turn.kind == "action"
    assert sent(view)["_state"]["turns"][1]["sampled"] is True
    assert sent(view)["_state"]["can"]["act"] is False  # "I don't know" calls no tool
    await press(view, "rewind")
    await press(view, "force", {"text": agents.call("2*21"), "end": True})
    assert sent(view)["_state"]["can"]["act"] is True
    await press(view, "act")
    assert sent(view)["_state"]["turns"][2]["calls"][0]["result"] == "42"
    assert chain.turn.kind == "observation"
    await press(view, "edit", "99")
    assert (chain.turn.author, chain.turn.tool_calls[0].result.observation) == ("person", "99")
    await press(view, "rewind")
    assert chain.turn.kind == "forced"
    await press(view, "act")
    await press(view, "force", {"text": "42", "end": True})
    assert chain.stop == "answered"
    await press(view, "finish")
    assert view._state["result"]["reward"] == f"{view.trajectory.reward:g}"
    assert view._state["where"] == "finished"
    assert [name for name, can in view._state["can"].items() if can] == ["rewind"]
    # Undo the scoring: the view continues in a fork with the same turns and seeds.
    await press(view, "rewind")
    assert chain.closed and view.chain is not chain and view.trajectory is None
    same(view.chain, chain)
    assert view.chain.stop == "answered" and view._state["can"]["finish"] and "fork" not in view.to_code()
    await press(view, "rewind", 1)
    assert ([turn.kind for turn in view.chain.turns], view._notice) == (["prompt", "forced"], "")


async def test_a_chain_that_has_not_ended_is_run_to_its_end_and_not_scored_as_cancelled() -> None:
    view = w.ChainStepper(agents.played([agents.call("1+1"), agents.call("2+2"), "42"]), agents.tasks()[0])
    await press(view, "sample")
    assert (view._state["can"]["finish"], view._state["can"]["run"]) == (False, True)
    await press(view, "finish")
    assert "the chain has not ended; run it to its end, or" in view._notice
    assert view.chain.stop is None and not view.chain.closed
    await press(view, "run")  # also runs the pending call
    assert [turn.kind for turn in view.chain.turns] == ["prompt", *["action", "observation"] * 2, "action"]
    assert (view.chain.stop, view.chain.closed, view._state["can"]["run"]) == ("answered", False, False)
    await press(view, "finish")
    assert view.trajectory.stop == "answered"
    slow = w.ChainStepper(gated([agents.call()] * 2, 1), agents.tasks()[0])
    click(slow, "run")
    await until(lambda: len(slow.chain.turns) > 2)
    assert slow._state["where"] == "running to the end"
    await press(slow, "cancel")
    assert "running to the end was cancelled" in slow._notice
    assert slow.chain.stop is None and not slow.chain.busy and slow._state["can"]["run"]


async def test_running_to_the_end_calls_the_hooks_of_the_agent() -> None:
    called: list[tuple[str, int]] = []

    def before_turn(chain: af.Chain) -> None:
        called.append(("before_turn", chain.actions))
        if chain.actions == 2:
            chain.force("42")

    agent = agents.played(
        [agents.call("1+1"), agents.call("2+2"), "no"],
        before_turn=before_turn,
        after_observation=lambda chain: called.append(("after_observation", chain.actions)),
    )
    view = w.ChainStepper(agent, agents.tasks()[0])
    await press(view, "run")
    assert view.error is None, view._notice
    assert [turn.kind for turn in view.chain.turns][-2:] == ["observation", "forced"]
    assert called == [
        ("before_turn", 0), ("after_observation", 1), ("before_turn", 1), ("after_observation", 2), ("before_turn", 2)
    ]  # fmt: skip


async def test_each_sample_at_one_turn_is_another_one_and_the_code_repeats_it() -> None:
    agent = agents.agent(seed=3, sampling=af.Sampling(max_tokens=24, temperature=1.5))
    view = w.ChainStepper(agent, agents.tasks()[0])
    assert view._state["can"]["again"] is False
    seeds, said = [], set()
    for name in ("sample", "again", "again", "rewind", "sample", "rewind", "again", "again"):
        await press(view, name)
        if name != "rewind":
            assert len(view.chain.turns) == 2
            seeds.append(view.chain.turn.seed)
            said.add(view.chain.turn.ids)
            same(view.chain, await again(view.to_code(), agent=agent))
    assert len(set(seeds)) == 6 and len(said) > 3
    key, task = view.chain.key, view.chain.task.id
    assert seeds == [key.seed(agent.seed, task, 0, attempt) for attempt in range(6)]
    assert "await chain.sample(attempt=5)" in view.to_code()
    # Samples drawn in a cell are not repeated either.
    view.chain.rewind(0)
    await view.chain.sample(attempt=6)
    await press(view, "again")
    assert view.chain.turn.seed == key.seed(agent.seed, task, 0, 7)
    # Cancelling a sample keeps the action that it would have replaced.
    slow = w.ChainStepper(gated(["42"], 1), agents.tasks()[0])
    await press(slow, "sample")
    before = slow.chain.turn
    click(slow, "again")
    await until(lambda: len(slow.chain.turns) == 1)
    await press(slow, "cancel")
    assert (slow.chain.turn, slow.chain.stop) == (before, "answered")


async def test_samples_are_a_histogram_whose_rows_open_as_forks() -> None:
    agent = agents.agent(seed=3, sampling=af.Sampling(max_tokens=24, temperature=1.5))
    chain = agent.chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    await press(view, "samples", {"n": 8, "to_end": False})
    shown = sent(view)["_samples"]
    assert len(shown["items"]) == 8 and all(item["outcome"] is None for item in shown["items"])
    assert shown["tokens"] == sum(len(t.turns[1].ids) for t in view.samples)
    assert shown["items"][5]["first"] == view.samples.trajectories[5].turns[1].token_texts[0]
    assert (view.chain, len(chain.turns)) == (chain, 1)
    await press(view, "sample")  # the rows can be opened after the chain has moved on
    await press(view, "open_sample", 5)
    assert view.chain.id == f"{chain.id}.6" and view._at == 1
    assert view.chain.turn.ids == view.samples.trajectories[5].turns[1].ids
    same(view.chain, await again(view.to_code(), agent=agent))
    assert "await chain.fork(number=6)" in view.to_code()
    await press(view, "switch", 0)
    await press(view, "open_sample", 5)  # the existing fork is shown
    assert len(view.chains) == 2 and view._at == 1
    await press(view, "switch", 0)
    await press(view, "rewind", 0)
    await press(view, "samples", {"n": 4, "to_end": True})
    items = view._samples["items"]
    assert [item["success"] for item in items] == [t.success for t in view.samples]
    assert all(t.stop in item["outcome"] for item, t in zip(items, view.samples, strict=True))
    assert "4 samples after turn 0 (prompt)" in check_static(view).text
    await press(view, "drop_samples")
    assert view._samples == {} and view.samples is None
    for n in (0, 1001):
        await press(view, "samples", {"n": n, "to_end": False})
        assert "number of samples must be between 1 and 1000" in view._notice


async def test_closing_the_view_cancels_samples_and_releases_their_sandboxes() -> None:
    async with af.Pool(agents.ForkingBox, size=3) as pool:
        script = [agents.put_call("a", "put_forking"), agents.put_call("b", "put_forking"), "5"]
        agent = gated(script, 1, tools=[agents.put_forking], pools=[pool])
        chain = agent.chain(agents.tasks()[0])
        await chain.step()
        view = w.ChainStepper(chain)
        click(view, "samples", {"n": 9, "to_end": True})
        await until(lambda: pool.snapshot().leased == 3)
        view.close()
        await until(lambda: not chain.busy)
        await until(lambda: pool.snapshot().leased == 1)
        assert pool.snapshot().waiting == 0
        agent.engine.gate.set()
        # Scoring a chain that holds a sandbox releases the sandbox and cannot be undone.
        view = w.ChainStepper(chain)
        await press(view, "run")
        await press(view, "finish")
        assert pool.snapshot().leased == 0 and not any(view._state["can"].values())


async def test_the_code_shown_follows_the_chain() -> None:
    view = w.ChainStepper(agents.agent(seed=3), agents.tasks()[0])
    show(view)
    await press(view, "code")
    assert view._code["n"] == 1
    for move in (("sample",), ("again",), ("rewind",), ("force", {"text": "42"}), ("fork",)):
        await press(view, *move)
        assert view._code == {"n": 1, "text": view.to_code()}
    view.chains[0].rewind(0)  # not the chain shown
    view.chain.rewind(0)  # in a cell
    await until(lambda: view._code["text"] == view.to_code())
    await press(view, "code", False)
    await press(view, "sample")
    assert view._code["text"] != view.to_code()  # not computed while it is not shown
    await press(view, "code")
    assert view._code == {"n": 2, "text": view.to_code()}


async def test_what_a_cell_does_is_seen_while_a_page_is_open() -> None:
    chain = agents.agent().chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    show(view)
    chain.force("let me see", end=False)
    await until(lambda: len(view._state["turns"]) == 2)
    assert view._state["turns"][1]["text"] == "let me see"
    await until(lambda: view._distribution.get("ids") and view._asked_for[0] is chain.turn)
    assert abs(sum(view._distribution["probabilities"]) - 1) < 0.2
    chain.rewind(0)
    await until(lambda: len(view._state["turns"]) == 1)
    # The view does not poll: it sends nothing while the chain is idle or while no page is open.
    sent = view._throttle.sent
    await asyncio.sleep(0.2)
    assert view._throttle.sent == sent
    hide(view)
    await chain.sample()
    await asyncio.sleep(0.1)  # an update would come after 0.05 s
    assert len(view._state["turns"]) == 1
    show(view)
    await until(lambda: len(view._state["turns"]) == 2)
    view.close()
    assert not chain._listeners


async def test_a_forgotten_view_leaves_its_chain() -> None:
    chain = agents.agent().chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    await press(view, "fork")
    assert (bool(chain._listeners), bool(view.chain._listeners)) == (False, True)  # only on the displayed chain
    await press(view, "switch", 0)
    assert (bool(chain._listeners), bool(view.chains[1]._listeners)) == (True, False)
    view.close()
    gone = weakref.ref(view)
    del view
    gc.collect()
    assert gone() is None
    assert not chain._listeners


async def test_the_chain_in_sight_is_a_selection_and_opens_as_tokens() -> None:
    chain = agents.agent(seed=3).chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    await press(view, "force", {"text": agents.call("2*21"), "end": True})
    await press(view, "act")
    assert view.selection.to_frame("turns")["kind"].tolist() == ["prompt", "forced", "observation"]
    assert view.selection.ids == (chain.id,)
    assert len(view.selection.to_frame("tokens")) == len(chain.ids)
    await press(view, "tokens")
    assert isinstance(view.opened, w.TokenView) and view.opened.tokens == len(chain.ids)
    first = view.opened
    await press(view, "force", {"text": "42", "end": True})
    await press(view, "finish")
    assert list(view.selection) == [view.trajectory]
    assert view.selection.to_frame()["stop"].tolist() == [view.trajectory.stop]
    await press(view, "leave")
    assert view.opened is None and first.comm is None
    await press(view, "tokens")
    below = view.opened
    view.close()
    assert below.comm is None


async def test_errors_are_on_the_page_and_kept() -> None:
    view = w.ChainStepper(agents.scripted(["42"]), agents.tasks()[0])
    show(view)
    await press(view, "act")
    assert "there is nothing to run" in view._notice
    assert isinstance(view.error, af.errors.SettingsError)
    await until(lambda: "does not support distribution()" in view._distribution.get("why", ""))
    await press(view, "force", {"ids": [10**9], "end": True})
    assert "vocabulary" in view._notice
    await press(view, "rewind")
    assert "nothing to undo" in view._notice
    await press(view, "sample")
    assert view._notice == ""
    await press(view, "switch", 7)
    assert "got 7" in view._notice
    click(view, "no such thing")
    assert len(view.chain.turns) == 2


async def test_a_click_while_something_runs_is_refused_and_a_cancel_ends_it() -> None:
    chain = gated(["1"], 0).chain(agents.tasks()[0])
    view = w.ChainStepper(chain)
    click(view, "sample")
    await until(lambda: view._state["where"] == "sampling")
    click(view, "sample")
    await until(lambda: "busy (sampling)" in view._notice)
    await press(view, "cancel")
    assert "cancelled" in view._notice
    assert (view._state["can"]["sample"], len(chain.turns)) == (True, 1)
    click(view, "sample")
    await until(lambda: chain.busy)
    view.close()  # cancels the pending operation
    await until(lambda: not chain.busy)


@pytest.mark.parametrize("seed", range(4))
async def test_the_code_makes_the_same_chain(seed: int) -> None:
    rng = random.Random(seed)
    agent = agents.agent(seed=seed, sampling=af.Sampling(max_tokens=24, temperature=0.9), max_turns=6)
    view = w.ChainStepper(agent, agents.tasks()[seed])
    for _ in range(14):
        can = view._state["can"]
        moves: list[tuple[str, Any]] = [("sample", False), ("sample", True)] * 3 * can["sample"]
        moves += [("act", None)] * 4 * can["act"]
        said = rng.choice(["so", agents.call("2*3"), "x <tool_call>"])
        moves += [("force", {"text": said, "end": True}), ("force", {"text": "I think", "end": False})] * can["force"]
        moves += [("observe", '7 it\'s "so"')] * can["observe"]
        moves += [("rewind", None)] * can["rewind"]
        moves += [("again", None)] * 2 * can["again"]
        moves += [("fork", None)] * can["fork"]
        await press(view, *rng.choice(moves))
        for chain in view.chains:
            same(chain, await again(chain_code(chain), agent=agent))
    await press(view, "run")
    await press(view, "finish")
    made = await again(view.to_code(), agent=agent)
    same(view.chain, made)
    assert (await made.finish()).reward == view.trajectory.reward


async def test_the_code_of_a_folded_chain() -> None:
    agent = agents.played([agents.call("1+1"), agents.call("2+2"), "42"])
    chain = agent.chain(agents.tasks()[0])
    await chain.step()
    chain.compact("so far: 2")
    await chain.step()
    view = w.ChainStepper(chain)
    same(chain, await again(view.to_code(), agent=agent))
    assert view._state["turns"][3]["kind"] == "prompt"
    check_static(view)


async def test_a_trajectory_is_stepped_further_and_comes_out_the_same() -> None:
    agent = agents.agent(seed=5)
    rollout = await agent.rollout(agents.tasks(8), group_size=4)
    trajectory = next(t for t in rollout if len(t.turns) > 2)
    chain = agent.chain(trajectory)
    assert (chain.turns, chain.stop) == (trajectory.turns, trajectory.stop)
    chain.rewind(0)
    while chain.stop is None:
        await chain.step()
    # The continued chain uses the same seeds as the original.
    assert [t.ids for t in chain.turns] == [t.ids for t in trajectory.turns]
    assert (await chain.finish()).reward == trajectory.reward
    view = w.ChainStepper(agent, trajectory)
    await press(view, "rewind", 1)
    await press(view, "observe", "12345")
    await press(view, "fork")
    await press(view, "sample")
    same(view.chain, await again(view.to_code(), agent=agent, rollout=rollout))


async def test_a_trajectory_of_another_agent_or_a_lost_sandbox_is_refused() -> None:
    agent = agents.played(["42"])
    trajectory = (await agent.rollout(agents.tasks()[:1])).trajectories[0]
    errors.check(
        lambda: agent.replace(system="Be brief.").chain(trajectory),
        af.errors.SettingsError,
        "must begin with the prompt of this agent",
    )

    @af.tool(describe="optional")
    async def look(sandbox: agents.Box) -> str:
        return "seen"

    async with af.Pool(agents.Box, size=1) as pool:
        call = agents.call(name="look").replace('"expression":"1+1"', "")
        boxed = agents.played([call, "42"], tools=[look], pools=[pool])
        trajectory = (await boxed.rollout(agents.tasks()[:1])).trajectories[0]
        errors.check(
            lambda: boxed.chain(trajectory), af.errors.SettingsError, "'look' in a Box, which has been released"
        )


async def test_nasty_texts_arrive_as_text() -> None:
    view = w.ChainStepper(agents.played([agents.call()], max_turns=30), agents.tasks()[0])
    await press(view, "sample")
    for text in NASTY:
        await press(view, "observe", text)
        check_static(view)
        if view.chain.turn.kind == "observation":
            await press(view, "rewind")
    assert "\u202e" not in json.dumps(view._state, ensure_ascii=False)


async def test_a_long_chain() -> None:
    chain = agents.played([agents.call()] * 60, max_turns=100).chain(agents.tasks()[0])
    for _ in range(60):
        await chain.sample()
        chain.observe("x" * 4000)
    view = w.ChainStepper(chain)
    check_static(view)
    assert len(json.dumps(sent(view)["_state"])) < 2_000_000
    assert repr(view) == f"ChainStepper({chain!r})"
