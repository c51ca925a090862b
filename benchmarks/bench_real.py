"""Measure how a pretrained model learns to use a tool: SmolLM2-135M-Instruct, word problems, a calculator.

    make bench-real                              # one seed: about 65 minutes of one core
    make bench-real ARGS="--seed 1 --steps 8"

The model is evaluated without and with the tool. It then imitates 160 demonstrations of the format, 80 % of them with
the right formula and the others with a random one, and is trained with GRPO and LoRA on the training wordings. All
evaluations are greedy, on held-out wordings that share no sentence with them; see data/word_problems. The control
imitates correct demonstrations of the same 160 problems for as much CPU time as the training took.

The output is JSON, with CPU seconds of this process since the model was loaded. `scripts/install smollm2` is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import resource
import sys
import time
from typing import Any

import agentfly_kit as af
from agentfly_kit.envs.exact import NotArithmetic, shown, value
from agentfly_kit.types import Task

MODEL = "smollm2"
FORMULAS = ("{}*{}+{}", "{}*{}-{}", "{}+{}-{}")


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    try:
        return shown(value(expression))
    except NotArithmetic as error:
        raise af.ToolError(str(error)) from None


@af.reward
def correct(final: str | None, answer: str) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", (final or "").replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def demonstrate(policy: af.Policy, right: float, task: Task, turn: int) -> str:
    """Write a call, with the right formula with probability `right` and else a random one, and then its result."""
    numbers, draw = re.findall(r"\d+", task.messages[-1]["content"]), random.Random(task.id)
    expression = draw.choice(FORMULAS).format(*numbers) if draw.random() >= right else task.fields["expression"]
    call = af.ToolCall("", "calculator", {"expression": expression})
    return policy.chat.format.render_call(call) if turn == 0 else calculator(expression)


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    policy = af.Policy.load(MODEL, lora=16)
    tasks = af.load_tasks("word_problems")
    agent = af.Agent(
        af.LocalEngine(policy, slots=64), chat=policy.chat, tools=[calculator], reward=correct, max_turns=3,
        sampling=af.Sampling(max_tokens=64), seed=given.seed,
    )  # fmt: skip
    greedy = agent.replace(sampling=af.Sampling(temperature=0.0, max_tokens=64))
    began = time.process_time()
    out: dict[str, Any] = {"settings": vars(given)}

    def note(name: str, evaluation: af.Evaluation | None = None, **more: Any) -> None:
        out[name] = {**more, "cpu_s": round(time.process_time() - began)}
        if evaluation is not None:
            numbers = (evaluation.success, evaluation.low, evaluation.high, evaluation.calls)
            out[name] |= dict(zip(("success", "low", "high", "calls"), (round(x, 3) for x in numbers), strict=True))
        print(name, json.dumps(out[name]), file=sys.stderr, flush=True)

    if given.zero_shot:
        alone = greedy.replace(tools=[], sampling=af.Sampling(temperature=0.0, max_tokens=192))
        note("without the tool", await af.evaluate(alone, tasks.test[:32]))
        note("with the tool", await af.evaluate(greedy, tasks.test[:32]))

    engine = af.ScriptedEngine(functools.partial(demonstrate, policy, given.right))
    chains = await agent.replace(engine=engine).rollout(tasks.train[: given.demonstrations])
    losses = [s.loss for s in await af.imitate(policy, chains, epochs=1, minibatch=4, lr=1e-3, seed=given.seed)]
    note("demonstrations", await af.evaluate(greedy, tasks.test), loss=[round(x, 2) for x in losses])

    config = af.TrainConfig(
        steps=given.steps, tasks_per_step=given.tasks, group_size=given.group, minibatch=given.minibatch, epochs=1,
        lr=given.lr, lr_end=given.lr_end, lr_warmup=given.warmup, seed=given.seed,
    )  # fmt: skip
    start = time.process_time()
    async for step in af.train(agent, policy, tasks.train, config):
        kept = ("success", "approx_kl", "entropy")
        note(f"step {step.step}", **{k: round(step.record[k], 4) for k in kept if k in step.record})
    budget = time.process_time() - start
    note("trained", await af.evaluate(greedy, tasks.test))
    out["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    if given.control:
        control = af.Policy.load(MODEL, lora=16)
        right = af.ScriptedEngine(functools.partial(demonstrate, policy, 1.0))
        chains = await agent.replace(engine=right).rollout(tasks.train[: given.demonstrations])
        start, passes = time.process_time(), 0
        while time.process_time() - start < budget:
            await af.imitate(control, chains, epochs=1, minibatch=4, lr=2e-4 if passes else 1e-3, seed=passes)
            passes += 1
        imitator = greedy.replace(engine=af.LocalEngine(control, slots=64), chat=control.chat)
        note("control: imitation alone", await af.evaluate(imitator, tasks.test), passes=passes)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=160)
    parser.add_argument("--right", type=float, default=0.8, help="probability that a demonstration is right")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--minibatch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--lr-end", type=float, default=3e-5, help="learning rate of the last step")
    parser.add_argument("--warmup", type=int, default=4, help="iterations before the learning rate is reached")
    parser.add_argument("--no-zero-shot", dest="zero_shot", action="store_false")
    parser.add_argument("--no-control", dest="control", action="store_false")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))
