"""Chains of a harness: rows, token identity, seeds, stop reasons, and invalid input."""

import asyncio
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import errors
import numpy as np
import pytest
from agents import Played, TextOnly, calculator, call, chat, exact, pass_time, shipped, tasks
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.agent.harness import HarnessChain
from agentfly_kit.endpoint import server
from agentfly_kit.endpoint.reply import ChainEnded

TASK = af.Task("t", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5", "question": "What is 2+3?"})
TOOLS = af.ToolSet([calculator])


async def solve(question: str, endpoint: af.Endpoint) -> str:
    """Run a minimal tool loop that sends the whole history with each request."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    while True:
        message = (await endpoint.chat(messages, TOOLS.schemas))["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for made in message["tool_calls"]:
            arguments = json.loads(made["function"]["arguments"])
            result = await TOOLS.call(af.ToolCall("", made["function"]["name"], arguments), af.Context(TASK))
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result.observation})


def harnessed(harness: Any, script: Any = None, **settings: Any) -> af.Agent:
    engine = Played(script) if script is not None else af.LocalEngine(shipped())
    settings.setdefault("sampling", af.Sampling(max_tokens=64))
    settings.setdefault("reward", exact)
    return af.Agent(engine, chat=chat(), harness=harness, max_turns=settings.pop("max_turns", 4), **settings)


async def run_one(harness: Any, script: Any = None, **settings: Any) -> af.Trajectory:
    return next(iter(await harnessed(harness, script, **settings).rollout([TASK])))


async def test_an_append_only_harness_gives_one_row_with_the_sampled_ids() -> None:
    agent = harnessed(solve, [call("2+3"), "5"])
    (t,) = await agent.rollout([TASK])
    engine: Any = agent.engine
    assert (t.stop, t.final, t.reward, len(t.rows)) == ("answered", "5", 1.0, 1)
    row = t.rows[0]
    # Each prompt is the row up to that request, and the row ends with the last action.
    first, second = (given + gave for given, gave in zip(engine.given, engine.gave, strict=True))
    assert tuple(row.ids) == second and second[: len(first)] == first
    assert tuple(row.ids[row.action_mask]) == engine.gave[0] + engine.gave[1]
    assert [(c.name, c.arguments, c.result.observation) for c in t.tool_calls if c.result] == [
        ("calculator", {"expression": "2+3"}, "5")
    ]
    # The built-in loop of the package gives the same tokens on the same task.
    own = af.Agent(Played([call("2+3"), "5"]), chat=chat(), tools=[calculator], reward=exact, max_turns=4)
    (native,) = await own.rollout([TASK])
    assert tuple(native.ids) == tuple(row.ids) and tuple(native.action_mask) == tuple(row.action_mask)


async def test_the_shipped_policy_is_reproducible_at_any_concurrency() -> None:
    given = [task_with_question(task) for task in tasks(8)]
    runs = [await harnessed(solve).rollout(given, 2, max_concurrency=n) for n in (1, 5, 64)]
    one, *others = [[(tuple(t.ids), t.reward) for t in run] for run in runs]
    assert others == [one, one]
    assert all(t.stop == "answered" or t.truncated or t.stop == "harness_failed" for t in runs[0]), runs[0]
    assert {len(t.rows) for t in runs[0]} == {1}


def task_with_question(task: af.Task) -> af.Task:
    return af.Task(task.id, task.messages, {**task.fields, "question": task.messages[-1]["content"]})


async def test_a_rewritten_history_starts_a_row_and_is_reported() -> None:
    async def rewriting(endpoint: af.Endpoint) -> None:
        text = (await endpoint.chat([{"role": "user", "content": "a"}]))["choices"][0]["message"]["content"]
        await endpoint.chat(
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": f"I said: {text}"},
                {"role": "user", "content": "b"},
            ]
        )

    with pytest.warns(UserWarning, match="history or tools that differ"):
        t = await run_one(rewriting, ["x", "y"])
    assert [tuple(row.ids[row.action_mask]) for row in t.rows] == [
        (*chat().encode("x"), chat().stop_ids[0]),
        (*chat().encode("y"), chat().stop_ids[0]),
    ]
    assert t.final == "y"


async def test_retries_and_choices_branch_with_a_shared_prefix() -> None:
    async def branching(endpoint: af.Endpoint) -> str:
        start = [{"role": "user", "content": "a"}]
        following = [*start, (await endpoint.chat(start))["choices"][0]["message"], {"role": "user", "content": "b"}]
        two = await endpoint.chat(following, n=2)
        # Continue the second choice, which ends a row of its own.
        await endpoint.chat([*following, two["choices"][1]["message"], {"role": "user", "content": "c"}])
        return "done"

    agent = harnessed(branching, ["one", "two", "three", "four"])
    (t,) = await agent.rollout([TASK])
    engine: Any = agent.engine
    assert [len(row) for row in t.rows] == [
        len(engine.given[1]) + len(engine.gave[1]),
        len(engine.given[3]) + len(engine.gave[3]),
    ]
    # Both choices see the same prompt.
    assert engine.given[1] == engine.given[2] and engine.seeds[1] != engine.seeds[2]
    # Each sampled token is trained once, in the row in which it was sampled.
    trained = [tuple(row.ids[row.action_mask]) for row in t.rows]
    assert trained == [engine.gave[0] + engine.gave[1], engine.gave[2] + engine.gave[3]]
    assert t.final == "done"


async def test_parallel_sub_agents_are_reproducible_in_any_order() -> None:
    """Seeds depend on the prompts, so the order in which concurrent requests arrive does not matter."""
    order = random.Random(0)

    async def fan_out(endpoint: af.Endpoint) -> str:
        async def one(question: str) -> str:
            await asyncio.sleep(order.random() * 0.01)
            answer = await endpoint.chat([{"role": "user", "content": question}], TOOLS.schemas)
            return str(answer["choices"][0]["message"]["content"])

        await asyncio.gather(*(one(f"What is {i}+3?") for i in range(4)))
        return "5"

    async def sampled() -> dict[tuple[int, ...], tuple[int, ...]]:
        (t,) = await harnessed(fan_out).rollout([TASK])
        return {tuple(row.ids[~row.action_mask]): tuple(row.ids[row.action_mask]) for row in t.rows}

    first = await sampled()
    assert len(first) == 4
    for _ in range(3):
        assert await sampled() == first


async def test_roles_are_authors_and_other_model_names_are_the_agent() -> None:
    async def roles(endpoint: af.Endpoint) -> str:
        for model in ("policy/writer", "gpt-4o", "policy"):
            await endpoint.chat([{"role": "user", "content": model}], model=model)
        return "5"

    t = await run_one(roles, ["a", "b", "c"])
    assert [turn.author for turn in t.turns if turn.kind == "action"] == ["writer", "policy", "policy"]
    assert int(np.concatenate([row.sampled_by("writer") for row in t.rows]).sum()) == 2


# --- ends ------------------------------------------------------------------------------------------


async def test_an_error_after_the_first_action_is_scored_and_one_before_it_is_not() -> None:
    async def early(endpoint: af.Endpoint) -> str:
        raise ValueError("no model")

    async def late(question: str, endpoint: af.Endpoint) -> str:
        await endpoint.chat([{"role": "user", "content": question}])
        raise ValueError("cannot parse")

    t = await run_one(early, ["5"])
    assert (t.stop, t.reward) == ("error", None) and t.error is not None and "no model" in t.error.message
    t = await run_one(late, ["5"])
    assert (t.stop, t.reward, t.final) == ("harness_failed", 0.0, None)
    assert t.error is not None and 'raise ValueError("cannot parse")' in t.error.traceback


async def test_a_limit_ends_the_chain_although_the_harness_goes_on() -> None:
    attempts = 0

    async def endless(endpoint: af.Endpoint) -> str:
        nonlocal attempts
        while attempts < 50:
            attempts += 1
            try:
                await endpoint.chat([{"role": "user", "content": "again"}])
            except ChainEnded:
                await asyncio.sleep(0)
        return "5"

    t = await run_one(endless, ["x"] * 9, max_turns=3)
    assert (t.stop, t.reward, t.final, len(t.actions), len(t.rows)) == ("max_turns", 0, None, 3, 3)
    assert attempts < 50  # cancelled


async def test_actions_may_be_cut_and_the_token_limit_of_the_chain_ends_it() -> None:
    """A cut action is continued with the end of turn that it lacks; the last one is recorded, but not sent."""
    reasons = []

    async def goes_on(endpoint: af.Endpoint) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2+3?"}]
        while True:
            (choice,) = (await endpoint.chat(messages, TOOLS.schemas))["choices"]
            reasons.append(choice["finish_reason"])
            messages += [choice["message"], {"role": "user", "content": "go on"}]

    t = await run_one(goes_on, sampling=af.Sampling(max_tokens=3), max_tokens=8)
    assert (t.stop, t.reward, t.final, len(t.rows), reasons) == ("chain_tokens", 0, None, 1, ["length"] * 2)
    assert [(turn.stop, turn.num_tokens) for turn in t.actions] == [("length", n) for n in (3, 3, 2)]
    assert t.turns[2].text.startswith("<|im_end|>") and af.collate([t], [1.0]).mask.sum() == 8


async def test_a_failed_engine_is_not_the_models_fault() -> None:
    t = await run_one(solve, [call("2+3"), RuntimeError("out of memory")])
    assert (t.stop, t.reward) == ("error", None)
    assert t.error is not None and t.error.where == "engine" and "out of memory" in t.error.message


async def test_returning_nothing_means_the_last_action_and_other_values_become_text() -> None:
    async def silent(endpoint: af.Endpoint) -> None:
        await endpoint.chat([{"role": "user", "content": "a"}])

    assert (await run_one(silent, ["5"])).final == "5"

    async def number(endpoint: af.Endpoint) -> int:
        await endpoint.chat([{"role": "user", "content": "a"}])
        return 5

    t = await run_one(number, ["no"])
    assert (t.final, t.reward, t.turns[-1].author, t.turns[-1].ids) == ("5", 1.0, "harness", ())

    async def neither(endpoint: af.Endpoint) -> object:
        await endpoint.chat([{"role": "user", "content": "a"}])
        return object()

    t = await run_one(neither, ["no"])
    assert (t.stop, t.final) == ("harness_failed", None) and t.error is not None and "object" in t.error.message


async def test_a_hanging_harness_ends_with_the_time_limit_and_leaves_nothing() -> None:
    async def hanging(endpoint: af.Endpoint) -> str:
        answers.append(await endpoint.chat([{"role": "user", "content": "a"}]))
        if len(answers) == 8:
            pass_time(GUARD)
        await asyncio.Event().wait()
        return "5"

    answers: list[Any] = []
    before = asyncio.all_tasks()
    rollout = await harnessed(hanging, ["x"], timeout=GUARD).rollout([TASK], 8)
    assert {t.stop for t in rollout} == {"timeout"} and {t.reward for t in rollout} == {0.0}
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_request_in_flight_is_cancelled_when_the_harness_returns() -> None:
    errors: list[BaseException] = []
    asked = asyncio.Event()

    async def script(task: af.Task, turn: int) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "x"

    async def leaving(endpoint: af.Endpoint) -> str:
        async def forgotten() -> None:
            try:
                await endpoint.chat([{"role": "user", "content": "slow"}])
            except BaseException as error:
                errors.append(error)

        running.append(asyncio.ensure_future(forgotten()))
        await asked.wait()
        return "5"

    running: list[asyncio.Task[None]] = []
    (t,) = await af.Agent(af.ScriptedEngine(script), chat=chat(), harness=leaving, reward=exact).rollout([TASK])
    assert (t.stop, t.reward, len(t.actions)) == ("answered", 1.0, 0)
    await asyncio.wait(running)
    assert [type(error) for error in errors] == [ChainEnded]


# --- settings and bad input -------------------------------------------------------------------------


async def test_a_text_only_engine_is_evaluated_and_not_trained() -> None:
    engine = TextOnly([call("2+3"), "5"])
    (t,) = await af.Agent(engine, chat=chat(), harness=solve, reward=exact).rollout([TASK])
    assert (t.reward, len(t.rows), t.exact) == (1.0, 1, False)
    assert engine.given[1][-1] == "5", "the result of the tool"
    errors.check(lambda: af.collate([t], [1.0]), af.errors.BatchError, "must have token ids to be trained on")


def test_an_error_of_a_harness_does_not_give_the_hint_for_rewards() -> None:
    with pytest.raises(af.errors.SettingsError, match="base_url") as caught:
        harnessed(lambda question, base_url: "5", [])
    assert "TRL" not in str(caught.value)


async def test_a_misspelled_task_field_is_rejected_before_a_run_starts(tmp_path: Path) -> None:
    async def wants(anser: str, endpoint: af.Endpoint) -> str:
        return anser

    policy = af.tiny.policy("calculator")
    agent = harnessed(wants, ["5"]).replace(engine=af.LocalEngine(policy), chat=policy.chat)
    for start in (
        lambda: agent.chain(TASK),
        lambda: agent.rollout([TASK]),
        lambda: af.evaluate(agent, [TASK]),
        lambda: af.train(agent, policy, [TASK], af.TrainConfig(steps=1), run=tmp_path / "run"),
    ):
        await errors.check(
            start, af.errors.TaskError, re.compile(r"requires the field 'anser', which .*; did you mean 'answer'")
        )
    assert not (tmp_path / "run").exists()


async def test_editing_methods_are_refused() -> None:
    chain = harnessed(solve, ["5"]).chain(TASK)
    assert isinstance(chain, HarnessChain)
    for name in ("force", "observe", "compact", "sample", "act", "rewind", "fork"):
        errors.check(lambda name=name: getattr(chain, name), AttributeError, "no attribute")
    assert (await chain.reply([{"role": "user", "content": "hi"}])).text == "5"
    assert (await chain.finish()).stop == "cancelled"


# --- threads and clients ---------------------------------------------------------------------------


async def test_a_sync_harness_runs_in_a_thread_and_does_not_block_other_chains() -> None:
    import urllib.request

    together = threading.Barrier(4, timeout=GUARD)

    def plain(endpoint: af.Endpoint) -> str:
        together.wait()  # passes only if all chains run at the same time
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body)) as got:
            return str(json.load(got)["choices"][0]["message"]["content"])

    rollout = await harnessed(plain, ["5"]).rollout([TASK], 4)
    assert [t.reward for t in rollout] == [1.0] * 4, [t.error for t in rollout]


async def test_a_client_that_leaves_does_not_end_the_chain() -> None:
    async def impatient(endpoint: af.Endpoint) -> str:
        start = [{"role": "user", "content": "a"}]
        left = asyncio.ensure_future(endpoint.chat(start))
        await until(lambda: engine.calls)
        left.cancel()
        return str((await endpoint.chat(start))["choices"][0]["message"]["content"])

    class SlowAtFirst(Played):
        calls = 0

        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                await asyncio.Event().wait()
            return await super().sample(*args, **kwargs)

    engine = SlowAtFirst(["5"])
    (t,) = await af.Agent(engine, chat=chat(), harness=impatient, reward=exact).rollout([TASK])
    assert (t.stop, t.reward, len(t.actions)) == ("answered", 1.0, 1)
    assert sum(int(row.action_mask.sum()) for row in t.rows) == len(chat().encode("5")) + 1


async def test_an_action_is_recorded_only_if_a_client_receives_it() -> None:
    ask = [{"role": "user", "content": "a"}]
    for passes in range(1, 20):  # of the event loop, until the first request is cancelled

        async def leaving(endpoint: af.Endpoint, passes: int = passes) -> str:
            left = asyncio.ensure_future(endpoint.chat(ask))
            for _ in range(passes):
                await asyncio.sleep(0)
            left.cancel()
            (received,) = await asyncio.gather(left, return_exceptions=True)
            await endpoint.chat(ask)
            return str(1 + isinstance(received, dict))

        t = await harnessed(leaving, ["5", "5"]).chain(TASK).run()
        assert (t.final, t.error) == (str(len(t.actions)), None), passes


async def test_an_endpoint_is_closed_whenever_its_chain_is_cancelled() -> None:
    for passes in range(12):  # of the event loop, after the harness has ended
        endpoints: list[af.Endpoint] = []
        ended = asyncio.Event()

        async def asking(endpoint: af.Endpoint, known: Any = endpoints, ended: Any = ended) -> None:
            assert endpoint.base_url  # starts a server
            known.append(endpoint)
            ended.set()

        running = asyncio.ensure_future(harnessed(asking, ["5"]).chain(TASK).run())
        await ended.wait()
        for _ in range(passes):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        errors.check(lambda known=endpoints: known[0].base_url, af.errors.SettingsError, "the endpoint is closed")
        assert asyncio.get_running_loop() not in server._servers, passes
