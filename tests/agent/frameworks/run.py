"""Run one unmodified agent on calculator tasks and print the sampled tokens as JSON.

Usage: run.py MODULE FUNCTION CONCURRENCY
"""

import asyncio
import importlib
import inspect
import json
import sys
from typing import Any

import agentfly_kit as af


@af.reward
def exact(final: str | None, answer: str) -> float:
    return float(final is not None and final.strip() == answer)


def make_harness(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        async def run(question: str, endpoint: af.Endpoint) -> Any:
            return await function(question, endpoint.base_url, endpoint.api_key)

    else:

        def run(question: str, endpoint: af.Endpoint) -> Any:
            return function(question, endpoint.base_url, endpoint.api_key)

    return run


async def main(module: str, name: str, concurrency: int) -> None:
    policy = af.tiny.policy("calculator")
    given = [af.Task(t.id, t.messages, {**t.fields, "question": t.messages[-1]["content"]}) for t in TASKS]
    harness = make_harness(getattr(importlib.import_module(module), name))
    settings = {"sampling": af.Sampling(max_tokens=64), "reward": exact, "max_turns": 4}
    agent = af.Agent(af.LocalEngine(policy), chat=policy.chat, harness=harness, **settings)  # type: ignore[arg-type]
    rollout = await agent.rollout(given, 2, max_concurrency=concurrency)
    chains = [
        {
            "rows": [[row.ids.tolist(), row.action_mask.tolist()] for row in t.rows],
            "logprobs": [turn.logprobs for turn in t.turns if turn.sampled],
            "seeds": [turn.seed for turn in t.turns],
            "stop": t.stop,
            "final": t.final,
            "reward": t.reward,
            "error": None if t.error is None else t.error.traceback,
        }
        for t in rollout
    ]
    print(json.dumps({"chains": chains}))


TASKS = af.load_tasks("calculator").train[:8]

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
