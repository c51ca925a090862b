"""Faults around a harness: random requests, interrupts, hanging threads, two event loops, ended chains."""

import asyncio
import contextlib
import copy
import itertools
import json
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import dice
import errors
import pytest
from agents import Box, Played, chat, exact, pass_time
from cancelling import tasks_left
from kernels import interrupted, kernel, run_cell, start_cell
from test_chat import with_template
from test_harness import TASK, harnessed, solve
from test_trajectory_rows import REWRITES
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.endpoint.reply import RequestError

FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
VALID: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy/x",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "n": 1,
        "stop": ["x"],
        "max_tokens": 5,
        "stream": False,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logprobs": True,
    },
    "responses": {
        "model": "policy",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "stream": True,
        "max_output_tokens": 5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
    },
    "messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a", "signature": ""},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "text"}},
        "stream": True,
    },
    "completions": {
        "model": "policy",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "stop": ["x"],
        "n": 1,
        "logprobs": 1,
        "stream": True,
        "return_token_ids": True,
    },
}
VALID["messages/count_tokens"] = VALID["messages"]
# Stands for 700 nested lists, which Python could not copy.
NESTED = "@nested"
JUNK: list[Any] = [
    None, True, -1, 0, 0.5, 10**30, float("nan"), "", "a", "\ud800", "policy/", "assistant", "tool", "image_url",
    "{", "[1]", "NaN", '{"a": NaN}', "[" * 5000 + "]" * 5000, [], {}, [[]], [{}], [None], {"a": [1]}, NESTED,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, part in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(part, (*path, key))


def mutated(body: Any, rng: random.Random) -> bytes:
    """Return a valid body in which one to three values are replaced or removed."""
    body = copy.deepcopy(body)
    for _ in range(rng.randrange(1, 4)):
        *path, last = rng.choice([path for path in places(body) if path])
        at = body
        for key in path:
            at = at[key]
        if isinstance(at, dict) and rng.random() < 0.2:
            del at[last]
        else:
            at[last] = copy.deepcopy(rng.choice(JUNK))
    return json.dumps(body).replace(f'"{NESTED}"', "[" * 700 + "]" * 700).encode()


@pytest.mark.filterwarnings("ignore:the harness")
@pytest.mark.parametrize("count", [300, pytest.param(12_000, marks=pytest.mark.long)])
async def test_random_requests_never_fail_the_server(count: int) -> None:
    """Each status is 200 or 400, which clients do not retry. Chains end only if the template fails."""
    seed = dice.seed()
    statuses: Counter[int] = Counter()
    answered: Counter[str] = Counter()
    number = itertools.count()

    async def fuzzing(endpoint: af.Endpoint) -> str:
        rng = random.Random(f"{seed} {next(number)}")
        for _ in range(20):
            kind = rng.choice(list(VALID))
            answer = await endpoint.handle("POST", f"/v1/{kind}", mutated(VALID[kind], rng))
            statuses[answer.status] += 1
            answered[kind] += answer.status == 200
        return "5"

    rollout = await harnessed(fuzzing, lambda task, turn: "x", max_turns=1000).rollout([TASK], count // 20)
    print(statuses, answered, Counter(t.stop for t in rollout))
    assert set(statuses) == {200, 400} and statuses.total() > 0.9 * count, statuses
    failed = [t for t in rollout if t.stop != "answered"]
    assert len(failed) < 0.2 * len(rollout)
    assert {t.error and (t.error.where, t.error.type) for t in failed} <= {("chat", "ChatTemplateError")}, failed
    assert min(answered.values()) > 0 and statuses[200] > count // 10
    assert sum(len(t.actions) for t in rollout) >= statuses[200] - answered["messages/count_tokens"]


# --- ends that the harness does not choose -----------------------------------------------------------


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_an_interrupt_in_a_harness_is_clean_and_the_agent_can_go_on(where: str) -> None:
    """Chains that have ended are kept in `partial`, no task or lease is left, and the same agent works afterwards."""
    pool, armed = af.Pool(Box, size=2), [3]
    handles: list[Any] = []

    async def on_loop(question: str, endpoint: af.Endpoint, box: Box) -> str:
        armed[0] -= 1
        if armed[0] == 0:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        return await solve(question, endpoint)

    def in_thread(endpoint: af.Endpoint, box: Box) -> str:
        armed[0] -= 1
        if armed[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return "5"

    agent = harnessed(on_loop if where == "loop" else in_thread, lambda task, turn: "5", pools=[pool])

    async def main() -> None:
        handles.append(agent.rollout([TASK], 8, max_concurrency=1))
        await handles[0]

    errors.check(lambda: asyncio.run(main()), KeyboardInterrupt)
    assert [t.reward for t in handles[0].partial] == [1.0] * len(handles[0].partial) and len(handles[0].partial) >= 1
    assert (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0)
    assert [t.reward for t in asyncio.run(agent.rollout([TASK], 4))] == [1.0] * 4
    asyncio.run(pool.close())


CELL = """
import asyncio
import agentfly_kit as af
hang = True
async def solve(endpoint):
    answer = await endpoint.chat([{"role": "user", "content": "a"}])
    if hang:
        print("in", flush=True)
        await asyncio.sleep(3600)
    return answer["choices"][0]["message"]["content"]
def exact(final, answer):
    return float(final == answer)
chat = af.tiny.policy("calculator").chat
agent = af.Agent(af.ScriptedEngine(lambda task, turn: "5"), chat=chat, harness=solve, reward=af.reward(exact))
task = af.Task("t", ({"role": "user", "content": "a"},), {"answer": "5"})
"""
LEFT = """
hang = False
packages = ("/agentfly_kit/agent/", "/agentfly_kit/endpoint/", "/agentfly_kit/_async/")
tasks = [t for t in asyncio.all_tasks() if any(part in repr(t) for part in packages)]
print(len(tasks), [t.reward for t in await agent.rollout([task], 4)])
"""


@pytest.mark.real
def test_an_interrupted_cell_leaves_no_task_of_a_harness() -> None:
    with kernel() as (manager, client):
        run_cell(client, CELL)
        interrupted(manager, client, start_cell(client, "await agent.rollout([task], 1)"))
        assert run_cell(client, LEFT) == "0 [1.0, 1.0, 1.0, 1.0]\n"


async def test_a_thread_that_hangs_is_left_and_its_sandbox_is_free() -> None:
    release, pool = threading.Event(), af.Pool(Box, size=2)
    began: list[Box] = []
    late: list[tuple[int, str | None]] = []

    def hanging(endpoint: af.Endpoint, box: Box) -> str:
        began.append(box)
        release.wait(GUARD)
        try:
            asyncio.run(endpoint.chat([{"role": "user", "content": "late"}]))
        except RequestError as error:
            late.append((error.status, error.code))
        return "5"

    async def quick(box: Box, endpoint: af.Endpoint) -> str:
        return "5"

    agent = harnessed(hanging, ["x"], timeout=GUARD, pools=[pool])
    try:
        running = asyncio.ensure_future(agent.rollout([TASK], 2))
        await until(lambda: len(began) == 2)
        pass_time(GUARD)
        with pytest.warns(UserWarning, match="a thread, which cannot be stopped, so it continues after its chain"):
            rollout = await running
        assert [(t.stop, t.reward) for t in rollout] == [("timeout", 0.0)] * 2
        assert [t.reward for t in await agent.replace(harness=quick).rollout([TASK], 4)] == [1.0] * 4
        assert late == []
    finally:
        release.set()
    # A request after the end of the chain is rejected with a status that clients do not retry.
    await until(lambda: len(late) == 2)
    assert set(late) == {(404, "unknown_key")}
    await until(lambda: not tasks_left())
    await pool.close()


async def test_cancelled_chains_leave_no_task_socket_or_lease() -> None:
    """64 chains are cancelled while the policy answers a request over HTTP."""
    pool = af.Pool(Box, size=64)
    urls: list[str] = []

    class Slow(Played):
        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            self.given.append(())
            await asyncio.sleep(3600)

    async def over_http(endpoint: af.Endpoint, box: Box) -> str:
        urls.append(endpoint.base_url)
        async with aiohttp.ClientSession() as client:
            body = {"messages": [{"role": "user", "content": "a"}]}
            async with client.post(f"{endpoint.base_url}/chat/completions", json=body) as got:
                return str(got.status)

    engine = Slow([])
    agent = af.Agent(engine, chat=chat(), harness=over_http, reward=exact, pools=[pool])
    running = asyncio.ensure_future(agent.rollout([TASK], 64))
    await until(lambda: len(engine.given) == 64)
    running.cancel()
    await errors.check(lambda: running, asyncio.CancelledError)
    await until(lambda: not tasks_left())
    assert (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0)
    port = int(urls[0].split(":")[2].partition("/")[0])
    await errors.check(
        lambda: asyncio.open_connection("127.0.0.1", port), OSError, re.compile(r"refused|Connect call failed")
    )
    await pool.close()


# --- loops and values --------------------------------------------------------------------------------


def test_two_event_loops_have_servers_of_their_own() -> None:
    """A harness in a thread has a loop of its own, and two threads run rollouts at the same time."""
    meet = threading.Barrier(2, timeout=GUARD)
    ports: set[str] = set()
    found: dict[str, list[str | None]] = {}

    def own_loop(endpoint: af.Endpoint) -> str:
        async def asks() -> str:
            messages = [{"role": "user", "content": "a"}]
            await endpoint.chat(messages)
            async with aiohttp.ClientSession() as client:
                async with client.post(f"{endpoint.base_url}/chat/completions", json={"messages": messages}) as got:
                    return str((await got.json())["choices"][0]["message"]["content"])

        ports.add(endpoint.base_url.split(":")[2].partition("/")[0])
        meet.wait()
        return asyncio.run(asks())

    def runs(name: str) -> None:
        agent = harnessed(own_loop, lambda task, turn: name)
        found[name] = [t.final for t in asyncio.run(agent.rollout([TASK]))]

    threads = [threading.Thread(target=runs, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    assert found == {"one": ["one"], "two": ["two"]} and len(ports) == 2


async def test_nan_in_the_arguments_of_a_call_is_text(tmp_path: Any) -> None:
    """NaN is not JSON: the action is answered as text, and the rollout can be saved."""
    replies: list[Any] = []

    async def asks(endpoint: af.Endpoint) -> None:
        got = await endpoint.handle(
            "POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'
        )
        replies.append(json.loads(got.body)["choices"][0])
        assert b"NaN" not in got.body.replace(b'NaN}}</tool_call>"', b"")

    bad = '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>'
    rollout = await harnessed(asks, [bad]).rollout([TASK])
    assert "tool_calls" not in replies[0]["message"] and "NaN" in replies[0]["message"]["content"]
    assert af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))[0].messages == rollout[0].messages


async def test_a_full_context_ends_the_chain_and_is_scored() -> None:
    async def long(endpoint: af.Endpoint) -> None:
        for _ in range(3):
            with contextlib.suppress(RequestError):
                await endpoint.chat([{"role": "user", "content": "1+2+" * 400}])

    (t,) = await harnessed(long).rollout([TASK])
    assert (t.stop, t.reward, len(t.actions)) == ("context_full", 0.0, 0)


async def test_a_template_that_rewrites_history_starts_a_row_with_the_rendered_history() -> None:
    """Sampled tokens are trained as they were sampled, also if a request goes back to an earlier action."""
    rewriting = af.Chat(with_template(REWRITES), history="rerender")

    async def asks(endpoint: af.Endpoint) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for _ in range(3):
            messages.append((await endpoint.chat(messages))["choices"][0]["message"])
            messages.append({"role": "user", "content": "b"})
        await endpoint.chat([*messages[:4], {"role": "user", "content": "c"}])

    engine = Played(["one", "two", "three", "four"])
    (t,) = await af.Agent(engine, chat=rewriting, harness=asks, max_turns=9).rollout([TASK])
    for row, given, gave in zip(t.rows, engine.given, engine.gave, strict=True):
        assert row.ids.tolist() == [*given, *gave] and row.ids[row.action_mask].tolist() == list(gave)
        assert given == rewriting.prompt([m for turn in row.turns[:1] for m in turn.messages])
    errors.check(
        lambda: af.Chat(with_template(REWRITES)).observation_ids([{"role": "user", "content": "b"}]),
        af.errors.ChatTemplateError,
        "does not allow appending a user's message",
    )
