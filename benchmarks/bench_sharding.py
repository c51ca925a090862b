"""Memory and time of `ppo_step` with weights distributed over processes, relative to one process.

    make bench-sharding                                 # 40M parameters; 1, 2 and 3 processes on CPUs (gloo)
    make bench-sharding ARGS="--size 150M --processes 1 2 --lora 16"

Each process makes four steps with the same batch of 8 rows of 128 tokens, one row per forward pass, and returns freed
memory to the system. For each number of processes, the output has, for the process with the largest value: the peak of
its resident set from its start and during the steps in MiB, the fraction of the weights that it holds, the median of
the last three steps in seconds, and the norm of the gradient in the last step, which must be equal up to rounding.
Processes share the cores of the machine, so the time shows the overhead and no speedup if there are fewer cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_sizes import EXACT_MEMORY, random_policy


def peak_mib() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def child(size: str, lora: int, out: Path) -> None:
    """Make the steps in one process, and write the measurements to a file."""
    import accelerate
    import torch

    import agentfly_kit as af
    from agentfly_kit.policy.adapter import with_lora

    accelerator = accelerate.Accelerator(cpu=True)
    policy = random_policy("qwen3", size)
    if lora:
        policy = af.Policy(with_lora(policy.model, lora), policy.chat)
    whole = sum(p.numel() for p in policy.parameters())
    policy = policy.shard(accelerator)
    local: Any = list(policy.parameters())
    held = sum((p.to_local() if accelerator.num_processes > 1 else p).numel() for p in local)
    generator, chains = torch.Generator().manual_seed(0), []
    for i in range(8):
        ids = torch.randint(10, 4000, (128,), generator=generator).tolist()
        task = af.Task(str(i), ({"role": "user", "content": "?"},))
        chains.append(af.from_tokens(ids, [0] + [1] * 127, [-8.0] * 128, task=task, chain=i, reward=0.0))
    batch = af.collate(chains, [float(i % 3 - 1) for i in range(8)])
    optimizer, config = af.adamw(policy, 1e-4), af.PPOConfig(old_logprobs="recompute", micro_tokens=128, max_lag=None)
    started = peak_mib()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        stats = af.ppo_step(policy, optimizer, batch, config)
        seconds.append(time.perf_counter() - began)
    during = peak_mib()
    measured = {
        "mib": max(started, during), "mib_steps": during, "share": held / whole,
        "seconds": statistics.median(seconds[1:]), "grad_norm": stats.grad_norm,
    }  # fmt: skip
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(measured))
    accelerator.end_training()


def measure(size: str, lora: int, processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        given = [__file__, "--child", folder, "--size", size, "--lora", str(lora)]
        environment = (
            os.environ
            | EXACT_MEMORY
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
        )
        subprocess.run([*launch, *given], env=environment, check=True, stdout=sys.stderr)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: round(max(each[name] for each in found), 4) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="40M")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0 trains all weights")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.size, args.lora, args.child)
        return
    found = {n: measure(args.size, args.lora, n) for n in args.processes}
    first = found[args.processes[0]]
    ratios = {
        n: {k: round(each[k] / first[k], 3) for k in ("mib", "mib_steps", "seconds")} for n, each in found.items()
    }
    print(json.dumps({"size": args.size, "lora": args.lora, "processes": found, "relative": ratios}, indent=2))


if __name__ == "__main__":
    main()
