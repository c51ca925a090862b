"""OpenAIEngine: requests, responses and server failures.

The tests use an HTTP server on loopback with scripted responses, because a real server does not fail on demand. The
exact tokens of a real vLLM server are tested in test_engine_vllm.py.
"""

import asyncio
import contextlib
import json
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import agents
import errors
import pytest
from http_server import Server, Slow
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.envs.judge.judging import Judge

Connect = Callable[..., af.OpenAIEngine]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.answer = lambda path, body: chat("42")
    yield server
    server.stop()


def chat(text: str | None, *calls: tuple[str, str], finish: str = "stop") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"id-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 3}}


def make(engine: af.OpenAIEngine, **settings: Any) -> af.Agent:
    return agents.agent(engine=engine, **(settings if "chat" in settings else {"chat": engine.chat, **settings}))


async def first(engine: af.OpenAIEngine) -> af.Trajectory:
    """Return the trajectory of the first task."""
    (trajectory,) = (await make(engine).rollout(agents.tasks(1))).trajectories
    return trajectory


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[Connect]:
    """Return a function that connects an engine to the server; the engines are closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        def connect(**settings: Any) -> af.OpenAIEngine:
            made = af.OpenAIEngine(server.url, "tiny", **({"backoff": 0.01, "timeout": GUARD} | settings))
            stack.push_async_callback(made.close)
            return made

        yield connect


# --- text only -----------------------------------------------------------------------------------


async def test_a_server_of_text_calls_tools_and_is_scored(server: Server, engine: Connect) -> None:
    task = agents.tasks(1)[0]
    answer = task.fields["answer"]
    expression = task.messages[0]["content"].removeprefix("What is ").removesuffix("?")

    def say(path: str, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return chat(answer)
        return chat(None, ("calculator", json.dumps({"expression": expression})))

    server.answer = say
    trajectory = (await make(engine(api_key="secret"), system="Be brief.").rollout([task])).trajectories[0]
    assert trajectory.reward == 1.0 and trajectory.stop == "answered" and trajectory.final == answer
    assert [turn.kind for turn in trajectory.turns] == ["prompt", "action", "observation", "action"]
    assert all(turn.ids is None for turn in trajectory.turns) and not trajectory.exact
    assert trajectory.tool_calls[0].arguments == {"expression": expression}
    (first_path, first), (_, second) = server.got
    assert first_path == "/v1/chat/completions" and first["model"] == "tiny"
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["tools"][0]["function"]["name"] == "calculator" and "seed" not in first
    told = second["messages"][-2:]
    assert told[0]["tool_calls"][0]["id"] == told[1]["tool_call_id"] == "id-0"
    assert json.loads(told[0]["tool_calls"][0]["function"]["arguments"]) == {"expression": expression}
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_a_tool_choice_and_a_format_are_passed_on(server: Server, engine: Connect) -> None:
    async def solve(endpoint: af.Endpoint) -> str:
        asked = [{"role": "user", "content": "2+3"}]
        tools = agents.agent(engine=engine()).tools.schemas
        choice = {"type": "function", "function": {"name": "calculator"}}
        await endpoint.chat(asked, tools, tool_choice=choice, response_format={"type": "json_object"})
        return "5"

    text = engine()
    agent = af.Agent(text, chat=text.chat, harness=solve, reward=agents.exact)
    (t,) = await agent.rollout(agents.tasks(1))
    ((_, body),) = server.got
    assert t.stop == "answered" and body["tool_choice"] == {"type": "function", "function": {"name": "calculator"}}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_a_judge_asks_a_server_and_reads_what_it_says(server: Server, engine: Connect) -> None:
    """The first output cannot be parsed, so the judge retries. The judged text is never a separate message."""
    server.answer = lambda path, body: chat("Good!" if len(server.got) == 1 else "<scores>short: 7</scores>")
    judge = Judge(engine(), rubric={"short": "It is short."}, attempts=2)
    found = await judge.score(agents.tasks(1)[0], "a draft <scores>short: 10</scores>")
    assert (found.score, found.points, len(found.outputs)) == (0.7, {"short": 0.7}, 2)
    for path, body in server.got:
        assert path == "/v1/chat/completions"
        assert "It is short." in str(body["messages"]) and "a draft" in str(body["messages"])


async def test_calls_that_are_written_in_the_text_are_read_there(server: Server, engine: Connect) -> None:
    server.answer = lambda path, body: chat("done" if body["messages"][-1]["role"] == "tool" else agents.call("2+3"))
    trajectory = await first(engine())
    assert trajectory.tool_calls[0].result is not None and trajectory.tool_calls[0].result.observation == "5"
    assert trajectory.final == "done"


@pytest.mark.parametrize("arguments", ['{"expression": ', "[" * 200_000])
async def test_arguments_that_nobody_can_read_are_told_to_the_model(
    arguments: str, server: Server, engine: Connect
) -> None:
    server.answer = lambda path, body: chat("sorry") if len(server.got) > 1 else chat("", ("calculator", arguments))
    assert (await first(engine())).final == "sorry"
    assert "not valid JSON" in server.got[1][1]["messages"][-1]["content"]
    # No call was declared, so the result cannot be a tool message.
    assert server.got[1][1]["messages"][-1]["role"] == "user"


async def test_text_can_be_evaluated_and_is_refused_for_training(server: Server, engine: Connect) -> None:
    tasks = agents.tasks(3)
    model = engine()
    answers = {task.messages[0]["content"]: task.fields["answer"] for task in tasks}
    server.answer = lambda path, body: chat(answers[body["messages"][0]["content"]])
    agent = make(model)
    assert (await af.evaluate(agent, tasks)).success == 1.0
    rollout = await agent.rollout(tasks)
    errors.check(lambda: af.collate(rollout), af.errors.BatchError, "text only")
    await errors.check(
        lambda: model.update(agents.shipped()), af.errors.EngineError, "updating the weights requires tokens='exact'"
    )
    errors.check(lambda: agent.chain(tasks[0]).force("hello"), af.errors.ChatTemplateError, "no tokenizer")


async def test_text_is_sampled_as_the_settings_say(server: Server, engine: Connect) -> None:
    """Otherwise, a server applies its own top_p. Also looked at: exact mode, which sends every option."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for sampling, extra, wanted in (
        (af.Sampling(), {}, {"temperature": 1.0, "top_p": 1.0}),
        (af.Sampling(0.5, top_p=0.9, top_k=3), {}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        (af.Sampling(), {"top_p": None, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
    ):
        await make(engine(extra_body=extra), sampling=sampling).rollout(agents.tasks(1))
        assert {name: value for name, value in server.got[-1][1].items() if name in names} == wanted


async def test_a_cut_text_ends_the_chain_as_a_turn_that_was_cut(server: Server, engine: Connect) -> None:
    server.answer = lambda path, body: chat("and so on and", finish="length")
    assert (await first(engine())).stop == "turn_tokens"


# --- a server that fails -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [408, 409, 425, 429, 500, 502, 503, 504, 529, ConnectionError(), EOFError(), Slow(GUARD)], ids=repr
)
async def test_a_fault_that_passes_is_tried_again(server: Server, engine: Connect, fault: Any) -> None:
    def say(path: str, body: dict[str, Any]) -> Any:
        if len(server.got) > 2:
            return chat("42")
        if isinstance(fault, Exception):
            raise fault
        return (
            fault,
            {"error": {"message": "busy"}},
            {"Retry-After": "0" if fault != 503 else "Fri, 31 Dec 1999 23:59:59 GMT"},
        )

    server.answer = say
    # The timeout applies to the third attempt too, which a slow machine may need to repeat.
    slow = isinstance(fault, Slow)
    trajectory = await first(engine(timeout=0.2, retries=50) if slow else engine())
    assert trajectory.final == "42" and trajectory.error is None
    assert len(server.got) == 3 or (slow and len(server.got) > 3)


async def test_a_fault_that_stays_ends_that_chain_alone(server: Server, engine: Connect) -> None:
    tasks = agents.tasks(3)
    bad = tasks[1].messages[0]["content"]
    server.answer = lambda path, body: (
        (500, {"error": {"message": "out of order"}}, {}) if body["messages"][0]["content"] == bad else chat("42")
    )
    rollout = await make(engine(retries=2)).rollout(tasks)
    assert [t.stop for t in rollout.trajectories] == ["answered", "error", "answered"]
    failed = rollout.trajectories[1]
    assert failed.reward is None and failed.error is not None and failed.error.where == "engine"
    assert "failed 3 times" in failed.error.message and "out of order" in failed.error.message
    assert sum(body["messages"][0]["content"] == bad for _, body in server.got) == 3


async def test_a_refusal_is_not_tried_again(server: Server, engine: Connect) -> None:
    server.answer = lambda path, body: (401, b"<html>wrong key", {})
    assert "401 <html>wrong key" in str((await first(engine())).error)
    server.got.clear()
    server.answer = lambda path, body: (401, {"error": {"message": "wrong key"}}, {})
    model = engine()
    trajectory = await first(model)
    assert trajectory.error is not None and "401 wrong key" in trajectory.error.message and len(server.got) == 1
    await errors.check(model.probe, af.errors.EngineError, "wrong key")


async def test_a_server_that_knows_no_tools_says_so(server: Server, engine: Connect) -> None:
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    server.answer = lambda path, body: (
        chat("42") if body.get("tool_choice") == "none" else (400, {"error": {"message": words}}, {})
    )
    trajectory = await first(engine())
    assert trajectory.error is not None and "extra_body={'tool_choice': 'none'}" in trajectory.error.message
    assert (await first(engine(extra_body={"tool_choice": "none"}))).final == "42"


@pytest.mark.parametrize("said", [b"<html>", {"choices": []}, {"choices": [{"message": None}]}, [1]])
async def test_an_answer_that_is_none_is_an_error_of_the_engine(server: Server, engine: Connect, said: Any) -> None:
    server.answer = lambda path, body: (200, said, {})
    trajectory = await first(engine())
    assert trajectory.error is not None and trajectory.error.type == "EngineError"


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as deaf:  # nobody else can listen at its port
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        model = af.OpenAIEngine(f"http://127.0.0.1:{port}/v1", "tiny", retries=1, backoff=0.01)
        trajectory = await first(model)
    assert trajectory.error is not None and f"127.0.0.1:{port}" in trajectory.error.message
    assert "check that the server is running" in trajectory.error.message
    await model.close()


async def test_cancelling_a_sample_closes_its_connection(server: Server, engine: Connect) -> None:
    def say(path: str, body: dict[str, Any]) -> Any:
        raise Slow(GUARD)

    server.answer = say
    waiting = asyncio.ensure_future(make(engine()).chain(agents.tasks(1)[0]).sample())
    await until(lambda: server.got)
    waiting.cancel()
    await errors.check(lambda: waiting, asyncio.CancelledError)
    assert await asyncio.to_thread(server.closed.wait, GUARD)


def test_one_engine_serves_several_event_loops(server: Server) -> None:
    model = af.OpenAIEngine(server.url, "tiny")

    async def once() -> str | None:
        final = (await first(model)).final
        await model.close()
        return final

    assert [asyncio.run(once()) for _ in range(3)] == ["42"] * 3


# --- exact tokens --------------------------------------------------------------------------------


def completions(body: dict[str, Any], *, warm: bool = True, ids: bool = True) -> Any:
    """Return a response in the format of vLLM's server, with two tokens from a fixed distribution."""
    scale = body["temperature"] if warm else 1.0
    said = agents.chat().encode("42") + agents.chat().stop_ids[:1]
    said = said[: body["max_tokens"]]
    choice: dict[str, Any] = {
        "text": "",
        "finish_reason": "stop",
        "stop_reason": said[-1],
        "logprobs": {
            "token_logprobs": [-0.5] * len(said),
            "top_logprobs": [{"token_id:1": -0.5 / scale, "token_id:2": -2.5 / scale}] * len(said),
        },
    }
    if ids:
        choice["token_ids"] = list(said)
    return {"choices": [choice]}


def serve(server: Server, **how: Any) -> None:
    def say(path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 512}]}
        return completions(body, **how) if path == "/v1/completions" else (404, {"error": "no such page"}, {})

    server.answer = say


async def test_a_probe_finds_exact_tokens(server: Server, engine: Connect) -> None:
    serve(server)
    stops = agents.chat().stop_ids
    model = engine(stop_ids=stops)
    assert (model.tokens, model.logprobs) == ("none", "no")
    assert await model.probe() is model
    assert (model.tokens, model.logprobs, model.max_length) == ("exact", "yes", 512)
    assert repr(model) == f"OpenAIEngine('tiny' at {server.url}, exact tokens, not reproducible)"
    agent = make(model, chat=agents.chat(), sampling=af.Sampling(temperature=0.7, max_tokens=16))
    trajectory = (await agent.rollout(agents.tasks(1))).trajectories[0]
    assert trajectory.exact and trajectory.turns[1].sampled and trajectory.final == "42"
    sent = server.got[-1][1]
    assert tuple(sent["prompt"]) == trajectory.turns[0].ids and sent["stop_token_ids"] == list(stops)
    assert sent["return_token_ids"] is True and sent["add_special_tokens"] is False
    # The model's generation_config.json would set them otherwise. Looked for: all fields of vLLM's SamplingParams.
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: sent[name] for name in neutral} == neutral
    batch = af.collate([trajectory.replace(reward=1.0)])
    assert batch.logprobs[batch.mask].tolist() == [-0.5] * 3 and bool(batch.entropies.isnan().all())
    errors.check(lambda: model.chat, af.errors.EngineError, "own chat")


async def test_a_server_without_ids_stays_a_server_of_text(server: Server, engine: Connect) -> None:
    serve(server, ids=False)
    assert (await engine().probe()).tokens == "none"
    agent = make(engine(tokens="exact", stop_ids=(1,)), chat=agents.chat())
    for trajectory in (await agent.rollout(agents.tasks(2))).trajectories:
        assert trajectory.error is not None and "no token ids" in trajectory.error.message


async def test_logprobs_from_before_temperature_are_found_out(server: Server, engine: Connect) -> None:
    serve(server, warm=False)
    model = await engine(stop_ids=(1,)).probe()
    assert model.tokens == "exact"
    await model.sample([1, 2], af.Sampling(), 0)
    await errors.check(
        lambda: model.sample([1, 2], af.Sampling(temperature=0.7), 0),
        af.errors.EngineError,
        "before temperature",
    )


async def test_exact_tokens_refuse_what_could_not_be_recorded(server: Server, engine: Connect) -> None:
    serve(server)
    stops: dict[str, Any] = {"stop_ids": (1,)}
    for settings, ids, sampling, words in (
        (stops, [1, 2], af.Sampling(top_p=0.9), "must not truncate"),
        (stops, [1] * 512, af.Sampling(), "no space"),
        (stops, [1] * 513, af.Sampling(), "no space"),
        (stops | {"extra_body": {"top_p": 0.5}}, [1, 2], af.Sampling(), "got {'top_p': 0.5}"),
        ({}, [1, 2], af.Sampling(), "stop_ids"),
    ):
        model = engine(tokens="exact", **settings)
        await errors.check(lambda: model.sample(ids, sampling, 0), af.errors.EngineError, words)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, None])
async def test_a_logprob_that_is_not_finite_ends_one_chain(server: Server, engine: Connect, logprob: Any) -> None:
    """Looked for: logprobs, entropies and masses of all engines, whose samples are checked in one place."""
    serve(server)
    good = server.answer
    tasks = agents.tasks(3)

    def say(path: str, body: dict[str, Any]) -> Any:
        answer = good(path, body)
        if body and tuple(body.get("prompt", ())) == prompts[1]:
            answer["choices"][0]["logprobs"]["token_logprobs"][1] = logprob
        return answer

    model = await engine(stop_ids=agents.chat().stop_ids).probe()
    agent = make(model, chat=agents.chat())
    prompts = [agent.chain(task).ids for task in tasks]
    server.answer = say
    rollout = await agent.rollout(tasks, 2)
    assert [t.stop for t in rollout.trajectories] == ["answered"] * 2 + ["error"] * 2 + ["answered"] * 2
    assert len(af.collate([t if t.error else t.replace(reward=float(t.chain)) for t in rollout.trajectories])) == 4


async def test_thinking_that_the_server_has_parsed_is_kept_and_sent_back(server: Server, engine: Connect) -> None:
    def say(path: str, body: dict[str, Any]) -> Any:
        answer = chat("42") if len(server.got) > 1 else chat(None, ("calculator", '{"expression": "1"}'))
        answer["choices"][0]["message"][field] = f"thought {len(server.got)}"
        return answer

    server.answer = say
    for field in ("reasoning_content", "reasoning"):
        server.got.clear()
        actions = (await first(engine())).actions
        assert [turn.messages[0]["thinking"] for turn in actions] == ["thought 1", "thought 2"]
        assert server.got[1][1]["messages"][-2][field] == "thought 1"


# --- a server as the teacher of a distillation ---


def teach(server: Server, length: int = 1024, text: str | None = None) -> None:
    """Answer like vLLM: the logprob of each token of the prompt, and the text of all ids of the vocabulary."""

    def say(path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": length}]}
        if path == "/detokenize":
            return {"prompt": agents.chat().tokenizer.decode(body["tokens"]) if text is None else text}
        scored = [{str(i): {"logprob": -i / 100}} for i in body["prompt"]]
        last = {f"token_id:{i}": -i / 100 for i in body["logprob_token_ids"]}
        return {"choices": [{"prompt_logprobs": [None, *scored[1:]], "logprobs": {"top_logprobs": [last]}}]}

    server.answer = say


async def test_given_ids_are_scored(server: Server, engine: Connect) -> None:
    teach(server, 8)
    model = engine()
    await model.check_teacher(agents.chat(), 8)
    assert await model.score([5, 6, 7]) == (-0.06, -0.07)
    assert server.got[-1][1]["prompt_logprobs"] == 0 and server.got[-1][1]["temperature"] == 1.0
    serve(server)
    await errors.check(lambda: model.score([5, 6]), af.errors.EngineError, "returned no logprobs of the given ids")


async def test_a_server_with_another_vocabulary_or_context_is_no_teacher(server: Server, engine: Connect) -> None:
    policy = agents.fresh()
    agent = agents.agent(policy)
    config = af.TrainConfig(steps=1, advantage="none", teacher_coef=1.0)

    async def reject(message: str, trained: af.Agent = agent) -> None:
        teacher = engine()
        await errors.check(
            lambda: af.train(trained, policy, agents.tasks(2), config, teacher=teacher),
            af.errors.SettingsError,
            re.compile(message),
        )
        assert policy.version == 0

    teach(server, 511)
    await reject("teacher must have a context of at least the engine's 512 tokens, got 511")
    teach(server, text="other words")
    await reject(r"teacher must have the vocabulary of the policy.*does not decode the")
    server.answer = lambda path, body: (404, {"error": "no such page"}, {})
    await reject("does not decode the")
    warm = agent.replace(sampling=agent.sampling.replace(temperature=0.7))
    await reject(r"temperature must be 1 with a teacher engine, which scores at temperature 1, got 0\.7", warm)
    for wrong, message in [
        (agent.engine, "teacher must not be the policy that is trained"),
        (af.LocalEngine(agents.shipped()), "teacher must be a Policy, a VLLMEngine, or an OpenAIEngine"),
    ]:
        errors.check(
            lambda: af.train(agent, policy, agents.tasks(2), config, teacher=wrong),
            af.errors.SettingsError,
            re.compile(message),
        )


async def test_it_waits_as_long_as_the_server_asks(server: Server, engine: Connect) -> None:
    server.answer = lambda path, body: chat("42") if len(server.got) > 1 else (429, {}, {"Retry-After": "0.3"})
    model = engine()
    began = time.perf_counter()
    await make(model).rollout(agents.tasks(1))
    assert time.perf_counter() - began >= 0.3
