"""Chains: exact tokens, masks, stop reasons, failures, interactive calls, rewinding and forks."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import errors
import numpy as np
import pytest
from agents import (
    Box,
    ForkingBox,
    Played,
    Text,
    agent,
    call,
    chat,
    played,
    put,
    put_call,
    put_forking,
    random_policy,
    reference_logprobs,
    scripted,
    shipped,
    stepped,
    tasks,
)
from waiting import GUARD, until

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"})
STOP = chat().stop_ids[0]


def cut_after(text: str) -> af.Sampling:
    return af.Sampling(max_tokens=len(chat().encode(text)))


async def test_rows_equal_inputs_and_outputs_of_the_engine() -> None:
    samples = []

    class Recorded(af.LocalEngine):
        async def sample(self, ids: Sequence[int], *given: Any, **more: Any) -> af.Sample:
            sample = await super().sample(ids, *given, **more)
            samples.append((tuple(ids), sample.ids, np.float32(sample.logprobs).tolist()))
            return sample

    a = agent(engine=Recorded(shipped()), sampling=af.Sampling(temperature=1.3, max_tokens=20))
    rollout = await a.rollout(tasks(8), group_size=6)
    assert len({t.stop for t in rollout}) > 1 and len(samples) == sum(len(t.actions) for t in rollout)
    for t in rollout:
        for i, turn in enumerate(t.turns):
            at = np.flatnonzero(t.turn_index == i)
            assert t.ids[at].tolist() == list(turn.ids or ())
            assert t.action_mask[at].tolist() == [turn.kind == "action"] * len(at)
            if turn.kind == "action":
                assert (tuple(t.ids[: at[0]]), turn.ids, t.logprobs[at].tolist()) in samples


async def test_row_text_is_the_conversation() -> None:
    t = await played([call("2+3"), "5"], name="alice").chain(TASK).run()
    assert (t.turns[1].author, t.turns[1].sampled) == ("alice", True)
    assert (
        "".join(t.token_texts)
        == chat().text(t.ids.tolist())
        == (
            "<|im_start|>system\nTools: calculator(expression)<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n"
            f"<|im_start|>assistant\n{call('2+3')}<|im_end|>\n<|im_start|>tool\n<tool_response>5</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n5<|im_end|>"
        )
    )
    assert (t.stop, t.final, t.reward, t.metrics) == ("answered", "5", 1.0, {"exact": 1.0})


async def test_only_sampled_tokens_have_mask_1() -> None:
    chain = played([call("1+1"), "5"]).chain(TASK)
    forced = chain.force("let me ", end=False)
    action = await chain.sample()
    await chain.act()
    chain.force(chat().encode("2"), end=False, author="hook")
    end = chain.force("3")
    t = chain.snapshot()
    assert [(turn.kind, turn.author, turn.sampled) for turn in t.turns] == [
        ("prompt", "task", False), ("forced", "person", False), ("action", "policy", True),
        ("observation", "tool", False), ("forced", "hook", False), ("forced", "person", False),
    ]  # fmt: skip
    assert [bool(m) for m in t.action_mask] == [i == 2 for i in t.turn_index]
    # A message is read from its forced beginning on.
    assert [[m["content"] for m in turn.messages] for turn in (forced, action, end)] == [[], ["let me"], ["23"]]
    assert len(t.actions) == 2


async def test_truncated_turn_is_closed_with_mask_0() -> None:
    chain = played(["five I th…", "5"], sampling=cut_after("five I th")).chain(TASK)
    cut = await chain.step()
    assert chain.stop == "turn_tokens" and (cut.ids or ())[-1] != STOP
    told = chain.observe("go on")
    assert not told.sampled and told.messages == ({"role": "user", "content": "go on"},)
    t = await chain.run()
    at = t.turn_index.tolist().index(2)
    assert (t.final, told.ids[0], t.ids[at], t.action_mask[at]) == ("5", STOP, STOP, False)  # type: ignore[index]


async def test_observation_closes_a_turn_ended_by_a_stop_string() -> None:
    chain = await stepped(
        played([call("2+3") + "§", "5 END and more§"], sampling=af.Sampling(stop=("</tool_call>", "END"))).chain(TASK)
    )
    assert (chain.turn.ids or ())[0] == STOP, "the observation begins with the stop token that was not sampled"
    assert chain.turn.tool_calls[0].result.observation == "5", "the text that stopped it closes the call"
    t = await chain.run()
    assert t.final == "5", "the parser cuts the text; the ids stay whole"
    assert (t.turns[-1].text, t.reward) == ("5 END and more", 1.0)


@af.tool(describe="optional")
def stopper(text: Text) -> af.ToolResult:
    return af.ToolResult(True, "over", done=True, reward=0.25)


LONG = "1 2 3 4 5 6 7 8 9 10 11 12"
ENDS: list[tuple[str, Any, dict[str, Any], str, float | None, str | None]] = [
    ("answer", ["5"], {}, "answered", 1.0, "5"),
    ("an empty answer", [""], {}, "answered", 0.0, ""),
    ("tool says stop", [put_call("x", "stopper")], {"tools": [stopper]}, "tool_stopped", 0.0, None),
    ("max_turns", [call("1+1")] * 3, {"max_turns": 3}, "max_turns", 0.0, None),
    ("answer in the last turn", [call("1+1"), "5"], {"max_turns": 2}, "answered", 1.0, "5"),
    ("turn cut", [LONG + "…"], {"sampling": af.Sampling(max_tokens=4)}, "turn_tokens", 0.0, None),
    ("chain cut", [LONG + "…"], {"max_tokens": 4}, "chain_tokens", 0.0, None),
    ("context cut", [LONG + "…"], {"max_length": 60}, "context_full", 0.0, None),
    ("prompt too long", ["5"], {"max_length": 20}, "context_full", 0.0, None),
    ("bad calls", ["<tool_call>{</tool_call>"] * 3, {}, "invalid_call", 0.0, None),
    ("bad calls, 1", [call("1", "nobody")], {"max_invalid_calls": 1}, "invalid_call", 0.0, None),
    ("engine broke", [af.errors.EngineError("no")], {}, "error", None, None),
    ("code broke", [ZeroDivisionError("no")], {}, "error", None, None),
    ("engine timed out", [TimeoutError("the server did not answer")], {}, "error", None, None),
    ("engine timed out, chain has a limit", [TimeoutError("no")], {"timeout": 60.0}, "error", None, None),
]


@pytest.mark.parametrize("case", ENDS, ids=[e[0] for e in ENDS])
async def test_stop_reasons(case: tuple[str, Any, dict[str, Any], str, float | None, str | None]) -> None:
    _, script, settings, stop, score, final = case
    t = await played(script, **settings).chain(TASK).run()
    assert (t.stop, t.reward, t.final) == (stop, score, final)
    assert (t.error is not None) == (stop == "error")
    assert len(t.ids) == len(t.action_mask) == len(t.logprobs) == len(t.turn_index)


async def test_a_prompt_that_leaves_no_room_for_an_action_is_reported_before_the_rollout() -> None:
    long = af.Task("long", ({"role": "user", "content": "1 2 3 " * 100},), {"answer": "5"})
    a = played(["5"], max_length=200)
    with pytest.warns(
        UserWarning, match=r"task 'long' has \d+ tokens, too many for the engine's context of 200: chains of"
    ) as w:
        rollout = await a.rollout([TASK, long])
    assert len(w) == 1 and [t.stop for t in rollout] == ["answered", "context_full"]


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({"max_turns": 1}, "max_turns"),
        ({"max_length": 130}, "context_full"),
        ({"max_tokens": len(chat().encode(call("1+1"))) + 1}, "chain_tokens"),
    ],
)
async def test_observation_without_following_action_is_not_in_the_row(settings: dict[str, Any], stop: str) -> None:
    @af.tool(describe="optional")
    def talk(expression: Text) -> str:
        return "word " * 200

    t = await played([call("1+1", "talk"), "5"], tools=[talk], **settings).chain(TASK).run()
    assert t.stop == stop
    engine_saw = t.turns[:2]
    assert len(t.ids) == sum(len(turn.ids or ()) for turn in engine_saw)
    assert t.turns[-1].ids == () and t.turns[-1].text.startswith("word word")
    assert int(t.action_mask.sum()) == len(t.turns[1].ids or ())


async def test_max_tokens_of_a_chain_is_not_exceeded() -> None:
    for limit in range(1, 60, 7):
        a = played([call("1+1"), call("2+2"), LONG], max_tokens=limit)
        t = await a.chain(TASK).run()
        assert all(s.max_tokens <= limit for s in a.engine.samplings)
        assert (
            sum(len(turn.ids or ()) for turn in t.turns if turn.kind == "action" and turn.stop == "length") <= limit
        )


async def test_unclosed_call_is_not_run() -> None:
    ran: list[str] = []

    @af.tool(describe="optional")
    def spy(expression: Text) -> str:
        ran.append(expression)
        return ""

    begun, more = call("1+1", "spy")[:-12], call("1+1", "spy") + " and"
    for text in (begun, more):
        t = await played([text + "…"], tools=[spy], sampling=cut_after(text)).chain(TASK).run()
        assert (t.stop, ran) == ("turn_tokens", [])
    told = await played([begun, "5"], tools=[spy]).chain(TASK).run()
    assert (told.stop, ran) == ("answered", []) and "was not closed" in told.turns[2].text


async def test_valid_call_resets_the_count_of_invalid_calls() -> None:
    bad, unknown = "<tool_call>{]</tool_call>", call("1", "nobody")
    t = await played([bad, unknown, call("2+3"), bad, unknown, "5"], max_turns=9).chain(TASK).run()
    assert t.stop == "answered"
    texts = [c.result.observation for c in t.tool_calls if c.result is not None]
    assert "is not valid JSON" in texts[0]
    assert "there is no tool named 'nobody'; the tools are: calculator" in texts[1]
    assert texts[2] == "5"
    t = await played([bad, unknown, bad, "5"], max_turns=9).chain(TASK).run()
    assert (t.stop, t.reward) == ("invalid_call", 0.0)


async def test_tool_reward_is_placed_on_the_calling_action() -> None:
    @af.tool(describe="optional")
    def give(text: Text) -> af.ToolResult:
        return af.ToolResult(True, "ok", reward=float(text))

    two = put_call("0.25", "give") + put_call("0.5", "give")
    t = await played([two, put_call("-1", "give"), "5"], tools=[give]).chain(TASK).run()
    assert [turn.reward for turn in t.turns] == [None, None, 0.75, None, -1.0, None]
    rewards = af.collate([t]).token_rewards[0]
    last = [np.flatnonzero(t.turn_index == i)[-1] for i in (1, 3, 5)]
    expected = np.where(t.action_mask, 0.0, np.nan)
    expected[last] = [0.75, -1.0, 1.0]
    np.testing.assert_array_equal(rewards.numpy(), expected)


@pytest.mark.parametrize("where", ["sampling", "tool"])
async def test_timeout_of_a_chain(where: str) -> None:
    @af.tool(describe="optional")
    async def hang(text: Text) -> None:
        await asyncio.Event().wait()

    async with af.Pool(Box, size=1) as pool:
        if where == "sampling":
            a = scripted(["5"], latency=3600, timeout=0.05)
        else:
            a = played([put_call("a"), put_call("x", "hang")], tools=[put, hang], pools=[pool], timeout=0.1)
        t = await a.chain(TASK).run()
        assert (t.stop, t.reward, t.truncated, pool.snapshot().leased) == ("timeout", 0.0, True, 0)


async def test_pool_closed_during_a_chain_is_recorded_as_error() -> None:
    pool = af.Pool(Box, size=1)
    chain = await stepped(played([put_call("a"), put_call("b"), "5"], tools=[put], pools=[pool]).chain(TASK))
    await pool.close()
    t = await chain.run()
    assert (t.stop, t.reward) == ("error", None)


async def test_turn_repr_has_a_label() -> None:
    chain = played([call("1+1"), "2"], max_turns=6).chain(TASK)
    for method, turn in ((chain.sample, 1), (chain.act, 1), (chain.step, 2)):
        assert f"turn {turn} of 6" in repr(await method())
    assert repr(chain).startswith("Chain('chain-0:t/0', stopped: answered")


async def test_invalid_calls_name_a_valid_one() -> None:
    chain = played([call("1+1"), "5"]).chain(TASK)
    await chain.sample()
    await errors.check(chain.sample, af.errors.SettingsError, "have not run yet; call chain.act()")
    errors.check(lambda: chain.force("x"), af.errors.SettingsError, "chain.rewind() first")
    await chain.act()
    await chain.sample()
    await errors.check(chain.sample, af.errors.SettingsError, "chain.finish() scores it, chain.observe")
    errors.check(lambda: chain.force("x"), af.errors.SettingsError, "complete")
    assert await chain.finish() is await chain.finish()
    for again in (lambda: chain.force("x"), lambda: chain.observe("x"), lambda: chain.rewind(to=0)):
        errors.check(again, af.errors.SettingsError, "finished; agent.chain(task) starts another")
    await errors.check(chain.step, af.errors.SettingsError, "finished")


async def test_unfinished_chain_is_unscored_and_a_closed_one_cannot_be_scored() -> None:
    t = await (await stepped(played([call("1+1"), "5"]).chain(TASK))).finish()
    assert (t.stop, t.reward) == ("cancelled", None)
    chain = played(["5"]).chain(TASK)
    await chain.close()
    await chain.close()
    await errors.check(chain.finish, af.errors.SettingsError, "closed without a score")


async def test_concurrent_calls_are_rejected() -> None:
    answer = asyncio.Event()

    async def script(task: af.Task, turn: int) -> str:
        await answer.wait()
        return "5"

    chain = scripted(script).chain(TASK)
    running = asyncio.create_task(chain.sample())
    await until(lambda: chain.busy)
    for refused in (chain.sample, chain.step, chain.act, chain.finish, chain.distribution, chain.fork):
        await errors.check(
            refused, af.errors.SettingsError, "another call on this chain is still running; await it first"
        )
    for now in (lambda: chain.force("x"), lambda: chain.observe("x"), lambda: chain.rewind(to=0)):
        errors.check(now, af.errors.SettingsError, "another call on this chain is still running")
    answer.set()
    await running
    assert chain.stop == "answered"


async def test_chain_continues_after_a_cancelled_sample() -> None:
    chain = agent(random_policy(1), sampling=af.Sampling(max_tokens=100)).chain(TASK)
    for _ in range(3):
        running = asyncio.create_task(chain.sample())
        await asyncio.sleep(0.003)
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            break
        assert [t.kind for t in chain.turns] == ["prompt"]
    else:
        await asyncio.wait_for(chain.sample(), GUARD)
    assert [t.kind for t in chain.turns] == ["prompt", "action"]
    await chain.close()


async def test_distribution_matches_sampling_and_a_greedy_turn_is_rejected_for_training() -> None:
    chain = agent().chain(TASK)
    seen = await chain.distribution(top=3)
    assert chain.turns[-1].kind == "prompt"
    with_it = (await chain.sample()).ids
    assert (await agent().chain(TASK).sample()).ids == with_it
    greedy = agent().chain(TASK)
    assert (await greedy.sample(greedy=True)).ids[0] == seen.ids[0]  # type: ignore[index]
    t = (await greedy.finish()).replace(reward=1.0)
    errors.check(lambda: af.collate([t]), af.errors.BatchError, "greedily")
    assert len(seen.texts) == 3 and "entropy" in repr(seen)


async def test_rewind_restores_the_same_turn_and_rejects_turns_of_other_paths() -> None:
    chain = await stepped(played([call("1+1"), "5"]).chain(TASK))
    kept = chain.turns[2]
    await chain.step()
    assert chain.rewind(to=2) is chain.turn is kept and chain.stop is None
    assert (await chain.step()).ids == (await played([call("1+1"), "5"]).chain(TASK).run()).turns[3].ids
    assert (chain.rewind(to=chain.turns[3]).kind, chain.stop) == ("action", "answered")
    chain.rewind(to=1)
    assert (await chain.act()).tool_calls[0].result.observation == "2"  # type: ignore[union-attr]
    errors.check(lambda: chain.rewind(to=kept), af.errors.SettingsError, "chain.turns")


async def test_rewind_to_the_end_encodes_a_final_observation_and_a_truncated_turn_is_no_answer() -> None:
    engine = Played([call("1+1"), "5"])
    chain = await stepped(agent(engine=engine, chat=chat(), max_turns=1).chain(TASK))
    assert chain.stop == "max_turns"
    chain.rewind(to=-1)
    await chain.sample()
    assert (
        chat().text(engine.given[-1]).endswith("<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n")
    )
    assert tuple(chain.snapshot().ids) == (*engine.given[-1], *engine.gave[-1])
    cut = await stepped(played(["5…"], sampling=cut_after("5")).chain(TASK))
    cut.rewind(to=-1)
    t = await cut.finish()
    assert (t.stop, t.final, t.reward) == ("turn_tokens", None, 0.0), "a truncated turn is not an answer"


async def test_rewind_is_rejected_with_a_sandbox_or_tool_state() -> None:
    @af.tool(describe="optional")
    def count(text: Text, context: af.Context) -> str:
        context.state["n"] = context.state.get("n", 0) + 1
        return str(context.state["n"])

    async with af.Pool(Box, size=1) as pool:
        chain = await stepped(played([put_call("a"), "5"], tools=[put], pools=[pool]).chain(TASK))
        errors.check(lambda: chain.rewind(to=0), af.errors.SettingsError, "cannot go back: it holds Box")
        assert chain.rewind(to=-1) is chain.turn
        await chain.close()
    chain = await stepped(played([put_call("a", "count"), "5"], tools=[count]).chain(TASK))
    errors.check(
        lambda: chain.rewind(to=0), af.errors.SettingsError, "cannot go back: it holds state that its tools keep"
    )


async def test_fork_shares_turns_and_samples_independently() -> None:
    chain = agent(sampling=af.Sampling(temperature=1.5, max_tokens=30)).chain(TASK)
    chain.force(call("2+3"))
    await chain.act()
    forks = [await chain.fork() for _ in range(5)]
    same = await (await chain.fork(same_seeds=True)).fork(same_seeds=True)
    assert all(x is y for f in forks for x, y in zip(f.turns, chain.turns, strict=True))
    *others, own, twin = [await f.sample() for f in (*forks, chain, same)]
    assert len({turn.ids for turn in (*others, own)}) > 3 and len({turn.seed for turn in (*others, own)}) == 6
    assert (twin.ids, twin.seed) == (own.ids, own.seed)
    assert len(chain.turns) == 4
    for f in (*forks, same, chain):
        t = f.snapshot()
        at = np.flatnonzero(t.action_mask).tolist()
        assert t.logprobs[at] == pytest.approx(reference_logprobs(shipped(), t.ids.tolist(), at, 1.5)[0], abs=1e-5)
        await f.close()


async def test_fork_ids_are_unique() -> None:
    chain = played(["5"]).chain(TASK)
    family: list[af.Chain] = [chain]
    for same_seeds in (True, False, True, False):
        family += [await member.fork(same_seeds=same_seeds) for member in list(family)]
    assert len(family) == len({member.id for member in family}) == 16


async def test_each_attempt_has_its_own_seed_and_attempt_0_is_that_of_a_rollout() -> None:
    a = agent(sampling=af.Sampling(temperature=1.5, max_tokens=30))
    chain = a.chain(TASK)
    said = []
    for attempt in (0, 1, 2, 3, 0, 2):
        turn = await chain.sample(attempt=attempt)
        said.append((turn.seed, turn.ids))
        chain.rewind(0)
    assert said[4:] == [said[0], said[2]]
    assert len({seed for seed, _ in said}) == 4 and len({ids for _, ids in said}) > 2
    turn = await a.chain(TASK).sample()
    assert said[0] == (turn.seed, turn.ids)


async def test_an_action_whose_tools_have_not_run_can_be_undone_while_a_sandbox_is_held() -> None:
    async with af.Pool(ForkingBox, size=2) as pool:
        script = [put_call("a", "put_forking"), put_call("b", "put_forking")] * 2
        chain = await stepped(played(script, tools=[put_forking], pools=[pool]).chain(TASK))
        for fork in (chain, await chain.fork()):
            assert fork.turn.kind == "observation"
            await fork.sample()
            fork.rewind(2)  # only the action is removed, so the box has not changed
            assert fork.turn.kind == "observation"
            # The tools have run.
            errors.check(lambda: fork.rewind(1), af.errors.SettingsError, "cannot go back: it holds ForkingBox")
            await fork.close()


async def test_samples_of_a_turn_are_those_of_forks() -> None:
    a = agent(sampling=af.Sampling(temperature=1.5, max_tokens=30))
    chain = a.chain(TASK)
    chain.force(call("2+3"))
    await chain.act()
    before = chain.turn
    samples = await chain.sample_turns(6)
    assert chain.turn is before and not chain.busy
    assert [t.id for t in samples] == [f"{chain.id}.{k}" for k in range(1, 7)]
    assert all(t.reward is None and len(t.turns) == 4 and t.turns[2] is before for t in samples)
    again = a.chain(TASK)
    again.force(call("2+3"))
    await again.act()
    for t in samples:
        assert (await (await again.fork()).sample()).ids == t.turns[3].ids
    ended = await chain.sample_turns(6, to_end=True)
    assert [t.id for t in ended] == [f"{chain.id}.{k}" for k in range(7, 13)]
    assert all(t.reward is not None for t in ended) and len(ended.groups) == 1
    number = int(ended.trajectories[0].id.rpartition(".")[2])
    assert [t.ids for t in (await (await again.fork(number=number)).run()).turns] == [
        t.ids for t in ended.trajectories[0].turns
    ]
    assert (await again.fork()).id == f"{again.id}.{number + 1}"  # later forks have larger numbers


async def test_a_sample_is_appended_as_if_the_chain_had_sampled_it() -> None:
    chain = agent(sampling=af.Sampling(temperature=1.5, max_tokens=30)).chain(TASK)
    for to_end in (False, True):
        sample = (await chain.sample_turns(3, to_end=to_end)).trajectories[2]
        fork = await chain.fork(number=int(sample.id.rpartition(".")[2]))
        turn = fork.append_sample(sample)
        drawn = await (twin := await chain.fork(number=int(sample.id.rpartition(".")[2]))).sample()
        assert (turn.ids, turn.seed, turn.logprobs) == (drawn.ids, drawn.seed, drawn.logprobs)
        assert (fork.stop, fork.pending_calls, turn.parent) == (twin.stop, twin.pending_calls, chain.turn)
        fork.rewind(0)
        errors.check(lambda: fork.append_sample(chain.snapshot()), af.errors.SettingsError, "then an action")
    chain.force("8", end=False)
    errors.check(lambda: chain.append_sample(sample), af.errors.SettingsError, "must have the turns of this chain")


async def test_samples_share_the_pool_and_nothing_leaks_on_errors_and_cancellation() -> None:
    async with af.Pool(ForkingBox, size=3) as pool:
        script = [put_call("a", "put_forking"), put_call("b", "put_forking"), "5"]
        chain = await stepped(played(script, tools=[put_forking], pools=[pool]).chain(TASK))
        samples = await chain.sample_turns(5)
        assert pool.snapshot().leased == 1 and len(samples) == 5
        ended = await chain.sample_turns(7, to_end=True)  # more samples than the pool has sandboxes
        assert {t.turns[4].text.count("a,b") for t in ended} == {1}
        assert (pool.snapshot().leased, pool.snapshot().waiting) == (1, 0)
        job = asyncio.create_task(chain.sample_turns(7, to_end=True))
        await until(lambda: pool.snapshot().leased == 3)
        job.cancel()
        await errors.check(lambda: job, asyncio.CancelledError)
        assert (pool.snapshot().leased, pool.snapshot().waiting, chain.busy) == (1, 0, False)
        assert (await chain.step()).text.count("a,b") == 1
        await chain.close()
    async with af.Pool(Box, size=2) as pool:
        chain = await stepped(played([put_call("a"), "5"], tools=[put], pools=[pool]).chain(TASK))
        await errors.check(
            lambda: chain.sample_turns(3, to_end=True), af.errors.SandboxError, "holds a Box, which cannot fork"
        )
        assert pool.snapshot().leased == 1
        assert len(await chain.sample_turns(3)) == 3  # needs no sandbox
        chain.force(put_call("b"))
        await errors.check(lambda: chain.sample_turns(3), af.errors.SettingsError, "tool calls have not run yet")
        await chain.close()


async def test_changes_of_task_fields_are_local_to_the_chain() -> None:
    @af.tool(describe="optional")
    def pop(text: Text, stock: af.FromTask[list[str]]) -> str:
        return stock.pop()

    task = af.Task("t", TASK.messages, {"answer": "5", "stock": ["x", "y"]})
    a = played([put_call("", "pop"), put_call("", "pop"), "5"], tools=[pop])
    for _ in range(2):
        t = await a.chain(task).run()
        assert [c.result.observation for c in t.tool_calls if c.result] == ["y", "x"]
    assert task.fields["stock"] == ["x", "y"]


async def test_steps_and_run_give_the_same_chain() -> None:
    by_hand = agent().chain(TASK)
    while by_hand.stop is None:
        await by_hand.step()
    one, two = await by_hand.finish(), await agent().chain(TASK).run()
    assert (one.ids.tolist(), one.reward) == (two.ids.tolist(), two.reward)
    assert one.logprobs.tobytes() == two.logprobs.tobytes()


async def test_subscribers_are_notified_of_every_change() -> None:
    chain = agent(engine=Played([call(), "42"]), chat=chat()).chain(TASK)
    seen: list[tuple[int, str | None, bool]] = []
    end = chain.subscribe(lambda c: seen.append((len(c.turns), c.stop, c.busy)))
    await chain.step()
    turns = [n for n, _, _ in seen]
    assert turns == sorted(turns) and set(turns) == {1, 2, 3}
    assert (seen[0], seen[-1]) == ((1, None, True), (3, None, False))
    chain.rewind(0)
    assert (1, None, False) in seen[-4:]
    fork = await chain.fork()
    seen.clear()
    fork.force("for the fork alone")
    assert seen == []
    chain.force("42")
    assert seen[-1] == (2, "answered", False)
    end()
    end()
    seen.clear()
    await chain.close()
    assert seen == []


LONG = "word " * 20_000


@pytest.mark.parametrize("where", ["prompt", "tool result", "harness"])
async def test_long_messages_are_encoded_while_the_event_loop_runs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for: tasks, tool results, and messages of a harness. Each delayed all chains, past their limits too."""
    begun, goes_on = threading.Event(), threading.Event()
    real = af.Chat.encode

    def encode(self: af.Chat, text: str) -> tuple[int, ...]:
        if LONG in text:
            begun.set()
            assert goes_on.wait(GUARD)
        return real(self, text)

    @af.tool(max_chars=None, describe="optional")
    def look() -> str:
        return LONG

    async def asking(endpoint: af.Endpoint) -> str:
        return str((await endpoint.chat([{"role": "user", "content": LONG}]))["choices"][0]["message"]["content"])

    def looks() -> str:
        return call("", "look").replace('{"expression":""}', "{}")

    monkeypatch.setattr(af.Chat, "encode", encode)
    script = [looks(), "5"] if where == "tool result" else ["5"]
    more: dict[str, Any] = {"harness": asking} if where == "harness" else {"tools": [look]}
    a = af.Agent(af.ScriptedEngine(script), chat=chat(), **more)
    content = LONG if where == "prompt" else "What is 2+3?"

    async def run() -> af.Rollout:
        return await a.rollout([af.Task("t", ({"role": "user", "content": content},))])

    running = asyncio.create_task(run())
    await until(begun.is_set)
    goes_on.set()
    (t,) = (await running).trajectories
    assert (t.stop, t.error, t.final) == ("answered", None, "5")
