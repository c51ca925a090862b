"""Compare the CPU time of a GRPO iteration with TRL's GRPOTrainer, for the same policy, tasks, tool and settings.

    make bench-step                # or: python benchmarks/bench_step.py --steps 20 --out step.json
    python benchmarks/bench_step.py --family lookup     # with an environment (TRL: `environment_factory`)

An iteration consists of 64 episodes (8 tasks with 8 chains each) and one update without KL. Both trainers start from
the shipped policy and use the same learning rate and the same tasks in the same order. The first --steps iterations are
timed completely, without setup and imports. TRL uses the tool and the reward as plain functions, and transformers'
`generate`. The trainers alternate --repeats times. Every repeat does the same work, so differences are due to
other load, and the fastest repeat of each iteration counts. Results are means over the iterations.

ours              `af.train` with default settings: groups without signal are excluded from the update
ours, every row   `af.train` with all rows in the update
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import itertools
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from recipes.base import RESPONSE_TEMPLATE

import agentfly_kit as af

BARS = {"calculator": (2.8, 3.5), "lookup": (2.1, 3.0)}
TURNS = {"calculator": 4, "lookup": 6}
"""Maximum number of actions per chain, for both trainers."""
LR = 3e-4


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b
    raise ValueError(ast.dump(node))


@af.reward
def exact(final: str | None, answer: str) -> float:
    """Return 1 for the exact answer, else 0."""
    return float(final == answer)


class Store:
    """Environment of the lookup family in TRL's format, with the same facts and texts."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, str]] = {}

    def reset(self, world: int, **_: Any) -> None:
        self._facts = af.envs.lookup.store(world)

    def lookup(self, of: str, what: str) -> str:
        """
        Look up one fact about a person.

        Args:
            of: the person's name.
            what: boss, friend, mentor, city or pet.

        Returns:
            The fact.
        """
        if of not in self._facts:
            return "no such person"
        return self._facts[of].get(what, "no such fact")


def agent_of(family: str, policy: Any) -> Any:
    if family != "calculator":
        return getattr(af.envs, family).agent(policy)
    return af.Agent(
        af.LocalEngine(policy),
        chat=policy.chat,
        tools=[af.tool(calculator)],
        reward=exact,
        max_turns=TURNS[family],
        sampling=af.Sampling(temperature=1.0, max_tokens=64),
    )


def ours(family: str, tasks: Any, steps: int, *, every_row: bool) -> dict[str, Any]:
    policy = af.tiny.policy(family)
    agent = agent_of(family, policy)
    config = af.TrainConfig(
        steps=steps,
        tasks_per_step=8,
        group_size=8,
        minibatch=None,
        epochs=1,
        lr=LR,
        lr_end=None,
        # With a custom loss function, the training step cannot skip rows without signal.
        loss=(lambda *given: af.losses.ppo(*given)) if every_row else "ppo",
        checkpoint_every=steps,
    )
    success: list[float] = []
    clock = [time.process_time()]

    async def run() -> None:
        async for step in af.train(agent, policy, tasks, config):
            clock.append(time.process_time())
            success.append(step.success)
        await agent.engine.close()

    asyncio.run(run())
    return {"cpu": each(clock), "success": success}


def each(clock: list[float]) -> list[float]:
    """Return the CPU seconds of each iteration. The first includes the time before the first iteration."""
    return [after - before for before, after in itertools.pairwise(clock)]


def theirs(family: str, tasks: Any, steps: int) -> dict[str, Any]:
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append(time.process_time())

    policy = af.tiny.policy(family)
    policy.chat.tokenizer.response_template = RESPONSE_TEMPLATE

    def reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(c[-1]["role"] == "assistant" and c[-1]["content"] == a) for c, a in zip(completions, answer)]  # noqa: B905

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            per_device_train_batch_size=64,
            num_generations=8,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            beta=0.0,
            temperature=1.0,
            max_completion_length=TURNS[family] * 64,
            max_tool_calling_iterations=TURNS[family] - 1,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            policy.model,
            reward_funcs=reward,
            args=args,
            train_dataset=af.trl.dataset(tasks),
            processing_class=policy.chat.tokenizer,
            callbacks=[Clock()],
            **({"tools": [calculator]} if family == "calculator" else {"environment_factory": Store}),
        )
        clock.append(time.process_time())
        trainer.train()
    return {"cpu": each(clock), "success": [e["reward"] for e in trainer.state.log_history if "reward" in e]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--family", choices=sorted(BARS), default="calculator")
    parser.add_argument(
        "--repeats", type=int, default=6, help="runs per trainer; the fastest of each iteration counts"
    )
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import trl

    tasks = af.load_tasks(given.family).train[: 8 * given.steps]
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": [], "ours, every row": []}
    for _ in range(given.repeats):
        for name, run in (
            ("trl", lambda: theirs(given.family, tasks, given.steps)),
            ("ours", lambda: ours(given.family, tasks, given.steps, every_row=False)),
            ("ours, every row", lambda: ours(given.family, tasks, given.steps, every_row=True)),
        ):
            gc.collect()  # so that the garbage of the previous run is not collected in this run
            runs[name].append(run())
    cost = {
        name: sum(map(min, zip(*(run["cpu"] for run in found), strict=True))) / given.steps
        for name, found in runs.items()
    }
    ratios = {name: round(cost["trl"] / cost[name], 2) for name in ("ours", "ours, every row")}
    result = {
        "benchmark": "step",
        "family": given.family,
        "episodes": 64,
        "iterations": given.steps,
        "CPU seconds per iteration": {name: round(seconds, 4) for name, seconds in cost.items()},
        "success of the last quarter": {
            name: round(sum(found[0]["success"][-(given.steps // 4 or 1) :]) / (given.steps // 4 or 1), 3)
            for name, found in runs.items()
        },
        "times less than trl": ratios,
        "floor": BARS[given.family][0],
        "aim": BARS[given.family][1],
        "met": min(ratios.values()) >= BARS[given.family][0],
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load": [round(x, 2) for x in os.getloadavg()],
        },
    }
    print(json.dumps(result, indent=1))
    print(f"trl takes {ratios['ours']} times ours ({ratios['ours, every row']} with every row)", file=sys.stderr)
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
