"""Two roles in one harness, of which one learns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from test_harness import task_with_question

from agentfly_kit.agent.agent import Agent
from agentfly_kit.endpoint.endpoint import Endpoint
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.envs.lookup import store
from agentfly_kit.evaluation import evaluate
from agentfly_kit.rewards import reward
from agentfly_kit.tasks import load_tasks
from agentfly_kit.tiny import policy as shipped_policy
from agentfly_kit.tools.tool import ToolSet, tool
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.loop import train
from agentfly_kit.types import Sampling

# --- two roles on lookup -----------------------------------------------------------------------------


@tool
async def lookup(of: str, what: str) -> str:
    """Look up one fact about a person.

    Args:
        of: the person's name.
        what: boss, friend, mentor, city or pet.
    """
    raise NotImplementedError  # the harness runs the calls


async def converse(endpoint: Endpoint, role: str, question: str, look: Any) -> str:
    """Ask `role` a question, and answer its calls with `look`, until it answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    while True:
        got = await endpoint.chat(messages, ToolSet([lookup]).schemas, model=f"policy/{role}")
        message = got["choices"][0]["message"]
        if not message.get("tool_calls"):
            return str(message["content"])
        messages.append(message)
        for made in message["tool_calls"]:
            result = await look(**json.loads(made["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})


async def planner_and_worker(question: str, world: int, endpoint: Endpoint) -> str:
    """The planner names the next fact, and the worker looks it up."""
    facts = store(world)

    async def look(of: str = "", what: str = "") -> str:
        return facts.get(of, {}).get(what, "no such fact")

    async def work(of: str = "", what: str = "") -> str:
        return await converse(endpoint, "worker", f"What is {of}'s {what}?", look)

    return await converse(endpoint, "planner", question, work)


@reward
def exact(final: str | None, answer: str) -> float:
    return float(final is not None and final.strip() == answer)


@pytest.mark.real
def test_training_the_worker_alone_raises_success() -> None:
    """Five seeds gave .047 before and .84 to .94 after four steps; see docs/log.md."""

    async def main() -> tuple[float, float]:
        policy, data = shipped_policy("lookup"), load_tasks("lookup")
        tasks, held = ([task_with_question(task) for task in part] for part in (data.train, data.test[:64]))
        agent = Agent(
            LocalEngine(policy), chat=policy.chat, harness=planner_and_worker, reward=exact, max_turns=12,
            sampling=Sampling(max_tokens=64),
        )  # fmt: skip
        before = await evaluate(agent, held)
        await train(agent, policy, tasks, TrainConfig(steps=4, authors="worker"))
        return before.success, (await evaluate(agent, held)).success

    before, after = asyncio.run(main())
    assert after - before >= 0.3, (before, after)
