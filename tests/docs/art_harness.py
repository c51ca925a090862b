"""Run the ART snippet of docs/migration.md as a harness, in a process of its own, because ART patches transformers.

The program reads the snippet from standard input.
"""

import ast
import asyncio
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import agents
import art  # type: ignore[import-not-found, unused-ignore]

import agentfly_kit as af

SOURCE = sys.stdin.read()
trained: list[Any] = []


class Backend:
    async def train(self, *args: Any) -> None:
        inspect.signature(art.Backend.train).bind(self, *args)
        trained.extend(args[1])


async def solve(endpoint: af.Endpoint) -> None:
    names: dict[str, Any] = {"art": art, "client": endpoint.client, "backend": Backend()}
    names["model"] = SimpleNamespace(name="policy")
    names["scenarios"] = [SimpleNamespace(question="What is 2+3?", answer=text) for text in ("5", "6")]
    await eval(compile(SOURCE, "<art>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)


async def main() -> None:
    agent = af.Agent(af.ScriptedEngine(["5"] * 16), chat=agents.fresh().chat, harness=solve, max_turns=16)
    t = (await agent.rollout(af.tasks_from([{"question": "What is 2+3?"}]))).trajectories[0]
    assert t.error is None, t.error
    print([[x.reward for x in group.trajectories] for group in trained], len(list(t.rows)))


asyncio.run(main())
