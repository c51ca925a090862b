"""The OpenAI-compatible endpoint of a harness: invalid requests, requests after the end, and HTTP."""

import asyncio
import io
import json
import re
from typing import Any

import aiohttp
import errors
import pytest
from test_harness import TASK, harnessed, run_one
from waiting import until

import agentfly_kit as af
from agentfly_kit.endpoint import completions
from agentfly_kit.endpoint.reply import RequestError

ASKED = [{"role": "user", "content": "a"}]
VALID: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASKED},
    "completions": {"prompt": "a"},
    "messages": {"messages": ASKED, "max_tokens": 64},
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat/completions": [
        ({"messages": []}, "must have at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "each part of 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "must consist of text and image_url"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "must have the role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "last message must not be an assistant message"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"top_logprobs": 3}, "'top_logprobs' is not supported"),
        ({"n": 99}, "'n' must be an integer from 1 to 16, got 99"),
        ({"n": 2.5}, "'n' must be an integer from 1 to 16, got 2.5"),
        ({"max_tokens": "9"}, "wrong type"),
        ({"messages": 5}, "wrong type"),
        ({"functions": [1]}, "'functions' is not supported"),
        ({"max_tokens": -1}, "max_tokens must be an integer of at least 1"),
        ({"tools": [{"type": "function"}]}, "tools: entry 0"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"model": 7}, "wrong type"),
    ],
    "completions": [
        ({"prompt": ["a", "b"]}, "must be one text or one list of token ids"),
        ({"prompt": [[1], [2]]}, "must be one text or one list of token ids"),
        ({"prompt": [1, True]}, "must be one text or one list of token ids"),
        ({"prompt": []}, "'prompt' must have at least one id"),
        ({"prompt": [10**9]}, "'prompt' must have at least one id, from 0 to"),
        ({"prompt": ""}, "must have at least one token"),
        ({"echo": True}, "'echo' is not supported"),
        ({"logprobs": 5}, "'logprobs' and 'best_of' must be at most 1"),
        ({"max_tokens": "9"}, "wrong type"),
    ],
    "messages": [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0: content blocks must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "got the type 'tool_use'"),
        ({"system": [{"type": "document"}]}, "'system': content blocks must be text"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305' are not supported"),
        ({"tools": [{"input_schema": {}}]}, "tools: entry 0"),
        ({"mcp_servers": [{"url": "u"}]}, "'mcp_servers' is not supported"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Because"}]}, "must not be an assistant message"),
        ({"messages": [{"role": "user", "content": 5}]}, "wrong type"),
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "message"), [(path, *case) for path, cases in REFUSED.items() for case in cases]
)
async def test_bad_requests_are_rejected_by_name_and_the_chain_goes_on(
    path: str, body: dict[str, Any], message: str
) -> None:
    seen: list[Any] = []

    async def trying(endpoint: af.Endpoint) -> None:
        for given in (VALID[path] | body, VALID[path]):
            seen.append(await endpoint.handle("POST", f"/v1/{path}", json.dumps(given).encode()))

    t = await run_one(trying, ["x"])
    assert [answer.status for answer in seen] == [400, 200], seen
    assert message in json.loads(seen[0].body)["error"]["message"]
    assert (t.stop, len(t.actions)) == ("answered", 1)


async def test_a_fault_of_the_endpoint_is_not_reported_as_one_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "completion", lambda: None)  # a TypeError when it is called

    async def asking(endpoint: af.Endpoint) -> str:
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        await errors.check(lambda: endpoint.handle("POST", "/v1/chat/completions", body), TypeError, "<lambda>()")
        return "5"

    assert (await run_one(asking, ["x"])).stop == "answered"


async def test_an_answer_after_the_end_is_refused() -> None:
    kept: list[af.Endpoint] = []

    async def keeping(endpoint: af.Endpoint) -> str:
        kept.append(endpoint)
        return "5"

    await run_one(keeping, ["x"])
    await errors.check(lambda: kept[0].chat([{"role": "user", "content": "a"}]), RequestError, "has ended")
    errors.check(lambda: kept[0].base_url, af.errors.SettingsError, "closed")


async def test_http_serves_the_chain_of_each_key_on_loopback_and_stops_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentfly_kit.endpoint.server._MAX_BODY", 1_000_000)
    statuses: dict[str, int] = {}
    urls: set[str] = set()

    async def over_http(endpoint: af.Endpoint, answer: str) -> str:
        urls.add(endpoint.base_url.rsplit("/", 2)[0])
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True}
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{endpoint.base_url}/chat/completions", json=body) as got:
                events = (await got.text()).split("\n\n")
                statuses["stream"] = got.status
            root = endpoint.base_url.rsplit("/", 2)[0]
            for name, url, headers in (
                ("models", f"{root}/v1/models", {"Authorization": f"Bearer {endpoint.api_key}"}),
                ("stranger", f"{root}/{'0' * 32}/v1/models", {}),
                ("no key", f"{root}/v1/models", {}),
                ("foreign", f"{endpoint.base_url}/models", {"Host": "rebound.example:80"}),
                ("localhost", f"{endpoint.base_url}/models", {"Host": "LocalHost:1"}),
            ):
                async with client.get(url, headers=headers) as got:
                    statuses[name] = got.status
            async with client.post(f"{endpoint.base_url}/chat/completions", data=io.BytesIO(b"x" * 2_000_000)) as got:
                statuses["huge"] = got.status
        assert events[-2] == "data: [DONE]"
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
        return str(deltas[0]["content"]) + answer[:0]

    before = asyncio.all_tasks()
    rollout = await harnessed(over_http, ["5"]).rollout([TASK], 4)
    assert [t.reward for t in rollout] == [1.0] * 4, [t.error for t in rollout]
    refused = {"stranger": 404, "no key": 404, "foreign": 403, "huge": 413}
    assert statuses == {"stream": 200, "models": 200, "localhost": 200, **refused}
    assert all(url.startswith("http://127.0.0.1:") for url in urls)
    await until(lambda: asyncio.all_tasks() <= before)  # aiohttp first reads the rest of the large bodies
    for url in urls:
        _, _, port = url.rpartition(":")
        await errors.check(
            lambda: asyncio.open_connection("127.0.0.1", int(port)),
            OSError,
            re.compile(r"refused|Connect call failed"),
        )


async def test_a_chain_cannot_reach_another_chain() -> None:
    """Two chains run at once, and one sends requests to the other and to a third, which has ended.

    Also looked at: a full URL of another chain, which no server can tell from its owner's, and a key in lower layers of
    the path, which is not read.
    """
    kept: list[af.Endpoint] = []
    statuses: dict[str, int] = {}
    done = asyncio.Event()

    async def reaching(endpoint: af.Endpoint) -> str:
        own, root = endpoint.base_url, endpoint.base_url.rsplit("/", 2)[0]
        kept.append(endpoint)
        if len(kept) == 2:  # waits while the third reaches for its chain
            await done.wait()
        elif len(kept) == 3:
            gone, other = kept[0].api_key, kept[1].api_key
            for name, url, bearer in (
                ("both keys", f"{root}/{other}/v1", endpoint.api_key),
                ("both keys, exchanged", own, other),
                ("ended URL", f"{root}/{gone}/v1", ""),
                ("ended URL, own key", f"{root}/{gone}/v1", endpoint.api_key),
                ("ended key, own URL", own, gone),
                ("ended key", f"{root}/v1", gone),
                ("guessed", f"{root}/{other[:-1]}{'0' if other[-1] != '0' else '1'}/v1", ""),
                ("no key", f"{root}/v1", ""),
                ("name", f"{root}/t/1/v1", ""),
                ("two hops", f"{root}/v1/{other}", ""),
            ):
                headers = {"Authorization": f"Bearer {bearer}"}
                body = {"messages": [{"role": "user", "content": "intruder"}]}
                async with aiohttp.ClientSession(headers=headers) as client:
                    async with client.post(f"{url}/chat/completions", json=body) as got:
                        statuses[name] = got.status
            done.set()
        return "5"

    agent = harnessed(reaching, ["x"])
    await agent.rollout([TASK])
    rollout = await agent.rollout([TASK], 2)
    two = ("both keys", "both keys, exchanged", "ended URL, own key", "ended key, own URL")
    assert {name: status for name, status in statuses.items() if status != 404} == dict.fromkeys(two, 401)
    assert len(statuses) == 10
    assert [(t.stop, len(t.actions), t.reward) for t in rollout] == [("answered", 0, 1.0)] * 2


MALFORMED = [
    b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", b"\x16\x03\x01\x02\x00" * 9,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
]  # fmt: skip


async def answers_to_malformed(url: str) -> list[bytes]:
    """Return the first line of the answer to each malformed request."""
    found = []
    for request in MALFORMED:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split("/")[0].split(":"))
        writer.write(request)
        found.append((await reader.readline()).rstrip())
        writer.close()
    return found


async def test_a_malformed_request_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bytes] = []

    async def asking(endpoint: af.Endpoint) -> str:
        found.extend(await answers_to_malformed(endpoint.base_url))
        return "5"

    await run_one(asking, ["x"])
    assert found == [b"HTTP/1.0 400 Bad Request"] * len(MALFORMED)
    assert caplog.records == []
