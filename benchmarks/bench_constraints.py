"""Benchmark constrained sampling: CPU milliseconds per token of `LocalEngine`, beside other sampling. Writes JSON.

    make bench-constraints         # or: python benchmarks/bench_constraints.py --policy ~/.cache/agentfly_kit/smollm2

The chains sample random tokens at a high temperature, so that few of them end before the limit. `call` is a call of one
of ten tools, whose argument is a long text, and `json` is a list of objects. `compile` is the time of a new schema. The
candidates alternate; the fastest round of each is reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import time
from pathlib import Path

import agentfly_kit as af
from agentfly_kit.engines.local.grammar import Grammars
from agentfly_kit.samples import Constraint, TurnRequest

TASK = af.Task("bench", ({"role": "user", "content": "?"},))
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 10_000}}, "required": ["text"]}
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "ok": {"type": "boolean"}},
}
ITEM["required"] = list(ITEM["properties"])
LIST = {"type": "array", "items": {**ITEM, "additionalProperties": False}, "minItems": 1000}


def constraints(chat: af.Chat) -> dict[str, Constraint | None]:
    patterns = [chat.call_pattern(f"tool_{i}") or ("", "") for i in range(10)]
    calls = tuple((before, json.dumps(TEXT), after) for before, after in patterns)
    return {"unconstrained": None, "call": Constraint(calls), "json": Constraint((("", json.dumps(LIST)),))}


async def sample(policy: af.Policy, constraint: Constraint | None, given: argparse.Namespace) -> float:
    """Return the CPU milliseconds per token of concurrent chains, with a warm grammar and an empty cache."""
    engine = af.LocalEngine(policy, slots=given.chains)
    if constraint is not None:
        engine.check_constraint(constraint)
    ids, sampling = policy.chat.prompt(TASK.messages), af.Sampling(temperature=100.0, max_tokens=given.tokens)
    began = time.process_time()
    samples = await asyncio.gather(
        *(
            engine.sample(ids, sampling, i, request=TurnRequest(TASK, 0, f"chain-{i}", constraint=constraint))
            for i in range(given.chains)
        )
    )
    return (time.process_time() - began) * 1e3 / sum(len(sample.ids or ()) for sample in samples)


def compile_time(policy: af.Policy, constraint: Constraint) -> float:
    """Return the CPU milliseconds until the first matchers of a schema."""
    grammars = Grammars(policy.chat, policy.vocab_size)
    began = time.process_time()
    grammars.matchers(constraint)
    return (time.process_time() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="calculator", help="name of a shipped policy, or a folder")
    parser.add_argument("--chains", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    folder = Path(given.policy).expanduser()
    policy = af.Policy.load(folder) if folder.is_dir() else af.tiny.policy(given.policy)
    candidates = constraints(policy.chat)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(given.repeats):
        for name, constraint in candidates.items():
            times[name].append(asyncio.run(sample(policy, constraint, given)))
    best = {name: min(found) for name, found in times.items()}
    print(json.dumps({
        "vocabulary": policy.vocab_size,
        "chains": given.chains,
        "ms per token": {name: round(ms, 4) for name, ms in best.items()},
        "ratio": {name: round(ms / best["unconstrained"], 2) for name, ms in best.items()},
        "compile, ms": {name: round(compile_time(policy, c), 1) for name, c in candidates.items() if c is not None},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
