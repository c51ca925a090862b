"""Compare the CPU time of an update with a plain supervised step on the same rows.

    make bench-update              # or: python benchmarks/bench_update.py --repeats 9 --out update.json

The rows are a batch of 128 calculator episodes of the shipped policy, in four minibatches of 32 and one epoch. No row
is dropped, because all advantages are non-zero. Baselines for `ppo_step`:

padded   a plain supervised step: each minibatch padded to its longest row, logits at every position, cross-entropy on
         the same tokens, backward, gradient clipping, AdamW
sorted   the same step with rows sorted by length, in micro-batches with as many padded tokens as in ppo_step

The variants alternate in one process, and the fastest repeat of each is reported. JSON is written to standard output.

With --memory, measure instead the increase in peak resident memory during a step on 64 to 4,096 rows, with the policy's
micro_tokens and without a limit. Each measurement uses a new process. The step has a single minibatch, so that only
the batch grows.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import agentfly_kit as af
from agentfly_kit.policy.prefix_tree import split_by_token_budget

BARS = {"padded": 0.72, "sorted": 1.0, "with reference and value": 1.1}


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError) as error:
        raise af.ToolError("cannot read that") from error


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


async def collect(policy: Any, rows: int) -> Any:
    """Sample a batch in which every row has a non-zero advantage."""
    engine = af.LocalEngine(policy)
    agent = af.Agent(
        engine,
        chat=policy.chat,
        tools=[calculator],
        reward=exact,
        max_turns=4,
        sampling=af.Sampling(max_tokens=64),
    )
    rollout = await agent.rollout(af.load_tasks("calculator").train[: rows // 8], group_size=8)
    await engine.close()
    signs = torch.where(torch.arange(rows) % 3 == 0, 1.0, -0.5)
    return af.collate(rollout, advantages=signs)


def supervised(policy: Any, optimizer: Any, batch: Any, *, by_length: bool, size: int = 32) -> None:
    """Minimize cross-entropy on the sampled tokens: forward, backward, clip and step for each minibatch."""
    model = policy.model
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    for start in range(0, len(batch), size):
        rows = order[start : start + size]
        optimizer.zero_grad()
        tokens = int(batch.mask[rows].sum())
        parts = (
            split_by_token_budget(batch.lengths[rows], policy.micro_tokens)
            if by_length
            else [torch.arange(len(rows))]
        )
        for part in parts:
            picked = rows[part]
            width = int(batch.lengths[picked].max())
            ids, mask = batch.ids[picked, :width], batch.mask[picked, :width]
            logits = model(input_ids=ids, attention_mask=batch.attention[picked, :width], use_cache=False).logits
            labels = torch.where(mask, ids, -100)[:, 1:]
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Return the best and median CPU seconds of each run. The runs alternate, so that other load affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    last: dict[str, Any] = {}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            last[name] = run()
            seconds[name].append(time.process_time() - began)
    out: dict[str, dict[str, Any]] = {}
    for name, taken in seconds.items():
        taken = sorted(taken[1:])  # the first repeat is a warm-up
        out[name] = {"best": round(taken[0], 4), "median": round(taken[len(taken) // 2], 4)}
        phases = getattr(last[name], "phases", None)
        if phases:
            whole = last[name].seconds
            shares = {phase: round(spent / whole, 3) for phase, spent in phases.items()}
            out[name]["share of wall time"] = shares | {"rest": round(1 - sum(shares.values()), 3)}
    return out


def memory(file: str, micro_tokens: int) -> float:
    """Return the increase in peak memory of this process during a step, in MiB, after a warm-up step on a few rows."""
    with open(file, "rb") as stream:
        few, many = pickle.load(stream)
    policy = af.tiny.policy("calculator")
    optimizer = af.adamw(policy, 1e-12)
    af.ppo_step(policy, optimizer, few, af.PPOConfig(old_logprobs="engine", micro_tokens=256))
    before = peak()
    af.ppo_step(policy, optimizer, many, af.PPOConfig(old_logprobs="engine", micro_tokens=micro_tokens, max_lag=None))
    return peak() - before


def peak() -> float:
    """Return the peak resident memory in MiB. getrusage would also count the peak of the parent process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def memories() -> dict[str, dict[str, float]]:
    """Measure the peak memory of steps with growing batches.

    Rows are sampled instead of copied, because the step would share the computation of equal rows. Sampling raises the
    peak of this process, so the step runs in a separate process.
    """
    policy = af.tiny.policy("calculator")
    few = asyncio.run(collect(policy, 64))
    out: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rows in (64, 256, 1024, 4096):
            file = Path(folder) / f"{rows}.pickle"
            file.write_bytes(pickle.dumps((few, asyncio.run(collect(policy, rows)))))
            for name, micro_tokens in (("micro_tokens=1536", "1536"), ("one micro-batch", str(1 << 30))):
                command = [sys.executable, __file__, "--memory-of", str(file), micro_tokens]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                out.setdefault(name, {})[str(rows)] = round(float(done.stdout), 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--memory", action="store_true", help="peak memory of a step instead of its time")
    parser.add_argument("--memory-of", nargs=2, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.memory_of is not None:
        print(memory(given.memory_of[0], int(given.memory_of[1])))
        return
    if given.memory:
        print(json.dumps({"benchmark": "update", "MiB above the peak before": memories()}, indent=1))
        return

    policy = af.tiny.policy("calculator")
    batch = asyncio.run(collect(policy, given.rows))
    judged = af.tiny.policy("calculator", value_head=True)
    reference = judged.reference()
    returns = torch.where(batch.mask, batch.rewards[:, None].expand(batch.ids.shape), 0.0)
    full = batch.replace(returns=returns, values=torch.zeros_like(returns))
    # With this tiny learning rate, AdamW does the usual work but the weights are practically equal in all repeats.
    mine, theirs = af.adamw(policy, 1e-12), torch.optim.AdamW(policy.model.parameters(), lr=1e-12, fused=True)
    judging = af.adamw(judged, 1e-12)
    # The batch is sampled once and becomes stale, but negligibly at a learning rate of 1e-12.
    step = {"minibatch": 32, "old_logprobs": "engine", "max_lag": None}
    runs: dict[str, Callable[[], Any]] = {
        "ppo_step": lambda: af.ppo_step(policy, mine, batch, af.PPOConfig(**step)),
        "ppo_step, old logprobs computed again": lambda: af.ppo_step(
            policy, mine, batch, af.PPOConfig(minibatch=32, old_logprobs="recompute", max_lag=None)
        ),
        "ppo_step, reference and value": lambda: af.ppo_step(
            judged, judging, full, af.PPOConfig(kl_coef=0.01, **step), reference=reference
        ),
        "padded": lambda: supervised(policy, theirs, batch, by_length=False),
        "sorted": lambda: supervised(policy, theirs, batch, by_length=True),
    }
    seconds = measure(runs, given.repeats)
    mine_best = seconds["ppo_step"]["best"]
    with_both = seconds["ppo_step, reference and value"]["best"]
    ratios = {
        "padded": round(mine_best / seconds["padded"]["best"], 3),
        "sorted": round(mine_best / seconds["sorted"]["best"], 3),
        "with reference and value": round(with_both / seconds["padded"]["best"], 3),
    }
    result = {
        "benchmark": "update",
        "rows": len(batch),
        "tokens": int(batch.lengths.sum()),
        "action tokens": int(batch.mask.sum()),
        "width": int(batch.ids.shape[1]),
        "cpu seconds": seconds,
        "ratios": ratios,
        "bars": BARS,
        "met": {name: ratios[name] <= bar for name, bar in BARS.items()},
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load": [round(x, 2) for x in os.getloadavg()],
        },
    }
    print(json.dumps(result, indent=1))
    print("; ".join(f"{name} {ratio} (bar {BARS[name]})" for name, ratio in ratios.items()), file=sys.stderr)
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
