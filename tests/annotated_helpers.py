"""Helper functions of a notebook, with annotations."""

from collections.abc import Coroutine
from typing import Any, assert_type

import agentfly_kit as af


@af.tool
def calculator(expression: str) -> int:
    """Evaluate an expression.

    Args:
        expression: the expression.
    """
    return len(expression)


@af.reward
def exact(final: str | None, answer: str) -> float:
    return float(final == answer)


def names(tools: list[af.Tool[..., object]], rewards: list[af.Reward[..., object]]) -> list[str]:
    return [tool.name for tool in tools] + [reward.name for reward in rewards]


def make(engine: af.Engine, chat: af.Chat) -> af.Agent:
    return af.Agent(engine, chat=chat, tools=[calculator], reward=exact)


async def first(chain: af.Chain) -> af.Turn:
    return await chain.step()


async def run(agent: af.Agent, tasks: af.Tasks) -> af.Rollout:
    handle: af.RolloutHandle = agent.rollout(tasks, group_size=2)
    return await handle


async def learn(agent: af.Agent, policy: af.Policy, tasks: af.Tasks) -> af.TrainStep | None:
    last: af.TrainStep | None = None
    training: af.TrainRun = af.train(agent, policy, tasks)
    async for step in training:
        last = step
    return last


async def gain(before: af.Evaluation, agent: af.Agent, tasks: af.Tasks) -> float:
    after = await af.evaluate(agent, tasks)
    diff: af.RolloutDiff = before.diff(after)
    return diff.p_value


async def explain(trajectory: af.Trajectory) -> af.Score:
    return await exact.try_(trajectory)


def table(result: af.SQLResult) -> tuple[str, ...]:
    shown: af.SandboxResult = result
    return result.columns if shown.ok else ()


@af.tool(timeout=1.0)
async def later(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: the text.
        times: how often.
    """
    return text * times


async def decorated_functions_keep_their_types() -> None:
    assert_type(calculator("1+1"), int)
    _ = assert_type(later("a", times=2), Coroutine[Any, Any, str])
    calculator(1)  # type: ignore[arg-type]  # mypy reports an ignore that is not needed
