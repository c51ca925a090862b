"""Benchmark the endpoint of a harness: CPU milliseconds per request, beside the engine's own work. Writes JSON.

    make bench-harness            # or: python benchmarks/bench_harness.py --requests 500

Each chain sends requests with a growing history to an engine that returns prepared ids, so that only the work of the
endpoint and the client is measured. `own loop` is a chain of this package with one tool call per turn, for comparison.
The candidates alternate; the fastest round of each is reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import agentfly_kit as af

CALL = '<tool_call>{"name":"calculator","arguments":{"expression":"1+1"}}</tool_call>'


class Prepared(af.Engine):
    """Engine that returns the same action for every request, as if a policy had sampled it."""

    def __init__(self, chat: af.Chat) -> None:
        self.ids = (*chat.encode(CALL), chat.stop_ids[0])

    async def sample(self, ids: Sequence[int], sampling: af.Sampling, seed: int, *, request: Any = None) -> af.Sample:
        n = len(self.ids)
        return af.Sample(self.ids, (-0.5,) * n, (1.0,) * n, "stop", (0,) * n)


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "1+1".
    """
    return "2"


SCHEMAS = list(af.ToolSet([calculator]).schemas)


def history(message: dict[str, Any]) -> list[dict[str, Any]]:
    call = message["tool_calls"][0]["id"]
    return [message, {"role": "tool", "tool_call_id": call, "content": "2"}]


async def with_chat(question: str, endpoint: af.Endpoint) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        answer = await endpoint.chat(messages, SCHEMAS)
        messages += history(answer["choices"][0]["message"])
    return "2"


async def with_client(question: str, endpoint: af.Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        answer = await endpoint.client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS)
        messages += history(answer.choices[0].message.model_dump(exclude_none=True))
    return "2"


async def over_http(question: str, endpoint: af.Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        body = {"model": "policy", "messages": messages, "tools": SCHEMAS}
        async with SESSION.post(f"{endpoint.base_url}/chat/completions", json=body) as got:
            messages += history((await got.json())["choices"][0]["message"])
    return "2"


async def in_sandbox(question: str, endpoint: af.Endpoint, box: af.ShellSandbox) -> str:
    result = await box.run_agent(["python3", "-c", PROGRAM, str(TURNS), json.dumps(SCHEMAS)], endpoint)
    return result.text


# The agent of `in_sandbox`. Its own CPU time is not measured.
PROGRAM = """
import http.client, json, os, sys
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port)
messages = [{"role": "user", "content": "What is 1+1?"}]
for _ in range(int(sys.argv[1])):
    body = json.dumps({"messages": messages, "tools": json.loads(sys.argv[2])})
    connection.request("POST", url.path + "/chat/completions", body)
    message = json.load(connection.getresponse())["choices"][0]["message"]
    call = message["tool_calls"][0]["id"]
    messages += [message, {"role": "tool", "tool_call_id": call, "content": "2"}]
"""
TURNS = 8
SESSION: Any = None


async def main(requests: int, rounds: int) -> dict[str, float]:
    import aiohttp

    global SESSION
    chat = af.Chat(af.tiny.tokenizer())
    engine = Prepared(chat)
    tasks = [
        af.Task(f"t{i}", ({"role": "user", "content": "What is 1+1?"},), {"question": "What is 1+1?"})
        for i in range(max(1, requests // TURNS))
    ]
    common: dict[str, Any] = {"chat": chat, "max_turns": TURNS + 1}
    agents = {
        "endpoint.chat": af.Agent(engine, harness=with_chat, **common),
        "endpoint.client": af.Agent(engine, harness=with_client, **common),
        "HTTP": af.Agent(engine, harness=over_http, **common),
        "sandbox": af.Agent(engine, harness=in_sandbox, pools=[af.Pool(af.ShellSandbox, size=4)], **common),
        "own loop": af.Agent(engine, tools=[calculator], chat=chat, max_turns=TURNS),
    }
    best: dict[str, float] = {}
    async with aiohttp.ClientSession() as session:
        SESSION = session
        for _ in range(rounds):
            for name, agent in agents.items():
                start = time.process_time()
                rollout = await agent.rollout(tasks)
                seconds = time.process_time() - start
                done = sum(len(t.actions) for t in rollout)
                if done != TURNS * len(tasks):
                    raise RuntimeError(f"{name}: {done} actions, expected {TURNS * len(tasks)}: {rollout}")
                best[name] = min(best.get(name, float("inf")), 1000 * seconds / done)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512, help="requests per round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    figures = asyncio.run(main(arguments.requests, arguments.rounds))
    print(json.dumps({"CPU ms per request": {name: round(value, 2) for name, value in figures.items()}}, indent=1))
